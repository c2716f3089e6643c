# SPDX-License-Identifier: Apache-2.0
"""vLLM's own drafters under a policy, beside the same engine without them; prints what it found.

Run by ``test_speculation.py`` in an interpreter of its own: these drafters load numba, after which
no other engine of the process can start.
"""

import json
import sys
from typing import Any

import tests.conftest  # noqa: F401 - sets the environment
from tests.engine.pool import EnginePool

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64}


def answers(llm: Any) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    phrase = [11, 52, 97, 203, 344, 18, 25]
    prompts = [phrase * 40, [*range(30, 90), *phrase * 9]]
    params = SamplingParams(max_tokens=120, temperature=0, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def main(method: str) -> None:
    pool = EnginePool()
    truth = answers(pool.get(POLICY, max_model_len=2048))
    drafter = {"method": method, "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    llm = pool.get(POLICY, max_model_len=2048, speculative_config=drafter)
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
        "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }
    pool.close()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
