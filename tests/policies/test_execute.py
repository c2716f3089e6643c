# SPDX-License-Identifier: Apache-2.0
"""Strides in PyTorch: every fast plan does what its rules do one by one, on literal lists.

Rules of policies come with these policies' settings, random ones from nowhere: mixtures, so that
all kinds of plan occur.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.cases import TIES, raw_settings
from tests.policies.literal import apply, insert, rules_of
from vllm_cascade.policies.execute import (
    Plan,
    apply_rule,
    best_of,
    make_plan,
    rule_by_rule,
    survivors,
)
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.rules import Rule, Rules
from vllm_cascade.policies.schedule import MAX_PLANS, compiled


def kind(plan: Plan | None) -> str:
    """Which of a plan's ways it takes."""
    if plan is None:
        return "nothing"
    ways = [name for name in ("groups", "lowest") if getattr(plan, name) is not None]
    ways += ["rules"] if plan.rules else []
    assert len(ways) <= 1
    return ways[0] if ways else "nothing"


def random_values(seed: int, num_sets: int, num: int, different: int) -> torch.Tensor:
    """fp32 ``[num_sets, num]``; few different values make ties, also below zero."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(-1, different, (num_sets, num)).astype(np.float32) / 4)


def stays(mask: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask]


values_of = st.tuples(st.integers(0, 999), st.integers(1, 3), st.sampled_from([1, 3, 8, 10**6]))
"""Seed, head sets, different values."""


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_plans_are_its_rules(name: str) -> None:
    """Any stride from any time on; ``plan`` and the tables add ``overflow`` each in its own way."""
    kinds: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @given(
        raw=raw_settings(name),
        tie=TIES,
        start=st.floats(0, 1),
        num=st.integers(1, 60),
        drawn=values_of,
    )
    def check(raw: dict[str, Any], tie: str, start: float, num: int, drawn: Any) -> None:
        schedule = compiled(resolve({**raw, "tie": tie}))
        newest = tie == "incoming"
        t = int(start * min(schedule.transient + 2 * schedule.period, 3000))
        seed, num_sets, different = drawn
        cached = schedule.count_at(t)
        values = random_values(seed, num_sets, cached + num, different)
        plan = schedule.plan(t, num)
        kinds[kind(plan)] += 1
        got = schedule.survivors(values, plan)
        rules = [tuple(rules_of(schedule, t + i)) for i in range(num)]
        expected = [insert(list(range(cached)), rules, row, newest) for row in values.tolist()]
        assert stays(got) == expected
        assert rule_by_rule(values, cached, rules, newest).tolist() == expected
        assert {len(row) for row in expected} == {schedule.count_at(t + num)}

    check()
    fast = {"h2o": "lowest", "dgc": "lowest", "random": "lowest"}.get(name, "groups")
    assert min(kinds[fast], kinds["nothing"]) >= 3, kinds
    assert kinds["rules"] == 0, "a policy whose strides run rule by rule"


@st.composite
def lists_of_rules(draw: st.DrawFn) -> tuple[int, list[Rules]]:
    """A number of cached tokens, and what inserting some more deletes: one flavour or a mixture."""
    flavour = draw(st.sampled_from(["pairs", "cells", "ranges", "lowest", "nearly lowest", "all"]))
    cached, num = draw(st.integers(0, 14)), draw(st.integers(1, 16))
    first = draw(st.integers(0, 3))
    newer = draw(st.integers(0, 3))
    full = first + newer + draw(st.integers(3, 9))
    length, tokens = cached, []
    for _ in range(num):
        length += 1
        todo: list[Rule] = []
        if "lowest" in flavour:
            odd = draw(st.integers(0, 9)) if flavour == "nearly lowest" else 9  # one is enough
            if length > full and odd:
                todo = [Rule(first + (odd == 1), length - newer - (odd == 2), 1)]
                length -= 1
        else:
            for _ in range(draw(st.integers(0, 3))):
                rule = draw(rules_within(length, flavour)) if length else None
                if rule is not None:
                    todo.append(rule)
                    length -= rule.evicts
        tokens.append(tuple(todo))
    return cached, tokens


@st.composite
def rules_within(draw: st.DrawFn, length: int, flavour: str) -> Rule | None:
    """A rule of a flavour on a line of so many tokens; None: there is none."""
    if flavour == "all":
        flavour = draw(st.sampled_from(["pairs", "cells", "ranges", "one of many"]))
    lo = draw(st.integers(0, length - 1))
    if flavour == "pairs":
        return Rule(lo, lo + 2, 1) if lo + 2 <= length else Rule(lo, lo + 1, 1)
    hi = draw(st.integers(lo + 1, length))
    size = hi - lo
    if flavour == "ranges":
        return Rule(lo, hi, size)
    if flavour == "one of many":
        return Rule(lo, hi, 1) if size > 2 else None
    step = draw(st.integers(1, 5))
    return Rule(lo, hi, size + -size // step, draw(st.sampled_from([step, -step])))


def test_any_lists_of_rules() -> None:
    """Also lists that no policy has; every kind of plan occurs often."""
    kinds: Counter[str] = Counter()
    widest = 0

    @settings(max_examples=600, deadline=None)
    @given(case=lists_of_rules(), newest=st.booleans(), drawn=values_of)
    def check(case: tuple[int, list[Rules]], newest: bool, drawn: Any) -> None:
        nonlocal widest
        cached, rules = case
        seed, num_sets, different = drawn
        waiting = seed % 3  # ranks behind the plan's line, which wait
        total = cached + len(rules)
        values = random_values(seed, num_sets, total + waiting, different)
        plan = make_plan(cached, rules)
        kinds[kind(plan)] += 1
        if plan.groups is not None and len(plan.groups):
            widest = max(widest, plan.groups.shape[1])
        expected = [insert(list(range(cached)), rules, row, newest) for row in values.tolist()]
        got = survivors(values, plan, newest)
        behind = list(range(total, total + waiting))
        assert stays(got) == [row + behind for row in expected]
        line = values[:, :total]
        assert rule_by_rule(line, cached, rules, newest).tolist() == expected
        # No kind is what makes it right.
        plain = replace(plan, groups=None, lowest=None, rules=tuple(rules))
        assert torch.equal(survivors(values, plain, newest), got)

    check()
    assert min(kinds[way] for way in ("groups", "lowest", "rules", "nothing")) >= 10, kinds
    assert widest > 3, "groups of several contenders"


@settings(max_examples=400, deadline=None)
@given(data=st.data(), newest=st.booleans(), drawn=values_of)
def test_one_rule_by_its_words(data: st.DataObject, newest: bool, drawn: Any) -> None:
    """On lines that differ from set to set, as they do after a rule."""
    seed, num_sets, different = drawn
    total = data.draw(st.integers(1, 20))
    length = data.draw(st.integers(1, total))
    rule = data.draw(rules_within(length, "all"))
    if rule is None:
        return
    values = random_values(seed, num_sets, total, different)
    rng = np.random.default_rng(seed)
    lines = [sorted(rng.permutation(total)[:length].tolist()) for _ in range(num_sets)]
    expected = [
        apply(rule, line, row, newest) for line, row in zip(lines, values.tolist(), strict=True)
    ]
    assert apply_rule(values, torch.tensor(lines), rule, newest).tolist() == expected


def test_ties_by_hand() -> None:
    """Four equal tokens in two head sets: the oldest goes, or the newest."""
    values = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 1]])
    for newest, gone in ((True, [0, 1]), (False, [3, 2])):
        lowest = survivors(values, make_plan(3, [(Rule(0, 4, 1),)]), newest)
        assert lowest.logical_not().nonzero()[:, 1].tolist() == gone
    cells = make_plan(3, [(Rule(0, 4, 2, 2),)])
    assert stays(survivors(values, cells, True)) == [[1, 3], [0, 3]]
    assert stays(survivors(values, cells, False)) == [[0, 2], [0, 3]]
    first = make_plan(3, [(Rule(0, 4, 2, -2),)])
    assert stays(survivors(values, first, True)) == [[0, 2]] * 2


def test_a_line_may_end_empty() -> None:
    plan = make_plan(1, [(), (Rule(0, 3, 3),)])
    assert kind(plan) == "groups"
    for newest in (True, False):
        assert not survivors(torch.ones(2, 3), plan, newest).any()
        assert survivors(torch.ones(2, 4), plan, newest).nonzero()[:, 1].tolist() == [3, 3]


STREAMS: dict[str, tuple[dict[str, Any], int]] = {
    # settings, tokens of a stride
    "sink": ({"budget": 100}, 64),
    "window": ({"budget": 100}, 48),
    "cascade": ({"budget": 512}, 256),
    "cascade-odd": ({"budget": 96, "num_subcaches": 3}, 37),
    "cascade-slow": ({"budget": 512, "eager_fill": False, "overflow": 7}, 64),
    "beehive": ({"budget": 200}, 64),
    "lazy": ({"budget": 100}, 64),
    "h2o": ({"budget": 100}, 64),
    "h2o-overflow": ({"budget": 100, "overflow": 5}, 64),
    "dgc": ({"budget": 100}, 64),
    "dgc-cluster": ({"budget": 100, "importance": "cluster"}, 64),
}


@pytest.mark.parametrize("case", STREAMS)
def test_plans_are_keyed_by_phase(case: str) -> None:
    """Far into a stream no plan is made any more, and each is the one of its phase."""
    raw, stride = STREAMS[case]
    schedule = compiled(resolve({"name": case.split("-")[0], **raw}))
    schedule._plans.cache_clear()
    steady = schedule.transient + schedule.period
    steady += -steady % stride
    again = np.lcm(schedule.period, stride)
    assert again // stride <= MAX_PLANS
    plans = [schedule.plan(steady + t, stride) for t in range(0, again, stride)]
    made = schedule._plans.cache_info().misses
    assert 0 < made <= again // stride
    for round_ in (1, 2, 1000, 10**9):
        far = steady + round_ * int(again)
        for i, plan in enumerate(plans):
            assert schedule.plan(far + i * stride, stride) is plan
    assert schedule._plans.cache_info().misses == made


@pytest.mark.parametrize("newest_stays", [False, True])
def test_scores_that_are_no_numbers(newest_stays: bool) -> None:
    """A warm-up runs on memory that nobody has written: something stays, and nothing fails."""
    groups = torch.tensor([[0, -1], [1, 2]])
    found = best_of(torch.full((2, 3), torch.nan), groups, newest_stays)
    assert found.min() >= 0 and found.max() <= 2
