# SPDX-License-Identifier: Apache-2.0
"""Recall on the real engine: against the oracle, and the same in any company."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool, counters, generated, pool_usage, prompt_logprobs
from tests.engine.test_against_oracle import MAX_ERROR, PYTORCH, assert_like, run_oracle
from tests.engine.test_batching import ForceTokens, engine, forced
from tests.engine.test_metrics import metrics
from tests.engine.test_prefix_caching import ask
from tests.engine.test_units import kept_sets, replay

BLOCK = 32
EACH = {"head_policy": "per_kv_head"}
CASCADE = {"name": "cascade", "budget": 128, "num_subcaches": 2, "prefill_stride": 64}
OVERFLOWS = {"name": "sink", "budget": 64, "prefill_stride": 64, "recall": 3, "recall_store": 128}
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
    "sink-overflows": (OVERFLOWS, 443),
    # Hundreds of stored units, in a store that overflows.
    "sink-many": (
        {
            "name": "sink",
            "budget": 32,
            "prefill_stride": 64,
            "unit": 2,
            "recall": 8,
            "recall_store": 1200,
        },
        1500,
    ),
    # The stride in which a prompt ends, inside a unit, evicts the first unit that comes back.
    "sink-grows": (OVERFLOWS, 109),
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
    # Stored rows in 8 bits: the oracle rounds the units that leave, and reads them so.
    "sink-int8": (
        {"name": "sink", "budget": 96, "prefill_stride": 64, "recall": 6, "recall_rows": "int8"},
        443,
    ),
    "cascade-each-int8": ({**CASCADE, "recall": 4, "recall_rows": "int8", **EACH}, 517),
    "dgc": ({"name": "dgc", "budget": 160, "prefill_stride": 64, "recall": 2}, 443),
}
FAST = [
    ("cascade-each", {}),
    ("sink-overflows", {}),
    ("sink-every", dict(PYTORCH)),
    ("cascade-each-int8", {}),
]


def settings_of(name: str) -> tuple[dict[str, Any], int]:
    settings, prompt = CASES[name]
    return {"unit": 16, **settings}, prompt


def read(llm: Any, text: list[int], num_prompt: int) -> list[float]:
    """Log-probabilities of a text, of which all but the prompt is decoded.

    Greedy text repeats itself, and units of equal tokens have equal keys: rounding would choose.
    """
    prompt = {"prompt_token_ids": text[:num_prompt]}
    (output,) = llm.generate([prompt], forced(text, num_prompt), use_tqdm=False)
    tokens, logprobs = generated(output)
    assert tokens == text[num_prompt:]
    return prompt_logprobs(output) + logprobs


def run_case(
    name: str, engine_pool: EnginePool, book_tokens: list[int], env: dict[str, str]
) -> None:
    settings, num_prompt = settings_of(name)
    total = max(530, num_prompt + 60)
    llm = engine_pool.get(
        {**settings, "trace": True},
        max_model_len=4096,
        max_num_batched_tokens=300,
        block_size=BLOCK,
        logits_processors=[ForceTokens],
        env=env,
    )
    before = counters(llm)
    llm.collective_rpc("kv_policy_trace", args=(1,))
    text = book_tokens[100:][: total + 1]
    logprobs = read(llm, text, num_prompt)
    kept = kept_sets(llm)
    after = counters(llm)

    truth = run_oracle(settings, text[:total], prompt_len=num_prompt, chosen=kept)
    assert_like(truth, logprobs[:-1], kept, closest=1e-7)
    if "recall_rows" in settings:
        exact = {**settings, "recall_rows": "exact"}
        other = run_oracle(exact, text[:total], prompt_len=num_prompt, chosen=kept)
        assert np.abs(np.asarray(other.logprobs) - np.asarray(truth.logprobs)).max() > 5 * MAX_ERROR
    choices, near = truth.recalls
    assert choices > 20 and near <= 0.05 * choices
    assert after["recalled_units"] - before["recalled_units"] > settings["recall"]
    assert pool_usage(llm) == 0.0


EVERY = [(name, env) for name in CASES for env in ({}, dict(PYTORCH))]


@pytest.mark.parametrize(
    ("name", "env"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one not in FAST)) for one in EVERY],
    ids=[name + "-pytorch" * bool(env) for name, env in EVERY],
)
def test_cases(
    name: str, env: dict[str, str], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    run_case(name, engine_pool, book_tokens, env)


# ------------------------------------------------------------------------ in any company

SHARED = {"num_subcaches": 2, "prefill_stride": 64, "unit": 16, "recall": 3, "recall_store": 256}
LENGTHS = [1, 17, 63, 65, 129, 300, 511, 900, 1300]


def test_the_same_answer_in_any_company(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """A prompt whose store overflows: alone, from a snapshot, with 9 others, and replayed."""
    llm = engine(engine_pool, **SHARED)
    prompt = book_tokens[2000:2653]
    ((cached, tokens, logprobs),) = ask(llm, [prompt], 60)
    assert cached == 0 and counters(llm)["recalled_units"] > 3
    assert ask(llm, [prompt], 60) == [(640, tokens, logprobs)]
    core = llm.llm_engine.engine_core.engine_core
    core.step_fn()  # workers learn of a request's end in the next step
    assert counters(llm)["stored_units"] == 16, "the snapshot's"
    assert not core.scheduler.has_requests()
    llm.reset_prefix_cache()
    core.step_fn()  # in a server, the idle engine takes it
    assert counters(llm)["stored_units"] == counters(llm)["store_bytes"] == 0
    assert ask(llm, [prompt], 60) == [(0, tokens, logprobs)]
    others = [book_tokens[1000 * i :][:length] for i, length in enumerate(LENGTHS, start=3)]
    for expected in (640, 0):
        (cached, *batched), *_ = ask(llm, [prompt, *others], 60)
        assert (cached, batched[0]) == (expected, tokens)
        np.testing.assert_allclose(batched[1], logprobs, atol=1e-4)
        llm.reset_prefix_cache()

    levels: dict[int, list[float]] = {}

    def look(step: int) -> None:
        levels[step] = [metrics(llm)[name] for name in ("recalled_tokens", "stored_tokens")]

    replayed = replay(llm, prompt, look)
    assert levels[15] == [3 * 16, 256], "the store is full"
    assert replayed[0] == tokens
    np.testing.assert_allclose(replayed[1], logprobs, atol=1e-4)
    assert pool_usage(llm) == 0.0


def test_a_request_waits_for_host_memory(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Room for half of them: answers equal solo ones, and the gauge equals the worker's bytes."""
    llm = engine(engine_pool, **SHARED, recall_memory=0.022)
    prompts = [book_tokens[700 * i :][:650] for i in range(6)]
    alone = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone += ask(llm, [prompt], 60)
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=len(alone[0][1]), temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"w{i}", {"prompt_token_ids": prompt}, params)
    waited = most = 0
    tokens = {}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        now = metrics(llm)
        waited += len(scheduler.waiting) > 0 and len(scheduler.running) > 0
        if not any(output.finished for output in outputs):  # a worker hears of ends a step later
            assert now["recall_memory_bytes"] == counters(llm)["store_bytes"]
        assert now["recall_memory_bytes"] <= now["recall_memory_limit_bytes"] <= 0.022 * 2**30
        assert now["recall_memory_reserved_bytes"] <= now["recall_memory_limit_bytes"]
        most = max(most, now["recall_memory_bytes"])
    assert waited > 10 and most > 0.5 * now["recall_memory_limit_bytes"]
    for i, (_, expected, _) in enumerate(alone):
        assert tokens[f"w{i}"] == list(expected), i
    assert pool_usage(llm) == 0.0 and now["recall_memory_reserved_bytes"] == 0


def test_many_prompts_one_after_another(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Snapshots of prompts that never return fill the bound and no more; answers stay the same."""
    llm = engine(engine_pool, **SHARED, recall_memory=0.022)
    first = book_tokens[:650]
    llm.reset_prefix_cache()
    expected = ask(llm, [first], 8)[0][1]
    one = counters(llm)["store_bytes"]
    limit = metrics(llm)["recall_memory_limit_bytes"]
    used = []
    for i in range(30):
        ask(llm, [book_tokens[700 * i + 300 :][:650]], 8)
        assert counters(llm)["store_bytes"] <= limit
        ask(llm, [[5]], 1)  # workers learn of a request's end with the next one
        used.append(counters(llm)["store_bytes"])
        assert used[-1] == metrics(llm)["recall_memory_bytes"] <= limit
    assert 30 * one > 3 * limit, "they would not fit"
    assert min(used[15:]) > 0.7 * limit, "the bound is used"
    assert ask(llm, [first], 8)[0][:2] == (0, expected), "its snapshot was dropped"
    last = [book_tokens[700 * 29 + 300 :][:650]]
    (again,) = ask(llm, last, 8)
    assert again[0] == 640, "the newest snapshots stay"
    llm.reset_prefix_cache()
    assert ask(llm, last, 8)[0][1:] == again[1:]


def test_aborts_leave_nothing_in_the_store(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """A hundred requests, each given up at another time."""
    llm = engine(engine_pool, **SHARED)
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    most = 0
    for batch in range(10):
        for i in range(10):
            begin = 150 * (10 * batch + i)
            prompt = {"prompt_token_ids": book_tokens[begin : begin + 250 + 40 * i]}
            llm.llm_engine.add_request(f"{batch}-{i}", prompt, params)
        for step in range(12):
            llm.llm_engine.step()
            if step == 6:
                most = max(most, counters(llm)["store_bytes"])
            if step > 1:
                llm.llm_engine.abort_request([f"{batch}-{step - 2}"])
        assert not llm.llm_engine.has_unfinished_requests()
    llm.reset_prefix_cache()
    ask(llm, [[5]], 1)  # workers learn of the last ones' end with the next step
    found = counters(llm)
    assert most > 0 and (found["stored_units"], found["store_bytes"]) == (0, 0)
    assert pool_usage(llm) == 0.0


def test_requests_of_their_own(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Fewer recalled units, another policy, none at all: side by side, each as the oracle says."""
    llm = engine(engine_pool, **SHARED)
    length, num = 437, 60
    asked = {
        "the engine's": ({}, {}),
        "one": ({"kv_recall": 1}, {"recall": 1}),
        "none": ({"kv_recall": 0}, {"recall": 0}),
        "sink": (
            {"kv_policy": "sink", "kv_budget": 80, "kv_recall": 2},
            {"name": "sink", "budget": 80, "recall": 2},
        ),
    }
    base = {"name": "cascade", "budget": 128, **SHARED}
    texts = {name: book_tokens[3000 * i + 50 :][: length + num] for i, name in enumerate(asked)}
    params = [forced(texts[name], length, **extra) for name, (extra, _) in asked.items()]
    prompts = [{"prompt_token_ids": text[:length]} for text in texts.values()]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for (name, (_, settings)), output in zip(asked.items(), outputs, strict=True):
        truth = run_oracle({**base, **settings}, texts[name], prompt_len=length)
        logprobs = prompt_logprobs(output) + generated(output)[1]
        assert_like(truth, logprobs, name=name, closest=None)
    assert pool_usage(llm) == 0.0
