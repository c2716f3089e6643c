# SPDX-License-Identifier: Apache-2.0
"""Two API servers before one engine (``--api-server-count 2``).

With data parallelism vLLM starts as many API servers as engines by default. It spawns them, and
each configures itself from the parsed arguments.
"""

import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.server import Server
from tests.engine.test_faults import FLAGS
from tests.engine.test_pipeline_parallel import cores

pytestmark = pytest.mark.slow

REPEATS = 4
"""New connections, each to the API server that has the fewest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions") / "kept"


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Pages for a budget of 32, not for the server's 128.
    flags = [*FLAGS, "--num-gpu-blocks-override", "5", "--api-server-count", "2"]
    flags += ["--kv-sessions", "--kv-sessions-dir", str(folder)]
    environment = {**cores(1), "VLLM_SERVER_DEV_MODE": "1"}
    started = Server(tmp_path_factory.mktemp("two") / "log", flags, environment=environment)
    yield started.wait(500)
    started.stop()


def ask(server: Server, prompt: list[int], max_tokens: int = 4, **body: Any) -> list[int]:
    """By a connection of its own."""
    with openai.OpenAI(base_url=server.client.base_url, api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True, **body},
        )
    return answer.choices[0].token_ids  # type: ignore[attr-defined]


def test_each_reads_arguments(server: Server, book_tokens: list[int]) -> None:
    small = {"vllm_xargs": {"kv_budget": 32}}
    answers = [ask(server, book_tokens[:300], **small) for _ in range(REPEATS)]
    assert answers == answers[:1] * REPEATS and len(answers[0]) == 4
    for body, message in (
        ({"vllm_xargs": {"kv_buget": 32}}, "did you mean 'kv_budget'"),
        ({"vllm_xargs": {"kv_budget": 500}}, "more than the server's --kv-budget 128"),
        ({"vllm_xargs": {**small["vllm_xargs"], "kv_session": ""}}, "kv_session must be a name"),
        ({"kv_budget": 32}, "not read at this place"),
        ({}, "pages of 32 tokens, but the pool has 4"),
    ):
        for _ in range(REPEATS):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(server, book_tokens[:300], **body)


def test_each_has_the_metrics(server: Server) -> None:
    for _ in range(REPEATS):
        assert server.metric("vllm:kv_policy_evicted_tokens_total") > 0
        text = server.get("/metrics")
        assert "vllm:kv_sessions{" in text and "vllm:kv_session_kept_total" in text
    server.wait_until("vllm:kv_policy_pages", 0)


def test_a_pause_deletes_sessions(server: Server, folder: Path, book_tokens: list[int]) -> None:
    """At once, also where it waits for a request, and memory can be released right after it."""
    small = {"vllm_xargs": {"kv_budget": 32}}
    ask(server, book_tokens[300:400], **small)
    deadline = time.monotonic() + 30
    while not list(folder.glob("*.session")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    answers: list[list[int]] = []
    running = threading.Thread(
        target=lambda: answers.append(ask(server, book_tokens[:50], 400, **small))
    )
    running.start()
    server.wait_until("vllm:num_requests_running", 1)
    server.post("/pause?mode=wait")
    running.join(60)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.post("/release_kv_cache_memory")
    assert "Selective discard is not supported on CPU" in refusal.value.read().decode()
    deadline = time.monotonic() + 10
    while list(folder.glob("*.session")):
        assert time.monotonic() < deadline, "the sessions' files are there during the pause"
        time.sleep(0.1)
    server.post("/resume")
    assert len(answers[0]) == 400 and len(ask(server, book_tokens[:50], **small)) == 4
