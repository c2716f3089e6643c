# SPDX-License-Identifier: Apache-2.0
"""Put a stride's surviving tokens into its request's pages: who survives, at which ranks, where.

Scores are frozen within a stride, so a policy's rules come down to one of two choices, which the
host plans (``policies/execute.py``): the best of each group of contenders stays, or of a range the
lowest so many leave. New ranks are prefix sums; the k-th survivor of the stride takes the k-th
free slot; tokens that do not survive never touch a page. No step loops over tokens.

All of it is one launch. Several programs share out the rows that are to be copied, and each makes
the choice for itself: nothing is read of what any of them writes, because ``attend_strides`` left
what the pages said. In pages of units all of this is about units, and columns are theirs. A
stride's last unit may not be complete; it always stays, and its keys are written turned to where
it then stands: its other tokens come after the stride's evictions, and one ``born`` has to fit all
of them.

Where evicted units come back, those that did stand behind the sinks, and plans know nothing of
them; and who leaves is asked once more, beforehand (``keep_of_strides``), for what stores it.
"""

import torch
import triton
import triton.language as tl

from .prefill import LINE, LINE_SCORE, LINE_SLOT, LINE_TOKEN, LINE_WORDS
from .recall import MORE_RECALLED, NOW, RECALL, SINKS, check_recall
from .tiles import (
    CACHED,
    FADE,
    GROUPED,
    LAG,
    LENGTH,
    NEW_SLOTS,
    NEWEST_STAYS,
    PER_AGE,
    PLAN,
    PLANNED,
    START,
    STAY,
    STEP,
    STREAM,
    block_of,
    check_pages,
    check_steps,
    copy_rows,
    load_rows,
    ordered,
    reduce_heads,
    slot_tile,
    store_rows,
    turn_rows,
    victim_key,
    victim_rank,
)

NUMBER_ROWS, VALUE_ROWS = 4, 2
NUMBERS, NEW_RANK, WHO, PLACE, TARGET = (tl.constexpr(n) for n in (NUMBER_ROWS, 0, 1, 2, 3))
"""A program's notes: a column's rank afterwards, the column of a rank, the column in a slot, and
the slot of each of the stride's survivors."""
VALUES, COMPARED, SCORE = (tl.constexpr(n) for n in (VALUE_ROWS, 0, 1))
"""What is compared of a column, and its score."""
COPIED = 32
"""Rows that a program copies at a time."""
MOST_PROGRAMS = 64
"""So many programs copy at once, if there are not more requests and head sets."""


@triton.jit
def _score(
    sums,
    given,
    line,
    compared,
    scores,
    token,
    step,
    columns,
    old,
    sums_stride,
    line_stride,
    SUMMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores of all columns after the stride, and what is compared of them."""
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
def _best_of_groups(
    plan, compared, ranks, who, planned, stay, sinks, shown, newest_stays, TILE: tl.constexpr
):
    """Of each group of columns the best stays; the plan: where groups begin, then their columns.

    ``shown`` columns behind ``sinks`` are not in the plan and stay.
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
def _without_lowest(
    plan, compared, ranks, who, planned, sinks, shown, newest_stays, TILE: tl.constexpr
):
    """Of the columns ``[lo, hi)`` the ``excess`` lowest leave; the plan is these three numbers."""
    lo = tl.load(plan)
    lo += tl.where(lo >= sinks, shown, 0)
    hi = tl.load(plan + 1)
    hi += tl.where(hi > sinks, shown, 0)
    excess = tl.load(plan + 2)
    # The value of the last that leaves, bit by bit from the top; and how many are below it.
    level = tl.full([], -0x80000000, tl.int64)
    lower = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    if excess > 0:
        bit = tl.full([], 0x80000000, tl.int64)
        for _ in range(33):  # the last turn counts
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


@triton.jit
def _place(
    line,
    rank,
    born,
    score,
    token,
    table,
    step,
    notes,
    scores,
    columns,
    old,
    old_stay,
    total,
    more,
    writes,
    head_set,
    word_stride,
    line_stride,
    notes_stride,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Slots of the stride's survivors; whoever ``writes`` also renumbers all slots. In units."""
    stream = tl.load(step + STREAM)
    new_slots = tl.load(step + NEW_SLOTS) // UNIT
    whole = tl.load(step + LENGTH) // UNIT  # the stride's unit that is not complete, if any
    for first in range(0, new_slots, TILE):
        slot = first + tl.arange(0, TILE)
        empty = tl.full([TILE], -1, tl.int32)
        tl.store(notes + PLACE * notes_stride + slot, empty, mask=slot < new_slots)
    tl.debug_barrier()
    for first in range(0, old, TILE):
        column = first + tl.arange(0, TILE)
        slot = tl.load(line + LINE_SLOT * line_stride + column, mask=column < old, other=0)
        tl.store(notes + PLACE * notes_stride + slot, column, mask=column < old)
    tl.debug_barrier()
    free_before = tl.full([], 0, tl.int32)
    for first in range(0, new_slots, TILE):
        slot, inside, _, word = slot_tile(
            table, first, new_slots, head_set, word_stride, PAGE, TILE
        )
        column = tl.load(notes + PLACE * notes_stride + slot, mask=inside, other=-1)
        held = column >= 0
        now = tl.load(notes + NEW_RANK * notes_stride + column, mask=held, other=-1)
        free = inside & (now < 0)
        index = free_before + tl.cumsum(free.to(tl.int32), 0) - 1
        taken = free & (index < total - old_stay)
        who = tl.load(notes + WHO * notes_stride + old_stay + index, mask=taken, other=0)
        tl.store(notes + TARGET * notes_stride + index, slot, mask=taken)
        now = tl.where(taken, old_stay + index, now)
        tl.store(rank + word, now, mask=inside & writes)
        there = (now >= 0) & inside & writes
        value = tl.load(scores + tl.where(taken, who, column), mask=there, other=0.0)
        tl.store(score + word, value, mask=there)
        written_at = who * UNIT
        if UNIT > 1:
            written_at = tl.where(who - old == whole, (now + more) * UNIT, written_at)
        tl.store(born + word, written_at, mask=taken & writes)
        if token is not None:
            tl.store(token + word, stream + (who - old) * UNIT, mask=taken & writes)
        free_before += tl.sum(free.to(tl.int32), axis=0)


@triton.jit
def _choose(
    sums,
    given,
    line,
    token,
    step,
    plans,
    recall,
    notes,
    values,
    mine,
    row,
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
    """New ranks of all columns, and who has which; returns how many there are in the end."""
    cached = tl.load(step + CACHED)
    old = cached // UNIT
    columns = tl.cdiv(cached + tl.load(step + LENGTH), UNIT)
    compared = values + COMPARED * notes_stride
    scores = values + SCORE * notes_stride
    mass = sums
    if sums is not None:
        mass += mine * SUMMED * sums_stride
    _score(
        *(mass, given, line, compared, scores, token, step, columns, old),
        *(sums_stride, line_stride, SUMMED, QUERY_HEADS, REDUCTION, PARTS, UNIT, SCORE_TILE),
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
        _best_of_groups(plan, compared, ranks, who, planned, stay, sinks, shown, newest_stays, TILE)
    else:
        _without_lowest(plan, compared, ranks, who, planned, sinks, shown, newest_stays, TILE)
    for first in range(planned, columns, TILE):  # what is not planned stays behind the others
        column = first + tl.arange(0, TILE)
        behind = column - planned + stay
        tl.store(ranks + column, behind, mask=column < columns)
        tl.store(who + behind, column, mask=column < columns)
    tl.debug_barrier()
    return stay + columns - planned


@triton.jit(do_not_specialize=["sums_stride", "line_stride", "notes_stride"])
def _keep_of_strides(
    sums,
    given,
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
    SHARE: tl.constexpr,
    SUMMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    SCORE_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    step = steps + row * STEP
    if tl.load(step + STREAM) < 0:
        return
    mine = row * tl.num_programs(1) + tl.program_id(1)
    notes += mine * SHARE * NUMBERS * notes_stride
    values += mine * SHARE * VALUES * notes_stride
    line += mine * LINE * line_stride
    _choose(
        *(sums, given, line, token, step, plans, recall, notes, values, mine, row),
        *(sums_stride, line_stride, notes_stride, SUMMED, QUERY_HEADS, REDUCTION, PARTS, UNIT),
        *(TILE, SCORE_TILE),
    )


@triton.jit(do_not_specialize=["sums_stride", "line_stride", "notes_stride"])
def _insert_strides(
    key,
    value,
    sums,
    given,
    line,
    kv,
    rank,
    born,
    score,
    token,
    table,
    steps,
    plans,
    recall,
    rotation,
    notes,
    values,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    sums_stride,
    line_stride,
    notes_stride,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    SUMMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    SCORE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    part = tl.program_id(2)
    step = steps + row * STEP
    if tl.load(step + STREAM) < 0:
        return
    cached = tl.load(step + CACHED)
    length = tl.load(step + LENGTH)
    start = tl.load(step + START).to(tl.int64)
    old = cached // UNIT
    columns = tl.cdiv(cached + length, UNIT)
    mine = row * NUM_SETS + head_set
    notes += (mine * tl.num_programs(2) + part) * NUMBERS * notes_stride
    values += (mine * tl.num_programs(2) + part) * VALUES * notes_stride
    line += mine * LINE * line_stride
    table += row * table_stride
    scores = values + SCORE * notes_stride
    ranks = notes + NEW_RANK * notes_stride
    who = notes + WHO * notes_stride
    total = _choose(
        *(sums, given, line, token, step, plans, recall, notes, values, mine, row),
        *(sums_stride, line_stride, notes_stride, SUMMED, QUERY_HEADS, REDUCTION, PARTS, UNIT),
        *(TILE, SCORE_TILE),
    )
    more = tl.full([], 0, tl.int32)
    if recall is not None:
        more = tl.load(recall + row * RECALL + MORE_RECALLED)
    old_stay = tl.full([], 0, tl.int32)
    for first in range(0, old, TILE):
        column = first + tl.arange(0, TILE)
        left = tl.load(ranks + column, mask=column < old, other=-1) >= 0
        old_stay += tl.sum(left.to(tl.int32), axis=0)
    _place(
        *(line, rank, born, score, token, table, step, notes, scores, columns, old, old_stay),
        *(total, more, part == 0, head_set, word_stride, line_stride, notes_stride),
        *(PAGE, UNIT, TILE),
    )
    tl.debug_barrier()

    # Keys and values of the stride's survivors, a tile of one head at a time.
    num_tokens = (total - old_stay) * UNIT
    tiles = tl.cdiv(num_tokens, ROWS)
    for item in range(part, tiles * HEADS, tl.num_programs(2)):
        head = head_set * HEADS + item // tiles
        index = item % tiles * ROWS + tl.arange(0, ROWS)
        survivor = index // UNIT
        unit = tl.load(who + old_stay + survivor, mask=index < num_tokens, other=old) - old
        source = unit * UNIT + index % UNIT
        kept = (index < num_tokens) & (source < length)
        slot = tl.load(notes + TARGET * notes_stride + survivor, mask=kept, other=0)
        slot = slot * UNIT + index % UNIT
        block = block_of(table, slot, kept, PAGE * UNIT)
        keys = key + (start + source) * key_stride + head * HEAD
        new = value + (start + source) * value_stride + head * HEAD
        slots = kv + block * page_stride + (head * (PAGE * UNIT) + slot % (PAGE * UNIT)) * 2 * HEAD
        if (HALF > 0) & (UNIT > 1):
            begun = length // UNIT * UNIT  # where the unit that isn't complete begins
            last = kept & (source >= begun)
            if tl.max(last.to(tl.int32), axis=0) > 0:
                stands = (old_stay + survivor + more) * UNIT
                distance = tl.where(last, cached + begun - stands, 0)
                turn_rows(keys, slots, rotation, distance, last, HEAD, HALF, INTERLEAVED)
                store_rows(slots + HEAD, load_rows(new, last, 0, HEAD), last, 0, HEAD)
            kept = kept & (source < begun)
        copy_rows(keys, new, slots, kept, HEAD)


def num_programs(num_rows: int, num_sets: int) -> int:
    """Programs that share what one set of a request has to copy."""
    return max(MOST_PROGRAMS // max(num_rows * num_sets, 1), 1)


def insert_strides(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    token: torch.Tensor | None,
    table: torch.Tensor,
    steps: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
    sums: torch.Tensor | None,
    given: torch.Tensor | None,
    line: torch.Tensor,
    plans: torch.Tensor,
    reduction: str,
    query_heads: int,
    parts: int,
    notes: torch.Tensor,
    values: torch.Tensor,
    recall: torch.Tensor | None = None,
) -> None:
    """Insert ``R`` strides.

    Args:
        key, value: ``[num_tokens, H, D]`` of the whole step, keys rotated at cache positions.
        kv, rank, born, score, token: ``Pages`` views, written; ``token`` None where not kept.
        table: int32 ``[>= R, P]``.
        steps: int32 ``[R, STEP_COLUMNS]`` step rows of strides (``stride_columns``).
        rotation: fp32, of ``rotate``; read where pages are of units.
        interleaved: rotary pairs are (2i, 2i + 1).
        sums: fp32 of ``column_sums``, or None where attention makes no scores.
        given: fp32 ``[num_tokens]``, scores that the host made, or None.
        line: of ``attend_strides``.
        plans: int32, what ``PLAN`` points into: first, last and excess of a range; or where each
            group begins, the end of the last, and then the columns of all, in order.
        reduction: over the query heads of a set: ``mean``, ``max`` or ``median``.
        query_heads: of a set, over all tensor-parallel ranks.
        parts: columns of ``sums`` for a unit (``num_sums``).
        notes: int32 ``[R, S, programs, NUMBER_ROWS, W]``, as wide as the longest line or the most
            slots of a request, in units; written.
        values: fp32 ``[R, S, programs, VALUE_ROWS, W]``, likewise.
        recall: int32 ``[>= R, RECALL_COLUMNS]``, where evicted units come back.
    """
    words = (rank, born, score) if token is None else (rank, born, score, token)
    unit = check_pages(kv, *words)
    check_steps(steps, table)
    assert reduction in ("mean", "max", "median"), reduction
    num_rows, num_sets, num_parts = notes.shape[:3]
    num_heads, head_size = key.shape[1:]
    assert num_rows == len(steps) and num_sets == rank.shape[1], notes.shape
    assert notes.is_contiguous() and values.is_contiguous() and line.shape[2] == LINE_WORDS
    assert values.shape[:3] == notes.shape[:3] and values.shape[4] == notes.shape[4]
    assert key.stride()[1:] == (head_size, 1) and value.stride()[1:] == (head_size, 1)
    assert key.dtype == kv.dtype, (key.dtype, kv.dtype)
    if num_rows == 0:
        return
    if recall is not None:
        check_recall(recall, steps)
    turned = rotation if unit > 1 else None
    summed = 1 if sums is None else sums.shape[1] // num_sets
    _insert_strides[(num_rows, num_sets, num_parts)](
        *(key, value, sums, given, line, kv, rank, born, score, token, table, steps, plans),
        *(
            recall,
            turned,
            notes,
            values,
            key.stride(0),
            value.stride(0),
            kv.stride(0),
            rank.stride(0),
        ),
        *(table.stride(0), 1 if sums is None else sums.shape[2], line.shape[3], notes.shape[4]),
        NUM_SETS=num_sets,
        HEADS=num_heads // num_sets,
        SUMMED=summed,
        QUERY_HEADS=query_heads,
        REDUCTION=reduction,
        PARTS=parts,
        HEAD=head_size,
        HALF=0 if turned is None else turned.shape[2],
        INTERLEAVED=interleaved,
        PAGE=rank.shape[2],
        UNIT=unit,
        TILE=1024,
        SCORE_TILE=_score_tile(summed),
        ROWS=COPIED,
        num_warps=8,
    )


def _score_tile(summed: int) -> int:
    return max(64, 4096 // triton.next_power_of_2(summed)) if summed > 4 else 1024


def keep_of_strides(
    token: torch.Tensor | None,
    steps: torch.Tensor,
    recall: torch.Tensor,
    unit: int,
    sums: torch.Tensor | None,
    given: torch.Tensor | None,
    line: torch.Tensor,
    plans: torch.Tensor,
    reduction: str,
    query_heads: int,
    parts: int,
    notes: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Who of ``R`` strides and their lines will survive ``insert_strides``, whose arguments
    these are.

    Returns:
        int32 ``[R, S, W]``, a part of ``notes``: columns' ranks afterwards, -1 of those that leave;
        columns are units, those of the line and then the stride's.
    """
    check_steps(steps, steps)
    check_recall(recall, steps)
    num_rows, num_sets, num_parts = notes.shape[:3]
    if num_rows:
        summed = 1 if sums is None else sums.shape[1] // num_sets
        _keep_of_strides[(num_rows, num_sets)](
            *(sums, given, line, token, steps, plans, recall, notes, values),
            *(1 if sums is None else sums.shape[2], line.shape[3], notes.shape[4]),
            SHARE=num_parts,
            SUMMED=summed,
            QUERY_HEADS=query_heads,
            REDUCTION=reduction,
            PARTS=parts,
            UNIT=unit,
            TILE=1024,
            SCORE_TILE=_score_tile(summed),
            num_warps=8,
        )
    return notes[:, :, 0, NEW_RANK.value]
