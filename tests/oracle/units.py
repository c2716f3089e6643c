# SPDX-License-Identifier: Apache-2.0
"""Units: consecutive tokens that are kept, compared and evicted together, for any simulation."""

from __future__ import annotations

from typing import Any

from tests.oracle.policies import Score, Sim

TOKEN_COUNTS: dict[str, dict[str, int | None]] = {
    "beehive": {"window": None, "threshold": None},
    "dgc": {"global_size": None},
    "h2o": {"window": None},
    "random": {"window": None},
    "lazy": {"overflow": 32, "slack": 24, "max_drop": 8},
}
"""What counts tokens in one policy only, and the default; None: it follows from the budget."""


def unit_of(settings: dict[str, Any]) -> int:
    """Tokens of a unit."""
    unit = settings.get("unit", 1)
    if not isinstance(unit, int) or unit < 1:
        raise ValueError(f"unit={unit!r}: the oracle has no pages, give it a number of tokens")
    return unit


def in_units(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with every number of tokens as a number of units.

    So defaults that follow from the budget are worked out in units. What counts something else
    (sub-caches, beehive's `stride`) and what is no part of a simulation stays as it is.
    """
    unit, name = unit_of(settings), settings["name"]
    refuse_tokens(settings)
    own = TOKEN_COUNTS.get(name, {})
    sinks = {} if name == "window" else {"num_sinks": unit}
    given = {key: value for key, value in settings.items() if value is not None}
    result = {**sinks, **own, **given}
    for key in dict.fromkeys(("budget", "num_sinks", "overflow", *own)):
        tokens = result.get(key)
        if tokens is None or (key, tokens) == ("overflow", 1):  # one unit, too
            continue
        if tokens % unit:
            raise ValueError(f"{key} {tokens} must be a multiple of unit {unit}")
        result[key] = tokens // unit
    return {key: value for key, value in result.items() if value is not None}


def refuse_tokens(settings: dict[str, Any]) -> None:
    """Raise where settings are about single tokens, or cut a prompt inside a unit."""
    unit, single = unit_of(settings), {"preset": "paper"}
    if settings["name"] == "dgc":
        single |= {"importance": "cluster", "order": "importance"}
    for key, value in single.items():
        if settings.get(key) == value:
            raise ValueError(f"{key} {value!r} is about single tokens: unit must be 1")
    if settings.get("prefill_stride", 0) % unit:
        raise ValueError(f"prefill_stride must be a multiple of unit {unit}")


class UnitSim(Sim):
    """A simulation of units of `unit` consecutive tokens, fed with tokens.

    Unit u is tokens u * unit .. (u + 1) * unit - 1; `inner` knows nothing but unit numbers. A
    unit is inserted with its last token, and is worth the sum of what its tokens are worth; until
    then its tokens are cached. A stride in which no unit is completed is none for `inner`.
    """

    def __init__(self, inner: Sim, unit: int) -> None:
        if unit < 1:
            raise ValueError("impossible size")
        self.inner = inner
        self.unit = unit
        self.num_sinks = inner.num_sinks * unit
        self.normalise = inner.normalise
        self.sinks: list[int] = []
        self.filling: list[int] = []
        self.completed = False  # whether any unit was, in this stride

    def insert(self, token: int, score: Score) -> int | None:
        if len(self.sinks) < self.num_sinks:
            self.sinks.append(token)
        self.filling.append(token)
        if len(self.filling) == self.unit:
            self.filling = []
            self.inner.insert(token // self.unit, self.score_of_units(score))
            self.completed = True
        return None

    def score_of_units(self, score: Score) -> Score:
        return lambda number: sum(map(score, self.tokens_of(number)))

    def tokens_of(self, number: int) -> range:
        return range(number * self.unit, (number + 1) * self.unit)

    def end_stride(self, score: Score) -> None:
        if self.completed:
            self.inner.end_stride(self.score_of_units(score))
            self.closest_contest = self.inner.closest_contest
        self.completed = False

    def tokens(self) -> list[int]:
        whole = [token for number in self.inner.tokens() for token in self.tokens_of(number)]
        return whole + self.filling

    def first_of(self, token: int) -> int:
        return token - token % self.unit
