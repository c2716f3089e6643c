# SPDX-License-Identifier: Apache-2.0
"""Attention on CPUs: C++ where a compiler is, PyTorch elsewhere."""
