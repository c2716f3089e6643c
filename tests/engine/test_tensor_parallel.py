# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks give the log-probabilities of the oracle, hence of one rank."""

import os

import pytest

from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import CASCADE, compare


@pytest.mark.parametrize(
    "policy",
    [
        {**CASCADE, "prefill_stride": 64, "head_reduction": "median"},
        {**CASCADE, "prefill_stride": 64, "head_policy": "per_kv_head"},
        pytest.param({**CASCADE, "prefill_stride": 64, "unit": 16}, marks=pytest.mark.slow),
    ],
    ids=[
        "homogeneous: scores are gathered",
        "per KV head: ranks decide alone",
        "units: their mass is gathered",
    ],
)
def test_two_ranks(
    policy: dict,
    engine_pool: EnginePool,
    book_tokens: list[int],
) -> None:
    # vLLM wants a NUMA node for each rank, or to be told which cores are whose.
    first, *others = sorted(os.sched_getaffinity(0))
    cores = f"{first}|{others[0] if others else first}"
    llm = engine_pool.get(
        {**policy, "trace": True},
        env={"VLLM_CPU_OMP_THREADS_BIND": cores},
        max_model_len=4096,
        max_num_batched_tokens=300,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    counters = llm.collective_rpc("kv_policy_counters")
    assert len(counters) == 2 and counters[0] == counters[1]
    compare(llm, policy, book_tokens[:1500])
