# SPDX-License-Identifier: Apache-2.0
"""vLLM's own drafters under a policy, beside the same engine without them; prints what it found.

Run by ``test_speculation.py`` in an interpreter of its own: these drafters load numba, after which
no other engine of the process can start. numba also sets how many threads OpenMP has.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["NUMBA_NUM_THREADS"] = "1"

from tests.conftest import MODEL
from tests.engine.pool import EnginePool, generated

POLICIES: dict[str, dict[str, Any]] = {
    "cascade": {"name": "cascade", "budget": 128, "prefill_stride": 64},
    "heads": {"name": "cascade", "budget": 128, "prefill_stride": 64, "head_policy": "per_kv_head"},
    "h2o": {"name": "h2o", "budget": 128, "prefill_stride": 64},
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "suffix": {"num_speculative_tokens": 6},
    "draft_model": {"num_speculative_tokens": 4, "model": str(MODEL)},  # the target itself
}


def answers(llm: Any) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    phrase = [11, 52, 97, 203, 344, 18, 25]
    prompts = [phrase * 40, [*range(30, 90), *phrase * 9]]
    params = SamplingParams(max_tokens=120, temperature=0, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [generated(output) for output in outputs]


def processes(ranks: int, stages: int) -> dict[str, Any]:
    """Settings of an engine of so many processes."""
    if ranks * stages == 1:
        return {}
    first, *others = sorted(os.sched_getaffinity(0))
    cores = [str(first), str(others[0] if others else first)] * (ranks * stages)
    return {
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores[: ranks * stages])},
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": stages,
        "distributed_executor_backend": "mp",
    }


def over(method: str, ranks: int) -> dict[str, Any]:
    """What vLLM wants to be told of a draft model over several ranks."""
    return {"draft_tensor_parallel_size": ranks} if method == "draft_model" else {}


def main(
    method: str,
    policy: str = "cascade",
    ranks: str = "1",
    stages: str = "1",
    before_drafts: Callable[[], None] = lambda: None,
) -> None:
    """Print ``RESULT`` and what was found.

    Args:
        before_drafts: called when the engine without drafts has answered.
    """
    pool, settings = EnginePool(), {"max_model_len": 2048}
    truth = answers(pool.get(POLICIES[policy], **settings))
    before_drafts()
    llm = pool.get(
        POLICIES[policy],
        speculative_config={"method": method, **METHODS[method], **over(method, int(ranks))},
        **settings,
        **processes(int(ranks), int(stages)),
    )
    found = answers(llm)
    pairs = [
        (x, y)
        for (_, a), (_, b) in zip(truth, found, strict=True)
        for x, y in zip(a, b, strict=True)
    ]
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    result = {
        "same": [tokens for tokens, _ in truth] == [tokens for tokens, _ in found],
        "difference": max(abs(x - y) for x, y in pairs),
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens"],
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"],
        "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }
    pool.close()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
