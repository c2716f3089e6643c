# SPDX-License-Identifier: Apache-2.0
"""Engines of this folder's tests start quickly, also those that no pool has made."""

from pathlib import Path

import pytest

from tests.conftest import MODEL
from tests.engine.cuda_backend import use_cuda_backend
from tests.engine.pool import shorten_starts
from tests.oracle.random_models import write_llama


@pytest.fixture(scope="session", autouse=True)
def short_starts() -> None:
    shorten_starts()


@pytest.fixture
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_backend(monkeypatch.setattr)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, small enough for Triton's interpreter."""
    folder = tmp_path_factory.mktemp("llama")
    return write_llama(folder, num_layers=2, tokenizer_from=MODEL, head_dim=16)
