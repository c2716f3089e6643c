# SPDX-License-Identifier: Apache-2.0
"""The rows of a scheduling step: tokens of requests, strides, and the waves that run at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_cascade.kernels.columns import (
    CACHED,
    LENGTH,
    STREAM,
)
from vllm_cascade.policies.schedule import Schedule, by_schedule


@dataclass(frozen=True)
class RequestTokens:
    """What vLLM schedules in one step: a run of tokens of each of ``B`` requests.

    Attributes:
        schedules: what each request runs under.
        first: int64 ``[B]``, the stream index of its first token here.
        length: int64 ``[B]``, its tokens here; 0 in rows that only pad.
        place: int64 ``[B]``, where they begin in the step.
        prefilling: bool ``[B]``, whether they are part of its prompt.
        given: fp32 ``[num_tokens]``, scores by the host, one for each token that comes: that of the
            token ``lag`` before it. None where the host gives none.
        frames: where these layers have windows: whose counts say the positions that all layers
            share. None: the same schedules.
    """

    schedules: Sequence[Schedule]
    first: np.ndarray
    length: np.ndarray
    place: np.ndarray
    prefilling: np.ndarray
    given: np.ndarray | None = None
    frames: Sequence[Schedule] | None = None


@dataclass(frozen=True)
class StrideRows:
    """Strides of different requests, side by side.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]``.
        request: int64 ``[R]``, each one's row in the batch, and in the block table.
        schedules: one a stride.
        shift: int32 ``[R]``, how far positions are beyond ``CACHED`` and what follows: other layers
            keep so many tokens more (or fewer) than these, which have windows. None: no window.
    """

    steps: np.ndarray
    request: np.ndarray
    schedules: Sequence[Schedule]
    shift: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def select(self, which: np.ndarray) -> "StrideRows":
        """Those at the given places, an int array in order."""
        places = which.tolist()
        if len(places) == len(self):
            return self
        chosen = [self.schedules[i] for i in places]
        at = which if places else slice(0, 0)
        shift = None if self.shift is None else self.shift[at]
        return StrideRows(self.steps[at], self.request[at], chosen, shift)


@dataclass(frozen=True)
class Step:
    """A scheduling step.

    Attributes:
        waves: strides that can run at once, in order.
        positions: int64 ``[num_tokens]``, every token's position: it follows what is cached at its
            stride's start.
        logit_scale: fp32 ``[num_tokens]``, factors on the logits of each query; None: all 1.
        given: as in ``RequestTokens``.
        evicted: tokens that the step deletes.
        moved_reads: strides in which a key may have left the position it was written at.
    """

    waves: list[StrideRows]
    positions: np.ndarray
    logit_scale: np.ndarray | None
    given: np.ndarray | None
    evicted: int = 0
    moved_reads: int = 0


def may_have_moved(
    steps: np.ndarray, schedules: Sequence[Schedule], shift: np.ndarray | None = None
) -> np.ndarray:
    """bool ``[R]``: whether any key may have left the position it was written at.

    Recalled units are out of order, so that keys move where all of them are cached.
    """
    position = steps[:, CACHED] if shift is None else steps[:, CACHED] + shift
    moved = position < steps[:, STREAM]
    if any(schedule.policy.recall for schedule in schedules):
        stream = steps[:, STREAM].astype(np.int64)
        for schedule, rows in by_schedule(schedules):
            moved[rows] |= schedule.evicted(stream[rows]) > 0
    return moved


def split(wave: StrideRows) -> tuple[StrideRows, StrideRows]:
    """A wave's single tokens, which rules say all about, and its other strides."""
    single = wave.steps[:, LENGTH] == 1
    if any(schedule.moves_tokens for schedule in set(wave.schedules)):
        single &= ~np.asarray([schedule.moves_tokens for schedule in wave.schedules])
    if single.all():
        return wave, wave.select(np.zeros(0, dtype=np.int64))
    return wave.select(np.flatnonzero(single)), wave.select(np.flatnonzero(~single))
