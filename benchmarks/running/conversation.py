# SPDX-License-Identifier: Apache-2.0
"""A chat with a server: every turn sends the whole conversation so far, as chat programs do."""

from dataclasses import dataclass, field

from benchmarks.running.client import stream
from benchmarks.running.serving import Server, Watch

LOOK = 0.05
"""Seconds between two looks at a server's pages while it answers."""


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
            answer = stream(self.server, messages=asked, max_tokens=self.max_tokens)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        count = answer.usage.completion_tokens
        return Turn(
            answer=answer.text.strip(),
            prompt=answer.usage.prompt_tokens,
            reused=answer.cached,
            generated=count,
            first_seconds=answer.first,
            token_ms=1e3 * (answer.last - answer.first) / (count - 1) if count > 1 else None,
            pages=watch.peak_pages,
            complete=answer.finish != "length",
        )
