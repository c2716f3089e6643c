# SPDX-License-Identifier: Apache-2.0
"""Put a stride's surviving tokens into its request's pages, given which tokens survive.

The keep-mask is the policy's batch rule: a tournament by arg-max over groups, or a fixed pattern.
New ranks are its prefix sums; the k-th survivor of the stride takes the k-th free slot. No step
loops over tokens. Tokens that do not survive never touch a page.

In pages of units all of this is about units, and columns are theirs. A stride's last unit may not
be complete; it always stays, and its keys are written turned to where it then stands: its other
tokens come after the stride's evictions, and one ``born`` has to fit all of them; where units are
recalled, also after more of these have come to stand before it.
"""

import torch
import triton
import triton.language as tl

from .recall import MORE_RECALLED, RECALL
from .tiles import (
    CACHED,
    LENGTH,
    NEW_SLOTS,
    OLD_SLOTS,
    STEP,
    STREAM,
    block_of,
    check_pages,
    check_steps,
    copy_rows,
    load_rows,
    slot_tile,
    store_rows,
    stride_of,
    turn_rows,
)

NUMBERED, WRITTEN = 1024, 32
"""Columns and rows of a program's tile; the same for every stride, whatever its length."""


@triton.jit(do_not_specialize=["columns_stride", "tokens_stride"])
def _number(
    keep,
    steps,
    ranks,
    survivors,
    columns_stride,
    tokens_stride,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """New ranks of all columns (-1: deleted), and how many new tokens survive: which ones."""
    row = tl.program_id(0).to(tl.int64)
    mine = row * tl.num_programs(1) + tl.program_id(1)
    pads, cached, length, _ = stride_of(steps, row)
    if pads:
        return
    columns = cached + length
    if UNIT > 1:
        columns = tl.cdiv(columns, UNIT)
        cached = cached // UNIT
    kept_before = tl.full([], 0, tl.int32)
    new_before = tl.full([], 0, tl.int32)
    for first in range(0, columns, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < columns
        kept = tl.load(keep + mine * columns_stride + column, mask=inside, other=0) != 0
        count = kept.to(tl.int32)
        rank = tl.where(kept, kept_before + tl.cumsum(count, 0) - 1, -1)
        tl.store(ranks + mine * columns_stride + column, rank, mask=inside)
        new = kept & (column >= cached)
        index = new_before + tl.cumsum(new.to(tl.int32), 0) - 1
        tl.store(survivors + mine * tokens_stride + 1 + index, column - cached, mask=new)
        kept_before += tl.sum(count, 0)
        new_before += tl.sum(new.to(tl.int32), 0)
    tl.store(survivors + mine * tokens_stride, new_before)


@triton.jit
def _more(recall, row):
    """Units that will have been recalled in addition when the stride is done."""
    more = 0
    if recall is not None:
        more = tl.load(recall + row * RECALL + MORE_RECALLED)
    return more


@triton.jit(do_not_specialize=["columns_stride", "tokens_stride"])
def _place(
    ranks,
    survivors,
    scores,
    rank,
    born,
    score,
    token,
    table,
    steps,
    recall,
    targets,
    word_stride,
    table_stride,
    columns_stride,
    tokens_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Renumber the slots, give free ones to survivors; ``targets``: each survivor's slot."""
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    mine = row * tl.num_programs(1) + head_set
    stream = tl.load(steps + row * STEP + STREAM)
    if stream < 0:
        return
    cached = tl.load(steps + row * STEP + CACHED)
    old_slots = tl.load(steps + row * STEP + OLD_SLOTS)
    new_slots = tl.load(steps + row * STEP + NEW_SLOTS)
    first_born = cached
    if UNIT > 1:
        filling = tl.load(steps + row * STEP + LENGTH) // UNIT  # the new unit that isn't complete
        more = _more(recall, row)
        cached = cached // UNIT
        old_slots = old_slots // UNIT
        new_slots = new_slots // UNIT
    table += row * table_stride
    ranks += mine * columns_stride
    scores += mine * columns_stride
    survivors += mine * tokens_stride
    free_before = tl.full([], 0, tl.int32)
    num_survivors = tl.load(survivors)
    for first in range(0, new_slots, TILE):
        slot, inside, _, word = slot_tile(
            table, first, new_slots, head_set, word_stride, PAGE, TILE
        )
        place = tl.load(rank + word, mask=slot < old_slots, other=-1)
        held = place >= 0
        new_rank = tl.load(ranks + place, mask=held, other=-1)
        stays = new_rank >= 0
        column = tl.where(stays, place, 0)
        free = inside & (new_rank < 0)
        index = free_before + tl.cumsum(free.to(tl.int32), 0) - 1
        taken = free & (index < num_survivors)
        who = tl.load(survivors + 1 + index, mask=taken, other=0)
        column = tl.where(taken, cached + who, column)
        new_rank = tl.where(taken, tl.load(ranks + column, mask=taken, other=-1), new_rank)
        tl.store(rank + word, new_rank, mask=inside)
        value = tl.load(scores + column, mask=stays | taken, other=0.0)
        tl.store(score + word, value, mask=stays | taken)
        written_at = first_born + who * UNIT
        if UNIT > 1:
            written_at = tl.where(who == filling, (new_rank + more) * UNIT, written_at)
        tl.store(born + word, written_at, mask=taken)
        if token is not None:
            tl.store(token + word, stream + who * UNIT, mask=taken)
        tl.store(targets + mine * tokens_stride + who, slot, mask=taken)
        free_before += tl.sum(free.to(tl.int32), 0)


@triton.jit(do_not_specialize=["columns_stride", "tokens_stride"])
def _write(
    key,
    value,
    keep,
    ranks,
    targets,
    kv,
    table,
    steps,
    recall,
    rotation,
    key_stride,
    value_stride,
    page_stride,
    table_stride,
    columns_stride,
    tokens_stride,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Keys and values of survivors into their slots."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pads, cached, length, start = stride_of(steps, row)
    if pads:
        return
    mine = row * NUM_SETS + head % NUM_SETS
    index = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = index < length
    known = keep + mine * columns_stride + cached // UNIT + index // UNIT
    kept = tl.load(known, mask=inside, other=0) != 0
    slot = tl.load(targets + mine * tokens_stride + index // UNIT, mask=kept, other=0)
    if UNIT > 1:
        slot = slot * UNIT + index % UNIT
    block = block_of(table + row * table_stride, slot, kept, PAGE)
    keys = key + (start + index) * key_stride + head * HEAD
    values = value + (start + index) * value_stride + head * HEAD
    slots = kv + block * page_stride + (head * PAGE + slot % PAGE) * (2 * HEAD)
    if HALF > 0:
        begun = length // UNIT * UNIT  # where the unit that isn't complete begins
        if (tl.program_id(2) + 1) * TILE > begun:
            last = kept & (index >= begun)
            column = mine * columns_stride + (cached + index) // UNIT
            stands = (tl.load(ranks + column, mask=last, other=0) + _more(recall, row)) * UNIT
            distance = tl.where(last, cached + begun - stands, 0)
            turn_rows(keys, slots, rotation, distance, last, HEAD, HALF, INTERLEAVED)
            store_rows(slots + HEAD, load_rows(values, last, 0, HEAD), last, 0, HEAD)
            kept = kept & (index < begun)
    copy_rows(keys, values, slots, kept, HEAD)


@torch.library.custom_op(
    "kv_cascade::insert_strides", mutates_args=("kv", "rank", "born", "score", "token")
)
def insert_strides(
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor,
    scores: torch.Tensor,
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    token: torch.Tensor | None,
    table: torch.Tensor,
    steps: torch.Tensor,
    max_length: int,
    rotation: torch.Tensor | None = None,
    interleaved: bool = False,
    recall: torch.Tensor | None = None,
) -> None:
    """Insert ``R`` strides.

    Args:
        key, value: ``[num_tokens, H, D]`` of the whole step, keys rotated at cache positions.
        keep: bool ``[R, S, C]``, chronological columns: cached tokens, then the stride's; or units.
        scores: fp32 ``[R, S, C]``, every column's score after the stride.
        kv, rank, born, score, token: ``Pages`` views, written; ``token`` None where not kept.
        table: int32 ``[>= R, P]``.
        steps: int32 ``[R, STEP_COLUMNS]`` step rows of strides.
        max_length: the longest stride.
        rotation, interleaved: as for ``rotate.gather``, where pages are of units.
        recall: int32 ``[>= R, RECALL_COLUMNS]``, where evicted units come back.
    """
    words = (rank, born, score) if token is None else (rank, born, score, token)
    unit = check_pages(kv, *words)
    check_steps(steps, table)
    num_rows, num_sets, num_columns = keep.shape
    num_heads, head_size = key.shape[1:]
    assert keep.dtype == torch.bool and keep.is_contiguous() and scores.is_contiguous()
    assert scores.shape == keep.shape and num_sets == rank.shape[1], scores.shape
    assert key.stride()[1:] == (head_size, 1) and value.stride()[1:] == (head_size, 1)
    assert key.dtype == kv.dtype, (key.dtype, kv.dtype)
    if num_rows == 0 or max_length == 0:
        return
    page, places = kv.shape[2], rank.shape[2]
    turned = rotation if unit > 1 else None
    room = triton.cdiv(max_length, unit) + 1
    ranks = rank.new_empty(num_rows, num_sets, num_columns)
    survivors = rank.new_empty(num_rows, num_sets, room)
    targets = torch.empty_like(survivors)
    _number[(num_rows, num_sets)](
        *(keep, steps, ranks, survivors, num_columns, room),
        TILE=NUMBERED,
        UNIT=unit,
        num_warps=4,
    )
    _place[(num_rows, num_sets)](
        *(ranks, survivors, scores, rank, born, score, token, table, steps, recall, targets),
        *(rank.stride(0), table.stride(0), num_columns, room),
        PAGE=places,
        TILE=min(1024, triton.next_power_of_2(table.shape[1] * places)),
        UNIT=unit,
        num_warps=4,
    )
    _write[(num_rows, num_heads, triton.cdiv(max_length, WRITTEN))](
        *(key, value, keep, None if turned is None else ranks, targets, kv, table, steps, recall),
        *(turned,),
        *(key.stride(0), value.stride(0), kv.stride(0), table.stride(0), num_columns, room),
        NUM_SETS=num_sets,
        HEAD=head_size,
        HALF=0 if turned is None else turned.shape[2],
        INTERLEAVED=interleaved,
        PAGE=page,
        TILE=WRITTEN,
        UNIT=unit,
        num_warps=4,
    )
