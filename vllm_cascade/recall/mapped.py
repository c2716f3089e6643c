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

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes to which each tensor is aligned."""

Layout = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of tensors that share a block."""


def offsets(layout: Layout) -> list[int]:
    """Offset of each tensor in bytes, and their end."""
    found = [0]
    for shape, dtype in layout:
        size = math.prod(shape) * dtype.itemsize
        found.append(-(-(found[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return found


def block_bytes(layout: Layout) -> int:
    """Bytes of a block, in whole pages."""
    return -(-offsets(layout)[-1] // mmap.PAGESIZE) * mmap.PAGESIZE


def new_block(layout: Layout) -> np.ndarray:
    """A block of zeros, uint8 ``[block_bytes]``. Its mapping ends with the last view of it.

    Raises:
        MemoryError: the system refuses memory (``ulimit -v``, ``vm.overcommit_memory``).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, block_bytes(layout), flags=flags)
    except OSError as error:
        raise MemoryError(
            f"kv_policy: no memory for evicted units ({error}); lower recall_memory or "
            "recall_store, or set --kv-recall 0"
        ) from error
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


def view(memory: np.ndarray, layout: Layout, number: int) -> torch.Tensor:
    """The tensor in a block with this number."""
    (shape, dtype), begin = layout[number], offsets(layout)[number]
    content = torch.from_numpy(memory)[begin : begin + math.prod(shape) * dtype.itemsize]
    return content.view(dtype).view(shape)
