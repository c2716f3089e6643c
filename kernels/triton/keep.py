# SPDX-License-Identifier: Apache-2.0
"""New ranks of a stride's columns, from its plan and scores.

``StrideInsertion`` computes them to write the survivors. With recall, ``StrideChoice`` computes
them before that, to store evicted units while pages still hold them. Recalled units stand behind
the sinks and are not part of plans.
"""

import torch
import triton
import triton.language as tl

from .choose import best_of_groups, score_columns, without_lowest
from .gather import LINE
from .launch import Launcher
from .recall_columns import NOW, RECALL, SINKS
from .strides import NUMBER_ROWS, VALUE_ROWS, Strides
from .tiles import (
    CACHED,
    GROUPED,
    LENGTH,
    NEWEST_STAYS,
    PLAN,
    PLANNED,
    STAY,
    STEP,
    STREAM,
)

NUMBERS, NEW_RANK, WHO, PLACE, TARGET = (tl.constexpr(n) for n in (NUMBER_ROWS, 0, 1, 2, 3))
"""Rows of a program's notes: each column's new rank, the column of each new rank, the column in
each slot, and the slot of each of the stride's survivors."""
VALUES, COMPARED, SCORE = (tl.constexpr(n) for n in (VALUE_ROWS, 0, 1))
"""Rows of a program's values: each column's compared value, and its score."""


@triton.jit
def choose_ranks(
    sums,
    given,
    salts,
    line,
    token,
    step,
    plans,
    recall,
    notes,
    values,
    mine,
    row,
    head_set,
    sums_stride,
    line_stride,
    notes_stride,
    SUMMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    SCORE_TILE: tl.constexpr,
):
    """Write all columns' new ranks and each rank's column; returns the number of survivors."""
    cached = tl.load(step + CACHED)
    old = cached // UNIT
    columns = tl.cdiv(cached + tl.load(step + LENGTH), UNIT)
    compared = values + COMPARED * notes_stride
    scores = values + SCORE * notes_stride
    if sums is not None:
        sums += mine * SUMMED * sums_stride
    score_columns(
        sums=sums,
        given=given,
        salts=salts,
        line=line,
        compared=compared,
        scores=scores,
        token=token,
        step=step,
        columns=columns,
        old=old,
        head_set=head_set,
        sums_stride=sums_stride,
        line_stride=line_stride,
        SUMMED=SUMMED,
        QUERY_HEADS=QUERY_HEADS,
        REDUCTION=REDUCTION,
        PARTS=PARTS,
        UNIT=UNIT,
        TILE=SCORE_TILE,
    )
    tl.debug_barrier()

    planned = tl.load(step + PLANNED)
    stay = tl.load(step + STAY)
    sinks = tl.full([], 0, tl.int32)
    shown = tl.full([], 0, tl.int32)
    if recall is not None:
        sinks = tl.load(recall + row * RECALL + SINKS)
        shown = tl.where(planned > 0, tl.load(recall + row * RECALL + NOW), 0)
        planned += shown
        stay += shown
    plan = plans + tl.load(step + PLAN)
    newest_stays = tl.load(step + NEWEST_STAYS)
    ranks = notes + NEW_RANK * notes_stride
    who = notes + WHO * notes_stride
    if tl.load(step + GROUPED) != 0:
        best_of_groups(plan, compared, ranks, who, planned, stay, sinks, shown, newest_stays, TILE)
    else:
        without_lowest(plan, compared, ranks, who, planned, sinks, shown, newest_stays, TILE)
    for first in range(planned, columns, TILE):  # columns beyond the plan stay behind the others
        column = first + tl.arange(0, TILE)
        behind = column - planned + stay
        tl.store(ranks + column, behind, mask=column < columns)
        tl.store(who + behind, column, mask=column < columns)
    tl.debug_barrier()
    return stay + columns - planned


@triton.jit(do_not_specialize=["sums_stride", "line_stride", "notes_stride", "share"])
def _keep_of_strides(
    sums,
    given,
    salts,
    line,
    token,
    steps,
    plans,
    recall,
    notes,
    values,
    sums_stride,
    line_stride,
    notes_stride,
    share,
    SUMMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    SCORE_TILE: tl.constexpr,
):
    """Write notes of the first of ``share`` programs, by which strides are inserted later."""
    row = tl.program_id(0).to(tl.int64)
    step = steps + row * STEP
    if tl.load(step + STREAM) < 0:
        return
    mine = row * tl.num_programs(1) + tl.program_id(1)
    notes += mine * share * NUMBERS * notes_stride
    values += mine * share * VALUES * notes_stride
    line += mine * LINE * line_stride
    choose_ranks(
        sums=sums,
        given=given,
        salts=salts,
        line=line,
        token=token,
        step=step,
        plans=plans,
        recall=recall,
        notes=notes,
        values=values,
        mine=mine,
        row=row,
        head_set=tl.program_id(1),
        sums_stride=sums_stride,
        line_stride=line_stride,
        notes_stride=notes_stride,
        SUMMED=SUMMED,
        QUERY_HEADS=QUERY_HEADS,
        REDUCTION=REDUCTION,
        PARTS=PARTS,
        UNIT=UNIT,
        TILE=TILE,
        SCORE_TILE=SCORE_TILE,
    )


class StrideChoice:
    """Choice of the units that ``StrideInsertion`` will keep in one layer."""

    def __init__(
        self,
        token: torch.Tensor | None,
        unit: int,
        reduction: str,
        salts: torch.Tensor | None = None,
    ) -> None:
        fixed = {
            "token": token,
            "salts": salts,
            "REDUCTION": reduction,
            "UNIT": unit,
            "TILE": 1024,
            "num_warps": 8,
            "maxnreg": 128,  # as in insert_strides: without it ptxas may spill
        }
        self._launch = Launcher(_keep_of_strides, **fixed)

    def __call__(self, strides: Strides) -> torch.Tensor:
        """Write ``notes``, ``values`` and so ``keep``, which is returned."""
        assert strides.keep is not None, "it is for recall"
        self._launch(
            (strides.num_rows, strides.num_sets, 1),
            strides.variant,
            sums=strides.sums,
            given=strides.given,
            line=strides.line,
            steps=strides.steps,
            plans=strides.plans,
            recall=strides.recall,
            notes=strides.notes,
            values=strides.values,
            sums_stride=strides.sums_width,
            line_stride=strides.line_width,
            notes_stride=strides.notes_width,
            share=strides.num_parts,
            SUMMED=strides.summed,
            QUERY_HEADS=strides.query_heads,
            PARTS=strides.parts,
            SCORE_TILE=strides.score_tile,
        )
        return strides.keep
