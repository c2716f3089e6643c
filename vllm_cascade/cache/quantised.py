# SPDX-License-Identifier: Apache-2.0
"""Keys and values in 8 bits: how a row becomes codes and scales, and what it is read as.

A row is one token's key and value in one head. It is quantised once, as it is written into a page;
whatever moves afterwards moves codes and scales as they are. vLLM's ``--kv-cache-dtype`` says which
codes there are, and whose scale they are in steps of: the layer's, from the checkpoint or 1
(``fp8``), or the row's own, one for its key and one for its value (``fp8_per_token_head``).
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
"""What stands for one channel, by the value of ``--kv-cache-dtype``."""
OF_ROWS = ("fp8_per_token_head", "int8_per_token_head")
"""Values with a scale for every row, which stands in the page."""
LEAST_SCALE = 1e-6
"""vLLM's least scale of a row: one of zeros has it, too."""
LARGEST = {
    torch.int8: 127.0,
    **{code: torch.finfo(code).max for code in (torch.float8_e4m3fn, torch.float8_e5m2)},
}


@dataclass(frozen=True)
class Quantised:
    """How a layer's rows are stored.

    Attributes:
        code: dtype of a channel.
        scales: of all keys and of all values; None: every row has its own two.
    """

    code: torch.dtype
    scales: tuple[float, float] | None = None

    @classmethod
    def of(cls, cache_dtype: str, scales: tuple[float, float]) -> Self | None:
        """What ``--kv-cache-dtype`` says; ``scales`` are the layer's. None: not quantised."""
        if cache_dtype not in CODES:
            return None
        return cls(CODES[cache_dtype], None if cache_dtype in OF_ROWS else scales)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes and, where rows have their own, scales.

        Args:
            rows: ``[..., 2 * D]``, key then value, in any floating type.

        Returns:
            int8 or uint8 of the same shape, and fp32 ``[..., 2]`` or None.
        """
        largest = LARGEST[self.code]
        halves = rows.float().unflatten(-1, (2, -1))
        if self.scales is None:
            scale = (halves.abs().amax(-1) / largest).clamp_min(LEAST_SCALE)
        else:
            scale = halves.new_tensor(self.scales)
        steps = (halves * (1 / scale).unsqueeze(-1)).clamp(-largest, largest)
        if self.code == torch.int8:
            codes = steps.round().to(torch.int8)
        else:
            codes = steps.to(self.code).view(torch.uint8)
        return codes.flatten(-2), scale if self.scales is None else None

    def decode(self, codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """fp32 rows ``[..., 2 * D]`` of codes, with the scales ``[..., 2]`` that rows may have."""
        halves = codes.view(self.code).float().unflatten(-1, (2, -1))
        if scale is None:
            assert self.scales is not None, "every row has a scale"
            scale = halves.new_tensor(self.scales)
        return (halves * scale.unsqueeze(-1)).flatten(-2)
