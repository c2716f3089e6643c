# SPDX-License-Identifier: Apache-2.0
"""Tensors in one block of memory, and blocks that return to the operating system when freed.

Memory from ``malloc`` often stays with the process: after the first large block is freed, glibc
takes blocks of that size from its arenas, which shrink only at their ends. A mapping of its own
does not.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

ALIGNMENT = 64
"""Bytes to which each tensor is aligned."""

Layout = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of tensors that share a block."""


def _offsets(layout: Layout) -> list[int]:
    """Offset of each tensor in bytes, and their end."""
    offsets = [0]
    for shape, dtype in layout:
        size = math.prod(shape) * dtype.itemsize
        offsets.append(-(-(offsets[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return offsets


def block_bytes(layout: Layout) -> int:
    """Bytes of a block, in whole pages."""
    return -(-_offsets(layout)[-1] // mmap.PAGESIZE) * mmap.PAGESIZE


def new_block(layout: Layout) -> torch.Tensor:
    """A block of zeros, uint8 ``[block_bytes]``. Its mapping ends with the last view of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, block_bytes(layout), flags=flags)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def views(memory: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """The tensors in a block.

    Raises:
        ValueError: the block has another size.
    """
    if memory.dtype != torch.uint8 or list(memory.shape) != [block_bytes(layout)]:
        raise ValueError(f"not a block of {block_bytes(layout)} bytes")
    return tuple(
        memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for at, (shape, dtype) in zip(_offsets(layout)[:-1], layout, strict=True)
    )
