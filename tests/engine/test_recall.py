# SPDX-License-Identifier: Apache-2.0
"""Recall on the real engine: against the oracle, and the same in any company."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool, pool_usage, prompt_logprobs
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH, run_oracle
from tests.engine.test_batching import ForceTokens
from tests.engine.test_units import generated, kept_sets

BLOCK = 32
EACH = {"head_policy": "per_kv_head"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # settings, and the prompt's tokens: most end inside a unit
    "sink": ({"name": "sink", "budget": 96, "prefill_stride": 64, "recall": 3}, 443),
    "sink-each": ({"name": "sink", "budget": 64, "prefill_stride": 32, "recall": 4, **EACH}, 517),
    "cascade": (
        {"name": "cascade", "budget": 128, "num_subcaches": 2, "prefill_stride": 64, "recall": 4},
        517,
    ),
    "cascade-each": (
        {
            "name": "cascade",
            "budget": 128,
            "num_subcaches": 2,
            "prefill_stride": 256,
            "recall": 2,
            **EACH,
        },
        700,
    ),
}


def settings_of(name: str) -> tuple[dict[str, Any], int]:
    settings, prompt = CASES[name]
    return {"unit": 16, **settings}, prompt


def read(llm: Any, text: list[int], num_prompt: int) -> list[float]:
    """Log-probabilities of a text, of which all but the prompt is decoded.

    Greedy text repeats itself, and units of equal tokens have equal keys: rounding would choose.
    """
    params = SamplingParams(
        max_tokens=len(text) - num_prompt,
        logprobs=0,
        prompt_logprobs=0,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"forced": text[num_prompt:]},
    )
    prompt = {"prompt_token_ids": text[:num_prompt]}
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    tokens, logprobs = generated(output)
    assert tokens == text[num_prompt:]
    return prompt_logprobs(output) + logprobs


def run_case(
    name: str, engine_pool: EnginePool, book_tokens: list[int], env: dict[str, str]
) -> None:
    settings, num_prompt = settings_of(name)
    total = 760
    llm = engine_pool.get(
        {**settings, "trace": True},
        max_model_len=4096,
        max_num_batched_tokens=300,
        block_size=BLOCK,
        logits_processors=[ForceTokens],
        env=env,
    )
    (before,) = llm.collective_rpc("kv_policy_counters")
    llm.collective_rpc("kv_policy_trace", args=(1,))
    text = book_tokens[100:][: total + 1]
    logprobs = read(llm, text, num_prompt)
    kept = kept_sets(llm)
    (after,) = llm.collective_rpc("kv_policy_counters")

    truth = run_oracle(settings, text[:total], prompt_len=num_prompt)
    error = np.abs(np.asarray(logprobs[:-1]) - np.asarray(truth.logprobs))
    print(f"max {error.max():.2e}, mean {error.mean():.2e}, closest {truth.closest_contest:.1e}")
    assert list(kept) == list(truth.kept)
    wrong = [end for end in kept if kept[end] != truth.kept[end]]
    assert not wrong, f"kept sets differ at {len(wrong)} of {len(kept)} ends, first {wrong[0]}"
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert truth.closest_contest > 1e-7, "a tie that rounding decides: choose another text"
    assert after["recalled_units"] - before["recalled_units"] > settings["recall"]
    assert pool_usage(llm) == 0.0


@pytest.mark.parametrize("env", [{}, PYTORCH], ids=["native", "pytorch"])
@pytest.mark.parametrize("name", CASES)
def test_cases(
    name: str, env: dict[str, str], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    run_case(name, engine_pool, book_tokens, env)
