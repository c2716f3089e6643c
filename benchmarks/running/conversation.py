# SPDX-License-Identifier: Apache-2.0
"""A chat with a server: every turn sends the whole conversation so far, as chat programs do."""

import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.running.serving import Server, Watch

TIMEOUT = 600.0
"""Seconds that one answer may take."""

LOOK = 0.05
"""Seconds between two looks at a server's pages while it answers."""


class Refused(RuntimeError):
    """The server answered with an error status instead of text.

    Attributes:
        status: HTTP status.
        message: the server's own words.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


@dataclass(frozen=True)
class Turn:
    """A turn of a chat.

    Attributes:
        prompt: tokens of the conversation with this question.
        reused: those of them that the server had kept from earlier turns (prefix caching).
        generated: tokens of the answer.
        first_seconds: from sending to the answer's first token.
        token_ms: mean time of a token of the answer after the first; None if it has one only.
        pages: most pages that the server's requests held meanwhile.
        complete: whether the answer came to its end before ``max_tokens``.
    """

    answer: str
    prompt: int
    reused: int
    generated: int
    first_seconds: float
    token_ms: float | None
    pages: int
    complete: bool

    @property
    def context(self) -> int:
        """Tokens of the conversation after the answer."""
        return self.prompt + self.generated


@dataclass
class Conversation:
    """One chat with one server; ``max_tokens`` is the longest answer."""

    server: Server
    max_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Turn:
        """The next turn.

        Raises:
            Refused: the server did not take it; the conversation stays as it was.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        with Watch(self.server, every=LOOK) as watch:
            answer = self._send(asked)
        usage = answer.usage
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        count = usage.completion_tokens
        token_ms = 1e3 * (answer.last - answer.first) / (count - 1) if count > 1 else None
        details = usage.prompt_tokens_details
        return Turn(
            answer=answer.text.strip(),
            prompt=usage.prompt_tokens,
            reused=(details.cached_tokens or 0) if details else 0,
            generated=count,
            first_seconds=answer.first,
            token_ms=token_ms,
            pages=watch.peak_pages,
            complete=answer.finish != "length",
        )

    def _send(self, messages: list[dict[str, str]]) -> "_Answer":
        """Stream an answer, greedily decoded."""
        import openai  # takes a second, which the engines' processes need not spend

        client = openai.OpenAI(
            base_url=f"{self.server.url}/v1", api_key="none", timeout=TIMEOUT, max_retries=0
        )
        answer, start = _Answer(), time.perf_counter()
        try:
            with (
                client,
                client.chat.completions.create(
                    model=self.server.model,
                    messages=messages,
                    max_tokens=self.max_tokens,
                    temperature=0.0,
                    stream=True,
                    stream_options={"include_usage": True},
                ) as stream,
            ):
                for chunk in stream:
                    answer.take(chunk, time.perf_counter() - start)
        except openai.APIStatusError as error:
            raise Refused(error.status_code, _words(error.body)) from error
        return answer


@dataclass
class _Answer:
    """What came of a stream; times are seconds since the question was sent."""

    text: str = ""
    first: float = 0.0
    last: float = 0.0
    finish: str | None = None
    usage: Any = None

    def take(self, chunk: Any, now: float) -> None:
        for choice in chunk.choices:
            # The stream's first piece has the role and no text, and comes before any token.
            if choice.delta.content or choice.finish_reason:
                self.first = self.first or now
                self.last = now
            self.text += choice.delta.content or ""
            self.finish = choice.finish_reason or self.finish
        self.usage = chunk.usage or self.usage


def _words(body: Any) -> str:
    """The server's message, without the JSON around it."""
    while isinstance(body, dict) and "error" in body:
        body = body["error"]
    return str(body.get("message", body) if isinstance(body, dict) else body)
