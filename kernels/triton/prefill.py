# SPDX-License-Identifier: Apache-2.0
"""Attention of prompt strides over what their request has cached and, causally, themselves.

``StrideAttention`` is flash attention over the cached rows that ``StrideGather`` left in time
order, and then over the stride. It also writes log-sum-exps, from which ``ColumnSums`` computes
scores. With few query heads, programs share the keys as well (``split``).
Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691); strided prefill of Cascading KV Cache
(https://arxiv.org/abs/2406.17808).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .configs import WHOLE, Config, Split, stride_config
from .launch import Launcher
from .softmax import dot_keys, empty_softmax, online_softmax, with_sink
from .split import is_last, join_parts, keys_of_part, leave_part
from .strides import Strides, Tokens
from .tiles import (
    LN_2,
    LOG2_E,
    MOST_REGISTERS,
    first_part,
    load_rows,
    soft_cap,
    store_rows,
    stride_of,
)

TINY = tl.constexpr(1e-30)
"""Least factor on logits."""


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """The lowest rank that a query at ``position`` sees of its window, or of its chunk."""
    if CHUNKED:
        return position - position % window
    return position + 1 - window


@triton.jit
def stride_logits(
    queries,
    keys,
    position,
    key_rank,
    scale,
    cap,
    slope,
    rest_of_queries=None,
    rest_of_keys=None,
):
    """Logits ``[m, n]`` of queries at ``position`` for keys at ``key_rank``, before ``in_base_2``.

    ``scale`` is one number per query; ``slope`` is ALiBi's, or None. The rest is the latent part of
    queries and keys, or None.
    """
    products = dot_keys(queries, keys)
    if rest_of_queries is not None:
        products += dot_keys(rest_of_queries, rest_of_keys)
    if (cap is None) & (slope is None):
        return products
    logits = soft_cap(products * scale[:, None], cap)
    if slope is not None:
        logits += slope * (key_rank[None, :] - position[:, None]).to(tl.float32)
    return logits


@triton.jit
def in_base_2(scale, cap, slope):
    """Factors ``[m]`` that turn ``stride_logits`` into base-2 logarithms of their exponentials."""
    if (cap is None) & (slope is None):
        return scale * LOG2_E
    return tl.zeros(scale.shape, tl.float32) + LOG2_E


@triton.jit
def masked(
    logits,
    position,
    key_rank,
    seen,
    window=None,
    EARLIER: tl.constexpr = False,
    CHUNKED: tl.constexpr = False,
):
    """``stride_logits``, -inf for keys that a query does not see.

    ``seen`` marks existing keys; ``window`` is the number of tokens that a query sees, its own
    included, or None. ``EARLIER``: all keys precede all queries. ``CHUNKED``: a query sees its own
    chunk of ``window`` ranks instead.
    """
    visible = seen[None, :]
    if not EARLIER:
        visible = visible & (key_rank[None, :] <= position[:, None])
    if window is not None:
        visible = visible & (key_rank[None, :] >= first_seen(position, window, CHUNKED)[:, None])
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def stride_queries(
    query,
    head,
    first,
    real,
    query_stride,
    scale,
    logit_scale,
    HEAD: tl.constexpr,
):
    """Addresses ``[m]`` of a head's queries of tokens from ``first`` on, and their logit factors.

    A loop computes one address and keeps the rows' offsets: cheaper than an address a row.
    """
    index = tl.arange(0, real.shape[0])
    factor = tl.zeros(real.shape, tl.float32) + scale
    if logit_scale is not None:
        factor *= tl.load(logit_scale + first + index, mask=real, other=1.0)
        factor = tl.maximum(factor, TINY)  # it may be 0, and -inf times 0 is NaN
    return query + first * query_stride + head * HEAD + index * query_stride, factor


@triton.jit(do_not_specialize=["width"])
def _attend_strides(
    query,
    key,
    value,
    gathered,
    steps,
    slopes,
    sinks,
    logit_scale,
    output,
    lse,
    partial,
    marks,
    arrived,
    scale,
    cap,
    window,
    query_stride,
    key_stride,
    value_stride,
    output_stride,
    width,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    row = tl.program_id(2)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    pads, cached, length, start = stride_of(steps, row)
    block = tl.program_id(0)
    if SPLITS > 1:
        part = block % SPLITS
        block = block // SPLITS
    first_query = block * QUERIES
    if pads | (first_query >= length):
        return
    first_key, end_key = 0, cached
    if SPLITS > 1:
        first_key, end_key, there = keys_of_part(part, cached, SPLITS, KEYS)
        if part >= there:
            return
    index = first_query + tl.arange(0, QUERIES)
    real = index < length
    token_at = start + index
    position = cached + index
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    asking, factor = stride_queries(
        query, query_head, start + first_query, real, query_stride, scale, logit_scale, HEAD
    )
    queries, rest = load_rows(asking, real, 0, FIRST), None
    if FIRST < HEAD:  # latent rows
        rest = load_rows(asking, real, FIRST, HEAD)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head)
    if window is not None:  # no query sees an earlier key
        first_key = tl.maximum(first_key, first_seen(cached + first_query, window, CHUNKED))
    base_2 = in_base_2(factor, cap, slope)
    top, total, acc = empty_softmax(QUERIES, VALUE)

    # Most tiles need no mask: every query sees all their keys.
    unmasked, own_unmasked = end_key, first_query + 1
    if window is not None:
        unmasked, own_unmasked = 0, 0
    gathered += (row * NUM_HEADS + head).to(tl.int64) * width * ROW
    for begin in range(first_key, end_key, TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < end_key
        keys = load_rows(gathered + place * ROW, seen, 0, FIRST)
        values = load_rows(gathered + place * ROW + (ROW - VALUE), seen, 0, VALUE)
        latents = None
        if FIRST < HEAD:
            latents = values
        logits = stride_logits(queries, keys, position, place, factor, cap, slope, rest, latents)
        if begin + TILE > unmasked:
            logits = masked(logits, position, place, seen, window, True, CHUNKED)
        top, total, acc = online_softmax(top, total, acc, logits, base_2, values)
    own = tl.minimum(first_query + QUERIES, length)
    if SPLITS > 1:
        own = tl.where(part == there - 1, own, 0)
    first_own = 0
    if window is not None:
        first_own = tl.maximum(first_seen(cached + first_query, window, CHUNKED) - cached, 0)
    for begin in range(first_own, own, TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < length
        source = (start + place) * key_stride + head * HEAD
        keys = load_rows(key + source, seen, 0, FIRST)
        latents = None
        if FIRST < HEAD:
            latents = load_rows(key + source, seen, FIRST, HEAD)
            values = latents
        else:
            source = (start + place) * value_stride + head * VALUE
            values = load_rows(value + source, seen, 0, VALUE)
        logits = stride_logits(
            queries, keys, position, cached + place, factor, cap, slope, rest, latents
        )
        if begin + TILE > own_unmasked:
            logits = masked(logits, position, cached + place, seen, window, False, CHUNKED)
        top, total, acc = online_softmax(top, total, acc, logits, base_2, values)

    if SPLITS > 1:
        left_at = (token_at * (NUM_HEADS * GROUP) + query_head) * SPLITS
        leave_part(partial, marks, left_at + part, real, top, total, acc, VALUE)
        counter = (start + first_query) * (NUM_HEADS * GROUP) + query_head
        if not is_last(arrived + counter, there):
            return
        top, total, acc = join_parts(partial, marks, left_at, real, there, QUERIES, VALUE)
    top, total, acc = with_sink(top, total, acc, sinks, query_head)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    store_rows(output + token_at * output_stride + query_head * VALUE, acc, real, 0, VALUE)
    norm = (top + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN_2
    if lse is not None:
        tl.store(lse + token_at * (NUM_HEADS * GROUP) + query_head, norm, mask=real)


def stride_constants(config: Config, layer: CachedLayer) -> dict[str, Any]:
    """What the kernels over strides are told of a layer."""
    num_queries, num_heads, *_ = layer.heads
    return {
        **layer.logits,
        **layer.rows,
        "HEAD": layer.head_size,
        "NUM_HEADS": num_heads,
        "GROUP": num_queries // num_heads,
        "QUERIES": config.queries,
        "TILE": config.tile,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


class StrideAttention:
    """Attention of strides in one layer, none of which begins inside a unit.

    Args:
        sinks: fp32 ``[H * G]``, learned sink logits, or None.
        split: splits attention over keys.
        window: tokens that a query sees, its own included; None: all.
        chunked: whether a query sees its own chunk of ``window`` ranks instead.
    """

    def __init__(
        self,
        layer: CachedLayer,
        sinks: torch.Tensor | None = None,
        split: Split = WHOLE,
        window: int | None = None,
        chunked: bool = False,
    ) -> None:
        self._heads = layer.heads
        num_queries, _, head_size, new = layer.heads
        config = stride_config(layer.kv.device, new, head_size)
        self._queries = config.queries
        self.split, self._partial = split, (num_queries, split.splits, layer.value_size)
        assert split.keys % config.tile == 0, (split, config)
        self._launch = Launcher(
            _attend_strides,
            **stride_constants(config, layer),
            sinks=sinks,
            window=window,
            maxnreg=MOST_REGISTERS,
            SPLITS=split.splits,
            KEYS=split.keys,
            CHUNKED=chunked,
        )

    def __call__(self, tokens: Tokens, strides: Strides) -> None:
        """Write the strides' rows of ``output`` and ``lse``; ``StrideGather`` comes first."""
        assert tokens.heads == self._heads, (tokens.heads, self._heads)
        splits, partial = self.split.splits, None
        if splits > 1:
            partial = strides.partial
            assert partial is not None and partial.shape == self._partial, self._partial
        query_stride, key_stride, value_stride, output_stride = tokens.places
        blocks = -(-strides.max_length // self._queries)
        self._launch(
            (blocks * splits, self._heads[0], strides.num_rows),
            (tokens.variant, strides.variant),
            query=tokens.query,
            key=tokens.key,
            value=tokens.value,
            gathered=strides.gathered,
            steps=strides.steps,
            logit_scale=tokens.logit_scale,
            output=tokens.output,
            lse=strides.lse,
            partial=None if partial is None else partial.output,
            marks=None if partial is None else partial.marks,
            arrived=None if partial is None else partial.arrived,
            query_stride=query_stride,
            key_stride=key_stride,
            value_stride=value_stride,
            output_stride=output_stride,
            width=strides.gathered_width,
        )
