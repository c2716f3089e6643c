# SPDX-License-Identifier: Apache-2.0
"""Arguments of launches over a prompt's strides, checked once before them.

A chunk of a prompt has many strides, and every layer launches kernels for each. Their arguments
come in three parts: constants of a layer (a class beside each kernel), the step's tokens in that
layer (``Tokens``), and the strides with their shared buffers, equal for all layers (``Strides``). A
launch combines the three and reads no tensor attributes.
"""

from dataclasses import dataclass, field

import torch
import triton

from .launch import variant_of
from .recall_columns import check_recall
from .split import Partial
from .tiles import check_rows, check_steps

LINE_WORDS = 3
"""Numbers per cached unit that are gathered (``gather``)."""
NUMBER_ROWS, VALUE_ROWS, NEW_RANK = 4, 2, 0
"""Rows of notes and of values (``keep``); the first one of notes has the units' new ranks."""


@dataclass(eq=False)
class Tokens:
    """All tokens of a step in one layer.

    Attributes:
        query: ``[num_tokens, H * G, D]``, rotated at cache positions.
        key, value: ``[num_tokens, H, D]``, keys rotated likewise. Latent rows' values have fewer
            channels.
        output: ``[num_tokens, H * G, D]``, of the values' D.
        logit_scale: fp32 ``[num_tokens]``, factors on the logits, or None.
        heads: number of query heads (0 without queries), of KV heads, D, and the dtype.
        places: token strides of ``query``, ``key``, ``value`` and ``output`` in elements; 0 for
            absent ones.
        variant: ``launch.variant_of`` all of these.
    """

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor | None = None
    output: torch.Tensor | None = None
    logit_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_heads, head_size = self.key.shape[1:]
        self._dtype = self.key.dtype
        num_queries = 0 if self.query is None else self.query.shape[1]
        self.heads = num_queries, num_heads, head_size, self._dtype
        rows = self.query, self.key, self.value, self.output
        self.places = tuple(0 if one is None else self._place(one) for one in rows)
        self.variant = variant_of(*rows, self.logit_scale, *self.places)

    def _place(self, rows: torch.Tensor) -> int:
        check_rows(rows)
        assert rows.dtype == self._dtype, (rows.dtype, self._dtype)
        return rows.stride(0)


@dataclass(eq=False)
class Strides:
    """``R`` strides and the buffers that their kernels share.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]`` step rows of strides (``stride_columns``).
        table: int32 ``[>= R, P]`` block numbers.
        max_length, max_slots: length of the longest stride, and most slots in use before it.
        lse: fp32 ``[num_tokens, H * G]``, log-sum-exps.
        gathered: ``[R, H, W, row]``, cached rows by rank, keys rotated to their ranks (``gather``).
        line: int32 ``[R, S, LINE_WORDS, W]``, what ``StrideGather`` writes about cached units.
        partial: partial results of split attention; None if it is not split.
        decays: fp32 ``[>= max_length]``: entry ``i`` is the weight of the query with ``i`` queries
            of its stride after it.
        sums: fp32 ``[R, num_heads, W * parts]`` with both as ``num_sums`` returns; None
            without attention scores.
        parts: columns of ``sums`` per unit.
        query_heads: query heads of a set, over all tensor-parallel ranks.
        given: fp32 ``[num_tokens]``, scores from the host, or None.
        plans: int32, plans at offsets ``PLAN``: begin, end and excess of a range; or the start of
            each group, the end of the last, and then the columns of all groups.
        notes: int32 ``[R, S, programs, NUMBER_ROWS, W]``, as wide as the longest sequence or
            the most slots of a request, in units.
        values: fp32 ``[R, S, programs, VALUE_ROWS, W]``, equally wide.
        recall: int32 ``[>= R, RECALL_COLUMNS]``, or None without recall.
        keep: int32 ``[R, S, W]``, a part of ``notes`` with recall: each unit's new rank, -1 if it
            is evicted; cached units come first, then the stride's.
        gathers: heads, channels and dtype of ``gathered``.
        variant: ``launch.variant_of`` all that kernels are compiled for.
    """

    steps: torch.Tensor
    table: torch.Tensor | None = None
    max_length: int = 0
    max_slots: int = 0
    lse: torch.Tensor | None = None
    gathered: torch.Tensor | None = None
    line: torch.Tensor | None = None
    partial: Partial | None = None
    decays: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    parts: int = 1
    query_heads: int = 1
    given: torch.Tensor | None = None
    plans: torch.Tensor | None = None
    notes: torch.Tensor | None = None
    values: torch.Tensor | None = None
    recall: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_steps(self.steps, self.steps if self.table is None else self.table)
        self.num_rows = len(self.steps)
        self.table_place = 0 if self.table is None else self.table.stride(0)
        self.num_sets, self.num_parts, self.line_width, self.notes_width = 0, 0, 0, 0
        if self.line is not None:
            rows, self.num_sets, words, self.line_width = self.line.shape
            assert (rows, words) == (self.num_rows, LINE_WORDS), self.line.shape
            assert self.line.is_contiguous()
        if self.notes is not None:
            self._check_notes(self.notes)
        self.gathered_width, self.gathers = 0, (0, 0, torch.float32)
        if self.gathered is not None:
            rows, heads, self.gathered_width, row = self.gathered.shape
            assert rows == self.num_rows, self.gathered.shape
            self.gathers = heads, row, self.gathered.dtype
        for told in (self.lse, self.decays, self.gathered):
            assert told is None or told.is_contiguous(), told.stride()
        assert self.decays is None or len(self.decays) >= self.max_length, self.max_length
        self.sums_heads, self.sums_width = 0, 1
        if self.sums is not None:
            rows, self.sums_heads, self.sums_width = self.sums.shape
            assert rows == self.num_rows and self.sums.is_contiguous(), self.sums.shape
        self.keep = None
        if self.recall is not None:
            check_recall(self.recall, self.steps)
            if self.notes is not None:
                self.keep = self.notes[:, :, 0, NEW_RANK]
        self.summed = max(self.sums_heads // max(self.num_sets, 1), 1)
        self.score_tile = score_tile(self.summed)
        partial = self.partial
        shared = () if partial is None else (partial.output, partial.marks, partial.arrived)
        self.variant = variant_of(
            *(self.steps, self.table, self.lse, self.line, self.decays, self.sums, self.given),
            *(self.gathered, self.plans, self.notes, self.values, self.recall, *shared),
            *(self.table_place, self.num_parts, self.summed, self.query_heads, self.parts),
        )

    def _check_notes(self, notes: torch.Tensor) -> None:
        *shared, numbers, self.notes_width = notes.shape
        rows, num_sets, self.num_parts = shared
        assert self.line is not None and self.values is not None
        assert (rows, num_sets, numbers) == (self.num_rows, self.num_sets, NUMBER_ROWS), notes.shape
        assert self.values.shape == (*shared, VALUE_ROWS, self.notes_width), self.values.shape
        assert notes.is_contiguous() and self.values.is_contiguous()


@dataclass(eq=False)
class Chunks:
    """``K`` strides of ``M`` requests' chunks, the same for all layers of a kind.

    Attributes:
        steps: int32 ``[K, STEP_COLUMNS]`` step rows of strides with their ``CHUNK``; strides begin
            at units.
        chunks: int32 ``[M, STEP_COLUMNS]`` (``stride_columns``).
        table: int32 ``[>= M, P]`` block numbers.
        positions: int64 ``[>= num_tokens]``, positions with which the step's keys were rotated.
        finished: int32 ``[>= M, S]`` counters; zero before and after a launch.
        max_length: the longest stride.
        max_slots: most slots in use before a chunk.
        max_cached: most tokens that a stride sees before its own.
        gathered: launches' strides by number and size of a layer's query heads, which the first
            layer makes for all (``parts``).
        variant: ``launch.variant_of`` all that the kernels are compiled for.
    """

    steps: torch.Tensor
    chunks: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    finished: torch.Tensor
    max_length: int
    max_slots: int
    max_cached: int
    gathered: dict[tuple[int, int], tuple[Strides, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_steps(self.steps, self.steps)
        check_steps(self.chunks, self.table)
        assert self.finished.dtype == torch.int32 and self.finished.is_contiguous()
        assert len(self.finished) >= len(self.chunks), self.finished.shape
        self.num_chunks, self.num_counters = len(self.chunks), self.finished.shape[1]
        self.table_place = self.table.stride(0)
        tensors = self.steps, self.chunks, self.table, self.positions, self.finished
        self.variant = variant_of(*tensors, self.table_place)

    def parts(self, gathered: torch.Tensor) -> tuple[Strides, ...]:
        """The strides, as many at a time as ``gathered`` has rows for."""
        most = len(gathered)
        return tuple(
            Strides(steps=steps, max_length=self.max_length, gathered=gathered[: len(steps)])
            for steps in self.steps.split(most)
        )


def score_tile(summed: int) -> int:
    """Columns per tile of a program that adds up ``summed`` heads."""
    return max(64, 4096 // triton.next_power_of_2(summed)) if summed > 4 else 1024
