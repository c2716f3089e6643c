# SPDX-License-Identifier: Apache-2.0
"""Victim rules, applied to literal lists, against each policy's simulation."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.settings import make_sim
from tests.policies.test_schedules import literal_scores, raw_settings
from vllm_cascade.policies import POLICIES, resolve
from vllm_cascade.policies.base import Rule
from vllm_cascade.policies.rules import COUNT, MORE, NUM_MORE, SLOTS, rule_tables, step_rules

TOKENS = 150


def apply(rule: Rule, line: list[int], values: dict[int, float], tie: str) -> list[int]:
    """The line without what a rule deletes, by the words of ``Rule``'s docstring."""
    middle = line[rule.lo : rule.hi]
    if rule.cell:
        cells = [middle[i : i + abs(rule.cell)] for i in range(0, len(middle), abs(rule.cell))]
        stay = [cell[0] if rule.cell < 0 else winner(cell, values, tie) for cell in cells]
    elif rule.evicts == len(middle):
        stay = []
    else:
        worst = min(values[token] for token in middle)
        tied = [token for token in middle if values[token] == worst]
        stay = [token for token in middle if token != tied[0 if tie == "incoming" else -1]]
    assert len(middle) - len(stay) == rule.evicts
    return line[: rule.lo] + stay + line[rule.hi :]


def winner(cell: list[int], values: dict[int, float], tie: str) -> int:
    best = max(values[token] for token in cell)
    return [token for token in cell if values[token] == best][-1 if tie == "incoming" else 0]


def rules_of(tables: Any, t: int) -> list[Rule]:
    """A row of the tables as rules again."""
    row = t if t < tables.transient else tables.transient + (t - tables.transient) % tables.period
    step = tables.steps[row].tolist()
    more = tables.more[step[MORE] : step[MORE] + step[NUM_MORE]].tolist()
    return [Rule(*numbers) for numbers in [step[:4], *more] if numbers[2]]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rules_keep_what_the_simulation_keeps(name: str, data: st.DataObject) -> None:
    raw = data.draw(raw_settings(name))
    policy, sim = resolve(raw), make_sim(raw)
    tables = rule_tables(policy)
    if policy.merge_into is not None:
        assert tables is None
        return
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = literal_scores(rng, TOKENS, data.draw(st.sampled_from([4, 1000])))
    line: list[int] = []
    for t in range(TOKENS):
        line.append(t)
        values = {i: scores[i] / (t + 1 - i if policy.needs_age else 1) for i in line}
        rules = rules_of(tables, t)
        assert rules == step_rules(policy, t)
        for rule in rules:
            line = apply(rule, line, values, policy.tie)
        sim.insert(t, lambda i, values=values: values[i])
        assert line == sim.tokens()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_counts_of_the_tables(name: str, data: st.DataObject) -> None:
    policy = resolve(data.draw(raw_settings(name)))
    tables = rule_tables(policy)
    if tables is None:
        return
    last = tables.transient + tables.period
    t = np.arange(last)
    assert tables.steps[:, COUNT].tolist() == policy.counts(t + 1).tolist()
    assert tables.steps[:, SLOTS].tolist() == policy.peaks(t + 1).tolist()
    assert policy.count(tables.transient) == policy.count(last), "a period begins as it ends"


def test_every_family_of_rules_occurs() -> None:
    """The lists above are not trivially one kind of rule."""
    comb = {"name": "beehive", "budget": 60, "window": 5, "stride": 4, "threshold": 40}
    rules = [rule for t in range(200) for rule in step_rules(resolve(comb), t)]
    assert {4, -2} == {rule.cell for rule in rules}
    cascade = {"name": "cascade", "budget": 32, "num_subcaches": 2, "overflow": 5}
    batch = max((step_rules(resolve(cascade), t) for t in range(100)), key=len)
    assert len(batch) > 1 and {rule.hi - rule.lo for rule in batch} <= {1, 2}
    heavy = resolve({"name": "h2o", "budget": 20, "overflow": 3})
    assert [r.evicts for r in step_rules(heavy, 26)] == [1, 1, 1]
    lazy = resolve({"name": "lazy", "budget": 20, "overflow": 8, "slack": 6, "max_drop": 3})
    assert {r.evicts for t in range(99) for r in step_rules(lazy, t)} == {3}


def test_policies_that_rules_cannot_say() -> None:
    for importance, order in (("cluster", "chronological"), ("tfidf", "importance")):
        policy = resolve({"name": "dgc", "budget": 9, "importance": importance, "order": order})
        assert rule_tables(policy) is None


def test_a_policy_that_marks_no_batches_has_no_batch_rules() -> None:
    with pytest.raises(NotImplementedError, match="window marks no batches"):
        resolve({"name": "window", "budget": 9}).batch_rules(3)
