# SPDX-License-Identifier: Apache-2.0
"""Evicted units that wait in host memory and come back when a query asks for them."""
