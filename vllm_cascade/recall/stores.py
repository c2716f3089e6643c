# SPDX-License-Identifier: Apache-2.0
"""A worker's logs of evicted units, by the pages they belong to.

The block id of its first page identifies a request's or snapshot's state. The scheduler output of
each step tells which pages are copied, started, freed and dropped. The worker creates, forks and
deletes logs accordingly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.recall.log import Chunk, Log, UnitShape

Settle = Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Future[None]]
"""Copies tensors in host memory, which the device may still be filling, into others."""


class Piece(Protocol):
    """A part of a session's units that never changes and that others can share."""

    @property
    def memory(self) -> np.ndarray:
        """All of it, uint8 ``[bytes]``."""
        ...


class Units(Protocol):
    """Evicted units of a session."""

    @property
    def moved(self) -> Sequence[Future[Any]]:
        """Done when all of them are in host memory."""
        ...

    @property
    def pieces(self) -> Sequence[Piece]:
        """Parts that other units can share."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """All but the pieces as named tensors; ``UnitStores.units_of`` takes both."""
        ...


class UnitStores(ABC):
    """A worker's memory for evicted units, as its engine uses it; each device has a subclass."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes in use."""

    @property
    @abstractmethod
    def num_units(self) -> int:
        """Units stored for all requests and snapshots."""

    @abstractmethod
    def note(self, output: SchedulerOutput) -> None:
        """Follow the scheduler: start, fork and drop requests' units. Called before every step."""

    @abstractmethod
    def save(self, page: int, settle: Settle) -> Units | None:
        """The units of the request whose first page this is; None if it has no store.

        Called between two steps, before ``note`` hears that the request has ended.
        """

    @abstractmethod
    def resume(self, units: Mapping[int, Any]) -> None:
        """Take saved units, by first page, for requests that start in the next step."""

    @abstractmethod
    def piece_of(self, memory: np.ndarray) -> Piece:
        """The piece whose ``memory`` this is; the piece keeps it and never writes to it.

        Raises:
            ValueError: another size than this worker's pieces have, or it has none.
        """

    @abstractmethod
    def units_of(self, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Any]) -> Units:
        """The units that ``Units.tensors`` and ``Units.pieces`` described.

        Raises:
            KeyError, ValueError, RuntimeError: they are not units of this worker's shape.
        """


class Stores(UnitStores):
    """Logs of all requests and snapshots of a worker.

    Attributes:
        logs: Logs by the block id of the first page.
        resumed: Logs, by first page, of requests that start from a session in the next step.
    """

    def __init__(self, shape: UnitShape) -> None:
        self.shape = shape
        self.logs: dict[int, Log] = {}
        self._live: WeakSet[Chunk] = WeakSet()
        self._pages: dict[str, int] = {}  # first page by request id
        self._resumed: dict[int, Log] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use, also by sessions. Shared chunks count once."""
        return len(self._live) * self.shape.chunk_bytes

    @property
    def num_units(self) -> int:
        """Units of all requests and snapshots. Shared units count once per log."""
        return sum(map(len, self.logs.values()))

    def save(self, page: int, settle: Settle) -> Log | None:
        log = self.logs.get(page)
        return None if log is None else log.fork()

    def resume(self, units: Mapping[int, Log]) -> None:
        self._resumed = {page: log.fork() for page, log in units.items()}
        for log in self._resumed.values():
            log.live = self._live
            self._live.update(log.chunks)

    def piece_of(self, memory: np.ndarray) -> Chunk:
        return Chunk(self.shape, memory)

    def units_of(self, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Chunk]) -> Log:
        return Log.of(self.shape, tensors, pieces)

    def note(self, output: SchedulerOutput) -> None:
        """Update the logs from the scheduler output. Call before every step."""
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            if name in self._pages:
                self.logs.pop(self._pages.pop(name), None)
        copies = output.kv_cache_block_copies or ()
        forks = {
            copy.dst_block_id: self.logs[copy.src_block_id].fork()
            for copy in copies
            if copy.src_block_id in self.logs
        }
        begun_now = list(begun(output))
        adopted = {page for _, page, _ in begun_now}
        # Before the forks: a new snapshot may own the page of one that was dropped for it.
        for page in getattr(output, "dropped_snapshots", ()):
            if page not in adopted:
                self.logs.pop(page, None)
        self.logs.update(forks | self._resumed)
        self._resumed = {}
        for name, page, num_computed in begun_now:
            self._pages[name] = page
            if num_computed == 0:
                self.logs[page] = Log(self.shape, self._live)
            assert page in self.logs, "a request resumes from a snapshot without its units"


def begun(output: SchedulerOutput) -> Iterable[tuple[str, int, int]]:
    """Yield request id, first page and computed tokens of requests that start or resume."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids[0][0], new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for name, blocks, num in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if name in cached.resumed_req_ids:
            assert blocks is not None
            yield name, blocks[0][0], num
