# SPDX-License-Identifier: Apache-2.0
"""Copies what a stride's request has cached into dense memory, in time order.

``StrideAttention`` and ``ColumnSums`` read every cached key once for each query head and each tile
of queries. In pages a key's address depends on a block number, and its rotation on two numbers of
its unit, so these loads would wait for each other every time. ``StrideGather`` reads each row once:
it decodes rows of 8 bits, rotates keys from where they were written to their ranks, and stores rows
by rank. It also writes the pages' metadata of every cached unit by rank, because later kernels
write the pages and must not read them.
"""

import triton
import triton.language as tl

from .cached import CachedLayer
from .launch import Launcher
from .stored import apart, load_scales, load_turned, scale_of_word, wide
from .strides import LINE_WORDS, Strides
from .tiles import (
    CACHED,
    MOST_REGISTERS,
    OLD_SLOTS,
    STEP,
    STREAM,
    first_part,
    load_rows,
    page_tile,
    store_rows,
)

LINE, LINE_SLOT, LINE_SCORE, LINE_TOKEN = (tl.constexpr(n) for n in (LINE_WORDS, 0, 1, 2))
"""Rows of a line, by rank: a cached unit's slot, the bits of its score, its first token."""
CHANNELS, WARPS = 4096, 4
"""Channels of keys per program, and its warps."""


@triton.jit
def gather_rows(
    place,
    rows,
    scaled,
    stored,
    held,
    rotation,
    distance,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APART: tl.constexpr,
    CODE: tl.constexpr,
):
    """Copy rows of pages to their ``place``, decoded, keys rotated back by ``distance``.

    ``scaled``: addresses of rows' first scales, None if rows are not codes. ``stored``: mask for
    loading scales, true for all slots in use. Triton 3.6 fails to compile a chunk with ``held``.
    """
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    dtype: tl.constexpr = place.dtype.element_ty
    if CODE is None:
        keys = load_turned(rows, held, rotation, distance, FIRST, HALF, INTERLEAVED)
    else:
        key_scale, value_scale = load_scales(scaled, stored, APART)
        keys = load_turned(
            rows, held, rotation, distance, FIRST, HALF, INTERLEAVED, key_scale, dtype, CODE
        )
    values = load_rows(rows + (ROW - VALUE), held, 0, VALUE)
    if CODE is not None:
        values = wide(values, value_scale, CODE).to(dtype)
    store_rows(place, keys, held, 0, FIRST)
    store_rows(place + (ROW - VALUE), values, held, 0, VALUE)


@triton.jit(do_not_specialize=["line_stride", "width"])
def _gather_strides(
    kv,
    rank,
    born,
    score,
    token,
    scales,
    table,
    steps,
    rotation,
    gathered,
    line,
    page_stride,
    word_stride,
    table_stride,
    line_stride,
    width,
    NUM_HEADS: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    row = tl.program_id(2)
    head = tl.program_id(1)
    first = tl.program_id(0) * TILE
    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    if (tl.load(steps + row * STEP + STREAM) < 0) | (first >= slots):
        return
    slot, unit, word, rows, distance = page_tile(
        kv=kv,
        rank=rank,
        born=born,
        table=table + row.to(tl.int64) * table_stride,
        first=first,
        slots=slots,
        head=head,
        page_stride=page_stride,
        word_stride=word_stride,
        NUM_SETS=NUM_SETS,
        ROW=ROW,
        PAGE=PAGE,
        TILE=TILE,
        UNIT=UNIT,
    )
    # Requests of a warm-up share the null block, which may say anything.
    held = (unit >= 0) & (unit * UNIT < tl.load(steps + row * STEP + CACHED))
    place = (row * NUM_HEADS + head).to(tl.int64) * width + unit * UNIT + slot % UNIT
    scaled = None
    if CODE is not None:
        scaled = scale_of_word(scales, word, slot, head, NUM_SETS, PAGE, UNIT, OF_ROWS)
    gather_rows(
        place=gathered + place * ROW,
        rows=rows,
        scaled=scaled,
        stored=held,
        held=held,
        rotation=rotation,
        distance=distance,
        HEAD=HEAD,
        VALUE=VALUE,
        ROW=ROW,
        HALF=HALF,
        INTERLEAVED=INTERLEAVED,
        APART=apart(PAGE, OF_ROWS),
        CODE=CODE,
    )
    # One program of each set leaves what its pages say.
    told = held & (slot % UNIT == 0) & (head < NUM_SETS)
    line += (row * NUM_SETS + head % NUM_SETS).to(tl.int64) * LINE * line_stride
    tl.store(line + LINE_SLOT * line_stride + unit, slot // UNIT, mask=told)
    bits = tl.load(score + word, mask=told, other=0.0).to(tl.int32, bitcast=True)
    tl.store(line + LINE_SCORE * line_stride + unit, bits, mask=told)
    if token is not None:
        first_token = tl.load(token + word, mask=told, other=0)
        tl.store(line + LINE_TOKEN * line_stride + unit, first_token, mask=told)


def gathered_tile(layer: CachedLayer) -> int:
    """Rows per program."""
    return max(CHANNELS // triton.next_power_of_2(max(layer.head_size, 64)), 8)


class StrideGather:
    """Dense copies of what the requests of strides have cached in one layer."""

    def __init__(self, layer: CachedLayer) -> None:
        self._num_heads, self._num_sets = layer.kv.shape[1], layer.num_sets
        self._tile = gathered_tile(layer)
        self._gathers = self._num_heads, layer.kv.shape[3], layer.heads[3]
        self._launch = Launcher(
            _gather_strides,
            **layer.pages,
            **layer.words,
            **layer.turning,
            **layer.rows,
            NUM_HEADS=self._num_heads,
            PAGE=layer.page,
            TILE=self._tile,
            num_warps=WARPS,
            maxnreg=MOST_REGISTERS,
        )

    def __call__(self, strides: Strides) -> None:
        """Write the cached rows of ``gathered`` and the cached units of ``line``."""
        assert strides.gathers == self._gathers, (strides.gathers, self._gathers)
        assert strides.num_sets == self._num_sets, (strides.num_sets, self._num_sets)
        assert strides.max_slots <= strides.gathered_width, strides.max_slots
        self._launch(
            (-(-strides.max_slots // self._tile), self._num_heads, strides.num_rows),
            strides.variant,
            table=strides.table,
            steps=strides.steps,
            gathered=strides.gathered,
            line=strides.line,
            table_stride=strides.table_place,
            line_stride=strides.line_width,
            width=strides.gathered_width,
        )
