# SPDX-License-Identifier: Apache-2.0
"""Tables of cosines and sines that rotate cached keys from where they were written to their ranks.

A key is written at position ``born`` and read at its ``rank``. It is rotated back by
``born - rank`` in fp32, always from the key as written.
Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, positions inside the cache.
"""

from weakref import WeakValueDictionary

import torch

_tables: WeakValueDictionary[tuple, torch.Tensor] = WeakValueDictionary()
"""Tables as they were returned. Layers hold them, so that they are freed with their engine."""


def decode_dtype(dtype: torch.dtype) -> torch.dtype:
    """Data type of decode's rotation table: fp16 for 16-bit caches, else fp32.

    Decode reads the table for every token or unit. An error of 2**-12 in a cosine is far below the
    error of a product of 16-bit queries and keys.
    """
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def rotation_table(
    inv_freq: torch.Tensor,
    max_distance: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    forward: int = 0,
) -> torch.Tensor:
    """cos and sin of rotations back by 0 .. ``max_distance`` positions.

    Layers with the same frequencies share one table. Rotations forward by up to ``forward``
    positions have negative distances, and stand in memory before the returned table.

    Args:
        inv_freq: fp32 ``[rotary_dim / 2]``, radians per position.

    Returns:
        ``[max_distance + 1, 2, rotary_dim / 2]`` on ``device``.
    """
    key = (tuple(inv_freq.tolist()), max_distance, str(device), dtype, forward)
    found = _tables.get(key)
    if found is None:
        distance = torch.arange(-forward, max_distance + 1, dtype=torch.float64)
        angle = -distance[:, None] * inv_freq.double().cpu()
        table = torch.stack([angle.cos(), angle.sin()], dim=1).to(device, dtype)
        found = _tables[key] = table[forward:]
    return found
