# SPDX-License-Identifier: Apache-2.0
"""Bring the units with the most evidence into a request's pages.

One program per request and head set selects the units and assigns their slots. A unit gives a part
of its evidence to the next one if the text goes on there. The program finds the lowest selected
evidence bit by bit: the bits of non-negative numbers sort like the numbers. Ties go to the first
unit. Units that stay keep their slots and rows. Keys and values of the others are copied from the
host's pinned memory directly into the pages.
"""

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .launch import Launcher
from .recall_columns import (
    BEFORE,
    BEGIN,
    END,
    HOW,
    JUDGED,
    NOW,
    RECALL,
    RING,
    SINKS,
)
from .recall_rows import RecallRows
from .shapes import Shapes
from .stored import apart, check_scales, scale_place
from .tiles import NEVER, OLD_SLOTS, STEP, slot_tile

MOST_LINE = 1024
"""Places per tile."""
MOST_TILE = 2048
"""Units per tile: as many as stay in a program's registers."""
COPIED = 2048
"""Numbers per copied tile."""
NEXT = tl.constexpr(0.125)
"""What of a unit's evidence the next one has, at least, if the text goes on in it."""


@triton.jit
def _worth(
    evidence,
    stored_token,
    oldest,
    unit,
    inside,
    CAPACITY: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Evidence of units, at least ``NEXT`` of the previous one's where its text goes on in them."""
    follows = inside & (unit > 0)
    token = tl.load(stored_token + (oldest + unit) % CAPACITY, mask=follows, other=0)
    place = (oldest + unit - 1) % CAPACITY
    follows = follows & (token == tl.load(stored_token + place, mask=follows, other=0) + UNIT)
    own = tl.load(evidence + unit, mask=inside, other=0.0)
    return tl.maximum(own, tl.load(evidence + unit - 1, mask=follows, other=0.0) * NEXT)


@triton.jit
def _largest(value, inside, now):
    """Marks of the ``now`` largest of some non-negative numbers; ties go to the first.

    The numbers stay in registers while all warps find the lowest of these bit by bit.
    """
    bits = tl.where(inside, (value + 0.0).to(tl.int32, bitcast=True), -1)
    least = tl.full([], 0, tl.int32)
    larger = tl.full([], 0, tl.int32)
    bit = tl.full([], 1 << 30, tl.int32)
    for _ in range(31):
        tried = least | bit
        bit = bit >> 1
        count = tl.sum((bits >= tried).to(tl.int32), axis=0)
        enough = count >= now
        least = tl.where(enough, tried, least)
        larger = tl.where(enough, larger, count)  # count of the last value that was too large
    same = bits == least
    turn = larger + tl.cumsum(same.to(tl.int32), 0) - 1
    return (bits > least) | (same & (turn < now))


@triton.jit
def _pick(
    picked,
    evidence,
    stored_token,
    oldest,
    number,
    now,
    CAPACITY: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """List the ``now`` units of most worth, in order. A tile begins with the best so far."""
    index = tl.arange(0, TILE)
    taken = tl.full([], 0, tl.int32)
    for first in range(0, number, TILE - MOST):
        was = index < taken
        unit = tl.where(was, tl.load(picked + index, mask=was, other=0), first + index - MOST)
        inside = was | ((index >= MOST) & (unit < number))
        worth = _worth(evidence, stored_token, oldest, unit, inside, CAPACITY, UNIT)
        takes = _largest(worth, inside, now)
        tl.debug_barrier()
        tl.store(picked + tl.cumsum(takes.to(tl.int32), 0) - 1, unit, mask=takes)
        taken = tl.sum(takes.to(tl.int32), axis=0)
        tl.debug_barrier()


@triton.jit(do_not_specialize_on_alignment=["stored_born", "stored_token"])  # varies by layer
def _choose(
    evidence,
    stored_born,
    stored_token,
    rank,
    born,
    score,
    token,
    table,
    steps,
    recall,
    chosen,
    moves,
    scratch,
    exchanged,
    word_stride,
    table_stride,
    rings,
    CAPACITY: tl.constexpr,
    MOST: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LINE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Select units and slots; write ranks, ``born``, tokens, and ``moves`` for the rows."""
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    mine = row * tl.num_programs(1) + head_set
    columns = recall + row * RECALL
    how = tl.load(columns + HOW)
    if how == 0:
        return
    ring = tl.load(columns + RING)
    before = tl.load(columns + BEFORE)
    now = tl.load(columns + NOW)
    oldest = tl.load(columns + BEGIN)
    sinks = tl.load(columns + SINKS)
    places = tl.load(steps + row * STEP + OLD_SLOTS) // UNIT
    number = tl.load(columns + END) - oldest
    evidence += mine * CAPACITY
    chosen += mine * MOST
    moves += mine * MOST
    wanted = scratch + mine * (3 * MOST)  # their tokens, in order
    coming = wanted + MOST  # those that are not there yet
    picked = coming + MOST  # in the order of the store
    stored_born += head_set.to(tl.int64) * rings + ring
    stored_token += head_set.to(tl.int64) * rings + ring
    table += row * table_stride
    index = tl.arange(0, MOST)
    listed = index < now
    tl.store(moves + index, -1)
    if how == JUDGED:
        _pick(
            picked, evidence, stored_token, oldest, number, now, CAPACITY, MOST, TILE, UNIT
        )  # fmt: skip
    else:
        tl.store(picked + index, index, mask=listed)
    tl.debug_barrier()

    # By their place in the stream.
    unit = oldest + tl.load(picked + index, mask=listed, other=0)
    begins = tl.load(stored_token + unit % CAPACITY, mask=listed, other=NEVER)
    order = tl.zeros([MOST], tl.int32)
    for other in range(now):
        theirs = (oldest + tl.load(picked + other)) % CAPACITY
        order += (tl.load(stored_token + theirs) < begins).to(tl.int32)
    tl.store(chosen + order, unit, mask=listed)
    tl.store(wanted + order, begins, mask=listed)
    tl.debug_barrier()

    # Units that are no longer wanted give up their slots; the others stand where they are wanted.
    there = tl.zeros([MOST], tl.int32)
    for first in range(0, places, LINE):
        _, inside, _, word = slot_tile(table, first, places, head_set, word_stride, PAGE, LINE)
        place = tl.load(rank + word, mask=inside, other=-1)
        had = (place >= sinks) & (place < sinks + before)
        theirs = tl.load(token + word, mask=had, other=-1)
        left = tl.where(place >= sinks + before, place + (now - before), place)
        left = tl.where(had, -1, left)
        for nth in range(now):
            same = had & (theirs == tl.load(wanted + nth))
            left = tl.where(same, sinks + nth, left)
            found = tl.max(same.to(tl.int32), axis=0)
            there = tl.where(index == nth, tl.maximum(there, found), there)
        tl.store(rank + word, left, mask=inside)
    missing = listed & (there == 0)
    tl.store(coming + tl.cumsum(missing.to(tl.int32), 0) - 1, index, mask=missing)
    total = tl.sum(missing.to(tl.int32), axis=0)
    tl.debug_barrier()

    free_before = tl.full([], 0, tl.int32)
    for first in range(0, places, LINE):
        slot, inside, _, word = slot_tile(table, first, places, head_set, word_stride, PAGE, LINE)
        free = inside & (tl.load(rank + word, mask=inside, other=0) < 0)
        free_index = free_before + tl.cumsum(free.to(tl.int32), 0) - 1
        taken = free & (free_index < total)
        which = tl.load(coming + free_index, mask=taken, other=0)
        source = tl.load(chosen + which, mask=taken, other=0) % CAPACITY
        tl.store(rank + word, sinks + which, mask=taken)
        tl.store(born + word, tl.load(stored_born + source, mask=taken, other=0), mask=taken)
        tl.store(token + word, tl.load(wanted + which, mask=taken, other=0), mask=taken)
        tl.store(score + word, tl.zeros([LINE], tl.float32), mask=taken)
        tl.store(moves + which, slot, mask=taken)
        free_before += tl.sum(free.to(tl.int32), axis=0)
    tl.atomic_add(exchanged, total.to(tl.int64))


@triton.jit
def _bring(
    rows,
    row_scales,
    kv,
    scales,
    table,
    recall,
    chosen,
    moves,
    page_stride,
    word_stride,
    table_stride,
    rings,
    CAPACITY: tl.constexpr,
    MOST: tl.constexpr,
    NUM_SETS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    LEAD: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Keys and values of one unit and head: ``SIZE`` numbers that lie together on both sides."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = recall + row * RECALL
    nth = tl.program_id(2)
    if (tl.load(columns + HOW) == 0) | (nth >= tl.load(columns + NOW)):
        return
    mine = (row * NUM_SETS + head % NUM_SETS) * MOST + nth
    slot = tl.load(moves + mine)
    if slot < 0:
        return  # it is there
    place = tl.load(columns + RING) + tl.load(chosen + mine) % CAPACITY
    source = rows + (head.to(tl.int64) * rings + place) * SIZE
    block = tl.load(table + row * table_stride + slot // PAGE).to(tl.int64)
    target = kv + block * page_stride + (head * PAGE + slot % PAGE) * SIZE
    for first in range(0, SIZE, TILE):
        index = first + tl.arange(0, TILE)
        inside = index < SIZE
        tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)
    if OF_ROWS:
        token = tl.arange(0, LEAD)
        inside = token < UNIT
        kept = row_scales + ((head.to(tl.int64) * rings + place) * UNIT + token) * 2
        offset = slot % PAGE * UNIT + token
        at = scale_place(scales, block, head, offset, word_stride, PAGE * UNIT, OF_ROWS)
        tl.store(at, tl.load(kept, mask=inside), mask=inside)
        tl.store(at + apart(PAGE * UNIT, OF_ROWS), tl.load(kept + 1, mask=inside), mask=inside)


def chosen_shapes(num_rows: int, num_sets: int, most: int) -> Shapes:
    """Shapes of what the choice writes for so many strides; ``most``: units of a request."""
    each, room = (num_rows, num_sets), triton.next_power_of_2(most)
    shapes = {"chosen": (*each, room), "moves": (*each, room), "scratch": (*each, 3, room)}
    return {name: (shape, torch.int32) for name, shape in shapes.items()}


class Recaller:
    """Brings the units with the most evidence behind the sinks of requests, in one layer.

    Args:
        rows: ``[H, rings, unit, 2 D]``, the layer's stored keys and values as in the pages; in
            pinned host memory or in device memory.
        stored_born, stored_token: int32 ``[S, rings]``.
        exchanged: int64 ``[1]``, counter to which newly recalled units are added.
        capacity: places of a ring.
        most: most units that any request recalls.
        row_scales: fp32 ``[H, rings, unit, 2]``, scales of ``rows`` beside them; None if rows have
            no scales of their own.
    """

    def __init__(
        self,
        layer: CachedLayer,
        rows: torch.Tensor,
        stored_born: torch.Tensor,
        stored_token: torch.Tensor,
        exchanged: torch.Tensor,
        capacity: int,
        most: int,
        row_scales: torch.Tensor | None = None,
    ) -> None:
        kv, rank, unit, pages = layer.kv, layer.rank, layer.unit, layer.pages
        num_heads, rings = rows.shape[:2]
        self._num_sets, self._page = rank.shape[1:]
        assert rows.is_contiguous() and rows.dtype == kv.dtype
        assert rows.shape[2:] == (unit, kv.shape[3]) and num_heads == kv.shape[1], rows.shape
        assert stored_born.shape == stored_token.shape == (self._num_sets, rings)
        assert stored_born.is_contiguous() and stored_token.is_contiguous()
        assert exchanged.dtype == torch.int64, "32 bits overflow on a busy server"
        check_scales(row_scales, rows, pages["OF_ROWS"])
        self._room, self._most, self._num_heads = triton.next_power_of_2(most), most, num_heads
        shared = {
            "word_stride": rank.stride(0),
            "rings": rings,
            "CAPACITY": capacity,
            "MOST": self._room,
            "PAGE": self._page,
            "UNIT": unit,
            "num_warps": 4,
        }
        # At least half of a tile are new units.
        tile = max(min(MOST_TILE, triton.next_power_of_2(capacity + self._room)), 2 * self._room)
        self._choose = Launcher(
            _choose,
            stored_born=stored_born,
            stored_token=stored_token,
            rank=rank,
            born=layer.born,
            **layer.words,
            exchanged=exchanged,
            TILE=tile,
            maxnreg=128,  # otherwise ptxas may spill to fit more blocks per multiprocessor
            **shared,
        )
        size = unit * kv.shape[3]
        self._bring = Launcher(
            _bring,
            rows=rows,
            row_scales=row_scales,
            kv=kv,
            scales=pages["scales"] if pages["OF_ROWS"] else None,
            page_stride=kv.stride(0),
            NUM_SETS=self._num_sets,
            SIZE=size,
            TILE=min(COPIED, triton.next_power_of_2(size)),
            LEAD=triton.next_power_of_2(unit),
            OF_ROWS=pages["OF_ROWS"],
            **shared,
        )

    def shapes(self, num_rows: int) -> Shapes:
        """Of ``chosen``, ``moves`` and ``scratch``."""
        return chosen_shapes(num_rows, self._num_sets, self._most)

    def __call__(self, rows: RecallRows) -> None:
        """Write ``chosen``, numbers of the recalled units in stream order, and the pages.

        Rows whose ``HOW`` is 0 are skipped.
        """
        places = rows.num_pages * self._page
        self._choose(
            (rows.num_rows, self._num_sets, 1),
            rows.variant,
            evidence=rows.evidence,
            table=rows.table,
            steps=rows.steps,
            recall=rows.recall,
            chosen=rows.chosen,
            moves=rows.moves,
            scratch=rows.scratch,
            table_stride=rows.table_place,
            LINE=min(MOST_LINE, triton.next_power_of_2(places)),
        )
        self._bring(
            (rows.num_rows, self._num_heads, self._most),
            rows.variant,
            table=rows.table,
            recall=rows.recall,
            chosen=rows.chosen,
            moves=rows.moves,
            table_stride=rows.table_place,
        )
