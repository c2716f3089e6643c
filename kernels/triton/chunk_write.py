# SPDX-License-Identifier: Apache-2.0
"""Write a chunk's survivors into the pages, for policies without scores.

Units are numbered from the stream's start. Which of them are evicted before and after the chunk
follows from counts, and so does the next content of every slot. The last program of a head set,
found by a counter, rewrites the set's words, which no other program reads any more.
"""

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .launch import Launcher
from .stored import apart, scale_of_word, write_codes
from .strides import Chunks, Tokens
from .tiles import (
    CACHED,
    LEFT,
    LENGTH,
    NEW_SLOTS,
    OLD_SLOTS,
    SINKS,
    START,
    STEP,
    STREAM,
    copy_rows,
    load_rows,
    slot_tile,
    store_rows,
    turn_rows,
)

RENUMBERED, COPIED, ENCODED = 1024, 64, 16
"""Units per renumbered tile, slots per copied tile, and per tile that is encoded in registers."""
WARPS = 8


@triton.jit
def _survivors(chunk, UNIT: tl.constexpr):
    """Survivors of a chunk, in units from the stream's start.

    Returns the number of sinks, the units evicted before and after the chunk, the chunk's first
    unit, the number of its sinks, its first other survivor, and the number of all its survivors.
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
    """Next content of slots with ranks ``old``; ``opens`` marks the slots that begin a unit.

    Returns the new ranks (-1: empty), the new units written there (-1: none), and the number of
    free units up to here.
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
    scales,
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
    """Write one head's keys and values of the chunk's survivors into their slots."""
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
            values = value + (start + source) * value_stride + head * VALUE
            slots = kv + block * page_stride + (head * PAGE + slot % PAGE) * ROW
            if CODE is not None:
                distance = slot * 0
                if UNIT > 1:
                    begun = (stream + length) // UNIT * UNIT - stream
                    at = tl.load(positions + start + begun, mask=begun < length, other=0)
                    late = comes & (source >= begun)
                    distance = tl.where(late, at.to(tl.int32) - now * UNIT, 0)
                write_codes(
                    keys=keys,
                    values=values,
                    slots=slots,
                    place=scale_of_word(scales, word, slot, head, NUM_SETS, PAGE, UNIT, OF_ROWS),
                    inside=comes,
                    rotation=rotation,
                    distance=distance,
                    HEAD=HEAD,
                    VALUE=VALUE,
                    ROW=ROW,
                    HALF=HALF if UNIT > 1 else 0,
                    INTERLEAVED=INTERLEAVED,
                    APART=apart(PAGE, OF_ROWS),
                    CODE=CODE,
                    OF_ROWS=OF_ROWS,
                )
            elif (HALF > 0) & (UNIT > 1):
                # An incomplete unit is rotated to its position after the last evictions.
                begun = (stream + length) // UNIT * UNIT - stream
                late = comes & (source >= begun)
                if tl.max(late.to(tl.int32), axis=0) > 0:
                    at = tl.load(positions + start + begun).to(tl.int32)
                    distance = tl.where(late, at - now * UNIT, 0)
                    turn_rows(keys, slots, rotation, distance, late, HEAD, HALF, INTERLEAVED)
                    if ROW > HEAD:
                        store_rows(slots + HEAD, load_rows(values, late, 0, HEAD), late, 0, HEAD)
                comes = comes & (source < begun)
            if CODE is None:
                copy_rows(keys, values, slots, comes, HEAD, VALUE, ROW)


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
    """Write one set's ranks of all slots and the words of the chunk's survivors, in units."""
    survivors = _survivors(chunk, UNIT)
    stream = tl.load(chunk + STREAM)
    length = tl.load(chunk + LENGTH)
    start = tl.load(chunk + START).to(tl.int64)
    old_slots = tl.load(chunk + OLD_SLOTS) // UNIT
    new_slots = tl.load(chunk + NEW_SLOTS) // UNIT
    whole = (stream + length) // UNIT  # the stream's incomplete unit, if any
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
def _write_chunks(
    key,
    value,
    kv,
    rank,
    born,
    score,
    token,
    scales,
    table,
    chunks,
    positions,
    finished,
    rotation,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    RENUMBER: tl.constexpr,
    COPY: tl.constexpr,
):
    mine = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    chunk = chunks + mine * STEP
    if tl.load(chunk + STREAM) < 0:
        return
    table += mine * table_stride
    _write_rows(
        key=key,
        value=value,
        kv=kv,
        rank=rank,
        scales=scales,
        table=table,
        chunk=chunk,
        positions=positions,
        rotation=rotation,
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
    finished += mine * NUM_SETS + head_set
    if tl.atomic_add(finished, 1) == NUM_HEADS // NUM_SETS - 1:
        tl.store(finished, 0)
        _write_words(
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


class ChunkWrite:
    """Writes chunks' survivors into the pages of one layer.

    Args:
        rotation: the fp32 table of ``rotate``.
    """

    def __init__(self, layer: CachedLayer, rotation: torch.Tensor | None) -> None:
        self._num_heads, self._num_sets = layer.kv.shape[1], layer.num_sets
        coded = layer.stored is not None
        turning = layer.turning | {"rotation": rotation if layer.unit > 1 else None}
        self._launch = Launcher(
            _write_chunks,
            **layer.pages,
            **layer.words,
            **turning,
            **layer.rows,
            NUM_HEADS=self._num_heads,
            PAGE=layer.page,
            RENUMBER=RENUMBERED,
            COPY=ENCODED if coded else layer.copied(COPIED),
            num_warps=WARPS,
        )

    def __call__(self, tokens: Tokens, chunks: Chunks) -> None:
        assert chunks.num_counters == self._num_sets, chunks.num_counters
        if chunks.max_length == 0:
            return
        _, key_stride, value_stride, _ = tokens.places
        self._launch(
            (self._num_heads, chunks.num_chunks, 1),
            (tokens.variant, chunks.variant),
            key=tokens.key,
            value=tokens.value,
            table=chunks.table,
            chunks=chunks.chunks,
            positions=chunks.positions,
            finished=chunks.finished,
            key_stride=key_stride,
            value_stride=value_stride,
            table_stride=chunks.table_place,
        )
