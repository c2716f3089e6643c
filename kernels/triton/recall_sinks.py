# SPDX-License-Identifier: Apache-2.0
"""How much queries attend to a request's sinks, which the judge of recall compares with the store.

Sinks are the first units of a stream. They take the first slots of a request and never leave them,
and they stand where they were written.
"""

import triton
import triton.language as tl

from .attend_tiles import LOWEST
from .stored import apart, factor_of, load_scales, scale_place, widened
from .tiles import LOG2_E, block_of, dot

KEYS, CHANNELS = tl.constexpr(16), tl.constexpr(64)
"""Keys and channels of one product."""


@triton.jit
def attend_sinks(
    queries,
    inside,
    num_keys,
    kv,
    scales,
    table,
    head,
    scale,
    page_stride,
    word_stride,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Base-2 logarithms of sums of exponentials over a request's first keys.

    ``LOWEST`` without any.

    Args:
        queries: addresses of rotated rows ``[n]`` of one query head, ``inside`` or not.
        head: their KV head.
        FIRST: channels of a key before a latent row's value, or all.
    """
    top = tl.full([queries.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    for first in range(0, num_keys, KEYS):
        slot = first + tl.arange(0, KEYS)
        there = slot < num_keys
        block = block_of(table, slot, there, PAGE)
        rows = kv + block * page_stride + (head * PAGE + slot % PAGE) * ROW
        if CODE is not None:
            place = scale_place(scales, block, head, slot % PAGE, word_stride, PAGE, OF_ROWS)
            of_key, of_value = load_scales(place, there, apart(PAGE, OF_ROWS))
        logits = tl.zeros([queries.shape[0], KEYS], tl.float32)
        for begin in range(0, HEAD, CHANNELS):
            channel = begin + tl.arange(0, CHANNELS)
            real = (channel < HEAD)[None, :]
            mine = queries[:, None] + channel[None, :]
            query = tl.load(mine, mask=inside[:, None] & real, other=0.0).to(tl.float32)
            keys = tl.load(rows[:, None] + channel[None, :], mask=there[:, None] & real, other=0)
            if CODE is None:
                keys = keys.to(tl.float32)
            else:
                of_channel = tl.where(
                    (channel < FIRST)[None, :], of_key[:, None], of_value[:, None]
                )
                keys = widened(keys, CODE) * factor_of(of_channel, CODE)
            logits += dot(query, tl.trans(keys))
        logits = tl.where(there[None, :], logits * (scale * LOG2_E), LOWEST)
        higher = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.where(there[None, :], tl.exp2(logits - higher[:, None]), 0.0)
        total = total * tl.exp2(top - higher) + tl.sum(weights, axis=1)
        top = higher
    return tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), LOWEST)
