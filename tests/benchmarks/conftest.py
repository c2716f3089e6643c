# SPDX-License-Identifier: Apache-2.0
"""Benchmarks add controls to the registry of their process, which tests share."""

from collections.abc import Iterator

import pytest

from vllm_cascade.policies.registry import POLICIES


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Whatever a test adds to the registry is gone after it."""
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)
