# SPDX-License-Identifier: Apache-2.0
"""Literal simulations of which tokens a policy keeps. Clarity over speed.

`t` counts the tokens seen, sinks included. Scores are frozen while a stride is inserted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

Score = Callable[[int], float]


def relative_gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


class Sim(ABC):
    """One cache of token ids: the tokens of one layer and one set of heads."""

    num_sinks: int
    sinks: list[int]
    unit: int = 1
    """Consecutive tokens that are kept and evicted together."""
    normalise: bool = False
    """Whether the scores it is given must be divided by the queries that saw the token."""
    closest_contest: float = math.inf
    """The smallest relative gap between two scores, one of which had to lose, up to the last
    stride's end: when it is tiny, two correct implementations may keep different tokens."""

    @abstractmethod
    def insert(self, token: int, score: Score) -> int | None:
        """Add the next token of the stream.

        `CascadeSim` and `WindowSim` return the token that was discarded, if any.
        """

    def end_stride(self, score: Score) -> None:  # noqa: B027
        """Called once after the last insertion of every stride, with the same scores."""

    @abstractmethod
    def tokens(self) -> list[int]:
        """Everything cached, sinks first, oldest to newest."""

    def arranged(self) -> list[int]:
        """The same in the order of positions."""
        return self.tokens()

    def first_of(self, token: int) -> int:
        """The token whose age counts where scores are compared per query: its unit's first."""
        return token

    def take_merged(self) -> tuple[list[int], list[int]]:
        """Kept tokens that stand for others, and those that newly join them."""
        return [], []


class CascadeSim(Sim):
    """The insertion walk of the cascading cache, with one real list per sub-cache.

    `subcaches[0]` is the newest; each list runs from its oldest to its newest token.
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
        self.budget = num_subcaches * window
        self.base = base
        self.eager_fill = eager_fill
        self.tie = tie
        self.sinks: list[int] = []
        self.subcaches: list[list[int]] = [[] for _ in range(num_subcaches)]
        self.seen = 0

    def accepts(self, i: int, p: int) -> bool:
        """Whether sub-cache i takes whatever reaches it while token p of the stream is inserted."""
        if self.eager_fill and p <= self.budget + self.num_sinks:
            return True
        return (p - self.num_sinks) % self.base**i == 0

    def incoming_wins(self, item: int, resident: int, score: Score) -> bool:
        """Compare the item that arrives with the newest token of a sub-cache that is closed."""
        a, b = score(item), score(resident)
        self.closest_contest = min(self.closest_contest, relative_gap(a, b))
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


class WindowSim(Sim):
    """Attention sinks plus the most recent `window` tokens (plain window when num_sinks = 0)."""

    def __init__(self, num_sinks: int, window: int) -> None:
        if num_sinks < 0 or window < 1:
            raise ValueError("impossible size")
        self.num_sinks = num_sinks
        self.window = window
        self.budget = window
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


class H2OSim(Sim):
    """Heavy hitters: sinks, the most recent `window` tokens, and those with the highest scores.

    Scores are meant to be plain sums of attention probabilities, or with `normalise` that sum per
    query. When more than `budget` tokens (without sinks) are cached, the one with the lowest score
    leaves among those older than the window; of equals, the older. This is looked at whenever
    t - (num_sinks + budget) is a multiple of `overflow`. A window beyond the budget is the budget.
    """

    def __init__(
        self,
        num_sinks: int,
        budget: int,
        window: int,
        normalise: bool = False,
        overflow: int = 1,
    ) -> None:
        if num_sinks < 0 or budget < 1 or window < 0 or overflow < 1:
            raise ValueError("impossible size")
        self.num_sinks = num_sinks
        self.budget = budget
        self.window = min(window, budget)
        self.normalise = normalise
        self.overflow = overflow
        self.sinks: list[int] = []
        self.cached: list[int] = []
        self.seen = 0
        self.gone: list[int] = []  # in this stride
        self.rivals: list[int] = []  # what could have gone in their place

    def insert(self, token: int, score: Score) -> int | None:
        self.seen += 1
        (self.sinks if self.seen <= self.num_sinks else self.cached).append(token)
        if (self.seen - self.num_sinks - self.budget) % self.overflow == 0:
            self.evict(score)
        return None

    def evict(self, score: Score) -> None:
        while len(self.cached) > self.budget:
            older = self.cached[: len(self.cached) - self.window]
            loser = min(older, key=score)  # the first, so the oldest, of equals
            self.cached.remove(loser)
            self.gone.append(loser)
            self.rivals = [token for token in older if token != loser]

    def end_stride(self, score: Score) -> None:
        # With frozen scores, evictions one by one end with the best of all that took part: the
        # order in which the others left does not matter, nor does a close contest among them.
        if self.gone and self.rivals:
            gap = relative_gap(max(map(score, self.gone)), min(map(score, self.rivals)))
            self.closest_contest = min(self.closest_contest, gap)
        self.gone = []

    def tokens(self) -> list[int]:
        return self.sinks + self.cached


class DrawnSim(H2OSim):
    """The same for whole numbers, of which rounding decides none."""

    def end_stride(self, score: Score) -> None:
        self.gone = []


class OverflowSim(Sim):
    """Another simulation that takes in new tokens only every `overflow` tokens, in one batch.

    Until then they are pending, and cached on top of what `inner` holds. A batch is inserted one
    by one, with the scores of that moment, after each token where t - (num_sinks + budget) is a
    multiple of `overflow`, before the cache is full as well. Sinks never wait.
    """

    def __init__(self, inner: CascadeSim | WindowSim | H2OSim, overflow: int) -> None:
        if overflow < 1:
            raise ValueError("impossible size")
        self.inner = inner
        self.overflow = overflow
        self.num_sinks = inner.num_sinks
        self.budget = inner.budget
        self.normalise = inner.normalise
        self.sinks = inner.sinks  # the same list
        self.pending: list[int] = []
        self.seen = 0

    def insert(self, token: int, score: Score) -> int | None:
        self.seen += 1
        if self.seen <= self.num_sinks:
            self.inner.insert(token, score)
        else:
            self.pending.append(token)
        if (self.seen - self.num_sinks - self.budget) % self.overflow == 0:
            while self.pending:
                self.inner.insert(self.pending.pop(0), score)
        return None

    def end_stride(self, score: Score) -> None:
        self.inner.end_stride(score)
        self.closest_contest = self.inner.closest_contest

    def tokens(self) -> list[int]:
        return self.inner.tokens() + self.pending

    def arranged(self) -> list[int]:
        return self.inner.arranged() + self.pending

    def take_merged(self) -> tuple[list[int], list[int]]:
        return self.inner.take_merged()


class LazySim(Sim):
    """Lazy pruning (Algorithm 1): nothing leaves before the cache is `overflow` tokens too long.

    Checked once per stride, at its end. `overflow` = 0 never prunes.
    """

    def __init__(
        self, num_sinks: int, window: int, overflow: int, slack: int = 0, max_drop: int = 0
    ) -> None:
        if num_sinks < 0 or window < 1 or min(overflow, slack, max_drop) < 0:
            raise ValueError("impossible size")
        self.num_sinks = num_sinks
        self.window = window
        self.overflow = overflow
        self.slack = slack
        self.max_drop = max_drop
        self.sinks: list[int] = []
        self.recent: list[int] = []

    def insert(self, token: int, score: Score) -> int | None:
        (self.sinks if len(self.sinks) < self.num_sinks else self.recent).append(token)
        return None

    def end_stride(self, score: Score) -> None:
        length = len(self.sinks) + len(self.recent)
        capacity = self.num_sinks + self.window
        hard_cap = capacity + self.slack
        if self.overflow == 0 or length <= capacity or length - capacity < self.overflow:
            return
        target = capacity
        if self.max_drop > 0:
            target = min(max(length - self.max_drop, capacity), hard_cap)
        self.recent = self.recent[length - target :]

    def tokens(self) -> list[int]:
        return self.sinks + self.recent


class BeehiveSim(Sim):
    """BUZZ: sinks, a window of recent tokens, and a middle that is thinned out when it is long.

    An eviction keeps every ((stride + 1) // 2)-th of the old middle tokens, those that survived an
    eviction before, and of every `stride` of the new ones (the last segment may be short) the one
    with the highest score, of equals the oldest. What is left is old from then on. Scores are
    meant to be plain sums of attention probabilities, never reset.

    Evictions happen at a stride's end, again and again until no more than `threshold` tokens are
    in the middle (`threshold_counts` = "middle"), or among its new tokens ("new": one eviction is
    always enough, since it leaves no new tokens).
    """

    def __init__(
        self,
        num_sinks: int,
        window: int,
        stride: int,
        threshold: int,
        threshold_counts: str = "middle",
    ) -> None:
        if threshold_counts not in ("middle", "new"):
            raise ValueError(f"threshold_counts={threshold_counts!r}: 'middle' or 'new'")
        if num_sinks < 0 or window < 0 or threshold < 1:
            raise ValueError("impossible size")
        if stride < 3:
            raise ValueError("stride < 3: every old token would stay, and the cache would grow")
        self.num_sinks = num_sinks
        self.window = window
        self.stride = stride
        self.threshold = threshold
        self.threshold_counts = threshold_counts
        self.sinks: list[int] = []
        self.cached: list[int] = []  # old, new, window
        self.num_old = 0

    def insert(self, token: int, score: Score) -> int | None:
        (self.sinks if len(self.sinks) < self.num_sinks else self.cached).append(token)
        return None

    def end_stride(self, score: Score) -> None:
        while self.counted() > self.threshold:
            self.evict(score)

    def num_middle(self) -> int:
        return max(0, len(self.cached) - self.window)

    def counted(self) -> int:
        """The tokens that the threshold limits."""
        if self.threshold_counts == "middle":
            return self.num_middle()
        return self.num_middle() - self.num_old

    def evict(self, score: Score) -> None:
        middle = self.num_middle()
        old, new = self.cached[: self.num_old], self.cached[self.num_old : middle]
        kept = old[:: (self.stride + 1) // 2]
        for start in range(0, len(new), self.stride):
            kept.append(self.winner(new[start : start + self.stride], score))
        self.num_old = len(kept)
        self.cached = kept + self.cached[middle:]

    def winner(self, segment: list[int], score: Score) -> int:
        best = max(segment, key=score)  # the first, so the oldest, of equals
        for token in segment:
            if token != best:
                gap = relative_gap(score(best), score(token))
                self.closest_contest = min(self.closest_contest, gap)
        return best

    def tokens(self) -> list[int]:
        return self.sinks + self.cached
