# SPDX-License-Identifier: Apache-2.0
"""Attention over a bounded cache: what a step does (metadata) and how (one file a device)."""
