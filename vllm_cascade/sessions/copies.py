# SPDX-License-Identifier: Apache-2.0
"""Copies between a device's pages and host memory; each device names one class of these."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from vllm_cascade.sessions.threads import started

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
MOST_STAGED = 256 << 20
"""Bytes on the device that may wait to be copied to the host before a step waits for them."""
MOST_PINNED = 1 << 30
"""Bytes of pinned memory that saves under way may take, beside one of them, before a step waits."""


class Copies:
    """Copies where pages lie in host memory: nothing is left to be done when a call returns.

    Args:
        pools: unique tensors ``[num_blocks, bytes]`` that hold all of a page.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self.pools = tuple(pools)

    def save(self, blocks: Sequence[int]) -> Future[Tensors]:
        """Copy pages as they are when the next step begins; of each pool ``[blocks, bytes]``."""
        index = torch.tensor(blocks)
        return _done(tuple(_words(pool)[index].view(pool.dtype) for pool in self.pools))

    def restore(self, blocks: Sequence[int], pages: Tensors) -> None:
        """Copy pages back, before the next step reads them."""
        index = torch.tensor(blocks)
        for pool, kept in zip(self.pools, pages, strict=True):
            _words(pool).index_copy_(0, index, _words(kept))

    def settle(self, filled: Tensors, kept: Tensors) -> Future[None]:
        """Copy tensors in host memory that the device is filling, once they are complete."""
        _move(filled, kept)
        return _done(None)

    def close(self) -> None:
        """Wait for copies that have begun."""


def _words(pages: torch.Tensor) -> torch.Tensor:
    """Pages in words of 8 bytes where they have whole ones: PyTorch copies elements one by one."""
    return pages if pages.shape[1] * pages.itemsize % 8 else pages.view(torch.int64)


def _move(filled: Tensors, kept: Tensors) -> None:
    for tensor, own in zip(filled, kept, strict=True):
        own.copy_(tensor)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


class SideStream:
    """A CUDA stream beside the one that steps run in."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy once everything is done that steps were given so far; returns an event."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def mark(self) -> Any:
        """An event after everything that steps were given so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return event

    def hold_steps(self, event: Any) -> None:
        """Let what steps are given from here on wait for an event. The host does not wait."""
        torch.cuda.current_stream().wait_event(event)


class StreamCopies(Copies):
    """Copies on CUDA, through pinned memory, in a stream of their own.

    A save gathers pages on the device before the step changes them. They travel to pinned memory
    beside the steps, and a thread moves them on to ordinary memory, so pinned memory is used for
    copies under way only. A restore takes the same way back; only the step that reads the pages
    waits for it, on the device.
    """

    def __init__(self, pools: Sequence[torch.Tensor], side: SideStream | None = None) -> None:
        super().__init__(pools)
        self._device = self.pools[0].device
        self._pinned = self._device.type == "cuda"
        self._side = SideStream(self._device) if side is None else side
        self._staged: deque[tuple[Any, torch.Tensor]] = deque()  # until their copies are done
        self._moving: deque[tuple[Future[Tensors], int]] = deque()  # and bytes of pinned memory
        self._thread = started(1, "kv-sessions-copies", self._use_device)

    def save(self, blocks: Sequence[int]) -> Future[Tensors]:
        index = self._sent(blocks)
        filled, event = [], None
        num_bytes = len(blocks) * sum(pool.shape[1] * pool.itemsize for pool in self.pools)
        self._wait_for_pinned(num_bytes)
        for pool in self.pools:
            self._free_staged(len(blocks) * pool.shape[1])
            staged = pool[index]
            host = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=self._pinned)
            event = self._side.copy(host, staged)
            self._staged.append((event, staged))
            filled.append(host)
        saved = self._moved(event, tuple(filled))
        self._moving.append((saved, num_bytes))
        return saved

    def restore(self, blocks: Sequence[int], pages: Tensors) -> None:
        index = self._sent(blocks)
        for pool, kept in zip(self.pools, pages, strict=True):
            pinned = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=self._pinned).copy_(kept)
            staged = torch.empty_like(kept, device=self._device)
            self._side.hold_steps(self._side.copy(staged, pinned))
            pool[index] = staged

    def settle(self, filled: Tensors, kept: Tensors) -> Future[None]:
        event = self._side.mark()

        def move() -> None:
            event.synchronize()
            _move(filled, kept)

        return self._thread.submit(move)

    def close(self) -> None:
        self._thread.shutdown()

    def _use_device(self) -> None:
        """Let a thread wait for this device's events. Else it opens a context on the first one."""
        if self._pinned:
            torch.cuda.set_device(self._device)

    def _sent(self, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._pinned)
        return index.to(self._device, non_blocking=True)

    def _moved(self, event: Any, filled: Tensors) -> Future[Tensors]:
        """Copies in ordinary memory of tensors that are complete after an event."""

        def move() -> Tensors:
            event.synchronize()
            return tuple(tensor.clone() for tensor in filled)

        return self._thread.submit(move)

    def _free_staged(self, room: int) -> None:
        """Free what has reached the host; keep at most ``MOST_STAGED`` bytes with ``room``."""
        staged = self._staged
        while staged and staged[0][0].query():
            staged.popleft()
        while staged and room + sum(tensor.nbytes for _, tensor in staged) > MOST_STAGED:
            self._side.hold_steps(staged.popleft()[0])  # what reuses its memory comes later

    def _wait_for_pinned(self, room: int) -> None:
        """Wait for the oldest saves while all take over ``MOST_PINNED`` bytes with ``room``."""
        moving = self._moving
        while moving and moving[0][0].done():
            moving.popleft()
        while moving and room + sum(num_bytes for _, num_bytes in moving) > MOST_PINNED:
            moving.popleft()[0].exception()  # an error is raised where the save is used
