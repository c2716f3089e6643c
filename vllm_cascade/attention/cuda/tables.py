# SPDX-License-Identifier: Apache-2.0
"""Schedules on the device: the engine's, and those of requests' own as they come.

A captured graph has the address of the rules that a step row points to, so these stay in one
buffer for the engine's whole life. Everything else is read before a graph is replayed, and may
move when a schedule is added.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import RULE_COLUMNS
from vllm_cascade.kernels.triton.schedule import HEAD_COLUMNS, TABLE_COLUMNS, ScheduleTables
from vllm_cascade.policies import Schedule
from vllm_cascade.policies.per_request import MAX_OWN_RULES

SPARE = 64
"""Schedules remembered besides those that can be in one batch."""
MORE_IN_TABLE = 4
"""The column of ``Schedule.leading`` that points to further rules."""


class DeviceTables:
    """What the kernels ``schedule`` and ``insert`` read, for all schedules in use.

    Attributes:
        engine: the schedule of a row that has none of its own.
        schedules: the tables of ``kernels/triton/schedule.py``.
        rules: int32 ``[n, 4]``, further rules of all schedules; never moves.
    """

    def __init__(self, engine: Schedule, device: torch.device, max_requests: int) -> None:
        self.engine, self._device = engine, device
        self._most = max_requests + SPARE
        room = 1 + len(engine.further) + self._most * MAX_OWN_RULES
        self.rules = torch.zeros(room, RULE_COLUMNS, dtype=torch.int32, device=device)
        self._numbers: dict[Schedule, int] = {}
        self._begins: dict[Schedule, int] = {}
        self._load([engine])

    def numbers(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """int32, each schedule's row of ``heads``; those not there yet are added."""
        missing = [s for s in dict.fromkeys(schedules) if s not in self._numbers]
        if missing:
            kept = [*self._numbers, *missing]
            if len(kept) > self._most:
                kept = list(dict.fromkeys((self.engine, *schedules)))
            self._load(kept)
        return np.asarray([self._numbers[schedule] for schedule in schedules], dtype=np.int32)

    def begin(self, schedule: Schedule) -> int:
        """Where a schedule's further rules begin."""
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
