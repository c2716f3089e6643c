# SPDX-License-Identifier: Apache-2.0
"""Evicted units: their shape, when strides select some, and how many come and go.

How many units are evicted, stored and recalled at any time follows from token counts, so the host
plans all of it before the step. A layer only decides which units, and copies their rows. Both
devices use the same rows of numbers (``recall_rows``); each finds its requests' stores its own way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_cascade.cache.spec import ROW_SCALES, KVPolicySpec
from vllm_cascade.kernels.columns import (
    BEFORE,
    BEGIN,
    END,
    HOW,
    JUDGED,
    LENGTH,
    MORE_RECALLED,
    NOW,
    RECALL_COLUMNS,
    RING,
    SINKS,
    STORED,
    STREAM,
    TAKES_ALL,
)
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import Schedule, by_schedule
from vllm_cascade.recall.log import Log, Part, UnitShape
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.rows import StrideRows


def unit_shape(spec: KVPolicySpec, num_layers: int) -> UnitShape:
    """Shape of a rank's units in ``num_layers`` layers, which have this spec."""
    return shape_of_units(
        spec.engine_schedule.policy,
        num_layers,
        spec.num_kv_heads,
        spec.head_size,
        spec.dtype,
        spec.kv_quant_mode.is_per_token_head,
        spec.latent,
    )


def shape_of_units(
    policy: Policy,
    num_layers: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    scaled: bool,
    latent: bool,
) -> UnitShape:
    """Shape of a rank's units; ``scaled``: whether rows in the pages have scales of their own."""
    return UnitShape(
        num_layers=num_layers,
        num_kv_heads=heads,
        num_sets=heads if policy.head_policy == "per_kv_head" else 1,
        unit=policy.unit,
        head_size=head_size,
        dtype=dtype,
        most_units=policy.recall_store // policy.unit,
        most_recalled=policy.recall,
        row_scales=ROW_SCALES if scaled else 0,
        latent=latent,
        in_8_bits=policy.recall_rows == "int8" and dtype.itemsize > 1,
    )


def recall_rows(
    schedule: Schedule,
    stream: np.ndarray,
    length: np.ndarray,
    shown: np.ndarray,
    many: np.ndarray,
    most_units: int,
) -> np.ndarray:
    """Plan recall for strides of different requests under one schedule.

    A stride of several tokens selects units, and so does the stride after it. A single token
    selects every ``recall_every`` tokens. Every stride selects if the number of recalled units
    changes.

    Args:
        stream, length: int64 ``[R]``, the strides' first tokens and numbers of tokens.
        shown: int64 ``[R]``, units recalled in the pages before the stride.
        many: bool ``[R]``, whether a stride of several tokens made the last selection.
        most_units: units that a request's store holds.

    Returns:
        int32 ``[R, RECALL_COLUMNS]`` (``kernels/columns.py``); ``RING`` is 0.
    """
    policy = schedule.policy
    gone, gone_after = schedule.evicted(stream), schedule.evicted(stream + length)
    now, begin = schedule.recalled(stream), np.maximum(gone - most_units, 0)
    due = (length > 1) | many | (stream % policy.recall_every == 0)
    selects = (now > 0) & (due | (now != shown))
    rows = np.zeros((len(stream), RECALL_COLUMNS), dtype=np.int32)
    rows[:, HOW] = np.where(now == gone - begin, TAKES_ALL, JUDGED) * selects
    rows[:, BEGIN], rows[:, END] = begin, gone
    rows[:, BEFORE], rows[:, NOW] = shown, now
    rows[:, MORE_RECALLED] = schedule.recalled(stream + length) - now
    rows[:, STORED] = gone_after - gone
    rows[:, SINKS] = schedule.units.num_sinks
    return rows


# --- stores on the host: logs -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RecallStride:
    """One request's stride, and the memory that it reads and writes.

    Attributes:
        log: the request's.
        candidates: units that may be recalled.
        selects: whether the stride's queries select units; otherwise the recalled ones stay.
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
    def moves(self) -> bool:
        """Whether units may come from the log or go to it."""
        return self.selects or len(self.stored) > 0

    @property
    def middle(self) -> int:
        """Units before the middle of the recalled ones: where candidates are judged."""
        return self.sinks + self.now // 2


def plan_logs(
    waves: Sequence[StrideRows], table: torch.Tensor, logs: Mapping[int, Log]
) -> list[dict[int, RecallStride]]:
    """Plan recall from logs; the logs grow by the units that the strides will evict.

    Args:
        table: int ``[B, P]``, the batch's block table, on the CPU.
        logs: by a request's first block; rows of a warm-up have none.

    Returns:
        For each wave, the strides that use a log, by their request's row in the batch.
    """
    first = table[:, 0].tolist()
    return [_plan_wave(rows, [logs.get(first[i]) for i in rows.request.tolist()]) for rows in waves]


def _plan_wave(wave: StrideRows, logs: Sequence[Log | None]) -> dict[int, RecallStride]:
    """``plan_logs`` for one wave, in which a request has at most one stride."""
    steps, request = wave.steps.astype(np.int64), wave.request.tolist()
    strides = {}
    for schedule, where in by_schedule(wave.schedules):
        if not schedule.policy.recall:
            continue
        each = [(i, logs[i]) for i in np.arange(len(request))[where].tolist()]
        which = [(i, log) for i, log in each if log is not None]
        if not which:
            continue
        stream, length = steps[[i for i, _ in which]][:, [STREAM, LENGTH]].T
        shown = np.asarray([log.shown for _, log in which])
        many = np.asarray([log.selected_by_many for _, log in which])
        most = which[0][1].shape.most_units
        rows = recall_rows(schedule, stream, length, shown, many, most)
        for (i, log), row, num in zip(which, rows.tolist(), length.tolist(), strict=True):
            strides[request[i]] = _stride_of(log, row, selects_by_many=num > 1)
    return strides


def _stride_of(log: Log, row: Sequence[int], selects_by_many: bool) -> RecallStride:
    """A request's stride by its numbers ``[RECALL_COLUMNS]``; the log is then as after it."""
    assert (log.begin, log.end) == (row[BEGIN], row[END]), (log.begin, log.end, row)
    candidates = log.part(log.begin, log.end)
    log.shown, log.selected_by_many = row[NOW], selects_by_many
    stored = log.grow(row[STORED])
    return RecallStride(
        log, candidates, row[HOW] > 0, row[BEFORE], row[NOW], stored, sinks=row[SINKS]
    )


# --- stores that kernels address: rings -----------------------------------------------------------


def plan_rings(
    rings: Rings,
    names: Sequence[str | None],
    schedules: Sequence[Schedule],
    stream: np.ndarray,
    length: np.ndarray,
) -> np.ndarray:
    """Plan recall from rings; the rings are then as after the strides.

    A request whose stride evicts the first units takes a ring.

    Args:
        names: of the strides' requests; None: a row of padding or of a warm-up.
        stream, length: int64 ``[R]``, the strides' first tokens and numbers of tokens.

    Returns:
        int32 ``[R, RECALL_COLUMNS]``, 0 where a stride does nothing.
    """
    rows = np.zeros((len(stream), RECALL_COLUMNS), dtype=np.int32)
    numbers = rings.numbers(names[: len(rows)])
    ring = np.full(len(rows), -1)
    ring[: len(numbers)] = numbers
    for schedule, where in by_schedule(schedules):
        if not schedule.policy.recall:
            continue
        which = np.arange(len(rows))[where]
        which = which[stream[which] >= 0]
        begins = (ring[which] < 0) & (schedule.evicted(stream[which] + length[which]) > 0)
        for row in which[begins].tolist():
            ring[row] = rings.take(names[row]) if row < len(names) else -1
        which = which[ring[which] >= 0]
        if len(which):
            rows[which] = _rows_of(rings, schedule, ring[which], stream[which], length[which])
    return rows


def _rows_of(
    rings: Rings, schedule: Schedule, ring: np.ndarray, stream: np.ndarray, length: np.ndarray
) -> np.ndarray:
    """``plan_rings`` for rings under one schedule."""
    room = rings.shape.most_units
    shown, many = rings.shown[ring], rings.selected_by_many[ring]
    rows = recall_rows(schedule, stream, length, shown, many, room)
    assert (rings.end[ring] == rows[:, END]).all(), (rings.end[ring], rows[:, END])
    rows[:, RING] = ring * room
    rings.end[ring] = rows[:, END] + rows[:, STORED]
    rings.shown[ring], rings.selected_by_many[ring] = rows[:, NOW], length > 1
    return rows
