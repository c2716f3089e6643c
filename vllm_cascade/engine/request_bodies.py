# SPDX-License-Identifier: Apache-2.0
"""Rejects API requests with KV policy keys where vLLM ignores them.

vLLM silently accepts unknown keys in a request body, so a misplaced ``kv_budget`` would have no
effect: the request would run under the server's policy. Only ``vllm_xargs`` is read, and at a few
endpoints another object or none.
"""

import json
import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_cascade.policies.arguments import KEYS, REQUEST, collect, plain_key
from vllm_cascade.policies.settings import MOST_SHOWN, KVPolicyError, cut
from vllm_cascade.sessions.settings import SESSION_ARGUMENTS


class ImportPath(str):
    """A path of this package in parsed arguments: unpickling it loads the plugin.

    vLLM spawns API servers (``--api-server-count``, several data-parallel engines) and reads their
    arguments before it loads plugins: without this, they would run without the policy.
    """

    __slots__ = ()


MIDDLEWARE = ImportPath(f"{__name__}.KVKeysMiddleware")
"""Import path for vLLM's ``--middleware``."""
PLACES = {
    "/inference/v1/generate": ("sampling_params", "extra_args"),
    "/generative_scoring": None,
    "/cohere/v2/chat": None,
    "/cohere/v2/chat/render": None,
    "/v1/systemone": None,
    "/v1/decisions": None,
}
"""Where endpoints have arguments that reach the engine, if not in ``vllm_xargs``."""
HOLDERS = ("vllm_xargs", "sampling_params", "extra_args")
"""Objects in a body that may be taken for that place."""
ALL_KEYS = (*KEYS, *SESSION_ARGUMENTS)
_WORDS = "|".join(["extra_body", *ALL_KEYS]).replace("_", "[_-]").encode()
_SPACE = rb"[\s\\nrt]*"
_SUSPECT = re.compile(
    b'"' + _SPACE + b"(?=[ek])(?:" + _WORDS + b")" + _SPACE + b'"', re.IGNORECASE
)  # (?=[ek]) looks for a word's first letter, which halves the time of a search
_ESCAPED = re.compile(rb"\\u00(?:0[9aAdD]|20|2[dD]|[4-7])")
"""JSON escapes of what a key can have: letters, ``_``, ``-`` and space."""
_BOOLEAN = TypeAdapter(bool)


def place_of(body: dict[str, Any], path: str) -> tuple[str, ...] | None:
    """Where in its body a request has arguments that reach the engine; None: nowhere."""
    if _is_true(body.get("use_beam_search")):
        return None
    return next((place for end, place in PLACES.items() if path.endswith(end)), ("vllm_xargs",))


def _is_true(value: Any) -> bool:
    """Whether vLLM reads a value as true. ``"false"`` is not; other types it refuses itself."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return False


def wrong_place(body: Any, path: str = "") -> tuple[str, str] | None:
    """A misplaced or invalid key of a request body and the error message; None if all are valid.

    Args:
        path: of the request's address, which ends with the endpoint.
    """
    if not isinstance(body, dict):
        return None
    place = place_of(body, path)
    found = _misplaced(body, place)
    if found is not None:
        return cut(found[0]), _correction(*found, place)
    client = body.get("extra_body")
    if isinstance(client, dict) and (
        "vllm_xargs" in map(plain_key, client) or _misplaced(client, None)
    ):
        return "extra_body", (
            "extra_body is an argument of OpenAI's Python client, which sends what is in it at the "
            'top level of the request; over HTTP send {"vllm_xargs": {...}} itself'
        )
    own: Any = body
    for name in place or ():
        own = own.get(name) if isinstance(own, dict) else None
    for key, value in own.items() if place and isinstance(own, dict) else ():
        if isinstance(value, bool):  # vLLM would convert it to a number
            try:
                collect({key: value}, REQUEST)
            except KVPolicyError as error:
                return key, str(error)
    return None


def _misplaced(
    holder: dict[str, Any], place: tuple[str, ...] | None, here: tuple[str, ...] = ()
) -> tuple[str, Any] | None:
    """The first of our keys, and its value, that is in an object other than the one at ``place``.

    Args:
        here: names that lead from the body to ``holder``; spelled as in the body, like vLLM's.
    """
    for key, value in holder.items():
        name = plain_key(key)
        if name in ALL_KEYS and here != place:
            return key, value
        if name in HOLDERS and isinstance(value, dict) and len(here) < len(HOLDERS):
            found = _misplaced(value, place, (*here, key))
            if found is not None:
                return found
    return None


def _correction(key: str, value: Any, place: tuple[str, ...] | None) -> str:
    """The message about a key that is not at its place."""
    if place is None:
        without = ", ".join(end for end, one in PLACES.items() if one is None)
        return (
            f"{cut(key)} has no effect: vLLM passes no arguments of a request on with "
            f"use_beam_search, nor from {without}; leave it out"
        )
    right = json.dumps(value) if isinstance(value, str | int | float | None) else "..."
    right = "..." if len(right) > MOST_SHOWN else right
    for name in reversed((*place, plain_key(key))):
        right = f'{{"{name}": {right}}}'
    return f"{cut(key)} is not read at this place of a request; send {right}"


class KVKeysMiddleware:
    """Answers HTTP 400 to misplaced or invalid keys; forwards all other requests unchanged.

    vLLM puts it around its own middleware, also around the check of API keys. So a body is read
    only when the application asks for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and _is_json(scope):
            await _Exchange(scope, receive, send).run(self.app)
        else:
            await self.app(scope, receive, send)


class _Exchange:
    """One request. After a refusal the application is told that the client has gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._messages: deque[Message] | None = None
        self._refused = False

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._read, self._answer)
        except ClientDisconnect:
            if not self._refused:
                raise

    async def _read(self) -> Message:
        if self._messages is None:
            self._messages = deque(await _all_of(self._receive))
            found = wrong_place(_suspicious(self._messages), self._scope["path"])
            if found is not None:
                self._refused = True
                await self._refuse(*found)
        if self._refused:
            return {"type": "http.disconnect"}
        return self._messages.popleft() if self._messages else await self._receive()

    async def _answer(self, message: Message) -> None:
        if not self._refused:
            await self._send(message)

    async def _refuse(self, key: str, message: str) -> None:
        error = {"message": message, "type": "BadRequestError", "param": key, "code": 400}
        response = JSONResponse({"error": error}, status_code=400)
        await response(self._scope, self._receive, self._send)


def _is_json(scope: Scope) -> bool:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return kind.split(b";")[0].strip().lower() == b"application/json"


async def _all_of(receive: Receive) -> list[Message]:
    """A request's messages up to the end of its body, or until the client disconnects."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _suspicious(messages: Iterable[Message]) -> Any:
    """The parsed body if it may have a suspect key; None if it has none or is not valid JSON."""
    body = b"".join(message.get("body", b"") for message in messages)
    wide = b"\0" in body[:4]  # UTF-16 or UTF-32, which vLLM reads, too
    if not (wide or _SUSPECT.search(body) or _ESCAPED.search(body)):
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM reports the error
