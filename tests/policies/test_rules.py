# SPDX-License-Identifier: Apache-2.0
"""Victim rules: what may be one, and each policy's, on literal lists, against its simulation."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.settings import make_sim
from tests.policies.cases import literal_scores, raw_settings
from tests.policies.literal import apply, rules_of
from vllm_cascade.policies.registry import POLICIES, may_have_cells, resolve
from vllm_cascade.policies.rules import Rule, Rules
from vllm_cascade.policies.schedule import Schedule, Table, compiled

TOKENS = 1000
"""At most; less where three periods are over earlier."""


def schedule_of(**raw: Any) -> Schedule:
    return compiled(resolve(raw))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rules_keep_what_the_simulation_keeps(name: str, data: st.DataObject) -> None:
    """Token by token, three periods far; what tables say is what the policy says."""
    raw = data.draw(raw_settings(name))
    policy, sim = resolve(raw), make_sim(raw)
    schedule, own = compiled(policy), policy.insertions()
    num = min(schedule.transient + 3 * schedule.period, TOKENS)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = literal_scores(rng, num, data.draw(st.sampled_from([4, 1000])))
    line: list[int] = []
    for t in range(num):
        line.append(t)
        values = {i: scores[i] / (t + 1 - i if sim.normalise else 1) for i in line}
        rules = rules_of(schedule, t)
        if policy.overflow == 1 or policy.batches_itself:
            first = len(own.rules) - own.period
            assert rules == list(own.rules[t if t < first else first + (t - first) % own.period])
        assert may_have_cells(policy) or not any(rule.cell for rule in rules)
        for rule in rules:
            line = apply(rule, line, values, policy.tie == "incoming")
        sim.insert(t, lambda i, values=values: values[i])
        assert line == sim.tokens()


def test_every_family_of_rules_occurs() -> None:
    """The lists above are not trivially one kind of rule."""
    comb = schedule_of(name="beehive", budget=60, window=5, stride=4, threshold=40)
    rules = [rule for t in range(200) for rule in rules_of(comb, t)]
    assert {4, -2} == {rule.cell for rule in rules}
    cascade = schedule_of(name="cascade", budget=32, num_subcaches=2, overflow=5)
    batch = max((rules_of(cascade, t) for t in range(100)), key=len)
    assert len(batch) > 1 and {rule.hi - rule.lo for rule in batch} <= {1, 2}
    heavy = schedule_of(name="h2o", budget=20, overflow=3)
    assert [rule.evicts for rule in rules_of(heavy, 26)] == [1, 1, 1]
    lazy = schedule_of(name="lazy", budget=20, overflow=8, slack=6, max_drop=3)
    assert {rule.evicts for t in range(99) for rule in rules_of(lazy, t)} == {3}


def test_what_rules_do_not_say_is_marked() -> None:
    for importance, order in (("cluster", "chronological"), ("tfidf", "importance")):
        own = {"importance": importance, "order": order}
        assert schedule_of(name="dgc", budget=9, **own).moves_tokens
    assert not any(schedule_of(name=name, budget=32).moves_tokens for name in POLICIES)


@pytest.mark.parametrize(
    ("numbers", "right"),
    [
        ((2, 5, 1, 0), True),  # without cells, one or all
        ((2, 5, 3, 0), True),
        ((2, 5, 0, 0), False),
        ((2, 5, 2, 0), False),
        ((2, 5, 4, 0), False),
        ((-1, 3, 1, 0), False),
        ((3, 3, 1, 0), False),  # an empty range
        ((4, 3, 1, 0), False),
        ((0, 7, 4, 3), True),  # three cells: four leave
        ((0, 7, 5, 3), False),
        ((0, 7, 4, -3), True),
        ((0, 7, 3, -3), False),
        ((0, 7, 0, 1), True),
    ],
)
def test_what_is_a_rule(numbers: tuple[int, int, int, int], right: bool) -> None:
    if right:
        assert Rule(*numbers).numbers == numbers and Rule(*numbers).size == numbers[1] - numbers[0]
        return
    with pytest.raises(AssertionError):
        Rule(*numbers)


FILL: list[Rules] = [()] * 6
"""Six tokens that only fill the cache: the next one has rank 6."""


@pytest.mark.parametrize(
    ("last", "fits"),
    [
        ((Rule(0, 7, 1),), True),  # the new token may be the one that leaves
        ((Rule(0, 8, 1),), False),
        ((Rule(5, 8, 3),), False),
        ((Rule(0, 6, 4, 3),), True),
        ((Rule(0, 7, 4, 3),), False),  # a cell that holds the new token
        ((Rule(1, 7, 3, -2),), False),
        ((Rule(0, 2, 1), Rule(0, 6, 1)), True),
        ((Rule(0, 2, 1), Rule(0, 7, 1)), False),  # beyond what the first left
        ((Rule(0, 3, 2, 3), Rule(0, 4, 2, 2)), True),
        ((Rule(0, 3, 2, 3), Rule(0, 5, 2, 2)), False),
    ],
)
def test_rules_must_fit_the_line(last: Rules, fits: bool) -> None:
    """When a schedule is compiled, not when a kernel reads past a request's slots."""
    if fits:
        evicted = sum(rule.evicts for rule in last)
        assert Table([*FILL, last], 1).count.tolist() == [1, 2, 3, 4, 5, 6, 7 - evicted]
        return
    with pytest.raises(AssertionError):
        Table([*FILL, last], 1)
