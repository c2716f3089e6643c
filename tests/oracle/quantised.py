# SPDX-License-Identifier: Apache-2.0
"""Rows in 8 bits, a second time: codes are looked up in a list of all numbers that there are.

The plugin casts to PyTorch's types and, in C++, works on bits; nothing of that is used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def floats(exponent_bits: int, mantissa_bits: int, codes: int) -> Tensor:
    """The non-negative numbers of the first `codes` codes, ascending: subnormal ones first."""
    bias, per_exponent = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    numbers = []
    for code in range(codes):
        exponent, mantissa = divmod(code, per_exponent)
        whole = 1 if exponent else 0
        numbers.append((whole + mantissa / per_exponent) * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor(numbers, dtype=torch.float32)


E4M3 = floats(4, 3, 127)  # the 128th is no number
E5M2 = floats(5, 2, 124)  # then infinity
INT8 = torch.arange(128, dtype=torch.float32)


@dataclass(frozen=True)
class Quantiser:
    """What rows become of which `grid` has the sizes; `scales` of keys and values, or their own.

    Without a grid they are rounded to `dtype`.
    """

    grid: Tensor | None
    scales: tuple[float, float] | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, cache_dtype: str, scales: tuple[float, float] = (1.0, 1.0)) -> Quantiser | None:
        """By vLLM's name; None where rows stay as they are."""
        if cache_dtype == "auto":
            return None
        if cache_dtype in ("bfloat16", "float16"):
            return cls(None, dtype=getattr(torch, cache_dtype))
        if cache_dtype.endswith("per_token_head"):
            return cls(INT8 if cache_dtype.startswith("int8") else E4M3)
        return cls(E5M2 if cache_dtype.endswith("e5m2") else E4M3, scales)

    def read(self, rows: Tensor, part: int) -> Tensor:
        """What fp32 rows [..., D] are read as; `part` 0: keys, 1: values."""
        if self.grid is None:
            return rows.to(self.dtype).to(rows.dtype)
        largest = self.grid[-1]
        if self.scales is None:
            scale = (rows.abs().amax(-1, keepdim=True) / largest).clamp_min(1e-6)
        else:
            scale = torch.tensor(self.scales[part])
        return self.nearest(rows / scale) * scale

    def nearest(self, numbers: Tensor) -> Tensor:
        """Of numbers between two, the one whose code is even where both are as near."""
        size = numbers.abs().contiguous()
        upper = torch.searchsorted(self.grid, size).clamp(1, len(self.grid) - 1)
        low, high = self.grid[upper - 1], self.grid[upper]
        middle = (low + high) / 2
        up = (size > middle) | ((size == middle) & (upper % 2 == 0))
        return numbers.sign() * torch.where(up, high, low)


def written_at(before: int, after: int, length: int, filling: int) -> Tensor:
    """Positions at which a stride's tokens are written: those they attended from.

    But the `filling` last tokens of the stream are of a unit that is not complete: it stands where
    its next tokens will follow it, at the end of the `after` tokens that are cached then.
    """
    at = before + torch.arange(length)
    own = min(filling, length)
    at[length - own :] = after - own + torch.arange(own)
    return at


def write_rows(
    model: Any, quantiser: Quantiser, keys: Tensor, values: Tensor, own: list[int], at: Tensor
) -> None:
    """A stride's tokens as they are read from now on; keys [H, tokens, D] stay without rotation.

    `at` are the positions at which their keys are written.
    """
    written = quantiser.read(model.rotate(keys[:, own], at), 0)
    keys[:, own] = model.rotate_back(written, at)
    values[:, own] = quantiser.read(values[:, own], 1)
