# SPDX-License-Identifier: Apache-2.0
"""Vectors of recall: unrotated keys, and unrotated queries, in 8 bits.

Keys are stored without rotation and judged as if all stood in the middle of the recalled units:
queries are rotated back to that position, whatever their own position is.
"""

import triton
import triton.language as tl

from .recall_columns import HOW, JUDGED, NOW, RECALL, SINKS
from .recall_sinks import attend_sinks
from .stored import to_nearest
from .tiles import (
    LENGTH,
    LOG2_E,
    START,
    STEP,
    load_pair,
    load_rows,
    padded,
    pair_channels,
    rotate_pair,
)

LEVELS = tl.constexpr(127.0)
"""Levels up to a key's or query's largest channel."""
TINY = tl.constexpr(1e-37)


@triton.jit
def most_of(x):
    """The largest magnitude of each row."""
    return tl.max(tl.abs(x), axis=1)


@triton.jit
def plain_rows(
    source,
    rotation,
    position,
    inside,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows before their rotation to ``position``, fp32: halves of pairs, then other channels."""
    x = tl.zeros([source.shape[0], 16], tl.float32)
    y = x
    rest = x
    if HALF > 0:
        x, y = load_pair(source, inside, HALF, INTERLEAVED)
        x, y = rotate_pair(x, y, rotation, position, inside, HALF)
    if 2 * HALF < HEAD:
        rest = load_rows(source, inside, 2 * HALF, HEAD).to(tl.float32)
    most = tl.maximum(tl.maximum(most_of(x), most_of(y)), most_of(rest))
    return x, y, rest, most


@triton.jit(do_not_specialize_on_alignment=["table"])  # that of some rows of it
def ask(
    query,
    steps,
    recall,
    table,
    kv,
    scales,
    rotation,
    asked,
    sizes,
    to_sinks,
    scale,
    query_stride,
    page_stride,
    word_stride,
    table_stride,
    ASKING: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Rotate back and quantise the queries of a stride's evenly spaced tokens, and compute how
    much each attends to the sinks (``attend_sinks``). Sizes are for logits in base 2."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = recall + row * RECALL
    if tl.load(columns + HOW) != JUDGED:
        return
    middle = tl.load(columns + SINKS) + tl.load(columns + NOW) // 2  # of the recalled units
    length = tl.load(steps + row * STEP + LENGTH)
    index = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = index < tl.minimum(length, ASKING)
    token = tl.where(length <= ASKING, index, (index + 1) * length // ASKING - 1)
    token = tl.where(inside, token, 0)
    position = tl.where(inside, middle * UNIT, 0)
    source = query + (tl.load(steps + row * STEP + START) + token).to(tl.int64) * query_stride
    source += head * HEAD
    x, y, rest, most = plain_rows(source, rotation, position, inside, HEAD, HALF, INTERLEAVED)
    most = most * tl.abs(scale)
    levels = (tl.div_rn(LEVELS, tl.where(most > 0, most, 1.0)) * scale)[:, None]
    place = (row * tl.num_programs(1) + head) * ASKING + index
    tl.store(sizes + place, tl.div_rn(most, LEVELS) * LOG2_E, mask=inside)
    found = attend_sinks(
        source,
        inside,
        tl.load(columns + SINKS) * UNIT,
        kv,
        scales,
        table + row * table_stride,
        head // GROUP,
        scale,
        page_stride,
        word_stride,
        HEAD,
        FIRST,
        ROW,
        PAGE,
        CODE,
        OF_ROWS,
    )
    tl.store(to_sinks + place, found, mask=inside)
    out = asked + place * HEAD
    if HALF > 0:
        pair = tl.arange(0, padded(HALF))
        first, second = pair_channels(pair, HALF, INTERLEAVED)
        there = inside[:, None] & (pair < HALF)[None, :]
        first, second = out[:, None] + first[None, :], out[:, None] + second[None, :]
        tl.store(first, to_nearest(x * levels).to(tl.int8), mask=there)
        tl.store(second, to_nearest(y * levels).to(tl.int8), mask=there)
    if 2 * HALF < HEAD:
        channel = 2 * HALF + tl.arange(0, padded(HEAD - 2 * HALF))
        there = inside[:, None] & (channel < HEAD)[None, :]
        at = out[:, None] + channel[None, :]
        tl.store(at, to_nearest(rest * levels).to(tl.int8), mask=there)
