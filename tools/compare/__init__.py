# SPDX-License-Identifier: Apache-2.0
"""Compares what two checkouts compute, byte by byte; run as ``python -m tools.compare OTHER``."""
