# SPDX-License-Identifier: Apache-2.0
"""Tiles of ``attend``: of several KV heads at once, which share a tile's words and rotations."""

import triton
import triton.language as tl

from .tiles import dot, padded, tile_offsets


@triton.jit
def words_of(
    rank,
    born,
    block,
    first,
    slots,
    word_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Rank and born of a tile's slots; a rank of -1 is an empty one."""
    word = block * word_stride + tile_offsets(first, PAGE, TILE) // UNIT
    inside = first + tl.arange(0, TILE) < slots
    return tl.load(rank + word, mask=inside, other=-1), tl.load(born + word, mask=inside, other=0)


@triton.jit
def keys_of(rows, valid, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr):
    """Channels ``[FROM, TO)`` of rows ``[h, n]`` as ``[h, n, WIDTH]``; zero where not valid."""
    channel = FROM + tl.arange(0, WIDTH)
    inside = valid[None, :, None] & (channel < TO)[None, None, :]
    return tl.load(rows[:, :, None] + channel[None, None, :], mask=inside, other=0.0)


@triton.jit
def values_of(rows, valid, HEAD: tl.constexpr):
    """Rows ``[h, n]`` of values as columns, ``[h, padded(HEAD), n]``."""
    channel = tl.arange(0, padded(HEAD))
    inside = valid[None, None, :] & (channel < HEAD)[None, :, None]
    return tl.load(rows[:, None, :] + channel[None, :, None], mask=inside, other=0.0)


@triton.jit
def angles_of(rotation, distance, HALF: tl.constexpr):
    """cos and sin, ``[1, n, padded(HALF)]``, of turns back by distances ``[n]``."""
    index = tl.arange(0, padded(HALF))
    inside = (index < HALF)[None, :]
    angles = rotation + distance[:, None] * (2 * HALF) + index[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    return cos.to(tl.float32)[None, :, :], sin.to(tl.float32)[None, :, :]


@triton.jit
def dots(a, b, acc, FLAT: tl.constexpr):
    """Products of every head's matrices; ``FLAT``: of the only one, by all warps together."""
    if FLAT:
        flat = dot(
            tl.reshape(a, [a.shape[1], a.shape[2]]),
            tl.reshape(b, [b.shape[1], b.shape[2]]),
            tl.reshape(acc, [acc.shape[1], acc.shape[2]]),
        )
        result = tl.reshape(flat, [1, acc.shape[1], acc.shape[2]])
    else:
        result = dot(a, b, acc)
    return result


@triton.jit
def columns(rows, HEADS: tl.constexpr, LEAD: tl.constexpr):
    """Rows ``[HEADS * LEAD, d]`` of queries as columns, ``[HEADS, d, LEAD]``."""
    return tl.permute(tl.reshape(rows, [HEADS, LEAD, rows.shape[1]]), (0, 2, 1))
