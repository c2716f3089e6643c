# SPDX-License-Identifier: Apache-2.0
"""A server of two engines (``--data-parallel-size 2``), each with a scheduler and pages of its own.

vLLM starts such engines in processes of their own only, hence a server.
"""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np
import openai
import psutil
import pytest

from tests.engine.pool import EnginePool
from tests.engine.server import Server
from tests.engine.test_faults import FLAGS, POLICY
from tests.engine.test_pipeline_parallel import cores
from tests.engine.test_prefix_caching import Turn, ask

pytestmark = pytest.mark.slow

LENGTHS = (1, 64, 300, 900)
PREFIX = "vllm:kv_policy_"


@pytest.fixture(scope="module")
def alone(engine_pool: EnginePool, book_tokens: list[int]) -> list[Turn]:
    """What one process answers."""
    llm = engine_pool.get(POLICY, max_model_len=20_000, max_num_batched_tokens=256)
    turns = [ask(llm, [book_tokens[:length]])[0] for length in LENGTHS]
    engine_pool.close()
    return turns


@pytest.fixture(scope="module")
def server(alone: list[Turn], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*FLAGS, "--data-parallel-size", "2", "--api-server-count", "1"]
    started = Server(tmp_path_factory.mktemp("two") / "log", flags, environment=cores(2))
    yield started.wait(800)
    started.stop()


def of_engines(server: Server, name: str) -> list[float]:
    """A metric of each engine."""
    found = re.findall(rf'^{name}{{.*engine="(\d)".*}} (\S+)$', server.get("/metrics"), re.M)
    return [float(value) for _, value in sorted(found)]


def each_answers_as_alone(
    server: Server, turns: Iterable[tuple[int, Turn]], tokens: list[int]
) -> None:
    """Each of two engines answers prompts of these lengths as one process did."""
    for length, turn in turns:
        for rank in range(2):
            answers_as_alone(server, rank, length, turn, tokens)


def answers_as_alone(server: Server, rank: int, length: int, turn: Turn, tokens: list[int]) -> None:
    _, expected, logprobs = turn
    answer = server.client.completions.create(
        model=server.model,
        prompt=tokens[:length],
        max_tokens=len(expected),
        temperature=0,
        logprobs=1,
        extra_headers={"X-data-parallel-rank": str(rank)},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]
    assert answer.token_ids == expected
    np.testing.assert_allclose(answer.logprobs.token_logprobs, logprobs, atol=1e-4, rtol=0)


def test_each_engine_answers_as_one_process(
    server: Server, alone: list[Turn], book_tokens: list[int]
) -> None:
    before = of_engines(server, f"{PREFIX}evicted_tokens_total")
    assert len(before) == 2
    each_answers_as_alone(server, zip(LENGTHS, alone, strict=True), book_tokens)
    evicted = sum(max(length + 19 - 132, 0) for length in LENGTHS)
    # Prompts begin alike, and so the next one starts from what the one before has left.
    after = of_engines(server, f"{PREFIX}evicted_tokens_total")
    for old, new in zip(before, after, strict=True):
        assert 0 < new - old <= evicted
    assert after[0] - before[0] == after[1] - before[1]


def test_clients_that_leave_both(server: Server, book_tokens: list[int]) -> None:
    """The numbers of pages go back to nothing on both engines."""
    streams = []
    for rank in (0, 1, 0, 1):
        streams.append(
            server.client.completions.create(
                model=server.model,
                prompt=book_tokens[: 50 + rank],
                max_tokens=15_000,
                stream=True,
                extra_headers={"X-data-parallel-rank": str(rank)},
                extra_body={"ignore_eos": True},
            )
        )
    for stream in streams:
        next(iter(stream))
    deadline = time.monotonic() + 30
    while min(of_engines(server, f"{PREFIX}pages")) == 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert min(of_engines(server, f"{PREFIX}pages")) > 0, "both engines have work"
    for stream in streams:
        stream.close()
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", f"{PREFIX}pages"):
        deadline = time.monotonic() + 30
        while of_engines(server, name) != [0.0, 0.0]:
            assert time.monotonic() < deadline, f"{name} is {of_engines(server, name)}"
            time.sleep(0.2)


def test_a_killed_engine_stops_the_server(server: Server, book_tokens: list[int]) -> None:
    errors: list[Exception] = []

    def ask_for_much() -> None:
        try:
            server.complete(book_tokens[:100], 15_000)
        except openai.APIError as error:
            errors.append(error)

    clients = [threading.Thread(target=ask_for_much) for _ in range(2)]
    family = psutil.Process(server.process.pid).children(recursive=True)
    workers = server.workers()
    assert len(workers) == 2
    for client in clients:
        client.start()
    time.sleep(3)
    workers[1].kill()
    for client in clients:
        client.join(60)
    assert not any(client.is_alive() for client in clients) and len(errors) == 2
    assert server.process.wait(60) is not None
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_drafts(
    alone: list[Turn], book_tokens: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both engines answer as one process without speculation."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    flags = [*FLAGS, "--data-parallel-size", "2", "--api-server-count", "1"]
    flags += ["--speculative-config", json.dumps(drafts)]
    server = Server(tmp_path_factory.mktemp("drafts") / "log", flags, environment=cores(2))
    try:
        server.wait(800)
        each_answers_as_alone(server, zip(LENGTHS, alone, strict=True), book_tokens)
        assert min(of_engines(server, "vllm:spec_decode_num_accepted_tokens_total")) > 0
    finally:
        server.stop()
