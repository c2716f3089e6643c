# SPDX-License-Identifier: Apache-2.0
"""The cascade against a literal simulation of the paper's Algorithm 1 (tests/oracle)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.policies import CascadeSim
from tests.policies.literal import apply, rules_of
from vllm_cascade.policies.cascade import Cascade
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.simulate import simulate


def cascade(window: int, num_subcaches: int, num_sinks: int = 1, **kwargs: Any) -> Cascade:
    """A cascade by window size; skips the config check so that odd windows can be tested."""
    values = {"num_subcaches": num_subcaches, "num_sinks": num_sinks, **kwargs}
    defaults = {name: field.default for name, field in Cascade.model_fields.items()}
    return Cascade.model_construct(**{**defaults, **values, "budget": window * num_subcaches})


def simulation(policy: Cascade) -> CascadeSim:
    return CascadeSim(
        policy.num_sinks,
        policy.num_subcaches,
        policy.window,
        base=policy.cascade_base,
        eager_fill=policy.eager_fill,
        tie=policy.tie,
    )


def stream(policy: Cascade, strides: list[int], scores: list[float]) -> list[list[int]]:
    """Kept ids after every stride: single tokens by their rules, others by the stride's plan."""
    schedule = compiled(policy)
    kept: list[int] = []
    snapshots = []
    t = 0
    for length in strides:
        tokens = kept + list(range(t, t + length))
        values = torch.tensor([[scores[token] for token in tokens]] * 2)
        mask = schedule.survivors(values, schedule.plan(t, length))
        assert torch.equal(mask[0], mask[1])
        kept = [token for token, keep in zip(tokens, mask[0].tolist(), strict=True) if keep]
        if length == 1:
            rules = rules_of(schedule, t)
            assert len(rules) <= 1 and all(rule.size <= 2 for rule in rules)
            for rule in rules:
                tokens = apply(rule, tokens, scores, policy.tie == "incoming")
            assert tokens == kept
        t += length
        snapshots.append(kept)
    return snapshots


VECTORS = {
    # docs/ALGORITHMS.md, "Cascade": S=1, W=4, N=3, base 2; oldest to newest.
    ("resident", False, 5): [0, 1, 2, 3, 4, 5],
    ("resident", False, 10): [0, 1, 3, 5, 7, 8, 9, 10],
    ("resident", False, 13): [0, 1, 3, 5, 7, 9, 10, 11, 12, 13],
    ("resident", False, 20): [0, 1, 5, 9, 11, 13, 15, 17, 18, 19, 20],
    ("resident", False, 40): [0, 13, 17, 21, 25, 29, 31, 33, 35, 37, 38, 39, 40],
    ("incoming", False, 6): [0, 2, 3, 4, 5, 6],
    ("incoming", False, 10): [0, 2, 4, 6, 7, 8, 9, 10],
    ("incoming", False, 40): [0, 16, 20, 24, 28, 30, 32, 34, 36, 37, 38, 39, 40],
    ("incoming", True, 12): list(range(13)),
    ("incoming", True, 13): [0, *range(2, 14)],
    ("incoming", True, 14): [0, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14],
    ("incoming", True, 40): [0, 16, 20, 24, 28, 30, 32, 34, 36, 37, 38, 39, 40],
}


@pytest.mark.parametrize(("tie", "eager", "last"), VECTORS)
@pytest.mark.parametrize("whole", [True, False])
def test_vectors_without_scores(tie: str, eager: bool, last: int, whole: bool) -> None:
    policy = cascade(4, 3, tie=tie, eager_fill=eager)
    strides = [last + 1] if whole else [1] * (last + 1)
    assert stream(policy, strides, [0.0] * (last + 1))[-1] == VECTORS[tie, eager, last]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (40, [0, 15, 18, 21, 27, 30, 31, 33, 36, 37, 38, 39, 40]),
        (60, [0, 33, 39, 42, 45, 49, 51, 54, 55, 57, 58, 59, 60]),
    ],
)
def test_vectors_with_scores(last: int, expected: list[int]) -> None:
    scores = [1.0 if token % 3 == 0 else 0.0 for token in range(last + 1)]
    policy = cascade(4, 3, tie="resident", eager_fill=False)
    assert stream(policy, [last + 1], scores)[-1] == expected


def test_counts_of_the_vectors() -> None:
    schedule = compiled(cascade(4, 3, eager_fill=False))
    expected = [1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 10, 10]
    expected += [11] * 4 + [12] * 4 + [13] * 3
    assert [schedule.count_at(p + 1) for p in range(28)] == expected


@pytest.mark.parametrize(
    ("sinks", "window", "num", "full_at"),
    [(4, 512, 4, 7676), (4, 8, 4, 116), (0, 32, 4, 472), (4, 7, 3, 48)],
)
def test_when_it_is_first_full(sinks: int, window: int, num: int, full_at: int) -> None:
    policy = cascade(window, num, sinks, eager_fill=False)
    assert compiled(policy).count_at(full_at) == policy.capacity - 1
    assert compiled(policy).count_at(full_at + 1) == policy.capacity


class CountingSim(CascadeSim):
    """Each sub-cache but the first is open for every ``base``-th token that it is offered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offers = [0] * self.num_subcaches

    def accepts(self, i: int, p: int) -> bool:
        self.offers[i] += 1
        return i == 0 or (self.offers[i] - 1) % self.base == 0


@pytest.mark.parametrize("tie", ["incoming", "resident"])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize(("num", "base"), [(2, 2), (3, 2), (3, 3)])
def test_where_counting_offers_is_the_same(num: int, base: int, unit: int, tie: str) -> None:
    """In units, budgets are valid also where it is not (docs/ALGORITHMS.md, "Cascade")."""
    step, sinks = base ** (num - 1), 2
    found: set[bool] = set()
    for window in range(2, 2 * step + 1):  # units of a sub-cache
        raw = {"name": "cascade", "num_subcaches": num, "cascade_base": base, "tie": tie}
        raw |= {"budget": num * window * unit, "num_sinks": sinks * unit, "eager_fill": False}
        if raw["budget"] % Cascade.budget_step({**raw, "unit": unit}):
            continue
        length = 3 * window * base**num
        policy = resolve({**raw, "unit": unit, "prefill_stride": unit})
        counting = CountingSim(sinks, num, window, base=base, eager_fill=False, tie=tie)
        same, closed = True, base == 2
        for t, step_of in enumerate(simulate(policy, length * unit, every=unit)):
            counting.insert(t, lambda _: 0.0)
            kept = [token // unit for token in step_of.kept[::unit]]
            same &= kept == counting.tokens()
            closed &= len(kept) == count_after(t, sinks, window, num)
        assert same == (window % step == 0), window
        assert base != 2 or closed == same, window
        found.add(same)
    assert found == ({True} if math.gcd(step, unit) == 1 else {True, False})


def count_after(p: int, sinks: int, window: int, num: int) -> int:
    """The closed form of docs/ALGORITHMS.md for base 2."""
    j = p - sinks
    for i in range(num if j >= 0 else 0):
        if (2**i - 1) * window <= j < (2 ** (i + 1) - 1) * window:
            more = i * window + 1 + (j - (2**i - 1) * window) // 2**i
            return sinks + min(num * window, more)
    return p + 1 if j < 0 else sinks + num * window


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cascade, list[int], list[float]]:
    policy = cascade(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 5)),
        cascade_base=draw(st.integers(2, 4)),
        eager_fill=draw(st.booleans()),
        tie=draw(st.sampled_from(["incoming", "resident"])),
    )
    strides = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    scores = draw(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=sum(strides), max_size=sum(strides))
    )
    return policy, strides, scores


@settings(max_examples=300, deadline=None)
@given(cases())
def test_plans_and_rules_follow_algorithm_1(case: tuple[Cascade, list[int], list[float]]) -> None:
    """Any mix of strides keeps what one-by-one insertion with the same scores keeps."""
    policy, strides, scores = case
    sim = simulation(policy)
    t = 0
    for length, kept in zip(strides, stream(policy, strides, scores), strict=True):
        for token in range(t, t + length):
            sim.insert(token, lambda token: scores[token])
        t += length
        assert kept == sim.tokens()
        assert len(kept) == compiled(policy).count_at(t)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_counts_far_beyond_the_transient(case: tuple[Cascade, list[int], list[float]]) -> None:
    """The periodic table must hold for ever, not only while it is first filled."""
    policy, _, _ = case
    sim = simulation(policy)
    schedule = compiled(policy)
    assert schedule.period == policy.cascade_base ** (policy.num_subcaches - 1)
    peak = 0
    for token in range(min(schedule.transient + 3 * schedule.period, 2500)):
        before = sim.tokens()
        rules = rules_of(schedule, token)
        lost = sim.insert(token, lambda token: float(token % 5))
        assert (lost is None) == (not rules)
        if lost is not None:
            (rule,) = rules
            assert rule.lo <= [*before, token].index(lost) < rule.hi
        assert schedule.count_at(token + 1) == len(sim.tokens())
        peak = max(peak, len(sim.tokens()))
        assert schedule.peak_at(token + 1) == peak
    assert peak <= policy.capacity


def test_gamma_is_the_papers() -> None:
    assert cascade(512, 4).gamma == pytest.approx(0.99105, abs=1e-5)
    assert cascade(1024, 4).gamma == pytest.approx(0.9955, abs=1e-4)
    assert cascade(512, 4).gamma ** 512 == pytest.approx(0.01)
    assert cascade(512, 4, ema_gamma=0.5).gamma == 0.5
