# SPDX-License-Identifier: Apache-2.0
"""What runs engines, servers and load, and what a measurement was taken on."""
