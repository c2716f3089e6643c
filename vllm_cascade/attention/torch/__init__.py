# SPDX-License-Identifier: Apache-2.0
"""Attention and eviction in plain PyTorch: the readable reference."""
