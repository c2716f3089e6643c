# SPDX-License-Identifier: Apache-2.0
"""A prompt's strides on the device: rows, plans and the memory that their kernels share.

All rows of a step are sent at once, and each layer finds its arguments ready: what a stride of a
layer takes the host is three launches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import SchedulerConfig

from vllm_cascade.attention.cuda.workspace import Shapes, Workspace
from vllm_cascade.attention.step import StrideRows
from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import (
    CACHED,
    LENGTH,
    NEW_SLOTS,
    STEP_COLUMNS,
    STREAM,
)
from vllm_cascade.kernels.triton import stride_columns as columns
from vllm_cascade.kernels.triton.column_sums import num_sums
from vllm_cascade.kernels.triton.configs import Split, stride_split
from vllm_cascade.kernels.triton.insert_stride import num_programs
from vllm_cascade.kernels.triton.split import MARKS, Partial
from vllm_cascade.kernels.triton.strides import LINE_WORDS, NUMBER_ROWS, VALUE_ROWS, Strides
from vllm_cascade.policies import Policy, Schedule
from vllm_cascade.policies.execute import Plan
from vllm_cascade.policies.rules import Scoring


@dataclass(frozen=True)
class PrefillRows:
    """Strides of ``R`` requests whose scores are made and compared alike.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]`` (``kernels/triton/stride_columns.py``).
        table: int32 ``[R, P]``.
        plans: int32, what the rows point into.
        scoring: how scores are made and compared.
        decays: fp32 ``[prefill_stride]``: ``weight * decay ** i``.
        given: fp32 ``[num_tokens]`` of the whole step, scores by the host, or None.
        max_length, max_slots: the longest stride, and the most slots in use before.
        width: of the longest line, or of the most slots afterwards, in units.
        recall: int32 ``[R, RECALL_COLUMNS]``; None where no evicted units come back.
        strides: these rows and what their kernels leave each other, as launches read it, by the
            layer's query heads and their size; the first layer makes it for all.
    """

    steps: torch.Tensor
    table: torch.Tensor
    plans: torch.Tensor
    scoring: Scoring
    decays: torch.Tensor
    given: torch.Tensor | None
    max_length: int
    max_slots: int
    width: int
    recall: torch.Tensor | None = None
    strides: dict[tuple[int, int], Strides] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkRows:
    """Strides of ``M`` requests for whom nobody is compared, all of them at once.

    Attributes:
        steps: int32 ``[K, STEP_COLUMNS]``, strides.
        chunks: int32 ``[M, STEP_COLUMNS]``, what all of a request's strides are together.
        table: int32 ``[M, P]``.
        positions: int64 ``[num_tokens]``, the tokens' positions.
        finished: int32 zeros, where programs count who is done.
        max_length: the longest stride.
    """

    steps: torch.Tensor
    chunks: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    finished: torch.Tensor
    max_length: int


class Mail:
    """Rows of a step on their way to the device, in one piece.

    They are known by their places until it is sent.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._requests: list[np.ndarray] = []
        self._others: list[np.ndarray] = []
        self._num = self._num_others = 0

    def add(self, steps: np.ndarray, requests: np.ndarray) -> slice:
        """Rows with block tables: those of ``requests``, rows of the batch."""
        self._rows.append(steps)
        self._requests.append(requests)
        self._num += len(steps)
        return slice(self._num - len(steps), self._num)

    def add_without(self, steps: np.ndarray) -> slice:
        """Rows without block tables."""
        self._others.append(steps)
        self._num_others += len(steps)
        return slice(self._num_others - len(steps), self._num_others)

    def send(self, table: torch.Tensor) -> None:
        """Send all of it to where the batch's block table is."""
        parts = [*self._rows, *self._others, *self._requests]
        if not parts:
            return
        flat = np.concatenate([part.astype(np.int32).ravel() for part in parts])
        device = sent(torch.from_numpy(flat), table.device)
        rows = (self._num + self._num_others) * STEP_COLUMNS
        steps = device[:rows].view(-1, STEP_COLUMNS)
        self.steps, self.others = steps[: self._num], steps[self._num :]
        self.table = table.index_select(0, device[rows:])
        # Warm-up brings block tables of nothing but the null block: those rows are padding.
        self.steps[:, STREAM].masked_fill_(self.table[:, 0] == 0, -1)


class Plans:
    """Plans of strides on the device, which repeat with their schedules' periods.

    Attributes:
        table: int32, one plan after another, the first of which leaves everything.
    """

    ROOM = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(self.ROOM, dtype=torch.int32, device=device)
        self._places: dict[Plan, int] = {}
        self._end = 3

    def places(self, plans: Sequence[Plan | None]) -> list[int]:
        """Where each plan is, once the table is used as it is then; 0 for None."""
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
    """A plan as ``kernels/triton/choose.py`` reads it."""
    if plan.lowest is not None:
        return np.asarray(plan.lowest, dtype=np.int32)
    assert plan.groups is not None, "rule by rule it is done in PyTorch"
    groups = plan.groups.numpy()
    real = groups >= 0
    begins = np.concatenate([[0], real.sum(1).cumsum()]) + len(groups) + 1
    return np.concatenate([begins, groups[real]]).astype(np.int32)


def plan_of(schedule: Schedule, step: list[int]) -> Plan | None:
    """How a stride with these numbers is inserted; None where all of it stays."""
    stream, cached, length = step[STREAM], step[CACHED], step[LENGTH]
    if schedule.policy.recall:
        cached -= int(schedule.recalled(np.asarray(stream))) * schedule.unit
    if cached + length == schedule.count_at(stream + length):
        return None
    plan = schedule.plan(stream, length)
    assert plan is not None, "something is deleted"
    return plan


def stride_rows(rows: StrideRows, plans: Sequence[Plan | None], places: list[int]) -> np.ndarray:
    """Step rows that say how each stride's units are inserted."""
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


ChunkDraft = tuple[slice, slice, int]
"""Where strides are among the rows without block tables, and chunks among the others; the longest
stride."""


def mail_chunks(mail: Mail, waves: Sequence[StrideRows]) -> ChunkDraft:
    """Rows of strides, and of chunks: what all strides of a request are together."""
    steps = np.concatenate([rows.steps for rows in waves])
    request = np.concatenate([rows.request for rows in waves])
    schedules = [schedule for rows in waves for schedule in rows.schedules]
    owners, first, chunk = np.unique(request, return_index=True, return_inverse=True)
    steps[:, columns.CHUNK] = chunk
    chunks = steps[first]  # waves are in order: the first stride of each
    chunks[:, LENGTH] = np.bincount(chunk, weights=steps[:, LENGTH])
    chunks[:, columns.STRIDES] = np.bincount(chunk)
    np.maximum.at(chunks[:, NEW_SLOTS], chunk, steps[:, NEW_SLOTS])
    ends = (chunks[:, STREAM] + chunks[:, LENGTH]).tolist()
    for row, (place, end) in enumerate(zip(first.tolist(), ends, strict=True)):
        chunks[row, columns.SINKS] = schedules[place].keeps_newest
        chunks[row, columns.LEFT] = schedules[place].count_at(end)
    longest = int(steps[:, LENGTH].max())
    return mail.add_without(steps), mail.add(chunks, owners), longest


def widest(steps: np.ndarray, unit: int) -> int:
    """Of the lines of some strides, or of their slots afterwards, in units."""
    line = int((steps[:, CACHED] + steps[:, LENGTH]).max())
    return max(-(-line // unit), int(steps[:, NEW_SLOTS].max()) // unit)


def split_of(policy: Policy, query: torch.Tensor, least: int) -> Split:
    """How a layer's attention of strides is split over keys; ``query``: ``[.., H * G, D]``.

    A request's own policy may have fewer slots in use than the engine's, and then fewer parts.
    """
    num_queries, head_size = query.shape[1:]
    return stride_split(
        *(query.device, query.dtype, head_size, num_queries),
        longest=policy.prefill_stride,
        most_slots=policy.capacity,
        least=least,
    )


def stride_shapes(
    num_rows: int,
    num_sets: int,
    width: int,
    num_tokens: int,
    query: torch.Tensor,
    num_heads: int,
    unit: int,
    reduction: str | None,
    splits: int,
) -> Shapes:
    """What the kernels of strides leave each other.

    Args:
        width: as ``PrefillRows.width``.
        num_tokens: of the whole step.
        query: ``[.., H * G, D]``.
        num_heads: KV heads.
        reduction: over the query heads of a set; None: attention makes no scores.
        splits: of attention over keys.
    """
    shared = num_rows, num_sets, num_programs(num_rows, num_sets)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "lse": ((num_tokens, query.shape[1]), torch.float32),
        "line": ((num_rows, num_sets, LINE_WORDS, width), torch.int32),
        "notes": ((*shared, NUMBER_ROWS, width), torch.int32),
        "values": ((*shared, VALUE_ROWS, width), torch.float32),
    }
    if reduction is not None:
        heads, parts = num_sums(query, num_heads, unit, reduction)
        shapes["sums"] = ((num_rows, heads, width * parts), torch.float32)
    if splits > 1:
        each = num_tokens, query.shape[1], splits
        shapes["partial"] = ((*each, query.shape[2]), torch.float32)
        shapes["marks"] = ((*each, MARKS), torch.float32)
    return shapes


def counters_of(shapes: Shapes) -> int:
    """Counters of the workspace that go with them."""
    return math.prod(shapes["marks"][0][:2]) if "marks" in shapes else 0


def memory_of(workspace: Workspace, shapes: Shapes) -> dict[str, Any]:
    """What ``Strides`` has of the workspace, by name."""
    made: dict[str, Any] = workspace.carve(shapes)
    if "marks" in made:
        arrived = workspace.counters(counters_of(shapes))
        made["partial"] = Partial(made["partial"], made.pop("marks"), arrived)
    return made


def worst_shapes(
    policy: Policy, limits: SchedulerConfig, query: torch.Tensor, num_heads: int, least: int
) -> Shapes:
    """``stride_shapes`` of the most strides in a wave, one of them as long as it can be."""
    tokens = limits.max_num_batched_tokens
    longest = policy.capacity + min(policy.prefill_stride, tokens)
    return stride_shapes(
        num_rows=max(min(limits.max_num_seqs, tokens // 2), 1),
        num_sets=num_heads if policy.head_policy == "per_kv_head" else 1,
        width=longest // policy.unit + 1,
        num_tokens=tokens,
        query=query,
        num_heads=num_heads,
        unit=policy.unit,
        reduction=policy.head_reduction if policy.uses_attention else None,
        splits=split_of(policy, query, least).splits,
    )
