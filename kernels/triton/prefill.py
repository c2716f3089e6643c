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
from .tiles import MOST_REGISTERS, first_part, load_rows, soft_cap, store_rows, stride_of


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
    seen,
    scale,
    cap,
    slope,
    window=None,
    rest_of_queries=None,
    rest_of_keys=None,
    EARLIER: tl.constexpr = False,
    CHUNKED: tl.constexpr = False,
):
    """Masked logits ``[m, n]`` of queries at ``position`` for keys at ``key_rank``.

    ``scale`` is one number per query; ``seen`` marks existing keys; ``slope`` is ALiBi's, or None;
    ``window`` is the number of tokens that a query sees, its own included, or None. The rest is
    the latent part of queries and keys, or None. ``EARLIER``: all keys precede all queries.
    ``CHUNKED``: a query sees its own chunk of ``window`` ranks instead.
    """
    products = dot_keys(queries, keys)
    if rest_of_queries is not None:
        products += dot_keys(rest_of_queries, rest_of_keys)
    logits = soft_cap(products * scale[:, None], cap)
    if slope is not None:
        logits += slope * (key_rank[None, :] - position[:, None]).to(tl.float32)
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
    token,
    real,
    query_stride,
    scale,
    logit_scale,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The first channels of a head's queries of some tokens, and the logit factor of each."""
    factor = tl.zeros(token.shape, tl.float32) + scale
    if logit_scale is not None:
        factor *= tl.load(logit_scale + token, mask=real, other=1.0)
    return load_rows(query + token * query_stride + head * HEAD, real, 0, FIRST), factor


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
    queries, factor = stride_queries(
        query, query_head, token_at, real, query_stride, scale, logit_scale, HEAD, FIRST
    )
    rest = None
    if FIRST < HEAD:  # latent rows
        rest = load_rows(query + token_at * query_stride + query_head * HEAD, real, FIRST, HEAD)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head)
    if window is not None:  # no query sees an earlier key
        first_key = tl.maximum(first_key, first_seen(cached + first_query, window, CHUNKED))
    top, total, acc = empty_softmax(QUERIES, VALUE)

    gathered += (row * NUM_HEADS + head).to(tl.int64) * width * ROW
    for begin in range(first_key, end_key, TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < end_key
        keys = load_rows(gathered + place * ROW, seen, 0, FIRST)
        values = load_rows(gathered + place * ROW + (ROW - VALUE), seen, 0, VALUE)
        latents = None
        if FIRST < HEAD:
            latents = values
        logits = stride_logits(
            queries, keys, position, place, seen, factor, cap, slope, window, rest, latents, True,
            CHUNKED,
        )  # fmt: skip
        top, total, acc = online_softmax(top, total, acc, logits, values)
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
            queries, keys, position, cached + place, seen, factor, cap, slope, window, rest,
            latents, False, CHUNKED,
        )  # fmt: skip
        top, total, acc = online_softmax(top, total, acc, logits, values)

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
    norm = top + tl.log(tl.where(total > 0.0, total, 1.0))
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
