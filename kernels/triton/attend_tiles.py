# SPDX-License-Identifier: Apache-2.0
"""Tile functions of ``attend``.

The KV heads of a tile share its metadata and rotations.
"""

import triton
import triton.language as tl

from .stored import factor_of, widened
from .tiles import dot, padded, tile_offsets

LOWEST = tl.constexpr(-1e38)
"""Below every logit, but finite, so a maximum over no keys needs no special case."""


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
    """Rank and born of a tile's slots. Empty slots have rank -1."""
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
    """Values of rows ``[h, n]`` as columns ``[h, padded(HEAD), n]``; zero where not valid."""
    channel = tl.arange(0, padded(HEAD))
    inside = valid[None, None, :] & (channel < HEAD)[None, :, None]
    return tl.load(rows[:, None, :] + channel[None, :, None], mask=inside, other=0.0)


@triton.jit
def angles_of(rotation, distance, FROM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """cos and sin ``[1, n, WIDTH]`` of the pairs from ``FROM`` on, by distances ``[n]``."""
    index = FROM + tl.arange(0, WIDTH)
    inside = (index < HALF)[None, :]
    angles = rotation + distance[:, None] * (2 * HALF) + index[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    return cos.to(tl.float32)[None, :, :], sin.to(tl.float32)[None, :, :]


@triton.jit
def turned_products(
    products,
    q1,
    q2,
    rows,
    valid,
    rotation,
    distance,
    FROM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLAT: tl.constexpr,
    scale,
    CODE: tl.constexpr,
):
    """Add the products of some pairs of channels to ``products [h, n, q]``.

    Keys are rotated back by ``distance``.

    Args:
        q1, q2: ``[h, w, q]``, both halves of the queries' pairs from ``FROM`` on.
        scale: ``[h, n, 1]``, of keys that are codes (``stored.py``), or None.
    """
    WIDTH: tl.constexpr = q1.shape[1]
    TO: tl.constexpr = min(FROM + WIDTH, HALF)
    cos, sin = angles_of(rotation, distance, FROM, WIDTH, HALF)
    if INTERLEAVED:
        both = keys_of(rows, valid, 2 * FROM, 2 * TO, 2 * WIDTH)
        x, y = tl.split(tl.reshape(both, [both.shape[0], both.shape[1], WIDTH, 2]))
    else:
        x = keys_of(rows, valid, FROM, TO, WIDTH)
        y = keys_of(rows + HALF, valid, FROM, TO, WIDTH)
    a = wide_of(x, scale, CODE)
    b = wide_of(y, scale, CODE)
    products = dots((a * cos - b * sin).to(q1.dtype), q1, products, FLAT)
    return dots((b * cos + a * sin).to(q2.dtype), q2, products, FLAT)


@triton.jit
def wide_of(x, scale, CODE: tl.constexpr):
    """Loaded channels in fp32; ``scale``: of codes, as wide, or None."""
    if CODE is None:
        x = x.to(tl.float32)
    else:
        x = widened(x, CODE) * factor_of(scale, CODE)
    return x


@triton.jit
def dots(a, b, acc, FLAT: tl.constexpr):
    """Matrix products per head. ``FLAT``: there is one head, which all warps share."""
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
    """Query rows ``[HEADS * LEAD, d]`` as columns ``[HEADS, d, LEAD]``."""
    return tl.permute(tl.reshape(rows, [HEADS, LEAD, rows.shape[1]]), (0, 2, 1))


@triton.jit
def parted(rows, PARTS: tl.constexpr, HEADS: tl.constexpr, LEAD: tl.constexpr):
    """``columns`` of rows ``[HEADS * LEAD, d]``, as a tuple of 1 or 4 equal parts of channels."""
    if PARTS == 1:
        parts = (columns(rows, HEADS, LEAD),)
    else:
        first, second = halves(rows)
        a, b = halves(first)
        c, d = halves(second)
        parts = (
            columns(a, HEADS, LEAD),
            columns(b, HEADS, LEAD),
            columns(c, HEADS, LEAD),
            columns(d, HEADS, LEAD),
        )
    return parts


@triton.jit
def halves(rows):
    """Split rows ``[h, 2 * w]`` into two tensors ``[h, w]``."""
    return tl.split(tl.permute(tl.reshape(rows, [rows.shape[0], 2, rows.shape[1] // 2]), (0, 2, 1)))
