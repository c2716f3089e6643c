# SPDX-License-Identifier: Apache-2.0
"""``attend`` for units of several tokens: rotates the query once per unit instead of every key.

The tokens of a unit have consecutive positions, when written and when read. All its keys are
therefore the same distance ``born - rank`` from their positions. The kernel rotates the query the
opposite way once per chunk, and reads keys as they were written. A chunk is a unit, or a part of a
long one. For the scores, the kernel writes one log-sum-exp per chunk and query head.

- **Warps.** A program is one warp if its registers suffice, and takes one chunk per iteration. No
  warp waits for another inside the loop.
- **Layout.** Keys are the rows of the first product, transposed values those of the second. A
  tensor core needs 16 rows and only 8 columns, and a group has few query heads.
- **Prefetch.** The chain from block number to metadata to rotation runs ahead of the loop: the
  block of two chunks ahead, the metadata of the next one. Loads of keys, values, cosines and sines
  then depend on registers only, and the compiler keeps two chunks of them in flight.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .attend_tiles import LOWEST
from .configs import units_config
from .launch import Launcher
from .stored import apart, factor_of, load_scales, scale_place, widened
from .tiles import (
    CACHED,
    LN_2,
    LOG2_E,
    OLD_SLOTS,
    STEP,
    STREAM,
    chunk_of,
    dot,
    load_columns,
    load_pair,
    load_rows,
    padded,
    soft_cap,
    store_rows,
)


@triton.jit
def _words(rank, born, block, chunk, end, word_stride, PARTS: tl.constexpr, UNITS: tl.constexpr):
    """Rank and born of a chunk's unit. An empty unit has rank -1."""
    word = block * word_stride + chunk // PARTS % UNITS
    inside = chunk < end
    return tl.load(rank + word, mask=inside, other=-1), tl.load(born + word, mask=inside, other=0)


@triton.jit
def _turned(q1, q2, rotation, distance, dtype, HALF: tl.constexpr):
    """Query pairs ``[m, padded(HALF)]``, rotated forward by ``distance`` in fp32."""
    index = tl.arange(0, padded(HALF))
    inside = index < HALF
    angles = rotation + distance * (2 * HALF) + index
    cos = tl.load(angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    return (q1 * cos + q2 * sin).to(dtype), (q2 * cos - q1 * sin).to(dtype)


@triton.jit
def _exact(keys, dtype, CODE: tl.constexpr):
    """Keys for a product; codes without their scales, as numbers that 16 bits hold exactly."""
    if CODE is not None:
        keys = widened(keys, CODE).to(dtype)
    return keys


@triton.jit
def _attend_units(
    query,
    key,
    value,
    kv,
    rank,
    born,
    scales,
    table,
    steps,
    rotation,
    slopes,
    logit_scale,
    partial,
    partial_lse,
    masses,
    own,
    scale,
    cap,
    query_stride,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    masses_stride,
    NUM_HEADS: tl.constexpr,
    NUM_SETS: tl.constexpr,
    GROUP: tl.constexpr,
    LEAD: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEEP_MASSES: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    if tl.load(steps + row * STEP + STREAM) < 0:
        return
    cached = tl.load(steps + row * STEP + CACHED)
    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    member = tl.arange(0, LEAD)
    real = member < GROUP
    query_head = head * GROUP + member
    row64 = row.to(tl.int64)
    out_head = row64 * (NUM_HEADS * GROUP) + query_head
    queries = query + row64 * query_stride + query_head * HEAD
    if logit_scale is not None:
        scale = scale * tl.load(logit_scale + row)
    if slopes is not None:
        slope = tl.load(slopes + query_head, mask=real, other=0.0) * LOG2_E
    if HALF > 0:
        q1, q2 = load_pair(queries, real, HALF, INTERLEAVED)
        q1 = q1.to(tl.float32)
        q2 = q2.to(tl.float32)
    if 2 * HALF < HEAD:
        q3 = load_rows(queries, real, 2 * HALF, HEAD)
    top = tl.full([LEAD], LOWEST, tl.float32)  # logits are in base 2
    total = tl.zeros([LEAD], tl.float32)
    acc = tl.zeros([padded(HEAD), LEAD], tl.float32)

    DTYPE: tl.constexpr = query.dtype.element_ty
    PARTS: tl.constexpr = UNIT // CHUNK
    UNITS: tl.constexpr = PAGE // UNIT
    CHUNKS: tl.constexpr = PAGE // CHUNK
    table += row64 * table_stride
    rank += head % NUM_SETS * UNITS
    born += head % NUM_SETS * UNITS
    kv += head * (PAGE * 2 * HEAD)
    chunks = slots // CHUNK
    per_split = tl.cdiv(chunks, splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    token = tl.arange(0, CHUNK)
    block = tl.load(table + begin // CHUNKS, mask=begin < end, other=0).to(tl.int64)
    unit_rank, unit_born = _words(rank, born, block, begin, end, word_stride, PARTS, UNITS)
    next_block = tl.load(table + (begin + 1) // CHUNKS, mask=begin + 1 < end, other=0)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        # The last slots of a unit may be unfilled. They may hold NaN and are not read.
        first = unit_rank * UNIT + chunk % PARTS * CHUNK
        valid = token < tl.where(unit_rank >= 0, cached - first, 0)
        distance = tl.where(unit_rank >= 0, unit_born - unit_rank * UNIT, 0)
        source = kv + block * page_stride + chunk % CHUNKS * (CHUNK * 2 * HEAD)
        rows = source + token * (2 * HEAD)
        values = load_columns(rows + HEAD, valid, 0, HEAD)
        if CODE is not None:
            offset = chunk % CHUNKS * CHUNK + token
            at = scale_place(scales, block, head, offset, word_stride, PAGE, OF_ROWS)
            key_scale, value_scale = load_scales(at, valid, apart(PAGE, OF_ROWS))
            values = widened(values, CODE) * factor_of(value_scale, CODE)[None, :]
            values = values.to(DTYPE)
        products = tl.zeros([CHUNK, LEAD], tl.float32)
        if HALF > 0:
            left, right = _turned(q1, q2, rotation, distance, DTYPE, HALF)
            if INTERLEAVED:
                channel = tl.arange(0, 2 * padded(HALF))
                inside = valid[:, None] & (channel < 2 * HALF)[None, :]
                keys = tl.load(rows[:, None] + channel[None, :], mask=inside, other=0.0)
                both = tl.reshape(tl.join(left, right), [LEAD, 2 * padded(HALF)])
                products = dot(_exact(keys, DTYPE, CODE), tl.trans(both), products)
            else:
                x, y = load_pair(rows, valid, HALF, False)
                products = dot(_exact(x, DTYPE, CODE), tl.trans(left), products)
                products = dot(_exact(y, DTYPE, CODE), tl.trans(right), products)
        if 2 * HALF < HEAD:
            rest = load_rows(rows, valid, 2 * HALF, HEAD)
            products = dot(_exact(rest, DTYPE, CODE), tl.trans(q3), products)
        if CODE is not None:
            products *= factor_of(key_scale, CODE)[:, None]

        block = next_block.to(tl.int64)
        unit_rank, unit_born = _words(rank, born, block, chunk + 1, end, word_stride, PARTS, UNITS)
        next_block = tl.load(table + (chunk + 2) // CHUNKS, mask=chunk + 2 < end, other=0)

        if cap is None:
            products = products * (scale * LOG2_E)
        else:
            products = soft_cap(products * scale, cap) * LOG2_E
        if slopes is not None:
            products += (first + token - cached).to(tl.float32)[:, None] * slope[None, :]
        products = tl.where(valid[:, None], products, float("-inf"))
        highest = tl.maximum(top, tl.max(products, axis=0))
        probs = tl.exp2(products - highest[None, :])
        mass = tl.sum(probs, axis=0)
        fade = tl.exp2(top - highest)
        total = total * fade + mass
        acc = dot(values, probs.to(values.dtype), acc * fade[None, :])
        top = highest
        if KEEP_MASSES:
            # An empty chunk has mass 0, and its logarithm -inf is right.
            mass = (highest + tl.log2(mass)) * LN_2
            tl.store(masses + out_head * masses_stride + chunk, mass, mask=real)

    # The first split also has the new token.
    new_key = key + row64 * key_stride + head * HEAD + tl.zeros([1], tl.int32)
    new_value = value + row64 * value_stride + head * HEAD + tl.zeros([1], tl.int32)
    here = tl.full([1], split, tl.int32) == 0
    itself = tl.zeros([LEAD], tl.float32)
    if HALF > 0:
        k1, k2 = load_pair(new_key, here, HALF, INTERLEAVED)
        itself += tl.sum(q1 * k1.to(tl.float32) + q2 * k2.to(tl.float32), axis=1)
    if 2 * HALF < HEAD:
        k3 = load_rows(new_key, here, 2 * HALF, HEAD)
        itself += tl.sum(q3.to(tl.float32) * k3.to(tl.float32), axis=1)
    itself = soft_cap(itself * scale, cap)
    if KEEP_MASSES:
        tl.store(own + out_head, itself, mask=real & (split == 0))
    itself = tl.where(split == 0, itself * LOG2_E, float("-inf"))
    highest = tl.maximum(top, itself)
    fade = tl.exp2(top - highest)
    prob = tl.exp2(itself - highest)
    total = total * fade + prob
    acc = tl.trans(acc * fade[None, :])
    acc += prob[:, None] * load_rows(new_value, here, 0, HEAD).to(tl.float32)
    # An empty split has total 0: its sum is 0, its log-sum-exp -inf.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    lse = tl.where(total > 0.0, (highest + tl.log2(total)) * LN_2, float("-inf"))
    place = out_head * splits + split
    store_rows(partial + place * HEAD, acc, real, 0, HEAD)
    tl.store(partial_lse + place, lse, mask=real)


def units_launcher(dtype: torch.dtype, group: int, **fixed: Any) -> Launcher:
    """Create one layer's launcher; ``fixed``: the other constant arguments, as
    ``attend.DecodeAttention`` passes them."""
    config = units_config(dtype, fixed["HEAD"], group, fixed["CODE"] is not None)
    return Launcher(
        _attend_units,
        **fixed,
        GROUP=group,
        LEAD=triton.next_power_of_2(group),
        CHUNK=chunk_of(fixed["UNIT"], config.tile),
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
