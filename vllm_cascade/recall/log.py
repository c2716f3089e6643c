# SPDX-License-Identifier: Apache-2.0
"""Log of a request's evicted units in host memory, in eviction order.

A log only grows at its end. A snapshot for prefix caching therefore shares the log's full chunks
with its source and with all requests that start from it. Beyond the request's bound, the oldest
units are dropped. A chunk's memory is freed when its last user drops it.

All layers evict the same number of units in a step, so a unit has the same number in all layers.
Its tokens may differ between layers and head sets.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

import numpy as np
import torch

CHUNK_UNITS = 16
"""Units allocated at a time."""
BLOCK_UNITS = 8
"""Consecutive units that share bounds; a chunk holds whole blocks."""
GROUP_BLOCKS = 64
"""Blocks whose bounds are allocated at a time."""
GROUP_UNITS = BLOCK_UNITS * GROUP_BLOCKS
CANDIDATES = 128
"""Units that queries score key by key; stores of at most as many units need no bounds."""


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
    def has_bounds(self) -> bool:
        """Whether a store may hold more units than are scored key by key."""
        return self.most_units > CANDIDATES

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the bounds of one unit, or of one block."""
        heads = self.num_layers * self.num_kv_heads
        return heads * (2 * self.head_size + 4) if self.has_bounds else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a chunk per unit: rows, scales, 8-bit keys, bounds, positions and indices."""
        keys = self.num_layers * self.num_kv_heads * self.unit
        words = self.num_layers * self.num_sets * 2
        row = 2 * self.head_size * self.dtype.itemsize + 4 * self.row_scales
        return keys * (row + self.head_size + 4) + self.bounds_bytes + words * 4


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
        bounds: int8 ``[layers, H, blocks, 2, D / 4, BLOCK_UNITS, 4]``, the largest and the least
            value of each channel of a unit's keys, quantised with ``bounds_scale``. Empty if the
            store needs no bounds.
        bounds_scale: fp32 ``[layers, H, units]``.
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
        blocks = CHUNK_UNITS // BLOCK_UNITS if shape.has_bounds else 0
        sizes = 2, shape.head_size // 4, BLOCK_UNITS, 4
        self.bounds = torch.empty(*keys[:2], blocks, *sizes, dtype=torch.int8)
        self.bounds_scale = torch.empty(*keys[:2], blocks * BLOCK_UNITS)
        self.addresses = addresses_of(self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        rows = self.rows, self.row_scale, self.codes, self.scale, self.born, self.token
        return *rows, self.bounds, self.bounds_scale


class Group:
    """Host memory for the bounds of ``GROUP_BLOCKS`` blocks.

    All bounds are read at every selection, so those of a layer and head are adjacent, and groups
    are larger than chunks.

    Attributes:
        bounds: int8 ``[layers, H, 2, D / 4, blocks, 4]``, the largest and the least value of each
            channel of a block's keys, quantised with ``bounds_scale``.
        bounds_scale: fp32 ``[layers, H, blocks]``.
    """

    def __init__(self, shape: UnitShape) -> None:
        heads = shape.num_layers, shape.num_kv_heads
        sizes = 2, shape.head_size // 4, GROUP_BLOCKS, 4
        self.bounds = torch.empty(*heads, *sizes, dtype=torch.int8)
        self.bounds_scale = torch.empty(*heads, GROUP_BLOCKS)
        self.addresses = addresses_of(self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.bounds, self.bounds_scale


Memory = TypeVar("Memory", Chunk, Group)


def addresses_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def num_bytes(memory: Chunk | Group) -> int:
    return sum(tensor.nbytes for tensor in memory.tensors)


def copy_of(memory: Memory, shape: UnitShape) -> Memory:
    other = type(memory)(shape)
    for mine, theirs in zip(memory.tensors, other.tensors, strict=True):
        theirs.copy_(mine)
    return other


class _Row(Generic[Memory]):
    """Memory of consecutive units, allocated ``size`` units at a time.

    Attributes:
        first: Number of the first unit that has memory, a multiple of ``size``.
    """

    def __init__(self, kind: type[Memory], size: int, shape: UnitShape) -> None:
        self._kind, self._size, self._shape = kind, size, shape
        self.kept: list[Memory] = []
        self.first = 0

    def grow(self, begin: int, end: int, shared: bool) -> None:
        """Allocate memory up to unit ``end - 1``.

        Args:
            begin: Number of the first new unit.
            shared: Whether a fork shares the last memory, which is then copied if partly filled.
        """
        if shared and begin % self._size:
            self.kept[-1] = copy_of(self.kept[-1], self._shape)
        while self.first + len(self.kept) * self._size < end:
            self.kept.append(self._kind(self._shape))

    def drop(self, begin: int) -> None:
        """Free memory of units before ``begin``."""
        gone = (begin - self.first) // self._size
        del self.kept[:gone]
        self.first += gone * self._size

    def of(self, begin: int, end: int) -> tuple[int, tuple[Memory, ...]]:
        """Number of the first unit, and the memory, of what holds units ``begin .. end - 1``."""
        low = (begin - self.first) // self._size
        high = -(-(end - self.first) // self._size)
        return self.first + low * self._size, tuple(self.kept[low:high])

    def fork(self) -> Self:
        other = type(self)(self._kind, self._size, self._shape)
        other.kept, other.first = list(self.kept), self.first
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
        self._chunks = _Row(Chunk, CHUNK_UNITS, shape)
        self._groups = _Row(Group, GROUP_UNITS, shape)
        self._shares_last = False

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def memory(self) -> tuple[Chunk | Group, ...]:
        """All memory of the log, some of which forks may share."""
        return *self._chunks.kept, *self._groups.kept

    def grow(self, num_units: int) -> "Part":
        """Allocate memory for the next units and drop the oldest units beyond the bound.

        Partly filled memory is copied first if a fork shares it.
        """
        rows = (self._chunks, self._groups) if self.shape.has_bounds else (self._chunks,)
        shared, self._shares_last = self._shares_last, self._shares_last and num_units == 0
        begin, self.end = self.end, self.end + num_units
        for row in rows:
            row.grow(begin, self.end, shared and num_units > 0)
        part = self.part(begin, self.end)
        self.begin = max(self.begin, self.end - self.shape.most_units)
        for row in rows:
            row.drop(self.begin)
        return part

    def part(self, begin: int, end: int) -> "Part":
        """Return units ``begin .. end - 1``. The part keeps their memory alive."""
        first, chunks = self._chunks.of(begin, end)
        first_group, groups = self._groups.of(begin, end)
        return Part(chunks, groups, begin - first, end - first, first - first_group)

    def fork(self) -> Self:
        """Return a log with the same state that shares memory; both logs may grow."""
        other = type(self)(self.shape)
        other.begin, other.end, other.shown = self.begin, self.end, self.shown
        other.selected_by_many = self.selected_by_many
        other.tokens = self.tokens.clone()
        other._chunks, other._groups = self._chunks.fork(), self._groups.fork()
        other._shares_last = self._shares_last = True
        return other


@dataclass(frozen=True)
class Part:
    """Consecutive units of a log.

    Attributes:
        chunks: Chunks that contain the units.
        groups: Groups that contain the bounds of the units' blocks; empty if there are none.
        begin, end: The units are ``begin .. end - 1``, counted from the first unit of ``chunks``.
        skipped: Units between the first one of ``groups`` and the first one of ``chunks``.
    """

    chunks: tuple[Chunk, ...]
    groups: tuple[Group, ...]
    begin: int
    end: int
    skipped: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def blocks(self) -> range:
        """Blocks of the units, counted from the first one of ``groups``."""
        begin, end = self.skipped + self.begin, self.skipped + self.end
        return range(begin // BLOCK_UNITS, -(-end // BLOCK_UNITS))

    @cached_property
    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of each chunk's and each group's tensors, int64 ``[chunks or groups, n]``."""
        of_chunks, of_groups = (
            np.asarray([memory.addresses for memory in some], dtype=np.int64)
            for some in (self.chunks, self.groups)
        )
        return of_chunks, of_groups

    def pieces(self) -> list[tuple[Chunk, slice, slice]]:
        """For each chunk: the chunk, the slice of its units, and their slice in the part."""
        found = []
        for number, chunk in enumerate(self.chunks):
            start = number * CHUNK_UNITS
            low, high = max(self.begin - start, 0), min(self.end - start, CHUNK_UNITS)
            place = start + low - self.begin
            found.append((chunk, slice(low, high), slice(place, place + high - low)))
        return found

    def picks(self, units: np.ndarray) -> Iterator[tuple[Chunk, np.ndarray]]:
        """For each chunk with some of these units: the chunk, and their indices in it.

        Args:
            units: int64 ``[n]``, ascending, counted from the part's first unit.
        """
        numbers = units + self.begin
        for number in np.unique(numbers // CHUNK_UNITS).tolist():
            yield self.chunks[number], numbers[numbers // CHUNK_UNITS == number] % CHUNK_UNITS
