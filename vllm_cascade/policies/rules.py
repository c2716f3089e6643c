# SPDX-License-Identifier: Apache-2.0
"""Victim rules: what a policy evicts when one token is inserted.

The cache is a **line** of tokens, oldest to newest. A token's **rank** is its index in the line.
An insertion appends the token with the highest rank, then applies a short list of rules in order.
Each rule sees the ranks left by the rule before it.

The list depends on the number of tokens seen, never on scores. The host therefore knows counts,
pages and positions in advance, and a step can be captured in a CUDA graph. Every executor runs the
same rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """One eviction among the ranks ``[lo, hi)`` of the current line.

    Attributes:
        lo: first rank of the range.
        hi: end of the range, exclusive.
        evicts: number of tokens evicted.
        cell: how victims are chosen.

            - 0: evict the lowest score (``evicts`` is 1) or the whole range (``hi - lo``).
            - Positive: split the range from ``lo`` into cells of ``cell`` ranks. The highest score
              of each cell stays.
            - Negative: split into cells of ``-cell`` ranks. The oldest token of each cell stays.

            The last cell may be shorter.
    """

    lo: int
    hi: int
    evicts: int
    cell: int = 0

    def __post_init__(self) -> None:
        stay = -(-(self.hi - self.lo) // abs(self.cell)) if self.cell else None
        allowed = (1, self.hi - self.lo) if stay is None else (self.hi - self.lo - stay,)
        assert 0 <= self.lo < self.hi and self.evicts in allowed, self

    @property
    def size(self) -> int:
        """Number of ranks in the range."""
        return self.hi - self.lo

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The rule as a table row: lo, hi, evicts, cell."""
        return self.lo, self.hi, self.evicts, self.cell


Rules = tuple[Rule, ...]
"""Rules of one insertion, in order."""
MOST_INSERTIONS = 1 << 20
"""Most units until rules repeat; there is a row of a table for each, about 500 bytes."""


@dataclass(frozen=True)
class Insertions:
    """Rules of inserting tokens 0, 1, 2, ... of a stream: a transient, then a period.

    Attributes:
        rules: one entry per token, starting with the first.
        period: number of trailing entries that repeat forever.
    """

    rules: Sequence[Rules]
    period: int = 1


@dataclass(frozen=True)
class Scoring:
    """Where scores come from and how they are compared. Every executor supports all options.

    Attributes:
        source: origin of the scores.

            - ``attention``: at every query ``score = decay * score + weight * probability``. The
              probability is reduced over the heads that share a kept set. A sum uses
              ``decay = weight = 1``, an average ``decay = gamma``, ``weight = 1 - gamma``.
            - ``text``: the host sets each token's score once (``text_importance.py``).
            - ``random``: the same, with a number drawn by ``seed`` (``random.py``).
            - ``none``: scores are unused.
        per_age: compare the score divided by the number of queries that saw the token. Raw sums
            favour old tokens.
        newest_stays: which of equal scores stays: the newest (True) or the oldest.
        seed: of ``random``.
    """

    source: Literal["none", "attention", "text", "random"]
    decay: float = 1.0
    weight: float = 1.0
    per_age: bool = False
    newest_stays: bool = True
    seed: int = 0

    @property
    def from_host(self) -> bool:
        """Whether the host sets each token's score, once."""
        return self.source in ("text", "random")
