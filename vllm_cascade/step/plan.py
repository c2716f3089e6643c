# SPDX-License-Identifier: Apache-2.0
"""The one description of a scheduling step, planned on the host with numpy, for every device.

A request's tokens of this step are cut into strides; its next stride needs the one before. Wave
``k`` holds every request's ``k``-th stride. What a stride does is one int32 row with named columns
(``kernels/columns.py``): where its tokens are, how many are cached before, which slots are valid,
which rules a single token applies. All of it follows from token counts, so nothing here waits for
the device, and a device needs no more than a copy of the rows.
"""

from collections.abc import Callable, Sequence
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
from vllm_cascade.step.rows import RequestTokens, Step, StrideRows, may_have_moved


@dataclass(frozen=True)
class _Cut:
    """Strides as int64 arrays, wave by wave: whose, from which token, how many, which wave."""

    owner: np.ndarray
    begin: np.ndarray
    length: np.ndarray
    depth: np.ndarray


def describe(
    tokens: RequestTokens, prefill_stride: int, rules_at: Callable[[Schedule], int]
) -> Step:
    """Plan a step.

    Args:
        rules_at: where a schedule's further rules begin in the table that ``MORE`` points into.
    """
    cut = _cut(tokens, prefill_stride)
    owners = cut.owner.tolist()
    schedules = [tokens.schedules[owner] for owner in owners]
    steps = np.zeros((len(owners), STEP_COLUMNS), dtype=np.int32)
    steps[:, STREAM], steps[:, LENGTH] = cut.begin, cut.length
    steps[:, START] = tokens.place[cut.owner] + cut.begin - tokens.first[cut.owner]
    evicted, scale = 0, None
    positions = np.zeros(int(tokens.length.sum()), dtype=np.int64)
    for schedule, rows in by_schedule(schedules):
        evicted += _fill(steps, rows, schedule, rules_at(schedule))
        place, stream, position = _tokens_of(steps[rows])
        positions[place] = position
        if schedule.scales_logits:
            scale = np.ones(len(positions), dtype=np.float32) if scale is None else scale
            scale[place] = schedule.policy.logit_scale(stream, position + 1)
    shift = None
    if tokens.frames is not None:
        shift = _shift(steps, [tokens.frames[owner] for owner in owners])
        place, _, position = _tokens_of(steps)
        positions[place] = position + np.repeat(shift, steps[:, LENGTH])
    moved = int(may_have_moved(steps, schedules, shift).sum())
    waves = _waves(cut, steps, schedules, shift)
    return Step(waves, positions, scale, tokens.given, evicted, moved)


def _shift(steps: np.ndarray, frames: Sequence[Schedule]) -> np.ndarray:
    """int32 ``[R]``: how many tokens more other layers have cached, by their schedules."""
    shift = np.zeros(len(steps), dtype=np.int32)
    for frame, rows in by_schedule(frames):
        shift[rows] = frame.positions(steps[rows, STREAM].astype(np.int64)) - steps[rows, CACHED]
    return shift


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
        bounds = cut_strides(start, stop, prefill_stride, prompt)
        owner += [row] * (len(bounds) - 1)
        begin += bounds[:-1]
        end += bounds[1:]
        depth += range(len(bounds) - 1)
    order = np.argsort(depth, kind="stable")
    columns = [np.asarray(column, dtype=np.int64)[order] for column in (owner, begin, end, depth)]
    return _Cut(columns[0], columns[1], columns[2] - columns[1], columns[3])


def _fill(steps: np.ndarray, rows: np.ndarray | slice, schedule: Schedule, rules_at: int) -> int:
    """What follows from one schedule, for its rows; returns the tokens that they evict."""
    own = steps[rows]  # a copy where rows is an array
    begin = own[:, STREAM].astype(np.int64)
    end = begin + own[:, LENGTH]
    own[:, CACHED] = schedule.positions(begin)
    own[:, OLD_SLOTS], own[:, NEW_SLOTS] = schedule.peaks(begin), schedule.peaks(end)
    ruled = (own[:, LENGTH] == 1) & schedule.completes(begin)
    own[:, LO:PER_AGE] = schedule.leading[schedule.rows(begin)] * ruled[:, None]
    own[:, MORE] += rules_at
    own[:, PER_AGE : DECAY + 2] = schedule.score_columns
    steps[rows] = own
    return int((schedule.counts(begin) + own[:, LENGTH] - schedule.counts(end)).sum())


def _tokens_of(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places in the step, stream indices and positions of all tokens of some strides."""
    wide = steps[:, [START, STREAM, CACHED]].astype(np.int64)
    length = steps[:, LENGTH]
    if (length == 1).all():
        return wide[:, 0], wide[:, 1], wide[:, 2]
    offset = np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)
    place, stream, position = (np.repeat(wide, length, axis=0) + offset[:, None]).T
    return place, stream, position


def _waves(
    cut: _Cut, steps: np.ndarray, schedules: list[Schedule], shift: np.ndarray | None
) -> list[StrideRows]:
    ends = np.searchsorted(cut.depth, np.arange(cut.depth.max(initial=-1) + 2))
    return [
        StrideRows(
            steps[begin:end],
            cut.owner[begin:end],
            schedules[begin:end],
            shift=None if shift is None else shift[begin:end],
        )
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


@dataclass
class RuleBook:
    """The further rules of all schedules in use, in one table.

    Attributes:
        rules: int32 ``[n, 4]``.
    """

    rules: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int32))
    _begins: dict[Schedule, int] = field(default_factory=dict)

    MOST = 1 << 20
    """Rules kept before schedules that are no longer in use are forgotten."""

    def begin(self, schedule: Schedule) -> int:
        """Where a schedule's rules begin; it is added if it is new."""
        begin = self._begins.get(schedule)
        if begin is None:
            if len(self.rules) + len(schedule.further) > self.MOST:
                self.rules, self._begins = self.rules[:0], {}
            begin = self._begins[schedule] = len(self.rules)
            self.rules = np.concatenate([self.rules, schedule.further])
        return begin
