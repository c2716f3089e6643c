# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which tokens stay cached, independent of pages, devices and vLLM."""
