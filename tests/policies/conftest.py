# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the policies' tests."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Without garbage collections an object is freed only if no reference cycle holds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
