# SPDX-License-Identifier: Apache-2.0
"""Copy a request's ring into chunks of a snapshot, or back.

Both lie in memory that kernels address. A copy that is a launch runs after the kernels that filled
its source and before those that read its target, and the host waits for neither.
"""

import torch
import triton
import triton.language as tl

WORDS = 4096
"""32-bit words per tile."""


@triton.jit(do_not_specialize=["number", "first", "ring_places", "kept_places", "words"])
def _copy_ring(
    ring,
    kept,
    chunks,
    number,
    first,
    ring_places,
    kept_places,
    words,
    RESTORES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One chunk of one line; ``words``: of a unit."""
    nth = tl.program_id(0)  # a card allows few programs on the other axes
    line = tl.program_id(1).to(tl.int64)
    chunk = tl.load(chunks + nth).to(tl.int64)
    size = tl.minimum(number - nth * CHUNK, CHUNK) * words
    ring += (line * ring_places + first + nth * CHUNK) * words
    kept += (line * kept_places + chunk * CHUNK) * words
    for begin in range(0, size, TILE):
        index = begin + tl.arange(0, TILE)
        inside = index < size
        if RESTORES:
            tl.store(ring + index, tl.load(kept + index, mask=inside), mask=inside)
        else:
            tl.store(kept + index, tl.load(ring + index, mask=inside), mask=inside)


def copy_ring(
    ring: torch.Tensor,
    kept: torch.Tensor,
    chunks: torch.Tensor,
    size: int,
    number: int,
    first: int,
    restores: bool,
) -> None:
    """Copy a ring's first places into chunks, or with ``restores`` from them.

    Args:
        ring: int32 ``[lines, places, words]``, all requests' rings.
        kept: int32 ``[lines, chunks * size, words]``, all snapshots' chunks.
        chunks: int32 ``[n]``, the chunks' numbers, in order.
        size: places of a chunk.
        number: places that are copied, in ``n`` chunks.
        first: the ring's first place.
    """
    lines, places, words = ring.shape
    assert ring.is_contiguous() and kept.is_contiguous() and ring.dtype == kept.dtype == torch.int32
    assert kept.shape[::2] == (lines, words) and number <= len(chunks) * size, kept.shape
    _copy_ring[(len(chunks), lines)](
        ring=ring,
        kept=kept,
        chunks=chunks,
        number=number,
        first=first,
        ring_places=places,
        kept_places=kept.shape[1],
        words=words,
        RESTORES=restores,
        CHUNK=size,
        TILE=WORDS,
        num_warps=4,
    )
