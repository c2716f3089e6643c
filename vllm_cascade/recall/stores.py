# SPDX-License-Identifier: Apache-2.0
"""A worker's logs of evicted units, by the pages they belong to.

The block id of its first page identifies a request's or snapshot's state. The scheduler output of
each step tells which pages are copied, started, freed and dropped. The worker creates, forks and
deletes logs accordingly.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import psutil
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.log import logger
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import CHUNK_UNITS, Log, UnitShape


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


class Stores(UnitStores):
    """Logs of all requests and snapshots of a worker.

    Attributes:
        logs: Logs by the block id of the first page.
    """

    def __init__(self, shape: UnitShape) -> None:
        self.shape = shape
        self.logs: dict[int, Log] = {}
        self._pages: dict[str, int] = {}  # first page by request id

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use. Shared chunks count once."""
        chunks = {chunk for log in self.logs.values() for chunk in log.chunks}
        return sum(chunk.num_bytes for chunk in chunks)

    @property
    def num_units(self) -> int:
        """Units of all requests and snapshots. Shared units count once per log."""
        return sum(map(len, self.logs.values()))

    def note(self, output: SchedulerOutput) -> None:
        """Update the logs from the scheduler output. Call before every step."""
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            page = self._pages.pop(name, None)
            self.logs.pop(page, None)
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
        self.logs.update(forks)
        for name, page, num_computed in begun_now:
            self._pages[name] = page
            if num_computed == 0:
                self.logs[page] = Log(self.shape)
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


def store_bytes(shape: UnitShape, num_units: int) -> int:
    """Most bytes that a request with ``num_units`` stored units takes.

    Chunks are whole; the first and the last may be partly used.
    """
    chunks = -(-num_units // CHUNK_UNITS) + 1
    return chunks * CHUNK_UNITS * shape.unit_bytes


def check_host_memory(shape: UnitShape, max_num_seqs: int, available: int | None = None) -> None:
    """Check that evicted units fit in host memory.

    Logs a warning if ``max_num_seqs`` full stores do not fit. This is only a warning because memory
    is allocated as units are evicted, so short requests take less.

    Args:
        available: Free bytes of host memory; None: as measured now.

    Raises:
        KVPolicyError: If the full store of one request does not fit.
    """
    free = psutil.virtual_memory().available if available is None else available
    one = store_bytes(shape, shape.most_units)
    tokens = shape.most_units * shape.unit
    fits = (free // (CHUNK_UNITS * shape.unit_bytes) - 1) * CHUNK_UNITS * shape.unit
    if one > free:
        raise KVPolicyError(
            f"kv_policy: a store of recall_store {tokens} tokens takes {one / 2**30:.1f} GiB of "
            f"host memory a request, and {free / 2**30:.1f} GiB are free; "
            f"set recall_store to at most {max(fits, 0)}, or --kv-recall 0"
        )
    if one * max_num_seqs > free:
        logger.warning(
            f"KV policy: {max_num_seqs} requests (--max-num-seqs) that each evict recall_store "
            f"{tokens} tokens would take {one * max_num_seqs / 2**30:.1f} GiB of host memory, and "
            f"{free / 2**30:.1f} GiB are free; lower recall_store or --max-num-seqs if so many "
            "long requests come together"
        )
