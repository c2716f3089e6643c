# SPDX-License-Identifier: Apache-2.0
"""Literal simulations of which tokens a policy keeps. Clarity over speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

Score = Callable[[int], float]


class Sim(Protocol):
    """One cache of token ids: the tokens of one layer and one set of heads."""

    sinks: list[int]
    subcaches: list[list[int]]

    def insert(self, token: int, score: Score) -> int | None:
        """Add the next token of the stream; return the token that was discarded, if any."""

    def tokens(self) -> list[int]:
        """Everything cached, sinks first, oldest to newest."""


class CascadeSim:
    """The insertion walk of the cascading cache, with one real list per sub-cache.

    `subcaches[0]` is the newest; each list runs from its oldest to its newest token.
    `closest_contest` is the smallest relative gap between two scores that were ever compared:
    when it is tiny, two correct implementations may keep different tokens.
    """

    def __init__(
        self,
        num_sinks: int,
        num_subcaches: int,
        window: int,
        base: int = 2,
        eager_fill: bool = True,
        tie: str = "incoming",
    ) -> None:
        if tie not in ("incoming", "resident"):
            raise ValueError(f"tie={tie!r}: 'incoming' or 'resident'")
        if num_sinks < 0 or num_subcaches < 1 or window < 1 or base < 1:
            raise ValueError("impossible size")
        self.num_sinks = num_sinks
        self.num_subcaches = num_subcaches
        self.window = window
        self.base = base
        self.eager_fill = eager_fill
        self.tie = tie
        self.sinks: list[int] = []
        self.subcaches: list[list[int]] = [[] for _ in range(num_subcaches)]
        self.seen = 0
        self.closest_contest = math.inf

    def accepts(self, i: int, p: int) -> bool:
        """Whether sub-cache i takes whatever reaches it while token p of the stream is inserted."""
        if self.eager_fill and p <= self.num_subcaches * self.window + self.num_sinks:
            return True
        return (p - self.num_sinks) % self.base**i == 0

    def incoming_wins(self, item: int, resident: int, score: Score) -> bool:
        """Compare the item that arrives with the newest token of a sub-cache that is closed."""
        a, b = score(item), score(resident)
        gap = abs(a - b) / max(abs(a), abs(b), 1e-30)
        self.closest_contest = min(self.closest_contest, gap)
        return a >= b if self.tie == "incoming" else a > b

    def insert(self, token: int, score: Score) -> int | None:
        p = self.seen
        self.seen += 1
        if p < self.num_sinks:
            self.sinks.append(token)
            return None
        item = token
        for i, subcache in enumerate(self.subcaches):
            if self.accepts(i, p):
                subcache.append(item)
                if len(subcache) <= self.window:
                    return None
                item = subcache.pop(0)  # the oldest goes on to the next sub-cache
            elif not subcache:
                subcache.append(item)
                return None
            elif self.incoming_wins(item, subcache[-1], score):
                loser = subcache[-1]
                subcache[-1] = item
                return loser
            else:
                return item
        return item  # fell off the last sub-cache

    def tokens(self) -> list[int]:
        cached = list(self.sinks)
        for subcache in reversed(self.subcaches):
            cached += subcache
        return cached


class WindowSim:
    """Attention sinks plus the most recent `window` tokens (plain window when num_sinks = 0)."""

    def __init__(self, num_sinks: int, window: int) -> None:
        if num_sinks < 0 or window < 1:
            raise ValueError("impossible size")
        self.num_sinks = num_sinks
        self.window = window
        self.sinks: list[int] = []
        self.subcaches: list[list[int]] = [[]]

    def insert(self, token: int, score: Score) -> int | None:
        if len(self.sinks) < self.num_sinks:
            self.sinks.append(token)
            return None
        recent = self.subcaches[0]
        recent.append(token)
        return recent.pop(0) if len(recent) > self.window else None

    def tokens(self) -> list[int]:
        return self.sinks + self.subcaches[0]
