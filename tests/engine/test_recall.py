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
CASCADE = {"name": "cascade", "budget": 128, "num_subcaches": 2, "prefill_stride": 64}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # settings, and the prompt's tokens: most end inside a unit
    "sink": ({"name": "sink", "budget": 96, "prefill_stride": 64, "recall": 3}, 443),
    "sink-each": ({"name": "sink", "budget": 64, "prefill_stride": 32, "recall": 4, **EACH}, 517),
    "cascade": ({**CASCADE, "recall": 4}, 517),
    "cascade-each": ({**CASCADE, "prefill_stride": 256, "recall": 2, **EACH}, 700),
    # Units of other sizes, and one of a page.
    "cascade-8": ({**CASCADE, "budget": 96, "num_subcaches": 3, "unit": 8, "recall": 5}, 330),
    "h2o-32": ({"name": "h2o", "budget": 160, "prefill_stride": 32, "unit": 32, "recall": 2}, 443),
    # A store that overflows; choices at every token, and rarely; all queries ask, or one.
    "sink-overflows": (
        {"name": "sink", "budget": 64, "prefill_stride": 64, "recall": 3, "recall_store": 128},
        443,
    ),
    "sink-every": (
        {"name": "sink", "budget": 64, "prefill_stride": 16, "recall": 3, "recall_every": 1},
        619,
    ),
    "cascade-rarely": (
        {**CASCADE, "recall": 4, "recall_every": 48, "recall_queries": 1, "overflow": 32},
        300,
    ),
    # More units come back than the policy itself holds.
    "window": ({"name": "window", "budget": 32, "prefill_stride": 32, "recall": 6}, 443),
    "lazy": (
        {
            "name": "lazy",
            "budget": 96,
            "overflow": 48,
            "slack": 32,
            "max_drop": 16,
            "prefill_stride": 64,
            "recall": 3,
            "recall_queries": 64,
        },
        443,
    ),
    "beehive": (
        {
            "name": "beehive",
            "budget": 128,
            "window": 32,
            "threshold": 96,
            "stride": 3,
            "prefill_stride": 48,
            "recall": 3,
        },
        517,
    ),
    "dgc": ({"name": "dgc", "budget": 160, "prefill_stride": 64, "recall": 2}, 443),
}
FAST = [("cascade-each", {}), ("sink-overflows", {}), ("sink-every", dict(PYTORCH))]


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

    truth = run_oracle(settings, text[:total], prompt_len=num_prompt, chosen=kept)
    error = np.abs(np.asarray(logprobs[:-1]) - np.asarray(truth.logprobs))
    print(
        f"max {error.max():.2e}, mean {error.mean():.2e}, closest {truth.closest_contest:.1e}, "
        f"choices {truth.recalls}"
    )
    assert list(kept) == list(truth.kept)
    wrong = [end for end in kept if kept[end] != truth.kept[end]]
    assert not wrong, f"kept sets differ at {len(wrong)} of {len(kept)} ends, first {wrong[0]}"
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert truth.closest_contest > 1e-7, "a tie that rounding decides: choose another text"
    choices, near = truth.recalls
    assert choices > 20 and near <= 0.05 * choices
    assert after["recalled_units"] - before["recalled_units"] > settings["recall"]
    assert pool_usage(llm) == 0.0


@pytest.mark.parametrize(("name", "env"), FAST, ids=[name for name, _ in FAST])
def test_cases(
    name: str, env: dict[str, str], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    run_case(name, engine_pool, book_tokens, env)


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, PYTORCH], ids=["native", "pytorch"])
@pytest.mark.parametrize("name", CASES)
def test_all_cases(
    name: str, env: dict[str, str], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    run_case(name, engine_pool, book_tokens, env)
