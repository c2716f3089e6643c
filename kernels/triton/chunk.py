# SPDX-License-Identifier: Apache-2.0
"""All strides of a prompt's chunk in one launch, for policies without scores.

If a policy keeps the stream's first and newest tokens, it is known ahead of time what every stride
of the chunk sees in the pages and among the chunk's own earlier tokens. So strides need not wait
for each other. The last program of a head to finish writes the chunk's survivors into the pages,
and the last one of a head set rewrites the set's words, which no other program reads any more.
Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2.

In layers with a window, positions differ from ranks (``shift_of``), and a stride may be longer than
the window: keys outside a query's window are masked.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .chunk_write import write_rows, write_words
from .configs import prefill_config
from .launch import Launcher, variant_of
from .prefill import MOST_REGISTERS, stride_constants, stride_logits, stride_queries
from .softmax import empty_softmax, online_softmax, with_sink
from .stored import (
    apart,
    load_scales,
    load_stored,
    load_turned,
    scale_of,
    scale_of_word,
    wide,
)
from .strides import Tokens
from .tiles import (
    CACHED,
    CHUNK,
    OLD_SLOTS,
    SINKS,
    STEP,
    STREAM,
    STRIDES,
    check_steps,
    first_part,
    load_rows,
    page_tile,
    shift_of,
    store_rows,
    stride_of,
)

RENUMBERED, COPIED, ENCODED = 1024, 64, 16
"""Units per renumbered tile, slots per copied tile, and per tile that is encoded in registers."""


@triton.jit
def _values(
    rows,
    inside,
    scales,
    own,
    dtype,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Values of the chunk's tokens; those that are not ``own`` are what pages will say of them."""
    values = load_rows(rows, inside, FROM, TO)
    if CODE is not None:
        values = values.to(tl.float32)
        scale = scale_of(values, scales + 1, CODE, OF_ROWS)
        values = wide(values, scale, CODE, own).to(dtype)
    return values


@triton.jit
def _attend_chunks(
    query,
    key,
    value,
    kv,
    rank,
    born,
    score,
    token,
    scales,
    table,
    steps,
    chunks,
    positions,
    finished,
    rotation,
    new_rotation,
    slopes,
    sinks,
    logit_scale,
    output,
    scale,
    cap,
    window,
    query_stride,
    key_stride,
    value_stride,
    output_stride,
    page_stride,
    word_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    RENUMBER: tl.constexpr,
    COPY: tl.constexpr,
):
    row = tl.program_id(2)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    mine = tl.load(steps + row * STEP + CHUNK).to(tl.int64)
    chunk = chunks + mine * STEP
    if tl.load(chunk + STREAM) < 0:
        return
    pads, cached, length, start = stride_of(steps, row)
    table += mine * table_stride
    first_query = tl.program_id(0) * QUERIES
    if (first_query < length) & (pads == 0):
        stream = tl.load(steps + row * STEP + STREAM)
        begun = tl.load(chunk + STREAM)
        kept = tl.load(chunk + SINKS)  # leading tokens that are never evicted
        gone = stream - cached
        dropped = gone - (begun - tl.load(chunk + CACHED))  # evicted since the chunk began
        index = first_query + tl.arange(0, QUERIES)
        real = index < length
        token_at = start + index
        position = cached + index
        FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
        queries, factor = stride_queries(
            query, query_head, token_at, real, query_stride, scale, logit_scale, HEAD, FIRST
        )
        rest = None
        if FIRST < HEAD:  # latent rows
            rest = load_rows(query + token_at * query_stride + query_head * HEAD, real, FIRST, HEAD)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + query_head)
        if window is not None:
            shift = shift_of(positions, start, cached)
            hidden = cached + first_query - window  # no query sees this rank or lower ones
        top, total, acc = empty_softmax(QUERIES, VALUE)

        slots = tl.load(chunk + OLD_SLOTS)
        for first in range(0, slots, TILE):
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
            seen = (unit >= 0) & (is_kept | (at >= kept + dropped))
            moved = tl.where(is_kept, 0, dropped)
            if window is not None:
                seen = seen & (at - moved > hidden)
            if tl.max(seen.to(tl.int32), axis=0) > 0:
                away = distance + moved
                if window is not None:
                    away -= shift
                away = tl.where(seen, away, 0)
                if CODE is None:
                    value_scale = None
                    keys = load_turned(rows, seen, rotation, away, FIRST, HALF, INTERLEAVED)
                else:
                    scaled = scale_of_word(scales, word, slot, head, NUM_SETS, PAGE, UNIT, OF_ROWS)
                    key_scale, value_scale = load_scales(scaled, seen, apart(PAGE, OF_ROWS))
                    keys = load_turned(
                        rows, seen, rotation, away, FIRST, HALF, INTERLEAVED, key_scale,
                        queries.dtype, CODE,
                    )  # fmt: skip
                rank_now = at - moved
                if FIRST == HEAD:
                    logits = stride_logits(
                        queries, keys, position, rank_now, seen, factor, cap, slope, window
                    )
                    values = load_stored(
                        rows + (ROW - VALUE), seen, value_scale, queries.dtype, 0, VALUE, CODE
                    )
                else:  # read once
                    values = load_stored(
                        rows + FIRST, seen, value_scale, queries.dtype, 0, VALUE, CODE
                    )
                    logits = stride_logits(
                        queries, keys, position, rank_now, seen, factor, cap, slope, window, rest,
                        values,
                    )  # fmt: skip
                top, total, acc = online_softmax(top, total, acc, logits, values)

        # The chunk's own tokens: sinks, and tokens that are not evicted yet.
        chunk_start = start - (stream - begun)
        upper = stream - begun + tl.minimum(first_query + QUERIES, length)
        own_kept = tl.minimum(tl.maximum(kept - begun, 0), upper)
        others = tl.maximum(own_kept, kept + gone - begun)
        if window is not None:
            others = tl.maximum(others, hidden + 1 + gone - begun)
        kept_tiles = tl.cdiv(own_kept, TILE)
        for tile in range(kept_tiles + tl.cdiv(tl.maximum(upper - others, 0), TILE)):
            in_kept = tile < kept_tiles
            begin = tl.where(in_kept, tile * TILE, others + (tile - kept_tiles) * TILE)
            place = begin + tl.arange(0, TILE)
            seen = place < tl.where(in_kept, own_kept, upper)
            rank_now = begun + place - tl.where(in_kept, 0, gone)
            at = chunk_start + place
            written_at = tl.load(positions + at, mask=seen, other=0).to(tl.int32)
            away = written_at - rank_now
            if window is not None:
                away -= shift
            away = tl.where(seen, away, 0)
            key_rows = key + at * key_stride + head * HEAD
            own = None
            if CODE is None:
                keys = load_turned(key_rows, seen, rotation, away, FIRST, HALF, INTERLEAVED)
            else:  # tokens of earlier strides are what pages will say of them
                own = place >= stream - begun
                wide_keys = load_rows(key_rows, seen, 0, FIRST).to(tl.float32)
                key_scale = scale_of(wide_keys, scales, CODE, OF_ROWS)
                keys = load_turned(
                    key_rows, seen, rotation, away, FIRST, HALF, INTERLEAVED, key_scale,
                    queries.dtype, CODE, own,
                )  # fmt: skip
            if FIRST == HEAD:
                logits = stride_logits(
                    queries, keys, position, rank_now, seen, factor, cap, slope, window
                )
                value_rows = value + at * value_stride + head * VALUE
                values = _values(
                    value_rows, seen, scales, own, queries.dtype, 0, VALUE, CODE, OF_ROWS
                )
            else:
                values = _values(
                    key_rows, seen, scales, own, queries.dtype, FIRST, HEAD, CODE, OF_ROWS
                )
                logits = stride_logits(
                    queries, keys, position, rank_now, seen, factor, cap, slope, window, rest,
                    values,
                )  # fmt: skip
            top, total, acc = online_softmax(top, total, acc, logits, values)

        top, total, acc = with_sink(top, total, acc, sinks, query_head)
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        store_rows(output + token_at * output_stride + query_head * VALUE, acc, real, 0, VALUE)

    # The last program to finish writes, since nothing is read any more.
    tl.debug_barrier()
    finished += mine * (2 * NUM_HEADS)
    programs = tl.load(chunk + STRIDES) * tl.num_programs(0) * GROUP
    if tl.atomic_add(finished + head, 1) == programs - 1:
        tl.store(finished + head, 0)
        write_rows(
            key=key,
            value=value,
            kv=kv,
            rank=rank,
            scales=scales,
            table=table,
            chunk=chunk,
            positions=positions,
            rotation=new_rotation,
            head=head,
            key_stride=key_stride,
            value_stride=value_stride,
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
            TILE=COPY,
            CODE=CODE,
            OF_ROWS=OF_ROWS,
        )
        tl.debug_barrier()
        head_set = head % NUM_SETS
        if tl.atomic_add(finished + NUM_HEADS + head_set, 1) == NUM_HEADS // NUM_SETS - 1:
            tl.store(finished + NUM_HEADS + head_set, 0)
            write_words(
                rank=rank,
                born=born,
                score=score,
                token=token,
                table=table,
                chunk=chunk,
                positions=positions,
                head_set=head_set,
                word_stride=word_stride,
                PAGE=PAGE // UNIT,
                UNIT=UNIT,
                TILE=RENUMBER,
            )


@dataclass(eq=False)
class Chunks:
    """``K`` strides of ``M`` requests' chunks, the same for all layers of a kind.

    Attributes:
        steps: int32 ``[K, STEP_COLUMNS]`` step rows of strides with their ``CHUNK``; strides begin
            at units.
        chunks: int32 ``[M, STEP_COLUMNS]`` (``stride_columns``).
        table: int32 ``[>= M, P]`` block numbers.
        positions: int64 ``[>= num_tokens]``, positions with which the step's keys were rotated.
        finished: int32 ``[>= M, 2 * H]`` counters; zero before and after a launch.
        max_length: the longest stride.
        variant: ``launch.variant_of`` all that the kernel is compiled for.
    """

    steps: torch.Tensor
    chunks: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    finished: torch.Tensor
    max_length: int

    def __post_init__(self) -> None:
        check_steps(self.steps, self.steps)
        check_steps(self.chunks, self.table)
        assert self.finished.dtype == torch.int32 and self.finished.is_contiguous()
        assert len(self.finished) >= len(self.chunks), self.finished.shape
        self.num_rows, self.num_counters = len(self.steps), self.finished.shape[1]
        self.table_place = self.table.stride(0)
        tensors = self.steps, self.chunks, self.table, self.positions, self.finished
        self.variant = variant_of(*tensors, self.table_place)


class ChunkAttention:
    """Attention of chunks in one layer, and the survivors into the pages.

    Args:
        new_rotation: the fp32 table of ``rotate`` for writing.
        sinks: fp32 ``[H * G]``, learned sink logits, or None.
        window: tokens that a query sees, its own included, in layers whose ``positions`` come from
            other layers; None: positions are ranks, and a query sees the whole cache.
    """

    def __init__(
        self,
        layer: CachedLayer,
        new_rotation: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
    ) -> None:
        _, num_heads, head_size, new = self._heads = layer.heads
        self._num_counters, coded = 2 * num_heads, layer.stored is not None
        config = prefill_config(layer.kv.device, new, head_size)
        if coded:  # encoding needs the registers of other queries
            config = replace(config, queries=16)
        self._queries = config.queries
        self._launch = Launcher(
            _attend_chunks,
            **stride_constants(config, layer),
            **layer.words,
            new_rotation=new_rotation if layer.unit > 1 else None,
            sinks=sinks,
            window=window,
            RENUMBER=RENUMBERED,
            COPY=ENCODED if coded else COPIED,
            maxnreg=MOST_REGISTERS,
        )

    def __call__(self, tokens: Tokens, chunks: Chunks) -> None:
        """Write the strides' rows of ``output``, and the pages."""
        assert tokens.heads == self._heads, (tokens.heads, self._heads)
        assert chunks.num_counters == self._num_counters, chunks.num_counters
        if chunks.num_rows == 0 or chunks.max_length == 0:
            return
        query_stride, key_stride, value_stride, output_stride = tokens.places
        self._launch(
            (-(-chunks.max_length // self._queries), self._heads[0], chunks.num_rows),
            (tokens.variant, chunks.variant),
            query=tokens.query,
            key=tokens.key,
            value=tokens.value,
            table=chunks.table,
            steps=chunks.steps,
            chunks=chunks.chunks,
            positions=chunks.positions,
            finished=chunks.finished,
            logit_scale=tokens.logit_scale,
            output=tokens.output,
            query_stride=query_stride,
            key_stride=key_stride,
            value_stride=value_stride,
            output_stride=output_stride,
            table_stride=chunks.table_place,
        )


def attend_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    chunks: torch.Tensor,
    positions: torch.Tensor,
    finished: torch.Tensor,
    logit_scale: torch.Tensor | None,
    max_length: int,
    output: torch.Tensor,
    new_rotation: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    **layer: Any,
) -> None:
    """One call of ``ChunkAttention`` for a ``CachedLayer`` that is described by the rest.

    Args:
        query: ``[num_tokens, H * G, D]`` of the whole step, rotated at cache positions.
        key, value: ``[num_tokens, H, D]``, keys rotated likewise.
        logit_scale: fp32 ``[num_tokens]``, factors on the logits, or None.
        output: like ``query``; the strides' rows are written.
    """
    told = CachedLayer(**layer, num_queries=query.shape[1], dtype=query.dtype)
    launch = ChunkAttention(told, new_rotation, sinks, window)
    tokens = Tokens(query, key, value, output, logit_scale)
    launch(tokens, Chunks(steps, chunks, table, positions, finished, max_length))
