# SPDX-License-Identifier: Apache-2.0
"""Chunks of consecutive units that forks share, numbered alike by the scheduler and the workers.

A chain only grows at its end. A fork shares all chunks with its source. A partly filled last chunk
is replaced by a copy before a chain that shares it grows. Beyond ``most_units`` the oldest units
are dropped.
"""

from abc import abstractmethod
from typing import Generic, Self, TypeVar

CHUNK_UNITS = 16
"""Units per chunk."""

Piece = TypeVar("Piece")


class Chain(Generic[Piece]):
    """Units ``begin .. end - 1`` in chunks of ``CHUNK_UNITS``.

    Attributes:
        most_units: Most units that ``trim`` leaves.
        chunks: Oldest first; replaced, never changed in place.
        first: Number of the first chunk's first unit, a multiple of ``CHUNK_UNITS``.
    """

    def __init__(self, most_units: int) -> None:
        self.most_units = most_units
        self.begin = self.end = self.first = 0
        self.chunks: tuple[Piece, ...] = ()
        self._shares_last = False

    @abstractmethod
    def _new_chunk(self) -> Piece:
        """Return an empty chunk."""

    @abstractmethod
    def _copy_chunk(self, chunk: Piece) -> Piece:
        """Return a copy of a chunk, for this chain alone."""

    def __len__(self) -> int:
        return self.end - self.begin

    def extend(self, num_units: int) -> None:
        """Add room for the next units."""
        if not num_units:
            return
        chunks = list(self.chunks)
        if self._shares_last and self.end % CHUNK_UNITS:
            chunks[-1] = self._copy_chunk(chunks[-1])
        self._shares_last = False
        self.end += num_units
        while self.first + len(chunks) * CHUNK_UNITS < self.end:
            chunks.append(self._new_chunk())
        self.chunks = tuple(chunks)

    def trim(self) -> None:
        """Drop the oldest units beyond the bound, and the chunks that held only these."""
        self.begin = max(self.begin, self.end - self.most_units)
        gone = (self.begin - self.first) // CHUNK_UNITS
        if gone:
            self.chunks = self.chunks[gone:]
            self.first += gone * CHUNK_UNITS

    def share(self, other: Self) -> Self:
        """Make ``other``, a new chain, a fork of this one; both may grow."""
        other.begin, other.end, other.first = self.begin, self.end, self.first
        other.chunks = self.chunks
        other._shares_last = self._shares_last = True
        return other


def most_chunks(num_units: int, most_units: int, step_units: int) -> int:
    """Most chunks that a chain needs at any time, with those that a step still reads.

    Args:
        num_units: Units that are ever added.
        step_units: Most units that are added in one step, whose old chunks are read meanwhile.

    Returns:
        0 without units. Otherwise the first and the last chunk may be partly used, and one more
        may be the copy of a shared one.
    """
    if num_units <= 0:
        return 0
    whole = -(-num_units // CHUNK_UNITS)
    return min(whole, -(-(most_units + step_units) // CHUNK_UNITS) + 1) + 1
