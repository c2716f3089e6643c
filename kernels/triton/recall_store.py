# SPDX-License-Identifier: Apache-2.0
"""Put the units that strides evict into their requests' rings.

The number of units is known ahead. Ranks, or masks of the survivors, identify them. Units are
numbered by their rank before the stride, the stride's own units last. Keys and values are copied
unchanged to the host's pinned memory; nothing waits for that copy. The keys, with their rotation
undone, are also stored in 8 bits in device memory, where the judge reads them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .launch import Launcher, variant_of
from .recall_columns import END, RECALL, RING, STORED
from .recall_rows import RecallRows
from .recall_vectors import LEVELS, TINY, most_of, plain_rows
from .stored import (
    apart,
    as_stored,
    check_scales,
    factor_of,
    load_scales,
    scale_place,
    to_nearest,
    widened,
    write_codes,
)
from .strides import Tokens
from .tiles import (
    CACHED,
    LENGTH,
    OLD_SLOTS,
    START,
    STEP,
    STREAM,
    copy_rows,
    first_part,
    load_pair,
    load_rows,
    padded,
    pair_channels,
    rotate_pair,
    slot_tile,
    store_rows,
)

LINE = 1024
"""Places or columns per tile."""
KEYS = 16
"""Rows of a unit per tile."""
AT_ONCE, OF_STRIDES = 4, 16
"""Programs per request and head, each of which stores one unit at a time: after single tokens, and
for strides, of which there are few but each evicts many units."""


@triton.jit
def _remember(
    rank,
    table,
    steps,
    recall,
    ranks,
    word_stride,
    table_stride,
    places_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Save a request's ranks before an insertion that evicts."""
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    if tl.load(recall + row * RECALL + STORED) == 0:
        return
    mine = ranks + (row * tl.num_programs(1) + head_set) * places_stride
    places = tl.load(steps + row * STEP + OLD_SLOTS) // UNIT
    table += row * table_stride
    for first in range(0, places, TILE):
        place, inside, _, word = slot_tile(table, first, places, head_set, word_stride, PAGE, TILE)
        tl.store(mine + place, tl.load(rank + word, mask=inside, other=-1), mask=inside)


@triton.jit(do_not_specialize=["keep_stride", "columns_stride"])
def _list_gone(
    keep,
    ranks,
    rank,
    table,
    steps,
    recall,
    numbers,
    sources,
    word_stride,
    table_stride,
    places_stride,
    keep_stride,
    columns_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """List a stride's evicted units in order: a place in the pages, or ``-2 - n`` for new unit n.

    Before the insertion, ``keep`` marks the evicted units. After it, a unit is evicted if it had a
    rank in ``ranks`` and has none now.
    """
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    if tl.load(recall + row * RECALL + STORED) == 0:
        return
    mine = row * tl.num_programs(1) + head_set
    cached = tl.load(steps + row * STEP + CACHED)
    places = tl.load(steps + row * STEP + OLD_SLOTS) // UNIT
    table += row * table_stride
    numbers += mine * columns_stride
    sources += mine * columns_stride
    if keep is not None:
        old = cached // UNIT
        units = (cached + tl.load(steps + row * STEP + LENGTH)) // UNIT
    else:
        old = tl.cdiv(cached + 1, UNIT)  # the new token has completed the last unit
        units = old
        ranks += mine * places_stride
        for first in range(0, places, TILE):
            place, inside, _, word = slot_tile(
                table, first, places, head_set, word_stride, PAGE, TILE
            )
            was = tl.load(ranks + place, mask=inside, other=-1)
            stays = tl.load(rank + word, mask=inside, other=-1) >= 0
            tl.store(numbers + was, stays.to(tl.int32), mask=inside & (was >= 0))
        tl.debug_barrier()
    gone_before = tl.full([], 0, tl.int32)
    for first in range(0, units, TILE):
        unit = first + tl.arange(0, TILE)
        inside = unit < units
        if keep is not None:
            kept = tl.load(keep + mine * keep_stride + unit, mask=inside, other=0) >= 0
        else:
            kept = tl.load(numbers + unit, mask=inside, other=1) != 0
        gone = inside & (kept == 0)
        nth = gone_before + tl.cumsum(gone.to(tl.int32), 0) - 1
        tl.store(numbers + unit, tl.where(gone, nth, -1), mask=inside)
        tl.store(sources + nth, -2 - (unit - old), mask=gone & (unit >= old))
        gone_before += tl.sum(gone.to(tl.int32), axis=0)
    tl.debug_barrier()
    for first in range(0, places, TILE):
        place, inside, _, word = slot_tile(table, first, places, head_set, word_stride, PAGE, TILE)
        if keep is not None:
            was = tl.load(rank + word, mask=inside, other=-1)
        else:
            was = tl.load(ranks + place, mask=inside, other=-1)
        nth = tl.load(numbers + was, mask=inside & (was >= 0), other=-1)
        tl.store(sources + nth, place, mask=nth >= 0)


@triton.jit
def _store_codes(out, x, channel, step, inside):
    value = to_nearest(tl.div_rn(x, tl.maximum(step, TINY)[:, None]))
    tl.store(out[:, None] + channel[None, :], value.to(tl.int8), mask=inside)


@triton.jit
def _store_plain(
    x,
    y,
    rest,
    most,
    codes,
    scales,
    inside,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store what ``plain_rows`` returns in 8 bits."""
    step = tl.div_rn(most, LEVELS)
    tl.store(scales, step, mask=inside)
    if HALF > 0:
        pair = tl.arange(0, padded(HALF))
        first, second = pair_channels(pair, HALF, INTERLEAVED)
        there = inside[:, None] & (pair < HALF)[None, :]
        _store_codes(codes, x, first, step, there)
        _store_codes(codes, y, second, step, there)
    if 2 * HALF < HEAD:
        channel = 2 * HALF + tl.arange(0, padded(HEAD - 2 * HALF))
        _store_codes(codes, rest, channel, step, inside[:, None] & (channel < HEAD)[None, :])


@triton.jit
def _read(x, scale, CODE: tl.constexpr, NEW: tl.constexpr):
    """Decode codes to fp32, or round new numbers as their codes would be."""
    if NEW:
        x = as_stored(x.to(tl.float32), scale, CODE)
    else:
        x = widened(x, CODE) * factor_of(scale, CODE)
    return x


@triton.jit
def _store_rows(
    keys,
    values,
    place,
    rows,
    row_scales,
    codes,
    scales,
    rotation,
    position,
    inside,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APART: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    NEW: tl.constexpr,
):
    """Copy some rows of a unit, and store their keys before rotation in 8 bits.

    Args:
        place, row_scales: addresses of the rows' first scales, in pages and in the ring; None
            without codes.
        NEW: whether the rows are those of the step, which first become codes.
    """
    if CODE is None:
        copy_rows(keys, values, rows, inside, HEAD, VALUE, ROW)
        x, y, rest, most = plain_rows(keys, rotation, position, inside, HEAD, HALF, INTERLEAVED)
    else:
        FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
        if NEW:
            first, second = write_codes(
                keys=keys,
                values=values,
                slots=rows,
                place=row_scales,
                inside=inside,
                rotation=None,
                distance=None,
                HEAD=HEAD,
                VALUE=VALUE,
                ROW=ROW,
                HALF=0,
                INTERLEAVED=False,
                APART=1,
                CODE=CODE,
                OF_ROWS=OF_ROWS,
            )
        else:
            store_rows(rows, load_rows(keys, inside, 0, FIRST), inside, 0, FIRST)
            store_rows(rows + FIRST, load_rows(values, inside, 0, VALUE), inside, 0, VALUE)
            first, second = load_scales(place, inside, APART)
            if OF_ROWS:
                tl.store(row_scales, first, mask=inside)
                tl.store(row_scales + 1, second, mask=inside)
        x = tl.zeros([keys.shape[0], 16], tl.float32)
        y = x
        rest = x
        if HALF > 0:
            x, y = load_pair(keys, inside, HALF, INTERLEAVED)
            x = _read(x, first[:, None], CODE, NEW)
            y = _read(y, first[:, None], CODE, NEW)
            x, y = rotate_pair(x, y, rotation, position, inside, HALF)
        if FIRST == HEAD:
            if 2 * HALF < HEAD:
                rest = _read(load_rows(keys, inside, 2 * HALF, HEAD), first[:, None], CODE, NEW)
        elif HALF > 0:  # all channels of a latent row before its value
            rest = _read(load_rows(values, inside, 0, VALUE), second[:, None], CODE, NEW)
        else:
            of_key = (tl.arange(0, padded(HEAD)) < FIRST)[None, :]
            scale = tl.where(of_key, first[:, None], second[:, None])
            rest = _read(load_rows(keys, inside, 0, HEAD), scale, CODE, NEW)
        most = tl.maximum(tl.maximum(most_of(x), most_of(y)), most_of(rest))
    _store_plain(x, y, rest, most, codes, scales, inside, HEAD, HALF, INTERLEAVED)


@triton.jit(
    do_not_specialize=["columns_stride"],
    do_not_specialize_on_alignment=["key_scales", "stored_born", "stored_token"],  # varies by layer
)
def _store_units(
    key,
    value,
    sources,
    kv,
    scales,
    born,
    token,
    table,
    steps,
    recall,
    rotation,
    rows,
    row_scales,
    codes,
    key_scales,
    stored_born,
    stored_token,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    rings,
    columns_stride,
    CAPACITY: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Store one head of some of a request's evicted units."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    stored = tl.load(recall + row * RECALL + STORED)
    if stored == 0:
        return
    end = tl.load(recall + row * RECALL + END)
    ring = tl.load(recall + row * RECALL + RING)
    step = steps + row * STEP
    start = tl.load(step + START).to(tl.int64)
    head_set = head % NUM_SETS
    sources += (row * NUM_SETS + head_set) * columns_stride
    # If a stride evicts more than a ring holds, only the last units are stored.
    earliest = tl.maximum(stored - CAPACITY, 0)
    for nth in range(earliest + tl.program_id(2), stored, tl.num_programs(2)):
        source = tl.load(sources + nth)
        place = head.to(tl.int64) * rings + ring + (end + nth) % CAPACITY
        new = -2 - source
        block = tl.full([], 0, tl.int64)
        written = tl.load(step + CACHED) + new * UNIT
        first_token = tl.load(step + STREAM) + new * UNIT
        if source >= 0:
            block = tl.load(table + row * table_stride + source // PAGE).to(tl.int64)
            word = block * word_stride + head_set * PAGE + source % PAGE
            written = tl.load(born + word)
            first_token = tl.load(token + word)
        for first in range(0, UNIT, KEYS):
            index = first + tl.arange(0, KEYS)
            inside = index < UNIT
            out = place * UNIT + index
            row_out = rows + out * ROW
            code_out = codes + out * HEAD
            scaled = None
            kept = None
            if CODE is not None:
                offset = source % PAGE * UNIT + index
                scaled = scale_place(scales, block, head, offset, word_stride, PAGE * UNIT, OF_ROWS)
                kept = scaled
                if OF_ROWS:
                    kept = row_scales + out * 2
            if source >= 0:
                slots = kv + block * page_stride
                slots += ((head * PAGE + source % PAGE) * UNIT + index) * ROW
                _store_rows(
                    keys=slots,
                    values=slots + (ROW - VALUE),
                    place=scaled,
                    rows=row_out,
                    row_scales=kept,
                    codes=code_out,
                    scales=key_scales + out,
                    rotation=rotation,
                    position=written + index,
                    inside=inside,
                    HEAD=HEAD,
                    VALUE=VALUE,
                    ROW=ROW,
                    HALF=HALF,
                    INTERLEAVED=INTERLEAVED,
                    APART=apart(PAGE * UNIT, OF_ROWS),
                    CODE=CODE,
                    OF_ROWS=OF_ROWS,
                    NEW=False,
                )
            elif key is not None:
                at = start + new * UNIT + index
                _store_rows(
                    keys=key + at * key_stride + head * HEAD,
                    values=value + at * value_stride + head * VALUE,
                    place=scaled,
                    rows=row_out,
                    row_scales=kept,
                    codes=code_out,
                    scales=key_scales + out,
                    rotation=rotation,
                    position=written + index,
                    inside=inside,
                    HEAD=HEAD,
                    VALUE=VALUE,
                    ROW=ROW,
                    HALF=HALF,
                    INTERLEAVED=INTERLEAVED,
                    APART=apart(PAGE * UNIT, OF_ROWS),
                    CODE=CODE,
                    OF_ROWS=OF_ROWS,
                    NEW=True,
                )
        if head < NUM_SETS:
            tl.store(stored_born + place, written)
            tl.store(stored_token + place, first_token)


class UnitStore:
    """Stores the units that strides evict, in one layer; rows whose ``STORED`` is 0 store nothing.

    Args:
        layer: its ``rotation`` is a ``rotation_table``, by position.
        rows, codes, scales, stored_born, stored_token: the layer's store (``recall.Judge``,
            ``recall_choose.Recaller``), written.
        capacity: places of a ring.
        row_scales: fp32 ``[1, rings, unit, 2]``, scales of ``rows``, written; None if rows have no
            scales of their own.
    """

    def __init__(
        self,
        layer: CachedLayer,
        rows: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        stored_born: torch.Tensor,
        stored_token: torch.Tensor,
        capacity: int,
        row_scales: torch.Tensor | None = None,
    ) -> None:
        kv, rank, unit = layer.kv, layer.rank, layer.unit
        self._num_sets, self._page = rank.shape[1:]
        self._num_heads = kv.shape[1]
        assert rows.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()
        assert rows.dtype == kv.dtype and codes.dtype == torch.int8
        assert scales.dtype == torch.float32
        assert rows.shape[3] == kv.shape[3] and codes.shape[3] == layer.head_size, rows.shape
        check_scales(row_scales, rows, layer.pages["OF_ROWS"])
        self._remember = Launcher(
            _remember,
            rank=rank,
            word_stride=rank.stride(0),
            PAGE=self._page,
            UNIT=unit,
            num_warps=4,
        )
        self._list_gone = Launcher(
            _list_gone,
            rank=rank,
            word_stride=rank.stride(0),
            PAGE=self._page,
            UNIT=unit,
            num_warps=4,
            maxnreg=128,  # otherwise ptxas may spill to fit more blocks per multiprocessor
        )
        pages = layer.pages
        del pages["rank"]
        self._store = Launcher(
            _store_units,
            **pages,
            **layer.rows,
            **layer.turning,
            token=layer.token,
            rows=rows,
            row_scales=row_scales,
            codes=codes,
            key_scales=scales,
            stored_born=stored_born,
            stored_token=stored_token,
            rings=rows.shape[1],
            CAPACITY=capacity,
            PAGE=self._page,
            KEYS=min(KEYS, triton.next_power_of_2(unit)),
            num_warps=4,
            maxnreg=255,  # as above
        )

    def room(
        self, num_rows: int, num_pages: int, columns: int | None, device: torch.device
    ) -> dict[str, Any]:
        """Memory for ``RecallRows``; ``columns``: of a stride's ``keep``, None: single tokens."""
        names = ("numbers", "sources") if columns is not None else ("numbers", "sources", "ranks")
        places = num_pages * self._page if columns is None else columns
        shape = num_rows, self._num_sets, places
        return {name: torch.empty(shape, dtype=torch.int32, device=device) for name in names}

    def before(self, rows: RecallRows) -> None:
        """Write ``ranks`` of single tokens that are about to be inserted, and evict a unit."""
        places = rows.num_pages * self._page
        self._remember(
            (rows.num_rows, self._num_sets, 1),
            rows.variant,
            table=rows.table,
            steps=rows.steps,
            recall=rows.recall,
            ranks=rows.ranks,
            table_stride=rows.table_place,
            places_stride=places,
            TILE=min(LINE, triton.next_power_of_2(places)),
        )

    def __call__(
        self, rows: RecallRows, tokens: Tokens | None = None, keep: torch.Tensor | None = None
    ) -> None:
        """Store units: before a stride of several tokens is inserted, with its ``tokens`` and
        ``keep``; or after single tokens are inserted: evicted rows are still in their free slots.

        Args:
            keep: int32 ``[R, S, C]`` of ``StrideChoice``: -1 for evicted units.
        """
        assert (keep is None) == (tokens is None)
        places, keep_stride = rows.num_pages * self._page, 0
        if keep is not None:
            keep_stride = keep.stride(1)
            assert keep.stride() == (self._num_sets * keep_stride, keep_stride, 1), keep.stride()
            assert keep.shape[2] == rows.columns, keep.shape
        self._list_gone(
            (rows.num_rows, self._num_sets, 1),
            (rows.variant, variant_of(keep)),
            keep=keep,
            ranks=rows.ranks if keep is None else None,
            table=rows.table,
            steps=rows.steps,
            recall=rows.recall,
            numbers=rows.numbers,
            sources=rows.sources,
            table_stride=rows.table_place,
            places_stride=places,
            keep_stride=keep_stride,
            columns_stride=rows.columns,
            TILE=min(LINE, triton.next_power_of_2(places)),
        )
        key_stride, value_stride = (0, 0) if tokens is None else tokens.places[1:3]
        self._store(
            (rows.num_rows, self._num_heads, AT_ONCE if tokens is None else OF_STRIDES),
            (rows.variant, -1 if tokens is None else tokens.variant),
            key=None if tokens is None else tokens.key,
            value=None if tokens is None else tokens.value,
            sources=rows.sources,
            table=rows.table,
            steps=rows.steps,
            recall=rows.recall,
            key_stride=key_stride,
            value_stride=value_stride,
            table_stride=rows.table_place,
            columns_stride=rows.columns,
        )
