# SPDX-License-Identifier: Apache-2.0
"""Keys at their ranks: the cos/sin table by distance, and what a cache is by its ranks.

A key is rotated when it is written, at the position ``born``; where it is read it must be at its
``rank``, so it is rotated back by ``born - rank``, in fp32, always from the key as written.
Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, positions inside the cache.
"""

import torch

from .tiles import CACHED, OLD_SLOTS

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
    shift: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request: fp64 keys and values ``[H, n, D]``, its units' scores and places ``[S, u]``.

    ``shift``: by how much positions are beyond ranks.
    """
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
    moved = (births - torch.arange(count) * unit - shift).repeat_interleave(unit, dim=1)
    distance = moved[:, :cached].expand(num_heads, -1)
    keys = rotate_reference(rows[..., :head_size], distance, inv_freq, interleaved)
    scores = score[blocks.long()].transpose(0, 1).flatten(1).gather(1, units)
    return keys, rows[..., head_size:], scores.double(), units
