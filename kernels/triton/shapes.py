# SPDX-License-Identifier: Apache-2.0
"""Shapes of tensors that kernels leave each other, and that their caller allocates."""

from collections.abc import Mapping

import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type by name."""


def empty(shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised tensors, each with memory of its own."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }
