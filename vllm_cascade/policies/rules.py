# SPDX-License-Identifier: Apache-2.0
"""A policy's single insertions as victim rules: what a device can follow without the host.

Whatever a policy does with one token is a short list of rules on ranks, and the list is a function
of the number of tokens seen. Batches are no exception: a batch of ``overflow`` tokens is inserted
token by token with frozen scores, and beehive's comb is a contest in every cell. So every step of
every policy can be part of a CUDA graph, but for those that merge tokens or put them out of order.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vllm_cascade.policies.base import MAX_POLICIES, Policy, Rule, insertion_tables, step_tables

LO, HI, EVICTS, CELL, MORE, NUM_MORE, COUNT, SLOTS = range(8)
STEP_COLUMNS = 8


@dataclass(frozen=True)
class RuleTables:
    """A policy's schedule for a device: a transient, then a period (``StepTables``).

    Attributes:
        steps: int32 ``[transient + period, 8]``: the first rule of inserting token ``i`` (lo, hi,
            evicts, cell; evicts 0 is none), where in ``more`` its further rules begin and how many
            they are, and after it the tokens cached and the most slots ever needed.
        more: int32 ``[n, 4]``, further rules: lo, hi, evicts, cell.
        transient: rows that occur once.
    """

    steps: np.ndarray
    more: np.ndarray
    transient: int

    @property
    def period(self) -> int:
        return len(self.steps) - self.transient


def step_rules(policy: Policy, t: int) -> list[Rule]:
    """What inserting token ``t`` deletes, in order; each rule sees the ranks that the last left.

    Tokens that wait for a batch have the highest ranks; a rule for one that is inserted before
    them does not concern them.
    """
    begin, end = policy.inserted(np.asarray([t, t + 1])).tolist()
    return [rule for token in range(begin, end) for rule in _insertion_rules(policy, token)]


def _insertion_rules(policy: Policy, t: int) -> list[Rule]:
    tables = insertion_tables(policy)
    row = int(tables.rows(np.asarray(t)))
    if tables.batch is not None and tables.batch[row]:
        return policy.batch_rules(t)
    lo, hi = int(tables.lo[row]), int(tables.hi[row])
    return [Rule(lo, hi, 1)] if hi > lo else []


@lru_cache(maxsize=MAX_POLICIES)
def rule_tables(policy: Policy) -> RuleTables | None:
    """All steps of a policy; None where rules cannot say what it does."""
    if policy.arranges or policy.merge_into is not None:
        return None
    tables = step_tables(policy)
    steps = np.zeros((len(tables.count), STEP_COLUMNS), dtype=np.int32)
    steps[:, COUNT] = tables.count
    steps[:, SLOTS] = np.maximum.accumulate(tables.count)
    cached = np.concatenate([[0], tables.count[:-1]])
    more: list[Rule] = []
    for t in np.flatnonzero(cached + 1 > tables.count).tolist():
        rules = step_rules(policy, t)
        _check(rules, int(cached[t]), int(tables.count[t]))
        steps[t, :COUNT] = *_numbers(rules[0]), len(more), len(rules) - 1
        more += rules[1:]
    rows = np.asarray([_numbers(rule) for rule in more], dtype=np.int32).reshape(-1, 4)
    return RuleTables(steps, rows, tables.transient)


def _numbers(rule: Rule) -> tuple[int, int, int, int]:
    return rule.lo, rule.hi, rule.evicts, rule.cell


def _check(rules: list[Rule], newest: int, left: int) -> None:
    """Rules must leave ``left`` tokens of ``newest + 1``, and cells never hold the newest one."""
    for rule in rules:
        assert rule.hi <= newest + (rule.cell == 0), (rule, newest)
        newest -= rule.evicts
    assert newest + 1 == left, (rules, newest, left)
