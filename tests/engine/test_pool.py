# SPDX-License-Identifier: Apache-2.0
"""The tests' own engine pool."""

import pytest
import vllm
from pytest import MonkeyPatch
from vllm import envs

from tests.engine.pool import EnginePool


def test_environment_reaches_an_engine_after_another_one(monkeypatch: MonkeyPatch) -> None:
    """vLLM reads its environment once an engine runs, and no more until that one is taken down.

    Whether a test that left its engine behind ran in the same process is chance under xdist.
    """
    seen = []

    class Engine:
        def __init__(self, **settings: object) -> None:
            seen.append(envs.VLLM_CPU_OMP_THREADS_BIND)

    monkeypatch.setattr(vllm, "LLM", Engine)
    envs.enable_envs_cache()
    EnginePool().get(None, env={"VLLM_CPU_OMP_THREADS_BIND": "0|0"})
    assert seen == ["0|0"]


@pytest.mark.parametrize("bound", ["0", "1"])
def test_each_tests_variables_reach_vllm(bound: str, monkeypatch: MonkeyPatch) -> None:
    """Also behind a test whose engine froze them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    assert bound == envs.VLLM_CPU_OMP_THREADS_BIND
    envs.enable_envs_cache()
