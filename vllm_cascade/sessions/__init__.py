# SPDX-License-Identifier: Apache-2.0
"""Sessions: states of finished requests, kept in host memory and on disk for the next turn."""
