# SPDX-License-Identifier: Apache-2.0
"""Units of several tokens on the real engine: against the oracle, and the same in any company.

Prompts end inside a unit and decoding goes on from there, so that what a stride leaves half filled
is completed token by token.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.model_executor.models.utils import extract_layer_index

from tests.cpp_library import CALLS
from tests.engine.pool import EnginePool, generated, pool_usage, preempted, prompt_logprobs
from tests.engine.test_against_oracle import PYTORCH, assert_like, run_oracle
from tests.engine.test_batching import engine, forced
from tests.engine.test_prefix_caching import ask
from tests.oracle.settings import oracle_settings
from tests.oracle.unit_cases import CASES, UnitCase

BY_ID = {case.id: case for case in CASES}
BLOCK = 32  # of `engine_pool`
FAST = [
    ("cascade-16-each", {}),
    ("cascade-8-overflow", {}),
    ("h2o-8-normalise", {}),
    ("beehive-8-each", {}),
    ("cascade-8-gated", dict(PYTORCH)),
]


BEGINS = {"dgc-1-each": 5000, "dgc-text-8": 2000}
"""Where a text begins, if not at the book's first word: there two scores are within rounding."""


def decode(llm: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """All tokens, and their log-probabilities from the second one on."""
    params = SamplingParams(
        max_tokens=max_tokens, logprobs=0, prompt_logprobs=0, temperature=0.0, ignore_eos=True
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    decoded = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    return [*prompt, *tokens], prompt_logprobs(output) + decoded


def kept_sets(llm: Any) -> dict[int, list[list[list[int]]]]:
    """What was recorded: by end of a stride, layer and head set, as the oracle has it."""
    (snapshots,) = llm.collective_rpc("kv_policy_kept")
    snapshots.sort(key=lambda s: (s["end"], extract_layer_index(s["layer"])))
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
    calls = sum(CALLS.values())
    llm.collective_rpc("kv_policy_trace", args=(1,))
    prompt = book_tokens[BEGINS.get(case.id, 0) :][: case.prompt]
    tokens, logprobs = decode(llm, prompt, case.total - case.prompt + 1)
    kept = kept_sets(llm)
    (after,) = llm.collective_rpc("kv_policy_counters")
    done = {key: after[key] - before[key] for key in after}

    truth = run_oracle(case.settings, tokens[: case.total], prompt_len=case.prompt)
    assert_like(truth, logprobs[:-1], kept)
    stride = oracle_settings(case.settings)["stride"]
    assert done["strides"] == -(-case.prompt // stride) + case.total - case.prompt == len(kept)
    assert done["tokens"] == case.total
    assert done["evicted_tokens"] == case.total - len(truth.kept[case.total][0][0]) > case.total / 2
    native = 0 if PYTORCH & env.items() else done["strides"] * len(truth.kept[case.total])
    assert sum(CALLS.values()) - calls == native
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


# ------------------------------------------------------------------------ in any company

UNIT_16 = {"num_subcaches": 2, "prefill_stride": 64, "unit": 16}
UNIT_32_EACH = {**UNIT_16, "unit": 32, "head_policy": "per_kv_head"}
LENGTHS = [1, 15, 16, 17, 31, 63, 64, 65, 100, 128, 129, 300, 511, 700, 900, 1300]


def replay(
    llm: Any, prompt: list[int], each_step: Callable[[int], None] = lambda step: None
) -> tuple[list[int], list[float]]:
    """``generated`` of a request that is preempted twice."""
    params = SamplingParams(max_tokens=60, logprobs=0, temperature=0.0, ignore_eos=True)
    return generated(preempted(llm, prompt, params, each_step=each_step))


@pytest.mark.parametrize(
    "policy",
    [UNIT_16, pytest.param(UNIT_32_EACH, marks=pytest.mark.slow)],
    ids=["16", "32-each"],
)
def test_the_same_answer_in_any_company(
    policy: dict[str, Any], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """A prompt of five strides and 13 tokens, and 60 more: alone, with 16 others, replayed.

    Where the step has other tokens too, or the replayed ones at once, the model's own products of
    matrices round differently, as without units; from a snapshot and alone they are the same bytes.
    """
    in_any_company(engine(engine_pool, **policy), book_tokens, 1e-4)


def in_any_company(llm: Any, book_tokens: list[int], most: float) -> None:
    """Alone and from a snapshot the same bytes; with others and replayed, within ``most``."""
    prompt = book_tokens[2000:2333]
    ((cached, tokens, logprobs),) = ask(llm, [prompt], 60)
    assert cached == 0
    assert ask(llm, [prompt], 60) == [(320, tokens, logprobs)]
    llm.reset_prefix_cache()
    assert ask(llm, [prompt], 60) == [(0, tokens, logprobs)]
    others = [book_tokens[1000 * i :][:length] for i, length in enumerate(LENGTHS, start=3)]
    for expected in (320, 0):
        (cached, *batched), *_ = ask(llm, [prompt, *others], 60)
        assert (cached, batched[0]) == (expected, tokens)
        np.testing.assert_allclose(batched[1], logprobs, atol=most)
        llm.reset_prefix_cache()

    replayed = replay(llm, prompt)
    assert replayed[0] == tokens
    np.testing.assert_allclose(replayed[1], logprobs, atol=most)
    assert pool_usage(llm) == 0.0


OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what a request asks for, and what the oracle is told: prompts end inside a unit
    "the engine's": ({}, {"name": "cascade", "budget": 128, "num_subcaches": 2}),
    "less": ({"kv_budget": 64}, {"name": "cascade", "budget": 64, "num_subcaches": 2}),
    "sink": ({"kv_policy": "sink", "kv_budget": 80}, {"name": "sink", "budget": 80}),
    "h2o": ({"kv_policy": "h2o", "kv_budget": 96}, {"name": "h2o", "budget": 96, "window": 48}),
    "lazy": (
        {"kv_policy": "lazy", "kv_budget": 48},
        {"name": "lazy", "budget": 48, "overflow": 64, "slack": 48, "max_drop": 16},
    ),
}


def test_requests_of_their_own_in_one_batch(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Budgets and policies side by side; the decoded tokens are forced to be the book's."""
    llm = engine(engine_pool, **UNIT_16)
    length, num = 437, 90
    texts = {name: book_tokens[3000 * i :][: length + num] for i, name in enumerate(OWN)}
    params = [forced(texts[name], length, **asked) for name, (asked, _) in OWN.items()]
    prompts = [{"prompt_token_ids": text[:length]} for text in texts.values()]
    (before,) = llm.collective_rpc("kv_policy_counters")
    outputs = llm.generate(prompts, params, use_tqdm=False)
    (after,) = llm.collective_rpc("kv_policy_counters")
    evicted = 0
    for (name, (_, settings)), output in zip(OWN.items(), outputs, strict=True):
        assert generated(output)[0] == texts[name][length:]
        settings = {**settings, "prefill_stride": 64, "unit": 16}
        truth = run_oracle(settings, texts[name], prompt_len=length)
        assert_like(truth, prompt_logprobs(output) + generated(output)[1], name=name)
        steps = length + num - 1  # the last token is never attended
        evicted += steps - len(truth.kept[steps][0][0])
    assert after["evicted_tokens"] - before["evicted_tokens"] == evicted
    assert pool_usage(llm) == 0.0
