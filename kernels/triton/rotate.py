# SPDX-License-Identifier: Apache-2.0
"""Keys at their ranks: the cos/sin table by distance, and a dense chronological copy of a cache.

A key is rotated when it is written, at the position ``born``; where it is read it must be at its
``rank``, so it is rotated back by ``born - rank``, in fp32, always from the key as written.
Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, positions inside the cache.
"""

import torch
import triton
import triton.language as tl

from .tiles import (
    CACHED,
    OLD_SLOTS,
    STEP,
    STREAM,
    check_pages,
    check_steps,
    load_rows,
    slot_tile,
    store_rows,
    turn_rows,
)

_tables: dict[tuple, torch.Tensor] = {}


def decode_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what decode reads its table of rotations: fp16 for a cache of 16-bit numbers.

    It is read again for every unit, or token. An error of 2**-12 in a cosine is far below that of
    a product of 16-bit queries and keys.
    """
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def rotation_table(
    inv_freq: torch.Tensor,
    max_distance: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    forward: int = 0,
) -> torch.Tensor:
    """cos and sin of a rotation back by 0 .. ``max_distance`` positions.

    Layers with the same frequencies share one table. Rotations forward, by up to ``forward``
    positions, lie in memory before it: distances below 0.

    Args:
        inv_freq: fp32 ``[rotary_dim / 2]``, radians per position.

    Returns:
        ``[max_distance + 1, 2, rotary_dim / 2]`` on ``device``.
    """
    key = (tuple(inv_freq.tolist()), max_distance, str(device), dtype, forward)
    if key not in _tables:
        distance = torch.arange(-forward, max_distance + 1, dtype=torch.float64)
        angle = -distance[:, None] * inv_freq.double().cpu()
        _tables[key] = torch.stack([angle.cos(), angle.sin()], dim=1).to(device, dtype)
    return _tables[key][forward:]


@triton.jit(do_not_specialize=["out_stride"])
def _gather(
    kv,
    rank,
    born,
    score,
    token,
    table,
    steps,
    rotation,
    keys,
    values,
    scores,
    tokens,
    page_stride,
    word_stride,
    table_stride,
    out_stride,
    NUM_HEADS: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(steps + row * STEP + STREAM) < 0:
        return
    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    table += row * table_stride
    first = tl.program_id(2) * TILE
    slot, inside, block, word = slot_tile(
        table, first, slots, head % NUM_SETS, word_stride, PAGE, TILE, UNIT
    )
    unit = tl.load(rank + word, mask=inside, other=-1)
    valid = unit >= 0
    distance = tl.load(born + word, mask=valid, other=0) - tl.where(valid, unit, 0) * UNIT
    place = unit * UNIT + slot % UNIT
    source = kv + block * page_stride + (head * PAGE + slot % PAGE) * (2 * HEAD)
    target = (row * NUM_HEADS + head).to(tl.int64) * out_stride + tl.where(valid, place, 0)
    out = keys + target * HEAD
    turn_rows(source, out, rotation, distance, valid, HEAD, HALF, INTERLEAVED)
    value = load_rows(source + HEAD, valid, 0, HEAD)
    store_rows(values + target * HEAD, value, valid, 0, HEAD)
    if head < NUM_SETS:
        if UNIT > 1:
            valid = valid & (slot % UNIT == 0)  # one number a unit
        target = (row * NUM_SETS + head).to(tl.int64) * (out_stride // UNIT)
        target += tl.where(valid, unit, 0)
        tl.store(scores + target, tl.load(score + word, mask=valid, other=0.0), mask=valid)
        if token is not None:
            tl.store(tokens + target, tl.load(token + word, mask=valid, other=0), mask=valid)


@torch.library.custom_op("kv_cascade::gather", mutates_args=())
def gather(
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    token: torch.Tensor | None,
    table: torch.Tensor,
    steps: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
    max_cached: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A dense copy of ``R`` requests' caches, oldest token first, keys at their ranks.

    Args:
        kv, rank, born, score, token: ``Pages`` views.
        table: int32 ``[R, P]`` block numbers.
        steps: int32 ``[R, STEP_COLUMNS]`` step rows (``tiles``).
        rotation: fp32 ``[max_distance + 1, 2, rotary_dim / 2]``, or None: keys stay as they are.
        interleaved: rotary pairs are (2i, 2i + 1).
        max_cached: the largest number of cached tokens among the requests.

    Returns:
        keys and values ``[R, H, max_cached, D]`` in the cache's dtype, scores fp32 and token
        indices int32 ``[R, S, max_cached // unit]`` (empty without ``token``). What is beyond a
        request's own count is not written.
    """
    unit = check_pages(kv, rank, born, score)
    check_steps(steps, table)
    assert max_cached % unit == 0, "strides begin where units do"
    num_rows, num_heads, head_size = steps.shape[0], kv.shape[1], kv.shape[3] // 2
    num_sets, page = rank.shape[1], kv.shape[2]
    half = 0 if rotation is None else rotation.shape[2]
    keys = kv.new_empty(num_rows, num_heads, max_cached, head_size)
    values = torch.empty_like(keys)
    scores = score.new_empty(num_rows, num_sets, max_cached // unit)
    tokens = rank.new_empty(scores.shape if token is not None else (0,))
    num_slots = table.shape[1] * page
    if num_rows == 0 or max_cached == 0:
        return keys, values, scores, tokens
    tile = min(16, triton.next_power_of_2(num_slots))
    _gather[(num_rows, num_heads, triton.cdiv(num_slots, tile))](
        *(kv, rank, born, score, token, table, steps, rotation, keys, values, scores, tokens),
        *(kv.stride(0), rank.stride(0), table.stride(0), max_cached),
        NUM_HEADS=num_heads,
        NUM_SETS=num_sets,
        HEAD=head_size,
        HALF=half,
        INTERLEAVED=interleaved,
        PAGE=page,
        TILE=tile,
        UNIT=unit,
        num_warps=4,
    )
    return keys, values, scores, tokens


@gather.register_fake
def _(kv, rank, born, score, token, table, steps, rotation, interleaved, max_cached):
    num_rows, num_heads, head_size = steps.shape[0], kv.shape[1], kv.shape[3] // 2
    keys = kv.new_empty(num_rows, num_heads, max_cached, head_size)
    units = max_cached * rank.shape[2] // kv.shape[2]
    scores = score.new_empty(num_rows, rank.shape[1], units)
    tokens = rank.new_empty(scores.shape if token is not None else (0,))
    return keys, torch.empty_like(keys), scores, tokens


def rotate_reference(
    x: torch.Tensor, distance: torch.Tensor, inv_freq: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """fp64 ``[..., D]`` rotated back by ``distance [...]``; channels past the rotary ones pass."""
    x = x.double().clone()
    if inv_freq is None:
        return x
    half = inv_freq.numel()
    angle = -distance.double()[..., None] * inv_freq.double()
    turn = torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned = torch.complex(x[..., first], x[..., second]) * turn
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def gather_reference(
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    blocks: torch.Tensor,
    step: list[int],
    inv_freq: torch.Tensor | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request: fp64 keys and values ``[H, n, D]``, its units' scores and places ``[S, u]``."""
    cached, old_slots, unit = (
        step[CACHED.value],
        step[OLD_SLOTS.value],
        kv.shape[2] // rank.shape[2],
    )
    num_heads, head_size, count = kv.shape[1], kv.shape[3] // 2, -(-cached // unit)
    ranks = rank[blocks.long()].transpose(0, 1).flatten(1)[:, : old_slots // unit]
    units = ranks.masked_fill(ranks < 0, 2**31 - 1).argsort(dim=1)[:, :count]
    assert (ranks.gather(1, units) == torch.arange(count)).all(), "not a cache of this many tokens"
    slots = (units[..., None] * unit + torch.arange(unit)).flatten(1)[:, :cached]
    rows = kv[blocks.long()].transpose(0, 1).flatten(1, 2)  # [H, N, 2D]
    index = slots.expand(num_heads, -1)
    rows = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2])).double()
    births = born[blocks.long()].transpose(0, 1).flatten(1).gather(1, units)
    moved = (births - torch.arange(count) * unit).repeat_interleave(unit, dim=1)
    distance = moved[:, :cached].expand(num_heads, -1)
    keys = rotate_reference(rows[..., :head_size], distance, inv_freq, interleaved)
    scores = score[blocks.long()].transpose(0, 1).flatten(1).gather(1, units)
    return keys, rows[..., head_size:], scores.double(), units
