# SPDX-License-Identifier: Apache-2.0
"""All strides of a prompt's chunk at once, for policies without scores.

If a policy keeps the stream's first and newest tokens, it is known ahead of time what every stride
of the chunk sees in the pages and among the chunk's own earlier tokens. So strides need not wait
for each other: ``gather`` copies what each one sees, one launch attends, and the chunk's survivors
are then written into the pages (``chunk_write``).
Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2.

In layers with a window, positions differ from ranks (``shift_of``). Keys that no query of a stride
sees are not copied, and a stride may be longer than the window. The same holds for layers whose
queries see their own chunk of the stream, which begins at a multiple of its size, also in ranks.
"""

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .chunk_write import ChunkWrite
from .gather import WARPS, gather_rows, gathered_tile
from .launch import Launcher
from .prefill import StrideAttention
from .stored import apart, load_turned, scale_of, scale_of_word, wide
from .strides import Chunks, Strides, Tokens
from .tiles import (
    CACHED,
    CHUNK,
    MOST_REGISTERS,
    OLD_SLOTS,
    SINKS,
    STEP,
    STREAM,
    first_part,
    load_rows,
    page_tile,
    shift_of,
    store_rows,
    stride_of,
)


@triton.jit
def _from_pages(
    gathered,
    kv,
    rank,
    born,
    scales,
    table,
    rotation,
    first,
    slots,
    head,
    cached,
    kept,
    dropped,
    hidden,
    shift,
    page_stride,
    word_stride,
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
    """Gather a tile of slots: sinks, and tokens that the chunk's earlier strides did not evict.

    The first ``kept`` tokens are never evicted; behind them, ``dropped`` tokens are gone.
    """
    slot, unit, word, rows, distance = page_tile(
        kv=kv,
        rank=rank,
        born=born,
        table=table,
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
    at = unit * UNIT + slot % UNIT
    is_kept = at < kept
    moved = tl.where(is_kept, 0, dropped)
    seen = (unit >= 0) & (is_kept | (at >= kept + dropped)) & (at - moved > hidden)
    seen = seen & (at - moved < cached)  # a warm-up's null block may say anything
    if tl.max(seen.to(tl.int32), axis=0) > 0:
        scaled = None
        if CODE is not None:
            scaled = scale_of_word(scales, word, slot, head, NUM_SETS, PAGE, UNIT, OF_ROWS)
        gather_rows(
            place=gathered + (at - moved) * ROW,
            rows=rows,
            scaled=scaled,
            stored=unit >= 0,
            held=seen,
            rotation=rotation,
            distance=tl.where(seen, distance + moved - shift, 0),
            HEAD=HEAD,
            VALUE=VALUE,
            ROW=ROW,
            HALF=HALF,
            INTERLEAVED=INTERLEAVED,
            APART=apart(PAGE, OF_ROWS),
            CODE=CODE,
        )


@triton.jit
def _from_chunk(
    gathered,
    key,
    value,
    scales,
    positions,
    rotation,
    index,
    seen,
    first_token,
    rank_now,
    head,
    shift,
    key_stride,
    value_stride,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Gather the chunk's tokens by ``index``; in 8-bit caches, rounded as pages will be."""
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    token_at = first_token + index
    written_at = tl.load(positions + token_at, mask=seen, other=0).to(tl.int32)
    away = tl.where(seen, written_at - rank_now - shift, 0)
    rows = key + token_at * key_stride + head * HEAD
    if FIRST == HEAD:
        values = load_rows(value + token_at * value_stride + head * VALUE, seen, 0, VALUE)
    else:
        values = load_rows(rows, seen, FIRST, HEAD)
    if CODE is None:
        keys = load_turned(rows, seen, rotation, away, FIRST, HALF, INTERLEAVED)
    else:
        new = index < 0  # none
        key_scale = scale_of(load_rows(rows, seen, 0, FIRST).to(tl.float32), scales, CODE, OF_ROWS)
        keys = load_turned(
            rows, seen, rotation, away, FIRST, HALF, INTERLEAVED, key_scale, tl.float32, CODE, new
        )
        value_scale = scale_of(values.to(tl.float32), scales + 1, CODE, OF_ROWS)
        values = wide(values, value_scale, CODE, new)
    store_rows(gathered + rank_now * ROW, keys, seen, 0, FIRST)
    store_rows(gathered + rank_now * ROW + (ROW - VALUE), values, seen, 0, VALUE)


@triton.jit(do_not_specialize=["width", "old_tiles"])
def _gather_chunks(
    key,
    value,
    kv,
    rank,
    born,
    scales,
    table,
    steps,
    chunks,
    positions,
    rotation,
    gathered,
    window,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    width,
    old_tiles,
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
    tile = tl.program_id(0)
    mine = tl.load(steps + row * STEP + CHUNK).to(tl.int64)
    chunk = chunks + mine * STEP
    begun = tl.load(chunk + STREAM)
    pads, cached, _, start = stride_of(steps, row)
    if pads | (begun < 0):
        return
    stream = tl.load(steps + row * STEP + STREAM)
    kept = tl.load(chunk + SINKS)  # leading tokens that are never evicted
    gone = stream - cached
    shift, hidden = 0, -1
    if window is not None:
        shift = shift_of(positions, start, cached)
        hidden = cached - window  # no query of the stride sees this rank or lower ones
    gathered += (row * NUM_HEADS + head).to(tl.int64) * width * ROW
    if tile < old_tiles:
        _from_pages(
            gathered=gathered,
            kv=kv,
            rank=rank,
            born=born,
            scales=scales,
            table=table + mine * table_stride,
            rotation=rotation,
            first=tile * TILE,
            slots=tl.load(chunk + OLD_SLOTS),
            head=head,
            cached=cached,
            kept=kept,
            dropped=gone - (begun - tl.load(chunk + CACHED)),  # evicted since the chunk began
            hidden=hidden,
            shift=shift,
            page_stride=page_stride,
            word_stride=word_stride,
            NUM_SETS=NUM_SETS,
            HEAD=HEAD,
            VALUE=VALUE,
            ROW=ROW,
            HALF=HALF,
            INTERLEAVED=INTERLEAVED,
            PAGE=PAGE,
            UNIT=UNIT,
            TILE=TILE,
            CODE=CODE,
            OF_ROWS=OF_ROWS,
        )
    else:
        # Tokens of the chunk's earlier strides: sinks, and those that are not evicted yet.
        earlier = stream - begun
        own_kept = tl.minimum(tl.maximum(kept - begun, 0), earlier)
        others = tl.maximum(own_kept, kept + gone - begun)
        if window is not None:
            others = tl.maximum(others, hidden + 1 + gone - begun)
        kept_tiles = tl.cdiv(own_kept, TILE)
        in_kept = tile - old_tiles < kept_tiles
        begin = tl.where(in_kept, 0, others - kept_tiles * TILE) + (tile - old_tiles) * TILE
        index = begin + tl.arange(0, TILE)
        rank_now = begun + index - tl.where(in_kept, 0, gone)
        seen = (index < tl.where(in_kept, own_kept, earlier)) & (rank_now > hidden)
        if tl.max(seen.to(tl.int32), axis=0) > 0:
            _from_chunk(
                gathered=gathered,
                key=key,
                value=value,
                scales=scales,
                positions=positions,
                rotation=rotation,
                index=index,
                seen=seen,
                first_token=start - earlier,
                rank_now=rank_now,
                head=head,
                shift=shift,
                key_stride=key_stride,
                value_stride=value_stride,
                HEAD=HEAD,
                VALUE=VALUE,
                ROW=ROW,
                HALF=HALF,
                INTERLEAVED=INTERLEAVED,
                CODE=CODE,
                OF_ROWS=OF_ROWS,
            )


class ChunkGather:
    """Dense copies of what a chunk's strides see in one layer."""

    def __init__(self, layer: CachedLayer, window: int | None = None) -> None:
        self._num_heads, self._tile = layer.kv.shape[1], gathered_tile(layer)
        self._launch = Launcher(
            _gather_chunks,
            **layer.pages,
            **layer.turning,
            **layer.rows,
            window=window,
            NUM_HEADS=self._num_heads,
            PAGE=layer.page,
            TILE=self._tile,
            num_warps=WARPS if layer.stored is None else 2 * WARPS,  # decoding takes registers
            maxnreg=MOST_REGISTERS,
        )

    def __call__(self, tokens: Tokens, chunks: Chunks, strides: Strides) -> None:
        """Write the cached rows of ``gathered``."""
        if chunks.max_cached == 0:
            return
        _, key_stride, value_stride, _ = tokens.places
        old_tiles = -(-chunks.max_slots // self._tile)
        new_tiles = -(-chunks.max_cached // self._tile) + 1  # a part of the last sinks' tile
        self._launch(
            (old_tiles + new_tiles, self._num_heads, strides.num_rows),
            (tokens.variant, chunks.variant, strides.variant),
            key=tokens.key,
            value=tokens.value,
            table=chunks.table,
            steps=strides.steps,
            chunks=chunks.chunks,
            positions=chunks.positions,
            gathered=strides.gathered,
            key_stride=key_stride,
            value_stride=value_stride,
            table_stride=chunks.table_place,
            width=strides.gathered_width,
            old_tiles=old_tiles,
        )


class ChunkAttention:
    """Attention of chunks in one layer, and the survivors into the pages.

    Args:
        new_rotation: the fp32 table of ``rotate`` for writing.
        sinks: fp32 ``[H * G]``, learned sink logits, or None.
        window: tokens that a query sees, its own included, in layers whose ``positions`` come from
            other layers; None: positions are ranks, and a query sees the whole cache.
        chunked: whether a query sees its own chunk of ``window`` ranks instead.
    """

    def __init__(
        self,
        layer: CachedLayer,
        new_rotation: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
        chunked: bool = False,
    ) -> None:
        self._heads = layer.heads
        self._gather = ChunkGather(layer, window)
        self._attend = StrideAttention(layer, sinks, window=window, chunked=chunked)
        self._write = ChunkWrite(layer, new_rotation)

    def __call__(self, tokens: Tokens, chunks: Chunks, parts: tuple[Strides, ...]) -> None:
        """Write the strides' rows of ``output``, and the pages.

        Args:
            parts: ``chunks.parts``.
        """
        self.attend(tokens, chunks, parts)
        self._write(tokens, chunks)

    def attend(self, tokens: Tokens, chunks: Chunks, parts: tuple[Strides, ...]) -> None:
        """Write the strides' rows of ``output`` alone."""
        assert tokens.heads == self._heads, (tokens.heads, self._heads)
        for strides in parts:
            if strides.num_rows and chunks.max_length:
                self._gather(tokens, chunks, strides)
                self._attend(tokens, strides)
