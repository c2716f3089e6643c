# SPDX-License-Identifier: Apache-2.0
"""Strides as an implementation in PyTorch or C++ takes them: a plan's rows, with their pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import CACHED, LENGTH, NEW_SLOTS, OLD_SLOTS, START, STREAM
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.step.recall import RecallStride
from vllm_cascade.step.rows import Step, StrideRows

NO_RANK = -2
"""Sentinel rank that matches no slot, for tokens without a score from the host."""


@dataclass(frozen=True)
class Singles:
    """Single tokens of ``B`` requests.

    Attributes:
        steps: int32 ``[B, STEP_COLUMNS]``.
        table: int32 ``[B, P]`` block numbers, as many as the request with most has; entries
            after a request's own are undefined.
        rules: int32 ``[n, 4]``, the table that ``MORE`` points into.
        shift: int32 ``[B]`` (``StrideRows``).
        moved: whether any key may have left the position it was written at.
        logit_scale: fp32 ``[B]``, factors on the logits, or None.
        scored: int32 ``[B]``, ranks of the units that get a token's score from the host; negative:
            none.
        given: fp32 ``[B]``, these scores; None where the host gives none.
        recall: what each does with its evicted units, or None; empty if none does anything.
        saves: int32 ``[B]``, places of draft tokens, -1 for others; None: there are no drafts.
        kept: scratch that the first layer computes and all layers share.
    """

    steps: torch.Tensor
    table: torch.Tensor
    rules: torch.Tensor
    shift: torch.Tensor
    moved: bool
    logit_scale: torch.Tensor | None = None
    scored: torch.Tensor | None = None
    given: torch.Tensor | None = None
    recall: Sequence[RecallStride | None] = ()
    saves: torch.Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def column(self, column: int) -> torch.Tensor:
        """int64 ``[B, 1, 1]``: one number a request, to go with its head sets and slots."""
        return self.steps[:, column].long().view(-1, 1, 1)

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[B, 1, 1]``, the new tokens' positions."""
        return self.column(CACHED) + self.shift.long().view(-1, 1, 1)

    @property
    def places(self) -> torch.Tensor:
        """int64 ``[B]``, where the tokens stand in the step."""
        return self.steps[:, START].long()


@dataclass(frozen=True)
class Undone:
    """Rejected drafts of ``B`` requests.

    Attributes:
        rows: int32 ``[B, 4]``: the first rejected draft's place, the number of rejected drafts, the
            slots in use before the first, and the tokens that stay.
        table: int32 ``[B, P]`` block numbers.
    """

    rows: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class Stride:
    """One request's stride.

    Attributes:
        schedule: what it runs under.
        step: int32 ``[STEP_COLUMNS]``.
        pages: int32 ``[P]``, block numbers, enough for what is cached afterwards.
        position: the first token's; the others' follow.
        moved: whether any key may have left the position it was written at.
        logit_scale: fp32 ``[T]``, factors on the logits of each query, or None.
        given: fp32 ``[T]``, scores by the host; None where it gives none.
        recalled: units among the cached ones that were recalled; they stand after the sinks.
        recalls_more: units recalled in addition after the stride's own evictions.
        recall: what it does with evicted units; None: nothing.
        kept: scratch that the first layer computes and all layers share.
    """

    schedule: Schedule
    step: torch.Tensor
    pages: torch.Tensor
    stream: int
    cached: int
    old_slots: int
    start: int
    num_tokens: int
    position: int
    moved: bool
    logit_scale: torch.Tensor | None = None
    given: torch.Tensor | None = None
    recalled: int = 0
    recalls_more: int = 0
    recall: RecallStride | None = None
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shift(self) -> int:
        """As in ``StrideRows``."""
        return self.position - self.cached

    @property
    def blocks(self) -> torch.Tensor:
        """int64 ``[P]``: the pages, to index with."""
        return self.pages.long()

    @property
    def scored(self) -> int:
        """Rank of the first token that gets a score from the host, negative before the stream's
        start; the others follow."""
        return self.cached - self.schedule.lag

    @property
    def end(self) -> int:
        """Tokens of the stream after it."""
        return self.stream + self.num_tokens

    @property
    def rows(self) -> slice:
        """Its tokens' places in the step."""
        return slice(self.start, self.start + self.num_tokens)


def scored_ranks(schedules: Sequence[Schedule], cached: np.ndarray) -> np.ndarray:
    """int32 ``[B]``, ranks of the units that get a score from the host; ``NO_RANK``: none.

    Args:
        cached: tokens that are cached before each token, int ``[B]``.
    """
    lags = np.asarray([schedule.lag for schedule in schedules])
    theirs = np.asarray([schedule.scoring.from_host for schedule in schedules])
    rank = (cached - lags) // schedules[0].unit
    return np.where(theirs & (rank >= 0), rank, NO_RANK).astype(np.int32)


def singles_of(
    rows: StrideRows,
    step: Step,
    table: torch.Tensor,
    rules: np.ndarray,
    page_slots: int,
    recall: Mapping[int, RecallStride],
    saves: np.ndarray | None = None,
) -> Singles:
    """Single tokens with their pages.

    Args:
        table: the batch's block table, on the CPU.
        recall: strides that use evicted units, by their row in the batch.
        saves: as in ``Singles``.
    """
    steps = rows.steps
    most = -(-int(steps[:, NEW_SLOTS].max()) // page_slots)
    place = steps[:, START]
    scored = given = None
    if step.given is not None:
        scored = torch.from_numpy(scored_ranks(rows.schedules, steps[:, CACHED]))
        given = torch.from_numpy(step.given[place])
    scale = None if step.logit_scale is None else torch.from_numpy(step.logit_scale[place])
    return Singles(
        steps=torch.from_numpy(np.ascontiguousarray(steps)),
        table=table[torch.from_numpy(rows.request), :most].int(),
        rules=torch.from_numpy(rules),
        shift=torch.from_numpy(rows.shift),
        moved=bool(rows.moved.any()),
        logit_scale=scale,
        scored=scored,
        given=given,
        recall=[recall.get(row) for row in rows.request.tolist()] if recall else (),
        saves=None if saves is None or (saves < 0).all() else torch.from_numpy(saves),
    )


def strides_of(
    rows: StrideRows,
    step: Step,
    table: torch.Tensor,
    page_slots: int,
    recall: Mapping[int, RecallStride] | None = None,
) -> list[Stride]:
    """Longer strides one by one, with their pages on the table's device.

    Args:
        recall: strides that use evicted units, by their row in the batch.
    """
    strides = []
    for i, schedule in enumerate(rows.schedules):
        numbers = rows.steps[i].tolist()
        start, length, slots = numbers[START], numbers[LENGTH], numbers[NEW_SLOTS]
        num_pages = -(-slots // page_slots)
        part = slice(start, start + length)
        scored = step.given is not None and schedule.scoring.from_host
        stream = numbers[STREAM]
        before, after = schedule.recalled(np.asarray([stream, stream + length])).tolist()
        strides.append(
            Stride(
                schedule=schedule,
                step=torch.from_numpy(rows.steps[i]),
                pages=table[int(rows.request[i]), :num_pages],
                stream=stream,
                cached=numbers[CACHED],
                old_slots=numbers[OLD_SLOTS],
                start=start,
                num_tokens=length,
                position=int(rows.position[i]),
                moved=bool(rows.moved[i]),
                logit_scale=_part(step.logit_scale, part, table.device),
                given=_part(step.given if scored else None, part, table.device),
                recalled=before,
                recalls_more=after - before,
                recall=recall.get(int(rows.request[i])) if recall else None,
            )
        )
    return strides


def _part(values: np.ndarray | None, part: slice, device: torch.device) -> torch.Tensor | None:
    return None if values is None else sent(torch.from_numpy(values[part]), device)
