# SPDX-License-Identifier: Apache-2.0
"""A client of a server: greedy answers, streamed and timed, or how it refuses."""

import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.running.serving import Server, ServerError

TIMEOUT = 600.0
"""Seconds that one answer may take."""


class Refused(RuntimeError):
    """The server answered with an error status instead of text.

    Attributes:
        status: HTTP status.
        message: the server's own words.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


@dataclass
class Streamed:
    """What came of a stream.

    Attributes:
        tokens: the answer's, if the request says ``return_token_ids``.
        first, last: seconds from sending to the first and to the last token.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    finish: str | None = None
    usage: Any = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the server had kept; 0 if it does not say."""
        details = self.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    def take(self, chunk: Any, now: float) -> None:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text = (delta.content if delta else choice.text) or ""
            # A chat's first piece has the role and no text, and comes before any token.
            if delta is None or text or choice.finish_reason:
                self.first, self.last = self.first or now, now
            self.text += text
            self.tokens += getattr(choice, "token_ids", None) or []
            self.finish = choice.finish_reason or self.finish
        self.usage = chunk.usage or self.usage


def stream(server: Server, timeout: float = TIMEOUT, **asked: Any) -> Streamed:
    """Stream a greedy answer to ``messages``, or to a ``prompt``.

    Args:
        asked: the request's other fields.

    Raises:
        Refused: the server did not take it.
        ServerError: it failed while it answered, or is gone; with the last lines that it wrote.
    """
    import openai  # takes a second, which neither options nor engines' processes need spend

    answer, url = Streamed(), f"{server.url}/v1"
    if isinstance(asked.get("prompt"), list):
        # openai looks at each token of a prompt, a second for 100,000, but not at extra fields.
        asked["extra_body"] = {**asked.get("extra_body", {}), "prompt": asked["prompt"]}
        asked["prompt"] = ""
    with openai.OpenAI(base_url=url, api_key="none", timeout=timeout, max_retries=0) as client:
        endpoint = client.chat.completions if "messages" in asked else client.completions
        start = time.perf_counter()
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
        try:
            with endpoint.create(model=server.model, **options, **asked) as chunks:
                for chunk in chunks:
                    answer.take(chunk, time.perf_counter() - start)
        except openai.APIStatusError as error:
            raise Refused(error.status_code, _words(error.body)) from error
        except openai.APIError as error:
            raise ServerError(f"{error}\n{server.tail()}") from error
    return answer


def _words(body: Any) -> str:
    """The server's message, without the JSON around it."""
    while isinstance(body, dict) and "error" in body:
        body = body["error"]
    return str(body.get("message", body) if isinstance(body, dict) else body)
