# SPDX-License-Identifier: Apache-2.0
"""Scores of a stride: the attention mass of every key, and what becomes of the scores before.

``column_sums`` is a second QK pass over what ``attend_strides`` read: it adds up, per key, the
probabilities of all queries with weights that decay with their distance to the stride's end, which
is what as many single-token updates with a frozen cache would have added. ``stride_scores`` reduces
the heads and adds the faded old scores. Source: strided prefill of Cascading KV Cache
(https://arxiv.org/abs/2406.17808).
"""

import torch
import triton
import triton.language as tl

from .configs import mass_config
from .prefill import query_scale, stride_constants, stride_logits
from .tiles import check_steps, chunk_of, load_rows, reduce_heads, stride_of


@triton.jit(do_not_specialize=["old_stride", "sums_stride", "old_tiles"])
def _column_sums(
    query,
    key,
    old_keys,
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
    old_stride,
    sums_stride,
    old_tiles,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(2)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    pads, cached, length, start = stride_of(steps, row)
    if pads:
        return
    tile = tl.program_id(0)
    # The first tiles are of the cache, the others of the stride; a rank is a key's column.
    is_old = tile < old_tiles
    place = tl.where(is_old, tile, tile - old_tiles) * TILE + tl.arange(0, TILE)
    seen = place < tl.where(is_old, cached, length)
    rank = place + tl.where(is_old, 0, cached)
    base = (row * NUM_HEADS + head).to(tl.int64) * old_stride * HEAD
    old_rows = old_keys + base + place * HEAD
    new_rows = key + (start + place) * key_stride + head * HEAD
    if is_old:
        keys = load_rows(old_rows, seen, 0, HEAD)
    else:
        keys = load_rows(new_rows, seen, 0, HEAD)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head)
    total = tl.zeros([TILE], tl.float32)
    # Queries before a tile of the stride do not see it.
    earliest = tl.where(is_old, 0, (tile - old_tiles) * TILE // QUERIES * QUERIES)
    for begin in range(earliest, length, QUERIES):
        index = begin + tl.arange(0, QUERIES)
        real = index < length
        token = start + index
        factor = query_scale(scale, logit_scale, token, real)
        rows = query + token * query_stride + query_head * HEAD
        queries = load_rows(rows, real, 0, HEAD)
        logits = stride_logits(queries, keys, cached + index, rank, seen, factor, cap, slope)
        norm = tl.load(lse + token * (NUM_HEADS * GROUP) + query_head, mask=real, other=0.0)
        weight = tl.load(decays + (length - 1 - index), mask=real, other=0.0)
        total += tl.sum(tl.exp(logits - norm[:, None]) * weight[:, None], axis=0)
    if CHUNK > 1:  # of a unit one sum leaves, or one of each part
        total = tl.sum(tl.reshape(tl.where(seen, total, 0.0), [TILE // CHUNK, CHUNK]), axis=1)
        place = tl.where(is_old, tile, tile - old_tiles) * TILE
        place += tl.arange(0, TILE // CHUNK) * CHUNK
        seen = place < tl.where(is_old, cached, length)
        rank = (place + tl.where(is_old, 0, cached)) // CHUNK
    out = (row * (NUM_HEADS * GROUP) + query_head).to(tl.int64) * sums_stride + rank
    tl.store(sums + out, total, mask=seen)


@torch.library.custom_op("kv_cascade::column_sums", mutates_args=())
def column_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    old_keys: torch.Tensor,
    lse: torch.Tensor,
    decays: torch.Tensor,
    steps: torch.Tensor,
    slopes: torch.Tensor | None,
    logit_scale: torch.Tensor | None,
    scale: float,
    softcap: float,
    max_length: int,
    unit: int = 1,
) -> torch.Tensor:
    """Weighted attention mass of every key of ``R`` strides, or of every unit of keys.

    Args:
        query, key, old_keys, steps, slopes, logit_scale: as for ``attend_strides``.
        lse: fp32 ``[num_tokens, H * G]``, what ``attend_strides`` returned.
        decays: fp32 ``[>= max_length]``: entry ``i`` is the weight of the query with ``i``
            queries of its stride after it.
        unit: tokens of which the mass is one; what is cached is a multiple of it.

    Returns:
        fp32 ``[R, H * G, max_cached + max_length]``: chronological columns, a request's own
        ``cached + length`` of them written. Of units as many columns as ``num_sums`` says: one
        each, or a few where a unit is longer than a tile.
    """
    num_queries, head_size = query.shape[1:]
    num_rows, num_heads, max_cached = old_keys.shape[:3]
    check_steps(steps, steps)
    assert old_keys.is_contiguous() and lse.is_contiguous() and decays.is_contiguous()
    assert query.stride()[1:] == (head_size, 1) and key.stride()[1:] == (head_size, 1)
    assert len(decays) >= max_length, (len(decays), max_length)
    columns, parts = num_sums(query, max_cached, max_length, unit)
    sums = lse.new_empty(num_rows, num_queries, columns * parts)
    if num_rows == 0 or max_length == 0:
        return sums
    config = mass_config(query.device, query.dtype, head_size)
    old_tiles = triton.cdiv(max_cached, config.tile)
    tiles = old_tiles + triton.cdiv(max_length, config.tile)
    _column_sums[(tiles, num_queries, num_rows)](
        *(query, key, old_keys, lse, decays, steps, slopes, logit_scale, sums),
        *(
            scale,
            softcap or None,
            query.stride(0),
            key.stride(0),
            max_cached,
            sums.shape[2],
            old_tiles,
        ),
        CHUNK=unit // parts,
        **stride_constants(config, query, num_heads),
    )
    return sums


def num_sums(query: torch.Tensor, max_cached: int, max_length: int, unit: int) -> tuple[int, int]:
    """Units of the longest row, and the columns of ``column_sums`` for each; ``[.., .., D]``."""
    config = mass_config(query.device, query.dtype, query.shape[2])
    columns = max_cached // unit + triton.cdiv(max_length, unit)
    return columns, unit // chunk_of(unit, config.tile)


@column_sums.register_fake
def _(query, key, old_keys, lse, decays, steps, *others):
    max_length, unit = others[4], others[5] if len(others) > 5 else 1
    columns, parts = num_sums(query, old_keys.shape[2], max_length, unit)
    return lse.new_empty(old_keys.shape[0], query.shape[1], columns * parts)


@triton.jit(do_not_specialize=["old_stride", "sums_stride"])
def _stride_scores(
    sums,
    old_scores,
    fades,
    steps,
    scores,
    old_stride,
    sums_stride,
    NUM_QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    REDUCTION: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    pads, cached, length, _ = stride_of(steps, row)
    if pads:
        return
    columns = cached + length
    if UNIT > 1:
        columns = tl.cdiv(columns, UNIT)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = column < columns
    member = tl.arange(0, triton.next_power_of_2(HEADS))
    head = row * NUM_QUERIES + head_set * HEADS + member
    source = sums + head[:, None] * sums_stride + (column * PARTS)[None, :]
    there = (member < HEADS)[:, None] & inside[None, :]
    mass = tl.load(source, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        begun = column * UNIT + part * (UNIT // PARTS) < cached + length
        mass += tl.load(source + part, mask=there & begun[None, :], other=0.0)
    mine = row * tl.num_programs(1) + head_set
    old = tl.load(old_scores + mine * old_stride + column, mask=column < cached // UNIT, other=0.0)
    result = reduce_heads(mass, HEADS, REDUCTION) + tl.load(fades + row) * old
    tl.store(scores + mine * (sums_stride // PARTS) + column, result, mask=inside)


@torch.library.custom_op("kv_cascade::stride_scores", mutates_args=())
def stride_scores(
    sums: torch.Tensor,
    old_scores: torch.Tensor,
    fades: torch.Tensor,
    steps: torch.Tensor,
    reduction: str,
    unit: int = 1,
    parts: int = 1,
) -> torch.Tensor:
    """Scores after a stride: head-reduced column sums plus the faded old scores.

    Args:
        sums: fp32 ``[R, Hq, C]`` of ``column_sums`` (all tensor-parallel ranks' heads, where
            those share a head set).
        old_scores: fp32 ``[R, S, max_cached // unit]``, chronological, from ``rotate.gather``.
        fades: fp32 ``[R]``, ``decay ** length``.
        reduction: over the query heads of a set: ``mean``, ``max`` or ``median``.
        unit, parts: tokens that share a score, and the columns of ``sums`` of each (``num_sums``).

    Returns:
        fp32 ``[R, S, C // parts]``, chronological.
    """
    check_steps(steps, steps)
    assert reduction in ("mean", "max", "median"), reduction
    assert sums.is_contiguous() and old_scores.is_contiguous() and fades.is_contiguous()
    num_rows, num_queries, num_columns = sums.shape
    num_sets = old_scores.shape[1]
    scores = sums.new_empty(num_rows, num_sets, num_columns // parts)
    if scores.numel() == 0:
        return scores
    heads = num_queries // num_sets
    tile = 64 if heads > 8 else 128
    _stride_scores[(num_rows, num_sets, triton.cdiv(scores.shape[2], tile))](
        *(sums, old_scores, fades, steps, scores, old_scores.shape[2], num_columns),
        NUM_QUERIES=num_queries,
        HEADS=heads,
        REDUCTION=reduction,
        TILE=tile,
        UNIT=unit,
        PARTS=parts,
        num_warps=4,
    )
    return scores


@stride_scores.register_fake
def _(sums, old_scores, fades, steps, reduction, unit=1, parts=1):
    return sums.new_empty(sums.shape[0], old_scores.shape[1], sums.shape[2] // parts)


def column_sums_reference(probs: torch.Tensor, decay: float, weight: float) -> torch.Tensor:
    """``[Hq, n + T]``: ``weight * sum_q decay ** (T - 1 - q) * probs[:, q]``."""
    power = torch.arange(probs.shape[1] - 1, -1, -1, dtype=torch.float64)
    return torch.einsum("htn,t->hn", probs.double(), weight * decay**power)
