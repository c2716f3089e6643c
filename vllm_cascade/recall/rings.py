# SPDX-License-Identifier: Apache-2.0
"""Where evicted units wait on CUDA: a ring a running request, all of them made at start.

Keys and values lie in pinned memory of the host, which kernels read and write by themselves, and
what judges them, 8 bits a channel, on the device. Unit ``n`` of those that a request ever evicted
lies in place ``n`` modulo the ring's size, so nothing has to be looked up, and what a step does
with a ring is a row of numbers that follow from token counts (``kernels/columns.py``).
"""

from collections.abc import Sequence

import numpy as np
import psutil
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.log import logger
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.stores import UnitStores, begun


class Rings(UnitStores):
    """A worker's ring buffers for evicted units.

    Attributes:
        shape: of units; a ring has room for ``shape.most_units``.
        rows, codes, scales, born, token: ``[layers, ...]`` of what ``kernels/triton/recall*.py``
            call a layer's store.
        rings: numbers of the running requests' rings, by name.
        end: int64 ``[num_requests]``, units that a ring's request ever evicted.
        shown: int64, units that are recalled in its pages now.
        selected_by_many: bool, whether a stride of several tokens made the last selection.
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
        """Memory of the rings in use, on device and host."""
        return len(self.rings) * sum(ring_bytes(self.shape))

    @property
    def num_units(self) -> int:
        return int(self.end[list(self.rings.values())].clip(max=self.shape.most_units).sum())

    def note(self, output: SchedulerOutput) -> None:
        """Follow the scheduler; called before every step.

        A ring's memory can be another's at once: what still reads it comes earlier on the device.
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
        """The rings of requests by name; -1 for None and for a request without a ring."""
        return [-1 if name is None else self.rings.get(name, -1) for name in names]


def ring_bytes(shape: UnitShape) -> tuple[int, int]:
    """Bytes of one request's ring on the device, and on the host."""
    keys = shape.num_layers * shape.num_kv_heads * shape.most_units * shape.unit
    words = shape.num_layers * shape.num_sets * shape.most_units * 8
    return keys * (shape.head_size + 4) + words, keys * 2 * shape.head_size * shape.dtype.itemsize


def round_up(num_bytes: int) -> int:
    """What PyTorch takes of the host for so many pinned bytes: a power of two."""
    return 1 << (num_bytes - 1).bit_length()


def check_memory(
    shape: UnitShape,
    num_requests: int,
    device: torch.device,
    free: tuple[int, int] | None = None,
) -> None:
    """Refuse rings that cannot be.

    Args:
        free: bytes on device and host; None: what there is now.

    Raises:
        KVPolicyError: so many rings are larger than one of them.
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
            raise KVPolicyError(
                f"kv_policy: stores of recall_store {tokens} tokens for {num_requests} requests "
                f"(--max-num-seqs) take {one * num_requests / 2**30:.1f} GiB {where}, and "
                f"{most / 2**30:.1f} GiB can be had; set recall_store to at most {fits}, or "
                f"--max-num-seqs to at most {most // one}, or --kv-recall 0"
            )
