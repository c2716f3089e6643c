# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks give the log-probabilities of the oracle, hence of one rank."""

import os

import pytest

from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import CASCADE, compare

SINK = {"name": "sink", "budget": 128, "prefill_stride": 64}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(
            {**CASCADE, "prefill_stride": 64, "head_reduction": "median"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {**CASCADE, "prefill_stride": 64, "head_policy": "per_kv_head"}, marks=pytest.mark.slow
        ),
        {**CASCADE, "prefill_stride": 64},
        pytest.param(
            {**CASCADE, "prefill_stride": 64, "head_reduction": "max"}, marks=pytest.mark.slow
        ),
        pytest.param({**CASCADE, "prefill_stride": 64, "unit": 16}, marks=pytest.mark.slow),
        pytest.param(
            {**CASCADE, "prefill_stride": 64, "unit": 16, "recall": 3}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                **CASCADE,
                "prefill_stride": 64,
                "unit": 16,
                "recall": 3,
                "head_policy": "per_kv_head",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(SINK, marks=pytest.mark.slow),
        pytest.param({**SINK, "unit": 16, "recall": 3}, marks=pytest.mark.slow),
    ],
    ids=[
        "homogeneous: scores are gathered",
        "per KV head: ranks decide alone",
        "the mean over each rank's heads is exchanged",
        "the maximum, too",
        "units: their mass is exchanged",
        "recall: what is asked for is gathered",
        "recall per KV head",
        "no scores: C++",
        "no scores: C++, and what is asked for is gathered",
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
    of_scores = {"VLLM_CASCADE_CPU": "native"} if policy["name"] == "sink" else {}
    llm = engine_pool.get(
        {**policy, "trace": True},
        env={"VLLM_CPU_OMP_THREADS_BIND": cores, **of_scores},
        max_model_len=4096,
        max_num_batched_tokens=300,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    first_rank, second_rank = llm.collective_rpc("kv_policy_counters")
    first_rank.pop("recalled_units", None)  # per KV head: each rank's own
    second_rank.pop("recalled_units", None)
    assert first_rank == second_rank
    compare(llm, policy, book_tokens[:1500])
