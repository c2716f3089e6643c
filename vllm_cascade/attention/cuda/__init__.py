# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA by Triton kernels, part of full graphs in decode."""

SWITCH = "VLLM_CASCADE_LAUNCHES"
"""Environment variable; ``python``: no layer repeats launches in C (``repeats.py``)."""
