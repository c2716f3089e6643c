# SPDX-License-Identifier: Apache-2.0
"""Log of a request's evicted units in host memory, in eviction order.

A log only grows at its end. A snapshot for prefix caching therefore shares the log's full chunks
with its source and with all requests that start from it. Beyond the request's bound, the oldest
units are dropped. A chunk's memory is freed when its last user drops it.

All layers evict the same number of units in a step, so a unit has the same number in all layers.
Its tokens may differ between layers and head sets.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch

CHUNK_UNITS = 16
"""Units allocated at a time."""


@dataclass(frozen=True)
class UnitShape:
    """Shape of a unit in all layers of a worker, and the limits of its store.

    Attributes:
        num_sets: Head sets that evict separately: 1 or ``num_kv_heads``.
        unit: Tokens per unit.
        most_units: Most units stored per request; beyond it the oldest are dropped.
        most_recalled: Most units recalled at a time.
        row_scales: Scales per row; 0 if rows have no scales of their own.
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

    @property
    def unit_bytes(self) -> int:
        """Bytes of host memory per unit: rows, scales, quantised keys, positions and indices."""
        keys = self.num_layers * self.num_kv_heads * self.unit
        words = self.num_layers * self.num_sets * 2
        row = 2 * self.head_size * self.dtype.itemsize + 4 * self.row_scales
        return keys * (row + self.head_size + 4) + words * 4


class Chunk:
    """Host memory for ``CHUNK_UNITS`` units.

    Attributes:
        rows: ``[layers, H, units, unit, 2 D]``, keys and values as stored in the pages.
        row_scale: fp32 ``[layers, H, units, unit, row_scales]``, their scales in the pages.
        codes: int8 ``[layers, H, units, D / 4, unit, 4]``, keys before rotation, quantised with
            ``scale``. Four channels of a key are adjacent, followed by the same channels of the
            unit's next key, because processors multiply four bytes at once.
        scale: fp32 ``[layers, H, units, unit]``, scale of each key in ``codes``.
        born: int32 ``[layers, sets, units]``, position at which the first key was rotated.
        token: int32 ``[layers, sets, units]``, stream index of the first token.
    """

    def __init__(self, shape: UnitShape) -> None:
        assert shape.head_size % 4 == 0, "four channels are multiplied at once"
        keys = (shape.num_layers, shape.num_kv_heads, CHUNK_UNITS, shape.unit)
        self.rows = torch.empty(*keys, 2 * shape.head_size, dtype=shape.dtype)
        self.row_scale = torch.empty(*keys, shape.row_scales)
        self.codes = torch.empty(*keys[:3], shape.head_size // 4, shape.unit, 4, dtype=torch.int8)
        self.scale = torch.empty(keys)
        words = (shape.num_layers, shape.num_sets, CHUNK_UNITS)
        self.born = torch.empty(words, dtype=torch.int32)
        self.token = torch.empty(words, dtype=torch.int32)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.row_scale, self.codes, self.scale, self.born, self.token

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, shape: UnitShape) -> "Chunk":
        other = Chunk(shape)
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            theirs.copy_(mine)
        return other


class Log:
    """Evicted units of a request or of a snapshot.

    Attributes:
        begin, end: The log holds the units with numbers ``begin .. end - 1``.
        shown: Number of units currently recalled into the pages.
        selected_by_many: True if a multi-token stride made the last selection.
        tokens: int32 ``[layers, sets, most_recalled]``, first tokens of the recalled units,
            ascending.
    """

    def __init__(self, shape: UnitShape) -> None:
        self.shape = shape
        self.begin = self.end = self.shown = 0
        self.selected_by_many = False
        self.tokens = torch.zeros(
            shape.num_layers, shape.num_sets, shape.most_recalled, dtype=torch.int32
        )
        self._chunks: list[Chunk] = []
        self._first = 0  # number of the first chunk's first unit
        self._shares_last = False

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(self._chunks)

    @property
    def first(self) -> int:
        """Number of the first chunk's first unit."""
        return self._first

    def grow(self, num_units: int) -> "Part":
        """Allocate memory for the next units and drop the oldest units beyond the bound.

        A partly filled last chunk is copied first if a fork shares it.
        """
        if num_units and self._shares_last and self.end % CHUNK_UNITS:
            self._chunks[-1] = self._chunks[-1].copy(self.shape)
        self._shares_last &= num_units == 0
        begin, self.end = self.end, self.end + num_units
        while self._first + len(self._chunks) * CHUNK_UNITS < self.end:
            self._chunks.append(Chunk(self.shape))
        part = self.part(begin, self.end)
        self.begin = max(self.begin, self.end - self.shape.most_units)
        gone = (self.begin - self._first) // CHUNK_UNITS
        del self._chunks[:gone]
        self._first += gone * CHUNK_UNITS
        return part

    def part(self, begin: int, end: int) -> "Part":
        """Return units ``begin .. end - 1``. The part keeps their memory alive."""
        low = (begin - self._first) // CHUNK_UNITS
        high = -(-(end - self._first) // CHUNK_UNITS)
        first = self._first + low * CHUNK_UNITS
        return Part(tuple(self._chunks[low:high]), begin - first, end - first)

    def fork(self) -> Self:
        """Return a log with the same state that shares chunks; both logs may grow."""
        other = type(self)(self.shape)
        other.begin, other.end, other.shown = self.begin, self.end, self.shown
        other.selected_by_many = self.selected_by_many
        other.tokens = self.tokens.clone()
        other._chunks, other._first = list(self._chunks), self._first
        other._shares_last = self._shares_last = True
        return other


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
    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of each chunk's ``codes`` and ``scale``, int64 ``[chunks]`` each."""
        codes = [chunk.codes.data_ptr() for chunk in self.chunks]
        scales = [chunk.scale.data_ptr() for chunk in self.chunks]
        return np.asarray(codes, dtype=np.int64), np.asarray(scales, dtype=np.int64)

    def pieces(self) -> list[tuple[Chunk, slice, slice]]:
        """For each chunk: the chunk, the slice of its units, and their slice in the part."""
        found = []
        for number, chunk in enumerate(self.chunks):
            start = number * CHUNK_UNITS
            low, high = max(self.begin - start, 0), min(self.end - start, CHUNK_UNITS)
            place = start + low - self.begin
            found.append((chunk, slice(low, high), slice(place, place + high - low)))
        return found
