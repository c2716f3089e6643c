# SPDX-License-Identifier: Apache-2.0
"""Tensors in a memory mapping of their own, which returns to the operating system when freed.

Memory from ``malloc`` often stays with the process: after the first large block is freed, glibc
takes blocks of that size from its arenas, which shrink only at their ends.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

ALIGNMENT = 64
"""Bytes to which each tensor is aligned."""

Layout = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of tensors that are mapped together."""


def _offsets(layout: Layout) -> list[int]:
    """Offset of each tensor in bytes, and their end."""
    offsets = [0]
    for shape, dtype in layout:
        size = math.prod(shape) * dtype.itemsize
        offsets.append(-(-(offsets[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return offsets


def mapped_bytes(layout: Layout) -> int:
    """Bytes of a mapping, in whole pages."""
    return -(-_offsets(layout)[-1] // mmap.PAGESIZE) * mmap.PAGESIZE


def mapped(layout: Layout) -> tuple[torch.Tensor, ...]:
    """Map uninitialised tensors; the mapping ends with the last of them and of their views."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, mapped_bytes(layout), flags=flags)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return tuple(
        memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for at, (shape, dtype) in zip(_offsets(layout)[:-1], layout, strict=True)
    )
