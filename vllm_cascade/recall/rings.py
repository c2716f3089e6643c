# SPDX-License-Identifier: Apache-2.0
"""Stores evicted units on CUDA: one ring buffer per running request, all allocated at start.

Keys and values are in pinned host memory, which kernels read and write directly. Their 8-bit codes,
which recall compares, are on the device. The ``n``-th unit that a request evicts is at place ``n``
modulo the size of the ring, so no lookup is needed. What a step does with a ring follows from token
counts; ``kernels/columns.py`` describes these numbers.
"""

from collections.abc import Sequence

import numpy as np
import psutil
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.log import logger
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.memory import RecallMemory
from vllm_cascade.recall.stores import UnitStores, begun


class Rings(UnitStores):
    """A worker's ring buffers for evicted units.

    Attributes:
        shape: sizes of the units; a ring holds ``shape.most_units``.
        rows, codes, scales, born, token: ``[layers, ...]``, each layer's store as described in
            ``kernels/triton/recall*.py``.
        rings: ring numbers of running requests, by name.
        end: int64 ``[num_requests]``, units evicted so far by the request of each ring.
        shown: int64 ``[num_requests]``, recalled units in its pages.
        selected_by_many: bool ``[num_requests]``, whether a stride of several tokens made the last
            selection.
    """

    def __init__(self, shape: UnitShape, num_requests: int, device: torch.device) -> None:
        self.shape, self.num_requests = shape, num_requests
        check_memory(shape, num_requests, device)
        places = num_requests * shape.most_units
        keys = (shape.num_layers, shape.num_kv_heads, places, shape.unit)
        pinned = device.type == "cuda"
        self.rows = torch.empty(*keys, 2 * shape.head_size, dtype=shape.dtype, pin_memory=pinned)
        self.codes = torch.empty(*keys, shape.head_size, dtype=torch.int8, device=device)
        self.scales = torch.empty(keys, device=device)
        words = (shape.num_layers, shape.num_sets, places)
        self.born = torch.empty(words, dtype=torch.int32, device=device)
        self.token = torch.empty(words, dtype=torch.int32, device=device)
        self.rings: dict[str, int] = {}
        self.end, self.shown = np.zeros((2, num_requests), dtype=np.int64)
        self.selected_by_many = np.zeros(num_requests, dtype=bool)
        self._free = list(range(num_requests))[::-1]
        on_device, on_host = ring_bytes(shape)
        logger.info(
            "KV policy: recall has rings for %d requests, %.2f GiB on the device and %.2f GiB of "
            "pinned host memory",
            num_requests,
            on_device * num_requests / 2**30,
            (round_up(on_host * num_requests) if pinned else on_host * num_requests) / 2**30,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the rings in use, on device and host."""
        return len(self.rings) * sum(ring_bytes(self.shape))

    @property
    def num_units(self) -> int:
        return int(self.end[list(self.rings.values())].clip(max=self.shape.most_units).sum())

    def note(self, output: SchedulerOutput) -> None:
        """Assign and free rings as the scheduler decided; called before every step.

        A freed ring can be reused at once, because kernels that still read it run earlier in the
        stream.
        """
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            number = self.rings.pop(name, None)
            if number is not None:
                self._free.append(number)
        for name, _, num_computed in begun(output):
            assert num_computed == 0 and name not in self.rings, "rings have no snapshots"
            number = self.rings[name] = self._free.pop()
            self.end[number] = self.shown[number] = self.selected_by_many[number] = 0

    def numbers(self, names: Sequence[str | None]) -> list[int]:
        """Ring numbers of requests by name; -1 for None or a request without a ring."""
        return [-1 if name is None else self.rings.get(name, -1) for name in names]


class RingMemory(RecallMemory):
    """The scheduler's count of rings, one per running request; all are allocated at start.

    Args:
        most_rings: ``max_num_seqs``.
    """

    def __init__(
        self, schedule: Schedule, shape: UnitShape, room_bytes: int, most_rings: int
    ) -> None:
        room = round_up(room_bytes + 1) // 2
        super().__init__(schedule, room, ring_bytes(shape)[1], 0)
        self.capacity = min(self.capacity, most_rings)

    @property
    def used_bytes(self) -> int:
        return self.limit_bytes

    def bytes_of(self, chunks: int) -> int:
        return round_up(super().bytes_of(chunks)) if chunks else 0

    def need(self, schedule: Schedule, num_tokens: int) -> int:
        return int(schedule.policy.recall > 0)

    def most_need(self, most_tokens: int) -> int:
        return 1

    @property
    def largest_store(self) -> int:
        return self.room_bytes * self._most_units // self.chunk_bytes

    def grow(self, *args: object, **kwargs: object) -> None:
        """Rings neither grow nor have snapshots."""


def ring_bytes(shape: UnitShape) -> tuple[int, int]:
    """Bytes of one ring on the device, and on the host."""
    keys = shape.num_layers * shape.num_kv_heads * shape.most_units * shape.unit
    words = shape.num_layers * shape.num_sets * shape.most_units * 8
    return keys * (shape.head_size + 4) + words, keys * 2 * shape.head_size * shape.dtype.itemsize


def round_up(num_bytes: int) -> int:
    """Bytes that PyTorch allocates for pinned memory: the next power of two."""
    return 1 << (num_bytes - 1).bit_length()


def check_memory(
    shape: UnitShape,
    num_requests: int,
    device: torch.device,
    free: tuple[int, int] | None = None,
) -> None:
    """Check that the rings fit in memory.

    Args:
        free: free bytes on device and host; None: measure them.

    Raises:
        KVPolicyError: the rings are larger than the free memory of device or host.
    """
    if free is None:
        host = psutil.virtual_memory().available
        free = (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host, host)
    if device.type == "cuda":
        free = free[0], round_up(free[1] + 1) // 2
    for where, one, most in zip(
        ("of the device's memory", "of pinned host memory"), ring_bytes(shape), free, strict=True
    ):
        if one * num_requests > most:
            tokens = shape.most_units * shape.unit
            fits = most // num_requests * shape.most_units // one * shape.unit
            fixes = []
            if fits >= shape.most_recalled * shape.unit:
                fixes.append(f"recall_store to at most {fits}")
            if most >= one:
                fixes.append(f"--max-num-seqs to at most {most // one}")
            raise KVPolicyError(
                f"kv_policy: stores of recall_store {tokens} tokens for {num_requests} requests "
                f"(--max-num-seqs) take {one * num_requests / 2**30:.1f} GiB {where}, and "
                f"{most / 2**30:.1f} GiB can be had; set {', or '.join([*fixes, '--kv-recall 0'])}"
            )
