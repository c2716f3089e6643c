# SPDX-License-Identifier: Apache-2.0
"""Attention over a bounded KV cache: shared interfaces, and one package per implementation."""
