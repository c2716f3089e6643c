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
DOUBT = 1e-5
"""How much two implementations' numbers may differ before they are rounded, for a row's largest."""


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
        scale = self.scale(rows, part)
        return self.nearest(rows / scale) * scale

    def scale(self, rows: Tensor, part: int) -> Tensor:
        """Of rows [..., D], each one's own [..., 1] or that of all."""
        if self.grid is None:
            return torch.ones(())
        if self.scales is not None:
            return torch.tensor(self.scales[part])
        return (rows.abs().amax(-1, keepdim=True) / self.grid[-1]).clamp_min(1e-6)

    def numbers(self, codes: Tensor) -> Tensor:
        """What codes stand for: themselves, two's complements, or a sign before seven bits."""
        if self.grid is None:
            return codes.float()
        if self.grid is INT8:
            return codes.view(torch.int8).float()
        bits = codes.view(torch.uint8).long()
        return self.grid[bits % 128] * torch.where(bits < 128, 1.0, -1.0)

    def settled(self, rows: Tensor, part: int, codes: Tensor, scale: Tensor | None) -> Tensor:
        """What rows [n, D] are read as whose `codes` somebody else has chosen.

        Args:
            scale: theirs [n], where every row has its own.

        Raises:
            ValueError: codes or scales that rows which differ by rounding would not have.
        """
        own, doubt = self.scale(rows, part), DOUBT * rows.abs().amax(-1, keepdim=True)
        if own.shape == doubt.shape:
            scale = scale.unsqueeze(-1)
            if ((scale - own).abs() > DOUBT * own).any():
                raise ValueError("scales that are not their rows'")
        else:
            scale = own
        numbers = self.numbers(codes)
        least, most = self.nearest((rows - doubt) / own), self.nearest((rows + doubt) / own)
        if (wrong := (numbers < least) | (numbers > most)).any():
            raise ValueError(f"{int(wrong.sum())} of {wrong.numel()} codes are not their rows'")
        return numbers * scale

    def nearest(self, numbers: Tensor) -> Tensor:
        """Of numbers between two, the one whose code is even where both are as near."""
        if self.grid is None:
            return numbers.to(self.dtype).to(numbers.dtype)
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


@dataclass
class Stored:
    """One layer's rows as somebody else has stored them, by KV head and token.

    A number in the middle of two codes goes one way or the other with the last bit of what made it,
    and a token's log-probability may follow it by 0.01. So codes are compared where they are
    written, and the stream goes on with those that were chosen.
    """

    codes: Tensor
    """[H, tokens, row], keys, then values: bits of one byte, or 16-bit numbers."""
    scales: Tensor
    """[H, tokens, 2], where every row has its own."""
    there: Tensor
    """bool [H, tokens]: which rows are known."""
    first: int
    """Channels of a row before its value."""
    compared: int = 0
    """Codes, so far."""
    others: int = 0
    """Of these, those that are not what the oracle would have chosen."""

    @classmethod
    def none(
        cls,
        heads: int,
        tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> Stored:
        """Of `dtype` codes, of which none is known yet; values have `head_dim` channels, too."""
        return cls(
            torch.zeros(heads, tokens, head_dim + (value_dim or head_dim), dtype=dtype),
            torch.zeros(heads, tokens, 2),
            torch.zeros(heads, tokens, dtype=torch.bool),
            head_dim,
        )

    def settle(self, quantiser: Quantiser, rows: Tensor, own: list[int], part: int) -> Tensor:
        """What rows [H, own, D] are read as: by the codes that are known, by ours where none is."""
        read, there = quantiser.read(rows, part), self.there[:, own]
        codes = self.codes[:, own].tensor_split([self.first], dim=-1)[part][there].contiguous()
        scale = self.scales[:, own, part][there]
        chosen = quantiser.settled(rows[there], part, codes, scale)
        ours = quantiser.nearest(rows / quantiser.scale(rows, part))[there]
        self.compared += codes.numel()
        self.others += int((quantiser.numbers(codes) != ours).sum())
        read[there] = chosen
        return read


def write_rows(
    model: Any,
    quantiser: Quantiser,
    keys: Tensor,
    values: Tensor,
    own: list[int],
    at: Tensor,
    stored: Stored | None = None,
) -> None:
    """A stride's tokens as they are read from now on; keys [H, tokens, D] stay without rotation.

    `at` are the positions at which their keys are written, `stored` what somebody else chose.
    """
    written = model.rotate(keys[:, own], at).float(), values[:, own]
    key, value = read_parts(quantiser, written, own, stored)
    keys[:, own], values[:, own] = model.rotate_back(key, at).float(), value


def read_parts(
    quantiser: Quantiser, written: tuple[Tensor, Tensor], own: list[int], stored: Stored | None
) -> list[Tensor]:
    """What a stride's rows [H, own, D], keys and values, are read as."""
    if stored is None:
        return [quantiser.read(rows, part) for part, rows in enumerate(written)]
    return [stored.settle(quantiser, rows, own, part) for part, rows in enumerate(written)]
