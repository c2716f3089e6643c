# SPDX-License-Identifier: Apache-2.0
"""Requests that start from a snapshot: the same numbers, byte for byte, as with nothing cached."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool, generated, pool_usage

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64}
STEP_TOKENS = 256

Turn = tuple[int, list[int], list[float]]


def engine(pool: EnginePool, caching: bool, **policy: Any) -> Any:
    return pool.get(
        {**POLICY, **policy},
        max_model_len=24_000,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=caching,
    )


def ask(llm: Any, prompts: list[list[int]], max_tokens: int = 20, **kwargs: Any) -> list[Turn]:
    """Cached prompt tokens, generated tokens and their log-probabilities."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, logprobs=0, ignore_eos=True, **kwargs
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [(output.num_cached_tokens, *generated(output)) for output in outputs]


def chat(llm: Any, tokens: list[int], turns: int) -> list[Turn]:
    """A user who says 170 tokens and gets 20 back, again and again."""
    history: list[int] = []
    answers = []
    for turn in range(turns):
        history += tokens[300 * turn : 300 * turn + 170]
        (answer,) = ask(llm, [history])
        history += answer[1]
        answers.append(answer)
    return answers


def counters(llm: Any) -> dict[str, int]:
    return dict(vars(llm.llm_engine.engine_core.engine_core.scheduler.snapshot_counters))


@pytest.mark.parametrize(
    ("policy", "turns"),
    [
        ({}, 10),
        ({"head_policy": "per_kv_head", "overflow": 5}, 4),
        pytest.param({"name": "beehive", "budget": 100}, 10, marks=pytest.mark.slow),
        ({"name": "h2o", "budget": 100, "normalise": True}, 4),
    ],
    ids=["cascade", "cascade-heads-overflow", "beehive", "h2o-normalise"],
)
def test_a_chat_is_byte_equal_with_and_without(
    policy: dict[str, Any], turns: int, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Up to 1,900 tokens through a cache of 132: wrapped many times where snapshots are."""
    cold = chat(engine(engine_pool, False, **policy), book_tokens, turns)
    llm = engine(engine_pool, True, **policy)
    warm = chat(llm, book_tokens, turns)
    again = chat(llm, book_tokens, turns)
    assert [turn[0] for turn in cold] == [0] * turns
    lengths = [190 * turn + 170 for turn in range(turns)]
    ends = [(length - 1) // 64 * 64 for length in lengths]
    assert [turn[0] for turn in warm] == [0, *ends[:-1]]
    assert [turn[0] for turn in again] == ends
    for other in (warm, again):
        assert [turn[1] for turn in other] == [turn[1] for turn in cold]
        assert [turn[2] for turn in other] == [turn[2] for turn in cold]
    seen = counters(llm)
    assert (seen["hits"], seen["stored"]) == (2 * turns - 1, turns)
    assert seen["hit_tokens"] == sum(ends[:-1]) + sum(ends)
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:prefix_cache_hits"] == seen["hit_tokens"]
    assert metrics["vllm:prefix_cache_queries"] == 2 * sum(lengths)
    assert pool_usage(llm) == 0.0


def test_kept_prompts_of_different_lengths_share_snapshots(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Longer and shorter than what is kept, with answers far beyond the first eviction."""
    shared = book_tokens[:300]
    prompts = [shared[:150], [*shared[:140], 5], shared, [*shared[:280], *book_tokens[900:1300]]]
    prompts += [[*prompts[-1], *book_tokens[2000:2060]]]
    kept = {"keep_prompt": 200, "budget": 64}
    cold = [ask(engine(engine_pool, False, **kept), [prompt], 90)[0] for prompt in prompts]
    llm = engine(engine_pool, True, **kept)
    warm = [ask(llm, [prompt], 90)[0] for prompt in prompts]
    assert [turn[1:] for turn in warm] == [turn[1:] for turn in cold]
    assert [turn[0] for turn in warm] == [0, 128, 128, 256, 640]
    (counted,) = llm.collective_rpc("kv_policy_counters")
    assert counted["evicted_tokens"] > 0
    assert pool_usage(llm) == 0.0


def test_both_go_on_from_one_snapshot(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Several requests copy the same snapshot in one step, and go different ways together."""
    prompt = book_tokens[4000:4700]
    prompts = [[*prompt, *book_tokens[k : k + 90]] for k in range(0, 900, 300)]
    cold = [ask(engine(engine_pool, False), [p], 30)[0] for p in prompts]
    llm = engine(engine_pool, True)
    ask(llm, [prompt], 300)  # the request that left the snapshot decodes far past it
    together = ask(llm, prompts, 30)
    assert [turn[0] for turn in together] == [640] * 3
    for warm, alone in zip(together, cold, strict=True):
        assert warm[1] == alone[1]
        # Batched with others, so rounding differs, but nothing else does.
        assert warm[2] == pytest.approx(alone[2], abs=1e-4)
    assert [turn[1:] for turn in (ask(llm, [p], 30)[0] for p in prompts)] == [c[1:] for c in cold]


def test_prompt_logprobs_are_computed_and_not_skipped(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool, True)
    prompt = book_tokens[:300]
    ask(llm, [prompt])
    (turn,) = ask(llm, [prompt], prompt_logprobs=0)
    assert turn[0] == 0
    assert ask(llm, [prompt])[0][0] == 256


def test_a_reset_forgets(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    llm = engine(engine_pool, True)
    prompt = book_tokens[7000:7300]
    ask(llm, [prompt])
    assert ask(llm, [prompt])[0][0] == 256
    assert llm.reset_prefix_cache()
    assert ask(llm, [prompt])[0][0] == 0


def test_the_pool_may_be_as_small_as_one_request(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Six pages, five of them a request's: snapshots come and go, answers stay the same."""
    settings = {"max_model_len": 24_000, "max_num_batched_tokens": STEP_TOKENS}
    cold = chat(engine(engine_pool, False), book_tokens, 5)
    llm = engine_pool.get(POLICY, **settings, num_gpu_blocks_override=11)
    warm = chat(llm, book_tokens, 5)
    assert [turn[1:] for turn in warm] == [turn[1:] for turn in cold]
    assert sum(turn[0] > 0 for turn in warm) == 4
    tiny = engine_pool.get(POLICY, **settings, num_gpu_blocks_override=6)
    none = chat(tiny, book_tokens, 5)
    assert [turn[1:] for turn in none] == [turn[1:] for turn in cold]
    assert counters(tiny)["stored"] < 5 and counters(tiny)["skipped"] > 0
