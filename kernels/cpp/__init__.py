# SPDX-License-Identifier: Apache-2.0
"""Attention over a bounded cache in C++, compiled on the machine that runs it."""
