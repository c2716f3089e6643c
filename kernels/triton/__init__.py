# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one operation a file."""
