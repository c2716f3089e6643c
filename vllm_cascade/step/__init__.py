# SPDX-License-Identifier: Apache-2.0
"""A scheduling step: its plan, rows, positions and metadata, for every device."""
