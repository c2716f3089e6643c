# SPDX-License-Identifier: Apache-2.0
"""Attention mass that every key received from a stride's queries, from which scores are computed.

``ColumnSums`` is a second QK pass over the keys of ``StrideAttention``. Per key it adds up the
probabilities of all queries, with weights that decay with the distance to the stride's end: the sum
that single-token updates with a frozen cache would add. A program takes a tile of keys of one KV
head for all queries of its group and reduces the group's heads if possible. The remaining heads and
the decayed old scores are added in ``insert_stride``. Source: strided prefill of Cascading KV Cache
(https://arxiv.org/abs/2406.17808).
"""

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .configs import Config, mass_config
from .launch import Launcher
from .prefill import in_base_2, masked, stride_constants, stride_logits, stride_queries
from .strides import Strides, Tokens
from .tiles import LOG2_E, MOST_REGISTERS, chunk_of, first_part, load_rows, stride_of


@triton.jit
def _of_units(each, seen, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Sums ``[TILE // CHUNK]`` over queries and a unit's keys of ``[m, TILE]`` numbers."""
    mass = tl.sum(each, axis=0)
    if CHUNK > 1:
        mass = tl.sum(tl.reshape(tl.where(seen, mass, 0.0), [TILE // CHUNK, CHUNK]), axis=1)
    return mass


@triton.jit(do_not_specialize=["sums_stride", "width", "old_tiles"])
def _column_sums(
    query,
    key,
    gathered,
    lse,
    decays,
    steps,
    slopes,
    logit_scale,
    sums,
    scale,
    cap,
    query_stride,
    key_stride,
    sums_stride,
    width,
    old_tiles,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    REDUCED: tl.constexpr,
):
    row = tl.program_id(2)
    head = tl.program_id(1)
    pads, cached, length, start = stride_of(steps, row)
    tile = tl.program_id(0)
    # The first tiles cover what is cached, the others the stride.
    is_old = tile < old_tiles
    first = tl.where(is_old, tile, tile - old_tiles) * TILE
    num_keys = tl.where(is_old, cached, length)
    if pads | (first >= num_keys):
        return
    place = first + tl.arange(0, TILE)
    seen = place < num_keys
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    rest_of_keys = None
    if is_old:
        rows = gathered + ((row * NUM_HEADS + head).to(tl.int64) * width + place) * ROW
        keys = load_rows(rows, seen, 0, FIRST)
        if FIRST < HEAD:
            rest_of_keys = load_rows(rows, seen, FIRST, HEAD)
    else:
        rows = key + (start + place) * key_stride + head * HEAD
        keys = load_rows(rows, seen, 0, FIRST)
        if FIRST < HEAD:
            rest_of_keys = load_rows(rows, seen, FIRST, HEAD)
    behind = tl.where(is_old, 0, cached)
    at = behind + place
    # One sum per unit, or per part of a unit.
    part = tl.arange(0, TILE // CHUNK) * CHUNK
    column = (behind + first + part) // CHUNK
    leaves = first + part < num_keys
    # Queries before a tile of the stride do not see it; those before ``diagonal`` see a part of it.
    earliest = tl.where(is_old, 0, first // QUERIES * QUERIES)
    diagonal = tl.where(is_old, 0, first + TILE)
    turns = tl.cdiv(length - earliest, QUERIES)
    mass = tl.zeros([TILE // CHUNK], tl.float32)
    each = tl.zeros([QUERIES, TILE], tl.float32)
    for turn in range(GROUP * turns):  # one loop, so that loads run ahead over all heads
        query_head = head * GROUP + turn // turns
        begin = earliest + turn % turns * QUERIES
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + query_head)
        index = begin + tl.arange(0, QUERIES)
        real = index < length
        token = start + index
        asking, factor = stride_queries(
            query, query_head, start + begin, real, query_stride, scale, logit_scale, HEAD
        )
        queries, rest = load_rows(asking, real, 0, FIRST), None
        if FIRST < HEAD:  # latent rows
            rest = load_rows(asking, real, FIRST, HEAD)
        norm = tl.load(lse + token * (NUM_HEADS * GROUP) + query_head, mask=real, other=0.0)
        weight = tl.load(decays + (length - 1 - index), mask=real, other=0.0)
        logits = stride_logits(
            queries, keys, cached + index, at, factor, cap, slope, rest, rest_of_keys
        )
        if begin < diagonal:
            logits = masked(logits, cached + index, at, seen)
        base_2 = in_base_2(factor, cap, slope)
        probs = tl.exp2(logits * base_2[:, None] - (norm * LOG2_E)[:, None])
        each += probs * weight[:, None]
        if REDUCED != "mean":
            if turn % turns == turns - 1:
                own = _of_units(each, seen, TILE, CHUNK)
                if REDUCED == "max":
                    mass = tl.maximum(mass, own)
                else:
                    out = (row * NUM_HEADS * GROUP + query_head).to(tl.int64) * sums_stride
                    tl.store(sums + out + column, own, mask=leaves)
                each = tl.zeros([QUERIES, TILE], tl.float32)
    if REDUCED == "mean":
        mass = _of_units(each, seen, TILE, CHUNK)
    if REDUCED != "none":
        out = (row * NUM_HEADS + head).to(tl.int64) * sums_stride + column
        tl.store(sums + out, mass, mask=leaves)


class ColumnSums:
    """Weighted attention mass of every key, or unit of keys, of strides in one layer.

    Args:
        reduction: over the query heads of a set, as far as possible here (``reduced``).

    Attributes:
        parts: columns of ``sums`` per unit.
    """

    def __init__(self, layer: CachedLayer, reduction: str) -> None:
        num_queries, num_heads, head_size, new = self._heads = layer.heads
        config = mass_config(new, head_size)
        heads_and_parts = _num_sums(config, num_queries, num_heads, layer.unit, reduction)
        (self._sums_heads, self.parts), self._tile = heads_and_parts, config.tile
        many = layer.latent is not None or new.itemsize == 4
        registers = {"maxnreg": MOST_REGISTERS} if many else {}
        self._launch = Launcher(
            _column_sums,
            **stride_constants(config, layer),
            **registers,
            CHUNK=layer.unit // self.parts,
            REDUCED=reduced(reduction, self.parts),
        )

    def __call__(self, tokens: Tokens, strides: Strides) -> None:
        """Write the first columns of ``sums`` in time order, ``parts`` per unit."""
        assert tokens.heads == self._heads, (tokens.heads, self._heads)
        assert strides.sums_heads == self._sums_heads, (strides.sums_heads, self._sums_heads)
        assert strides.parts == self.parts, (strides.parts, self.parts)
        if strides.max_length == 0:
            return
        old_tiles = -(-strides.max_slots // self._tile)
        tiles = old_tiles - (-strides.max_length // self._tile)
        self._launch(
            (tiles, self._heads[1], strides.num_rows),
            (tokens.variant, strides.variant),
            query=tokens.query,
            key=tokens.key,
            gathered=strides.gathered,
            lse=strides.lse,
            decays=strides.decays,
            steps=strides.steps,
            logit_scale=tokens.logit_scale,
            sums=strides.sums,
            query_stride=tokens.places[0],
            key_stride=tokens.places[1],
            sums_stride=strides.sums_width,
            width=strides.gathered_width,
            old_tiles=old_tiles,
        )


def reduced(reduction: str, parts: int) -> str:
    """How a group's query heads are reduced here; ``none`` if all heads are needed at once."""
    if reduction == "mean" or (reduction == "max" and parts == 1):
        return reduction
    return "none"


def num_sums(query: torch.Tensor, num_heads: int, unit: int, reduction: str) -> tuple[int, int]:
    """Heads of ``Strides.sums`` and columns per unit; ``query`` is ``[.., H * G, D]``.

    A unit that is longer than a tile has several columns.
    """
    config = mass_config(query.dtype, query.shape[2])
    return _num_sums(config, query.shape[1], num_heads, unit, reduction)


def _num_sums(
    config: Config, num_queries: int, num_heads: int, unit: int, reduction: str
) -> tuple[int, int]:
    parts = unit // chunk_of(unit, config.tile)
    waits = reduced(reduction, parts) == "none"
    return num_queries if waits else num_heads, parts
