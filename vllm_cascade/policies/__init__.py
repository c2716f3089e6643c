# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which tokens stay cached. They know nothing of pages, devices or vLLM."""
