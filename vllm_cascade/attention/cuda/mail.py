# SPDX-License-Identifier: Apache-2.0
"""Transfers from the host to the device before a step: rows, plans and schedule tables."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import (
    MOST_RULES,
    RULE_COLUMNS,
    STEP_COLUMNS,
    STREAM,
)
from vllm_cascade.kernels.triton.schedule import HEAD_COLUMNS, TABLE_COLUMNS, ScheduleTables
from vllm_cascade.policies.execute import Plan
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.step.plan import SPARE

ALIGNED = 4
"""Rows with block tables that are added together begin at a multiple of this, so that their tables
begin at a multiple of 16 bytes, however wide they are. A pointer's alignment selects a variant."""


class Mail:
    """Collects a step's rows and sends them to the device in one transfer.

    ``add`` and ``add_without`` return slices, which index the tensors that ``send`` sets. No slice
    has the rows between those that were added together.

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


class DeviceTables:
    """Tables of all schedules in use, for the kernels ``schedule`` and ``insert``.

    Attributes:
        engine: the default schedule of requests.
        schedules: the tables of ``kernels/triton/schedule.py``.
        rules: int32 ``[n, 4]``, further rules of all schedules. Its address never changes.
    """

    def __init__(self, engine: Schedule, device: torch.device, max_requests: int) -> None:
        self.engine, self._device = engine, device
        self._most = max_requests + SPARE
        room = 1 + len(engine.further) + (self._most + max_requests) * MOST_RULES
        self.rules = torch.zeros(room, RULE_COLUMNS, dtype=torch.int32, device=device)
        self._numbers: dict[Schedule, int] = {}
        self._begins: dict[Schedule, int] = {}
        self._load([engine])

    def prune(self) -> None:
        """Forget all schedules but the engine's if there are too many.

        Call it between steps only: the rows of a step point into the tables.
        """
        if len(self._numbers) > self._most:
            self._load([self.engine])

    def numbers(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """int32, each schedule's row of ``heads``; loads missing schedules."""
        missing = [s for s in dict.fromkeys(schedules) if s not in self._numbers]
        if missing:
            self._load([*self._numbers, *missing])
        return np.asarray([self._numbers[schedule] for schedule in schedules], dtype=np.int32)

    def begin(self, schedule: Schedule) -> int:
        """Row of ``rules`` at which a schedule's further rules begin."""
        self.numbers([schedule])
        return self._begins[schedule]

    def _load(self, schedules: list[Schedule]) -> None:
        self._numbers = {schedule: number for number, schedule in enumerate(schedules)}
        steps, heads, rules = [], [], [np.zeros((1, RULE_COLUMNS), dtype=np.int32)]
        first_row, self._begins = 0, {}
        for schedule in schedules:
            begin = self._begins[schedule] = sum(map(len, rules))
            columns = np.column_stack([schedule.leading, schedule.count, schedule.peak])
            columns[:, MORE_IN_TABLE] += begin
            ways = schedule.score_columns.tolist()
            recall = schedule.policy.recall
            heads.append([first_row, schedule.transient, schedule.period, *ways, recall])
            steps.append(columns)
            rules.append(schedule.further)
            first_row += len(columns)
        self.schedules = ScheduleTables(
            table=self._to_device(np.concatenate(steps).reshape(-1, TABLE_COLUMNS)),
            heads=self._to_device(np.asarray(heads).reshape(-1, HEAD_COLUMNS)),
            unit=self.engine.unit,
        )
        further = self._to_device(np.concatenate(rules))
        self.rules[: len(further)].copy_(further)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)), self._device)
