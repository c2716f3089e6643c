# SPDX-License-Identifier: Apache-2.0
"""Stores evicted units on CUDA: a ring buffer for each request that evicts, allocated at start.

A running request takes a ring when it first evicts, or begins with evicted units of a snapshot or a
session, and keeps it until it ends. The scheduler admits no more such requests than there are
rings (``RingMemory``); requests that end before they evict need none.

Keys and values are in pinned host memory, which kernels read and write directly. Their 8-bit codes,
which recall compares, are on the device. The ``n``-th unit that a request evicts is at place ``n``
modulo the size of the ring, so no lookup is needed. What a step does with a ring follows from token
counts; ``kernels/columns.py`` describes these numbers.

A snapshot for prefix caching keeps a copy of its request's ring, in chunks of pinned host memory.
A request that starts from it copies the chunks into its own ring. Snapshots share no chunks. A
session keeps a copy of its own, too, in ordinary host memory.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import psutil
import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.log import logger
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.chain import CHUNK_UNITS
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.memory import CountedLog, RecallMemory, Slip, Snapshots, make_room
from vllm_cascade.recall.stores import Piece, Settle, UnitStores, begun

STAGED = 128 << 20
"""Bytes of pinned memory through which a part of a ring travels to a session or back; two parts are
under way at a time. At least a chunk."""


class Kept(NamedTuple):
    """A snapshot's evicted units: its chunks, and what ``Rings`` says of its request's ring."""

    chunks: list[int]
    end: int
    shown: int
    selected_by_many: bool


@dataclass(frozen=True, eq=False)
class RingCopy:
    """A session's evicted units: a copy of its request's ring.

    Attributes:
        end, shown, selected_by_many: what ``Rings`` says of the ring.
        words: of each tensor of the rings, int32 ``[lines, places, words]``: places in use, in
            whole chunks.
        moved: futures; done when the copies are complete.
        pieces: none; copies share nothing.
    """

    end: int
    shown: int
    selected_by_many: bool
    words: tuple[torch.Tensor, ...]
    moved: tuple[Future[Any], ...] = ()
    pieces: tuple[Piece, ...] = ()

    def complete(self) -> tuple[torch.Tensor, ...]:
        """``words``, once the copies are complete."""
        for part in self.moved:
            part.result()
        return self.words

    def tensors(self) -> dict[str, torch.Tensor]:
        numbers = [self.end, self.shown, self.selected_by_many]
        found = {"numbers": torch.tensor(numbers, dtype=torch.int64)}
        return found | {f"ring.{i}": tensor for i, tensor in enumerate(self.complete())}


@dataclass
class Staging:
    """Pinned memory for a part of a ring.

    Attributes:
        words: as ``RingCopy.words``, of some chunks.
        wait: returns when nothing reads or writes it any more.
    """

    words: Sequence[torch.Tensor]
    wait: Callable[[], Any] = lambda: None


class Rings(UnitStores):
    """A worker's ring buffers for evicted units.

    Args:
        num_chunks: chunks of all snapshots; 0: there are none.
        ranks: tensor-parallel ranks, for messages.

    Attributes:
        shape: sizes of the units; a ring holds ``shape.most_units``.
        rows, codes, scales, born, token, row_scales: ``[layers, ...]``, each layer's store as
            described in ``kernels/triton/recall*.py``; ``row_scales`` is None if rows have none.
        rings: ring numbers of running requests that have evicted, by name.
        end: int64 ``[num_requests]``, units evicted so far by the request of each ring.
        shown: int64 ``[num_requests]``, recalled units in its pages.
        selected_by_many: bool ``[num_requests]``, whether a stride of several tokens made the last
            selection.
        kept: snapshots' units, by the block id of their first page.
    """

    def __init__(
        self,
        shape: UnitShape,
        num_requests: int,
        device: torch.device,
        num_chunks: int = 0,
        ranks: int = 1,
    ) -> None:
        self.shape, self.num_requests, self.device = shape, num_requests, device
        check_memory(shape, num_requests, device, num_chunks=num_chunks, ranks=ranks)
        places = num_requests * shape.most_units
        keys = (shape.num_layers, shape.num_kv_heads, places, shape.unit)
        pinned, most = device.type == "cuda", num_requests * ring_bytes(shape)[1]
        # One allocation, because PyTorch rounds each up.
        host = torch.empty(most, dtype=torch.uint8, pin_memory=pinned)
        rows = math.prod(keys) * shape.row_size * shape.dtype.itemsize
        self.rows = host[:rows].view(shape.dtype).view(*keys, shape.row_size)
        self.row_scales = None
        if shape.row_scales:
            self.row_scales = host[rows:].view(torch.float32).view(*keys, shape.row_scales)
        self.codes = torch.empty(*keys, shape.head_size, dtype=torch.int8, device=device)
        self.scales = torch.empty(keys, device=device)
        words = (shape.num_layers, shape.num_sets, places)
        self.born = torch.empty(words, dtype=torch.int32, device=device)
        self.token = torch.empty(words, dtype=torch.int32, device=device)
        self.rings: dict[str, int] = {}
        self.end, self.shown = np.zeros((2, num_requests), dtype=np.int64)
        self.selected_by_many = np.zeros(num_requests, dtype=bool)
        self._free = list(range(num_requests))[::-1]
        self.kept: dict[int, Kept] = {}
        self._pages: dict[str, int] = {}  # first page by request id
        self._resumed: dict[int, RingCopy] = {}
        self._staging: deque[Staging] = deque()
        self._free_chunks = list(range(num_chunks))[::-1]
        stores = self.rows, self.codes, self.scales, self.born, self.token, self.row_scales
        self._words = [
            store.view(math.prod(store.shape[:2]), store.shape[2], -1).view(torch.int32)
            for store in stores
            if store is not None
        ]
        self._kept_words = self._chunk_memory(num_chunks, pinned) if num_chunks else []
        words = self._kept_words or self._chunk_memory(1, pinned)  # sessions copy without snapshots
        for restores in (False, True):
            self._copy(words, [0], 0, 0, restores)  # compiles them, copies nothing
        on_device, on_host = ring_bytes(shape)
        num_pinned = on_host * num_requests, chunk_bytes(shape) * num_chunks
        logger.info(
            "KV policy: recall has rings for %d requests that evict, %.2f GiB on the device and "
            "%.2f GiB of pinned host memory, and %.2f GiB of it for snapshots",
            num_requests,
            on_device * num_requests / 2**30,
            *((round_up(num) if pinned else num) / 2**30 for num in num_pinned),
        )

    def _chunk_memory(self, num_chunks: int, pinned: bool) -> list[torch.Tensor]:
        """Chunks of host memory for each of ``_words``, int32 ``[lines, places, words]``.

        The chunks are one allocation, because PyTorch rounds each up.
        """
        begin, found = 0, []
        memory = torch.empty(
            num_chunks * chunk_bytes(self.shape) // 4, dtype=torch.int32, pin_memory=pinned
        )
        for words in self._words:
            lines, _, width = words.shape
            size = lines * num_chunks * CHUNK_UNITS * width
            found.append(memory[begin : begin + size].view(lines, -1, width))
            begin += size
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the rings and chunks in use, on device and host."""
        chunks = sum(len(kept.chunks) for kept in self.kept.values())
        rings = len(self.rings) * sum(ring_bytes(self.shape))
        return rings + chunks * chunk_bytes(self.shape)

    @property
    def num_units(self) -> int:
        ends = [*self.end[list(self.rings.values())], *(kept.end for kept in self.kept.values())]
        return sum(self._stored(end) for end in ends)

    def _stored(self, end: int) -> int:
        """Units in the store of a request that has evicted ``end``."""
        return min(int(end), self.shape.most_units)

    def note(self, output: SchedulerOutput) -> None:
        """Assign and free rings and chunks as the scheduler decided; called before every step.

        A freed ring or chunk can be reused at once, because kernels that still read it run earlier
        in the stream.
        """
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._pages.pop(name, None)
            number = self.rings.pop(name, None)
            if number is not None:
                self._free.append(number)
        copies = {
            copy.dst_block_id: copy.src_block_id for copy in output.kv_cache_block_copies or ()
        }
        begun_now = list(begun(output))
        for name, page, num_computed in begun_now:
            if num_computed and self._pages.get(name) == page:
                continue  # the next part of a prompt that grows; it keeps its pages and its ring
            assert name not in self._pages, "a request begins twice"
            self._pages[name] = page
            if page in self._resumed:
                self._resume(name, self._resumed[page])
            elif num_computed:  # without a copy it takes over the snapshot's own pages
                self._restore(name, self.kept[copies.get(page, page)])
        self._resumed = {}
        for page in getattr(output, "dropped_snapshots", ()):
            if page in self.kept:
                self._free_chunks += self.kept.pop(page).chunks
        own = {page: name for name, page in self._pages.items()} if copies else {}
        started = {page for _, page, _ in begun_now}
        for page, source in copies.items():
            if source in own and page not in started:
                self.kept[page] = self._keep(self.rings.get(own[source]))

    def take(self, name: str | None) -> int:
        """Give a running request an empty ring and return its number; -1 for others."""
        if name not in self._pages:
            return -1
        assert self._free, "more requests evict than have reserved a ring"
        number = self.rings[name] = self._free.pop()
        self._set(number, 0, 0, False)
        return number

    def _keep(self, number: int | None) -> Kept:
        """Copy a ring, if there is one, for a snapshot that is taken of its request now."""
        if number is None:
            return Kept([], 0, 0, False)
        end = self.end[number]
        chunks = [self._free_chunks.pop() for _ in range(-(-self._stored(end) // CHUNK_UNITS))]
        if chunks:
            first = number * self.shape.most_units
            self._copy(self._kept_words, chunks, self._stored(end), first, restores=False)
        return Kept(chunks, int(end), int(self.shown[number]), bool(self.selected_by_many[number]))

    def _restore(self, name: str, kept: Kept) -> None:
        """Let a request begin with a copy of a snapshot's units."""
        if not kept.end:
            return
        first = self._begin(name, kept) * self.shape.most_units
        self._copy(self._kept_words, kept.chunks, self._stored(kept.end), first, restores=True)

    def _begin(self, name: str, kept: "Kept | RingCopy") -> int:
        number = self.take(name)
        self._set(number, kept.end, kept.shown, kept.selected_by_many)
        return number

    def _set(self, number: int, end: int, shown: int, selected_by_many: bool) -> None:
        self.end[number], self.shown[number] = end, shown
        self.selected_by_many[number] = selected_by_many

    def _copy(
        self,
        kept: Sequence[torch.Tensor],
        chunks: list[int],
        units: int,
        first: int,
        restores: bool,
    ) -> None:
        """Copy units from place ``first`` of all rings into chunks of ``kept``, or with
        ``restores`` from them."""
        from vllm_cascade.kernels.triton.recall_copy import copy_ring  # CPUs may lack Triton

        pinned = self.device.type == "cuda"
        numbers = torch.tensor(chunks, dtype=torch.int32, pin_memory=pinned)
        numbers = numbers.to(self.device, non_blocking=True)
        for ring, own in zip(self._words, kept, strict=True):
            copy_ring(ring, own, numbers, CHUNK_UNITS, units, first, restores)

    # --- sessions ---------------------------------------------------------------------------------

    def save(self, page: int, settle: Settle) -> RingCopy | None:
        name = next((name for name, first in self._pages.items() if first == page), None)
        if name is None:
            return None
        number = self.rings.get(name)
        if number is None:
            return RingCopy(0, 0, False, tuple(self._chunk_memory(0, pinned=False)))
        end = int(self.end[number])
        chunks = -(-self._stored(end) // CHUNK_UNITS)
        whole, moved = tuple(self._chunk_memory(chunks, pinned=False)), []
        for part, staging in self._parts(whole):
            self._copy_part(staging, part, number, end, restores=False)
            filled = tuple(words[:, : part.stop - part.start] for words in staging.words)
            moved.append(settle(filled, tuple(words[:, part] for words in whole)))
            staging.wait = moved[-1].exception  # a session that fails does not end the engine
        shown, many = int(self.shown[number]), bool(self.selected_by_many[number])
        return RingCopy(end, shown, many, whole, tuple(moved))

    def resume(self, units: Mapping[int, RingCopy]) -> None:
        self._resumed = dict(units)

    def _resume(self, name: str, kept: RingCopy) -> None:
        """Let a request begin with a session's units."""
        if not kept.end:
            return
        number, whole = self._begin(name, kept), kept.complete()
        for part, staging in self._parts(whole):
            for words, own in zip(staging.words, whole, strict=True):
                words[:, : part.stop - part.start] = own[:, part]
            self._copy_part(staging, part, number, kept.end, restores=True)
            if self.device.type == "cuda":  # PyTorch does not know that a kernel reads it
                event = torch.cuda.Event()
                event.record()
                staging.wait = event.synchronize

    def _parts(self, whole: Sequence[torch.Tensor]) -> Iterator[tuple[slice, Staging]]:
        """Places of a session's copy, as many at a time as staging memory has room for.

        The memory of a part is used again for the next but one, after what it waits for.
        """
        at_once = max(STAGED // chunk_bytes(self.shape), 1) * CHUNK_UNITS
        while len(self._staging) < 2:
            pinned = self.device.type == "cuda"
            words = self._chunk_memory(at_once // CHUNK_UNITS, pinned)
            self._staging.append(Staging(words))
        places = whole[0].shape[1]
        for first in range(0, places, at_once):
            staging = self._staging[0]
            self._staging.rotate()
            staging.wait()
            yield slice(first, min(first + at_once, places)), staging

    def _copy_part(
        self, staging: Staging, part: slice, number: int, end: int, restores: bool
    ) -> None:
        """Copy a part of a request's ring into staging memory, or with ``restores`` from it."""
        units = min(self._stored(end), part.stop) - part.start
        first = number * self.shape.most_units + part.start
        chunks = list(range((part.stop - part.start) // CHUNK_UNITS))
        self._copy(staging.words, chunks, units, first, restores)

    def piece_of(self, memory: np.ndarray) -> Piece:
        raise ValueError("units on CUDA have no pieces")

    def units_of(self, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Piece]) -> RingCopy:
        end, shown, many = tensors["numbers"].tolist()
        copied = tuple(tensors[f"ring.{i}"] for i in range(len(self._words)))
        places = -(-self._stored(end) // CHUNK_UNITS) * CHUNK_UNITS
        wanted = [(words.shape[0], places, words.shape[2]) for words in self._words]
        if [tuple(tensor.shape) for tensor in copied] != wanted:
            raise ValueError("units of another shape")
        return RingCopy(end, shown, bool(many), copied)

    def numbers(self, names: Sequence[str | None]) -> list[int]:
        """Ring numbers of requests by name; -1 for None or a request without a ring."""
        return [-1 if name is None else self.rings.get(name, -1) for name in names]


class RingMemory(RecallMemory):
    """The scheduler's count of rings and of snapshots' chunks, which are all allocated at start.

    Every request that will evict reserves a ring when it is admitted. Snapshots get at least half
    as much memory as the rings, unless there is one ring: without chunks, a prompt that evicts
    would leave no snapshot.

    Args:
        most_rings: ``max_num_seqs``.
        keeps_snapshots: whether prefix caching is on.

    Attributes:
        num_chunks: chunks of all snapshots, in the room beside the rings.
    """

    def __init__(
        self,
        schedule: Schedule,
        shape: UnitShape,
        room_bytes: int,
        most_rings: int,
        keeps_snapshots: bool = False,
    ) -> None:
        room = round_up(room_bytes + 1) // 2
        on_device, on_host = ring_bytes(shape)
        super().__init__(schedule, room, on_host, 0)
        self.capacity, self.device_bytes = min(self.capacity, most_rings), on_device
        rings = self.bytes_of(self.capacity)
        if keeps_snapshots and room_bytes - rings < rings // 2:
            self.capacity = max(rings // 2 // on_host, 1)
        self._kept: WeakSet[Slip] = WeakSet()
        self.kept_chunk_bytes, self._keeps_snapshots = chunk_bytes(shape), keeps_snapshots
        left = room_bytes - self.bytes_of(self.capacity) if keeps_snapshots else 0
        self.num_chunks = round_up(left + 1) // 2 // self.kept_chunk_bytes

    @property
    def used_bytes(self) -> int:
        return self.limit_bytes

    @property
    def limit_bytes(self) -> int:
        kept = round_up(self.num_chunks * self.kept_chunk_bytes) if self.num_chunks else 0
        return super().limit_bytes + kept * self.ranks

    def bytes_of(self, chunks: int) -> int:
        return round_up(super().bytes_of(chunks)) if chunks else 0

    def most_bytes(self, most_tokens: int, requests: int) -> int:
        """Rings for all requests, and as much again for snapshots."""
        return super().most_bytes(most_tokens, requests) * (1 + self._keeps_snapshots)

    def bytes_on_device(self, room: int) -> int:
        """Most bytes of a rank, whose rings take at most ``room`` of the device's memory."""
        rings = round_up(room // self.device_bytes * self.chunk_bytes + 1) // 2
        return rings * (1 + self._keeps_snapshots)

    def need(self, schedule: Schedule, num_tokens: int) -> int:
        return int(schedule.policy.recall > 0 and schedule.evicted(np.asarray(num_tokens)) > 0)

    def most_need(self, most_tokens: int) -> int:
        return 1

    @property
    def largest_store(self) -> int:
        return self.room_bytes * self._most_units // self.chunk_bytes

    def adopt(self, name: str, source: CountedLog | None) -> None:
        """A ring has no chunks."""

    def fork(self, name: str, num_units: int) -> CountedLog | None:
        if name not in self.logs or not num_units:
            return None
        log = CountedLog(self._most_units, self._kept)
        log.extend(min(num_units, self._most_units))
        return log

    def grow(self, scheduled: object, snapshots: Snapshots | None) -> None:
        """Rings do not grow; drop snapshots whose chunks have no room."""
        make_room(self._kept, self.num_chunks, (), snapshots)
        assert len(self._kept) <= self.num_chunks, "a dropped snapshot has kept its chunks"


def ring_bytes(shape: UnitShape) -> tuple[int, int]:
    """Bytes of one ring on the device, and on the host."""
    keys = shape.num_layers * shape.num_kv_heads * shape.most_units * shape.unit
    words = shape.num_layers * shape.num_sets * shape.most_units * 8
    row = shape.row_size * shape.dtype.itemsize + 4 * shape.row_scales
    return keys * (shape.head_size + 4) + words, keys * row


def chunk_bytes(shape: UnitShape) -> int:
    """Bytes of a snapshot's chunk of ``CHUNK_UNITS`` units."""
    return sum(ring_bytes(shape)) // shape.most_units * CHUNK_UNITS


def round_up(num_bytes: int) -> int:
    """Bytes that PyTorch allocates for pinned memory: the next power of two."""
    return 1 << (num_bytes - 1).bit_length()


def check_memory(
    shape: UnitShape,
    num_requests: int,
    device: torch.device,
    free: tuple[int, int] | None = None,
    num_chunks: int = 0,
    ranks: int = 1,
) -> None:
    """Check that the rings and the chunks of snapshots fit in memory.

    Args:
        free: free bytes on device and host; None: measure them.
        ranks: which share ``recall_memory``.

    Raises:
        KVPolicyError: the rings are larger than the free memory of device or host.
    """
    rings = ring_bytes(shape)
    if free is None:
        host = psutil.virtual_memory().available
        free = (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host, host)
        if device.type == "cuda" and current_platform.is_integrated_gpu(device.index or 0):
            free = free[0], min(free) - rings[0] * num_requests  # both are the same memory
    if device.type == "cuda":
        kept = round_up(num_chunks * chunk_bytes(shape)) if num_chunks else 0
        free = free[0], round_up(max(free[1] - kept, 0) + 1) // 2
    for where, one, most in zip(
        ("of the device's memory", "of pinned host memory"), rings, free, strict=True
    ):
        if one * num_requests > most:
            tokens = shape.most_units * shape.unit
            fits = most // num_requests * shape.most_units // one * shape.unit
            fixes = []
            if fits >= shape.most_recalled * shape.unit:
                fixes.append(f"recall_store to at most {fits}")
            if most >= one:
                least = math.ceil(most // one * rings[1] * ranks * 1000 / 2**30) / 1000
                fixes.append(f"recall_memory to at most {least:g}")
                fixes.append(f"--max-num-seqs to at most {most // one}")
            raise KVPolicyError(
                f"kv_policy: stores of recall_store {tokens} tokens for {num_requests} requests "
                f"(as many as recall_memory has room for, at most --max-num-seqs) take "
                f"{one * num_requests / 2**30:.1f} GiB {where}, and "
                f"{most / 2**30:.1f} GiB can be had; set {', or '.join([*fixes, '--kv-recall 0'])}"
            )
