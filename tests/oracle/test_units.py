# SPDX-License-Identifier: Apache-2.0
"""Units in the oracle: against rules on literal lists of units, and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.dgc import importance
from tests.oracle.model import load_model, paper_gamma, stream, strides
from tests.oracle.policies import Score, Sim
from tests.oracle.random_models import write_bloom, write_llama
from tests.oracle.settings import make_sim, oracle_settings, score_rule, token_scores
from tests.oracle.test_oracle import random_tokens, reference, replay
from tests.oracle.unit_cases import CASES, FEW, UnitCase
from tests.oracle.units import UnitSim

# ------------------------------------------------------- the rules, on one list of units each

Rule = Callable[[list[int], int, Score], list[int]]
"""The units cached, the next one of the stream, and scores: the units cached from then on."""


def recent(sinks: int, window: int) -> Rule:
    return lambda line, new, score: [u for u in [*line, new] if u < sinks or u > new - window]


def lowest(sinks: int, budget: int, window: int, later_stays: bool = True) -> Rule:
    """Of more than `budget` the worst leaves, not from the sinks or the last `window`."""

    def rule(line: list[int], new: int, score: Score) -> list[int]:
        line = [*line, new]
        rivals = line[sinks : len(line) - window]
        if len(line) <= sinks + budget:
            return line
        loser = min(rivals, key=lambda u: (score(u), u if later_stays else -u))
        return [u for u in line if u != loser]

    return rule


def cascade(
    sinks: int, sizes: list[int], base: int, eager: bool = True, tie: str = "incoming"
) -> Rule:
    """One line of units, and how many of them, from the newest back, each sub-cache has."""
    held = [0] * len(sizes)

    def rule(line: list[int], new: int, score: Score) -> list[int]:
        line = [*line, new]
        if new < sinks:
            return line
        place = len(line) - 1  # of the unit that is offered
        for i, size in enumerate(sizes):
            accepting = (eager and new <= sinks + sum(sizes)) or (new - sinks) % base**i == 0
            if held[i] < (size if accepting else 1):
                held[i] += 1
                return line
            if not accepting:
                gain = score(line[place]) - score(line[place - 1])
                wins = gain >= 0 if tie == "incoming" else gain > 0
                del line[place - 1 if wins else place]
                return line
            place -= held[i]
        del line[sinks]
        return line

    return rule


def lazy(sinks: int, budget: int, overflow: int, slack: int, max_drop: int) -> Rule:
    def rule(line: list[int], new: int, score: Score) -> list[int]:
        line, full = [*line, new], sinks + budget
        if len(line) < full + overflow:
            return line
        left = full if max_drop == 0 else min(max(len(line) - max_drop, full), full + slack)
        return line[:sinks] + line[sinks - left :]

    return rule


def comb(sinks: int, window: int, stride: int, threshold: int, new_only: bool = False) -> Rule:
    old: list[int] = []

    def rule(line: list[int], new: int, score: Score) -> list[int]:
        line = [*line, new]
        while True:
            middle = line[sinks : max(len(line) - window, sinks)]
            young = [u for u in middle if u not in old]
            if len(young if new_only else middle) <= threshold:
                return line
            cells = [young[i : i + stride] for i in range(0, len(young), stride)]
            old[:] = old[:: (stride + 1) // 2] + [
                max(cell, key=lambda u: (score(u), -u)) for cell in cells
            ]
            line = line[:sinks] + old + line[sinks + len(middle) :]

    return rule


class ByHand(Sim):
    """What UNITS says, spelt out: at the end of a stride, for every unit that is complete by then.

    `rule` and `num_sinks` are in units. `per_age` divides what a unit is worth by the number of
    queries that saw its first token; `batch` units are taken in at once, whenever their number
    less `full` is a multiple of `batch`.
    """

    def __init__(
        self,
        unit: int,
        num_sinks: int,
        rule: Rule,
        per_age: bool = False,
        batch: int = 1,
        full: int = 0,
    ) -> None:
        self.unit, self.first_units, self.rule = unit, num_sinks, rule
        self.per_age, self.batch, self.full = per_age, batch, full
        self.sinks: list[int] = []
        self.line: list[int] = []
        self.waiting: list[int] = []
        self.seen = self.units = 0

    def insert(self, token: int, score: Score) -> None:
        self.seen = token + 1

    def end_stride(self, score: Score) -> None:
        def worth(u: int) -> float:
            total = sum(score(token) for token in range(u * self.unit, (u + 1) * self.unit))
            return total / (self.seen - u * self.unit) if self.per_age else total

        for u in range(self.units, self.seen // self.unit):
            self.waiting.append(u)
            if u < self.first_units or (u + 1 - self.full) % self.batch == 0:
                for unit in self.waiting:
                    self.line = self.rule(self.line, unit, worth)
                self.waiting = []
        self.units = self.seen // self.unit

    def tokens(self) -> list[int]:
        """A mask over all tokens seen: in a unit that is kept, or in the incomplete one."""
        units = {*self.line, *self.waiting, self.seen // self.unit}
        return [token for token in range(self.seen) if token // self.unit in units]


BY_HAND: dict[str, tuple[dict[str, Any], Callable[[int], ByHand]]] = {
    # Settings in units (`settings_in_tokens` multiplies), and the rule by hand.
    "window": ({"budget": 5}, lambda b: ByHand(b, 0, recent(0, 5))),
    "sink": ({"budget": 5, "num_sinks": 2}, lambda b: ByHand(b, 2, recent(2, 5))),
    "sink-default": ({"budget": 5}, lambda b: ByHand(b, 1, recent(1, 5))),
    "sink-overflow": (
        {"budget": 5, "overflow": 3},
        lambda b: ByHand(b, 1, recent(1, 5), full=6, batch=3),
    ),
    "cascade": ({"budget": 12, "num_subcaches": 3}, lambda b: ByHand(b, 1, cascade(1, [4] * 3, 2))),
    "cascade-paper": (
        {"budget": 12, "num_subcaches": 3, "eager_fill": False, "tie": "resident"},
        lambda b: ByHand(b, 1, cascade(1, [4] * 3, 2, False, "resident")),
    ),
    "cascade-three": (
        {"budget": 12, "num_subcaches": 2, "cascade_base": 3, "num_sinks": 0},
        lambda b: ByHand(b, 0, cascade(0, [6, 6], 3)),
    ),
    "cascade-overflow": (
        {"budget": 8, "num_subcaches": 2, "overflow": 3},
        lambda b: ByHand(b, 1, cascade(1, [4, 4], 2), full=9, batch=3),
    ),
    "random": ({"budget": 7}, lambda b: ByHand(b, 1, lowest(1, 7, 3))),
    "h2o": ({"budget": 7}, lambda b: ByHand(b, 1, lowest(1, 7, 3))),  # half of 7 units: 3
    "h2o-normalise": (
        {"budget": 6, "window": 2, "normalise": True},
        lambda b: ByHand(b, 1, lowest(1, 6, 2), per_age=True),
    ),
    "h2o-overflow": (
        {"budget": 6, "window": 2, "normalise": True, "overflow": 4},
        lambda b: ByHand(b, 1, lowest(1, 6, 2), per_age=True, full=7, batch=4),
    ),
    "lazy": (
        {"budget": 6, "overflow": 4, "slack": 3, "max_drop": 2},
        lambda b: ByHand(b, 1, lazy(1, 6, 4, 3, 2)),
    ),
    "lazy-one": (
        {"budget": 6, "overflow": 1, "slack": 0, "max_drop": 0},
        lambda b: ByHand(b, 1, lazy(1, 6, 1, 0, 0)),
    ),
    "beehive": (
        {"budget": 10, "window": 2, "stride": 3, "threshold": 8},
        lambda b: ByHand(b, 1, comb(1, 2, 3, 8)),
    ),
    "beehive-theorem": ({"budget": 16}, lambda b: ByHand(b, 1, comb(1, 3, 5, 13))),
    "beehive-new": (
        {"budget": 12, "window": 1, "stride": 5, "threshold": 5, "threshold_counts": "new"},
        lambda b: ByHand(b, 1, comb(1, 1, 5, 5, new_only=True)),
    ),
    "dgc": (
        {"budget": 11, "importance": "attention"},  # a fifth of 11 units: 2
        lambda b: ByHand(b, 1, lowest(1, 11, 9), per_age=True),
    ),
    "dgc-text": (
        {"budget": 8, "global_size": 3, "tie": "resident"},
        lambda b: ByHand(b, 1, lowest(1, 8, 5, later_stays=False)),
    ),
    "dgc-overflow": (
        {"budget": 8, "global_size": 3, "importance": "attention", "overflow": 2},
        lambda b: ByHand(b, 1, lowest(1, 8, 5), per_age=True, full=9, batch=2),
    ),
}
TOKENS = {
    "budget",
    "num_sinks",
    "overflow",
    "slack",
    "max_drop",
    "window",
    "threshold",
    "global_size",
}


def settings_in_tokens(kind: str, unit: int) -> dict[str, Any]:
    sizes = {
        key: value * unit if key in TOKENS and (key, value) != ("overflow", 1) else value
        for key, value in BY_HAND[kind][0].items()
    }
    return {"name": kind.split("-")[0], **sizes, "unit": unit}


# -------------------------------------------------------------------- simulations without a model

Scores = Callable[[int], list[float]]


def scores_of(seed: int, num_tokens: int, coarse: bool) -> Scores:
    """Frozen in a stride, new in the next; halves tie often, and their sums are exact."""

    def of_stride(stride: int) -> list[float]:
        random = Random(f"{seed} {stride}")
        draw = (lambda: random.choice([0.0, 0.5])) if coarse else random.random
        return [draw() for _ in range(num_tokens)]

    return of_stride


def kept(sim: Sim, cuts: list[tuple[int, int]], scores: Scores) -> list[list[int]]:
    """What is cached at the end of each stride; the ages are what `stream` makes of them."""
    result = []
    for i, (start, end) in enumerate(cuts):
        score = dict(enumerate(scores(i)[:end]))
        if sim.normalise:
            score = {t: value / (end - sim.first_of(t)) for t, value in score.items()}
        for token in range(start, end):
            sim.insert(token, score.__getitem__)
        sim.end_stride(score.__getitem__)
        result.append(sim.tokens())
    return result


@pytest.mark.parametrize("kind", BY_HAND)
@settings(max_examples=15, deadline=None)
@given(
    unit=st.sampled_from([2, 3, 8]),
    stride=st.integers(1, 5),
    prompt=st.integers(0, 40),
    rest=st.integers(0, 3),
    inside=st.integers(1, 8),
    seed=st.integers(0, 10**6),
)
def test_equals_the_rules_on_units(
    kind: str, unit: int, stride: int, prompt: int, rest: int, inside: int, seed: int
) -> None:
    """A prompt of strides of whole units that ends anywhere, then up to 3 units one by one."""
    prompt_len = prompt * unit + min(inside, unit)
    cuts = strides(prompt_len + rest * unit, prompt_len, stride * unit)
    sim, by_hand = make_sim(settings_in_tokens(kind, unit)), BY_HAND[kind][1](unit)
    scores = scores_of(seed, cuts[-1][1], coarse=not by_hand.per_age)
    assert kept(sim, cuts, scores) == kept(by_hand, cuts, scores)
    assert sim.num_sinks == by_hand.first_units * unit
    assert sim.sinks == list(range(min(cuts[-1][1], sim.num_sinks)))


@pytest.mark.parametrize("kind", BY_HAND)
def test_decoding_equals_the_rules_on_units(kind: str) -> None:
    """Token by token all the way: two thirds of these strides complete nothing."""
    sim, by_hand = make_sim(settings_in_tokens(kind, 3)), BY_HAND[kind][1](3)
    cuts = strides(200, 0, 3)
    scores = scores_of(1, 200, coarse=not by_hand.per_age)
    assert kept(sim, cuts, scores) == kept(by_hand, cuts, scores)
    assert len(sim.tokens()) < 100


@pytest.mark.parametrize("kind", BY_HAND)
@settings(max_examples=10, deadline=None)
@given(unit=st.sampled_from([2, 5, 8]), seed=st.integers(0, 9), data=st.data())
def test_counts(kind: str, unit: int, seed: int, data: st.DataObject) -> None:
    """count(t) = unit * count_units(t div unit) + t mod unit, however a stream is cut."""
    lengths = data.draw(st.lists(st.integers(1, 3 * unit), min_size=1, max_size=40))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    cuts = list(zip([0, *ends[:-1]], ends, strict=True))
    caches = kept(make_sim(settings_in_tokens(kind, unit)), cuts, scores_of(seed, ends[-1], False))
    whole = {"num_sinks": 0 if kind == "window" else 1, **settings_in_tokens(kind, 1)}
    num = ends[-1] // unit + 1
    lines = kept(make_sim(whole), [(u, u + 1) for u in range(num)], scores_of(seed, num, False))
    counts = [0, *map(len, lines)]
    for t, cache in zip(ends, caches, strict=True):
        assert len(cache) == unit * counts[t // unit] + t % unit
        # Every unit whole, but for the last: its tokens so far are always there.
        tail = list(range(t - t % unit, t))
        assert cache[len(cache) - len(tail) :] == tail
        for u in {token // unit for token in cache[: len(cache) - len(tail)]}:
            assert set(range(u * unit, (u + 1) * unit)) <= set(cache)


def test_a_unit_waits_for_its_last_token() -> None:
    """Units of 4, one sink, two recent: token 15 completes the unit that drives out 4 to 7."""
    sim = make_sim({"name": "sink", "budget": 8, "unit": 4})
    steps = kept(sim, strides(17, 0, 4), scores_of(0, 17, False))
    assert steps[14] == list(range(15))
    assert steps[15] == [0, 1, 2, 3, *range(8, 16)]
    assert steps[16] == [0, 1, 2, 3, *range(8, 17)]


def test_a_sum_decides() -> None:
    """Two sub-caches of 2 units of 2 tokens: not the best token stays, but the best pair.

    Units 2 and 3 meet when unit 5 comes, and unit 3 has the best token of all.
    """
    sim = make_sim({"name": "cascade", "num_subcaches": 2, "budget": 8, "num_sinks": 0, "unit": 2})
    values = [0.0] * 16
    values[4:8] = [2.0, 2.0, 3.0, 0.0]
    steps = kept(sim, strides(16, 0, 2), lambda _: values)
    units = [[token // 2 for token in step[::2]] for step in steps[1::2]]
    assert units[4:] == [[1, 2, 3, 4], [1, 2, 4, 5], [2, 4, 5, 6], [2, 5, 6, 7]]


def test_closest_contest_is_of_sums() -> None:
    sim = make_sim({"name": "h2o", "budget": 6, "window": 2, "num_sinks": 0, "unit": 2})
    values = [4.0, 4.0, 5.0, 5.0, 50.0, 50.0, 0.0, 0.0]
    assert sim.closest_contest == math.inf
    kept(sim, [(0, 7)], lambda _: values)
    assert sim.closest_contest == math.inf
    kept(sim, [(7, 8)], lambda _: values)
    assert sim.closest_contest == pytest.approx(0.2)
    assert sim.tokens() == [2, 3, 4, 5, 6, 7]


def test_sums_of_texts_are_rounded_but_zero_is_not() -> None:
    """Nearly equal sums may swap in another implementation, sums of nothing cannot."""
    policy = {"name": "dgc", "budget": 6, "global_size": 4, "num_sinks": 0, "unit": 2}
    for values, gap in (([0.0] * 8, math.inf), ([0.5] * 8, 0.0), ([0.5] * 3 + [0.0] * 5, 1.0)):
        sim = make_sim(policy)
        kept(sim, strides(8, 8, 2), lambda _, values=values: values)
        assert sim.closest_contest == gap
    assert make_sim({**policy, "unit": 1}).exact


# ---------------------------------------------------------------------------------------- settings


def test_unit_one_is_no_unit() -> None:
    """Not a wrapper of size one: the same simulation as without the setting."""
    for case in CASES:
        plain = {key: value for key, value in case.settings.items() if key != "unit"}
        assert isinstance(make_sim(case.settings), UnitSim) == (case.settings["unit"] > 1)
        assert not isinstance(make_sim({"num_sinks": 0, **plain, "unit": 1}), UnitSim)
    assert make_sim({"name": "sink", "budget": 9}).num_sinks == 4
    assert make_sim({"name": "sink", "budget": 9, "unit": 1}).num_sinks == 4


@pytest.mark.parametrize("stride", [1, 7])
@pytest.mark.parametrize("kind", BY_HAND)
def test_a_wrapper_of_size_one_changes_nothing(kind: str, stride: int) -> None:
    """Though nobody makes one: the wrapper adds nothing of its own."""
    whole = {"num_sinks": 1, **settings_in_tokens(kind, 1)}
    cuts, scores = strides(100, 90, stride), scores_of(stride, 100, False)
    plain, wrapped = make_sim(whole), UnitSim(make_sim(whole), 1)
    assert kept(plain, cuts, scores) == kept(wrapped, cuts, scores)
    assert plain.sinks == wrapped.sinks
    assert plain.closest_contest == wrapped.closest_contest


def test_gamma_is_per_token() -> None:
    """A score loses 99 % over a sub-cache's tokens, whatever the unit."""
    sizes = {"name": "cascade", "budget": 128, "num_subcaches": 2}
    for unit in (1, 8, 32):
        assert score_rule({**sizes, "unit": unit})["decay"] == paper_gamma(64)


def test_text_is_judged_when_its_unit_has_left() -> None:
    """A fifth of 13 units are 2, so that 11 units of 4 tokens are recent."""
    tokens = [Random(t).randrange(9) for t in range(90)]
    ends = [7, 8].__contains__
    policy = {"name": "dgc", "budget": 52, "unit": 4}
    assert token_scores(policy, tokens, ends)(0, 0) == importance(tokens, "tfidf", 44, ends)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "page": ({"name": "sink", "budget": 64, "unit": "page"}, "has no pages"),
    "zero": ({"name": "sink", "budget": 64, "unit": 0}, "has no pages"),
    "budget": ({"name": "sink", "budget": 65}, "budget 65 must be a multiple of unit 8"),
    "sinks": ({"name": "sink", "budget": 64, "num_sinks": 4}, "num_sinks 4 must"),
    "overflow": ({"name": "sink", "budget": 64, "overflow": 2}, "overflow 2 must"),
    "stride": ({"name": "sink", "budget": 64, "prefill_stride": 4}, "prefill_stride must"),
    "window": ({"name": "h2o", "budget": 64, "window": 9}, "window 9 must"),
    "slack": ({"name": "lazy", "budget": 64, "unit": 16}, "slack 24 must"),
    "comb": ({"name": "beehive", "budget": 64, "window": 8, "threshold": 50}, "threshold 50 must"),
    "theorem": ({"name": "beehive", "budget": 64}, "write out"),
    "global": ({"name": "dgc", "budget": 64, "global_size": 9}, "global_size 9 must"),
    "cluster": ({"name": "dgc", "budget": 64, "importance": "cluster"}, "single tokens"),
    "order": ({"name": "dgc", "budget": 64, "order": "importance"}, "single tokens"),
    "paper": ({"name": "cascade", "budget": 64, "preset": "paper"}, "single tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    raw, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_sim({"unit": 8, **raw})


# ------------------------------------------------------------------------------ streams of a model


@pytest.mark.parametrize("kind", [kind for kind in BY_HAND if kind != "dgc-text"])
def test_one_layer_step_by_step(kind: str, tmp_path: Path) -> None:
    """By transformers, on what is kept: positions are ranks of tokens, and log-probabilities equal.

    The prompt ends inside a unit, so that a unit is half prompt and half answer.
    """
    unit, n, prompt_len = 4, 130, 105
    policy = {**settings_in_tokens(kind, unit), "prefill_stride": 3 * unit}
    policy["head_policy"] = "homogeneous"
    path, tokens = write_llama(tmp_path, num_layers=1), random_tokens(n, 512)
    result = stream(load_model(path), tokens, prompt_len=prompt_len, **oracle_settings(policy))
    assert result.closest_contest > 1e-6
    rule = score_rule(policy)
    by_hand, cuts = BY_HAND[kind][1](unit), strides(n, prompt_len, 3 * unit)
    expected, _, logprobs = replay(
        reference(path), tokens, cuts, by_hand, rule["decay"], rule["weight"], "mean", slice(None)
    )
    assert {end: layers[0][0] for end, layers in result.kept.items()} == expected
    torch.testing.assert_close(
        torch.tensor(result.logprobs), torch.tensor(logprobs), atol=1e-3, rtol=0
    )
    assert not result.scores[0][0, : by_hand.first_units * unit].any()


def test_unit_one_streams_the_same(tmp_path: Path) -> None:
    model, tokens = load_model(write_llama(tmp_path)), random_tokens(90, 512)
    policy = {"name": "cascade", "budget": 32, "prefill_stride": 8}
    plain, one = (
        stream(model, tokens, prompt_len=70, **oracle_settings({**policy, **unit}))
        for unit in ({}, {"unit": 1})
    )
    assert plain.kept == one.kept and plain.logprobs == one.logprobs
    assert torch.equal(plain.logits_last, one.logits_last)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_every_layer_and_head_keeps_units(kind: str, tmp_path: Path) -> None:
    """Heads and layers choose other units, as many and as whole as all others."""
    model = load_model((write_llama if kind == "llama" else write_bloom)(tmp_path))
    policy = {
        "name": "cascade",
        "budget": 32,
        "num_subcaches": 2,
        "prefill_stride": 16,
        "head_policy": "per_kv_head",
        "unit": 8,
    }
    result = stream(model, random_tokens(150, 512), prompt_len=117, **oracle_settings(policy))
    assert all(math.isfinite(value) for value in result.logprobs)
    assert result.logits_last.isfinite().all()
    different = set()
    for end, layers in result.kept.items():
        for cache in (cache for layer in layers for cache in layer):
            tail = end % 8
            assert cache[len(cache) - tail :] == list(range(end - tail, end))
            units = cache[: len(cache) - tail : 8]
            assert cache[: len(cache) - tail] == [u + i for u in units for i in range(8)]
            assert all(u % 8 == 0 for u in units) and len(units) == min(end // 8, 5)
            different.add((end, tuple(cache)))
    assert len(different) > len(result.kept)
    for layer in result.scores:
        assert not layer[:, :8].any() and layer[:, 144].all()
        assert not layer[:, 145:].any(), "a unit's score is on its first token"


# ------------------------------------------------------------------------------ the table of cases


def test_cases_cover_what_they_should() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert set(FEW) <= {case.id for case in CASES} and len(set(FEW)) == len(FEW)
    names = {"window", "sink", "cascade", "h2o", "lazy", "beehive", "dgc", "random"}
    for cases in (CASES, [case for case in CASES if case.id in FEW]):
        assert {case.settings["name"] for case in cases} == names
        assert {case.settings["unit"] for case in cases} == {1, 8, 16, 32}
        assert any(case.prompt % case.settings["unit"] for case in cases)
    for name in names:
        units = {case.settings["unit"] for case in CASES if case.settings["name"] == name}
        assert units == {1, 8, 16, 32}
    assert {case.settings.get("prefill_stride") for case in CASES} >= {16, 256}


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases_wrap_their_caches(case: UnitCase) -> None:
    """Units stay whole, what is evicted is several budgets, positions fit a small model."""
    policy, unit = case.settings, case.settings["unit"]
    sim, cuts = make_sim(policy), strides(case.total, case.prompt, policy["prefill_stride"])
    longest = 0
    for (start, end), cache in zip(
        cuts, kept(sim, cuts, scores_of(3, case.total, False)), strict=True
    ):
        longest = max(longest, len(cache) + end - start)
        whole = cache[: len(cache) - end % unit]
        assert whole[::unit] == [token for token in whole if token % unit == 0]
        assert cache[: sim.num_sinks] == list(range(min(sim.num_sinks, end)))
    assert case.total - len(cache) >= 3 * policy["budget"]
    assert longest <= 512
