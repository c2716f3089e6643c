# SPDX-License-Identifier: Apache-2.0
"""Units of several tokens on the real engine: against the oracle, and the same in any company.

Prompts end inside a unit and decoding goes on from there, so that what a stride leaves half filled
is completed token by token.
"""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool, pool_usage, prompt_logprobs
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH, run_oracle
from tests.engine.test_batching import engine
from tests.oracle.settings import oracle_settings
from tests.oracle.unit_cases import CASES, UnitCase
from vllm_cascade.kernels.cpp.library import load

BY_ID = {case.id: case for case in CASES}
BLOCK = 32  # of `engine_pool`
FAST = [
    ("cascade-16-each", {}),
    ("cascade-8-overflow", {}),
    ("h2o-8-normalise", {}),
    ("beehive-8-each", {}),
    ("dgc-text-16", {}),
    ("cascade-8-gated", dict(PYTORCH)),
]


def decode(llm: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """All tokens, and their log-probabilities from the second one on."""
    params = SamplingParams(
        max_tokens=max_tokens, logprobs=0, prompt_logprobs=0, temperature=0.0, ignore_eos=True
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    generated = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    return [*prompt, *tokens], prompt_logprobs(output) + generated


def kept_sets(llm: Any) -> dict[int, list[list[list[int]]]]:
    """What was recorded: by end of a stride, layer and head set, as the oracle has it."""
    (snapshots,) = llm.collective_rpc("kv_policy_kept")
    snapshots.sort(key=lambda s: (s["end"], int(s["layer"].split(".")[2])))
    kept: dict[int, list[list[list[int]]]] = {}
    for s in snapshots:
        kept.setdefault(s["end"], []).append(s["tokens"])
    return kept


def run_case(
    case: UnitCase,
    engine_pool: EnginePool,
    book_tokens: list[int],
    env: dict[str, str],
    **changed: Any,
) -> None:
    """A prompt of the book and greedy tokens, of which all but the last one are attended."""
    llm = engine_pool.get(
        {**case.settings, "trace": True, **changed},
        max_model_len=4096,
        max_num_batched_tokens=300,
        block_size=BLOCK,
        env=env,
    )
    (before,) = llm.collective_rpc("kv_policy_counters")
    calls = sum(load().calls.values())
    llm.collective_rpc("kv_policy_trace", args=(1,))
    tokens, logprobs = decode(llm, book_tokens[: case.prompt], case.total - case.prompt + 1)
    kept = kept_sets(llm)
    (after,) = llm.collective_rpc("kv_policy_counters")
    done = {key: after[key] - before[key] for key in after}

    truth = run_oracle(case.settings, tokens[: case.total], prompt_len=case.prompt)
    assert truth.closest_contest > 1e-6, "a tie that rounding decides: choose another text"
    error = np.abs(np.asarray(logprobs[:-1]) - np.asarray(truth.logprobs))
    print(f"max {error.max():.2e}, mean {error.mean():.2e}, closest {truth.closest_contest:.1e}")
    assert list(kept) == list(truth.kept)
    wrong = [end for end in kept if kept[end] != truth.kept[end]]
    assert not wrong, f"kept sets differ at {len(wrong)} of {len(kept)} ends, first {wrong[0]}"
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR

    stride = oracle_settings(case.settings)["stride"]
    assert done["strides"] == -(-case.prompt // stride) + case.total - case.prompt == len(kept)
    assert done["tokens"] == case.total
    assert done["evicted_tokens"] == case.total - len(truth.kept[case.total][0][0]) > case.total / 2
    assert done["moved_reads"] > 0
    native = 0 if PYTORCH & env.items() else done["strides"] * len(truth.kept[case.total])
    assert sum(load().calls.values()) - calls == native
    assert pool_usage(llm) == 0.0


@pytest.mark.parametrize(("name", "env"), FAST, ids=[name for name, _ in FAST])
def test_cases(
    name: str, env: dict[str, str], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    run_case(BY_ID[name], engine_pool, book_tokens, env)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_ID if (name, {}) not in FAST])
def test_all_cases(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    run_case(BY_ID[name], engine_pool, book_tokens, {})


@pytest.mark.parametrize(
    "name", ["cascade-32-all", pytest.param("h2o-32-normalise", marks=pytest.mark.slow)]
)
def test_a_page(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """The oracle has units of a block's 32 tokens."""
    assert BY_ID[name].settings["unit"] == BLOCK
    run_case(BY_ID[name], engine_pool, book_tokens, {}, unit="page")
