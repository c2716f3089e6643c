# SPDX-License-Identifier: Apache-2.0
"""Plans a scheduling step on the host with numpy; every device runs the same plan.

A request's tokens in a step are cut into strides. Strides of one request run in order, those of
different requests in parallel: wave ``k`` holds the ``k``-th stride of every request. Each stride
is one int32 row with named columns (``kernels/columns.py``): the place of its tokens, the number of
tokens cached before, the valid slots, and the rules that a single token applies.

All columns follow from token counts. Planning therefore never waits for the device, and a device
only needs a copy of the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_cascade.kernels.columns import (
    CACHED,
    DECAY,
    LENGTH,
    LO,
    MORE,
    NEW_SLOTS,
    OLD_SLOTS,
    PER_AGE,
    START,
    STEP_COLUMNS,
    STREAM,
)
from vllm_cascade.policies.schedule import Schedule, by_schedule
from vllm_cascade.policies.strides import cut_strides
from vllm_cascade.step.positions import position_strides
from vllm_cascade.step.rows import RequestTokens, Step, StrideRows

SPARE = 64
"""Schedules whose tables are kept beyond the most that one batch can use."""


@dataclass(frozen=True)
class _Cut:
    """The strides of a step as int64 arrays ``[R]``, ordered by wave.

    Attributes:
        owner: row of the stride's request in the batch.
        begin: stream index of its first token.
        length: number of its tokens.
        depth: index of its wave.
    """

    owner: np.ndarray
    begin: np.ndarray
    length: np.ndarray
    depth: np.ndarray


def describe(
    tokens: RequestTokens, prefill_stride: int, rules_at: Callable[[Schedule], int]
) -> Step:
    """Plan a step.

    Args:
        rules_at: returns the first row of a schedule's further rules in the table that ``MORE``
            points into.
    """
    cut = _cut(tokens, prefill_stride)
    owners = cut.owner.tolist()
    schedules = [tokens.schedules[owner] for owner in owners]
    steps = np.zeros((len(owners), STEP_COLUMNS), dtype=np.int32)
    steps[:, STREAM], steps[:, LENGTH] = cut.begin, cut.length
    steps[:, START] = tokens.place[cut.owner] + cut.begin - tokens.first[cut.owner]
    evicted, scale = 0, None
    steps[:, CACHED], moved = position, _ = position_strides(schedules, cut.begin)
    if tokens.frames is not None:
        position, moved = position_strides([tokens.frames[owner] for owner in owners], cut.begin)
    positions = np.zeros(int(tokens.length.sum()), dtype=np.int64)
    place, offset = _places(steps)
    positions[place] = _of_tokens(position, steps) + offset
    for schedule, rows in by_schedule(schedules):
        evicted += _fill(steps, rows, schedule, rules_at(schedule))
        if schedule.scales_logits:
            own = steps[rows]
            place, offset = _places(own)
            stream, cached = (_of_tokens(own[:, c], own) + offset for c in (STREAM, CACHED))
            scale = np.ones(len(positions), dtype=np.float32) if scale is None else scale
            scale[place] = schedule.policy.logit_scale(stream, cached + 1)
    waves = _waves(cut, steps, schedules, position, moved)
    return Step(waves, positions, scale, tokens.given, evicted)


def _cut(tokens: RequestTokens, prefill_stride: int) -> _Cut:
    rows = np.flatnonzero(tokens.length > 0)
    first, length = tokens.first[rows], tokens.length[rows]
    if (length == 1).all():
        return _Cut(rows, first, length, np.zeros_like(rows))
    owner, begin, end, depth = [], [], [], []
    prefilling = tokens.prefilling[rows].tolist()
    ends = (first + length).tolist()
    for row, start, stop, prompt in zip(
        rows.tolist(), first.tolist(), ends, prefilling, strict=True
    ):
        unit = (tokens.frames or tokens.schedules)[row].unit
        bounds = cut_strides(start, stop, prefill_stride, prompt, unit)
        owner += [row] * (len(bounds) - 1)
        begin += bounds[:-1]
        end += bounds[1:]
        depth += range(len(bounds) - 1)
    order = np.argsort(depth, kind="stable")
    columns = [np.asarray(column, dtype=np.int64)[order] for column in (owner, begin, end, depth)]
    return _Cut(columns[0], columns[1], columns[2] - columns[1], columns[3])


def _fill(steps: np.ndarray, rows: np.ndarray | slice, schedule: Schedule, rules_at: int) -> int:
    """Fill the columns that depend on a schedule; returns the number of tokens evicted."""
    own = steps[rows]  # a copy if rows is an array
    begin = own[:, STREAM].astype(np.int64)
    end = begin + own[:, LENGTH]
    own[:, OLD_SLOTS], own[:, NEW_SLOTS] = schedule.peaks(begin), schedule.peaks(end)
    ruled = (own[:, LENGTH] == 1) & schedule.completes(begin)
    own[:, LO:PER_AGE] = schedule.leading[schedule.rows(begin)] * ruled[:, None]
    own[:, MORE] += rules_at
    own[:, PER_AGE : DECAY + 2] = schedule.score_columns
    steps[rows] = own
    return int((schedule.counts(begin) + own[:, LENGTH] - schedule.counts(end)).sum())


def _places(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 ``[num_tokens]`` each: the tokens' places in the step, and in their strides."""
    length = steps[:, LENGTH]
    if (length == 1).all():
        return steps[:, START].astype(np.int64), np.zeros(len(steps), dtype=np.int64)
    begin = np.repeat(length.cumsum() - length, length)
    offset = np.arange(len(begin), dtype=np.int64) - begin
    return _of_tokens(steps[:, START], steps) + offset, offset


def _of_tokens(column: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """int64 ``[num_tokens]``: each token's number from ``column``, which has one a stride."""
    return np.repeat(column.astype(np.int64), steps[:, LENGTH])


def _waves(
    cut: _Cut,
    steps: np.ndarray,
    schedules: list[Schedule],
    position: np.ndarray,
    moved: np.ndarray,
) -> list[StrideRows]:
    ends = np.searchsorted(cut.depth, np.arange(cut.depth.max(initial=-1) + 2))
    return [
        StrideRows(
            steps[begin:end],
            cut.owner[begin:end],
            schedules[begin:end],
            position[begin:end],
            moved[begin:end],
        )
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


@dataclass
class RuleBook:
    """One table with the further rules of all schedules in use.

    Attributes:
        max_requests: most schedules that one batch can use.
        rules: int32 ``[n, 4]``, one rule a row.
    """

    max_requests: int
    rules: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int32))
    _begins: dict[Schedule, int] = field(default_factory=dict)

    MOST = 1 << 20
    """Number of rules beyond which ``prune`` empties the table."""

    def prune(self) -> None:
        """Forget all schedules if there are too many, or their rules are.

        Clients choose how many there are. Call it between steps only: the rows of a step point into
        the table, and the next step adds the schedules that it uses again.
        """
        if len(self.rules) > self.MOST or len(self._begins) > self.max_requests + SPARE:
            self.rules, self._begins = self.rules[:0], {}

    def begin(self, schedule: Schedule) -> int:
        """First row of a schedule's rules; adds a new schedule that has any to the table."""
        if not len(schedule.further):
            return 0  # no row points into the table
        begin = self._begins.get(schedule)
        if begin is None:
            begin = self._begins[schedule] = len(self.rules)
            self.rules = np.concatenate([self.rules, schedule.further])
        return begin
