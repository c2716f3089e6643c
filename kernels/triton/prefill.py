# SPDX-License-Identifier: Apache-2.0
"""Attention of strides of a prompt: each over its request's rotated cache and, causally, itself.

``attend_strides`` is flash attention over the dense chronological copy of the cache (``rotate``)
and the stride's own keys, with log-sum-exps, from which ``column_sums`` makes the scores.
Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691); strided prefill of Cascading KV Cache
(https://arxiv.org/abs/2406.17808).
"""

import torch
import triton
import triton.language as tl

from .configs import Config, prefill_config
from .tiles import (
    check_steps,
    dot_keys,
    load_rows,
    online_softmax,
    padded,
    soft_cap,
    store_rows,
    stride_of,
)


@triton.jit
def stride_logits(queries, keys, position, key_rank, seen, scale, cap, slope):
    """Masked logits ``[m, n]`` of queries at ``position`` for keys at ``key_rank``.

    ``scale`` is one number a query; ``seen``: keys that exist; ``slope``: ALiBi's, or None.
    """
    logits = soft_cap(dot_keys(queries, keys) * scale[:, None], cap)
    if slope is not None:
        logits += slope * (key_rank[None, :] - position[:, None]).to(tl.float32)
    visible = seen[None, :] & (key_rank[None, :] <= position[:, None])
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def query_scale(scale, logit_scale, token, real):
    factor = tl.zeros(token.shape, tl.float32) + scale
    if logit_scale is not None:
        factor *= tl.load(logit_scale + token, mask=real, other=1.0)
    return factor


@triton.jit(do_not_specialize=["old_stride"])
def _attend_strides(
    query,
    key,
    value,
    old_keys,
    old_values,
    steps,
    slopes,
    logit_scale,
    output,
    lse,
    scale,
    cap,
    query_stride,
    key_stride,
    value_stride,
    output_stride,
    old_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(2)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    pads, cached, length, start = stride_of(steps, row)
    first_query = tl.program_id(0) * QUERIES
    if pads | (first_query >= length):
        return
    index = first_query + tl.arange(0, QUERIES)
    real = index < length
    token = start + index
    position = cached + index
    factor = query_scale(scale, logit_scale, token, real)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head)
    rows = query + token * query_stride + query_head * HEAD
    queries = load_rows(rows, real, 0, HEAD)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, padded(HEAD)], tl.float32)

    base = (row * NUM_HEADS + head).to(tl.int64) * old_stride * HEAD
    for begin in range(0, cached, TILE):
        rank = begin + tl.arange(0, TILE)
        seen = rank < cached
        keys = load_rows(old_keys + base + rank * HEAD, seen, 0, HEAD)
        logits = stride_logits(queries, keys, position, rank, seen, factor, cap, slope)
        values = load_rows(old_values + base + rank * HEAD, seen, 0, HEAD)
        top, total, acc = online_softmax(top, total, acc, logits, values)
    for begin in range(0, tl.minimum(first_query + QUERIES, length), TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < length
        source = (start + place) * key_stride + head * HEAD
        keys = load_rows(key + source, seen, 0, HEAD)
        logits = stride_logits(queries, keys, position, cached + place, seen, factor, cap, slope)
        source = (start + place) * value_stride + head * HEAD
        values = load_rows(value + source, seen, 0, HEAD)
        top, total, acc = online_softmax(top, total, acc, logits, values)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    store_rows(output + token * output_stride + query_head * HEAD, acc, real, 0, HEAD)
    norm = top + tl.log(tl.where(total > 0.0, total, 1.0))
    tl.store(lse + token * (NUM_HEADS * GROUP) + query_head, norm, mask=real)


def stride_constants(config: Config, query: torch.Tensor, num_heads: int) -> dict[str, int]:
    """What both kernels over strides are compiled for; ``query`` is ``[num_tokens, H * G, D]``."""
    num_queries, head_size = query.shape[1:]
    assert num_queries % num_heads == 0, (num_queries, num_heads)
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_queries // num_heads,
        "HEAD": head_size,
        "QUERIES": config.queries,
        "TILE": config.tile,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


@torch.library.custom_op("kv_cascade::attend_strides", mutates_args=("output",))
def attend_strides(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    old_keys: torch.Tensor,
    old_values: torch.Tensor,
    steps: torch.Tensor,
    slopes: torch.Tensor | None,
    logit_scale: torch.Tensor | None,
    output: torch.Tensor,
    scale: float,
    softcap: float,
    max_length: int,
) -> torch.Tensor:
    """Attention of ``R`` strides.

    Args:
        query: ``[num_tokens, H * G, D]`` of the whole step, rotated at cache positions.
        key, value: ``[num_tokens, H, D]``, keys rotated likewise.
        old_keys, old_values: ``[R, H, max_cached, D]``, from ``rotate.gather``.
        steps: int32 ``[R, STEP_COLUMNS]`` step rows of strides.
        slopes: fp32 ``[H * G]`` of ALiBi, or None.
        logit_scale: fp32 ``[num_tokens]``, factors on the logits, or None.
        output: like ``query``; the strides' rows are written.
        max_length: the longest stride.

    Returns:
        fp32 ``[num_tokens, H * G]`` log-sum-exps, written for the strides' tokens.
    """
    num_tokens, num_queries, head_size = query.shape
    num_rows, num_heads, max_cached = old_keys.shape[:3]
    check_steps(steps, steps)
    assert steps.shape[0] == num_rows and num_queries % num_heads == 0
    assert old_keys.is_contiguous() and old_values.is_contiguous()
    for tensor in (query, key, value, output):
        assert tensor.stride()[1:] == (head_size, 1), tensor.stride()
    assert query.dtype == key.dtype == value.dtype == old_keys.dtype
    lse = torch.empty(num_tokens, num_queries, dtype=torch.float32, device=query.device)
    if num_rows == 0 or max_length == 0:
        return lse
    config = prefill_config(query.device, query.dtype, head_size)
    _attend_strides[(triton.cdiv(max_length, config.queries), num_queries, num_rows)](
        *(query, key, value, old_keys, old_values, steps, slopes, logit_scale, output, lse),
        *(
            scale,
            softcap or None,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            output.stride(0),
        ),
        max_cached,
        **stride_constants(config, query, num_heads),
    )
    return lse


@attend_strides.register_fake
def _(query, *others):
    return query.new_empty(query.shape[:2], dtype=torch.float32)


def attend_strides_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    old_keys: torch.Tensor,
    old_values: torch.Tensor,
    *,
    scale: float,
    slopes: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One stride in fp64, as one softmax over all keys.

    Args:
        query: ``[T, H * G, D]``; key, value: ``[T, H, D]``; old_keys, old_values: ``[H, n, D]``.
        logit_scale: ``[T]`` or None.

    Returns:
        output ``[T, H * G, D]``, lse ``[T, H * G]``, probabilities ``[H * G, T, n + T]``.
    """
    num_tokens, group = query.shape[0], query.shape[1] // key.shape[1]
    keys = torch.cat([old_keys.double(), key.double().transpose(0, 1)], 1)
    values = torch.cat([old_values.double(), value.double().transpose(0, 1)], 1)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = torch.einsum("thd,hnd->htn", query.double(), keys) * scale
    if logit_scale is not None:
        logits = logits * logit_scale.double()[:, None]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    cached = old_keys.shape[1]
    distance = torch.arange(cached + num_tokens) - (cached + torch.arange(num_tokens))[:, None]
    if slopes is not None:
        logits = logits + slopes.double()[:, None, None] * distance
    logits = logits.masked_fill(distance > 0, -torch.inf)
    probs = logits.softmax(-1)
    output = torch.einsum("htn,hnd->thd", probs, values)
    return output, logits.logsumexp(-1).transpose(0, 1), probs
