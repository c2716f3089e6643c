# SPDX-License-Identifier: Apache-2.0
"""Builds the step rows of a prompt's strides and chunks for the Triton kernels.

All rows of a step are sent in one transfer, and all layers share the launch arguments. The host's
work per layer and stride is four launches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_cascade.attention.cuda.mail import Mail
from vllm_cascade.kernels.columns import (
    CACHED,
    LENGTH,
    NEW_SLOTS,
    OLD_SLOTS,
    STREAM,
)
from vllm_cascade.kernels.triton import stride_columns as columns
from vllm_cascade.policies.execute import Plan
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.step.rows import StrideRows


def plan_of(schedule: Schedule, step: list[int]) -> Plan | None:
    """Plan of the evictions of a stride with step row ``step``; None if it evicts nothing."""
    stream, length = step[STREAM], step[LENGTH]
    if schedule.count_at(stream) + length == schedule.count_at(stream + length):
        return None
    plan = schedule.plan(stream, length)
    assert plan is not None, "something is deleted"
    return plan


def stride_rows(rows: StrideRows, plans: Sequence[Plan | None], places: list[int]) -> np.ndarray:
    """Step rows with the plan columns filled in; ``places`` are the plans' offsets."""
    steps = rows.steps.copy()
    numbers = [
        (place, 0, 0, 0)
        if plan is None
        else (place, int(plan.groups is not None), plan.num_line, _stay(plan))
        for plan, place in zip(plans, places, strict=True)
    ]
    steps[:, columns.PLAN : columns.STAY + 1] = numbers
    steps[:, columns.LAG] = [schedule.lag for schedule in rows.schedules]
    decay = np.asarray([schedule.scoring.decay for schedule in rows.schedules])
    fades = (decay ** steps[:, LENGTH]).astype(np.float32)
    steps[:, columns.FADE] = fades.view(np.int32)
    return steps


def _stay(plan: Plan) -> int:
    if plan.groups is not None:
        return len(plan.groups)
    assert plan.lowest is not None
    return plan.num_line - plan.lowest[2]


class ChunkDraft(NamedTuple):
    """Chunks that are not sent yet.

    Attributes:
        steps: strides, among the rows without block tables.
        chunks: chunks, among the rows with them.
        max_length, max_slots, max_cached: as in ``Chunks``.
    """

    steps: slice
    chunks: slice
    max_length: int
    max_slots: int
    max_cached: int


def mail_chunks(mail: Mail, waves: Sequence[StrideRows]) -> ChunkDraft:
    """Add a row per stride, and a chunk row per request that covers all of its strides."""
    steps = np.concatenate([rows.steps for rows in waves])
    request = np.concatenate([rows.request for rows in waves])
    schedules = [schedule for rows in waves for schedule in rows.schedules]
    owners, first, chunk = np.unique(request, return_index=True, return_inverse=True)
    steps[:, columns.CHUNK] = chunk
    chunks = steps[first]  # each request's first stride, as waves are in order
    chunks[:, LENGTH] = np.bincount(chunk, weights=steps[:, LENGTH])
    np.maximum.at(chunks[:, NEW_SLOTS], chunk, steps[:, NEW_SLOTS])
    ends = (chunks[:, STREAM] + chunks[:, LENGTH]).tolist()
    for row, (place, end) in enumerate(zip(first.tolist(), ends, strict=True)):
        chunks[row, columns.SINKS] = schedules[place].keeps_newest
        chunks[row, columns.LEFT] = schedules[place].count_at(end)
    most = steps.max(axis=0)
    sizes = int(most[LENGTH]), int(chunks[:, OLD_SLOTS].max()), int(most[CACHED])
    return ChunkDraft(mail.add_without(steps), mail.add(chunks, owners), *sizes)


def widest(steps: np.ndarray, unit: int) -> int:
    """Units of the longest line of some strides, or of the most slots afterwards if more."""
    line = int((steps[:, CACHED] + steps[:, LENGTH]).max())
    return max(-(-line // unit), int(steps[:, NEW_SLOTS].max()) // unit)
