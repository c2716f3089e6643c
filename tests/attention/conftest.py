# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's code in tests of layers; its kernels are interpreted."""

from typing import Any

import pytest

from tests.attention import test_paged
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.repeats import SWITCH


def use_triton(
    patch: pytest.MonkeyPatch, builder: type = CUDABuilder, layers: Any = test_paged
) -> None:
    """Layers of ``test_paged``, or of ``test_windows``, that are created from here on."""
    patch.setattr(layers, "CPUKVPolicyImpl", TritonKVPolicyImpl)
    patch.setattr(layers, "CPUBuilder", builder)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)


@pytest.fixture
def launched_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every layer itself, as by the first one of a step (``test_repeat.py`` has the others)."""
    monkeypatch.setenv(SWITCH, "python")
