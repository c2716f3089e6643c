# SPDX-License-Identifier: Apache-2.0
"""Pages of a bounded cache: their layout, their owners, their positions, copies of their states."""
