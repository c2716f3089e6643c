# SPDX-License-Identifier: Apache-2.0
"""Put a stride's surviving tokens into its request's pages.

The stride's plan selects the survivors (``keep``). New ranks are prefix sums; the k-th survivor
takes the k-th free slot. Evicted tokens never touch a page. No loop runs over tokens.

All of it is one launch. Several programs share the rows to copy, and each repeats the choice:
``StrideGather`` has saved the pages' metadata, so no program reads what another writes. In pages
of units, columns are units. A stride's last, incomplete unit always stays. Its keys are written
with the rotation of its final rank, because its other tokens come after the stride's evictions and
one ``born`` must fit all of them. With recall, more units may be recalled after the stride's
evictions than now; they will stand before the incomplete unit.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .gather import LINE, LINE_SLOT
from .keep import (
    NEW_RANK,
    NUMBERS,
    PLACE,
    SCORE,
    TARGET,
    VALUES,
    WHO,
    choose_ranks,
)
from .launch import Launcher
from .recall_columns import MORE_RECALLED, RECALL
from .stored import apart, scale_place, write_codes
from .strides import Strides, Tokens
from .tiles import (
    CACHED,
    LENGTH,
    NEW_SLOTS,
    START,
    STEP,
    STREAM,
    block_of,
    copy_rows,
    load_rows,
    slot_tile,
    store_rows,
    turn_rows,
)

COPIED, ENCODED = 32, 16
"""Rows per copied tile, and per tile that is encoded in registers."""
MOST_PROGRAMS = 64
"""Most programs that share a launch's copies."""


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
    """Assign slots to the stride's survivors; if ``writes``, also update all slots' words."""
    stream = tl.load(step + STREAM)
    new_slots = tl.load(step + NEW_SLOTS) // UNIT
    whole = tl.load(step + LENGTH) // UNIT  # the stride's incomplete unit, if any
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


@triton.jit(do_not_specialize=["sums_stride", "line_stride", "notes_stride"])
def _insert_strides(
    key,
    value,
    sums,
    given,
    salts,
    line,
    kv,
    rank,
    born,
    score,
    token,
    scales,
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
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    SCORE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
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
    mine = row * NUM_SETS + head_set
    notes += (mine * tl.num_programs(2) + part) * NUMBERS * notes_stride
    values += (mine * tl.num_programs(2) + part) * VALUES * notes_stride
    line += mine * LINE * line_stride
    table += row * table_stride
    scores = values + SCORE * notes_stride
    ranks = notes + NEW_RANK * notes_stride
    who = notes + WHO * notes_stride
    total = choose_ranks(
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
        head_set=head_set,
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
    more = tl.full([], 0, tl.int32)
    if recall is not None:
        more = tl.load(recall + row * RECALL + MORE_RECALLED)
    old_stay = tl.full([], 0, tl.int32)
    for first in range(0, old, TILE):
        column = first + tl.arange(0, TILE)
        left = tl.load(ranks + column, mask=column < old, other=-1) >= 0
        old_stay += tl.sum(left.to(tl.int32), axis=0)
    _place(
        line=line,
        rank=rank,
        born=born,
        score=score,
        token=token,
        table=table,
        step=step,
        notes=notes,
        scores=scores,
        old=old,
        old_stay=old_stay,
        total=total,
        more=more,
        writes=part == 0,
        head_set=head_set,
        word_stride=word_stride,
        line_stride=line_stride,
        notes_stride=notes_stride,
        PAGE=PAGE,
        UNIT=UNIT,
        TILE=TILE,
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
        new = value + (start + source) * value_stride + head * VALUE
        slots = (
            kv
            + block * page_stride
            + (head * (PAGE * UNIT) + slot % (PAGE * UNIT)) * (ROW // HEAD) * HEAD
        )
        if CODE is not None:
            begun = length // UNIT * UNIT
            stands = (old_stay + survivor + more) * UNIT
            last = kept & (source >= begun)  # the incomplete unit
            write_codes(
                keys=keys,
                values=new,
                slots=slots,
                place=scale_place(
                    scales, block, head, slot % (PAGE * UNIT), word_stride, PAGE * UNIT, OF_ROWS
                ),
                inside=kept,
                rotation=rotation,
                distance=tl.where(last, cached + begun - stands, 0),
                HEAD=HEAD,
                VALUE=VALUE,
                ROW=ROW,
                HALF=HALF,
                INTERLEAVED=INTERLEAVED,
                APART=apart(PAGE * UNIT, OF_ROWS),
                CODE=CODE,
                OF_ROWS=OF_ROWS,
            )
        elif (HALF > 0) & (UNIT > 1):
            begun = length // UNIT * UNIT  # first token of the incomplete unit
            last = kept & (source >= begun)
            if tl.max(last.to(tl.int32), axis=0) > 0:
                stands = (old_stay + survivor + more) * UNIT
                distance = tl.where(last, cached + begun - stands, 0)
                turn_rows(keys, slots, rotation, distance, last, HEAD, HALF, INTERLEAVED)
                if ROW > HEAD:
                    store_rows(slots + HEAD, load_rows(new, last, 0, HEAD), last, 0, HEAD)
            kept = kept & (source < begun)
        if CODE is None:
            copy_rows(keys, new, slots, kept, HEAD, VALUE, ROW)


def num_programs(num_rows: int, num_sets: int) -> int:
    """Programs that share the copies of one head set of a request."""
    return max(MOST_PROGRAMS // max(num_rows * num_sets, 1), 1)


class StrideInsertion:
    """Insertion of strides in one layer.

    Args:
        layer: its ``rotation`` is the fp32 table of ``rotate``; used with units.
        reduction: over the query heads of a set: ``mean``, ``max`` or ``median``.
        salts: int32 ``[num_sets]``, hashed into the host's scores; None: used as they are.
    """

    def __init__(
        self, layer: CachedLayer, reduction: str, salts: torch.Tensor | None = None
    ) -> None:
        assert reduction in ("mean", "max", "median"), reduction
        self._heads, self._num_sets = layer.heads[1:], layer.num_sets
        turned = layer if layer.unit > 1 else replace(layer, rotation=None)
        self._launch = Launcher(
            _insert_strides,
            **layer.pages,
            **layer.words,
            **layer.rows,
            **turned.turning,
            salts=salts,
            HEADS=self._heads[0] // self._num_sets,
            REDUCTION=reduction,
            PAGE=layer.rank.shape[2],
            TILE=1024,
            ROWS=ENCODED if layer.stored else layer.copied(COPIED),
            num_warps=8,
            maxnreg=128,  # otherwise ptxas may spill to fit more blocks per multiprocessor
        )

    def __call__(self, tokens: Tokens, strides: Strides) -> None:
        """Write the pages, ``notes`` and ``values``."""
        assert tokens.heads[1:] == self._heads, (tokens.heads, self._heads)
        assert strides.num_sets == self._num_sets, (strides.num_sets, self._num_sets)
        self._launch(
            (strides.num_rows, self._num_sets, strides.num_parts),
            (tokens.variant, strides.variant),
            key=tokens.key,
            value=tokens.value,
            sums=strides.sums,
            given=strides.given,
            line=strides.line,
            table=strides.table,
            steps=strides.steps,
            plans=strides.plans,
            recall=strides.recall,
            notes=strides.notes,
            values=strides.values,
            key_stride=tokens.places[1],
            value_stride=tokens.places[2],
            table_stride=strides.table_place,
            sums_stride=strides.sums_width,
            line_stride=strides.line_width,
            notes_stride=strides.notes_width,
            SUMMED=strides.summed,
            QUERY_HEADS=strides.query_heads,
            PARTS=strides.parts,
            SCORE_TILE=strides.score_tile,
        )
