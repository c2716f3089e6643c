# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA by Triton kernels, part of full graphs in decode."""
