# SPDX-License-Identifier: Apache-2.0
"""Scores after a token's query, from the raw logits that ``attend`` left.

A score is an exponential average (``decay`` gamma, ``weight`` 1 - gamma) or a sum (both 1) of the
attention probabilities that a token receives, reduced over the query heads of its head set.
``merge.py`` updates them as it merges the parts of attention. Tensor-parallel ranks that decide
together exchange masses or logits first, and launch what is here.
Source: Cascading KV Cache (https://arxiv.org/abs/2406.17808), token selection; H2O
(https://arxiv.org/abs/2306.14048) for the sum.
"""

import torch
import triton
import triton.language as tl

from .launch import Launcher
from .singles import Singles
from .tiles import (
    CACHED,
    DECAY,
    NEVER,
    OLD_SLOTS,
    STEP,
    STREAM,
    WEIGHT,
    check_steps,
    reduce_heads,
    slot_tile,
)

REDUCTIONS = "mean", "max", "median"


@triton.jit
def _own_mass(own, norm, head, real, HEADS: tl.constexpr, REDUCTION: tl.constexpr):
    """``[1]``: the new token's probability, reduced over heads."""
    mine = tl.exp(tl.load(own + head, mask=real, other=float("-inf")) - norm)
    return reduce_heads(mine[:, None], HEADS, REDUCTION)


@triton.jit
def _mass_of_slots(
    logits,
    own,
    norm,
    head,
    real,
    place,
    slot,
    inside,
    step,
    logits_stride,
    HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``[n]``: probabilities of slots with ranks ``place`` (or units), reduced over heads.

    Undefined for slots without a rank.
    """
    there = real[:, None] & inside[None, :]  # not those with a rank: that would be one more wait
    source = logits + head[:, None] * logits_stride + (slot * PARTS)[None, :]
    probs = tl.zeros(there.shape, tl.float32)
    for part in tl.static_range(PARTS):
        raw = tl.load(source + part, mask=there, other=float("-inf"))
        probs += tl.exp(raw - norm[:, None])
    if UNIT > 1:  # a token that joins a unit adds its own probability to the unit's
        offset = tl.load(step + STREAM) % UNIT
        filling = tl.load(step + CACHED) // UNIT
        joined = place == tl.where(offset > 0, filling, NEVER)
        mine = tl.exp(tl.load(own + head, mask=real, other=float("-inf")) - norm)
        probs += tl.where(joined[None, :], mine[:, None], 0.0)
    return reduce_heads(probs, HEADS, REDUCTION)


@triton.jit
def score_tile(
    logits,
    own,
    norm,
    masses,
    rank,
    score,
    table,
    step,
    new_score,
    head,
    real,
    head_set,
    tile,
    slots,
    decay,
    weight,
    word_stride,
    logits_stride,
    HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """A tile of a head set's scores from logits; or ``LEAVES``: of their masses only.

    Without logits, scores from masses. The first tile's program also has the new token.
    """
    one = tl.arange(0, 1)
    if tile == 0:
        if logits is not None:
            mine = _own_mass(own, norm, head, real, HEADS, REDUCTION)
        else:
            mine = tl.load(masses + logits_stride // PARTS + one)
        if LEAVES:
            tl.store(masses + logits_stride // PARTS + one, mine)
        else:
            tl.store(new_score + one, mine * weight)
    if tile * TILE < slots:
        slot, inside, _, word = slot_tile(
            table, tile * TILE, slots, head_set, word_stride, PAGE, TILE
        )
        place = tl.load(rank + word, mask=inside, other=-1)
        valid = place >= 0
        if logits is not None:
            mass = _mass_of_slots(
                logits=logits,
                own=own,
                norm=norm,
                head=head,
                real=real,
                place=place,
                slot=slot,
                inside=inside,
                step=step,
                logits_stride=logits_stride,
                HEADS=HEADS,
                REDUCTION=REDUCTION,
                UNIT=UNIT,
                PARTS=PARTS,
            )
        else:
            mass = tl.load(masses + slot, mask=valid, other=0.0)
        if LEAVES:
            tl.store(masses + slot, tl.where(valid, mass, 0.0), mask=inside)
        else:
            old = tl.load(score + word, mask=inside, other=0.0)
            tl.store(score + word, decay * old + weight * mass, mask=valid)


@triton.jit
def _update(
    logits,
    own,
    lse,
    masses,
    rank,
    score,
    table,
    steps,
    new_score,
    word_stride,
    table_stride,
    logits_stride,
    NUM_QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """A program per row, head set and tile of its slots."""
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    step = steps + row * STEP
    if tl.load(step + STREAM) < 0:
        return
    member = tl.arange(0, triton.next_power_of_2(HEADS))
    real = member < HEADS
    head = row * NUM_QUERIES + head_set * HEADS + member
    norm = None
    if logits is not None:
        norm = tl.load(lse + head, mask=real, other=0.0)
    if masses is not None:
        masses += row * (logits_stride // PARTS + 1)
    if new_score is not None:
        new_score += row * tl.num_programs(1) + head_set
    score_tile(
        logits=logits,
        own=own,
        norm=norm,
        masses=masses,
        rank=rank,
        score=score,
        table=table + row * table_stride,
        step=step,
        new_score=new_score,
        head=head,
        real=real,
        head_set=head_set,
        tile=tl.program_id(2),
        slots=tl.load(step + OLD_SLOTS) // UNIT,
        decay=tl.load(step + DECAY).to(tl.float32, bitcast=True),
        weight=tl.load(step + WEIGHT).to(tl.float32, bitcast=True),
        word_stride=word_stride,
        logits_stride=logits_stride,
        HEADS=HEADS,
        REDUCTION=REDUCTION,
        PAGE=PAGE,
        TILE=TILE,
        UNIT=UNIT,
        PARTS=PARTS,
        LEAVES=LEAVES,
    )


def update(
    logits: torch.Tensor,
    own: torch.Tensor,
    lse: torch.Tensor,
    rank: torch.Tensor,
    score: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    reduction: str,
    unit: int = 1,
) -> torch.Tensor:
    """Scores after one query: ``decay * score + weight * reduced probability``.

    Decay and weight are each request's own, in its step row.

    Args:
        logits: fp32 ``[B, Hq, N]`` by slot, from ``attend``; of units of several slots, by part
            of a unit. Under tensor parallelism and one head set, those of all ranks, and so
            ``own`` and ``lse``.
        own: fp32 ``[B, Hq]``, the new tokens' logits.
        lse: fp32 ``[B, Hq]``, from ``merge``.
        rank, score: ``Pages`` views; ``score`` is written where a slot holds a token.
        reduction: over the query heads of a set: ``mean``, ``max`` or ``median``.
        unit: slots that share one rank and score.

    Returns:
        fp32 ``[B, S]``: the new tokens' scores, which are those of the units that they open, if
        they do; not written in rows that are padding.
    """
    check_steps(steps, table)
    assert reduction in REDUCTIONS, reduction
    assert logits.is_contiguous() and own.is_contiguous() and lse.is_contiguous()
    (num_rows, num_queries, num_logits), (num_sets, page) = logits.shape, rank.shape[1:]
    num_places = table.shape[1] * page
    assert num_queries % num_sets == 0 and num_logits % num_places == 0, logits.shape
    new_score = lse.new_empty(num_rows, num_sets)
    if num_rows == 0:
        return new_score
    heads = num_queries // num_sets
    tile = _tile_of(heads)
    _update[(num_rows, num_sets, triton.cdiv(num_places, tile))](
        logits=logits,
        own=own,
        lse=lse,
        masses=None,
        rank=rank,
        score=score,
        table=table,
        steps=steps,
        new_score=new_score,
        word_stride=rank.stride(0),
        table_stride=table.stride(0),
        logits_stride=num_logits,
        NUM_QUERIES=num_queries,
        HEADS=heads,
        REDUCTION=reduction,
        PAGE=page,
        TILE=tile,
        UNIT=unit,
        PARTS=num_logits // num_places,
        LEAVES=False,
        num_warps=4,
    )
    return new_score


class HeadMasses:
    """Attention masses from one tensor-parallel rank's heads, for scores of one head set.

    Args:
        rank: a ``Pages`` view.
        num_queries: query heads of the rank.
        reduction: ``mean`` or ``max``, over these heads and then over ranks.
        unit: slots that share one rank and score.
    """

    def __init__(self, rank: torch.Tensor, num_queries: int, reduction: str, unit: int = 1) -> None:
        assert reduction in ("mean", "max") and rank.shape[1] == 1, (reduction, rank.shape)
        self._page = rank.shape[2]
        self._tile = _tile_of(num_queries)
        self._launch = Launcher(
            _update,
            rank=rank,
            score=None,
            new_score=None,
            word_stride=rank.stride(0),
            NUM_QUERIES=num_queries,
            HEADS=num_queries,
            REDUCTION=reduction,
            PAGE=self._page,
            TILE=self._tile,
            UNIT=unit,
            LEAVES=True,
            num_warps=4,
        )

    def __call__(self, singles: Singles) -> None:
        """Write ``masses`` from ``logits``, ``own`` and ``lse``."""
        places = _places(singles, self._page)
        self._launch(
            (singles.num_rows, 1, -(-places // self._tile)),
            singles.variant,
            logits=singles.logits,
            own=singles.own,
            lse=singles.lse,
            masses=singles.masses,
            table=singles.table,
            steps=singles.steps,
            table_stride=singles.table_place,
            logits_stride=singles.num_masses,
            PARTS=singles.num_masses // places,
        )


class MassScores:
    """Updates scores from masses of ``HeadMasses``, reduced over all ranks.

    Args:
        rank, score: ``Pages`` views; ``score`` is written where a slot holds a token.
        unit: slots that share one rank and score.
    """

    def __init__(self, rank: torch.Tensor, score: torch.Tensor, unit: int = 1) -> None:
        assert rank.shape[1] == 1, rank.shape
        self._page, self._tile = rank.shape[2], _tile_of(1)
        self._launch = Launcher(
            _update,
            logits=None,
            own=None,
            lse=None,
            rank=rank,
            score=score,
            word_stride=rank.stride(0),
            NUM_QUERIES=1,
            HEADS=1,
            REDUCTION="mean",
            PAGE=self._page,
            TILE=self._tile,
            UNIT=unit,
            PARTS=1,
            LEAVES=False,
            num_warps=4,
        )

    def __call__(self, singles: Singles) -> None:
        """Write ``score`` and ``new_score`` from ``masses``."""
        places = _places(singles, self._page)
        self._launch(
            (singles.num_rows, 1, -(-places // self._tile)),
            singles.variant,
            masses=singles.masses,
            table=singles.table,
            steps=singles.steps,
            new_score=singles.new_score,
            table_stride=singles.table_place,
            logits_stride=places,
        )


def _places(singles: Singles, page: int) -> int:
    """Slots, or units of slots, of a block table's pages."""
    places, masses = singles.num_pages * page, singles.masses
    assert masses is not None and masses.shape[1] == places + 1, (masses, places)
    return places


def _tile_of(heads: int) -> int:
    """Slots of a program that reduces so many heads."""
    return 64 if heads > 8 else 128
