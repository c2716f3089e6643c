# SPDX-License-Identifier: Apache-2.0
"""Merges the parts that ``attend`` left of each head's attention, and updates scores beside it.

A launch and its first loads take longer than the arithmetic. So scores share the launch, and their
programs compute again the log-sum-exps that they need.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .configs import MAX_SPLITS, MERGED, merge_config
from .launch import Launcher
from .scores import REDUCTIONS, score_tile
from .singles import Singles
from .strides import Tokens
from .tiles import DECAY, OLD_SLOTS, STEP, STREAM, WEIGHT, padded


@triton.jit
def _norm(partial_lse, sinks, row, head, real, splits, HEADS: tl.constexpr, MOST: tl.constexpr):
    """fp32 ``[n]``: log-sum-exps of query heads ``head`` of ``HEADS`` over all parts and sinks."""
    split = tl.arange(0, MOST)
    place = ((row * HEADS + head) * splits)[:, None] + split[None, :]
    there = real[:, None] & (split < splits)[None, :]
    parts = tl.load(partial_lse + place, mask=there, other=float("-inf"))
    top = tl.max(parts, axis=1)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=float("-inf"))
        top = tl.maximum(top, sink)
    top = tl.where(real, top, 0.0)
    total = tl.sum(tl.exp(parts - top[:, None]), axis=1)
    if sinks is not None:  # one more logit without a value
        total += tl.exp(sink - top)
    return top + tl.log(tl.where(real, total, 1.0))


@triton.jit
def _parts(partial, place, split, splits, channel, inside, HEAD: tl.constexpr):
    """``[n, padded(HEAD)]``: what parts ``split`` of a head's attention left; 0 behind the last."""
    there = (split < splits)[:, None] & inside[None, :]
    rows = partial + (place + split)[:, None] * HEAD + channel[None, :]
    return tl.load(rows, mask=there, other=0.0)


@triton.jit
def _merge_head(
    partial,
    partial_lse,
    sinks,
    output,
    row,
    index,
    padding,
    output_stride,
    splits,
    NUM_QUERIES: tl.constexpr,
    HEAD: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Write one query head's output, zeros in padding; returns its log-sum-exp.

    The first parts are loaded before their weights are known: loads that wait for each other would
    take most of this kernel's time.
    """
    place = (row * NUM_QUERIES + index) * splits
    channel = tl.arange(0, padded(HEAD))
    inside = channel < HEAD
    some = tl.arange(0, FIRST)
    rows = _parts(partial, place, some, splits, channel, inside, HEAD)
    weight = tl.load(partial_lse + place + some, mask=some < splits, other=float("-inf"))
    split = tl.arange(0, MOST)
    parts = tl.load(partial_lse + place + split, mask=split < splits, other=float("-inf"))
    top = tl.max(parts, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + index)
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp(parts - top), axis=0)
    if sinks is not None:  # one more logit without a value
        total += tl.exp(sink - top)
    merged = tl.sum(rows * tl.exp(weight - top)[:, None], axis=0)
    for first in range(FIRST, splits, FIRST):
        some = first + tl.arange(0, FIRST)
        rows = _parts(partial, place, some, splits, channel, inside, HEAD)
        weight = tl.load(partial_lse + place + some, mask=some < splits, other=float("-inf"))
        merged += tl.sum(rows * tl.exp(weight - top)[:, None], axis=0)
    target = output + row * output_stride + index * HEAD + channel
    merged = tl.where(padding, 0.0, merged / total)
    tl.store(target, merged.to(output.dtype.element_ty), mask=inside)
    return top + tl.log(total)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial,
    partial_lse,
    steps,
    sinks,
    output,
    lse,
    output_stride,
    splits,
    NUM_QUERIES: tl.constexpr,
    HEAD: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    padding = tl.load(steps + row * STEP + STREAM) < 0
    norm = _merge_head(
        partial=partial,
        partial_lse=partial_lse,
        sinks=sinks,
        output=output,
        row=row,
        index=index,
        padding=padding,
        output_stride=output_stride,
        splits=splits,
        NUM_QUERIES=NUM_QUERIES,
        HEAD=HEAD,
        MOST=MOST,
        FIRST=FIRST,
    )
    tl.store(lse + row * NUM_QUERIES + index, norm)


@triton.jit(do_not_specialize=["splits", "tiles"])
def _merge_scored(
    partial,
    partial_lse,
    steps,
    sinks,
    output,
    logits,
    own,
    rank,
    score,
    table,
    new_score,
    output_stride,
    splits,
    tiles,
    word_stride,
    table_stride,
    logits_stride,
    NUM_QUERIES: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
    REDUCTION: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program per query head merges, and one per tile of a head set's slots updates scores.

    Neither needs what the other writes, so they share a launch.
    """
    HEADS: tl.constexpr = NUM_QUERIES // NUM_SETS
    row = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    step = steps + row * STEP
    padding = tl.load(step + STREAM) < 0
    if program < NUM_QUERIES:
        _merge_head(
            partial=partial,
            partial_lse=partial_lse,
            sinks=sinks,
            output=output,
            row=row,
            index=program,
            padding=padding,
            output_stride=output_stride,
            splits=splits,
            NUM_QUERIES=NUM_QUERIES,
            HEAD=HEAD,
            MOST=MOST,
            FIRST=FIRST,
        )
    elif not padding:
        head_set = (program - NUM_QUERIES) // tiles
        member = tl.arange(0, triton.next_power_of_2(HEADS))
        real = member < HEADS
        head = head_set * HEADS + member
        score_tile(
            logits=logits,
            own=own,
            norm=_norm(partial_lse, sinks, row, head, real, splits, NUM_QUERIES, MOST),
            masses=None,
            rank=rank,
            score=score,
            table=table + row * table_stride,
            step=step,
            new_score=new_score + row * NUM_SETS + head_set,
            head=row * NUM_QUERIES + head,
            real=real,
            head_set=head_set,
            tile=(program - NUM_QUERIES) % tiles,
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
            LEAVES=False,
        )


class Merge:
    """Joins the parts of ``attend.DecodeAttention``, and adds a head's learned sink.

    Args:
        num_queries: query heads.
        value_size: channels of values.
        sinks: fp32 ``[Hq]``, learned sink logits, or None.
    """

    def __init__(self, num_queries: int, value_size: int, sinks: torch.Tensor | None) -> None:
        self._num_queries = num_queries
        own = _merging(num_queries, value_size, sinks)
        self._launch = Launcher(_merge, **own, num_warps=merge_config(1, value_size).warps)

    def __call__(self, tokens: Tokens, singles: Singles) -> None:
        """Write ``output`` and ``lse``; in padding rows zeros, and undefined values."""
        self._launch(
            (singles.num_rows, self._num_queries, 1),
            (tokens.variant, singles.variant),
            partial=singles.partial,
            partial_lse=singles.partial_lse,
            steps=singles.steps,
            output=tokens.output,
            lse=singles.lse,
            output_stride=tokens.places[3],
            splits=singles.splits,
        )


class ScoredMerge:
    """``Merge`` and, in the same launch, the scores after the step's queries.

    A score becomes ``decay * score + weight * reduced probability``. Decay and weight are each
    request's own, in its step row.

    Args:
        num_queries, value_size, sinks: as for ``Merge``.
        rank, score: ``Pages`` views; ``score`` is written where a slot holds a token.
        reduction: over the query heads of a set: ``mean``, ``max`` or ``median``.
        unit: slots that share one rank and score.
    """

    def __init__(
        self,
        num_queries: int,
        value_size: int,
        sinks: torch.Tensor | None,
        *,
        rank: torch.Tensor,
        score: torch.Tensor,
        reduction: str,
        unit: int,
    ) -> None:
        assert reduction in REDUCTIONS, reduction
        self._num_queries, (self._num_sets, self._page) = num_queries, rank.shape[1:]
        assert num_queries % self._num_sets == 0, (num_queries, self._num_sets)
        config = merge_config(num_queries // self._num_sets, value_size)
        self._tile = config.tile
        self._launch = Launcher(
            _merge_scored,
            **_merging(num_queries, value_size, sinks),
            rank=rank,
            score=score,
            word_stride=rank.stride(0),
            NUM_SETS=self._num_sets,
            REDUCTION=reduction,
            PAGE=self._page,
            TILE=self._tile,
            UNIT=unit,
            num_warps=config.warps,
        )

    def __call__(self, tokens: Tokens, singles: Singles) -> None:
        """Write ``output``, ``score`` and ``new_score``; of padding rows ``output`` only, zeros."""
        places = singles.num_pages * self._page
        tiles = -(-places // self._tile)
        self._launch(
            # Only the first axis may have more than 65,535 programs.
            (self._num_queries + self._num_sets * tiles, singles.num_rows, 1),
            (tokens.variant, singles.variant),
            partial=singles.partial,
            partial_lse=singles.partial_lse,
            steps=singles.steps,
            output=tokens.output,
            logits=singles.logits,
            own=singles.own,
            table=singles.table,
            new_score=singles.new_score,
            output_stride=tokens.places[3],
            splits=singles.splits,
            tiles=tiles,
            table_stride=singles.table_place,
            logits_stride=singles.num_masses,
            PARTS=singles.num_masses // places,
        )


def _merging(num_queries: int, value_size: int, sinks: torch.Tensor | None) -> dict[str, Any]:
    """What both kernels are told of a layer."""
    own = {"NUM_QUERIES": num_queries, "HEAD": value_size, "MOST": MAX_SPLITS, "FIRST": MERGED}
    return {"sinks": sinks, **own}
