# SPDX-License-Identifier: Apache-2.0
"""All strides of a chunk of a prompt in one launch, where no score decides who survives.

A policy that keeps the stream's first tokens and its newest says ahead of time what every stride
of the chunk sees: of the pages what is not too old yet, and of the chunk's own earlier tokens the
rest. So strides need not wait for each other. What is left of the chunk is put into the pages by
the program that is the last of its head to finish, and whoever is the last of a head set rewrites
the set's words: by then nobody reads what they overwrite. Source: StreamingLLM
(https://arxiv.org/abs/2309.17453), section 3.2.
"""

import torch
import triton
import triton.language as tl

from .configs import prefill_config
from .prefill import MOST_REGISTERS, check_new, stride_constants, stride_logits, stride_queries
from .tiles import (
    CACHED,
    CHUNK,
    LEFT,
    LENGTH,
    NEW_SLOTS,
    OLD_SLOTS,
    SINKS,
    START,
    STEP,
    STREAM,
    STRIDES,
    check_pages,
    check_steps,
    copy_rows,
    empty_softmax,
    load_rows,
    load_turned,
    online_softmax,
    page_tile,
    slot_tile,
    store_rows,
    stride_of,
    turn_rows,
)

RENUMBERED, COPIED = 1024, 64
"""Units of slots that are renumbered at a time, and slots that are written."""


@triton.jit
def _survivors(chunk, UNIT: tl.constexpr):
    """Which units are left, counted in units from the stream's start.

    Those of sinks, how many have been deleted before and after the chunk, the chunk's first unit,
    how many of the chunk's are sinks, where its other survivors begin, and how many there are.
    """
    stream = tl.load(chunk + STREAM)
    end = stream + tl.load(chunk + LENGTH)
    sinks = tl.load(chunk + SINKS) // UNIT
    gone_before = (stream - tl.load(chunk + CACHED)) // UNIT
    gone = (end - tl.load(chunk + LEFT)) // UNIT
    first = stream // UNIT
    last = tl.cdiv(end, UNIT)
    own_sinks = tl.maximum(tl.minimum(sinks, last) - first, 0)
    others = tl.maximum(first + own_sinks, sinks + gone)
    total = own_sinks + tl.maximum(last - others, 0)
    return sinks, gone_before, gone, first, own_sinks, others, total


@triton.jit
def _after(old, inside, opens, free_before, survivors):
    """What becomes of units of slots with ranks ``old``; ``opens``: where to count them.

    Returns ranks afterwards (-1: empty), the new units that come (-1: nobody), and how many places
    were free up to here.
    """
    sinks, gone_before, gone, first, own_sinks, others, total = survivors
    index = tl.where(old < sinks, old, old + gone_before)
    stays = (old >= 0) & ((index < sinks) | (index >= sinks + gone))
    free = inside & (stays == 0)
    counted = (free & opens).to(tl.int32)
    place = free_before + tl.cumsum(counted, 0) - 1
    comes = free & (place < total)
    who = tl.where(place < own_sinks, first + place, others + place - own_sinks)
    index = tl.where(comes, who, index)
    rank = tl.where(index < sinks, index, index - gone)
    rank = tl.where(stays | comes, rank, -1)
    return rank, tl.where(comes, who, -1), free_before + tl.sum(counted, axis=0)


@triton.jit
def _write_rows(
    key,
    value,
    kv,
    rank,
    table,
    chunk,
    positions,
    rotation,
    head,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head's keys and values of the chunk's survivors into their slots."""
    survivors = _survivors(chunk, UNIT)
    stream = tl.load(chunk + STREAM)
    length = tl.load(chunk + LENGTH)
    start = tl.load(chunk + START).to(tl.int64)
    old_slots = tl.load(chunk + OLD_SLOTS)
    new_slots = tl.load(chunk + NEW_SLOTS)
    free_before = tl.full([], 0, tl.int32)
    for begin in range(0, new_slots, TILE):
        slot, inside, block, word = slot_tile(
            table, begin, new_slots, head % NUM_SETS, word_stride, PAGE, TILE, UNIT
        )
        old = tl.load(rank + word, mask=inside & (slot < old_slots), other=-1)
        now, who, free_before = _after(old, inside, slot % UNIT == 0, free_before, survivors)
        source = who * UNIT + slot % UNIT - stream
        comes = (who >= 0) & (source < length)
        if tl.max(comes.to(tl.int32), axis=0) > 0:
            keys = key + (start + source) * key_stride + head * HEAD
            values = value + (start + source) * value_stride + head * HEAD
            slots = kv + block * page_stride + (head * PAGE + slot % PAGE) * (2 * HEAD)
            if (HALF > 0) & (UNIT > 1):
                # A unit that isn't complete goes to where it stands after the last evictions.
                begun = (stream + length) // UNIT * UNIT - stream
                late = comes & (source >= begun)
                if tl.max(late.to(tl.int32), axis=0) > 0:
                    at = tl.load(positions + start + begun).to(tl.int32)
                    distance = tl.where(late, at - now * UNIT, 0)
                    turn_rows(keys, slots, rotation, distance, late, HEAD, HALF, INTERLEAVED)
                    store_rows(slots + HEAD, load_rows(values, late, 0, HEAD), late, 0, HEAD)
                comes = comes & (source < begun)
            copy_rows(keys, values, slots, comes, HEAD)


@triton.jit
def _write_words(
    rank,
    born,
    score,
    token,
    table,
    chunk,
    positions,
    head_set,
    word_stride,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One set's ranks of all slots, and the words of the chunk's survivors, all in units."""
    survivors = _survivors(chunk, UNIT)
    stream = tl.load(chunk + STREAM)
    length = tl.load(chunk + LENGTH)
    start = tl.load(chunk + START).to(tl.int64)
    old_slots = tl.load(chunk + OLD_SLOTS) // UNIT
    new_slots = tl.load(chunk + NEW_SLOTS) // UNIT
    whole = (stream + length) // UNIT  # the stream's unit that is not complete, if any
    free_before = tl.full([], 0, tl.int32)
    for begin in range(0, new_slots, TILE):
        slot, inside, _, word = slot_tile(
            table, begin, new_slots, head_set, word_stride, PAGE, TILE
        )
        old = tl.load(rank + word, mask=inside & (slot < old_slots), other=-1)
        now, who, free_before = _after(old, inside, inside, free_before, survivors)
        comes = who >= 0
        tl.store(rank + word, now, mask=inside)
        at = start + who.to(tl.int64) * UNIT - stream
        written_at = tl.load(positions + at, mask=comes, other=0).to(tl.int32)
        if UNIT > 1:
            written_at = tl.where(who == whole, now * UNIT, written_at)
        tl.store(born + word, written_at, mask=comes)
        tl.store(score + word, tl.zeros([TILE], tl.float32), mask=comes)
        if token is not None:
            tl.store(token + word, who * UNIT, mask=comes)


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
    table,
    steps,
    chunks,
    positions,
    finished,
    rotation,
    new_rotation,
    slopes,
    logit_scale,
    output,
    scale,
    cap,
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
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
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
        sinks = tl.load(chunk + SINKS)
        gone = stream - cached
        shift = gone - (begun - tl.load(chunk + CACHED))  # deleted since the chunk began
        index = first_query + tl.arange(0, QUERIES)
        real = index < length
        token_at = start + index
        position = cached + index
        queries, factor = stride_queries(
            query, query_head, token_at, real, query_stride, scale, logit_scale, HEAD
        )
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + query_head)
        top, total, acc = empty_softmax(QUERIES, HEAD)

        slots = tl.load(chunk + OLD_SLOTS)
        for first in range(0, slots, TILE):
            slot, unit, _word, rows, distance = page_tile(
                *(kv, rank, born, table, first, slots, head, page_stride, word_stride),
                *(NUM_SETS, HEAD, PAGE, TILE, UNIT),
            )
            at = unit * UNIT + slot % UNIT
            is_sink = at < sinks
            seen = (unit >= 0) & (is_sink | (at >= sinks + shift))
            moved = tl.where(is_sink, 0, shift)
            if tl.max(seen.to(tl.int32), axis=0) > 0:
                away = tl.where(seen, distance + moved, 0)
                keys = load_turned(rows, seen, rotation, away, HEAD, HALF, INTERLEAVED)
                rank_now = at - moved
                logits = stride_logits(queries, keys, position, rank_now, seen, factor, cap, slope)
                values = load_rows(rows + HEAD, seen, 0, HEAD)
                top, total, acc = online_softmax(top, total, acc, logits, values)

        # The chunk's own tokens: those that are sinks, and what has not been deleted again.
        chunk_start = start - (stream - begun)
        upper = stream - begun + tl.minimum(first_query + QUERIES, length)
        own_sinks = tl.minimum(tl.maximum(sinks - begun, 0), upper)
        others = tl.maximum(own_sinks, sinks + gone - begun)
        sink_tiles = tl.cdiv(own_sinks, TILE)
        for tile in range(sink_tiles + tl.cdiv(tl.maximum(upper - others, 0), TILE)):
            in_sinks = tile < sink_tiles
            begin = tl.where(in_sinks, tile * TILE, others + (tile - sink_tiles) * TILE)
            place = begin + tl.arange(0, TILE)
            seen = place < tl.where(in_sinks, own_sinks, upper)
            rank_now = begun + place - tl.where(in_sinks, 0, gone)
            at = chunk_start + place
            written_at = tl.load(positions + at, mask=seen, other=0).to(tl.int32)
            away = tl.where(seen, written_at - rank_now, 0)
            key_rows = key + at * key_stride + head * HEAD
            keys = load_turned(key_rows, seen, rotation, away, HEAD, HALF, INTERLEAVED)
            logits = stride_logits(queries, keys, position, rank_now, seen, factor, cap, slope)
            value_rows = value + at * value_stride + head * HEAD
            values = load_rows(value_rows, seen, 0, HEAD)
            top, total, acc = online_softmax(top, total, acc, logits, values)

        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        store_rows(output + token_at * output_stride + query_head * HEAD, acc, real, 0, HEAD)

    # Whoever is the last to have read writes.
    tl.debug_barrier()
    finished += mine * (2 * NUM_HEADS)
    programs = tl.load(chunk + STRIDES) * tl.num_programs(0) * GROUP
    if tl.atomic_add(finished + head, 1) == programs - 1:
        tl.store(finished + head, 0)
        _write_rows(
            *(key, value, kv, rank, table, chunk, positions, new_rotation, head),
            *(key_stride, value_stride, page_stride, word_stride),
            *(NUM_SETS, HEAD, HALF, INTERLEAVED, PAGE, UNIT, COPY),
        )
        tl.debug_barrier()
        head_set = head % NUM_SETS
        if tl.atomic_add(finished + NUM_HEADS + head_set, 1) == NUM_HEADS // NUM_SETS - 1:
            tl.store(finished + NUM_HEADS + head_set, 0)
            _write_words(
                *(rank, born, score, token, table, chunk, positions, head_set, word_stride),
                *(PAGE // UNIT, UNIT, RENUMBER),
            )


def attend_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    token: torch.Tensor | None,
    table: torch.Tensor,
    steps: torch.Tensor,
    chunks: torch.Tensor,
    positions: torch.Tensor,
    finished: torch.Tensor,
    rotation: torch.Tensor | None,
    new_rotation: torch.Tensor | None,
    interleaved: bool,
    slopes: torch.Tensor | None,
    logit_scale: torch.Tensor | None,
    scale: float,
    softcap: float,
    max_length: int,
    output: torch.Tensor,
) -> None:
    """Attention of ``K`` strides of ``M`` requests' chunks, and what is left of them in the pages.

    Args:
        query: ``[num_tokens, H * G, D]`` of the whole step, rotated at cache positions.
        key, value: ``[num_tokens, H, D]``, keys rotated likewise.
        kv, rank, born, score, token: ``Pages`` views, written; ``token`` None where not kept.
        table: int32 ``[>= M, P]`` block numbers.
        steps: int32 ``[K, STEP_COLUMNS]`` step rows of strides, which say their ``CHUNK``; strides
            begin where units do.
        chunks: int32 ``[M, STEP_COLUMNS]`` (``stride_columns``).
        positions: int64 ``[>= num_tokens]``, where the step's keys were rotated to.
        finished: int32 ``[>= M, 2 * H]`` zeros, which they are again afterwards.
        rotation: of ``rotate``, to read with; ``new_rotation``: fp32, to write with.
        interleaved: rotary pairs are (2i, 2i + 1).
        slopes: fp32 ``[H * G]`` of ALiBi, or None.
        logit_scale: fp32 ``[num_tokens]``, factors on the logits, or None.
        max_length: the longest stride.
        output: like ``query``; the strides' rows are written.
    """
    words = (rank, born, score) if token is None else (rank, born, score, token)
    unit = check_pages(kv, *words)
    check_steps(steps, steps)
    check_steps(chunks, table)
    check_new(query, key, kv)
    assert finished.dtype == torch.int32 and finished.is_contiguous()
    assert finished.shape[0] >= len(chunks) and finished.shape[1] == 2 * kv.shape[1]
    if len(steps) == 0 or max_length == 0:
        return
    config = prefill_config(query.device, query.dtype, query.shape[2])
    _attend_chunks[(triton.cdiv(max_length, config.queries), query.shape[1], len(steps))](
        *(query, key, value, kv, rank, born, score, token, table, steps, chunks, positions),
        *(finished, rotation, new_rotation if unit > 1 else None, slopes, logit_scale, output),
        *(scale, softcap or None),
        *(query.stride(0), key.stride(0), value.stride(0), output.stride(0)),
        *(kv.stride(0), rank.stride(0), table.stride(0)),
        RENUMBER=RENUMBERED,
        COPY=COPIED,
        maxnreg=MOST_REGISTERS,
        **stride_constants(config, query.shape[1], kv, rank, rotation, interleaved),
    )
