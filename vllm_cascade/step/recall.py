# SPDX-License-Identifier: Apache-2.0
"""What a step's strides do with their requests' evicted units, planned on the host.

How many units are evicted, stored and recalled at any time follows from token counts, so all of it
is known before the step; a layer only fills in which units, and their rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_cascade.kernels.columns import LENGTH, STREAM
from vllm_cascade.recall.log import Log, Part
from vllm_cascade.step.rows import StrideRows


@dataclass(frozen=True, eq=False)
class RecallStride:
    """One request's stride.

    Attributes:
        log: the request's.
        candidates: units that may be recalled.
        selects: whether the stride's queries choose anew; otherwise what is recalled stays.
        before, now: units recalled in the pages as they are, and while the stride is attended.
        stored: memory of the units that the stride evicts.
        sinks: units before the recalled ones.
    """

    log: Log
    candidates: Part
    selects: bool
    before: int
    now: int
    stored: Part
    sinks: int

    @property
    def middle(self) -> int:
        """Units before the middle of the recalled ones: where candidates are judged."""
        return self.sinks + self.now // 2


def plan_recall(
    waves: Sequence[StrideRows], table: torch.Tensor, logs: Mapping[int, Log]
) -> list[StrideRows]:
    """The waves, each stride with what it does; ``logs`` grow by what will be evicted.

    Args:
        table: int ``[B, P]``, the batch's block table, on the CPU.
        logs: by a request's first block; a warm-up's rows have none.
    """
    first = table[:, 0].tolist()
    return [
        replace(
            rows, recall=[_stride(rows, i, logs.get(first[request])) for i, request in requests]
        )
        for rows in waves
        for requests in [list(enumerate(rows.request.tolist()))]
    ]


def _stride(rows: StrideRows, i: int, log: Log | None) -> RecallStride | None:
    schedule = rows.schedules[i]
    if log is None or not schedule.policy.recall:
        return None
    begin, length = (int(rows.steps[i, column]) for column in (STREAM, LENGTH))
    gone, gone_after = schedule.evicted(np.asarray([begin, begin + length])).tolist()
    assert log.end == gone, (log.end, gone)
    now, before = int(schedule.recalled(np.asarray(begin))), log.shown
    due = length > 1 or log.chose_for_many or begin % schedule.policy.recall_every == 0
    log.chose_for_many = length > 1
    candidates = log.part(log.begin, log.end)
    log.shown = now
    stored = log.grow(gone_after - gone)
    selects = now > 0 and (due or now != before)
    sinks = schedule.policy.num_sinks // schedule.unit
    return RecallStride(log, candidates, selects, before, now, stored, sinks)
