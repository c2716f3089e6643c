# SPDX-License-Identifier: Apache-2.0
"""Prompts that stay in the cache, on the engine: every policy against the oracle."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.pool import (
    EnginePool,
    counters,
    generated,
    pool_usage,
    preempted,
    prompt_logprobs,
)
from tests.engine.test_against_oracle import assert_like, run_oracle
from tests.engine.test_batching import ForceTokens, forced
from tests.engine.test_units import kept_sets
from tests.oracle.settings import with_prompt
from vllm_cascade.engine.lookup import requests_of

DECODED = 110
EACH = {"head_policy": "per_kv_head"}
POLICY = {
    "name": "cascade",
    "budget": 64,
    "num_subcaches": 4,
    "prefill_stride": 32,
    "keep_prompt": 96,
}
BEEHIVE = {"window": 12, "stride": 5, "threshold": 52}
ASKED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # The prompt's tokens, what the request asks for, and the other settings of its oracle.
    "the engine's": (300, {}, {}),
    "short": (50, {}, {}),
    "less": (200, {"kv_keep_prompt": 30, "kv_budget": 32}, {"keep_prompt": 30, "budget": 32}),
    "none": (200, {"kv_keep_prompt": 0}, {"keep_prompt": 0}),
    "sink": (77, {"kv_policy": "sink", "kv_budget": 40}, {"name": "sink", "budget": 40}),
    "window": (120, {"kv_policy": "window"}, {"name": "window"}),
    "lazy": (60, {"kv_policy": "lazy", "kv_budget": 30}, {"name": "lazy", "budget": 30}),
    "h2o": (90, {"kv_policy": "h2o", "kv_budget": 50}, {"name": "h2o", "budget": 50}),
    "beehive": (110, {"kv_policy": "beehive"}, {"name": "beehive", **BEEHIVE}),
}


def engine(pool: EnginePool, policy: dict[str, Any] = POLICY) -> Any:
    return pool.get(
        policy, max_model_len=4096, max_num_batched_tokens=600, logits_processors=[ForceTokens]
    )


def read(llm: Any, texts: list[list[int]], lengths: list[int], asked: list[dict]) -> list[Any]:
    """Log-probabilities of texts, of which all but the prompts is decoded, side by side."""
    params = [
        forced(text, length, **extra_args)
        for text, length, extra_args in zip(texts, lengths, asked, strict=True)
    ]
    prompts = [
        {"prompt_token_ids": text[:length]} for text, length in zip(texts, lengths, strict=True)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert pool_usage(llm) == 0.0
    return [np.asarray(prompt_logprobs(one) + generated(one)[1]) for one in outputs]


@pytest.mark.slow
def test_requests_of_every_policy_in_one_batch(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Prompts that are longer and shorter than what is kept; alone, the numbers are the same."""
    llm = engine(engine_pool)
    lengths = [length for length, _, _ in ASKED.values()]
    texts = [book_tokens[3000 * i :][: length + DECODED] for i, length in enumerate(lengths)]
    asked = [extra_args for _, extra_args, _ in ASKED.values()]
    before = counters(llm)["evicted_tokens"]
    together = read(llm, texts, lengths, asked)
    evicted = counters(llm)["evicted_tokens"] - before
    requests, seen = requests_of(llm.llm_engine.vllm_config), 0
    for i, (name, (length, extra_args, changes)) in enumerate(ASKED.items()):
        settings = {**POLICY, "head_policy": "homogeneous", **changes}
        truth = run_oracle(with_prompt(settings, length), texts[i], prompt_len=length)
        assert_like(truth, together[i], name=name)
        steps = len(texts[i]) - 1  # the last token is sampled and never inserted
        seen += steps - requests.schedule(extra_args, length).count_at(steps)
        (last,) = [line for end, line in truth.kept.items() if end == steps]
        kept = min(length, settings["keep_prompt"])
        assert all(own[:kept] == list(range(kept)) for layer in last for own in layer)
        assert len(last[0][0]) < steps, "nothing was evicted"
    assert evicted == seen > 0
    for i in (0, 1, 4):
        (alone,) = read(llm, texts[i : i + 1], lengths[i : i + 1], asked[i : i + 1])
        np.testing.assert_allclose(alone, together[i], atol=1e-4)


def test_a_preempted_request_keeps_its_prompt_only(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Generated tokens, which are computed again with the prompt, are evicted as before."""
    llm, length = engine(engine_pool), 50
    text = book_tokens[9000 : 9000 + length + DECODED]
    (whole,) = read(llm, [text], [length], [{}])
    params = SamplingParams(
        max_tokens=DECODED,
        logprobs=0,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"forced": text[length:]},
    )
    before = counters(llm)["evicted_tokens"]
    again = preempted(llm, text[:length], params, at=(90,))
    np.testing.assert_allclose(generated(again)[1], whole[length - 1 :], atol=1e-4)
    # 50 of the prompt and 64 more are cached; evictions up to the 139th token are done twice.
    assert counters(llm)["evicted_tokens"] - before == (159 - 114) + (139 - 114)


CASES: dict[str, dict[str, Any]] = {
    "h2o": {
        "name": "h2o",
        "budget": 60,
        "normalise": True,
        "overflow": 5,
        "prefill_stride": 32,
        "keep_prompt": 70,
        **EACH,
    },
    "dgc": {
        "name": "dgc",
        "budget": 60,
        "order": "importance",
        "prefill_stride": 64,
        "keep_prompt": 70,
    },
    "dgc-cluster": {
        "name": "dgc",
        "budget": 60,
        "importance": "cluster",
        "prefill_stride": 64,
        "keep_prompt": 70,
        **EACH,
    },
    "random": {"name": "random", "budget": 60, "prefill_stride": 32, "keep_prompt": 70, **EACH},
    "beehive": {
        "name": "beehive",
        "budget": 64,
        **BEEHIVE,
        "log_n": True,
        "prefill_stride": 32,
        "keep_prompt": 70,
    },
    "recall": {
        "name": "cascade",
        "budget": 64,
        "num_subcaches": 2,
        "unit": 8,
        "recall": 2,
        "prefill_stride": 32,
        "keep_prompt": 72,
        **EACH,
    },
}


LONG = ("dgc", "random", "beehive")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in CASES]
)
def test_kept_tokens_are_the_oracles(
    name: str, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Of a long prompt the first 70, of a short one all, in every layer, head set and step."""
    policy = CASES[name]
    llm = engine(engine_pool, {**policy, "trace": True})
    for length, begin in ((200, 0), (45, 4000)):
        text = book_tokens[begin : begin + length + DECODED]
        if name == "dgc-cluster":  # keys of equal tokens are equally near (test_clusters)
            text = np.random.default_rng(length).permutation(4000)[: len(text)].tolist()
        before = counters(llm)["evicted_tokens"]
        llm.collective_rpc("kv_policy_trace", args=(1,))
        (logprobs,) = read(llm, [text], [length], [{}])
        kept = kept_sets(llm)
        settings = with_prompt(policy, length)
        chosen = kept if "recall" in policy else None
        truth = run_oracle(settings, text, prompt_len=length, chosen=chosen)
        assert_like(truth, logprobs, name=f"{name} {length}")
        unit, steps = policy.get("unit", 1), len(text) - 1  # the last token is never inserted
        assert kept == {end: layers for end, layers in truth.kept.items() if end <= steps}
        first = -(-min(length, policy["keep_prompt"]) // unit) * unit
        for end, layers in kept.items():
            start = list(range(min(first, end)))
            assert all(own[: len(start)] == start for layer in layers for own in layer)
        assert len(kept[steps][0][0]) < steps and counters(llm)["evicted_tokens"] - before >= 40
