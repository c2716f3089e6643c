# SPDX-License-Identifier: Apache-2.0
"""A chat's client, against a stand-in that speaks a server's HTTP."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from benchmarks.running.client import Refused, stream
from benchmarks.running.conversation import Conversation
from benchmarks.running.serving import Server, ServerError, free_port

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.33
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 0
"""
TOO_LONG = "This model's maximum context length is 8192 tokens. However, ..."


class Fake(BaseHTTPRequestHandler):
    """Says ``one two three`` a word at a time; refuses more than three messages."""

    asked: ClassVar[list[dict]]
    details: ClassVar[dict | None] = {"cached_tokens": 64}
    finish = "stop"
    fails = False
    error: ClassVar[dict] = {"error": {"message": TOO_LONG, "type": "BadRequestError", "code": 400}}

    def do_GET(self) -> None:
        self._begin(200, "text/plain")
        self.wfile.write(METRICS.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if len(body["messages"]) > 3:
            self._begin(400, "application/json")
            self.wfile.write(json.dumps(self.error).encode())
            return
        self._begin(200, "text/event-stream")
        self._piece([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        if self.fails:
            self.wfile.write(b'data: {"error": {"message": "EngineCore failed", "code": 500}}\n\n')
            return
        time.sleep(0.3)  # the prompt is read
        for place, word in enumerate((" one", " two", " three")):
            time.sleep(0.1 if place else 0)
            last = self.finish if place == 2 else None
            self._piece([{"index": 0, "delta": {"content": word}, "finish_reason": last}])
        usage = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
        self._piece([], {**usage, "prompt_tokens_details": self.details})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _piece(self, choices: list[dict], usage: dict | None = None) -> None:
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "model"}
        chunk |= {"choices": choices, "usage": usage}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[tuple[Server, type[Fake]]]:
    handler = type("Handler", (Fake,), {"asked": []})
    server = Server("model", [])
    server.num_pages = 100
    http = ThreadingHTTPServer(("127.0.0.1", server.port), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield server, handler
    http.shutdown()
    http.server_close()


def test_a_turn_is_what_the_server_did(fake: tuple[Server, type[Fake]]) -> None:
    server, handler = fake
    turn = Conversation(server, 40).ask("How far can you count?")
    assert turn.answer == "one two three"
    assert (turn.prompt, turn.reused, turn.generated, turn.context) == (100, 64, 3, 103)
    assert turn.pages == 33 and turn.complete
    assert 0.3 < turn.first_seconds < 1.3, "the piece without text is no token"
    assert turn.token_ms is not None and 90 < turn.token_ms < 400
    (sent,) = handler.asked
    assert sent["messages"] == [{"role": "user", "content": "How far can you count?"}]
    assert (sent["max_tokens"], sent["temperature"], sent["model"]) == (40, 0.0, "model")


def test_every_turn_sends_all_before_it(fake: tuple[Server, type[Fake]]) -> None:
    server, handler = fake
    handler.details, handler.finish = None, "length"
    chat = Conversation(server, 3)
    chat.ask("first")
    turn = chat.ask("second")
    assert not turn.complete and turn.reused == 0
    said = [(message["role"], message["content"]) for message in handler.asked[1]["messages"]]
    assert said == [("user", "first"), ("assistant", " one two three"), ("user", "second")]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"error": {"message": TOO_LONG, "code": 400}}, TOO_LONG),
        ({"message": TOO_LONG}, TOO_LONG),
        ({"detail": "unlike vLLM"}, "unlike vLLM"),
    ],
)
def test_a_refusal_has_the_servers_words(
    fake: tuple[Server, type[Fake]], error: dict, words: str
) -> None:
    server, handler = fake
    handler.error = error
    chat = Conversation(server, 40)
    chat.ask("first")
    chat.ask("second")
    before = list(chat.messages)
    with pytest.raises(Refused) as refused:
        chat.ask("third")
    assert refused.value.status == 400 and words in refused.value.message
    assert chat.messages == before and len(handler.asked) == 3, "asked once, and not kept"


def test_a_failure_has_the_servers_last_lines(fake: tuple[Server, type[Fake]]) -> None:
    """While it answers, and when it is gone."""
    server, handler = fake
    server._log.write("step 1\nTimeoutError: a worker did not answer\n")
    handler.fails = True
    with pytest.raises(ServerError, match="EngineCore failed\nTimeoutError: a worker did not"):
        Conversation(server, 40).ask("first")
    server.port = free_port()
    with pytest.raises(ServerError, match=r"Connection error\.\nTimeoutError: a worker did not"):
        stream(server, prompt="first")
