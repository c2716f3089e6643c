# SPDX-License-Identifier: Apache-2.0
"""Units that a stride evicts, before they are written to a recall log."""

from dataclasses import dataclass
from typing import Self

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.cache.layout import Pages


@dataclass(frozen=True, eq=False)
class Evicted:
    """Evicted units in storage order: by rank before the stride, the stride's own units last.

    Attributes:
        rows: ``[H, n, unit, row_size]``, in the pages' dtype.
        born: int32 ``[sets, n]``, the position at which the first key was rotated.
        token: int32 ``[sets, n]``, the first token's index in the stream.
        scale: fp32 ``[H, n, unit, 2]``, quantisation scales per row; None if rows have no scales.
    """

    rows: torch.Tensor
    born: torch.Tensor
    token: torch.Tensor
    scale: torch.Tensor | None = None

    @classmethod
    def room(cls, layer: LayerConfig, pages: Pages, num_units: int) -> Self:
        """Allocate uninitialised memory for ``num_units`` units."""
        words = torch.empty(2, layer.num_sets, num_units, dtype=torch.int32)
        keys = (layer.num_kv_heads, num_units, pages.unit)
        rows = torch.empty(*keys, layer.row_size, dtype=pages.kv.dtype)
        scale = None if pages.scale is None else torch.empty(*keys, pages.scale.shape[-1])
        return cls(rows, words[0], words[1], scale)

    def __len__(self) -> int:
        return self.born.shape[1]
