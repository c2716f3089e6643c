# SPDX-License-Identifier: Apache-2.0
"""Which log belongs to which pages, in a worker.

A state of the cache is known by its first page, as vLLM names it: a request's, or a snapshot's for
prefix caching. What the scheduler sends with every step says which pages are copied, begun, freed
and given up, and so what becomes of their logs.
"""

from collections.abc import Iterable

import psutil
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.log import logger
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import CHUNK_UNITS, Log, UnitShape


class Stores:
    """A worker's logs.

    Attributes:
        logs: by first page.
    """

    def __init__(self, shape: UnitShape) -> None:
        self.shape = shape
        self.logs: dict[int, Log] = {}
        self._pages: dict[str, int] = {}  # each request's first page

    @property
    def num_bytes(self) -> int:
        """Host memory in use; chunks that several states share are counted once."""
        chunks = {chunk for log in self.logs.values() for chunk in log.chunks}
        return sum(chunk.num_bytes for chunk in chunks)

    @property
    def num_units(self) -> int:
        """Units stored for requests and snapshots, those that are shared for each of them."""
        return sum(map(len, self.logs.values()))

    def note(self, output: SchedulerOutput) -> None:
        """Follow the scheduler; called before every step."""
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            page = self._pages.pop(name, None)
            self.logs.pop(page, None)
        copies = output.kv_cache_block_copies or ()
        forks = {
            copy.dst_block_id: self.logs[copy.src_block_id].fork()
            for copy in copies
            if copy.src_block_id in self.logs
        }
        self.logs.update(forks)
        adopted = set()
        for name, page, num_computed in begun(output):
            self._pages[name] = page
            adopted.add(page)
            if num_computed == 0:
                self.logs[page] = Log(self.shape)
            assert page in self.logs, "a request resumes from a snapshot without its units"
        for page in getattr(output, "dropped_snapshots", ()):
            if page not in adopted:
                self.logs.pop(page, None)


def begun(output: SchedulerOutput) -> Iterable[tuple[str, int, int]]:
    """Requests that start or resume: names, first pages, and tokens they need not compute."""
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
    """Most memory of one request that stores so many units: whole chunks, two of them in part."""
    chunks = -(-num_units // CHUNK_UNITS) + 1
    return chunks * CHUNK_UNITS * shape.unit_bytes


def check_host_memory(shape: UnitShape, max_num_seqs: int, available: int | None = None) -> None:
    """Refuse a store that cannot be, and warn of one that may grow too large.

    Memory is taken as units are evicted, so that what many short requests take is less.

    Args:
        available: bytes; None: what the machine has now.

    Raises:
        KVPolicyError: one request's store alone is larger.
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
