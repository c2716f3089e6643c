# SPDX-License-Identifier: Apache-2.0
"""Softmax of queries over tiles of keys, one after another, and the logit that has no key.

A learned sink (gpt-oss) is one more logit of a query head: it is in the sum that exponentials are
divided by, and nothing gets its share. So it is added once, when all keys have been seen.
Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691).
"""

import triton
import triton.language as tl

from .tiles import dot, padded


@triton.jit
def dot_keys(queries, keys):
    """fp32 ``[m, n]`` products of ``[m, d]`` and ``[n, d]``; one row needs no tensor core."""
    if queries.shape[0] == 1:
        return tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)[None, :]
    return dot(queries, tl.trans(keys))


@triton.jit
def dot_values(probs, values):
    """fp32 ``[m, d]`` products of ``[m, n]`` fp32 probabilities and ``[n, d]``."""
    if probs.shape[0] == 1:
        return tl.sum(tl.trans(probs) * values.to(tl.float32), axis=0)[None, :]
    return dot(probs.to(values.dtype), values)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, HEAD: tl.constexpr):
    """What ``online_softmax`` begins with: largest logits, sums, and values."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, padded(HEAD)], tl.float32)


@triton.jit
def online_softmax(top, total, acc, logits, values):
    """One more tile of logits ``[m, n]`` and values ``[n, d]`` (-inf: absent)."""
    highest = tl.maximum(top, tl.max(logits, axis=1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
    probs = tl.exp(logits - shift[:, None])
    fade = tl.exp(top - shift)
    total = total * fade + tl.sum(probs, axis=1)
    acc = acc * fade[:, None] + dot_values(probs, values)
    return highest, total, acc


@triton.jit
def with_sink(top, total, acc, sinks, head):
    """The same after a head's learned logit of nothing; ``sinks`` None: it has none."""
    if sinks is not None:
        sink = tl.load(sinks + head)
        highest = tl.maximum(top, sink)
        fade = tl.exp(top - highest)
        total = total * fade + tl.exp(sink - highest)
        acc = acc * fade[:, None]
        top = highest
    return top, total, acc
