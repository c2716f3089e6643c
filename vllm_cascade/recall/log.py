# SPDX-License-Identifier: Apache-2.0
"""The units that one request's policy has evicted, in the order in which it did.

A log only grows at its end, so a state of the cache needs no more than the log's length then: a
snapshot for prefix caching, and whoever starts from it, share the log's full chunks. What a request
stores beyond its bound is dropped at the front, and a chunk's memory goes with its last user.

All layers evict as many units at the same time, so a unit has the same number in all of them; which
tokens it is differs between layers and head sets.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch

CHUNK_UNITS = 16
"""Units that memory is taken for at once."""


@dataclass(frozen=True)
class UnitShape:
    """What one unit is, in all layers.

    Attributes:
        num_sets: head sets that evict units of their own: 1 or ``num_kv_heads``.
        unit: tokens of a unit.
        most_units: units a request stores; the first ones go when there are more.
        most_recalled: units recalled at a time.
        row_scales: numbers that go with a row; 0: none, as where it is not quantised.
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
        """Host memory of one unit: its rows, and what judges it."""
        keys = self.num_layers * self.num_kv_heads * self.unit
        words = self.num_layers * self.num_sets * 2
        row = 2 * self.head_size * self.dtype.itemsize + 4 * self.row_scales
        return keys * (row + self.head_size + 4) + words * 4


class Chunk:
    """Memory of ``CHUNK_UNITS`` units.

    Attributes:
        rows: ``[layers, H, units, unit, 2 D]``, keys and values as they were in the pages.
        row_scale: fp32 ``[layers, H, units, unit, row_scales]``, what went with them there.
        codes: int8 ``[layers, H, units, D / 4, unit, 4]``, keys before rotation, in steps of
            ``scale``; four channels of a key side by side, then those of the unit's next key, as
            processors multiply bytes.
        scale: fp32 ``[layers, H, units, unit]``.
        born: int32 ``[layers, sets, units]``, the position that the first key was rotated with.
        token: int32 ``[layers, sets, units]``, the first token's index in the stream.
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
    """One request's evicted units, or what a snapshot of it refers to.

    Attributes:
        begin, end: the numbers of the units that it has.
        shown: units that are recalled in the pages now.
        selected_by_many: whether a stride of several tokens made the last selection.
        tokens: int32 ``[layers, sets, most_recalled]``, the first tokens of these, ascending.
    """

    def __init__(self, shape: UnitShape) -> None:
        self.shape = shape
        self.begin = self.end = self.shown = 0
        self.selected_by_many = False
        self.tokens = torch.zeros(
            shape.num_layers, shape.num_sets, shape.most_recalled, dtype=torch.int32
        )
        self._chunks: list[Chunk] = []
        self._first = 0  # units before the first chunk
        self._shares_last = False

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(self._chunks)

    @property
    def first(self) -> int:
        """The number of the first chunk's first unit."""
        return self._first

    def grow(self, num_units: int) -> "Part":
        """Memory for the next units; those beyond the bound go, the first ones first."""
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
        """Units ``begin .. end - 1``, whose memory the part keeps."""
        low = (begin - self._first) // CHUNK_UNITS
        high = -(-(end - self._first) // CHUNK_UNITS)
        first = self._first + low * CHUNK_UNITS
        return Part(tuple(self._chunks[low:high]), begin - first, end - first)

    def fork(self) -> Self:
        """The same state, for another user; both may grow."""
        other = type(self)(self.shape)
        other.begin, other.end, other.shown = self.begin, self.end, self.shown
        other.selected_by_many = self.selected_by_many
        other.tokens = self.tokens.clone()
        other._chunks, other._first = list(self._chunks), self._first
        other._shares_last = self._shares_last = True
        return other


@dataclass(frozen=True)
class Part:
    """Some neighbouring units of a log: ``begin .. end - 1``, counted from the first chunk's."""

    chunks: tuple[Chunk, ...]
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @cached_property
    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 ``[chunks]``: where each chunk's ``codes`` and ``scale`` begin."""
        codes = [chunk.codes.data_ptr() for chunk in self.chunks]
        scales = [chunk.scale.data_ptr() for chunk in self.chunks]
        return np.asarray(codes, dtype=np.int64), np.asarray(scales, dtype=np.int64)

    def pieces(self) -> list[tuple[Chunk, slice, slice]]:
        """Chunk by chunk: the chunk, its units, and their places in the part."""
        found = []
        for number, chunk in enumerate(self.chunks):
            start = number * CHUNK_UNITS
            low, high = max(self.begin - start, 0), min(self.end - start, CHUNK_UNITS)
            place = start + low - self.begin
            found.append((chunk, slice(low, high), slice(place, place + high - low)))
        return found
