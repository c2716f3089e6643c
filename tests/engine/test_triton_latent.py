# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on the Triton kernels, interpreted, against the oracle.

Whole engines whose CPU backend is given the CUDA backend's code, as in ``test_triton_families.py``,
which runs these families, too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import graph_profile
from tests.engine.pool import EnginePool
from tests.engine.test_batching import ForceTokens
from tests.engine.test_families import POLICIES
from tests.engine.test_full_attention import experts_in_one_group
from tests.engine.test_recall_families import POLICIES as RECALLING
from tests.engine.test_recall_families import check_replayed
from tests.engine.test_recall_families import compare as compare_recall
from tests.engine.test_triton_families import agrees, check_company, check_decoding, triton_backend
from tests.engine.test_triton_processes import check as in_processes
from tests.oracle.families import run_family, shallow, write_family
from tests.oracle.full_attention import OWN_MODULES
from vllm_cascade.attention.cpu.backend import CPUKVPolicyBackend
from vllm_cascade.attention.cuda.backend import CUDAKVPolicyBackend
from vllm_cascade.recall.rings import Rings

__all__ = ["experts_in_one_group", "triton_backend"]  # fixtures


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("make_stores", "count_stores"):
        monkeypatch.setattr(CPUKVPolicyBackend, name, getattr(CUDAKVPolicyBackend, name))
    yield


def test_deepseek(engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of CUDA graphs is profiled first, on a cache of the runner's own specs."""
    found = graph_profile.turn_on(monkeypatch.setattr)
    family = shallow(OWN_MODULES["deepseek-v2"])
    path = write_family(tmp_path, family)
    check_decoding(engine_pool, path, family, POLICIES["cascade"], prompt_len=130, num=6)
    assert found == [{"CUDABuilder"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("deepseek-v3", "units"),
        ("deepseek-v2", "h2o"),
        ("deepseek-v2", "sink"),
        ("deepseek-v3", "cascade"),
    ],
)
def test_policies(family: str, policy: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    path = write_family(tmp_path, OWN_MODULES[family])
    check_company(agrees(engine_pool, path, family, POLICIES[policy], prompt_len=170))
    engine_pool.close()


@pytest.mark.slow
def test_chunks_at_once(engine_pool: EnginePool, tmp_path: Path) -> None:
    """Without a trace all strides of a chunk are one launch."""
    family = OWN_MODULES["deepseek-v2"]
    path, settings = write_family(tmp_path, family), POLICIES["sink"] | {"prefill_stride": 32}
    check_decoding(engine_pool, path, family, settings, prompt_len=700, num=61)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sink", "cascade-heads"])
def test_recall(policy: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """Units of latent rows, judged by the whole rows."""
    family, settings, prompt = OWN_MODULES["deepseek-v3"], RECALLING[policy], 301
    path = write_family(tmp_path, family)
    engine_pool.close()
    llm = engine_pool.get(
        {**settings, "trace": True},
        path,
        max_model_len=2048,
        max_num_batched_tokens=100,
        skip_tokenizer_init=True,
        logits_processors=[ForceTokens],
    )
    core = llm.llm_engine.engine_core.engine_core
    assert isinstance(core.model_executor.driver_worker.worker._stores, Rings)

    def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
        return run_family(path, family, tokens, prompt, settings, kept)

    compare_recall(
        llm, "deepseek-v3", truth_of, settings, native=False, prompt=prompt, total=prompt + 45
    )
    check_company(llm)
    check_replayed(llm)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cascade", "cascade-heads"])
def test_two_ranks(policy: str) -> None:
    """Each has the latents of all tokens and half of the heads; both keep the same tokens."""
    found = in_processes(POLICIES[policy], {"tensor_parallel_size": 2}, "deepseek-v2")
    first, second = found["counters"]
    assert first["evicted_tokens"] == second["evicted_tokens"] > 30
