# SPDX-License-Identifier: Apache-2.0
"""Recurrent states (Mamba-2, gated delta nets, short convolutions) beside a bounded KV cache.

A recurrent layer has no tokens to evict. Its state has a fixed size and is overwritten at every
step. Each request has one private state page per group of layers, in the pool that also holds keys
and values. A snapshot copies all pages of a request, so it restores the state at exactly its last
token. A preempted request starts over, as it does without recurrent layers.

vLLM's pool requires one page size for all layers. A KV page therefore gets enough slots to be as
large as a state. vLLM itself would raise the block size instead, which would also increase the
distance between snapshots.
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
    """Spec of one recurrent layer's state: one private page per request, updated in place.

    It keeps ``prefix_cacheable`` true, because vLLM's coordinator of several groups requires a
    cacheable group. States are never looked up by block hash.
    """


class StateManager(SingleTypeKVCacheManager):
    """Allocates a request's single state page on admission."""

    kv_cache_spec: StateSpec
    # Overwritten at every step.
    has_positionally_stable_blocks = False  # pyright: ignore

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0 if self.req_to_blocks.get(request_id) else 1

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Do nothing: ``KVPolicyManager`` also assigns the state page of a snapshot."""
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
        """Do nothing: a state changes with every token, so no block hash identifies it."""

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: list[int], **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return no hit: live states are never shared. The scheduler looks for snapshots."""
        return tuple([] for _ in kv_cache_group_ids), 0


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(StateSpec, StateManager)


Specs = dict[str, KVCacheSpec]
"""Cache specs by layer name."""


def apart(specs: Mapping[str, KVCacheSpec]) -> tuple[Specs, dict[str, MambaSpec]]:
    """Split specs into attention layers and recurrent layers."""
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    return {name: spec for name, spec in specs.items() if name not in states}, states


def beside_states(
    tokens: Mapping[str, KVCacheSpec],
    states: Mapping[str, MambaSpec],
    policy: Policy,
    block_size: int,
) -> Specs:
    """Give all layers of a model with recurrent layers the same page size.

    Args:
        tokens: Bounded specs of attention layers.
        states: vLLM's specs of recurrent layers.
        block_size: The scheduler's block size in tokens. The slots of a page are a multiple of it.

    Returns:
        Specs of all layers.

    Raises:
        KVPolicyError: If all layers are recurrent, or if the model also has sliding-window layers.
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
    slots = block_size * max(cdiv(largest, spec.own_bytes) for spec in bounded.values())
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
