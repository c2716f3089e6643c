# SPDX-License-Identifier: Apache-2.0
"""Log of a request's evicted units in host memory, in eviction order.

A snapshot for prefix caching shares the log's full chunks with its source and with all requests
that start from it (``chain.py``). A chunk's memory is freed when its last user drops it.

All layers evict the same number of units in a step, so a unit has the same number in all layers.
Its tokens may differ between layers and head sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self
from weakref import WeakSet

import numpy as np
import torch

from vllm_cascade.recall.chain import CHUNK_UNITS, Chain
from vllm_cascade.recall.mapped import Layout, block_bytes, new_block, offsets, view

NUM_TENSORS = 9
"""Tensors of a chunk."""


@dataclass(frozen=True)
class UnitShape:
    """Shape of a unit in all layers of a worker, and the limits of its store.

    Attributes:
        num_sets: Head sets that evict separately: 1 or ``num_kv_heads``.
        unit: Tokens per unit.
        most_units: Most units stored per request; beyond it the oldest are dropped.
        most_recalled: Most units recalled at a time.
        dtype: Of keys and values in the pages.
        row_scales: Scales per row in the pages; 0 if rows have no scales of their own.
        in_8_bits: Whether values are stored in 8 bits, and keys only as the judge reads them.
        latent: Whether a row's value is part of its key (``attention/latent.py``).
    """

    num_layers: int
    num_kv_heads: int
    num_sets: int
    unit: int
    head_size: int
    dtype: torch.dtype
    most_units: int
    most_recalled: int
    row_scales: int = 0
    in_8_bits: bool = False
    latent: bool = False

    @property
    def row_size(self) -> int:
        """Channels of a row in the pages."""
        return self.head_size if self.latent else 2 * self.head_size

    @cached_property
    def layout(self) -> Layout:
        """Tensors of a chunk, as ``Chunk`` names them."""
        assert self.head_size % 4 == 0, "four channels are multiplied at once"
        keys = (self.num_layers, self.num_kv_heads, CHUNK_UNITS, self.unit)
        words = (self.num_layers, self.num_sets, CHUNK_UNITS)
        rows = ((*keys, self.row_size), self.dtype), ((*keys, self.row_scales), torch.float32)
        if self.in_8_bits:
            rows = ((*keys, self.head_size), torch.int8), ((*keys, 1), torch.float32)
        return (
            *rows,
            ((*keys[:3], self.head_size // 4, self.unit, 4), torch.int8),
            (keys, torch.float32),
            ((*keys[:2], self.head_size // 4, CHUNK_UNITS, 4), torch.int8),
            (keys[:3], torch.float32),
            (keys[:3], torch.float32),
            (words, torch.int32),
            (words, torch.int32),
        )

    @cached_property
    def offsets(self) -> np.ndarray:
        """Offsets of a chunk's tensors in its memory, int64 ``[9]``."""
        return np.asarray(offsets(self.layout)[:-1], dtype=np.int64)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of host memory per chunk of ``CHUNK_UNITS`` units, in whole pages."""
        return block_bytes(self.layout)


def _tensor(number: int) -> property:
    return property(lambda chunk: view(chunk.memory, chunk.shape.layout, number))


class Chunk:
    """Host memory for ``CHUNK_UNITS`` units.

    Tensors are views that are created on access and not kept. A long stream has thousands of
    chunks, and a kept tensor allocates from the heap, between the temporary tensors of layers.
    These small allocations fragment the heap, which then grows with the stream.

    Args:
        memory: block of ``shape.chunk_bytes`` that holds units; None: a new one.

    Raises:
        ValueError: the block has another size.

    Attributes:
        memory: the block, uint8 ``[chunk_bytes]``; all tensors are in it.
        shape: of the units.
        rows: ``[layers, H, units, unit, row_size]``, as stored in the pages; with
            ``in_8_bits`` int8 ``[layers, H, units, unit, D]``, values quantised like ``codes``.
        row_scale: fp32 ``[layers, H, units, unit, row_scales]``, their scales in the pages; with
            ``in_8_bits`` one scale of each row of values.
        codes: int8 ``[layers, H, units, D / 4, unit, 4]``, keys before rotation, quantised with
            ``scale``. Four channels of a key are adjacent, followed by the same channels of the
            unit's next key, because processors multiply four bytes at once.
        scale: fp32 ``[layers, H, units, unit]``, scale of each key in ``codes``.
        centre: int8 ``[layers, H, D / 4, units, 4]``, the mean of each unit's keys, quantised with
            ``centre_scale``. The same channels of neighbouring units are adjacent.
        centre_scale: fp32 ``[layers, H, units]``.
        spread: fp32 ``[layers, H, units]``, variance of each unit's keys around their mean, as a
            mean over channels.
        born: int32 ``[layers, sets, units]``, position at which the first key was rotated.
        token: int32 ``[layers, sets, units]``, stream index of the first token.
        begin: address of the block.
    """

    def __init__(self, shape: UnitShape, memory: np.ndarray | None = None) -> None:
        self.memory = new_block(shape.layout) if memory is None else memory
        self.shape = shape
        if self.memory.dtype != np.uint8 or self.memory.shape != (shape.chunk_bytes,):
            raise ValueError(f"not a block of {shape.chunk_bytes} bytes")
        self.begin = self.memory.ctypes.data

    rows, row_scale, codes, scale = map(_tensor, range(4))
    centre, centre_scale, spread, born, token = map(_tensor, range(4, NUM_TENSORS))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return tuple(view(self.memory, self.shape.layout, i) for i in range(NUM_TENSORS))


class Log(Chain[Chunk]):
    """Evicted units of a request or of a snapshot.

    Attributes:
        begin, end: The log holds the units with numbers ``begin .. end - 1``.
        live: All chunks of the worker; a chunk leaves it with its last user.
        shown: Number of units currently recalled into the pages.
        selected_by_many: True if a multi-token stride made the last selection.
        tokens: int32 ``[layers, sets, most_recalled]``, first tokens of the recalled units,
            ascending.
    """

    def __init__(self, shape: UnitShape, live: WeakSet[Chunk] | None = None) -> None:
        super().__init__(shape.most_units)
        self.shape = shape
        self.live = WeakSet() if live is None else live
        self.shown = 0
        self.selected_by_many = False
        self.tokens = torch.zeros(
            shape.num_layers, shape.num_sets, shape.most_recalled, dtype=torch.int32
        )

    def _new_chunk(self) -> Chunk:
        chunk = Chunk(self.shape)
        self.live.add(chunk)
        return chunk

    def _copy_chunk(self, chunk: Chunk) -> Chunk:
        other = self._new_chunk()
        other.memory[:] = chunk.memory
        return other

    def grow(self, num_units: int) -> "Part":
        """Allocate memory for the next units and drop the oldest units beyond the bound."""
        begin = self.end
        self.extend(num_units)
        part = self.part(begin, self.end)
        self.trim()
        return part

    def part(self, begin: int, end: int) -> "Part":
        """Return units ``begin .. end - 1``. The part keeps their memory alive."""
        low = (begin - self.first) // CHUNK_UNITS
        high = -(-(end - self.first) // CHUNK_UNITS)
        first = self.first + low * CHUNK_UNITS
        return Part(self.chunks[low:high], begin - first, end - first)

    def fork(self) -> Self:
        """Return a log with the same state that shares chunks; both logs may grow."""
        other = self.share(type(self)(self.shape, self.live))
        other.shown, other.selected_by_many = self.shown, self.selected_by_many
        other.tokens = self.tokens.clone()
        return other

    @property
    def moved(self) -> tuple[()]:
        """Nothing is under way: units are in host memory."""
        return ()

    @property
    def pieces(self) -> tuple[Chunk, ...]:
        """The chunks; those of a log that does not grow never change."""
        return self.chunks

    def tensors(self) -> dict[str, torch.Tensor]:
        """All but the chunks as named tensors; ``of`` makes an equal log of both."""
        numbers = [self.begin, self.end, self.shown, self.selected_by_many, self.first]
        return {"numbers": torch.tensor(numbers, dtype=torch.int64), "tokens": self.tokens}

    @classmethod
    def of(
        cls, shape: UnitShape, tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]
    ) -> Self:
        """The log of these chunks that ``tensors`` described.

        Raises:
            KeyError, RuntimeError, ValueError: it is not a log of this shape.
        """
        log = cls(shape)
        numbers = tensors["numbers"].tolist()
        log.begin, log.end, log.shown, many, log.first = numbers
        log.selected_by_many = bool(many)
        log.tokens.copy_(tensors["tokens"])
        log.chunks = tuple(chunks)
        if len(log.chunks) != -(-(log.end - log.first) // CHUNK_UNITS):
            raise ValueError("another number of chunks")
        return log


@dataclass(frozen=True)
class Part:
    """Consecutive units of a log.

    Attributes:
        chunks: Chunks that contain the units.
        begin, end: The units are ``begin .. end - 1``, counted from the first unit of ``chunks``.
    """

    chunks: tuple[Chunk, ...]
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @cached_property
    def addresses(self) -> np.ndarray:
        """Addresses of the chunks' blocks, int64 ``[chunks]``."""
        return np.fromiter((chunk.begin for chunk in self.chunks), np.int64, len(self.chunks))

    def pieces(self) -> list[tuple[Chunk, slice, slice]]:
        """For each chunk: the chunk, the slice of its units, and their slice in the part."""
        found = []
        for number, chunk in enumerate(self.chunks):
            start = number * CHUNK_UNITS
            low, high = max(self.begin - start, 0), min(self.end - start, CHUNK_UNITS)
            place = start + low - self.begin
            found.append((chunk, slice(low, high), slice(place, place + high - low)))
        return found
