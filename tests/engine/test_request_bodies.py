# SPDX-License-Identifier: Apache-2.0
"""What the API server's middleware refuses, and that it changes nothing else."""

import asyncio
import json
import re
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from vllm_cascade.engine import request_bodies
from vllm_cascade.engine.request_bodies import KVKeysMiddleware, wrong_place
from vllm_cascade.policies.arguments import plain_key

Message = dict[str, Any]
GONE = {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("body", "key", "message"),
    [
        ({"kv_budget": 5}, "kv_budget", r'send {"vllm_xargs": {"kv_budget": 5}}'),
        ({"KV-Policy": "sink"}, "KV-Policy", r'send {"vllm_xargs": {"kv_policy": "sink"}}'),
        ({"extra_body": {"kv_budget": 5}}, "extra_body", "over HTTP send"),
        ({"extra_body": {"vllm_xargs": {}}}, "extra_body", "over HTTP send"),
        (
            {"vllm_xargs": {"kv_budget": True}},
            "kv_budget",
            "kv_budget = True: Input should be a valid integer",
        ),
        (
            {"vllm_xargs": {"kv_recall": False}},
            "kv_recall",
            "kv_recall = False: Input should be a valid integer",
        ),
        (
            {"vllm_xargs": {"kv_policy": True}},
            "kv_policy",
            "kv_policy = True: it must be the name of a policy",
        ),
        ({"extra_args": {"kv_budget": 5}}, "kv_budget", r'send {"vllm_xargs": {"kv_budget": 5}}'),
        (
            {"sampling_params": {"extra_args": {"kv_recall": 5}}},
            "kv_recall",
            r'send {"vllm_xargs": {"kv_recall": 5}}',
        ),
        ({"VLLM_XARGS": {"kv_budget": 5}}, "kv_budget", r'send {"vllm_xargs": {"kv_budget": 5}}'),
        ({"vllm-xargs": {"kv_budget": 5}}, "kv_budget", r'send {"vllm_xargs": {"kv_budget": 5}}'),
        ({" kv_budget ": 5}, " kv_budget ", r'send {"vllm_xargs": {"kv_budget": 5}}'),
        ({"extra_body": {"VLLM-XARGS": {}}}, "extra_body", "over HTTP send"),
        ({"extra_body": {"extra_args": {"kv_budget": 5}}}, "extra_body", "over HTTP send"),
        (
            {"use_beam_search": "yes", "vllm_xargs": {"kv_budget": 5}},
            "kv_budget",
            "has no effect",
        ),
    ],
)
def test_wrong_places(body: Message, key: str, message: str) -> None:
    found = wrong_place(body)
    assert found is not None and found[0] == key and message in found[1]


GENERATE, SCORING = "/prefix/inference/v1/generate", "/generative_scoring"
COHERE = "/cohere/v2/chat"


@pytest.mark.parametrize(
    ("path", "body", "key", "message"),
    [
        (
            GENERATE,
            {"vllm_xargs": {"kv_budget": 5}},
            "kv_budget",
            '{"sampling_params": {"extra_args": {"kv_budget": 5}}}',
        ),
        (GENERATE, {"sampling_params": {"kv_recall": 1}}, "kv_recall", '"extra_args": {"kv_rec'),
        (GENERATE, {"extra_args": {"kv_recall": 1}}, "kv_recall", '"extra_args": {"kv_rec'),
        (
            GENERATE,
            {"Sampling-Params": {"extra_args": {"kv_recall": 1}}},
            "kv_recall",
            '{"sampling_params": {"extra_args": {"kv_rec',
        ),
        (
            GENERATE,
            {"sampling_params": {"extra_args": {"kv_budget": True}}},
            "kv_budget",
            "should be a valid integer",
        ),
        (SCORING, {"vllm_xargs": {"kv_budget": 5}}, "kv_budget", "has no effect: .*leave it out"),
        ("/v1/systemone", {"kv_budget": 5}, "kv_budget", "has no effect: .*/v1/systemone"),
        (COHERE, {"vllm_xargs": {"kv_budget": 5}}, "kv_budget", "has no effect: .*/cohere/v2/chat"),
        (f"{COHERE}/render", {"vllm_xargs": {"kv_budget": 5}}, "kv_budget", "has no effect: .*"),
        ("/v1/decisions", {"kv_budget": 5}, "kv_budget", "has no effect: .*/v1/decisions"),
        (COHERE, {"kv_recall": 5}, "kv_recall", "has no effect: .*leave it out"),
        (
            "/v1/completions",
            {"use_beam_search": True, "vllm_xargs": {"kv_session": "a"}},
            "kv_session",
            "has no effect: .*use_beam_search",
        ),
        ("/v1/completions", {"sampling_params": {"kv_budget": 5}}, "kv_budget", '{"vllm_xargs"'),
    ],
)
def test_places_of_endpoints(path: str, body: Message, key: str, message: str) -> None:
    """As vLLM's own models of these requests read them."""
    found = wrong_place(body, path)
    assert found is not None and found[0] == key
    assert message in found[1] or re.search(message, found[1])


def test_the_endpoint_decides() -> None:
    own = {"token_ids": [1], "sampling_params": {"extra_args": {"kv_budget": 5}}}
    assert wrong_place(own, GENERATE) is None
    assert GenerateRequest(**own).sampling_params.extra_args == {"kv_budget": 5}
    inside, sent = converse(parts(json.dumps(own).encode(), 1000), path=GENERATE)
    assert inside and sent[0]["status"] == 200
    body = b'{"vllm_xargs": {"kv_budget": 64}}'
    inside, sent = converse(parts(body, 1000), path=SCORING)
    assert inside == [GONE] * len(inside) and sent[0]["status"] == 400 and len(sent) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"vllm_xargs": {"kv_budget": 5, "kv_policy": "sink", "other": True}},
        {"extra_body": {"top_k": 3}, "prompt": "kv_budget"},
        {"vllm_xargs": None, "extra_body": "kv_budget", "kv_transfer_params": {}},
        [{"kv_budget": 5}],
        {"use_beam_search": "false", "vllm_xargs": {"kv_budget": 5}},
        {"use_beam_search": "perhaps", "vllm_xargs": {"kv_budget": 5}},  # vLLM refuses it
        {"use_beam_search": None, "vllm_xargs": {"kv_budget": 5}},
        {"extra_args": {"other": 1}, "sampling_params": {"extra_args": None}},
        {"metadata": {"kv_budget": 5}},
    ],
)
def test_right_places_and_what_is_not_ours(body: Any) -> None:
    assert wrong_place(body) is None


def converse(
    received: list[Message],
    kind: str = "application/json; charset=utf-8",
    method: str = "POST",
    path: str = "/v1/completions",
) -> tuple[list[Message], list[Message]]:
    """A request through the middleware: what the application received, and what was sent."""
    inside, sent, waiting = [], [], iter(received)

    async def app(scope: Message, receive: Any, send: Any) -> None:
        inside.extend([await receive() for _ in range(len(received) - len(inside))])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return next(waiting)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path}
    scope["headers"] = [(b"content-type", kind.encode())]
    asyncio.run(KVKeysMiddleware(app)(scope, receive, send))
    return inside, sent


def parts(body: bytes, size: int) -> list[Message]:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False
    return [*messages, {"type": "http.disconnect"}]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_refusal(size: int) -> None:
    """However the body comes in."""
    inside, sent = converse(parts(b'{"prompt": "x", "kv_budget": 64}', size))
    assert inside == [GONE] * len(inside) and sent[0]["status"] == 400 and len(sent) == 2
    error = json.loads(sent[1]["body"])["error"]
    assert error["param"] == "kv_budget" and error["code"] == 400


REFUSED = json.dumps({"prompt": "x", "kv_budget": 64})


@pytest.mark.parametrize(
    "body",
    [
        REFUSED.encode("utf-8-sig"),
        REFUSED.encode("utf-16"),
        REFUSED.encode("utf-16-le"),
        REFUSED.encode("utf-16-be"),
        REFUSED.encode("utf-32"),
        REFUSED.replace("kv_budget", r"kv\u005fbudget").encode(),
        REFUSED.replace("kv_budget", r"\u004bV_BUDGET").encode(),
        REFUSED.replace("kv_budget", r"kv_\u0062udget").encode(),
        REFUSED.replace("kv_budget", r"kv\u002Dbudget").encode(),
        REFUSED.replace("kv_budget", r"\u0020kv_budget").encode(),
        REFUSED.replace("kv_budget", r" kv_budget\n").encode(),
    ],
)
def test_a_key_is_found_however_it_is_written(body: bytes) -> None:
    """As vLLM reads it: in any encoding of JSON, and with escapes."""
    inside, sent = converse(parts(body, 1000))
    assert inside == [GONE] * len(inside) and sent[0]["status"] == 400
    assert plain_key(json.loads(sent[1]["body"])["error"]["param"]) == "kv_budget"


@pytest.mark.parametrize(
    ("body", "parsed"),
    [
        (b'{"prompt": "a kv_budget"}', 0),
        ('{"prompt": "sch\u00f6n, \u4e2d\u6587"}'.encode(), 0),
        (rb'{"prompt": "sch\u00f6n \u4e2d\u6587 \u0026 \u003cb\u003e it\u0027s"}', 0),
        (rb'{"prompt": "kv\u005fbudget"}', 1),
        ('{"prompt": "a kv_budget"}'.encode("utf-16"), 1),
    ],
)
def test_few_bodies_are_parsed(body: bytes, parsed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM parses each body itself, and prompts may have megabytes."""
    loads = Mock(wraps=json.loads)
    monkeypatch.setattr(request_bodies, "json", Mock(loads=loads))
    inside, sent = converse(parts(body, 1000))
    assert inside == parts(body, 1000) and sent[0]["status"] == 200
    assert loads.call_count == parsed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_budget", b"[" * 500 + b"]" * 500),
        ("kv_session", b'"' + b"x" * 3_000_000 + b'"'),
        ("kv_budget", b"1" * 4000),
        ("kv_budget" + " " * 100_000, b"1"),
    ],
    ids=["nested", "text", "digits", "key"],
)
@pytest.mark.parametrize("path", ["/v1/completions", COHERE])
def test_a_refusal_is_short(key: str, value: bytes, path: str) -> None:
    """Whatever the client has sent."""
    inside, sent = converse(parts(b'{"%s": %s}' % (key.encode(), value), 10**7), path=path)
    assert inside == [GONE] * len(inside) and sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert key.startswith(error["param"].rstrip(".")) and len(sent[1]["body"]) < 600
    if path != COHERE:
        right = {key.strip(): 1 if value == b"1" else ...}
        short = json.dumps({"vllm_xargs": right}, default=lambda _: None).replace("null", "...")
        assert error["message"].endswith(f"not read at this place of a request; send {short}")


def test_a_nested_value_is_refused_as_far_as_it_is_read() -> None:
    """Deeper ones are left to vLLM.

    How deep Python reads depends on where it is called from, and on a limit that libraries raise.
    """
    answers = []
    for depth in (*range(500, 1010), *range(2000, 20_000, 500), 100_000):
        body = b'{"kv_budget": %s%s}' % (b"[" * depth, b"]" * depth)
        answers.append(converse(parts(body, 10**7))[1][0]["status"])
    assert set(answers) == {400, 200} and answers == sorted(answers, reverse=True)


def test_a_deeply_nested_body_is_left_to_vllm() -> None:
    body = b'{"kv_budget": ' + b'{"vllm_xargs": ' * 100_000
    inside, sent = converse(parts(body, 10**7))
    assert inside == parts(body, 10**7) and sent[0]["status"] == 200
    nested: Any = {}
    for _ in range(100_000):
        nested = {"vllm_xargs": nested}
    assert wrong_place(nested) is None


@pytest.mark.parametrize(
    ("body", "kind", "method"),
    [
        (b'{"vllm_xargs": {"kv_budget": 64}, "prompt": "x"}', "application/json", "POST"),
        (b'{"kv_budget": 64', "application/json", "POST"),  # vLLM says what is wrong with it
        (b'{"kv_budget": 64}', "text/plain", "POST"),
        (b'{"kv_budget": 64}', "application/json", "PUT"),
        (b'{"prompt": "\\"kv_budget\\""}', "application/json", "POST"),
    ],
)
@pytest.mark.parametrize("size", [5, 1000])
def test_all_else_passes_as_it_is(body: bytes, kind: str, method: str, size: int) -> None:
    messages = parts(body, size)
    inside, sent = converse(messages, kind, method)
    assert inside == messages and sent[0]["status"] == 200


def test_a_client_that_leaves_in_the_middle() -> None:
    messages = [{"type": "http.request", "body": b'{"kv_', "more_body": True}]
    messages.append({"type": "http.disconnect"})
    inside, _ = converse(messages)
    assert inside == messages


def test_who_has_no_api_key_is_not_listened_to() -> None:
    """vLLM checks the key inside of this middleware, without reading the body."""
    read: list[int] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def receive() -> Message:
        read.append(1)
        return {"type": "http.request", "body": b'{"kv_budget": 64}', "more_body": False}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    scope["headers"] = [(b"content-type", b"application/json")]
    asyncio.run(KVKeysMiddleware(app)(scope, receive, send))
    assert not read and [message["status"] for message in sent] == [401]


@pytest.mark.parametrize("path", ["/parsed", "/raw", "/logged"])
def test_an_application_answers_once(path: str) -> None:
    """A refused request has one answer, however its endpoint reads bodies; others are theirs."""
    app = FastAPI()

    @app.post("/parsed")
    @app.post("/logged")
    def parsed(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.post("/raw")
    async def raw(request: Request) -> Any:
        return await request.json()

    if path == "/logged":  # as vLLM's option that logs responses
        app.middleware("http")(lambda request, following: following(request))
    app.add_middleware(KVKeysMiddleware)
    client = TestClient(app)
    refused = client.post(path, json={"kv_budget": 64})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_budget"
    assert client.post(path, json={"prompt": "x"}).json() == {"prompt": "x"}
