# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation of keys and values.

A row is one token's key and value in one KV head. A latent row (``attention/latent.py``) has its
rotated channels in place of the key and its latent in place of the value. A row is quantised once,
when it is written into a page. Later moves copy its codes and scales unchanged. vLLM's
``--kv-cache-dtype`` selects the code dtype and the scales:

- ``fp8`` uses one scale for the layer's keys and one for its values, from the checkpoint or 1;
- ``fp8_per_token_head`` and ``int8_per_token_head`` compute two scales per row, one for its key and
  one for its value.
"""

from dataclasses import dataclass
from typing import Self

import torch

CODES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
"""Dtype of one channel's code, by the value of ``--kv-cache-dtype``."""
OF_ROWS = ("fp8_per_token_head", "int8_per_token_head")
"""Values of ``--kv-cache-dtype`` that store scales for each row in the page."""
LEAST_SCALE = 1e-6
"""vLLM's lower bound for the scale of a row; a row of zeros gets this scale."""
LARGEST = {
    torch.int8: 127.0,
    **{code: torch.finfo(code).max for code in (torch.float8_e4m3fn, torch.float8_e5m2)},
}


def has_scales(cache_dtype: str) -> bool:
    """Whether rows of this ``--kv-cache-dtype`` are in steps of their layer's scales."""
    return cache_dtype in CODES and cache_dtype not in OF_ROWS


@dataclass(frozen=True, eq=False)
class Quantised:
    """How a layer's rows are stored.

    Attributes:
        code: Dtype of one channel's code.
        scales: fp32 ``[2]``, the layer's key scale and value scale; None: each row has its own. All
            that read and write the layer's rows share this memory, and weights that change while a
            model is served change it in place.
        value_size: Channels of a row that are its value; None: half of them.
    """

    code: torch.dtype
    scales: torch.Tensor | None = None
    value_size: int | None = None

    @classmethod
    def of(
        cls,
        cache_dtype: str,
        scales: tuple[float, float],
        value_size: int | None = None,
        device: torch.device | None = None,
    ) -> Self | None:
        """Return the encoding for ``--kv-cache-dtype``, or None if it does not quantise.

        Args:
            scales: The layer's key scale and value scale.
            device: Of the layer's rows.
        """
        if cache_dtype not in CODES:
            return None
        if not has_scales(cache_dtype):
            return cls(CODES[cache_dtype], None, value_size)
        # Filled on the device, which may be capturing a graph, where nothing is copied to it.
        made = [torch.full((1,), scale, dtype=torch.float32, device=device) for scale in scales]
        return cls(CODES[cache_dtype], torch.cat(made), value_size)

    def _sizes(self, row_size: int) -> list[int]:
        """Channels of a row before its value, and of its value."""
        value = row_size // 2 if self.value_size is None else self.value_size
        return [row_size - value, value]

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantise rows.

        Args:
            rows: ``[..., row_size]``, key then value, in any floating-point dtype.

        Returns:
            Codes, int8 or uint8 of the same shape, and scales, fp32 ``[..., 2]``. The scales are
            None if the layer has fixed ones.
        """
        largest = LARGEST[self.code]
        rows, sizes = rows.float(), self._sizes(rows.shape[-1])
        if self.scales is None:
            most = torch.stack([part.abs().amax(-1) for part in rows.split(sizes, -1)], dim=-1)
            scale = (most / largest).clamp_min(LEAST_SCALE)
        else:
            scale = self.scales
        steps = (rows * _by_channel(1 / scale, sizes)).clamp(-largest, largest)
        if self.code == torch.int8:
            codes = steps.round().to(torch.int8)
        else:
            codes = steps.to(self.code).view(torch.uint8)
        return codes, scale if self.scales is None else None

    def decode(self, codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Dequantise codes to fp32 rows ``[..., row_size]``.

        Args:
            scale: fp32 ``[..., 2]``; None: the layer's scales.
        """
        rows = codes.view(self.code).float()
        if scale is None:
            assert self.scales is not None, "every row has a scale"
            scale = self.scales
        return rows * _by_channel(scale, self._sizes(rows.shape[-1]))


def _by_channel(scale: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The scales ``[..., 2]`` of a row's two parts, for each channel ``[..., row_size]``."""
    parts = [scale[..., i : i + 1].expand(*scale.shape[:-1], n) for i, n in enumerate(sizes)]
    return torch.cat(parts, dim=-1)
