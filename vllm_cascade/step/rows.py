# SPDX-License-Identifier: Apache-2.0
"""The rows of a scheduling step: tokens of requests, strides, and the waves that run at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_cascade.kernels.columns import CACHED, LENGTH
from vllm_cascade.policies.schedule import Schedule


@dataclass(frozen=True)
class RequestTokens:
    """The tokens that vLLM schedules in one step: one run per request, ``B`` requests.

    Attributes:
        schedules: the schedule of each request.
        first: int64 ``[B]``, stream index of the run's first token.
        length: int64 ``[B]``, tokens of the run; 0 in padding rows.
        place: int64 ``[B]``, index of the run's first token in the step.
        prefilling: bool ``[B]``, True if the run belongs to the prompt.
        given: fp32 ``[num_tokens]``, scores from the host. Entry ``i`` is the score of the token
            ``lag`` before token ``i``. None if the host computes no scores.
        frames: for layers with a window, the schedules whose counts give the positions that all
            layers share. None: ``schedules``.
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
    """One stride per request, for any number of requests.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]``.
        request: int64 ``[R]``, each request's row in the batch and in the block table.
        schedules: the schedule of each stride.
        position: int32 ``[R]``, position of each stride's first token; the others follow.
        moved: bool ``[R]``, whether any key may have left the position it was written at.
    """

    steps: np.ndarray
    request: np.ndarray
    schedules: Sequence[Schedule]
    position: np.ndarray
    moved: np.ndarray

    @property
    def shift(self) -> np.ndarray:
        """int32 ``[R]``: positions minus ranks. Not 0 in layers with a window only: the other
        layers, which give positions, cache this many tokens more (or fewer)."""
        return self.position - self.steps[:, CACHED]

    def __len__(self) -> int:
        return len(self.steps)

    def select(self, which: np.ndarray) -> "StrideRows":
        """The strides at the given indices, an ascending int array."""
        places = which.tolist()
        if len(places) == len(self):
            return self
        chosen = [self.schedules[i] for i in places]
        at = which if places else slice(0, 0)
        columns = (self.steps[at], self.request[at], chosen, self.position[at], self.moved[at])
        return StrideRows(*columns)


@dataclass(frozen=True)
class Step:
    """A scheduling step.

    Attributes:
        waves: groups of strides, in order. The strides of a wave run at once.
        positions: int64 ``[num_tokens]``, each token's position, which continues from the tokens
            cached at its stride's start.
        logit_scale: fp32 ``[num_tokens]``, factor on the logits of each query; None: all 1.
        given: as in ``RequestTokens``.
        evicted: tokens that the step evicts.
    """

    waves: list[StrideRows]
    positions: np.ndarray
    logit_scale: np.ndarray | None
    given: np.ndarray | None
    evicted: int = 0


def split(wave: StrideRows) -> tuple[StrideRows, StrideRows]:
    """Split a wave into single tokens, which victim rules cover, and all other strides."""
    single = wave.steps[:, LENGTH] == 1
    if any(schedule.moves_tokens for schedule in set(wave.schedules)):
        single &= ~np.asarray([schedule.moves_tokens for schedule in wave.schedules])
    if single.all():
        return wave, wave.select(np.zeros(0, dtype=np.int64))
    return wave.select(np.flatnonzero(single)), wave.select(np.flatnonzero(~single))
