# SPDX-License-Identifier: Apache-2.0
"""Who owns the pages of a bounded cache, and how many a request needs.

Pages are private to a request (``snapshots.py`` makes copies for others to start from), and
nothing here knows which tokens are kept; what a page holds is in ``layout.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_cascade.cache.kinds import Kind
from vllm_cascade.cache.layout import (
    PAGE_ALIGNMENT,
    ROW_SCALES,
    TRACE_WORDS,
    UNIT_WORDS,
    WORD_BYTES,
)
from vllm_cascade.cache.snapshots import SnapshotStore
from vllm_cascade.policies import Policy, Schedule, compiled


@dataclass(frozen=True, kw_only=True)
class KVPolicySpec(AttentionSpec):
    """One layer's cache under a policy: bounded, private, addressed by the backend itself."""

    policy: Policy
    """What this layer runs under: the engine's policy, or that of its window."""
    slots: int | None = None
    """Tokens of a page, where they are not ``block_size``, which all layers share."""
    window: int | None = None
    """Tokens that a query sees, its own included; None: all that the policy keeps."""
    least_page_bytes: int = 0
    """What a page is padded to, as pages of other layers are as large."""
    kinds: tuple[Kind, ...] = ()
    """All kinds of the model's layers, the engine's policy first; none where there is only one."""
    num_layers: int | None = None
    """Layers of the model that have such a cache, where a worker has only some of them."""

    prefix_cacheable = uses_slot_mapping = False

    def __post_init__(self) -> None:
        super().__post_init__()
        units = self.num_sets * (self.page_slots // self.policy.unit)
        own = self.row_bytes + units * len(self.words) * WORD_BYTES
        aligned = cdiv(own, PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        object.__setattr__(self, "page_size_padded", max(aligned, self.least_page_bytes))

    @classmethod
    def from_full(cls, spec: FullAttentionSpec, policy: Policy) -> "KVPolicySpec":
        """The bounded counterpart of a full-attention layer's spec."""
        return replace_as(
            spec,
            cls,
            drop=("sliding_window", "attention_chunk_size", "non_causal"),
            policy=policy,
            page_size_padded=None,
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The layer's policy, compiled; all layers of a kind share it."""
        return compiled(self.policy)

    @cached_property
    def engine_schedule(self) -> Schedule:
        """The engine's policy, compiled: what requests run under, and whose positions all share."""
        return compiled(self.kinds[0].policy) if self.kinds else self.schedule

    @cached_property
    def _windows(self) -> tuple[tuple[Schedule, int], ...]:
        """Schedule and slots of every kind of window."""
        return tuple((compiled(kind.policy), kind.slots) for kind in self.kinds[1:])

    @property
    def page_slots(self) -> int:
        """Tokens of this layer's page."""
        return self.block_size if self.slots is None else self.slots

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """vLLM's hook: tokens of a page, which is never cut."""
        assert kernel_block_size == self.block_size, kernel_block_size
        return self.page_slots

    @property
    def max_distance(self) -> int:
        """Most positions that a cached key can have moved since it was written.

        In a window, positions fall behind the stream while a key stays: by no more than the tokens
        that come meanwhile and those that the policy may evict at once.
        """
        if self.window is None:
            return self.policy.max_position
        engine = self.kinds[0].policy
        return engine.capacity + engine.prefill_stride + self.window

    @property
    def num_sets(self) -> int:
        """Head sets that keep tokens of their own."""
        return self.num_kv_heads if self.policy.head_policy == "per_kv_head" else 1

    @property
    def scale_bytes(self) -> int:
        """Of a page: the scales of its rows, where every row has its own."""
        if not self.kv_quant_mode.is_per_token_head:
            return 0
        return self.num_kv_heads * self.page_slots * ROW_SCALES * WORD_BYTES

    @property
    def row_bytes(self) -> int:
        """Of a page: keys and values with their scales, which vLLM without a policy has, too."""
        return self.unpadded_page_size_bytes + self.scale_bytes

    @property
    def words(self) -> tuple[str, ...]:
        return TRACE_WORDS if self.policy.keeps_ages else UNIT_WORDS

    def num_pages(self, num_tokens: int, schedule: Schedule | None = None) -> int:
        """Pages of a request after ``num_tokens`` tokens, under its own policy if it has one."""
        slots = self.kinds[0].slots if self.kinds else self.page_slots
        own = cdiv((schedule or self.engine_schedule).peak_at(num_tokens), slots)
        windows = (cdiv(window.peak_at(num_tokens), slots) for window, slots in self._windows)
        return max(own, *windows) if self._windows else own

    @property
    def most_pages(self) -> int:
        """Pages of a request of any length."""
        if self.kinds:
            return max(kind.most_pages for kind in self.kinds)
        return cdiv(self.policy.capacity, self.page_slots)

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return self.num_pages(max_len)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.num_pages(vllm_config.model_config.max_model_len) * self.page_size_bytes


class KVPolicyManager(SingleTypeKVCacheManager):
    """Hands out a request's bounded pages and reserves all of them on admission.

    The scheduler says how long a request may become (``set_limit``). A request is admitted only
    when its final number of pages fits beside what the admitted ones have yet to take, so an
    admitted request never waits for a page and is never preempted for one.

    Attributes:
        snapshots: of whole requests, with the pages of their recurrent states; None: no caching.
        states: who hand out those pages, one a request each (``states.py``).
    """

    kv_cache_spec: KVPolicySpec
    has_positionally_stable_blocks = False  # a slot is reused by a later token

    def __init__(self, kv_cache_spec: KVPolicySpec, block_pool: BlockPool, **kwargs) -> None:
        super().__init__(kv_cache_spec, block_pool=block_pool, **kwargs)
        self._limits: dict[str, tuple[int, Schedule]] = {}  # how long, and under which policy
        self.snapshots: SnapshotStore | None = None
        self.states: Sequence[SingleTypeKVCacheManager] = ()
        if self.enable_caching:
            stride = kv_cache_spec.policy.prefill_stride
            self.snapshots = SnapshotStore(block_pool, block_pool.hash_block_size, stride)

    def set_limit(self, request_id: str, num_tokens: int, schedule: Schedule | None = None) -> None:
        """Announce that a request will never hold more than ``num_tokens`` tokens.

        Args:
            schedule: the request's own; None: the engine's.
        """
        self._limits[request_id] = num_tokens, schedule or self.kv_cache_spec.engine_schedule

    def num_pages(self, request_id: str, num_tokens: int) -> int:
        """Pages that a request needs after ``num_tokens`` tokens."""
        _, schedule = self._limits.get(request_id, (0, None))
        return self.kv_cache_spec.num_pages(num_tokens, schedule)

    def final_pages(self, request_id: str) -> int:
        """Pages a request may come to hold; without a limit, all that the policy allows."""
        limit = self._limits.get(request_id)
        if limit is None:
            return self.kv_cache_spec.most_pages
        return self.kv_cache_spec.num_pages(*limit)

    def reserved_pages(self) -> int:
        """Pages promised to admitted requests and not taken yet."""
        return sum(
            max(self.final_pages(request_id) - len(blocks), 0)
            for request_id, blocks in self.req_to_blocks.items()
            if blocks
        )

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Pages the pool must have free: the next ones, or on admission all still promised."""
        held = len(self.req_to_blocks.get(request_id, ()))
        if held:
            return max(self.num_pages(request_id, num_tokens) - held, 0)
        return self.final_pages(request_id) + self.reserved_pages()

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give an admitted request pages that begin as a copy of a snapshot's.

        Args:
            new_computed_blocks: all pages of the snapshot, those of states last.
        """
        assert num_external_computed_tokens == 0 and not self.req_to_blocks[request_id]
        if not new_computed_blocks:
            return
        assert self.snapshots is not None
        num_pages = self.num_pages(request_id, num_local_computed_tokens)
        assert len(new_computed_blocks) == num_pages + len(self.states)
        needed = self.final_pages(request_id) + self.reserved_pages() + len(self.states)
        blocks = self.snapshots.adopt(new_computed_blocks, needed)
        self.req_to_blocks[request_id] = blocks[:num_pages]
        for manager, block in zip(self.states, blocks[num_pages:], strict=True):
            manager.req_to_blocks[request_id] = [block]

    def state_after(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """All pages of a running request that hold its state after ``num_tokens`` tokens."""
        pages = self.req_to_blocks[request_id][: self.num_pages(request_id, num_tokens)]
        return [*pages, *(m.req_to_blocks[request_id][0] for m in self.states)]

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        missing = self.num_pages(request_id, num_tokens) - len(blocks)
        new_blocks = self.block_pool.get_new_blocks(missing) if missing > 0 else []
        blocks.extend(new_blocks)
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._limits.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: list[int], **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Never a hit on live pages; the scheduler looks for snapshots of them instead."""
        return tuple([] for _ in kv_cache_group_ids), 0


# vLLM's own specs first: the registry's check for "not filled yet" is "empty", so registering
# ours before them would hide them from this process.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(KVPolicySpec, KVPolicyManager)
