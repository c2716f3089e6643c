# SPDX-License-Identifier: Apache-2.0
"""``attend`` where consecutive tokens share their numbers: one turn of the query for all of them.

The tokens of a unit stand at positions in a row, before and after they move, so all their keys are
``born - rank`` from where they belong: instead of every key, the query is rotated, the other way,
once a unit, and meets keys as they were written. Units of fewer than 16 tokens do not fill a tensor
core's tile, so their keys are rotated, with one row of the table a unit. What leaves for the scores
is one log-sum-exp a unit and query head.

A tile holds ``COUNT`` chunks of ``CHUNK`` tokens; a unit is one chunk, or several parts.
"""

import torch
import triton
import triton.language as tl

from .configs import TURNED, units_config
from .tiles import (
    CACHED,
    INTERPRETED,
    OLD_SLOTS,
    STEP,
    STREAM,
    block_of,
    chunk_of,
    dot_keys,
    dot_values,
    load_pair,
    load_rows,
    padded,
    soft_cap,
    store_rows,
)


@triton.jit
def _angles(rotation, distance, held, HALF: tl.constexpr):
    """cos and sin ``[n, padded(HALF)]`` of a turn back by ``distance``."""
    index = tl.arange(0, padded(HALF))
    inside = held[:, None] & (index < HALF)[None, :]
    base = rotation + distance[:, None] * (2 * HALF) + index[None, :]
    cos = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(base + HALF, mask=inside, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _filled(x, dtype, ROWS: tl.constexpr):
    """``[n, m, d]`` as ``[n, ROWS, d]``: its rows over and over, to fill a tensor core's tile."""
    repeats: tl.constexpr = ROWS // x.shape[1]
    x = x.to(dtype)[:, None, :, :]
    x = tl.broadcast_to(x, [x.shape[0], repeats, x.shape[2], x.shape[3]])
    return tl.reshape(x, [x.shape[0], ROWS, x.shape[3]])


@triton.jit
def _products(queries, keys, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """fp32 ``[m, n]`` products of keys ``[n, d]`` with their chunks' queries ``[COUNT, m, d]``."""
    rows: tl.constexpr = queries.shape[1]
    size: tl.constexpr = queries.shape[2]
    if COUNT == 1:
        result = dot_keys(tl.reshape(queries, [rows, size]), keys)
    else:
        chunks = tl.reshape(keys, [COUNT, CHUNK, size])
        if rows == 1:
            chunks = tl.sum(queries.to(tl.float32) * chunks.to(tl.float32), axis=2)
            result = tl.reshape(chunks, [1, COUNT * CHUNK])
        else:
            if INTERPRETED:
                queries = queries.to(tl.float32)
                chunks = chunks.to(tl.float32)
            chunks = tl.dot(queries, tl.permute(chunks, (0, 2, 1)), input_precision="ieee")
            result = tl.reshape(tl.permute(chunks, (1, 0, 2)), [rows, COUNT * CHUNK])
    return result


@triton.jit
def _turned_keys(x, y, cos, sin, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs ``[n, d]`` turned back by their chunks' angles ``[COUNT, d]``, in their own type."""
    size: tl.constexpr = x.shape[1]
    first = tl.reshape(x, [COUNT, CHUNK, size]).to(tl.float32)
    second = tl.reshape(y, [COUNT, CHUNK, size]).to(tl.float32)
    left = first * cos[:, None, :] - second * sin[:, None, :]
    right = second * cos[:, None, :] + first * sin[:, None, :]
    left = tl.reshape(left, [COUNT * CHUNK, size]).to(x.dtype)
    return left, tl.reshape(right, [COUNT * CHUNK, size]).to(y.dtype)


@triton.jit
def _attend_units(
    query,
    key,
    value,
    kv,
    rank,
    born,
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
    ROWS: tl.constexpr,
    LEAD: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEEP_MASSES: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
    TURN_QUERY: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if tl.load(steps + row * STEP + STREAM) < 0:
        return
    cached = tl.load(steps + row * STEP + CACHED)
    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    member = tl.arange(0, ROWS)
    real = member < GROUP
    query_head = head * GROUP + member
    row64 = row.to(tl.int64)
    if logit_scale is not None:
        scale = scale * tl.load(logit_scale + row)

    # The new token: split 0 starts from it, the others from nothing.
    queries = query + row64 * query_stride + query_head * HEAD
    new_key = key + row64 * key_stride + head * HEAD + tl.zeros([1], tl.int32)
    new_value = value + row64 * value_stride + head * HEAD + tl.zeros([1], tl.int32)
    here = tl.full([1], split, tl.int32) == 0
    whole = load_rows(queries, real, 0, HEAD).to(tl.float32)
    itself = tl.sum(whole * load_rows(new_key, here, 0, HEAD).to(tl.float32), axis=1)
    itself = soft_cap(itself * scale, cap)
    out_head = row64 * (NUM_HEADS * GROUP) + query_head
    if KEEP_MASSES:
        tl.store(own + out_head, itself, mask=real & (split == 0))
    top = tl.where(split == 0, itself, float("-inf"))
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, padded(HEAD)], tl.float32)
    acc += load_rows(new_value, here, 0, HEAD).to(tl.float32)
    if HALF > 0:
        lead = tl.arange(0, LEAD)
        rows = query + row64 * query_stride + (head * GROUP + lead) * HEAD
        q1, q2 = load_pair(rows, lead < GROUP, HALF, INTERLEAVED)
    if 2 * HALF < HEAD:
        q3 = load_rows(queries, real, 2 * HALF, HEAD)

    table += row64 * table_stride
    UNITS: tl.constexpr = PAGE // UNIT
    PARTS: tl.constexpr = UNIT // CHUNK
    chunks = slots // CHUNK
    per_split = tl.cdiv(tl.cdiv(chunks, COUNT), SPLITS) * COUNT
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    for first in range(begin, end, COUNT):
        chunk = first + tl.arange(0, COUNT)
        there = chunk < end
        unit = chunk // PARTS
        word = block_of(table, unit, there, UNITS) * word_stride
        word += head % NUM_SETS * UNITS + unit % UNITS
        unit_rank = tl.load(rank + word, mask=there, other=-1)
        held = unit_rank >= 0
        place = (unit_rank * UNIT + chunk % PARTS * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
        valid = held[:, None] & (place < cached)  # a unit's last slots may wait for their tokens
        valid = tl.reshape(valid, [COUNT * CHUNK])
        slot = first * CHUNK + tl.arange(0, COUNT * CHUNK)
        inside = slot < end * CHUNK
        block = block_of(table, slot, inside, PAGE)
        source = kv + block * page_stride + (head * PAGE + slot % PAGE) * (2 * HEAD)
        products = tl.zeros([ROWS, COUNT * CHUNK], tl.float32)
        # K and V loads do not wait for ranks; what an empty slot holds may be NaN and is cut off.
        if HALF > 0:
            distance = tl.load(born + word, mask=held, other=0) - unit_rank * UNIT
            cos, sin = _angles(rotation, distance, held, HALF)
            x, y = load_pair(source, inside, HALF, INTERLEAVED)
            if TURN_QUERY:
                a = q1.to(tl.float32)[None, :, :]
                b = q2.to(tl.float32)[None, :, :]
                left = a * cos[:, None, :] + b * sin[:, None, :]
                right = b * cos[:, None, :] - a * sin[:, None, :]
                products += _products(_filled(left, q1.dtype, ROWS), x, COUNT, CHUNK)
                products += _products(_filled(right, q1.dtype, ROWS), y, COUNT, CHUNK)
            else:
                x, y = _turned_keys(x, y, cos, sin, COUNT, CHUNK)
                products += dot_keys(q1, x)
                products += dot_keys(q2, y)
        if 2 * HALF < HEAD:
            products += dot_keys(q3, load_rows(source, inside, 2 * HALF, HEAD))
        products = soft_cap(products * scale, cap)
        if slopes is not None:
            slope = tl.load(slopes + query_head, mask=real, other=0.0)
            away = tl.reshape(place - cached, [COUNT * CHUNK]).to(tl.float32)
            products += slope[:, None] * away[None, :]
        products = tl.where(valid[None, :], products, float("-inf"))
        values = load_rows(source + HEAD, inside, 0, HEAD)
        values = tl.where(valid[:, None], values, 0.0).to(values.dtype)
        highest = tl.maximum(top, tl.max(products, axis=1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
        probs = tl.exp(products - shift[:, None])
        if KEEP_MASSES:
            mass = tl.sum(tl.reshape(probs, [ROWS, COUNT, CHUNK]), axis=2)
            some = mass > 0.0
            mass = shift[:, None] + tl.log(tl.where(some, mass, 1.0))
            target = masses + out_head[:, None] * masses_stride + chunk[None, :]
            kept = real[:, None] & there[None, :]
            tl.store(target, tl.where(some, mass, float("-inf")), mask=kept)
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(probs, axis=1)
        acc = acc * fade[:, None] + dot_values(probs, values)
        top = highest

    # An empty split has total 0: its sum is 0, its log-sum-exp -inf.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    place = out_head * SPLITS + split
    store_rows(partial + place * HEAD, acc, real, 0, HEAD)
    tl.store(partial_lse + place, lse, mask=real)


def masses_of(query: torch.Tensor, num_slots: int, unit: int) -> int:
    """Numbers that a query head leaves for the scores: one a slot, or a unit, or a part of one."""
    if unit == 1:
        return num_slots
    config = units_config(query.device, query.dtype, query.shape[2], unit)
    return num_slots // chunk_of(unit, config.tile)


def attend_units(
    tensors: tuple[torch.Tensor | None, ...],
    outputs: tuple[torch.Tensor, ...],
    scale: float,
    softcap: float,
    interleaved: bool,
    splits: int,
    keep_masses: bool,
    unit: int,
) -> None:
    """Launch the kernel.

    Args:
        tensors: the first eleven arguments of ``attend``.
        outputs: what it returns.
    """
    query, key, value, kv, rank, _, table, _, rotation, *_ = tensors
    num_rows, num_queries, head_size = query.shape
    num_heads, page = kv.shape[1], kv.shape[2]
    group = num_queries // num_heads
    config = units_config(query.device, query.dtype, head_size, unit)
    chunk = chunk_of(unit, config.tile)
    rows = 1 if group == 1 else max(16, triton.next_power_of_2(group))
    turn_query = chunk >= TURNED
    _attend_units[(num_rows, num_heads, splits)](
        *tensors,
        *outputs,
        *(scale, softcap or None, query.stride(0), key.stride(0), value.stride(0)),
        *(kv.stride(0), rank.stride(0), table.stride(0), table.shape[1] * page // chunk),
        NUM_HEADS=num_heads,
        NUM_SETS=rank.shape[1],
        GROUP=group,
        ROWS=rows,
        LEAD=triton.next_power_of_2(group) if turn_query else rows,
        HEAD=head_size,
        HALF=0 if rotation is None else rotation.shape[2],
        INTERLEAVED=interleaved,
        KEEP_MASSES=keep_masses,
        UNIT=unit,
        CHUNK=chunk,
        COUNT=config.tile // chunk,
        TURN_QUERY=turn_query,
        PAGE=page,
        SPLITS=splits,
        num_warps=config.warps,
        num_stages=config.stages,
    )
