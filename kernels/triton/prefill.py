# SPDX-License-Identifier: Apache-2.0
"""Attention of prompt strides over their request's pages and, causally, themselves.

``StrideAttention`` is flash attention over the pages in slot order, since a softmax has no order.
A key whose rank differs from its written position is rotated by the difference as it is read. It
also writes log-sum-exps, from which ``ColumnSums`` computes scores, and the pages' metadata of
every cached unit by rank, because later kernels write the pages and must not read them. With few
query heads, programs share the keys as well (``split``).
Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691); strided prefill of Cascading KV Cache
(https://arxiv.org/abs/2406.17808).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .cached import CachedLayer
from .configs import WHOLE, Config, Split, prefill_config
from .launch import Launcher
from .softmax import dot_keys, empty_softmax, online_softmax, with_sink
from .split import is_last, join_parts, leave_part, slots_of_part
from .stored import (
    apart,
    load_scales,
    load_stored,
    load_turned,
    scale_of_word,
)
from .strides import LINE_WORDS, Strides, Tokens
from .tiles import (
    OLD_SLOTS,
    STEP,
    first_part,
    load_rows,
    page_tile,
    soft_cap,
    store_rows,
    stride_of,
)

MOST_REGISTERS = 255
"""Registers per thread; otherwise ptxas may spill to fit two blocks per multiprocessor."""
LINE, LINE_SLOT, LINE_SCORE, LINE_TOKEN = (tl.constexpr(n) for n in (LINE_WORDS, 0, 1, 2))
"""Rows of a line, by rank: a cached unit's slot, the bits of its score, its first token."""


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
):
    """Masked logits ``[m, n]`` of queries at ``position`` for keys at ``key_rank``.

    ``scale`` is one number per query; ``seen`` marks existing keys; ``slope`` is ALiBi's, or None;
    ``window`` is the number of tokens that a query sees, its own included, or None. The rest is
    the latent part of queries and keys, or None.
    """
    products = dot_keys(queries, keys)
    if rest_of_queries is not None:
        products += dot_keys(rest_of_queries, rest_of_keys)
    logits = soft_cap(products * scale[:, None], cap)
    if slope is not None:
        logits += slope * (key_rank[None, :] - position[:, None]).to(tl.float32)
    visible = seen[None, :] & (key_rank[None, :] <= position[:, None])
    if window is not None:
        visible = visible & (key_rank[None, :] > position[:, None] - window)
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


@triton.jit(do_not_specialize=["line_stride"])
def _attend_strides(
    query,
    key,
    value,
    kv,
    rank,
    born,
    score,
    token,
    scales,
    table,
    steps,
    rotation,
    slopes,
    sinks,
    logit_scale,
    output,
    lse,
    line,
    partial,
    marks,
    arrived,
    scale,
    cap,
    query_stride,
    key_stride,
    value_stride,
    output_stride,
    page_stride,
    word_stride,
    table_stride,
    line_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
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
    if SPLITS > 1:
        in_use = tl.load(steps + row * STEP + OLD_SLOTS)
        part_begin, part_end, there = slots_of_part(part, in_use, SPLITS, SLOTS)
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
    top, total, acc = empty_softmax(QUERIES, VALUE)

    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    begin_slot = 0
    if SPLITS > 1:
        begin_slot, slots = part_begin, part_end
    table += row.to(tl.int64) * table_stride
    # One program of each set leaves what its pages say.
    tells = (block == 0) & (query_head % GROUP == 0) & (head < NUM_SETS)
    line += (row * NUM_SETS + head % NUM_SETS).to(tl.int64) * LINE * line_stride
    for first in range(begin_slot, slots, TILE):
        slot, unit, word, rows, distance = page_tile(
            kv=kv,
            rank=rank,
            born=born,
            table=table,
            first=first,
            slots=slots,
            head=head,
            page_stride=page_stride,
            word_stride=word_stride,
            NUM_SETS=NUM_SETS,
            ROW=ROW,
            PAGE=PAGE,
            TILE=TILE,
            UNIT=UNIT,
        )
        seen = unit >= 0
        if CODE is None:
            value_scale = None
            keys = load_turned(rows, seen, rotation, distance, FIRST, HALF, INTERLEAVED)
        else:
            scaled = scale_of_word(scales, word, slot, head, NUM_SETS, PAGE, UNIT, OF_ROWS)
            key_scale, value_scale = load_scales(scaled, seen, apart(PAGE, OF_ROWS))
            keys = load_turned(
                rows, seen, rotation, distance, FIRST, HALF, INTERLEAVED, key_scale,
                queries.dtype, CODE,
            )  # fmt: skip
        at = unit * UNIT + slot % UNIT
        if FIRST == HEAD:
            logits = stride_logits(queries, keys, position, at, seen, factor, cap, slope)
            values = load_stored(
                rows + (ROW - VALUE), seen, value_scale, queries.dtype, 0, VALUE, CODE
            )
        else:  # read once
            values = load_stored(rows + FIRST, seen, value_scale, queries.dtype, 0, VALUE, CODE)
            logits = stride_logits(
                queries, keys, position, at, seen, factor, cap, slope, None, rest, values
            )
        top, total, acc = online_softmax(top, total, acc, logits, values)
        told = tells & seen & (slot % UNIT == 0)
        tl.store(line + LINE_SLOT * line_stride + unit, slot // UNIT, mask=told)
        bits = tl.load(score + word, mask=told, other=0.0).to(tl.int32, bitcast=True)
        tl.store(line + LINE_SCORE * line_stride + unit, bits, mask=told)
        if token is not None:
            first_token = tl.load(token + word, mask=told, other=0)
            tl.store(line + LINE_TOKEN * line_stride + unit, first_token, mask=told)
    own = tl.minimum(first_query + QUERIES, length)
    if SPLITS > 1:
        own = tl.where(part == there - 1, own, 0)
    for begin in range(0, own, TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < length
        source = (start + place) * key_stride + head * HEAD
        keys = load_rows(key + source, seen, 0, FIRST)
        at = cached + place
        if FIRST == HEAD:
            logits = stride_logits(queries, keys, position, at, seen, factor, cap, slope)
            source = (start + place) * value_stride + head * VALUE
            values = load_rows(value + source, seen, 0, VALUE)
        else:
            values = load_rows(key + source, seen, FIRST, HEAD)
            logits = stride_logits(
                queries, keys, position, at, seen, factor, cap, slope, None, rest, values
            )
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
    tl.store(lse + token_at * (NUM_HEADS * GROUP) + query_head, norm, mask=real)


def stride_constants(config: Config, layer: CachedLayer) -> dict[str, Any]:
    """What the kernels over strides are told of a layer."""
    num_queries, num_heads, *_ = layer.heads
    return {
        **layer.pages,
        **layer.turning,
        **layer.logits,
        **layer.rows,
        "NUM_HEADS": num_heads,
        "GROUP": num_queries // num_heads,
        "PAGE": layer.page,
        "QUERIES": config.queries,
        "TILE": config.tile,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


class StrideAttention:
    """Attention of strides in one layer, none of which begins inside a unit.

    Args:
        sinks: fp32 ``[H * G]``, learned logits of nothing, or None.
        split: splits attention over keys.
    """

    def __init__(
        self, layer: CachedLayer, sinks: torch.Tensor | None = None, split: Split = WHOLE
    ) -> None:
        self._heads, self._num_sets = layer.heads, layer.num_sets
        num_queries, _, head_size, new = layer.heads
        config = prefill_config(layer.kv.device, new, head_size, layer.stored is not None)
        self._queries = config.queries
        self.split, self._partial = split, (num_queries, split.splits, layer.value_size)
        assert split.slots % config.tile == 0, (split, config)
        self._launch = Launcher(
            _attend_strides,
            **stride_constants(config, layer),
            **layer.words,
            sinks=sinks,
            maxnreg=MOST_REGISTERS,
            SPLITS=split.splits,
            SLOTS=split.slots,
        )

    def __call__(self, tokens: Tokens, strides: Strides) -> None:
        """Write the strides' rows of ``output`` and ``lse``, and the cached units of ``line``."""
        assert tokens.heads == self._heads, (tokens.heads, self._heads)
        assert strides.num_sets == self._num_sets, (strides.num_sets, self._num_sets)
        if strides.num_rows == 0 or strides.max_length == 0:
            return
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
            table=strides.table,
            steps=strides.steps,
            logit_scale=tokens.logit_scale,
            output=tokens.output,
            lse=strides.lse,
            line=strides.line,
            partial=None if partial is None else partial.output,
            marks=None if partial is None else partial.marks,
            arrived=None if partial is None else partial.arrived,
            query_stride=query_stride,
            key_stride=key_stride,
            value_stride=value_stride,
            output_stride=output_stride,
            table_stride=strides.table_place,
            line_stride=strides.line_width,
        )
