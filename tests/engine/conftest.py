# SPDX-License-Identifier: Apache-2.0
"""Engines of this folder's tests start quickly, also those that no pool has made."""

import pytest

from tests.engine.pool import shorten_starts


@pytest.fixture(scope="session", autouse=True)
def short_starts() -> None:
    shorten_starts()
