# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers (Mamba-2, gated delta nets, short convolutions) beside a policy.

A recurrent layer has no tokens to evict: what it knows of a stream is one state of fixed size,
written over at every step, as the policy's pages are. It lies in one private page a request and
group of layers, of the pool that keys and values are in. A snapshot is a copy of all of a request's
pages, so the state of the very token where it was taken comes back with them, and a request that
was preempted starts over, as it does without states.

All layers' pages have the same bytes, because vLLM gives the same memory to a page of either kind:
a page of keys and values has as many slots as it takes to be as large as a state. vLLM would raise
the block size instead, and with it the distance between two snapshots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_cascade.cache.kinds import kinds_of
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.settings import KVPolicyError


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """One recurrent layer's state: a private page a request, updated in place.

    It calls itself cacheable, which it is not by blocks, because vLLM's coordinator of several
    groups wants one that is; nothing of it is ever looked up by a block's hash.
    """


class StateManager(SingleTypeKVCacheManager):
    """Hands out the one page of a request's states, when the request is admitted."""

    kv_cache_spec: StateSpec
    has_positionally_stable_blocks = False  # written over at every step

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0 if self.req_to_blocks.get(request_id) else 1

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any
    ) -> None:
        """Nothing: who owns the policy's pages hands over the page of a state, too."""
        assert not new_computed_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        if blocks:
            return []
        blocks.extend(self.block_pool.get_new_blocks(1))
        return list(blocks)

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Never: a block's hash stands for tokens, and a state changes with every one."""

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: list[int], **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Never a hit on a live state; the scheduler looks for snapshots instead."""
        return tuple([] for _ in kv_cache_group_ids), 0


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(StateSpec, StateManager)


Specs = dict[str, KVCacheSpec]
"""Caches by layer."""


def apart(specs: Mapping[str, KVCacheSpec]) -> tuple[Specs, dict[str, MambaSpec]]:
    """Layers with keys and values, and recurrent ones."""
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    return {name: spec for name, spec in specs.items() if name not in states}, states


def beside_states(
    tokens: Mapping[str, KVCacheSpec],
    states: Mapping[str, MambaSpec],
    policy: Policy,
    block_size: int,
) -> Specs:
    """Every layer's cache in a model with recurrent layers: all pages of one size.

    Args:
        tokens: of layers with keys and values, bounded.
        states: of recurrent ones, as vLLM has them.
        block_size: tokens that the scheduler counts in; pages have a multiple of it as slots.

    Raises:
        KVPolicyError: nothing else than recurrent layers, or layers with windows beside them.
    """
    bounded = {name: spec for name, spec in tokens.items() if isinstance(spec, KVPolicySpec)}
    assert len(bounded) == len(tokens), "bounded already"
    if not bounded:
        raise KVPolicyError(
            "kv_policy: all layers of the model are recurrent and keep no tokens; remove "
            "--kv-policy"
        )
    if any(spec.window is not None for spec in bounded.values()):
        raise KVPolicyError(
            "kv_policy: the model has recurrent layers and layers with sliding windows, which no "
            "policy supports together; use --kv-policy full for this model"
        )
    own = {name: _own(spec, block_size) for name, spec in states.items()}
    largest = max(spec.page_size_bytes for spec in own.values())
    slots = block_size * max(cdiv(largest, spec.page_size_bytes) for spec in bounded.values())
    grown = [(name, replace(spec, slots=slots)) for name, spec in bounded.items()]
    page = max(spec.page_size_bytes for _, spec in grown)
    padded = [(name, replace(spec, least_page_bytes=page)) for name, spec in grown]
    kinds = kinds_of([spec for _, spec in padded], policy, slots)
    made: Specs = {name: replace(spec, kinds=kinds) for name, spec in padded}
    made |= {name: replace(spec, page_size_padded=page) for name, spec in own.items()}
    return made


def _own(spec: MambaSpec, block_size: int) -> StateSpec:
    assert spec.mamba_cache_mode == "none", "vLLM would keep states of several tokens"
    return replace_as(spec, StateSpec, block_size=block_size, page_size_padded=None)
