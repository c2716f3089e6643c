# SPDX-License-Identifier: Apache-2.0
"""How much a request's queries ask for its stored units: the judge of recall.

A store is a ring a request: unit ``n`` of those that were ever evicted lies in place ``n`` modulo
the ring's size. Keys are judged as if they all stood in the middle of the recalled units, in 8 bits
with a scale each, by queries in 15 (``recall_vectors``), a high and a low part of 8: products are
of integers on tensor cores, and exact.
If a query attended to the whole store, its keys would get probabilities; a unit is worth the
largest of its keys' and their mean, as a share of all units'. Of several queries the largest share
counts, and the mean over a head set's query heads is the evidence. Nothing a request gets depends
on the batch: the ring is cut into spans of a fixed size.
"""

import torch
import triton
import triton.language as tl

from .. import columns
from .recall_columns import BEGIN, END, HOW, JUDGED, RECALL, RING, check_recall
from .recall_vectors import ask
from .tiles import LENGTH, STEP, check_steps

LOWEST = tl.constexpr(-1e38)
"""Below every logit, and finite."""
QUERY_ROWS = 16
"""Queries of one head that a program takes down at a time."""
SPAN_KEYS, TILE_KEYS = 512, 64
"""Keys that a program judges, and those of a turn of its loop."""
WEIGHED, PARTS = 64, 64
"""Units that a program weighs, and spans whose sums it joins at a time."""


def tile_of_units(unit: int) -> tuple[int, int]:
    """Units of a turn of the judge's loop, and the keys that each has room for there."""
    room = triton.next_power_of_2(unit)
    assert unit <= columns.MOST_UNIT, f"units of {unit} tokens"
    return max(TILE_KEYS // room, 1), room


def span_of(unit: int) -> int:
    """Units that one program judges."""
    units, room = tile_of_units(unit)
    return max(SPAN_KEYS // (units * room), 1) * units


@triton.constexpr_function
def _integers(channels):
    """Channels of a tile of 8-bit numbers: a power of two, and enough for a tensor core."""
    return max(32, triton.next_power_of_2(channels))


@triton.jit
def _codes(rows, inside, HEAD: tl.constexpr):
    """int8 rows ``[n, _integers(HEAD)]``, zero outside."""
    channel = tl.arange(0, _integers(HEAD))
    there = inside[:, None] & (channel < HEAD)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=there, other=0)


@triton.jit(do_not_specialize=["rings"])
def _judge(
    parts,
    sizes,
    codes,
    scales,
    steps,
    recall,
    worth,
    sums,
    rings,
    CAPACITY: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    ASKING: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    UNITS: tl.constexpr,
    ROOM: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logarithms of what units are worth to each query, and of their sums over a span."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = recall + row * RECALL
    if tl.load(columns + HOW) != JUDGED:
        return
    oldest = tl.load(columns + BEGIN)
    number = tl.load(columns + END) - oldest
    span = tl.program_id(2) % SPANS
    begin = span * SPAN
    if begin >= number:
        return
    ring = tl.load(columns + RING)
    member = tl.program_id(2) // SPANS * QUERIES + tl.arange(0, QUERIES)
    asks = member % ASKING < tl.load(steps + row * STEP + LENGTH)
    asks = asks & (member < GROUP * ASKING)
    mine = (row * tl.num_programs(1) + head) * (GROUP * ASKING) + member
    high = _codes(parts + mine * (2 * HEAD), asks, HEAD)
    low = _codes(parts + mine * (2 * HEAD) + HEAD, asks, HEAD)
    size = tl.load(sizes + mine, mask=asks, other=0.0)
    place = tl.arange(0, UNITS * ROOM)
    base = head.to(tl.int64) * rings
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + SPAN, number), UNITS, num_stages=STAGES):
        unit = first + place // ROOM
        inside = (unit < number) & (place % ROOM < UNIT)
        key = (base + ring + (oldest + unit) % CAPACITY) * UNIT + place % ROOM
        keys = tl.trans(_codes(codes + key * HEAD, inside, HEAD))
        step = tl.load(scales + key, mask=inside, other=0.0)
        products = tl.dot(high, keys) * 128 + tl.dot(low, keys)
        logits = products.to(tl.float32) * (size[:, None] * step[None, :])
        logits = tl.where(inside[None, :], logits, LOWEST)
        logits = tl.reshape(logits, [QUERIES, UNITS, ROOM])
        most = tl.max(logits, axis=2)
        mean = tl.sum(tl.exp(logits - most[:, :, None]), axis=2) / UNIT
        units = first + tl.arange(0, UNITS)
        there = units < number
        value = tl.where(there[None, :], most + tl.log(1.0 + mean), LOWEST)
        out = worth + mine[:, None] * CAPACITY + units[None, :]
        tl.store(out, value, mask=asks[:, None] & there[None, :])
        higher = tl.maximum(top, tl.max(value, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
        top = higher
    tl.store(sums + mine * SPANS + span, top + tl.log(total), mask=asks)


@triton.jit
def _joined(sums, rows, asks, spans, SPANS: tl.constexpr, PARTS: tl.constexpr):
    """Logarithms of sums over all spans of some rows."""
    top = tl.full(rows.shape, LOWEST, tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    for first in range(0, spans, PARTS):
        span = first + tl.arange(0, PARTS)
        there = asks[:, None] & (span < spans)[None, :]
        value = tl.load(sums + rows[:, None] * SPANS + span[None, :], mask=there, other=LOWEST)
        higher = tl.maximum(top, tl.max(value, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
        top = higher
    return top + tl.log(total)


@triton.jit
def _weigh(
    worth,
    sums,
    steps,
    recall,
    evidence,
    CAPACITY: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    ASKING: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The mean over a set's query heads of the largest share that any query gives a unit."""
    row = tl.program_id(0).to(tl.int64)
    columns = recall + row * RECALL
    if tl.load(columns + HOW) != JUDGED:
        return
    number = tl.load(columns + END) - tl.load(columns + BEGIN)
    unit = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if tl.program_id(2) * TILE >= number:
        return
    inside = unit < number
    asking = tl.minimum(tl.load(steps + row * STEP + LENGTH), ASKING)
    mine = row * tl.num_programs(1) + tl.program_id(1)
    found = tl.zeros([TILE], tl.float32)
    for head in range(HEADS):
        best = tl.zeros([TILE], tl.float32)
        for first in range(0, asking, ROWS):
            index = first + tl.arange(0, ROWS)
            asks = index < asking
            rows = (mine * HEADS + head) * ASKING + index
            total = _joined(sums, rows, asks, tl.cdiv(number, SPAN), SPANS, PARTS)
            there = asks[:, None] & inside[None, :]
            value = tl.load(
                worth + rows[:, None] * CAPACITY + unit[None, :], mask=there, other=LOWEST
            )
            share = tl.where(there, tl.exp(value - total[:, None]), 0.0)
            best = tl.maximum(best, tl.max(share, axis=0))
        found += best
    tl.store(evidence + mine * CAPACITY + unit, found / HEADS, mask=inside)


def judge_units(
    query: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    recall: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
    scale: float,
    capacity: int,
    num_sets: int,
    most_asking: int,
) -> torch.Tensor:
    """How much the strides of ``R`` requests ask for each of their stored units.

    Args:
        query: ``[num_tokens, H * G, D]`` of the whole step, rotated at cache positions.
        codes: int8 ``[H, rings, unit, D]``, one layer's stored keys before rotation, in steps of
            ``scales``, fp32 ``[H, rings, unit]``; ``rings``: all requests' places.
        steps: int32 ``[R, STEP_COLUMNS]`` step rows.
        recall: int32 ``[>= R, RECALL_COLUMNS]``; rows whose ``HOW`` is not ``JUDGED`` are left out.
        rotation, interleaved: as for ``rotate.gather``.
        scale: of logits.
        capacity: places of a ring.
        num_sets: head sets that keep units of their own.
        most_asking: tokens of a stride that ask, evenly spread, the last among them.

    Returns:
        fp32 ``[R, S, capacity]``: of the units ``BEGIN .. END - 1`` in order; what is behind them
        is not written.
    """
    num_heads, rings, unit, head_size = codes.shape
    num_rows, num_queries = len(steps), query.shape[1]
    check_steps(steps, steps)
    check_recall(recall, steps)
    assert codes.dtype == torch.int8 and codes.is_contiguous() and scales.is_contiguous()
    assert scales.shape == codes.shape[:3] and scales.dtype == torch.float32, scales.shape
    assert query.stride()[1:] == (head_size, 1) and num_queries % num_heads == 0, query.shape
    evidence = scales.new_empty(num_rows, num_sets, capacity)
    if num_rows == 0:
        return evidence
    group, half = num_queries // num_heads, 0 if rotation is None else rotation.shape[2]
    span = span_of(unit)
    spans = triton.cdiv(capacity, span)
    asked = num_rows, num_queries, most_asking
    parts = codes.new_empty(*asked, 2, head_size)
    sizes = scales.new_empty(asked)
    worth = scales.new_empty(*asked, capacity)
    sums = scales.new_empty(*asked, spans)
    ask[(num_rows, num_queries, triton.cdiv(most_asking, QUERY_ROWS))](
        *(query, steps, recall, rotation, parts, sizes, scale, query.stride(0)),
        ASKING=most_asking,
        HEAD=head_size,
        HALF=half,
        INTERLEAVED=interleaved,
        UNIT=unit,
        TILE=QUERY_ROWS,
        num_warps=4,
    )
    queries = min(64, max(16, triton.next_power_of_2(group * most_asking)))
    units, room = tile_of_units(unit)
    _judge[(num_rows, num_heads, spans * triton.cdiv(group * most_asking, queries))](
        *(parts, sizes, codes, scales, steps, recall, worth, sums, rings),
        CAPACITY=capacity,
        SPANS=spans,
        SPAN=span,
        ASKING=most_asking,
        GROUP=group,
        HEAD=head_size,
        QUERIES=queries,
        UNITS=units,
        ROOM=room,
        UNIT=unit,
        STAGES=3,
        num_warps=4,
    )
    _weigh[(num_rows, num_sets, triton.cdiv(capacity, WEIGHED))](
        *(worth, sums, steps, recall, evidence),
        CAPACITY=capacity,
        SPANS=spans,
        SPAN=span,
        ASKING=most_asking,
        HEADS=num_queries // num_sets,
        TILE=WEIGHED,
        PARTS=PARTS,
        ROWS=min(QUERY_ROWS, triton.next_power_of_2(most_asking)),
        num_warps=4,
    )
    return evidence


def asking_reference(length: int, most: int) -> list[int]:
    """Tokens of a stride that ask: all, or evenly spread, the last one among them."""
    return (
        list(range(length))
        if length <= most
        else [(i + 1) * length // most - 1 for i in range(most)]
    )


def evidence_reference(queries: torch.Tensor, keys: torch.Tensor, num_sets: int) -> torch.Tensor:
    """fp64 ``[S, n]``: one request's evidence, literally.

    Args:
        queries: ``[asking, H * G, D]``, turned back by the position at which all keys are judged,
            times the scale of logits.
        keys: ``[H, n, unit, D]`` before rotation, as they were rounded.
    """
    num_heads, num_units, unit, size = keys.shape
    queries, keys = queries.double(), keys.double()
    step = queries.abs().amax(-1, keepdim=True) / (127 * 128)
    queries = torch.where(step > 0, (queries / step).round() * step, 0.0)
    asked = torch.zeros(queries.shape[1], num_units, dtype=torch.float64)
    for head in range(queries.shape[1]):
        rows = keys[head * num_heads // queries.shape[1]].reshape(-1, size)
        for query in queries[:, head]:
            of_units = (rows @ query).softmax(0).view(num_units, unit)
            worth = of_units.amax(1) + of_units.mean(1)
            asked[head] = torch.maximum(asked[head], worth / worth.sum())
    return asked.view(num_sets, -1, num_units).mean(1)
