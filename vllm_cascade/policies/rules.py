# SPDX-License-Identifier: Apache-2.0
"""Victim rules: what a policy does with one token, as every executor runs it.

A cache is a line of tokens, oldest to newest; a token's *rank* is its place in it. Inserting a
token appends it with the highest rank and then applies a short list of rules, each on the ranks
that the one before left. The list follows from the number of tokens seen, never from scores, so
counts, pages and positions are known ahead of time on the host, and a step can be part of a CUDA
graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """What one eviction deletes among the ranks ``[lo, hi)`` of the line as it then is.

    Attributes:
        lo, hi: the range; the newest token has the highest rank.
        evicts: how many are deleted.
        cell: 0: the lowest score (``evicts`` is 1) or the whole range (``hi - lo``). Else the range
            is cut from ``lo`` into cells of ``abs(cell)`` ranks, the last one possibly shorter, and
            of every cell one token stays: positive: the one with the highest score; negative: the
            oldest.
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
        """Ranks in the range."""
        return self.hi - self.lo

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """A row of a table of rules: lo, hi, evicts, cell."""
        return self.lo, self.hi, self.evicts, self.cell


Rules = tuple[Rule, ...]
"""What inserting one token deletes, in order."""


@dataclass(frozen=True)
class Insertions:
    """What inserting token 0, 1, 2, ... of a stream deletes: a transient, then a period.

    Attributes:
        rules: one entry a token, from the first on.
        period: how many of the last entries repeat for ever.
    """

    rules: Sequence[Rules]
    period: int = 1


@dataclass(frozen=True)
class Scoring:
    """Where scores come from and how two are compared: the ways that every executor knows.

    Attributes:
        source: ``attention``: the probabilities that a token receives, reduced over the heads of
            its set, at every query: ``score = decay * score + weight * probability``. A sum has
            1 and 1, an average gamma and 1 - gamma. ``text``: the host gives each token its score
            once (``text_importance.py``). ``none``: nothing is compared.
        per_age: compare ``score / queries that saw the token``: raw sums favour old tokens.
        newest_stays: of tokens with equal scores the newest stays, or the oldest.
    """

    source: Literal["none", "attention", "text"]
    decay: float = 1.0
    weight: float = 1.0
    per_age: bool = False
    newest_stays: bool = True
