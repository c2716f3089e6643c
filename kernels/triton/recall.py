# SPDX-License-Identifier: Apache-2.0
"""The judge of recall: how much a request's queries would attend to each stored unit.

Each request has a ring: its ``n``-th evicted unit lies in place ``n`` modulo the ring's size. All
keys are judged at one position, in the middle of the recalled units. Keys and queries have 8 bits
and one scale each (``recall_vectors``), so products are exact integer products on tensor cores.

A query attends to the whole store and to the sinks, and gives a unit the probability of its keys
together. The evidence for a unit is the sum of the squares over the queries, of which the last one
counts ``LAST`` times; the largest over a set's query heads. Rings are divided into spans whose size
depends on the request alone, so results do not depend on the batch.

Exponentials are powers of two: a query's size includes the factor log2(e), and logarithms have
base 2. The GPU has an instruction for these.
"""

from collections.abc import Mapping

import numpy as np
import torch
import triton
import triton.language as tl

from .. import columns
from . import configs
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
MOST_QUERIES = 64
"""Queries per program of the judge."""
SPAN_KEYS, TILE_KEYS = 512, 64
"""Least keys per program of the judge, and keys per iteration of its loop."""
MOST_SPANS = 256
"""Spans of a request. Longer stores have longer spans: every program of ``_weigh`` reads all."""
WEIGHED, PARTS = 128, 64
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
    """Least units per program of the judge."""
    units, room = tile_of_units(unit)
    return max(SPAN_KEYS // (units * room), 1) * units


def warps_of(queries: int, tile: int) -> int:
    """Warps of a program of the judge: few, so that most of a unit's keys are in one thread."""
    return 4 if queries == MOST_QUERIES else max(queries * tile // 2048, 1)


def row_threads(warps: int, device: torch.device) -> int:
    """Threads that share a row of products, as Triton lays them out; only speed depends on it.

    4 if one warp has all keys of a tile, 8 if two share them.
    """
    alone = warps == 1 or (warps == 4 and configs.capability(device) // 10 == 9)
    return 4 if alone else 8


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


@triton.jit
def _span_of(number, SPAN: tl.constexpr, MOST: tl.constexpr):
    """Units per span of a request: a multiple of ``SPAN``, and so many that ``MOST`` suffice."""
    return SPAN * tl.maximum(tl.cdiv(number, SPAN * MOST), 1)


@triton.jit
def _keys_of_columns(TILE: tl.constexpr, THREADS: tl.constexpr):
    """Keys of a tile in the order of the columns of its products.

    A thread holds two neighbouring columns of every ``2 * THREADS``. They get consecutive keys, so
    most of a unit's maximum and sum is computed inside of threads, without exchange between them.
    """
    column = tl.arange(0, TILE)
    thread, pair = column // 2 % THREADS, column // (2 * THREADS)
    return thread * (TILE // THREADS) + pair * 2 + column % 2


@triton.jit
def _by_unit(x, UNITS: tl.constexpr, THREADS: tl.constexpr):
    """Columns ``[n, TILE]`` in the order of keys, ``[n, UNITS, TILE // UNITS]``."""
    ROWS: tl.constexpr = x.shape[0]
    TILE: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [ROWS, TILE // (2 * THREADS), THREADS, 2])
    return tl.reshape(tl.permute(x, [0, 2, 1, 3]), [ROWS, UNITS, TILE // UNITS])


@triton.jit
def _added(top, total, value):
    """``total * 2 ** top + 2 ** value`` as a new top and total."""
    higher = tl.maximum(top, value)
    return higher, total * tl.exp2(top - higher) + tl.exp2(value - higher)


@triton.jit
def _summed(top, total):
    """Sums over columns of ``total * 2 ** top``, as a top and a total of each row."""
    most = tl.max(top, axis=1)
    return most, tl.sum(total * tl.exp2(top - most[:, None]), axis=1)


@triton.jit(do_not_specialize=["rings"], do_not_specialize_on_alignment=["evidence"])  # by row
def _judge(
    asked,
    sizes,
    codes,
    scales,
    steps,
    recall,
    of_units,
    sums,
    evidence,
    rings,
    CAPACITY: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
    ASKING: tl.constexpr,
    NUM_SETS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
    QUERIES: tl.constexpr,
    UNITS: tl.constexpr,
    ROOM: tl.constexpr,
    UNIT: tl.constexpr,
    THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write logarithms of each unit's sum of powers of two, and of the sums over a span.

    ``evidence`` is set to zero.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    columns = recall + row * RECALL
    if tl.load(columns + HOW) != JUDGED:
        return
    oldest = tl.load(columns + BEGIN)
    number = tl.load(columns + END) - oldest
    # Queries that share keys run at about the same time, and find them in the cache.
    TILES: tl.constexpr = (GROUP * ASKING + QUERIES - 1) // QUERIES
    span = tl.program_id(0) // TILES
    length = _span_of(number, SPAN, MOST)
    begin = span * length
    if begin >= number:
        return
    end = tl.minimum(begin + length, number)
    if (head < NUM_SETS) & (tl.program_id(0) % TILES == 0):
        least = evidence + (row * NUM_SETS + head) * CAPACITY
        for first in range(begin, end, 128):
            number_of = first + tl.arange(0, 128)
            tl.store(least + number_of, tl.zeros([128], tl.float32), mask=number_of < end)
    member = tl.program_id(0) % TILES * QUERIES + tl.arange(0, QUERIES)
    asks = member % ASKING < tl.load(steps + row * STEP + LENGTH)
    asks = asks & (member < GROUP * ASKING)
    mine = (row * tl.num_programs(1) + head) * (GROUP * ASKING) + member
    query = _codes(asked + mine * HEAD, asks, 0, FIRST)
    if FIRST < HEAD:  # latent rows
        rest = _codes(asked + mine * HEAD, asks, FIRST, HEAD)
    size = tl.load(sizes + mine, mask=asks, other=0.0)
    nth = _keys_of_columns(UNITS * ROOM, THREADS)
    unit, key = nth // ROOM, nth % ROOM
    real = (tl.arange(0, ROOM) < UNIT)[None, None, :]
    ring = head.to(tl.int64) * rings + tl.load(columns + RING)
    top = tl.full([QUERIES, UNITS], LOWEST, tl.float32)
    total = tl.zeros([QUERIES, UNITS], tl.float32)
    for first in tl.range(begin, end, UNITS, num_stages=STAGES):
        place = (oldest + first) % CAPACITY
        wraps = tl.where(unit < CAPACITY - place, 0, CAPACITY)
        inside = (unit < end - first) & (key < UNIT)
        at = (ring + place) * UNIT + ((unit - wraps) * UNIT + key)
        keys = tl.trans(_codes(codes + at * HEAD, inside, 0, FIRST))
        step = tl.load(scales + at, mask=inside, other=0.0)
        products = tl.dot(query, keys)
        if FIRST < HEAD:
            latents = _codes(codes + at * HEAD, inside, FIRST, HEAD)
            products += tl.dot(rest, tl.trans(latents))
        logits = products.to(tl.float32) * step[None, :]  # the query's size comes later
        logits = _by_unit(logits, UNITS, THREADS)
        if ROOM != UNIT:
            logits = tl.where(real, logits, LOWEST)
        most = tl.max(logits, axis=2) * size[:, None]
        weights = tl.exp2(logits * size[:, None, None] - most[:, :, None])
        if ROOM != UNIT:  # LOWEST is no less than others if the size is 0
            weights = tl.where(real, weights, 0.0)
        number_of = first + tl.arange(0, UNITS)
        there = (number_of < end)[None, :]
        value = tl.where(there, most + tl.log2(tl.sum(weights, axis=2)), LOWEST)
        out = of_units + mine[:, None] * CAPACITY + number_of[None, :]
        tl.store(out, value, mask=asks[:, None] & there)
        top, total = _added(top, total, value)
    top, total = _summed(top, total)
    tl.store(sums + mine * SPANS + span, top + tl.log2(total), mask=asks)


@triton.jit
def _joined(sums, rows, asks, others, spans, SPANS: tl.constexpr, PARTS: tl.constexpr):
    """Sums ``total * 2 ** top`` over all spans and ``others``, for some rows."""
    top = tl.full([rows.shape[0], PARTS], LOWEST, tl.float32)
    total = tl.zeros([rows.shape[0], PARTS], tl.float32)
    for first in range(0, spans, PARTS):
        span = first + tl.arange(0, PARTS)
        there = asks[:, None] & (span < spans)[None, :]
        value = tl.load(sums + rows[:, None] * SPANS + span[None, :], mask=there, other=LOWEST)
        top, total = _added(top, total, value)
    top, total = _summed(top, total)
    return _added(top, total, others)


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
    MOST: tl.constexpr,
    ASKING: tl.constexpr,
    HEADS: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Raise ``evidence`` to the most that any of ``AT_ONCE`` of a set's heads asks for a unit.

    A head asks for the squares of the probabilities that its queries give the unit, together. One
    program for all heads of a set would take them in turn, which is slow for a single request.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = recall + row * RECALL
    if tl.load(columns + HOW) != JUDGED:
        return
    number = tl.load(columns + END) - tl.load(columns + BEGIN)
    unit = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if tl.program_id(2) * TILE >= number:
        return
    spans = tl.cdiv(number, _span_of(number, SPAN, MOST))
    asking = tl.minimum(tl.load(steps + row * STEP + LENGTH), ASKING)
    mine = row * (tl.num_programs(1) // SHARES) + tl.program_id(1) // SHARES
    to_sinks += mine * (HEADS * ASKING)
    sums += mine * (HEADS * ASKING * SPANS)
    of_units += mine * (HEADS * ASKING * CAPACITY)
    nth = tl.arange(0, AT_ONCE * ROWS)
    head = tl.program_id(1) % SHARES * AT_ONCE + nth // ROWS
    asked = tl.zeros([AT_ONCE * ROWS, TILE], tl.float32)
    for first in range(0, asking, ROWS):
        index = first + nth % ROWS
        asks = (head < HEADS) & (index < asking)
        rows = head * ASKING + index
        others = tl.load(to_sinks + rows, mask=asks, other=LOWEST)
        top, total = _joined(sums, rows, asks, others, spans, SPANS, PARTS)
        times = tl.where(index == asking - 1, LAST, 1.0) / (total * total)
        # Wider loads read past the request's units; what comes of that is not stored.
        value = tl.load(
            of_units + rows.to(tl.int64)[:, None] * CAPACITY + unit[None, :],
            mask=asks[:, None] & (unit < CAPACITY)[None, :],
            other=LOWEST,
        )
        share = tl.exp2(value - top[:, None])
        asked += share * share * tl.where(asks, times, 0.0)[:, None]
    of_heads = tl.max(tl.sum(tl.reshape(asked, [AT_ONCE, ROWS, TILE]), axis=1), axis=0)
    # The bits of non-negative numbers sort like the numbers.
    target = (evidence + mine * CAPACITY + unit).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(target, of_heads.to(tl.int32, bitcast=True), mask=unit < number, sem="relaxed")


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
        most = MOST_QUERIES // 2 if configs.fills_memory(head_size, layer.latent) else MOST_QUERIES
        queries = min(most, max(16, triton.next_power_of_2(group * most_asking)))
        units, room = tile_of_units(unit)
        warps = warps_of(queries, units * room)
        # Otherwise ptxas may spill to fit more blocks per multiprocessor.
        registers = {"maxnreg": 255} if warps < 4 else {}
        rows = min(QUERY_ROWS, triton.next_power_of_2(most_asking))
        heads, heads_at_once = num_queries // num_sets, QUERY_ROWS // rows
        shares = triton.cdiv(heads, heads_at_once)
        self._grids = (
            (num_queries, triton.cdiv(most_asking, QUERY_ROWS)),
            # The most programs, of which only the first axis may have more than 65,535.
            (spans * triton.cdiv(group * most_asking, queries), num_heads),
            (num_sets * shares, triton.cdiv(capacity, WEIGHED)),
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
        shared = {
            "CAPACITY": capacity,
            "SPANS": spans,
            "SPAN": span,
            "MOST": MOST_SPANS,
            "ASKING": most_asking,
        }
        self._judge = Launcher(
            _judge,
            codes=codes,
            scales=scales,
            rings=rings,
            **shared,
            NUM_SETS=num_sets,
            GROUP=group,
            HEAD=head_size,
            FIRST=first,
            QUERIES=queries,
            UNITS=units,
            ROOM=room,
            UNIT=unit,
            THREADS=row_threads(warps, codes.device),
            STAGES=3,
            num_warps=warps,
            **registers,
        )
        self._weigh = Launcher(
            _weigh,
            **shared,
            HEADS=heads,
            SHARES=shares,
            TILE=WEIGHED,
            PARTS=PARTS,
            ROWS=rows,
            AT_ONCE=heads_at_once,
            num_warps=4,
            maxnreg=128,  # otherwise ptxas may spill to fit more blocks per multiprocessor
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
                evidence=part.evidence,
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
