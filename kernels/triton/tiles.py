# SPDX-License-Identifier: Apache-2.0
"""Functions shared by the kernels: tile loaders, rotation, logits, head reduction, victim rules.

The columns of a step row are those of ``kernels/columns.py``, as Triton's constants.
"""

import torch
import triton
import triton.language as tl

from .. import columns
from . import stride_columns

STREAM = tl.constexpr(columns.STREAM)
CACHED = tl.constexpr(columns.CACHED)
OLD_SLOTS = tl.constexpr(columns.OLD_SLOTS)
NEW_SLOTS = tl.constexpr(columns.NEW_SLOTS)
START = tl.constexpr(columns.START)
LENGTH = tl.constexpr(columns.LENGTH)
LO = tl.constexpr(columns.LO)
HI = tl.constexpr(columns.HI)
EVICTS = tl.constexpr(columns.EVICTS)
CELL = tl.constexpr(columns.CELL)
MORE = tl.constexpr(columns.MORE)
NUM_MORE = tl.constexpr(columns.NUM_MORE)
PER_AGE = tl.constexpr(columns.PER_AGE)
NEWEST_STAYS = tl.constexpr(columns.NEWEST_STAYS)
DECAY = tl.constexpr(columns.DECAY)
WEIGHT = tl.constexpr(columns.WEIGHT)
PLAN = tl.constexpr(stride_columns.PLAN)
GROUPED = tl.constexpr(stride_columns.GROUPED)
PLANNED = tl.constexpr(stride_columns.PLANNED)
STAY = tl.constexpr(stride_columns.STAY)
LAG = tl.constexpr(stride_columns.LAG)
FADE = tl.constexpr(stride_columns.FADE)
CHUNK = tl.constexpr(stride_columns.CHUNK)
SINKS = tl.constexpr(stride_columns.SINKS)
LEFT = tl.constexpr(stride_columns.LEFT)
STEP_COLUMNS = columns.STEP_COLUMNS
STEP, RULE = tl.constexpr(STEP_COLUMNS), tl.constexpr(columns.RULE_COLUMNS)

MOST_REGISTERS = 255
"""Registers per thread; otherwise ptxas may spill to fit two blocks per multiprocessor."""
NEVER = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def head_size_of(kv: torch.Tensor, latent: int | None) -> int:
    """Channels of a key in pages ``kv``; ``latent``: those of a latent row's value, or None.

    A latent row is a key, whose last channels are its value; other rows are a key, then a value.
    """
    return kv.shape[3] // 2 if latent is None else kv.shape[3]


@triton.constexpr_function
def first_part(head, value, row):
    """Channels of a key's first tile: all, or those of a latent row before its value."""
    return head if row > head else head - value


def check_rows(rows: torch.Tensor) -> None:
    """Check the layout of ``[n, H, D]`` new rows: heads and channels are contiguous."""
    assert rows.stride(2) == 1, rows.stride()
    assert rows.shape[1] == 1 or rows.stride(1) == rows.shape[2], (rows.shape, rows.stride())


def check_pages(kv: torch.Tensor, *words: torch.Tensor) -> int:
    """Check the layout of ``vllm_cascade.cache.layout.Pages``; returns the unit."""
    num_blocks, num_heads, block_size, width = kv.shape
    assert kv.stride()[1:] == (block_size * width, width, 1), kv.stride()
    assert width % 2 == 0, kv.shape
    for word in words:
        assert word.shape == words[0].shape and word.shape[0] == num_blocks, word.shape
        assert block_size % word.shape[2] == 0 and word.shape[1] in (1, num_heads), word.shape
        assert word.stride()[1:] == (word.shape[2], 1), word.stride()
        assert word.stride(0) == words[0].stride(0), "words of one page share its stride"
        assert word.element_size() == 4, word.dtype
    return block_size // words[0].shape[2]


def check_steps(steps: torch.Tensor, table: torch.Tensor) -> None:
    """Check that step rows and block tables match; ``table`` may have more rows."""
    assert steps.dtype == torch.int32 and steps.shape[1] == STEP_COLUMNS, steps.shape
    assert steps.is_contiguous() and table.dtype == torch.int32 and table.stride(1) == 1
    assert table.shape[0] >= steps.shape[0], (table.shape, steps.shape)


def chunk_of(unit: int, tile: int) -> int:
    """Tokens of a unit per group of a tile: a power of two that divides both."""
    return min(unit & -unit, tile)


@triton.constexpr_function
def padded(channels):
    """Channels of a tile: a power of two, and enough for a tensor core."""
    return max(16, triton.next_power_of_2(channels))


@triton.jit
def block_of(table, slot, inside, PAGE: tl.constexpr):
    """Block numbers of slots; int64, because a pool may exceed 2**31 elements."""
    return tl.load(table + slot // PAGE, mask=inside, other=0).to(tl.int64)


@triton.jit
def stride_of(steps, row):
    """A stride's row: whether it is padding, tokens cached before, its length, its first token."""
    step = steps + row * STEP
    start = tl.load(step + START).to(tl.int64)
    return tl.load(step + STREAM) < 0, tl.load(step + CACHED), tl.load(step + LENGTH), start


@triton.jit
def shift_of(positions, start, cached):
    """Distance from ranks to positions in layers with windows, which use other layers' positions.

    ``start`` is the index of a stride's first token in the step; ``positions`` has all tokens.
    """
    return tl.load(positions + start).to(tl.int32) - cached


@triton.jit
def slot_tile(
    table,
    first,
    end,
    head_set,
    word_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr = 1,
):
    """A tile of a request's slots: their numbers, whether before ``end``, blocks and words.

    A word is a slot's offset in the views ``rank``, ``born``, ``score`` and ``token``. If slots and
    ``PAGE`` already count units, ``UNIT`` is 1.
    """
    slot = first + tl.arange(0, TILE)
    inside = slot < end
    block = block_of(table, slot, inside, PAGE)
    word = block * word_stride + head_set * (PAGE // UNIT) + slot % PAGE // UNIT
    return slot, inside, block, word


@triton.jit
def pair_channels(index, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of each rotary pair: (2i, 2i + 1) or (i, i + rotary_dim / 2)."""
    if INTERLEAVED:
        return 2 * index, 2 * index + 1
    return index, index + HALF


@triton.jit
def load_pair(rows, row_inside, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves ``[n, padded(HALF)]`` of the rotary channels of rows, zero outside."""
    index = tl.arange(0, padded(HALF))
    first, second = pair_channels(index, HALF, INTERLEAVED)
    inside = row_inside[:, None] & (index < HALF)[None, :]
    x = tl.load(rows[:, None] + first[None, :], mask=inside, other=0.0)
    y = tl.load(rows[:, None] + second[None, :], mask=inside, other=0.0)
    return x, y


@triton.jit
def load_rows(rows, row_inside, FROM: tl.constexpr, TO: tl.constexpr):
    """Channels ``[FROM, TO)`` of rows, ``[n, padded(TO - FROM)]``, zero outside."""
    channel = FROM + tl.arange(0, padded(TO - FROM))
    inside = row_inside[:, None] & (channel < TO)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=inside, other=0.0)


@triton.jit
def load_columns(rows, row_inside, FROM: tl.constexpr, TO: tl.constexpr):
    """Like ``load_rows``, but loaded as ``[padded(TO - FROM), n]``, without a transposition."""
    channel = FROM + tl.arange(0, padded(TO - FROM))
    inside = row_inside[None, :] & (channel < TO)[:, None]
    return tl.load(rows[None, :] + channel[:, None], mask=inside, other=0.0)


@triton.jit
def store_rows(rows, x, row_inside, FROM: tl.constexpr, TO: tl.constexpr):
    """Store a tile of ``load_rows``, converted to the destination's type."""
    channel = FROM + tl.arange(0, padded(TO - FROM))
    inside = row_inside[:, None] & (channel < TO)[None, :]
    tl.store(rows[:, None] + channel[None, :], x.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def copy_rows(
    keys,
    values,
    slots,
    row_inside,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Copy rows of keys and values to their slots of ``ROW`` channels, which end with the value.

    The key precedes it, or is the whole latent row.
    """
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    key_rows = load_rows(keys, row_inside, 0, FIRST)
    value_rows = load_rows(values, row_inside, 0, VALUE)
    store_rows(slots, key_rows, row_inside, 0, FIRST)
    store_rows(slots + FIRST, value_rows, row_inside, 0, VALUE)


@triton.jit
def rotate_pair(x, y, rotation, distance, row_inside, HALF: tl.constexpr):
    """Rotate fp32 pairs back by ``distance`` positions (``kernels/rotation_table.py``)."""
    index = tl.arange(0, padded(HALF))
    inside = row_inside[:, None] & (index < HALF)[None, :]
    base = rotation + distance[:, None] * (2 * HALF) + index[None, :]
    cos = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(base + HALF, mask=inside, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def dot(a, b, acc=None):
    """``tl.dot`` with fp32 sums. The interpreter holds bf16 as integers, so convert there."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def soft_cap(logits, cap):
    """``cap * tanh(logits / cap)``; unchanged if ``cap`` is None."""
    if cap is not None:
        logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
    return logits


@triton.jit
def reduce_heads(mass, HEADS: tl.constexpr, REDUCTION: tl.constexpr):
    """Reduce non-negative masses ``[pad, n]`` of ``HEADS`` query heads to ``[n]``.

    ``median`` is the lower median: the head that ``(HEADS - 1) // 2`` others precede, found by
    counting instead of sorting.
    """
    head = tl.arange(0, mass.shape[0])
    real = (head < HEADS)[:, None]
    if REDUCTION == "mean":
        result = tl.sum(tl.where(real, mass, 0.0), axis=0) / HEADS
    elif REDUCTION == "max":
        result = tl.max(tl.where(real, mass, 0.0), axis=0)
    else:
        tl.static_assert(REDUCTION == "median")
        before = tl.zeros(mass.shape, tl.int32)
        for other in range(HEADS):
            theirs = tl.sum(tl.where((head == other)[:, None], mass, 0.0), axis=0)[None, :]
            first = (theirs < mass) | ((theirs == mass) & (other < head)[:, None])
            before += first.to(tl.int32)
        chosen = real & (before == (HEADS - 1) // 2)
        result = tl.sum(tl.where(chosen, mass, 0.0), axis=0)
    return result


@triton.jit
def ordered(score):
    """An int64 of 32 significant bits that orders like the fp32 ``score``.

    The bits order like the number once negative ones are mirrored; ``+ 0.0`` makes -0 equal to 0.
    """
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def victim_key(score, rank, newest_stays):
    """An int64 whose minimum is the lowest score; ties go to the earliest or the latest rank.

    The rank in the low half breaks ties, so one reduction finds the victim.
    """
    tie = tl.where(newest_stays != 0, rank, NEVER - rank)
    return (ordered(score) << 32) | tie.to(tl.int64)


@triton.jit
def victim_rank(key, newest_stays):
    """The rank in a ``victim_key``."""
    tie = (key & 0xFFFFFFFF).to(tl.int32)
    return tl.where(newest_stays != 0, tie, NEVER - tie)


@triton.jit
def turn_rows(
    source,
    out,
    rotation,
    distance,
    inside,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Copy rows of keys, each rotated back by its ``distance``."""
    if HALF > 0:
        x, y = load_pair(source, inside, HALF, INTERLEAVED)
        x, y = rotate_pair(x, y, rotation, distance, inside, HALF)
        index = tl.arange(0, padded(HALF))
        first, second = pair_channels(index, HALF, INTERLEAVED)
        write = inside[:, None] & (index < HALF)[None, :]
        tl.store(out[:, None] + first[None, :], x.to(out.dtype.element_ty), mask=write)
        tl.store(out[:, None] + second[None, :], y.to(out.dtype.element_ty), mask=write)
    if 2 * HALF < HEAD:
        store_rows(out, load_rows(source, inside, 2 * HALF, HEAD), inside, 2 * HALF, HEAD)


@triton.jit
def page_tile(
    kv,
    rank,
    born,
    table,
    first,
    slots,
    head,
    page_stride,
    word_stride,
    NUM_SETS: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A tile of a request's slots for one head.

    Returns slots, their units' ranks (-1: empty), words, pointers to rows of ``ROW`` channels, and
    the distance from each rank to the written position.
    """
    slot, inside, block, word = slot_tile(
        table, first, slots, head % NUM_SETS, word_stride, PAGE, TILE, UNIT
    )
    unit = tl.load(rank + word, mask=inside, other=-1)
    held = unit >= 0
    distance = tl.load(born + word, mask=held, other=0) - tl.where(held, unit, 0) * UNIT
    rows = kv + block * page_stride + (head * PAGE + slot % PAGE) * ROW
    return slot, unit, word, rows, distance


@triton.jit
def tile_blocks(table, first, slots, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Block numbers of a tile's slots: one if pages hold whole tiles, else one per slot."""
    if PAGE % TILE == 0:
        slot = first
    else:
        slot = first + tl.arange(0, TILE)
    return tl.load(table + slot // PAGE, mask=slot < slots, other=0)


@triton.jit
def tile_offsets(first, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Offsets of a tile's slots in their pages."""
    if PAGE % TILE == 0:
        offset = first % PAGE + tl.arange(0, TILE)
    else:
        offset = (first + tl.arange(0, TILE)) % PAGE
    return offset


def grid_of_places(
    num_rows: int, num_sets: int, num_places: int
) -> tuple[tuple[int, int, int], int]:
    """A grid of programs for each request, head set and tile of its places, and a tile's places."""
    tile = min(1024, triton.next_power_of_2(num_places))
    return (num_rows, num_sets, triton.cdiv(num_places, tile)), tile
