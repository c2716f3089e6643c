# SPDX-License-Identifier: Apache-2.0
"""Keys at their ranks: the cos/sin table by distance, and what a cache is by its ranks.

A key is rotated when it is written, at the position ``born``; where it is read it must be at its
``rank``, so it is rotated back by ``born - rank``, in fp32, always from the key as written.
Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, positions inside the cache.
"""

import torch

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
