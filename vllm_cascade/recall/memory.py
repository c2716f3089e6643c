# SPDX-License-Identifier: Apache-2.0
"""Host memory of all recall stores of an engine, bounded and counted by the scheduler.

A running request's whole need is reserved when it is admitted, so its answer never depends on other
requests. Snapshots share what running requests do not use; the scheduler drops the least recently
used ones first, if that frees a chunk. How many units a request has evicted follows from its
tokens, so the scheduler counts the same chunks that workers allocate, without asking them.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakSet

import numpy as np

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import Schedule, by_schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.chain import CHUNK_UNITS, Chain, most_chunks

GIB = 1 << 30


class Slip:
    """A chunk as the scheduler counts it."""

    __slots__ = ("__weakref__",)


class CountedLog(Chain[Slip]):
    """A log without memory, with the same chunks as the worker's log."""

    def __init__(self, most_units: int, live: WeakSet[Slip]) -> None:
        super().__init__(most_units)
        self._live = live

    def _new_chunk(self) -> Slip:
        slip = Slip()
        self._live.add(slip)
        return slip

    def _copy_chunk(self, chunk: Slip) -> Slip:
        return self._new_chunk()

    def fork(self) -> "CountedLog":
        return self.share(type(self)(self.most_units, self._live))


class Snapshots(Protocol):
    """The snapshots, which free chunks when they are dropped."""

    def drop_oldest(self, frees: Callable[[CountedLog | None], bool]) -> bool:
        """Drop the least recently used snapshot whose log passes ``frees``; False if none does."""
        ...


def make_room(
    live: WeakSet[Slip], most: int, held: Iterable[Slip], snapshots: Snapshots | None
) -> None:
    """Drop snapshots, least recently used first, until ``live`` has at most ``most`` chunks.

    Args:
        held: chunks that stay without snapshots. Snapshots that have no others stay, too: dropping
            them would free nothing.
    """
    if len(live) <= most or snapshots is None:
        return
    stays = set(held)

    def frees(log: CountedLog | None) -> bool:
        return log is not None and not stays.issuperset(log.chunks)

    while len(live) > most and snapshots.drop_oldest(frees):
        pass


class RecallMemory:
    """Reservations and logs of an engine's requests, counted in chunks.

    Attributes:
        capacity: Chunks that may exist at any time.
        reserved: Chunks promised to admitted requests, by name.
        logs: Logs of requests that recall, by name.
        ranks: Tensor-parallel ranks; each has its heads' part of every chunk.
        kept_chunk_bytes: Bytes that a chunk takes in a session of a rank.
        device_bytes: Bytes of a chunk on a rank's device; 0: all of it is host memory.

    Args:
        schedule: The engine's.
        room_bytes: Most bytes of a rank.
        chunk_bytes: Bytes of a chunk in all layers of a rank.
        max_num_batched_tokens: Most tokens of a step.
    """

    def __init__(
        self, schedule: Schedule, room_bytes: int, chunk_bytes: int, max_num_batched_tokens: int
    ) -> None:
        self.room_bytes, self.chunk_bytes = room_bytes, chunk_bytes
        self.kept_chunk_bytes, self.device_bytes = chunk_bytes, 0
        self.capacity, self.ranks = room_bytes // chunk_bytes, 1
        self._schedule, self._most_tokens = schedule, max_num_batched_tokens
        self._most_units = schedule.policy.recall_store // schedule.unit
        self._live: WeakSet[Slip] = WeakSet()
        self.reserved: dict[str, int] = {}
        self.logs: dict[str, CountedLog] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all chunks in use. Shared chunks count once."""
        return self.bytes_of(len(self._live)) * self.ranks

    @property
    def reserved_bytes(self) -> int:
        return self.bytes_of(sum(self.reserved.values())) * self.ranks

    @property
    def limit_bytes(self) -> int:
        return self.bytes_of(self.capacity) * self.ranks

    def need(self, schedule: Schedule, num_tokens: int) -> int:
        """Most chunks that a request of ``num_tokens`` tokens ever needs."""
        if not schedule.policy.recall:
            return 0
        evicted = int(schedule.evicted(np.asarray(num_tokens)))
        return most_chunks(evicted, self._most_units, self._step_units(schedule.most_at_once))

    def _step_units(self, most_at_once: int) -> int:
        """Most units that are evicted in a step."""
        return -(-self._most_tokens // self._schedule.unit) + 1 + most_at_once

    def most_need(self, most_tokens: int) -> int:
        """``need`` of any request of at most ``most_tokens`` tokens, whatever policy it sets.

        It is at least 1, so that memory has a size if no request is as long as a unit.
        """
        policy = self._schedule.policy
        steps = self._step_units(policy.capacity // policy.unit)
        return max(most_chunks(most_tokens // policy.unit, self._most_units, steps), 1)

    @property
    def largest_store(self) -> int:
        """Most units of ``recall_store`` with which any request fits."""
        policy = self._schedule.policy
        return (self.capacity - 2) * CHUNK_UNITS - self._step_units(policy.capacity // policy.unit)

    def bytes_of(self, chunks: int) -> int:
        """Bytes that this number of chunks takes in a rank."""
        return chunks * self.chunk_bytes

    def most_bytes(self, most_tokens: int, requests: int) -> int:
        """Bytes in a rank with which so many requests of ``most_tokens`` tokens miss nothing."""
        return self.bytes_of(self.most_need(most_tokens) * requests)

    def bytes_on_device(self, room: int) -> int:
        """Most bytes of a rank whose stores take at most ``room`` of its device's memory."""
        raise NotImplementedError("all of it is host memory")

    def fits(self, need: int) -> bool:
        """Whether a request with this need can be admitted now."""
        return need + sum(self.reserved.values()) <= self.capacity

    def admit(self, name: str, need: int) -> None:
        """Reserve a request's need; its log is then empty or a fork of a snapshot's."""
        self.reserved[name] = need
        if need:
            self.logs.setdefault(name, CountedLog(self._most_units, self._live))

    def adopt(self, name: str, source: CountedLog | None) -> None:
        """Let a request that is about to be admitted start from a snapshot's log."""
        if source is not None:
            self.logs[name] = source.fork()

    def resume(self, name: str, num_units: int) -> None:
        """Let an admitted request start with units that a session brings."""
        if name in self.logs:
            self.logs[name].extend(num_units)
            self.logs[name].trim()

    def fork(self, name: str, num_units: int) -> CountedLog | None:
        """The log of a snapshot that is taken now of a request with so many evicted units."""
        return self.logs[name].fork() if name in self.logs else None

    def release(self, name: str) -> None:
        """Free what an ended or preempted request reserved."""
        self.reserved.pop(name, None)
        self.logs.pop(name, None)

    def grow(
        self, scheduled: Iterable[tuple[str, Schedule, int]], snapshots: Snapshots | None
    ) -> None:
        """Count the units that a step will store; drop snapshots that have no room beside them.

        Args:
            scheduled: Each request's name, schedule and tokens after the step.
        """
        rows = [row for row in scheduled if row[0] in self.logs]
        if not rows:
            return
        names, schedules, tokens = zip(*rows, strict=True)
        num_tokens = np.asarray(tokens, dtype=np.int64)
        read: list[tuple[Slip, ...]] = []  # a step also reads chunks that it replaces or drops
        grown: list[CountedLog] = []
        for schedule, where in by_schedule(schedules):
            which = np.arange(len(names))[where]
            ends = schedule.evicted(num_tokens[which])
            for i, end in zip(which.tolist(), ends.tolist(), strict=True):
                log = self.logs[names[i]]
                if end > log.end and schedule.policy.recall:
                    read.append(log.chunks[-1:])
                    log.extend(end - log.end)
                    grown.append(log)
        held = itertools.chain(*read, *(log.chunks for log in self.logs.values()))
        make_room(self._live, self.capacity, held, snapshots)
        assert len(self._live) <= self.capacity, "requests outgrew what was reserved for them"
        for log in grown:
            log.trim()


def check_one_fits(memory: RecallMemory, policy: Policy, max_model_len: int) -> None:
    """Check that the longest request fits, so that none can wait for ever.

    Raises:
        KVPolicyError: It does not; the message names the settings and the fix.
    """
    need = memory.most_need(max_model_len)
    if need <= memory.capacity:
        return
    needs = memory.bytes_of(need) * memory.ranks / GIB
    fits = memory.largest_store * policy.unit
    lower = f"recall_store to at most {fits}, or " if fits >= policy.recalled else ""
    raise KVPolicyError(
        f"kv_policy: a request that evicts recall_store {policy.recall_store} tokens takes "
        f"{needs:.3g} GiB of host memory, more than recall_memory {policy.recall_memory:.3g}; "
        f"set {lower}recall_memory to at least {math.ceil(needs * 1000) / 1000:g}, or --kv-recall 0"
    )
