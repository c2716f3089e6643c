# SPDX-License-Identifier: Apache-2.0
"""Recall on the Triton kernels, in the interpreter: engines against the oracle, and in company.

As in ``test_triton_backend.py`` the CPU backend is given the CUDA backend's code, here also its
rings, whose rows lie in ordinary memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool, counters, generated, pool_usage, prompt_logprobs
from tests.engine.test_against_oracle import MAX_ERROR, assert_like, run_oracle
from tests.engine.test_batching import ForceTokens, forced
from tests.engine.test_prefix_caching import Turn, ask
from tests.engine.test_recall import read
from tests.engine.test_units import kept_sets
from vllm_cascade.recall.rings import Rings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_backend")]

TOKENS = np.random.default_rng(3).integers(1, 500, 700).tolist()
EACH = {"head_policy": "per_kv_head"}
CASCADE = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 4, "unit": 4}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    # settings, the prompt's tokens and all: prompts end inside a unit, stores overflow
    "cascade-4": (
        {**CASCADE, "prefill_stride": 16, "recall": 2, "recall_store": 24, "recall_every": 3},
        101,
        165,
    ),
    "sink-16": (
        {"name": "sink", "budget": 32, "unit": 16, "prefill_stride": 32, "recall": 2, **EACH},
        149,
        215,
    ),
    # The stride in which the prompt ends evicts the first units that come back; few queries ask.
    "sink-4-grows": (
        {"name": "sink", "budget": 32, "num_sinks": 0, "unit": 4, "prefill_stride": 16,
         "recall": 5, "recall_store": 36, "recall_every": 1, "recall_queries": 3},
        38,
        100,
    ),
    "cascade-heads-4": (
        {**CASCADE, **EACH, "prefill_stride": 48, "recall": 3, "overflow": 8},
        117,
        170,
    ),
    "h2o-8": (
        {"name": "h2o", "budget": 48, "unit": 8, "prefill_stride": 16, "recall": 2, **EACH},
        133,
        190,
    ),
    "lazy-4": (
        {"name": "lazy", "budget": 32, "overflow": 16, "slack": 8, "max_drop": 8, "unit": 4,
         "prefill_stride": 16, "recall": 2},
        90,
        160,
    ),
    "beehive-4": (
        {"name": "beehive", "budget": 48, "window": 8, "threshold": 32, "stride": 3, "unit": 4,
         "prefill_stride": 16, "recall": 2},
        121,
        190,
    ),
    "dgc-4": (
        {"name": "dgc", "budget": 40, "unit": 4, "prefill_stride": 8, "recall": 2},
        101,
        160,
    ),
}  # fmt: skip


def engine(pool: EnginePool, policy: dict[str, Any], model: Path, **kwargs: Any) -> Any:
    """An engine of its own: the pool's others use the PyTorch path."""
    pool.close()
    return pool.get(
        {"recall_store": 512, **policy, "trace": True},
        model,
        max_model_len=1024,
        max_num_batched_tokens=64,
        block_size=16,
        logits_processors=[ForceTokens],
        **{"max_num_seqs": 4, "enable_prefix_caching": False, **kwargs},
    )


def check(llm: Any, settings: dict[str, Any], text: list[int], prompt: int, model: Path) -> None:
    """A text, of which all but the prompt is decoded, against the oracle."""
    llm.collective_rpc("kv_policy_trace", args=(1,))
    logprobs = read(llm, [*text, 7], prompt)
    kept = kept_sets(llm)
    truth = run_oracle(
        {"recall_store": 512, **settings}, text, model, prompt_len=prompt, chosen=kept
    )
    by_text = settings["name"] == "dgc"  # whose sums of scores are exactly equal, or far apart
    closest = None if by_text else 1e-7
    assert_like(truth, logprobs[:-1], kept, closest=closest, mean_error=MAX_ERROR)
    choices, near = truth.recalls
    assert choices > 10 and near <= 0.05 * choices
    assert pool_usage(llm) == 0.0


def stores_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker._stores


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, engine_pool: EnginePool, llama: Path) -> None:
    settings, prompt, total = CASES[name]
    llm = engine(engine_pool, settings, llama)
    assert isinstance(stores_of(llm), Rings)
    check(llm, settings, TOKENS[:total], prompt, llama)
    assert counters(llm)["recalled_units"] > settings["recall"]
    engine_pool.close()


def test_requests_of_their_own(engine_pool: EnginePool, llama: Path) -> None:
    """Side by side, with fewer recalled units, another policy, none at all: as the oracle says.

    Rows come and go, more requests than rings; in the end no ring is in use.
    """
    base = {**CASCADE, "prefill_stride": 16, "recall": 2, "recall_store": 48}
    llm = engine(engine_pool, base, llama)
    asked: list[tuple[dict[str, Any], dict[str, Any], int, int]] = [
        ({}, {}, 73, 20),
        ({"kv_recall": 1}, {"recall": 1}, 90, 9),
        ({"kv_recall": 0}, {"recall": 0}, 60, 30),
        (
            {"kv_policy": "sink", "kv_budget": 20, "kv_recall": 2},
            {"name": "sink", "budget": 20, "recall": 2},
            85,
            14,
        ),
        ({}, {}, 57, 12),
        ({"kv_recall": 1}, {"recall": 1}, 66, 8),
    ]
    texts = [TOKENS[90 * i :][: a + b] for i, (*_, a, b) in enumerate(asked)]
    params = [forced(text, a, **extra) for text, (extra, _, a, _) in zip(texts, asked, strict=True)]
    lengths = [a for *_, a, _ in asked]
    prompts = [{"prompt_token_ids": text[:a]} for text, a in zip(texts, lengths, strict=True)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for text, (_, settings, a, _), output in zip(texts, asked, outputs, strict=True):
        truth = run_oracle({**base, **settings}, text, llama, prompt_len=a)
        logprobs = prompt_logprobs(output) + generated(output)[1]
        assert_like(truth, logprobs, name=f"{settings}", closest=None, mean_error=MAX_ERROR)
    assert pool_usage(llm) == 0.0 and len(stores_of(llm).rings) <= 4
    llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert counters(llm)["stored_units"] == 0
    engine_pool.close()


def test_requests_that_do_not_evict_need_no_ring(engine_pool: EnginePool, llama: Path) -> None:
    """With two rings, two requests evict at a time; short ones and others run beside them."""
    base = {**CASCADE, "prefill_stride": 16, "recall": 2, "recall_store": 48}
    ring = 2 * 2 * 48 * 2 * 16 * 4  # layers, heads, tokens, keys and values of 16 numbers
    llm = engine(engine_pool, {**base, "recall_memory": 2.7 * ring / 2**30}, llama, max_num_seqs=5)
    assert len(stores_of(llm)._free) == 2
    core = llm.llm_engine
    asked = {"long": (70, 8, None), "short": (20, 8, None), "plain": (70, 8, 0), "next": (66, 9, 2),
             "waits": (50, 6, None)}  # fmt: skip
    for name, (length, num, recall) in asked.items():
        more = {} if recall is None else {"kv_recall": recall}
        params = SamplingParams(
            max_tokens=num, logprobs=0, temperature=0.0, ignore_eos=True, extra_args=more
        )
        core.add_request(name, {"prompt_token_ids": TOKENS[:length]}, params)
    scheduler = core.engine_core.engine_core.scheduler
    found, together = {}, set()
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                found[output.request_id] = generated(output)
        together.add(frozenset(request.request_id.split("-")[0] for request in scheduler.running))
        assert len(stores_of(llm).rings) <= 2
    assert frozenset(["long", "short", "plain", "next"]) in together
    assert not any({"long", "next", "waits"} <= names for names in together)
    llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(stores_of(llm)._free) == 2, "all were given back"
    for name, (length, num, recall) in asked.items():
        settings = base if recall is None else {**base, "recall": recall}
        tokens, logprobs = found[name]
        truth = run_oracle(settings, TOKENS[:length] + tokens, llama, prompt_len=length)
        assert len(tokens) == num
        np.testing.assert_allclose(logprobs, truth.logprobs[length - 1 :], atol=2e-4, err_msg=name)
    engine_pool.close()


def check_turn(
    llm: Any, prompt: list[int], cached: int, settings: dict[str, Any], model: Path
) -> Turn:
    """A prompt of which so many tokens come from a snapshot, and 12 tokens more."""
    (turn,) = ask(llm, [prompt], 12)
    found, generated_, logprobs = turn
    assert found == cached
    truth = run_oracle(settings, prompt + generated_, model, prompt_len=len(prompt))
    error = np.abs(np.asarray(logprobs) - np.asarray(truth.logprobs)[len(prompt) - 1 :])
    print(f"{cached} cached: max {error.max():.1e}, choices {truth.recalls}")
    assert error.max() < 2e-4 and ("recall" in settings) == (truth.recalls[0] > 3)
    return turn


@pytest.mark.parametrize("heads", ["homogeneous", "per_kv_head"])
def test_snapshots_keep_units(heads: str, engine_pool: EnginePool, llama: Path) -> None:
    """Requests that start from them recall what was evicted before, alone and in a batch."""
    settings = {
        **CASCADE,
        "prefill_stride": 16,
        "recall": 2,
        "recall_store": 64,
        "recall_every": 3,
        "head_policy": heads,
    }
    llm = engine(engine_pool, settings, llama, enable_prefix_caching=True)
    prompts = [TOKENS[:90], TOKENS[:70] + TOKENS[300:320], TOKENS[:70] + TOKENS[400:410]]
    turns = zip(prompts, (0, 0, 64), strict=True)
    alone = [check_turn(llm, prompt, cached, settings, llama) for prompt, cached in turns]
    together = ask(llm, prompts, 12)
    assert [turn[0] for turn in together] == [80, 80, 64]
    for one, other in zip(alone, together, strict=True):
        assert one[1] == other[1]
        np.testing.assert_allclose(one[2], other[2], atol=1e-4)
    assert pool_usage(llm) == 0.0
    stores = stores_of(llm)
    assert sum(len(kept.chunks) for kept in stores.kept.values()) > 2
    llm.reset_prefix_cache()
    for _ in range(2):  # workers learn of it with the next step
        ask(llm, [[5]], 1)
    assert not stores.kept and counters(llm)["stored_units"] == 0
    engine_pool.close()
