# SPDX-License-Identifier: Apache-2.0
"""Rows that pages store in 8 bits.

A row's key and its value have a scale each; of a latent row the channels before its value count as
its key. The scales of a row lie in its page, or the layer has two.
``vllm_cascade/cache/quantised.py`` defines codes and scales, and these functions write the same
bytes. A row is encoded from fp32 once, when it is written, and decoded to
fp32 before it is rotated. Floats of 8 bits are converted by their bits, because GPUs before compute
capability 8.9 do not convert e4m3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .tiles import first_part, load_rows, padded, store_rows

NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
LEAST_SCALE = tl.constexpr(1e-6)
ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it to a small fp32 number rounds that to the nearest even integer."""


@dataclass(frozen=True, eq=False)
class Codes:
    """How a layer's pages store rows in 8 bits.

    Attributes:
        code: dtype of a channel's code; pages hold int8, or uint8 for a float of 8 bits.
        scales: fp32 ``[num_blocks, H, block_size, 2]``, those of each slot's rows as
            ``Pages.scale``; or ``[2]``, the layer's.
    """

    code: torch.dtype
    scales: torch.Tensor

    @property
    def of_rows(self) -> bool:
        """Whether each row has scales of its own."""
        return self.scales.dim() > 1


def codes_arguments(
    stored: Codes | None, kv: torch.Tensor, rank: torch.Tensor, latent: int | None
) -> dict[str, Any]:
    """Arguments of a kernel that reads or writes the rows of pages, checked."""
    assert latent is None or kv.shape[1] == 1, "heads share latent rows"
    if stored is None:
        return {"scales": None, "CODE": None, "OF_ROWS": False}
    assert kv.dtype == (torch.int8 if stored.code == torch.int8 else torch.uint8), kv.dtype
    scales, (num_blocks, num_heads, page, _) = stored.scales, kv.shape
    assert scales.dtype == torch.float32
    if stored.of_rows:
        assert scales.shape == (num_blocks, num_heads, page, 2), scales.shape
        assert scales.stride() == (rank.stride(0), 2 * page, 1, page), scales.stride()
    else:
        assert scales.shape == (2,), scales.shape
    return {"scales": scales, "CODE": NAMES[stored.code], "OF_ROWS": stored.of_rows}


def check_scales(row_scales: torch.Tensor | None, rows: torch.Tensor, of_rows: bool) -> None:
    """Check a ring's scales ``[H, rings, unit, 2]`` of its rows."""
    assert (row_scales is not None) == of_rows
    if row_scales is not None:
        assert row_scales.shape == (*rows.shape[:3], 2), row_scales.shape
        assert row_scales.is_contiguous() and row_scales.dtype == torch.float32


@triton.constexpr_function
def largest(code):
    """The largest number of a code."""
    return {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[code]


@triton.constexpr_function
def of_float(code, what):
    """What conversion from fp32 to a float of 8 bits takes.

    ``mantissa``: its bits. ``rebias``: by how much exponents are smaller than those of fp32. In
    fp32, ``largest``: the bits of the largest number; ``nan``: those of the number that would have
    a NaN's code, 0x7F.
    """
    return {
        "e4m3": {"mantissa": 3, "rebias": 120, "largest": 0x43E00000, "nan": 0x43F00000},
        "e5m2": {"mantissa": 2, "rebias": 112, "largest": 0x47600000, "nan": 0x47E00000},
    }[code][what]


@triton.constexpr_function
def apart(slots, of_rows):
    """Distance in a page, or among a layer's scales, of a row's second scale from its first."""
    return slots if of_rows else 1


@triton.jit
def to_nearest(x):
    """Round fp32 numbers below 2**22 to the nearest integers, ties to even."""
    return (x + ROUNDS) - ROUNDS


@triton.jit
def scale_place(
    scales, block, head, offset, word_stride, SLOTS: tl.constexpr, OF_ROWS: tl.constexpr
):
    """Addresses of rows' first scales; ``offset``: of their slots in the pages ``block``."""
    place = block * word_stride + head * (2 * SLOTS) + offset
    if not OF_ROWS:
        place = place * 0
    return scales + place


@triton.jit
def scale_of_word(
    scales,
    word,
    slot,
    head,
    NUM_SETS: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """``scale_place`` of slots by the places of their words (``tiles.slot_tile``)."""
    place = word - head % NUM_SETS * (PAGE // UNIT) - slot % PAGE // UNIT
    place += head * (2 * PAGE) + slot % PAGE
    if not OF_ROWS:
        place = place * 0
    return scales + place


@triton.jit
def factor_of(scale, CODE: tl.constexpr):
    """Factors of what ``widened`` returns, from scales."""
    if CODE == "e4m3":
        scale = scale * 256.0
    return scale


@triton.jit
def load_scales(place, inside, APART: tl.constexpr):
    """Scales of rows' first channels, and of their values."""
    first = tl.load(place, mask=inside, other=0.0)
    return first, tl.load(place + APART, mask=inside, other=0.0)


@triton.jit
def widened(codes, CODE: tl.constexpr):
    """Codes as fp32 numbers; those of e4m3 are 256 times too small.

    A float of 8 bits becomes an fp16 number, whose exponents are up to 8 larger.
    """
    if CODE == "int8":
        x = codes.to(tl.float32)
    else:
        if CODE == "e5m2":
            bits = codes.to(tl.uint16) << 8
        else:
            tl.static_assert(CODE == "e4m3")
            # As `half_bits` in kernels/cpp/stored.h: the shift copies the sign to the exponent's
            # highest bit, which only a NaN keeps.
            bits = codes.to(tl.int8, bitcast=True).to(tl.int32) << 7
            bits = (bits ^ ((bits + 0x80) & 0x4000)).to(tl.int16)
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def wide(x, scale, CODE: tl.constexpr, new=None):
    """Loaded channels ``[n, d]`` in fp32.

    Args:
        scale: of codes, ``[n]``, or None.
        new: bool ``[n]``, rows to leave unquantised; the others are rounded as in pages. None: all
            are codes from pages.
    """
    if CODE is None:
        x = x.to(tl.float32)
    elif new is None:
        x = widened(x, CODE) * factor_of(scale, CODE)[:, None]
    else:
        x = x.to(tl.float32)
        x = tl.where(new[:, None], x, as_stored(x, scale[:, None], CODE))
    return x


@triton.jit
def load_turned(
    rows,
    inside,
    rotation,
    distance,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    scale=None,
    dtype=None,
    CODE: tl.constexpr = None,
    new=None,
):
    """Load rows of keys ``[n, padded(HEAD)]``, each rotated back by its ``distance``.

    Each channel is loaded beside the other channel of its pair, so that the rows stay one tile for
    one product with the queries.

    Args:
        scale, new: as for ``wide``.
        dtype: of the result, which is rounded once; None: the rows'.
    """
    keys = load_rows(rows, inside, 0, HEAD)
    if dtype is not None:
        keys = wide(keys, scale, CODE, new)
    if HALF > 0:
        channel = tl.arange(0, padded(HEAD))
        if INTERLEAVED:
            pair = channel // 2
            is_first = channel % 2 == 0
            other = tl.where(is_first, channel + 1, channel - 1)
        else:
            is_first = channel < HALF
            pair = tl.where(is_first, channel, channel - HALF)
            other = tl.where(is_first, channel + HALF, channel - HALF)
        turns = inside[:, None] & (channel < 2 * HALF)[None, :]
        others = tl.load(rows[:, None] + other[None, :], mask=turns, other=0.0)
        others = wide(others, scale, CODE, new)
        base = rotation + distance[:, None] * (2 * HALF) + pair[None, :]
        cos = tl.load(base, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(base + HALF, mask=turns, other=0.0).to(tl.float32)
        others *= tl.where(is_first, -1.0, 1.0)[None, :]
        keys = (keys.to(tl.float32) * cos + others * sin).to(keys.dtype)
    if dtype is not None:
        keys = keys.to(dtype)
    return keys


@triton.jit
def scale_of(x, place, CODE: tl.constexpr, OF_ROWS: tl.constexpr):
    """Scales with which rows ``[n, d]`` in fp32 are encoded: their own, or the layer's.

    A row with a NaN has one as its scale. ``tl.max`` ignores it; among integers its bits are the
    largest, and those of other magnitudes are in the order of what they mean.
    """
    if OF_ROWS:
        sizes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.max(sizes, axis=1).to(tl.float32, bitcast=True)
        scale = tl.div_rn(most, tl.full(most.shape, largest(CODE), tl.float32))
        scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
    else:
        scale = tl.load(place + tl.zeros([x.shape[0]], tl.int32))
    return scale


@triton.jit
def encoded(x, scale, CODE: tl.constexpr):
    """Codes of fp32 numbers in steps of ``scale``, to nearest, ties to even.

    Integers have no NaN, but the scale of such a row is one.
    """
    x = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    if CODE == "int8":
        most: tl.constexpr = largest(CODE)
        x = tl.minimum(tl.maximum(x, -most), most)
        codes = to_nearest(x).to(tl.int8)
    else:
        mantissa: tl.constexpr = of_float(CODE, "mantissa")
        drop: tl.constexpr = 23 - mantissa
        bias: tl.constexpr = of_float(CODE, "rebias")
        magic: tl.constexpr = (bias + 1 + drop) << 23
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        top: tl.constexpr = of_float(CODE, "largest")
        nan: tl.constexpr = of_float(CODE, "nan")
        size = tl.where(size > 0x7F800000, nan, tl.minimum(size, top))
        normal = (size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)) >> drop
        normal -= bias << mantissa
        # Below the least normal number codes are multiples of one step, to which an fp32 number
        # of this size rounds.
        raised = tl.full(x.shape, magic, tl.int32).to(tl.float32, bitcast=True)
        raised += size.to(tl.float32, bitcast=True)
        tiny = raised.to(tl.int32, bitcast=True) - magic
        code = tl.where(size < ((bias + 1) << 23), tiny, normal)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def as_stored(x, scale, CODE: tl.constexpr):
    """fp32 numbers, encoded with ``scale`` and decoded again."""
    return widened(encoded(x, scale, CODE), CODE) * factor_of(scale, CODE)


@triton.jit
def write_codes(
    keys,
    values,
    slots,
    place,
    inside,
    rotation,
    distance,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APART: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """Store new rows in their slots, rotated back by ``distance`` first; returns the scales.

    Args:
        place: addresses of the slots' first scales.
        rotation, distance: unused if ``HALF`` is 0.
    """
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    turned = load_turned(
        keys, inside, rotation, distance, FIRST, HALF, INTERLEAVED, dtype=tl.float32
    )
    scale = scale_of(turned, place, CODE, OF_ROWS)
    store_rows(slots, encoded(turned, scale[:, None], CODE), inside, 0, FIRST)
    wide_values = load_rows(values, inside, 0, VALUE).to(tl.float32)
    value_scale = scale_of(wide_values, place + APART, CODE, OF_ROWS)
    store_rows(slots + FIRST, encoded(wide_values, value_scale[:, None], CODE), inside, 0, VALUE)
    if OF_ROWS:
        tl.store(place, scale, mask=inside)
        tl.store(place + APART, value_scale, mask=inside)
    return scale, value_scale
