# SPDX-License-Identifier: Apache-2.0
"""Where evicted units wait on CUDA: a ring a running request, all of them made at start.

Keys and values lie in pinned memory of the host, which kernels read and write by themselves, and
what judges them, 8 bits a channel, on the device. Unit ``n`` of those that a request ever evicted
lies in place ``n`` modulo the ring's size, so nothing has to be looked up, and what a step does
with a ring is a row of numbers that follow from token counts (``kernels/columns.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.kernels.columns import (
    BEFORE,
    BEGIN,
    END,
    HOW,
    JUDGED,
    MORE_RECALLED,
    NOW,
    RECALL_COLUMNS,
    RING,
    SINKS,
    STORED,
    TAKES_ALL,
)
from vllm_cascade.log import logger
from vllm_cascade.policies import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.stores import begun


@dataclass
class Ring:
    """One request's.

    Attributes:
        number: among all rings.
        end: units that were ever evicted.
        shown: units that are recalled in the pages now.
        chose_for_many: whether several tokens chose these, of which any may have had its way.
    """

    number: int
    end: int = 0
    shown: int = 0
    chose_for_many: bool = False

    def step(self, schedule: Schedule, stream: int, length: int, most_units: int) -> list[int]:
        """The row of recall of a stride; the ring is then as after it."""
        policy = schedule.policy
        ends = np.asarray([stream, stream + length])
        (gone, gone_after), (now, soon) = schedule.evicted(ends).tolist(), schedule.recalled(ends)
        assert self.end == gone, (self.end, gone)
        begin, before = max(gone - most_units, 0), self.shown
        due = length > 1 or self.chose_for_many or stream % policy.recall_every == 0
        self.end, self.shown, self.chose_for_many = gone_after, int(now), length > 1
        row = [0] * RECALL_COLUMNS
        if now > 0 and (due or now != before):
            row[HOW] = TAKES_ALL if now == gone - begin else JUDGED
        row[RING], row[BEGIN], row[END] = self.number * most_units, begin, gone
        row[BEFORE], row[NOW], row[MORE_RECALLED] = before, int(now), int(soon - now)
        row[STORED], row[SINKS] = gone_after - gone, policy.num_sinks // schedule.unit
        return row


class Rings:
    """A worker's.

    Attributes:
        shape: of units; a ring has room for ``shape.most_units``.
        rows, codes, scales, born, token: ``[layers, ...]`` of what ``kernels/triton/recall*.py``
            call a layer's store.
        rings: of running requests, by name.
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
        self.rings: dict[str, Ring] = {}
        self._free = list(range(num_requests))[::-1]
        on_device, on_host = ring_bytes(shape)
        logger.info(
            "KV policy: recall has rings for %d requests, %.2f GiB on the device and %.2f GiB of "
            "pinned host memory",
            num_requests,
            on_device * num_requests / 2**30,
            on_host * num_requests / 2**30,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the rings in use, on device and host."""
        return len(self.rings) * sum(ring_bytes(self.shape))

    @property
    def num_units(self) -> int:
        return sum(min(ring.end, self.shape.most_units) for ring in self.rings.values())

    def note(self, output: SchedulerOutput) -> None:
        """Follow the scheduler; called before every step.

        A ring's memory can be another's at once: what still reads it comes earlier on the device.
        """
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            ring = self.rings.pop(name, None)
            if ring is not None:
                self._free.append(ring.number)
        for name, _, num_computed in begun(output):
            assert num_computed == 0 and name not in self.rings, "rings have no snapshots"
            self.rings[name] = Ring(self._free.pop())

    def plan(
        self,
        names: Sequence[str | None],
        schedules: Sequence[Schedule],
        stream: np.ndarray,
        length: np.ndarray,
    ) -> np.ndarray:
        """int32 ``[R, RECALL_COLUMNS]`` of strides of different requests; 0 of nobody's."""
        rows = np.zeros((len(stream), RECALL_COLUMNS), dtype=np.int32)
        numbers = zip(names, schedules, stream.tolist(), length.tolist(), strict=False)
        for row, (name, schedule, begin, tokens) in enumerate(numbers):
            ring = None if name is None else self.rings.get(name)
            if ring is not None and schedule.policy.recall and begin >= 0:
                rows[row] = ring.step(schedule, begin, tokens, self.shape.most_units)
        return rows


def ring_bytes(shape: UnitShape) -> tuple[int, int]:
    """Bytes of one request's ring on the device, and on the host."""
    keys = shape.num_layers * shape.num_kv_heads * shape.most_units * shape.unit
    words = shape.num_layers * shape.num_sets * shape.most_units * 8
    return keys * (shape.head_size + 4) + words, keys * 2 * shape.head_size * shape.dtype.itemsize


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
    for where, one, most in zip(
        ("of the device's memory", "of pinned host memory"), ring_bytes(shape), free, strict=True
    ):
        if one * num_requests > most:
            tokens = shape.most_units * shape.unit
            fits = most // num_requests * shape.most_units // one * shape.unit
            raise KVPolicyError(
                f"kv_policy: stores of recall_store {tokens} tokens for {num_requests} requests "
                f"(--max-num-seqs) take {one * num_requests / 2**30:.1f} GiB {where}, and "
                f"{most / 2**30:.1f} GiB are free; set recall_store to at most {fits}, or "
                f"--max-num-seqs to at most {most // one}, or --kv-recall 0"
            )
