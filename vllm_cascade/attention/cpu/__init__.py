# SPDX-License-Identifier: Apache-2.0
"""Attention on CPUs: C++ if a compiler is available, else PyTorch."""
