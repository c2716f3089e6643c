# SPDX-License-Identifier: Apache-2.0
"""The judge of recall: how much a request's queries would attend to each stored unit.

Each request has a ring: its ``n``-th evicted unit lies in place ``n`` modulo the ring's size. All
keys are judged at one position, in the middle of the recalled units. Keys and queries have 8 bits
and one scale each (``recall_vectors``), so products are exact integer products on tensor cores.

A query attends to the whole store and to the sinks, and gives a unit the probability of its keys
together. The evidence for a unit is the sum of the squares over the queries, of which the last one
counts ``LAST`` times; the largest over a set's query heads. Rings are divided into spans of a fixed
size, so results do not depend on the batch.
"""

from collections.abc import Mapping

import numpy as np
import torch
import triton
import triton.language as tl

from .. import columns
from .attend_tiles import LOWEST
from .cached import CachedLayer
from .launch import Launcher
from .recall_columns import BEGIN, END, HOW, JUDGED, RECALL, RING
from .recall_rows import Judged, RecallRows
from .recall_vectors import ask
from .shapes import Shapes
from .strides import Tokens
from .tiles import LENGTH, STEP, first_part

QUERY_ROWS = 16
"""Queries of one head per program of ``ask``."""
SPAN_KEYS, TILE_KEYS = 512, 64
"""Keys per program of the judge, and per iteration of its loop."""
WEIGHED, PARTS = 64, 64
"""Units per program of ``_weigh``, and spans that it adds up at a time."""
LAST = tl.constexpr(8.0)
"""Times that a head's last query counts."""
SCRATCH = "asked", "sizes", "to_sinks", "of_units", "sums"
"""Tensors of ``judged_shapes`` that nothing reads after the judge."""


def tile_of_units(unit: int) -> tuple[int, int]:
    """Units per iteration of the judge's loop, and the padded keys of each."""
    room = triton.next_power_of_2(unit)
    assert unit <= columns.MOST_UNIT, f"units of {unit} tokens"
    return max(TILE_KEYS // room, 1), room


def span_of(unit: int) -> int:
    """Units per program of the judge."""
    units, room = tile_of_units(unit)
    return max(SPAN_KEYS // (units * room), 1) * units


@triton.constexpr_function
def _integers(channels):
    """Channels of a tile of 8-bit numbers: a power of two, and enough for a tensor core."""
    return max(32, triton.next_power_of_2(channels))


@triton.jit
def _codes(rows, inside, FROM: tl.constexpr, TO: tl.constexpr):
    """Channels ``[FROM, TO)`` of int8 rows, ``[n, _integers(TO - FROM)]``, zero outside."""
    channel = FROM + tl.arange(0, _integers(TO - FROM))
    there = inside[:, None] & (channel < TO)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=there, other=0)


@triton.jit(do_not_specialize=["rings"])
def _judge(
    asked,
    sizes,
    codes,
    scales,
    steps,
    recall,
    of_units,
    sums,
    rings,
    CAPACITY: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    ASKING: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
    QUERIES: tl.constexpr,
    UNITS: tl.constexpr,
    ROOM: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write logarithms of each unit's sum of exponentials, and of the sums over a span."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    columns = recall + row * RECALL
    if tl.load(columns + HOW) != JUDGED:
        return
    oldest = tl.load(columns + BEGIN)
    number = tl.load(columns + END) - oldest
    span = tl.program_id(0) % SPANS
    begin = span * SPAN
    if begin >= number:
        return
    ring = tl.load(columns + RING)
    member = tl.program_id(0) // SPANS * QUERIES + tl.arange(0, QUERIES)
    asks = member % ASKING < tl.load(steps + row * STEP + LENGTH)
    asks = asks & (member < GROUP * ASKING)
    mine = (row * tl.num_programs(1) + head) * (GROUP * ASKING) + member
    query = _codes(asked + mine * HEAD, asks, 0, FIRST)
    if FIRST < HEAD:  # latent rows
        rest = _codes(asked + mine * HEAD, asks, FIRST, HEAD)
    size = tl.load(sizes + mine, mask=asks, other=0.0)
    place = tl.arange(0, UNITS * ROOM)
    base = head.to(tl.int64) * rings
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + SPAN, number), UNITS, num_stages=STAGES):
        unit = first + place // ROOM
        inside = (unit < number) & (place % ROOM < UNIT)
        key = (base + ring + (oldest + unit) % CAPACITY) * UNIT + place % ROOM
        keys = tl.trans(_codes(codes + key * HEAD, inside, 0, FIRST))
        step = tl.load(scales + key, mask=inside, other=0.0)
        products = tl.dot(query, keys)
        if FIRST < HEAD:
            latents = _codes(codes + key * HEAD, inside, FIRST, HEAD)
            products += tl.dot(rest, tl.trans(latents))
        logits = products.to(tl.float32) * (size[:, None] * step[None, :])
        logits = tl.where(inside[None, :], logits, LOWEST)
        logits = tl.reshape(logits, [QUERIES, UNITS, ROOM])
        most = tl.max(logits, axis=2)
        added = tl.sum(tl.exp(logits - most[:, :, None]), axis=2)
        units = first + tl.arange(0, UNITS)
        there = units < number
        value = tl.where(there[None, :], most + tl.log(added), LOWEST)
        out = of_units + mine[:, None] * CAPACITY + units[None, :]
        tl.store(out, value, mask=asks[:, None] & there[None, :])
        higher = tl.maximum(top, tl.max(value, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
        top = higher
    tl.store(sums + mine * SPANS + span, top + tl.log(total), mask=asks)


@triton.jit
def _joined(sums, rows, asks, spans, SPANS: tl.constexpr, PARTS: tl.constexpr):
    """Logarithms of the sums over all spans, for some rows."""
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


@triton.jit(do_not_specialize_on_alignment=["evidence"])  # by row
def _weigh(
    of_units,
    sums,
    to_sinks,
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
    """Write the most that any of a set's heads asks for a unit.

    A head asks for the squares of the probabilities that its queries give the unit, together.
    """
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
        of_head = tl.zeros([TILE], tl.float32)
        for first in range(0, asking, ROWS):
            index = first + tl.arange(0, ROWS)
            asks = index < asking
            rows = (mine * HEADS + head) * ASKING + index
            total = _joined(sums, rows, asks, tl.cdiv(number, SPAN), SPANS, PARTS)
            others = tl.load(to_sinks + rows, mask=asks, other=LOWEST)
            higher = tl.maximum(total, others)
            total = higher + tl.log(tl.exp(total - higher) + tl.exp(others - higher))
            there = asks[:, None] & inside[None, :]
            value = tl.load(
                of_units + rows[:, None] * CAPACITY + unit[None, :], mask=there, other=LOWEST
            )
            share = tl.where(there, tl.exp(value - total[:, None]), 0.0)
            times = tl.where(index == asking - 1, LAST, 1.0)
            of_head += tl.sum(times[:, None] * share * share, axis=0)
        found = tl.maximum(found, of_head)
    tl.store(evidence + mine * CAPACITY + unit, found, mask=inside)


def judged_shapes(
    num_rows: int,
    at_once: int,
    asking: int,
    num_queries: int,
    num_sets: int,
    capacity: int,
    unit: int,
    head_size: int,
) -> Shapes:
    """Shapes of what the judge writes.

    Args:
        num_rows: strides.
        at_once: most of them that scratch memory has room for.
        asking: queries of a stride that judge.
        num_queries: query heads; ``num_sets``: sets of them that select together.
        capacity: places of a ring.
        unit: tokens of a unit.
        head_size: channels of a query.
    """
    each = min(num_rows, at_once), num_queries, asking
    return {
        "evidence": ((num_rows, num_sets, capacity), torch.float32),
        "asked": ((*each, head_size), torch.int8),
        "sizes": (each, torch.float32),
        "to_sinks": (each, torch.float32),
        "of_units": ((*each, capacity), torch.float32),
        "sums": ((*each, triton.cdiv(capacity, span_of(unit))), torch.float32),
    }


class Judge:
    """Evidence of requests' queries for each of their stored units, in one layer.

    Args:
        codes: int8 ``[H, rings, unit, D]``, the layer's stored keys before rotation, in units of
            ``scales``, fp32 ``[H, rings, unit]``; ``rings`` counts the places of all rings.
        layer: the requests' pages, which hold the sinks.
        capacity: places of a ring.
        num_queries: query heads, ``H * G``.
        most_asking: most queries per stride, evenly spaced, the last one included.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        layer: CachedLayer,
        capacity: int,
        num_queries: int,
        most_asking: int,
    ) -> None:
        num_heads, rings, unit, head_size = codes.shape
        assert codes.dtype == torch.int8 and codes.is_contiguous() and scales.is_contiguous()
        assert scales.shape == codes.shape[:3] and scales.dtype == torch.float32, scales.shape
        assert num_queries % num_heads == 0, (num_queries, num_heads)
        group, num_sets = num_queries // num_heads, layer.num_sets
        first = first_part(head_size, layer.value_size, layer.rows["ROW"])
        of_pages = ("kv", "scales", "page_stride", "word_stride", "CODE", "OF_ROWS")
        span = span_of(unit)
        self._sizes = {
            "asking": most_asking,
            "num_queries": num_queries,
            "num_sets": num_sets,
            "capacity": capacity,
            "unit": unit,
            "head_size": head_size,
        }
        spans = triton.cdiv(capacity, span)
        most = 64 if head_size <= 512 else 32  # by shared memory
        queries = min(most, max(16, triton.next_power_of_2(group * most_asking)))
        units, room = tile_of_units(unit)
        self._grids = (
            (num_queries, triton.cdiv(most_asking, QUERY_ROWS)),
            # The most programs, of which only the first axis may have more than 65,535.
            (spans * triton.cdiv(group * most_asking, queries), num_heads),
            (num_sets, triton.cdiv(capacity, WEIGHED)),
        )
        self._ask = Launcher(
            ask,
            **{name: layer.pages[name] for name in of_pages},
            **layer.turning,
            scale=layer.scale,
            ASKING=most_asking,
            GROUP=group,
            HEAD=head_size,
            FIRST=first,
            ROW=layer.rows["ROW"],
            PAGE=layer.page,
            UNIT=unit,
            TILE=QUERY_ROWS,
            num_warps=4,
        )
        shared = {"CAPACITY": capacity, "SPANS": spans, "SPAN": span, "ASKING": most_asking}
        self._judge = Launcher(
            _judge,
            codes=codes,
            scales=scales,
            rings=rings,
            **shared,
            GROUP=group,
            HEAD=head_size,
            FIRST=first,
            QUERIES=queries,
            UNITS=units,
            ROOM=room,
            UNIT=unit,
            STAGES=3,
            num_warps=4,
        )
        self._weigh = Launcher(
            _weigh,
            **shared,
            HEADS=num_queries // num_sets,
            TILE=WEIGHED,
            PARTS=PARTS,
            ROWS=min(QUERY_ROWS, triton.next_power_of_2(most_asking)),
            num_warps=4,
        )

    def shapes(self, num_rows: int, at_once: int) -> Shapes:
        """Of ``evidence``, and of scratch memory for so many rows at once."""
        return judged_shapes(num_rows, at_once, **self._sizes)

    def parts(
        self,
        steps: torch.Tensor,
        table: torch.Tensor,
        recall: torch.Tensor,
        memory: Mapping[str, torch.Tensor],
        judged: np.ndarray | None = None,
    ) -> list[Judged]:
        """For ``RecallRows``: as many rows each as ``memory`` has room for, which all use.

        Args:
            memory: tensors of ``shapes``.
            judged: bool ``[R]``, which rows may have ``HOW`` at ``JUDGED``; None: all. A part
                without any is left out.
        """
        scratch = {name: memory[name] for name in SCRATCH}
        at_once, parts = len(memory["asked"]), []
        for first in range(0, len(steps), max(at_once, 1)):
            rows = slice(first, first + at_once)
            if judged is None or judged[rows].any():
                own = steps[rows], table[rows], recall[rows], memory["evidence"][rows]
                each = {name: one[: len(own[0])] for name, one in scratch.items()}
                parts.append(Judged(*own, **each))
        return parts

    def __call__(self, tokens: Tokens, rows: RecallRows) -> None:
        """Write ``evidence``: units ``BEGIN .. END - 1`` in order; the rest is not written."""
        for part in rows.parts:
            asking, judging, weighing = self._grids
            asks, weighs = (part.num_rows, *asking), (part.num_rows, *weighing)
            judges = *judging, part.num_rows
            shared = {"steps": part.steps, "recall": part.recall}
            self._ask(
                asks,
                (tokens.variant, part.variant),
                query=tokens.query,
                asked=part.asked,
                sizes=part.sizes,
                to_sinks=part.to_sinks,
                table=part.table,
                query_stride=tokens.places[0],
                table_stride=part.table_place,
                **shared,
            )
            self._judge(
                judges,
                part.variant,
                asked=part.asked,
                sizes=part.sizes,
                of_units=part.of_units,
                sums=part.sums,
                **shared,
            )
            self._weigh(
                weighs,
                part.variant,
                of_units=part.of_units,
                sums=part.sums,
                to_sinks=part.to_sinks,
                evidence=part.evidence,
                **shared,
            )
