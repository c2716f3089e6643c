# SPDX-License-Identifier: Apache-2.0
"""Lines of tokens as Python lists: what rules mean, by the words of ``Rule``'s docstring.

Importing it imports nothing of ours, since kernels are checked where only they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_cascade.policies.rules import Rule
    from vllm_cascade.policies.schedule import Schedule

Values = Mapping[int, float] | Sequence[float]
"""What is compared, by token."""


class Numbers(NamedTuple):
    """The numbers of a ``Rule``."""

    lo: int
    hi: int
    evicts: int
    cell: int


def apply(rule: Rule | Numbers, line: list[int], values: Values, newest_stays: bool) -> list[int]:
    """The line without what a rule deletes."""
    middle = line[rule.lo : rule.hi]
    assert len(middle) == rule.hi - rule.lo, "a range beyond the line's end"
    if rule.cell:
        cells = [middle[i : i + abs(rule.cell)] for i in range(0, len(middle), abs(rule.cell))]
        stay = [cell[0] if rule.cell < 0 else winner(cell, values, newest_stays) for cell in cells]
    elif rule.evicts == len(middle):
        stay = []
    else:
        worst = min(values[token] for token in middle)
        tied = [token for token in middle if values[token] == worst]
        stay = [token for token in middle if token != tied[0 if newest_stays else -1]]
    assert len(middle) - len(stay) == rule.evicts
    return line[: rule.lo] + stay + line[rule.hi :]


def winner(cell: list[int], values: Values, newest_stays: bool) -> int:
    best = max(values[token] for token in cell)
    return [token for token in cell if values[token] == best][-1 if newest_stays else 0]


def insert(
    line: Sequence[int],
    tokens: Sequence[Sequence[Rule | Numbers]],
    values: Values,
    newest_stays: bool,
) -> list[int]:
    """What is left of a line of tokens ``0 .. n - 1`` after one more for each list of rules."""
    new = len(line)
    line = list(line)
    for token, rules in enumerate(tokens, start=new):
        line.append(token)
        for rule in rules:
            line = apply(rule, line, values, newest_stays)
    return line


def rules_of(schedule: Schedule, t: int) -> list[Rule]:
    """What inserting token ``t`` deletes, from the tables that every device reads."""
    from vllm_cascade.policies.rules import Rule

    past = (t - schedule.transient) % schedule.period
    row = t if t < schedule.transient else schedule.transient + past
    begin, end = schedule.first[row : row + 2].tolist()
    return [Rule(*numbers) for numbers in schedule.rules[begin:end].tolist()]
