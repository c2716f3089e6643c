# SPDX-License-Identifier: Apache-2.0
"""Transfers from the host to the device before a step: rows, plans and schedule tables."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm_cascade.attention.cuda.rule_room import most_rules, rule_room
from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import RULE_COLUMNS, STEP_COLUMNS, STREAM
from vllm_cascade.kernels.triton.schedule import HEAD_COLUMNS, TABLE_COLUMNS, ScheduleTables
from vllm_cascade.policies.execute import Plan
from vllm_cascade.policies.remembered import MAX_ROWS, MAX_SCHEDULES
from vllm_cascade.policies.schedule import Schedule

ALIGNED = 4
"""Rows with block tables that are added together begin at a multiple of this, so that their tables
begin at a multiple of 16 bytes, however wide they are. A pointer's alignment selects a variant."""


class Mail:
    """Collects a step's rows and sends them to the device in one transfer.

    ``add`` and ``add_without`` return slices, which index the tensors that ``send`` sets. Slices
    exclude alignment padding.

    Attributes:
        steps: int32 ``[n, STEP_COLUMNS]``, rows with block tables.
        others: int32 ``[m, STEP_COLUMNS]``, rows without block tables.
        table: int ``[n, P]``, block tables of ``steps``.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._requests: list[np.ndarray] = []
        self._others: list[np.ndarray] = []
        self._num = self._num_others = 0

    def add(self, steps: np.ndarray, requests: np.ndarray) -> slice:
        """Add rows with block tables; ``requests`` are the rows of the batch's block table."""
        gap = -self._num % ALIGNED
        self._rows += [np.zeros((gap, STEP_COLUMNS), dtype=np.int32), steps]
        self._requests += [np.zeros(gap, dtype=np.int32), requests]
        self._num += gap + len(steps)
        return slice(self._num - len(steps), self._num)

    def add_without(self, steps: np.ndarray) -> slice:
        """Add rows without block tables."""
        self._others.append(steps)
        self._num_others += len(steps)
        return slice(self._num_others - len(steps), self._num_others)

    def send(self, table: torch.Tensor) -> None:
        """Send all rows to the device of ``table``, the batch's block table."""
        parts = [*self._rows, *self._others, *self._requests]
        if not parts:
            return
        flat = np.concatenate([part.astype(np.int32).ravel() for part in parts])
        device = sent(torch.from_numpy(flat), table.device)
        rows = (self._num + self._num_others) * STEP_COLUMNS
        steps = device[:rows].view(-1, STEP_COLUMNS)
        self.steps, self.others = steps[: self._num], steps[self._num :]
        self.table = table.index_select(0, device[rows:])
        # Block tables of a warm-up hold only the null block: mark those rows as padding.
        self.steps[:, STREAM].masked_fill_(self.table[:, 0] == 0, -1)


class Plans:
    """Cache of stride plans on the device. Plans repeat with the periods of schedules.

    Attributes:
        table: int32, concatenated plans. The first one evicts nothing.
    """

    ROOM = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(self.ROOM, dtype=torch.int32, device=device)
        self._places: dict[Plan, int] = {}
        self._end = 3

    def places(self, plans: Sequence[Plan | None]) -> list[int]:
        """Load missing plans and return each plan's offset in ``table``; 0 for None.

        Offsets are valid for the table after this call. A later call may replace the table.
        """
        missing = [plan for plan in dict.fromkeys(plans) if plan and plan not in self._places]
        if missing:
            self._load(missing, [plan for plan in dict.fromkeys(plans) if plan])
        return [self._places[plan] if plan else 0 for plan in plans]

    def _load(self, missing: list[Plan], all_of_step: list[Plan]) -> None:
        arrays = [_numbers(plan) for plan in missing]
        if self._end + sum(map(len, arrays)) > len(self.table):
            self._places, self._end, missing = {}, 3, all_of_step
            arrays = [_numbers(plan) for plan in missing]
            needed = self._end + sum(map(len, arrays))
            if needed > len(self.table):
                self.table = self.table.new_zeros(2 * needed)
        for plan, array in zip(missing, arrays, strict=True):
            self._places[plan] = self._end
            self._end += len(array)
        flat = np.concatenate(arrays)
        place = slice(self._end - len(flat), self._end)
        self.table[place].copy_(sent(torch.from_numpy(flat), self.table.device), non_blocking=True)


def _numbers(plan: Plan) -> np.ndarray:
    """Encode a plan for ``kernels/triton/choose.py``."""
    if plan.lowest is not None:
        return np.asarray(plan.lowest, dtype=np.int32)
    assert plan.groups is not None, "rule by rule it is done in PyTorch"
    groups = plan.groups.numpy()
    real = groups >= 0
    begins = np.concatenate([[0], real.sum(1).cumsum()]) + len(groups) + 1
    return np.concatenate([begins, groups[real]]).astype(np.int32)


MORE_IN_TABLE = 4
"""Column of ``Schedule.leading`` that points to further rules."""

SPARE_ROWS = MAX_ROWS // 2
"""Most rows of schedules that stay on the device though the last step did not use them."""


class _Sizes(NamedTuple):
    """Rows of ``table``, ``heads`` and ``rules``: how many, or where a schedule's begin or end."""

    rows: int = 0
    heads: int = 0
    rules: int = 0

    def plus(self, other: Iterable[int]) -> "_Sizes":
        return _Sizes(*(one + more for one, more in zip(self, other, strict=True)))

    def exceeds(self, most: "_Sizes") -> bool:
        return any(one > bound for one, bound in zip(self, most, strict=True))


class _Place(NamedTuple):
    begin: _Sizes
    size: _Sizes


class DeviceTables:
    """Tables of all schedules in use, for the kernels ``schedule`` and ``insert``.

    New schedules are appended, so only their own rows are sent. A schedule is known by its number:
    the tables keep no schedule alive.

    Attributes:
        engine: the default schedule of requests, row 0 of ``heads``.
        schedules: the tables of ``kernels/triton/schedule.py``, with room for more rows. They are
            read before a step's layers run, outside graphs, so they may move.
        rules: int32 ``[n, 4]``, further rules of all schedules. Its address never changes.

    Args:
        max_requests: most rows of a step.
        with_rules: False: rows are read for their counts only.
    """

    def __init__(
        self, engine: Schedule, device: torch.device, max_requests: int, with_rules: bool = True
    ) -> None:
        self.engine, self._with_rules = engine, with_rules
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        room, one_step = 1, 0
        if with_rules:
            room, one_step = rule_room(engine, max_requests), max_requests * most_rules(engine)
        self.rules = zeros(room, RULE_COLUMNS)
        self._full = _Sizes(SPARE_ROWS, MAX_SCHEDULES, room - one_step)
        self.schedules = ScheduleTables(
            table=zeros(0, TABLE_COLUMNS), heads=zeros(0, HEAD_COLUMNS), unit=engine.unit
        )
        self._places: dict[int, _Place] = {}
        self._recent: set[int] = set()  # schedules used since the last ``prune``
        self._used = _Sizes(rules=1)  # the first rule is empty
        self._append([engine])

    def prune(self) -> None:
        """Forget schedules that the last step did not use if there are too many of them.

        Call it between steps only: the rows of a step point into the tables. All writes follow the
        last step's reads in the same stream.
        """
        kept = dict.fromkeys([self.engine.number, *self._recent])
        self._recent = set()
        if self._used.exceeds(self._full):
            rows = sum(self._places[number].size.rows for number in kept)
            if self._used.exceeds(self._full.plus((rows, len(kept), 0))):
                self._keep(list(kept))

    def numbers(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """int32, each schedule's row of ``heads``; loads missing schedules."""
        alike = {schedule.number: schedule for schedule in schedules}
        missing = [own for number, own in alike.items() if number not in self._places]
        if missing:
            self._append(missing)
        self._recent |= alike.keys()
        heads = [self._places[schedule.number].begin.heads for schedule in schedules]
        return np.asarray(heads, dtype=np.int32)

    def begin(self, schedule: Schedule) -> int:
        """Row of ``rules`` at which a schedule's further rules begin."""
        self.numbers([schedule])
        return self._places[schedule.number].begin.rules

    def _append(self, schedules: list[Schedule]) -> None:
        """Add schedules behind those that are there, in one transfer."""
        first, parts = self._used, []
        for schedule in schedules:
            table, heads, rules = _parts(schedule, self._used)
            part = table, heads, rules if self._with_rules else rules[:0]
            self._place(schedule.number, _Sizes(*map(len, part)))
            parts.append(part)
        assert self._used.rules <= len(self.rules), "keep_prompt changed the number of rules"
        self.schedules = replace(
            self.schedules,
            table=_with_room(self.schedules.table, self._used.rows),
            heads=_with_room(self.schedules.heads, self._used.heads),
        )
        arrays = [np.concatenate(same).ravel() for same in zip(*parts, strict=True)]
        flat = torch.from_numpy(np.concatenate(arrays).astype(np.int32))
        pieces = sent(flat, self.rules.device).split([len(array) for array in arrays])
        tables = self.schedules.table, self.schedules.heads, self.rules
        for table, begin, end, piece in zip(tables, first, self._used, pieces, strict=True):
            table[begin:end].copy_(piece.view(-1, table.shape[1]), non_blocking=True)

    def _place(self, number: int, size: _Sizes) -> None:
        self._places[number] = _Place(self._used, size)
        self._used = self._used.plus(size)

    def _keep(self, numbers: list[int]) -> None:
        """Move some schedules, the engine's first, to the front of the tables, on the device."""
        old = [self._places[number] for number in numbers]
        self._places, self._used = {}, _Sizes(rules=1)
        for number, place in zip(numbers, old, strict=True):
            self._place(number, place.size)
        new = [self._places[number] for number in numbers]
        now, ends = self.schedules, [place.begin.plus(place.size) for place in old]
        both = list(zip(old, ends, strict=True))
        table = torch.cat([now.table[place.begin.rows : end.rows] for place, end in both])
        heads = torch.cat([now.heads[place.begin.heads : end.heads] for place, end in both])
        rules = torch.cat([self.rules[place.begin.rules : end.rules] for place, end in both])
        moves = [
            (place.size.rows, to.begin.rules - place.begin.rules, to.begin.rows)
            for place, to in zip(old, new, strict=True)
        ]
        host = torch.from_numpy(np.ascontiguousarray(np.asarray(moves, dtype=np.int32).T))
        num_rows, shift, heads[:, 0] = sent(host, table.device)
        table[:, MORE_IN_TABLE] += shift.repeat_interleave(num_rows, output_size=len(table))
        self.schedules = replace(now, table=table, heads=heads)
        self.rules[1 : self._used.rules].copy_(rules, non_blocking=True)


def _parts(schedule: Schedule, at: _Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A schedule's rows of ``table``, ``heads`` and ``rules``, which begin at ``at``."""
    table = np.column_stack([schedule.leading, schedule.count, schedule.peak])
    table[:, MORE_IN_TABLE] += at.rules
    ways, recall = schedule.score_columns.tolist(), schedule.policy.recall
    head = np.asarray([[at.rows, schedule.transient, schedule.period, *ways, recall]])
    return table, head, schedule.further


def _with_room(table: torch.Tensor, rows: int) -> torch.Tensor:
    """``table``, or a longer copy if it has fewer than ``rows``."""
    if rows <= len(table):
        return table
    doubled = 1 << (rows - 1).bit_length()
    room = min(doubled, -(-rows // SPARE_ROWS) * SPARE_ROWS)
    longer = table.new_zeros(room, table.shape[1])
    longer[: len(table)].copy_(table, non_blocking=True)
    return longer
