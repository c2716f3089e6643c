# SPDX-License-Identifier: Apache-2.0
"""``vllm:kv_policy_*`` after every step of an engine, against sums written down by hand.

``test_concurrency.py`` reads them from a live server. A policy that silently does nothing, the
field's most common bug (3 of the closest peer's thirteen), moves none of them; pages that are never
freed (13) show in two.
"""

import re
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool

POLICY = {"name": "sink", "budget": 96, "prefill_stride": 32}
BLOCK, LAYERS = 32, 6
FULL_PAGE = BLOCK * 2 * 2 * 64 * 4  # K and V of 2 heads of 64 fp32 numbers
OUR_PAGE = FULL_PAGE + BLOCK * 12  # and rank, born, score


def metrics(llm: Any) -> dict[str, float]:
    return {
        metric.name.removeprefix("vllm:kv_policy_"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:kv_policy_")
    }


def moved(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def test_every_step(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    llm = engine_pool.get(POLICY, max_model_len=4096, max_num_batched_tokens=256)
    before = metrics(llm)
    (counted_before,) = llm.collective_rpc("kv_policy_counters")
    prompts = {"long": 1000, "short": 20, "exact": 100}
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    for name, length in prompts.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": book_tokens[:length]}, params)
    core = llm.llm_engine.engine_core.engine_core
    seen, negative, promised = {}, False, False
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        live = [r.num_computed_tokens for r in core.scheduler.requests.values()]
        # Those that are admitted may come to hold prompt and answer, 100 tokens at most.
        most = [min(r.num_prompt_tokens + 30, 100) for r in core.scheduler.requests.values()]
        final = sum(-(-k // BLOCK) for k, n in zip(most, live, strict=True) if n)
        seen |= {r.request_id: r.num_computed_tokens for r in core.scheduler.requests.values()}
        now = metrics(llm)
        kept = [min(n, 4 + 96) for n in live]
        pages = sum(-(-k // BLOCK) for k in kept)
        full = sum(-(-n // BLOCK) for n in live)
        assert now["cached_tokens"] == sum(kept)
        assert (now["pages"], now["promised_pages"]) == (pages, final - pages)
        promised |= final > pages
        assert now["saved_bytes"] == LAYERS * (full * FULL_PAGE - pages * OUR_PAGE)
        negative |= now["saved_bytes"] < 0
    assert negative, "short requests alone cost the metadata"
    assert promised
    after = metrics(llm)
    totals = [length + 29 for length in prompts.values()]  # the last token is never attended
    assert moved(before, after, "evicted_tokens") == sum(max(n - 100, 0) for n in totals)
    strides = sum(-(-length // 32) + 29 for length in prompts.values())
    assert moved(before, after, "strides") == strides
    assert moved(before, after, "snapshot_hits") == 0
    # The workers count what they do; the scheduler counts what it asks for.
    (counted,) = llm.collective_rpc("kv_policy_counters")
    for name in ("evicted_tokens", "strides"):
        assert counted[name] - counted_before[name] == moved(before, after, name)
    names = ("cached_tokens", "pages", "promised_pages", "saved_bytes")
    assert [after[name] for name in names] == [0, 0, 0, 0]


def test_nothing_is_evicted_before_the_cache_is_full(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Peer's bugs 5 and 8: compaction before its time, more dropped than were ever computed."""
    llm = engine_pool.get(POLICY, max_model_len=4096, max_num_batched_tokens=256)
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    evicted = []
    for length in (80, 81, 82):
        before = metrics(llm)
        prompt = {"prompt_token_ids": book_tokens[:length]}
        llm.generate([prompt], params, use_tqdm=False)
        evicted.append(moved(before, metrics(llm), "evicted_tokens"))
    assert evicted == [0, 1, 2]


def test_a_replay_is_counted_again(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Peer's bug 11: after a preemption counts begin anew, and no eviction is counted twice."""
    llm = engine_pool.get(POLICY, max_model_len=4096, max_num_batched_tokens=256)
    before = metrics(llm)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    llm.llm_engine.add_request("r", {"prompt_token_ids": book_tokens[:200]}, params)
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(20):
        llm.llm_engine.step()
    (request,) = core.scheduler.requests.values()
    first = request.num_computed_tokens
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    wanted = (first - 100) + (200 + 39 - 100)
    assert moved(before, metrics(llm), "evicted_tokens") == wanted


def test_labels(engine_pool: EnginePool) -> None:
    llm = engine_pool.get(POLICY, max_model_len=4096, max_num_batched_tokens=256)
    names = {"cached_tokens", "pages", "saved_bytes", "evicted_tokens", "strides", "snapshot_hits"}
    names |= {"promised_pages", "recalled_tokens", "stored_tokens", "recall_memory_bytes"}
    names |= {"recall_memory_reserved_bytes", "recall_memory_limit_bytes"}
    assert set(metrics(llm)) == names
    for metric in llm.get_metrics():
        if re.match("vllm:kv_policy_", metric.name):
            assert set(metric.labels) == {"model_name", "engine", "policy"}
            assert metric.labels["policy"] == "sink" and metric.labels["engine"] == "0"


@pytest.mark.parametrize("policy", [None, {"name": "full"}])
def test_no_metric_without_a_policy(policy: dict | None, engine_pool: EnginePool) -> None:
    """Nor a scheduler or worker of ours: a policy that is off builds nothing (peer's bug 1)."""
    llm = engine_pool.get(policy, max_model_len=1024, max_num_batched_tokens=256)
    llm.generate(["A short one."], SamplingParams(max_tokens=3), use_tqdm=False)
    assert llm.get_metrics() and metrics(llm) == {}
    config = llm.llm_engine.vllm_config
    assert config.scheduler_config.scheduler_cls is None
    assert not config.parallel_config.worker_cls.startswith("vllm_cascade")
