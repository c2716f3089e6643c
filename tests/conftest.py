# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures. Engines are slow to start, so tests that can share one do (``engine_pool``)."""

import os
import sys

# Before vLLM is imported: quiet, offline, engines in this process (tests/engine/pool.py).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; `make test` runs two workers
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Before Triton is imported, by whatever test comes first: kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from tests.interpreter import quicken

if TYPE_CHECKING:
    from tests.engine.pool import EnginePool

quicken()

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "benchmarks/inputs/models/books-5m"
BOOK = next(iter(sorted((ROOT / "benchmarks/inputs/books").glob("*.txt"))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Beside the next vLLM, leave out what cannot run there."""
    from tests.beside import IS_BORROWED, why_not

    for item in items if IS_BORROWED else ():
        if why := why_not(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after each test, and let each test's variables reach vLLM.

    vLLM writes to it when it reads some configurations: DeepSeek V3.2's, for one, disables
    torch.compile for every later engine of the process. It reads it no more once an engine has
    started, so a test behind one in the same process would set variables without effect.
    """
    if envs := sys.modules.get("vllm.envs"):
        envs.disable_envs_cache()
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def book_tokens() -> list[int]:
    """The shipped book as token ids of the shipped model."""
    from transformers import AutoTokenizer

    assert BOOK is not None, "benchmarks/inputs/books is empty"
    return AutoTokenizer.from_pretrained(MODEL)(BOOK.read_text())["input_ids"]


@pytest.fixture(scope="session")
def engine_pool() -> Iterator["EnginePool"]:
    from tests.engine.pool import EnginePool

    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; without a package index its tests are skipped."""
    from benchmarks import models

    try:
        return models.real_model()
    except models.ModelUnavailable as error:
        pytest.skip(str(error))
