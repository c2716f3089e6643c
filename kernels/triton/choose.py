# SPDX-License-Identifier: Apache-2.0
"""Survivors of a stride: scores of all columns, and the two ways to choose among them.

A column is a unit of the request's sequence: the cached units first, then the stride's. Scores are
frozen within a stride, so a policy's rules reduce to one of two choices, which the host plans:
keep the best of each group of contenders, or evict the lowest scores of a range.
"""

import triton
import triton.language as tl

from .gather import LINE_SCORE, LINE_TOKEN
from .salted import own_scores
from .tiles import (
    CACHED,
    FADE,
    LAG,
    LENGTH,
    PER_AGE,
    START,
    STREAM,
    ordered,
    reduce_heads,
    victim_key,
    victim_rank,
)


@triton.jit
def score_columns(
    sums,
    given,
    salts,
    line,
    compared,
    scores,
    token,
    step,
    columns,
    old,
    head_set,
    sums_stride,
    line_stride,
    SUMMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write ``scores`` of all columns after the stride, and the values ``compared`` among them."""
    stream = tl.load(step + STREAM)
    cached = tl.load(step + CACHED)
    length = tl.load(step + LENGTH)
    per_age = tl.load(step + PER_AGE)
    fade = tl.load(step + FADE).to(tl.float32, bitcast=True)
    for first in range(0, columns, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < columns
        is_old = column < old
        bits = tl.load(line + LINE_SCORE * line_stride + column, mask=is_old, other=0)
        result = bits.to(tl.float32, bitcast=True)
        if sums is not None:
            member = tl.arange(0, triton.next_power_of_2(SUMMED))
            there = (member < SUMMED)[:, None] & inside[None, :]
            source = sums + member.to(tl.int64)[:, None] * sums_stride + (column * PARTS)[None, :]
            mass = tl.load(source, mask=there, other=0.0)
            for part in tl.static_range(1, PARTS):
                begun = column * UNIT + part * (UNIT // PARTS) < cached + length
                mass += tl.load(source + part, mask=there & begun[None, :], other=0.0)
            if REDUCTION == "mean":
                result = tl.sum(mass, axis=0) / QUERY_HEADS + fade * result
            else:
                result = reduce_heads(mass, SUMMED, REDUCTION) + fade * result
        if given is not None:
            for offset in range(UNIT):
                index = column * UNIT + offset - (cached - tl.load(step + LAG))
                known = inside & (index >= 0) & (index < length)
                value = tl.load(given + tl.load(step + START) + index, mask=known, other=0.0)
                value = tl.where(known, own_scores(value, salts, head_set, UNIT), 0.0)
                if UNIT == 1:
                    result = tl.where(known, value, result)
                else:
                    result += value
        tl.store(scores + column, result, mask=inside)
        if token is not None:
            if per_age != 0:
                at = tl.load(line + LINE_TOKEN * line_stride + column, mask=is_old, other=0)
                at = tl.where(is_old, at, stream + (column - old) * UNIT)
                age = tl.maximum(stream + length - at, 1).to(tl.float32)
                result = result / age
        tl.store(compared + column, result, mask=inside)


@triton.jit
def best_of_groups(
    plan, compared, ranks, who, planned, stay, sinks, shown, newest_stays, TILE: tl.constexpr
):
    """Keep the best column of each group. The plan has the groups' starts, then their columns.

    The ``shown`` columns behind ``sinks`` (recalled units) are not in the plan and stay.
    """
    for first in range(0, planned, TILE):
        column = first + tl.arange(0, TILE)
        tl.store(ranks + column, tl.full([TILE], -1, tl.int32), mask=column < planned)
    tl.debug_barrier()
    for first in range(sinks, sinks + shown, TILE):
        column = first + tl.arange(0, TILE)
        tl.store(ranks + column, column, mask=column < sinks + shown)
        tl.store(who + column, column, mask=column < sinks + shown)
    for first in range(0, stay - shown, TILE):
        rank = first + tl.arange(0, TILE)
        inside = rank < stay - shown
        begin = tl.load(plan + rank, mask=inside, other=0)
        size = tl.load(plan + rank + 1, mask=inside, other=0) - begin
        top = tl.full([TILE], -0x8000000000000000, tl.int64)
        for i in range(tl.max(size, axis=0)):
            real = inside & (i < size)
            column = tl.load(plan + begin + i, mask=real, other=0)
            column += tl.where(column >= sinks, shown, 0)
            value = tl.load(compared + column, mask=real, other=0.0)
            key = victim_key(value, column, newest_stays)
            top = tl.maximum(top, tl.where(real, key, -0x8000000000000000))
        best = victim_rank(top, newest_stays)
        rank += tl.where(rank >= sinks, shown, 0)
        tl.store(ranks + best, rank, mask=inside)
        tl.store(who + rank, best, mask=inside)


@triton.jit
def without_lowest(
    plan, compared, ranks, who, planned, sinks, shown, newest_stays, TILE: tl.constexpr
):
    """Evict the ``excess`` lowest columns of ``[lo, hi)``; the plan is these three numbers.

    The plan does not count the ``shown`` columns behind ``sinks`` (recalled units), which stay.
    """
    lo = tl.load(plan)
    lo += tl.where(lo >= sinks, shown, 0)
    hi = tl.load(plan + 1)
    hi += tl.where(hi > sinks, shown, 0)
    excess = tl.load(plan + 2)
    # Binary search, from the top bit, for the highest evicted value and the number of lower ones.
    level = tl.full([], -0x80000000, tl.int64)
    lower = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    if excess > 0:
        bit = tl.full([], 0x80000000, tl.int64)
        for _ in range(33):  # the last iteration only counts
            below = tl.full([], 0, tl.int32)
            same = tl.full([], 0, tl.int32)
            for first in range(lo, hi, TILE):
                column = first + tl.arange(0, TILE)
                inside = column < hi
                value = ordered(tl.load(compared + column, mask=inside, other=0.0))
                below += tl.sum((inside & (value < level + bit)).to(tl.int32), axis=0)
                same += tl.sum((inside & (value == level)).to(tl.int32), axis=0)
            level = tl.where((bit > 0) & (below < excess), level + bit, level)
            lower = below
            equal = same
            bit = bit // 2
    gone_equal = excess - lower
    kept_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for first in range(0, planned, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < planned
        judged = (column >= lo) & (column < hi) & (excess > 0)
        value = ordered(tl.load(compared + column, mask=judged, other=0.0))
        alike = judged & (value == level)
        index = equal_before + tl.cumsum(alike.to(tl.int32), 0) - 1
        leaves = tl.where(newest_stays != 0, index < gone_equal, index >= equal - gone_equal)
        gone = (judged & (value < level)) | (alike & leaves)
        stays = inside & (gone == 0)
        rank = kept_before + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(ranks + column, tl.where(stays, rank, -1), mask=inside)
        tl.store(who + rank, column, mask=stays)
        kept_before += tl.sum(stays.to(tl.int32), axis=0)
        equal_before += tl.sum(alike.to(tl.int32), axis=0)
