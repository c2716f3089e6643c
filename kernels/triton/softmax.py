# SPDX-License-Identifier: Apache-2.0
"""Online softmax over tiles of keys, and learned sink logits.

Exponentials have base 2: ``exp2`` is one instruction, ``exp`` five. A factor turns logits into
base-2 logarithms of their exponentials. A learned sink (gpt-oss) is one more logit per query head,
without a value. It only adds to the softmax's denominator, so it is added once, after all keys.
Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691).
"""

import triton
import triton.language as tl

from .tiles import LOG2_E, dot, padded


@triton.jit
def dot_keys(queries, keys):
    """fp32 products ``[m, n]`` of ``[m, d]`` and ``[n, d]``. One row uses no tensor core."""
    if queries.shape[0] == 1:
        return tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)[None, :]
    return dot(queries, tl.trans(keys))


@triton.jit
def dot_values(probs, values):
    """fp32 products ``[m, d]`` of fp32 probabilities ``[m, n]`` and values ``[n, d]``."""
    if probs.shape[0] == 1:
        return tl.sum(tl.trans(probs) * values.to(tl.float32), axis=0)[None, :]
    return dot(probs.to(values.dtype), values)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Initial state of ``online_softmax``: largest logits, sums of exponentials, and outputs."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, padded(HEAD)], tl.float32)


@triton.jit
def online_softmax(top, total, acc, logits, factor, values):
    """Add a tile of logits ``[m, n]`` and values ``[n, d]``. Absent keys have logit -inf.

    ``factor``: ``[m]``, above 0, turns the logits into base-2 logarithms, of which ``top`` is one.
    """
    highest = tl.maximum(top, tl.max(logits, axis=1) * factor)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # no key so far
    probs = tl.exp2(logits * factor[:, None] - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(probs, axis=1)
    acc = acc * fade[:, None] + dot_values(probs, values)
    return highest, total, acc


@triton.jit
def with_sink(top, total, acc, sinks, head):
    """Add a head's learned sink logit to the state. ``sinks`` is None if the model has none."""
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        highest = tl.maximum(top, sink)
        fade = tl.exp2(top - highest)
        total = total * fade + tl.exp2(sink - highest)
        acc = acc * fade[:, None]
        top = highest
    return top, total, acc
