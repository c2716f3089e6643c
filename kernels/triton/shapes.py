# SPDX-License-Identifier: Apache-2.0
"""Shapes of tensors that kernels leave each other, and that their caller allocates."""

from collections.abc import Mapping

import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type by name."""
