# SPDX-License-Identifier: Apache-2.0
"""Allocation of bounded pages to requests, in the scheduler.

Each page belongs to one request. Other requests start from copies (``snapshots.py``). The manager
counts pages and does not know which tokens they hold; ``layout.py`` defines their contents.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_cascade.cache.snapshots import SnapshotStore
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.schedule import Schedule


class Limit(NamedTuple):
    """What a request may come to.

    Attributes:
        num_tokens: most tokens.
        schedule: its compiled policy.
        pages: most pages.
    """

    num_tokens: int
    schedule: Schedule
    pages: int


class KVPolicyManager(SingleTypeKVCacheManager):
    """Allocates a request's bounded pages and reserves all of them on admission.

    The scheduler sets each request's maximum length (``set_limit``). A request is admitted only if
    its final number of pages fits beside the pages still promised to admitted requests. An admitted
    request therefore never waits for a page and is never preempted for lack of one.

    Attributes:
        snapshots: Snapshots for prefix caching, including pages of recurrent states; None: prefix
            caching is off.
        memory: ``recall.memory.RecallMemory``, host memory for evicted units, which a request needs
            to be admitted; None: nothing is recalled.
        states: Managers of recurrent states, which allocate one page per request (``states.py``).
    """

    kv_cache_spec: KVPolicySpec
    # A slot is reused by a later token.
    has_positionally_stable_blocks = False  # pyright: ignore

    def __init__(self, kv_cache_spec: KVPolicySpec, block_pool: BlockPool, **kwargs) -> None:
        super().__init__(kv_cache_spec, block_pool=block_pool, **kwargs)
        self._limits: dict[str, Limit] = {}
        self.snapshots: SnapshotStore | None = None
        self.memory: Any = None
        self.states: Sequence[SingleTypeKVCacheManager] = ()
        if self.enable_caching:
            stride = kv_cache_spec.policy.prefill_stride
            self.snapshots = SnapshotStore(block_pool, block_pool.hash_block_size, stride)

    def set_limit(self, request_id: str, num_tokens: int, schedule: Schedule | None = None) -> None:
        """Set the most tokens that a request may process. It cannot be raised after admission.

        The scheduler calls it for every request of every step.

        Args:
            schedule: Compiled policy of the request; None: the engine's.
        """
        schedule = schedule or self.kv_cache_spec.engine_schedule
        known = self._limits.get(request_id)
        if known is None or known.num_tokens != num_tokens or known.schedule is not schedule:
            pages = self.kv_cache_spec.num_pages(num_tokens, schedule)
            self._limits[request_id] = Limit(num_tokens, schedule, pages)

    def num_pages(self, request_id: str, num_tokens: int) -> int:
        """Pages that a request needs after ``num_tokens`` tokens.

        vLLM also asks for tokens that a drafting model may look ahead. Those beyond the request's
        limit are never drafted.
        """
        limit = self._limits.get(request_id)
        if limit is None:
            return self.kv_cache_spec.num_pages(num_tokens)
        return self.kv_cache_spec.num_pages(min(num_tokens, limit.num_tokens), limit.schedule)

    def _missing_pages(self, request_id: str, num_tokens: int) -> int:
        """Pages that a running request still needs for ``num_tokens`` tokens."""
        held = len(self.req_to_blocks[request_id])
        if held >= self.final_pages(request_id):  # most of the steps of a long stream
            return 0
        return max(self.num_pages(request_id, num_tokens) - held, 0)

    def final_pages(self, request_id: str) -> int:
        """Most pages that a request may hold. Without a limit, the policy's maximum."""
        limit = self._limits.get(request_id)
        return self.kv_cache_spec.most_pages if limit is None else limit.pages

    def reserved_pages(self) -> int:
        """Pages promised to admitted requests but not yet allocated."""
        return sum(
            max(self.final_pages(request_id) - len(blocks), 0)
            for request_id, blocks in self.req_to_blocks.items()
            if blocks
        )

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Free pages that the pool must have.

        For a running request: the pages it needs next. On admission: its final pages plus all
        reserved pages.
        """
        if self.req_to_blocks.get(request_id):
            return self._missing_pages(request_id, num_tokens)
        if not self._has_memory(request_id):
            return self.block_pool.num_gpu_blocks + 1  # cannot be allocated, so the request waits
        return self.final_pages(request_id) + self.reserved_pages()

    def _stored_need(self, request_id: str) -> int:
        """Host memory that a request needs for its evicted units."""
        limit = self._limits[request_id]
        return self.memory.need(limit.schedule, limit.num_tokens)

    def _has_memory(self, request_id: str) -> bool:
        return self.memory is None or self.memory.fits(self._stored_need(request_id))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give an admitted request pages that start as a copy of a snapshot.

        Args:
            new_computed_blocks: All pages of the snapshot; pages of recurrent states come last.
        """
        assert num_external_computed_tokens == 0 and not self.req_to_blocks[request_id]
        if not new_computed_blocks:
            return
        assert self.snapshots is not None
        num_pages = self.num_pages(request_id, num_local_computed_tokens)
        assert len(new_computed_blocks) == num_pages + len(self.states)
        needed = self.final_pages(request_id) + self.reserved_pages() + len(self.states)
        if self.memory is not None:
            self.memory.adopt(request_id, self.snapshots.of(new_computed_blocks).log)
        blocks = self.snapshots.adopt(new_computed_blocks, needed)
        self.req_to_blocks[request_id] = blocks[:num_pages]
        for manager, block in zip(self.states, blocks[num_pages:], strict=True):
            manager.req_to_blocks[request_id] = [block]

    def state_after(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Pages that hold a running request's state after ``num_tokens`` tokens.

        Pages of recurrent states come last.
        """
        pages = self.req_to_blocks[request_id][: self.num_pages(request_id, num_tokens)]
        return [*pages, *(m.req_to_blocks[request_id][0] for m in self.states)]

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        if self.memory is not None and request_id not in self.memory.reserved:
            self.memory.admit(request_id, self._stored_need(request_id))
        missing = self._missing_pages(request_id, num_tokens)
        new_blocks = self.block_pool.get_new_blocks(missing) if missing else []
        self.req_to_blocks[request_id].extend(new_blocks)
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._limits.pop(request_id, None)
        if self.memory is not None:
            self.memory.release(request_id)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: list[int], **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return no hit: live pages are never shared. The scheduler looks for snapshots."""
        return tuple([] for _ in kv_cache_group_ids), 0


# Register vLLM's specs first. The registry fills itself only while it is empty, so registering ours
# before them would leave vLLM's specs out of this process.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(KVPolicySpec, KVPolicyManager)
