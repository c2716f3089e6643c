# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, requests that cannot fit, a killed worker, SIGTERM, and what comes after."""

import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
import torch
from vllm import SamplingParams

from tests.engine import async_cpu
from tests.engine.pool import EnginePool, pool_usage
from tests.engine.server import FORKED_VLLM, Server

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64}
FLAGS = ["--kv-policy", "cascade", "--kv-budget", "128", "--block-size", "32", "--enforce-eager"]
FLAGS += ["--kv-policy-config", '{"prefill_stride": 64}', "--max-model-len", "20000"]
FLAGS += [
    "--kv-recall",
    "0",
    "--max-num-batched-tokens",
    "256",
    "--kv-cache-memory-bytes",
    str(32 << 20),
]


@pytest.fixture(params=["sync", "async"])
def llm(
    request: pytest.FixtureRequest, engine_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    engine_pool.close()
    if request.param == "async":
        async_cpu.turn_on(monkeypatch.setattr)
    yield engine_pool.get(
        POLICY, max_model_len=8192, max_num_batched_tokens=256, num_gpu_blocks_override=41
    )
    engine_pool.close()


def null_pages(worker: Any) -> list[torch.Tensor]:
    """Every layer's page 0, its tail of metadata included."""
    pages = []
    for layer in worker._attention_layers().values():
        page = layer.kv_cache[0]
        size = layer.kv_cache.stride(0)
        pages.append(page.as_strided((size,), (1,)).clone())
    return pages


def test_random_aborts(llm: Any, request: pytest.FixtureRequest, book_tokens: list[int]) -> None:
    """In prefill, in decode and in the queue; the others answer as if nothing had happened."""
    rng = random.Random(3)
    engine = llm.llm_engine
    is_async = request.node.callspec.params["llm"] == "async"
    assert engine.vllm_config.scheduler_config.async_scheduling == is_async
    assert type(engine.engine_core.engine_core.scheduler).__name__.startswith("Async") == is_async
    asks = {
        f"r{i}": (book_tokens[700 * i : 700 * i + rng.choice([1, 40, 64, 300, 1500])], 24)
        for i in range(40)
    }

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    survivors = rng.sample(sorted(asks), 12)
    alone = {}
    for name in survivors:
        prompt, max_tokens = asks[name]
        prompts = [{"prompt_token_ids": prompt}]
        (output,) = llm.generate(prompts, params(max_tokens), use_tqdm=False)
        alone[name] = list(output.outputs[0].token_ids)
    (before,) = llm.collective_rpc(null_pages)
    for name, (prompt, max_tokens) in asks.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params(max_tokens))
    scheduler = engine.engine_core.engine_core.scheduler
    answers, aborted = {}, {"waiting": 0, "prefill": 0, "decode": 0}
    doomed = [name for name in asks if name not in survivors]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        live = {r.request_id.rsplit("-", 1)[0]: r for r in scheduler.requests.values()}
        candidates = [name for name in doomed if name in live]
        if candidates and rng.random() < 0.3:
            name = rng.choice(candidates)
            computed, length = live[name].num_computed_tokens, live[name].num_prompt_tokens
            state = "waiting" if not computed else "prefill" if computed < length else "decode"
            aborted[state] += 1
            engine.abort_request([name])
    assert min(aborted.values()) > 0, aborted
    assert {name: answers[name] for name in survivors} == alone
    assert pool_usage(llm) == 0.0
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    assert not manager._limits and not any(manager.req_to_blocks.values())
    (after,) = llm.collective_rpc(null_pages)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pool of 4 pages, where 5 would hold any request."""
    flags = [*FLAGS, "--num-gpu-blocks-override", "5"]
    server = Server(tmp_path_factory.mktemp("small") / "log", flags, FORKED_VLLM)
    yield server.wait()
    server.stop()


def test_a_request_that_cannot_fit_is_refused(small: Server, book_tokens: list[int]) -> None:
    """Before it waits for ever; the message says how many pages, and what would fit."""
    assert "tokens needs 5 pages of 32 tokens, but the pool has 4" in small.log.read_text()
    assert len(small.complete(book_tokens[:100], 28)) == 28
    for prompt, max_tokens, fix in (
        (100, 29, "lower max_tokens to at most 28"),
        (9000, 1, "shorten the prompt"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                small.client.completions.create(
                    model=small.model,
                    prompt=book_tokens[:prompt],
                    max_tokens=max_tokens,
                    stream=stream,
                )
        assert "needs 5 KV cache pages of 32 tokens, but the pool has 4" in error.value.message
        assert "prompt and answer may have 128 tokens" in error.value.message
        assert fix in error.value.message
    assert small.metric("vllm:num_requests_waiting") == 0.0
    assert len(small.complete(book_tokens[:5], 3)) == 3


def test_a_killed_worker_stops_the_server(small: Server, book_tokens: list[int]) -> None:
    """A client that is waiting hears of it, the log says it in one line, no process stays."""
    errors: list[Exception] = []

    def ask() -> None:
        try:
            small.complete(book_tokens[:10], 118)
        except openai.APIError as error:
            errors.append(error)

    client = threading.Thread(target=ask)
    family = psutil.Process(small.process.pid).children(recursive=True)
    (worker,) = small.workers()
    client.start()
    small.wait_until("vllm:num_requests_running", 1.0)
    worker.kill()
    client.join(60)
    assert not client.is_alive() and len(errors) == 1
    assert small.process.wait(60) is not None
    text = small.log.read_text()
    assert len(re.findall(r"Worker proc \S+ died unexpectedly", text)) == 1
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


@pytest.fixture(scope="module")
def restarted(small: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on the machine where another one has just been killed."""
    if small.process.poll() is None:  # the test that kills it was not run
        small.process.kill()
        small.process.wait(60)
    server = Server(tmp_path_factory.mktemp("again") / "log", FLAGS, FORKED_VLLM)
    yield server.wait()
    server.stop()


def leave(server: Server, prompt: list[int], after: int) -> None:
    """A client that closes its connection after so many chunks, or while its prompt is read."""
    stream = asked(server, prompt, 4000)
    while after == 0 and server.metric("vllm:kv_policy_evicted_tokens_total") == 0:
        time.sleep(0.05)
    for _, _ in zip(range(after), stream, strict=False):
        pass
    stream.close()


def test_clients_that_leave(
    restarted: Server, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    for prompt, after in ((book_tokens[:15_000], 0), (book_tokens[:50], 7)):
        leave(restarted, prompt, after)
        restarted.wait_until("vllm:num_requests_running", 0.0)
        restarted.wait_until("vllm:kv_cache_usage_perc", 0.0)
    # The first one left in the middle of its prompt.
    assert 0 < restarted.metric("vllm:kv_policy_evicted_tokens_total") < 14_000
    prompt = book_tokens[3000:3300]
    llm = engine_pool.get(POLICY, max_model_len=8192)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    engine_pool.close()
    assert restarted.complete(prompt, 20) == list(output.outputs[0].token_ids)


def test_sigterm_while_streaming(restarted: Server, book_tokens: list[int]) -> None:
    stream = asked(restarted, book_tokens[:50], 15_000)
    next(iter(stream))
    ends_on_sigterm(restarted, stream)


@pytest.mark.slow
def test_sigterm_in_a_prefill(
    tmp_path_factory: pytest.TempPathFactory, book_tokens: list[int]
) -> None:
    server = Server(tmp_path_factory.mktemp("prefill") / "log", FLAGS).wait()
    stream = asked(server, [*book_tokens, *book_tokens][:19_000], 10)
    deadline = time.monotonic() + 60
    while server.metric("vllm:kv_policy_evicted_tokens_total") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.metric("vllm:kv_policy_evicted_tokens_total") < 18_000
    assert server.metric("vllm:generation_tokens_total") == 0
    ends_on_sigterm(server, stream)


def asked(server: Server, prompt: list[int], max_tokens: int) -> Any:
    """A stream of an answer, before its prompt is read."""
    return server.client.completions.create(
        model=server.model,
        prompt=prompt,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def ends_on_sigterm(server: Server, stream: Any) -> None:
    """A server with a client ends in order, and no process of it stays."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    # vLLM's front-end waits for its clients, and an engine that is gone may not have told them.
    time.sleep(3)
    stream.close()
    assert server.process.wait(60) == 0
    text = server.log.read_text()
    assert text.count("Application shutdown complete") == 1
    # vLLM's front-end may still find its engine gone and log that; nothing of ours fails.
    assert not re.search(r'File ".*(vllm_cascade|patches)/\w+\.py"', text)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
