# SPDX-License-Identifier: Apache-2.0
"""Requests with budgets and policies of their own, side by side, each against the oracle."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.pool import EnginePool, pool_usage, prompt_logprobs
from tests.engine.test_against_oracle import assert_like, run_oracle
from tests.engine.test_batching import ForceTokens, forced

POLICY = {"name": "cascade", "budget": 128, "num_subcaches": 4, "prefill_stride": 64}
ASKED: dict[str, dict[str, Any]] = {
    "the engine's": {},
    "half": {"kv_budget": 64},
    "sink": {"kv_policy": "sink", "kv_budget": 100},
    "window": {"kv_policy": "window"},
    "lazy": {"kv_policy": "lazy", "kv_budget": 60},
    "h2o": {"kv_policy": "h2o", "kv_budget": 96},
    "h2o-small": {"kv_policy": "h2o", "kv_budget": 50},
    "beehive": {"kv_policy": "beehive"},
}
ORACLE = {
    name: {
        "name": asked.get("kv_policy", "cascade"),
        "budget": asked.get("kv_budget", 128),
        "prefill_stride": 64,
        "head_policy": "homogeneous",
    }
    for name, asked in ASKED.items()
}
ORACLE["the engine's"]["num_subcaches"] = ORACLE["half"]["num_subcaches"] = 4
# The paper's theorem at a budget of 128: one in 5.33 tokens is the window.
ORACLE["beehive"] |= {"window": 24, "stride": 5, "threshold": 104}


def engine(pool: EnginePool) -> Any:
    return pool.get(
        POLICY,
        max_model_len=4096,
        max_num_batched_tokens=600,
        logits_processors=[ForceTokens],
    )


def test_in_one_batch_each_is_its_own_oracles(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Prompts of 1,000 tokens, read in one batch, and 150 decoded ones, in steps of eight rows.

    The decoded tokens are forced to be the book's, so that the oracle can score them: to it they
    are a stride of one each, which a prompt's end in the middle of the text makes them.
    """
    llm = engine(engine_pool)
    length, decoded = 1000, 150
    texts = {name: book_tokens[3000 * i :][: length + decoded] for i, name in enumerate(ASKED)}
    params = [forced(texts[name], length, **asked) for name, asked in ASKED.items()]
    prompts = [{"prompt_token_ids": text[:length]} for text in texts.values()]
    (before,) = llm.collective_rpc("kv_policy_counters")
    outputs = llm.generate(prompts, params, use_tqdm=False)
    (after,) = llm.collective_rpc("kv_policy_counters")
    for name, output in zip(ASKED, outputs, strict=True):
        text = texts[name]
        assert list(output.outputs[0].token_ids) == text[length:]
        decode = [
            entry[token].logprob
            for token, entry in zip(text[length:], output.outputs[0].logprobs, strict=True)
        ]
        truth = run_oracle(ORACLE[name], text, prompt_len=length)
        assert_like(truth, prompt_logprobs(output) + decode, name=name)
    schedules = [schedule_of(llm, asked) for asked in ASKED.values()]
    steps = length + decoded - 1  # the last token is sampled and never inserted
    evicted = sum(steps - schedule.count_at(steps) for schedule in schedules)
    assert after["evicted_tokens"] - before["evicted_tokens"] == evicted
    assert pool_usage(llm) == 0.0


def schedule_of(llm: Any, asked: dict[str, Any]) -> Any:
    from vllm_cascade.engine.lookup import requests_of

    return requests_of(llm.llm_engine.vllm_config).schedule(asked)


def test_pages_held_are_those_of_the_requests_budget(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool)
    pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
    held = {}
    for name in ("the engine's", "half", "h2o-small"):
        params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args=ASKED[name])
        prompt = {"prompt_token_ids": book_tokens[:900]}
        llm.llm_engine.add_request(name, prompt, params)
        usage = []
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            usage.append(round(pool_usage(llm) * pages))
        held[name] = max(usage)
    # 4 sinks and 128, 64 or 50 tokens, in pages of 32.
    assert held == {"the engine's": 5, "half": 3, "h2o-small": 2}


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"kv_budget": 256}, "set it to at most 128"),
        ({"kv_budget": 100}, "set it to 96 or 128"),
        ({"kv_policy": "full"}, "choose from window, sink, cascade"),
        ({"kv_bugdet": 64}, "did you mean 'kv_budget'"),
    ],
)
def test_the_front_end_refuses_before_anything_is_queued(
    extra_args: dict[str, Any], message: str, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool)
    params = SamplingParams(max_tokens=2, extra_args=extra_args)
    with pytest.raises(VLLMValidationError, match=message):
        llm.generate([{"prompt_token_ids": book_tokens[:20]}], params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
