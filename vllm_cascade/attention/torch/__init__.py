# SPDX-License-Identifier: Apache-2.0
"""Attention of a stride in plain PyTorch: the readable reference, on any device."""
