# SPDX-License-Identifier: Apache-2.0
"""Write a chunk's survivors into the pages, for policies without scores.

Units are numbered from the stream's start. Which of them are evicted before and after the chunk
follows from counts, and so does the next content of every slot. ``chunk.py`` decides when to call
these functions.
"""

import triton
import triton.language as tl

from .stored import apart, scale_of_word, write_codes
from .tiles import (
    CACHED,
    LEFT,
    LENGTH,
    NEW_SLOTS,
    OLD_SLOTS,
    SINKS,
    START,
    STREAM,
    copy_rows,
    load_rows,
    slot_tile,
    store_rows,
    turn_rows,
)


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
def write_rows(
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
def write_words(
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
