# SPDX-License-Identifier: Apache-2.0
"""Schedules: a policy's settings compiled into tables of counts, peaks and rules.

The number of cached tokens depends only on ``t``, the number of tokens seen. Every policy's rules
are a transient followed by a period. A step therefore reads one table row for any ``t``, and
strides that start at the same row share a plan. A step carries its schedule; no step hashes
settings.

The schedule adds three features to every policy:

- ``unit``: the policy ``in_units`` gives the rules, which apply once the last token of a unit has
  been attended. Rules, plans and compared values refer to units. All other arguments and results
  count tokens.
- ``overflow``: new tokens wait in the cache, visible and scored, and are inserted ``overflow`` at
  a time.
- ``recall``: up to ``recall`` evicted units are cached again, right after the sinks. Rules refer
  to the ranks behind them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.remembered import Remembered
from vllm_cascade.policies.rules import Rules, Scoring

if TYPE_CHECKING:
    import torch

    from vllm_cascade.policies.execute import Plan

MAX_PLANS = 256
"""Stride plans cached per schedule; one takes up to 0.1 MB."""

_numbers = itertools.count()


class Arithmetic:
    """The scoring of schedules whose strides can be batched.

    Schedules with equal scorings share one, so that steps compare it by identity.
    """

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring


_arithmetics: WeakValueDictionary[Scoring, Arithmetic] = WeakValueDictionary()


class History:
    """The settings that a cache's state depends on, as a key of dictionaries.

    Equal settings are equal keys, also if their schedule was forgotten and compiled again. They are
    hashed once, so that no step hashes settings.

    Attributes:
        policy: the settings; those of a whole cache are without ``keep_prompt``.
        is_whole: whether nothing has been evicted.
    """

    def __init__(self, policy: Policy, is_whole: bool) -> None:
        self.policy = policy.model_copy(update={"keep_prompt": 0}) if is_whole else policy
        self.is_whole = is_whole
        self._hash = hash((self.policy, is_whole))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, History) or self.is_whole != other.is_whole:
            return False
        return self.policy == other.policy


class Table:
    """Rules by the number of tokens seen. The last ``period`` rows repeat forever.

    Attributes:
        rules: entry ``i`` holds the rules applied when token ``i`` is inserted.
        count: int32 ``[rows]``, tokens cached after each row.
        transient: number of leading rows that do not repeat.
    """

    def __init__(self, rules: Sequence[Rules], period: int) -> None:
        self.rules = rules
        self.period = period
        self.transient = len(rules) - period
        evicted = np.zeros(len(rules), dtype=np.int64)
        for row, todo in enumerate(rules):
            if todo:
                evicted[row] = sum(rule.evicts for rule in todo)
        self.count = (np.arange(1, len(rules) + 1) - evicted.cumsum()).astype(np.int32)
        for row in np.flatnonzero(evicted).tolist():
            self._check(rules[row], row)

    def _check(self, rules: Rules, row: int) -> None:
        """Assert that ranges fit the current line and that cells exclude the newest token."""
        newest = int(self.count[row - 1]) if row else 0
        for rule in rules:
            assert rule.hi <= newest + (rule.cell == 0), (rule, newest)
            newest -= rule.evicts

    def row(self, t: int) -> int:
        """The row that applies when token ``t`` is inserted."""
        return t if t < self.transient else self.transient + (t - self.transient) % self.period

    def rows(self, t: np.ndarray) -> np.ndarray:
        """``row`` for an int array of any shape."""
        return np.where(t < self.transient, t, self.transient + (t - self.transient) % self.period)

    def counts(self, t: np.ndarray) -> np.ndarray:
        """Tokens cached after the first ``t`` tokens of a stream."""
        return np.where(t > 0, self.count[self.rows(np.maximum(t - 1, 0))], 0)


class Schedule:
    """What a policy evicts at each point of a stream. Create it with ``compiled``.

    Attributes:
        policy: the settings it was compiled from. ``keep_prompt`` is the number of tokens kept.
        units: the policy that gives the rules: in units, with the kept prompt as sinks.
        unit: tokens that are kept and evicted together.
        scoring: how scores are computed and compared.
        number: process-wide id of the schedule.
        arithmetic: the scoring. Strides with the same object can be batched.
        moves_tokens: True if the policy also merges or reorders tokens, which rules do not express.
        keeps_newest: leading tokens kept if scores are unused and only the oldest token behind
            them is ever evicted; else None.
        lag: tokens between a token and the step in which the host sets its score.
        rules: int32 ``[n, 4]``, all rules in row order, for a line without recalled units.
        first: int32 ``[rows + 1]``. Row ``i`` applies rules ``first[i] .. first[i + 1] - 1``.
        count: int32 ``[rows]``, units cached after a row, without recalled ones.
        peak: int32 ``[rows]``, most units cached up to and including a row, without recalled ones.
        leading: int32 ``[rows, 6]``, columns ``LO .. NUM_MORE`` of a step row: the first rule
            (``evicts`` is 0 if there is none), the offset of the others in ``further``, and their
            number. Used for single-token strides; ranks include the recalled units.
        further: int32 ``[m, 4]``, every rule that is not the first of its row; ranks as in
            ``leading``.
        score_columns: int32 ``[4]``, columns ``PER_AGE .. WEIGHT`` of a step row.
        scales_logits: True if the policy multiplies logits by a factor.
        num_rows: rows of all tables, which its memory grows with.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.unit: int = policy.unit
        self.scoring = policy.scoring
        self.number = next(_numbers)
        self.arithmetic = _arithmetics.setdefault(self.scoring, Arithmetic(self.scoring))
        self._own_history, self._whole_history = History(policy, False), History(policy, True)
        self.moves_tokens = policy.arranges or policy.merge_into is not None
        self.lag = policy.score_lag
        self.units = policy.in_units
        insertions = self.units.insertions()
        self._base = Table(insertions.rules, insertions.period)
        self._batch = 1 if policy.batches_itself else self.units.overflow
        steps = self._base if self._batch == 1 else self._batched()
        self._recall = policy.recall
        self.keeps_newest = self._first_tokens()
        steps = self._until_steady(steps)
        self._steps = steps
        self.transient, self.period, self.count = steps.transient, steps.period, steps.count
        self.num_rows = sum(len(one.rules) for one in {steps, self._base})
        self.peak = np.maximum.accumulate(steps.count)
        lengths = [len(todo) for todo in steps.rules]
        self.first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        numbers = [rule.numbers for todo in steps.rules for rule in todo]
        self.rules = np.asarray(numbers, dtype=np.int32).reshape(-1, 4)
        shift = self._evicted(np.arange(len(steps.rules))).clip(max=self._recall)
        self.leading, self.further = self._leading(np.repeat(shift, lengths))
        bits = np.asarray([self.scoring.decay, self.scoring.weight], dtype=np.float32)
        if self.scoring.source != "attention":
            bits = np.asarray([1, 0], dtype=np.float32)  # keep existing scores unchanged
        ways = [int(self.scoring.per_age), int(self.scoring.newest_stays)]
        self.score_columns = np.asarray([*ways, *bits.view(np.int32)], dtype=np.int32)
        one = np.ones(1, dtype=np.int64)
        self.scales_logits = policy.logit_scale(one, one) is not None
        # Without a reference to the schedule, so that it is freed at once where it is forgotten.
        self._plans = lru_cache(maxsize=MAX_PLANS)(partial(_make_plan, self._base))

    def __reduce__(self) -> tuple[Any, ...]:
        return compiled, (self.policy,)

    def _first_tokens(self) -> int | None:
        rules = [rule for todo in self._base.rules for rule in todo]
        oldest = all(rule.cell == 0 and rule.evicts == rule.size for rule in rules)
        first = {rule.lo for rule in rules}
        if self.scoring.source != "none" or self.moves_tokens or self._recall:
            return None
        return first.pop() * self.unit if oldest and len(first) == 1 else None

    def _batched(self) -> Table:
        base, batch = self._base, self._batch
        transient = base.transient + batch
        length = transient + math.lcm(base.period, batch)
        ends = self._units_inserted(np.arange(length + 1)).tolist()
        rules: list[Rules] = [()] * length
        for t in range(length):
            if ends[t] < ends[t + 1]:
                tokens = range(ends[t], ends[t + 1])
                rules[t] = tuple(rule for u in tokens for rule in base.rules[base.row(u)])
        return Table(rules, length - transient)

    def _until_steady(self, steps: Table) -> Table:
        """Extend the transient until ``recall`` units are evicted and ``peak`` no longer rises.

        One period reaches the peak, and evicts as many units as it adds.
        """
        rows, transient = len(steps.rules), steps.transient
        missing = self._recall
        if transient:
            missing -= transient - int(steps.count[transient - 1])
        rises = steps.count[: transient + 1].max() < steps.count.max()
        periods = max(-(-missing // steps.period), int(rises))
        if periods <= 0:
            return steps
        rules = [steps.rules[steps.row(i)] for i in range(rows + periods * steps.period)]
        return Table(rules, steps.period)

    def _evicted(self, units: np.ndarray) -> np.ndarray:
        """Units evicted once the first ``units`` units have been seen."""
        return units - self._steps.counts(units)

    def _leading(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Build ``leading`` and ``further``.

        Args:
            shift: int ``[n]``, ranks to add to each rule's range for the recalled units.
        """
        rules = self.rules.copy()
        rules[:, :2] += shift[:, None].astype(np.int32)
        num = np.diff(self.first)
        some, extra = np.flatnonzero(num), np.maximum(num - 1, 0)
        leading = np.zeros((len(num), 6), dtype=np.int32)
        leading[some, :4] = rules[self.first[some]]
        leading[:, 4] = np.cumsum(extra) - extra
        leading[:, 5] = extra
        is_first = np.zeros(len(self.rules), dtype=bool)
        is_first[self.first[some]] = True
        return leading, rules[~is_first]

    @cached_property
    def most_at_once(self) -> int:
        """Most units that a step evicts beyond those that it adds, such as a waiting batch."""
        period = self.count[self.transient :]
        drops = (self.peak - self.count).max(), period.max() - period.min()
        return int(max(*drops, self.peak.max() - period.min()))

    @cached_property
    def without_recall(self) -> "Schedule":
        """The schedule of layers that recall nothing under a policy that is otherwise the same."""
        return compiled(self.policy.without_recall) if self._recall else self

    def inserted(self, t: np.ndarray) -> np.ndarray:
        """How many of the first ``t`` tokens are inserted.

        The others wait for a batch or belong to an incomplete unit. A batch ends where the tokens
        seen exceed the base capacity by a multiple of ``overflow``.
        """
        return self._units_inserted(t // self.unit) * self.unit

    def _units_inserted(self, t: np.ndarray) -> np.ndarray:
        if self._batch == 1:
            return t
        return np.maximum(t - (t - self.units.base_capacity) % self._batch, 0)

    # --- Counts by tokens seen --------------------------------------------------------------------

    def rows(self, t: np.ndarray) -> np.ndarray:
        """Rows for the units that contain tokens ``t``, an int array of any shape."""
        return self._steps.rows(t // self.unit)

    def completes(self, t: np.ndarray) -> np.ndarray:
        """Whether tokens ``t`` complete a unit, so that its rules apply."""
        return (t + 1) % self.unit == 0

    def counts(self, t: np.ndarray) -> np.ndarray:
        """Tokens cached after the first ``t`` tokens of a stream, without recalled ones."""
        return self._steps.counts(t // self.unit) * self.unit + t % self.unit

    def evicted(self, t: np.ndarray) -> np.ndarray:
        """Units evicted once the first ``t`` tokens have been seen."""
        return self._evicted(t // self.unit)

    def recalled(self, t: np.ndarray) -> np.ndarray:
        """Recalled units in the cache when a stride starts at token ``t``."""
        if not self._recall:
            return np.zeros_like(t)
        return np.minimum(self.evicted(t), self._recall)

    def quiet(self, begin: int, end: int) -> int:
        """End of the tokens from ``begin``, at most ``end``, that may be undone (drafts).

        With recall these are the tokens that neither select units nor complete one: rejecting
        another would have to undo the copies of evicted and recalled units, too.
        """
        if not self._recall:
            return end
        for t in range(begin, end):
            if t % self.unit in (0, self.unit - 1) or t % self.policy.recall_every == 0:
                return t
        return end

    def positions(self, t: np.ndarray) -> np.ndarray:
        """Position of token ``t`` when a stride starts with it, in all layers of a model.

        This is the number of tokens cached then, recalled ones included. Tokens move up by a unit
        for every unit that is evicted and not recalled, so keys never move forward with time:
        ``t - positions(t)`` never shrinks.
        """
        return t - self.unit * np.maximum(self.evicted(t) - self._recall, 0)

    def moved(self, t: np.ndarray) -> np.ndarray:
        """Whether a cached key may be away from the position it was written at.

        Recalled units are out of order, so keys may move even if all tokens are cached.
        """
        return self.evicted(t) > 0

    def peaks(self, t: np.ndarray) -> np.ndarray:
        """Most slots in use at any time in a stream of ``t`` tokens.

        A multi-token unit occupies all its slots from its first token on. It replaces another unit
        only when it is complete.
        """
        if self.unit > 1:
            filled = (t - 1) // self.unit  # complete units before the last token's unit
            cached = np.where(filled > 0, self.peak[np.clip(filled - 1, 0, len(self.peak) - 1)], 0)
            cached = cached + self.recalled(t)
            return np.where(t > 0, (cached + 1) * self.unit, 0)
        return np.where(t > 0, self.peak[np.clip(t - 1, 0, len(self.peak) - 1)], 0)

    def count_at(self, t: int) -> int:
        """Scalar ``counts``."""
        units, rest = divmod(t, self.unit)
        return (int(self.count[self._steps.row(units - 1)]) * self.unit if units else 0) + rest

    def peak_at(self, t: int) -> int:
        """Scalar ``peaks``. The scheduler calls it for every request in every step."""
        if self.unit > 1 and t > 0:
            filled = (t - 1) // self.unit
            cached = int(self.peak[min(filled, len(self.peak)) - 1]) if filled else 0
            units = t // self.unit  # complete ones
            if self._recall and units:
                evicted = units - int(self.count[self._steps.row(units - 1)])
                cached += min(evicted, self._recall)
            return (cached + 1) * self.unit
        return int(self.peak[min(t, len(self.peak)) - 1]) if t > 0 else 0

    def history(self, t: int) -> History:
        """What the cache's state after ``t`` tokens of a given stream depends on.

        Schedules that differ in ``keep_prompt`` only reach the same state as long as neither
        evicts.
        """
        return self._own_history if self.count_at(t) < t else self._whole_history

    def regions(self, t: int) -> list[str]:
        """Region name of every cached token after ``t`` tokens, without recalled ones.

        ``waiting`` tokens wait for a batch. ``filling`` tokens belong to an incomplete unit.
        """
        units, rest = divmod(t, self.unit)
        inserted = int(self._units_inserted(np.asarray(units)))
        base = self._base
        count = int(base.counts(np.asarray(inserted)))
        row = base.row(inserted - 1) + 1 if inserted else 0
        names = self.units.regions(row, count) + ["waiting"] * (units - inserted)
        return [name for name in names for _ in range(self.unit)] + ["filling"] * rest

    def rules_at(self, t: int) -> Rules:
        """Rules of token ``t``, which completes a unit, for a line without recalled units."""
        return self._steps.rules[self._steps.row(t // self.unit)]

    # --- Token selection in PyTorch, which is imported only here ----------------------------------

    def plan(self, t: int, num_tokens: int) -> "Plan | None":
        """Plan for inserting the units completed by tokens ``t .. t + num_tokens - 1``.

        Returns:
            None if no unit is inserted. All cached units then stay.
        """
        ends = np.asarray([t, t + num_tokens]) // self.unit
        begin, end = self._units_inserted(ends).tolist()
        if begin == end:
            return None
        cached = int(self._base.counts(np.asarray(begin)))
        return self._plans(self._base.row(begin), cached, end - begin)

    def survivors(self, values: "torch.Tensor", plan: "Plan | None") -> "torch.Tensor":
        """Select the units that stay after a stride.

        Args:
            values: fp32 ``[num_sets, n]``, the values from ``compared`` in chronological order.
                The stride's units come last.
            plan: the stride's ``plan(t, num_tokens)``.

        Returns:
            bool ``[num_sets, n]``, True for units that stay. Every row has the same count.
        """
        from vllm_cascade.policies.execute import Plan, survivors

        if plan is None:
            plan = Plan(0)
        return survivors(values, plan, self.scoring.newest_stays)


def _make_plan(base: Table, row: int, cached: int, num_units: int) -> "Plan":
    from vllm_cascade.policies.execute import make_plan

    return make_plan(cached, [base.rules[base.row(row + i)] for i in range(num_units)])


def compared(
    scoring: Scoring, scores: "torch.Tensor", age: "torch.Tensor | None"
) -> "torch.Tensor":
    """The values that rules compare.

    Args:
        scores: fp32, any shape.
        age: queries that saw each token, its own included. Required if ``scoring.per_age``.
    """
    if not scoring.per_age:
        return scores
    assert age is not None
    return scores / age.clamp_min(1)


_in_use: WeakValueDictionary[Policy, Schedule] = WeakValueDictionary()
_remembered: Remembered[Schedule] = Remembered()


def compiled(policy: Policy) -> Schedule:
    """A policy's schedule. Call it when an engine or a request starts, never in a step.

    A schedule that is still in use is returned again, because schedules are compared by identity.
    """
    own = _in_use.get(policy)
    own = _remembered.get(policy, lambda: Schedule(policy) if own is None else own)
    _in_use[policy] = own
    return own


def by_schedule(schedules: Sequence[Schedule]) -> Iterator[tuple[Schedule, np.ndarray | slice]]:
    """Group indices by schedule. A single schedule yields one slice over all indices."""
    if not schedules:
        return
    numbers = [schedule.number for schedule in schedules]
    if numbers.count(numbers[0]) == len(numbers):
        yield schedules[0], slice(0, len(numbers))
        return
    array = np.asarray(numbers)
    for number in dict.fromkeys(numbers):
        rows = np.flatnonzero(array == number)
        yield schedules[int(rows[0])], rows
