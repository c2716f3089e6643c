# SPDX-License-Identifier: Apache-2.0
"""Recurrent states beside a policy's pages: sizes, who owns what, and what a snapshot copies."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.cache.test_kinds import MEMORY, policy
from vllm_cascade.cache.kinds import bounded
from vllm_cascade.cache.manager import KVPolicyManager
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.cache.states import StateManager, StateSpec, apart, beside_states
from vllm_cascade.engine.metrics import saved_bytes
from vllm_cascade.patches import kv_cache_planning
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError

BLOCK = 16
TOKEN = 2 * 2 * 8 * 2  # K and V of 2 heads of 8 bfloat16 numbers
STATE = ((3, 40), (4, 8, 64))  # 240 + 8,192 bytes


def state(shapes: Any = STATE, mode: str = "none") -> MambaSpec:
    dtypes = (torch.bfloat16, torch.float32)
    return MambaSpec(4096, shapes, dtypes, page_size_padded=1 << 20, mamba_cache_mode=mode)


def specs(kinds: str, run: Policy, **changed: Any) -> dict[str, KVCacheSpec]:
    """Layers by letters: ``a`` attends, ``r`` is recurrent."""
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    tokens = KVPolicySpec.from_full(full, run)
    made = {f"layers.{i}": tokens if k == "a" else state(**changed) for i, k in enumerate(kinds)}
    found, states = apart(made)
    return beside_states(found, states, run, BLOCK)


@pytest.mark.parametrize("unit", [1, 4, 16])
def test_all_pages_have_the_same_bytes(unit: int) -> None:
    """The slots of a page grow until it holds a state; the block size stays."""
    made = specs("rarr", policy(unit=unit, budget=64, num_sinks=max(unit, 4)))
    tokens, recurrent = made["layers.1"], made["layers.0"]
    block = BLOCK * TOKEN + BLOCK // unit * 12
    factor = -(-(240 + 8192) // block)
    page = -(-factor * block // 64) * 64  # rounded up once, not for each block
    assert tokens.page_slots == factor * BLOCK and tokens.page_size_bytes == page
    assert isinstance(recurrent, StateSpec) and recurrent.page_size_bytes == page
    assert {spec.block_size for spec in made.values()} == {BLOCK}
    assert recurrent.max_num_blocks_per_req(CONFIG, 10**6) == 1


CONFIG = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))


def test_a_state_smaller_than_a_page_is_padded() -> None:
    made = specs("ra", policy(), shapes=((2, 3), (1, 2, 2)))
    assert made["layers.1"].page_slots == BLOCK
    assert made["layers.0"].page_size_bytes == made["layers.1"].page_size_bytes


def test_pages_of_a_request_count_slots() -> None:
    tokens = specs("ra", policy(budget=600))["layers.1"]
    slots = tokens.page_slots
    assert slots == 112 and tokens.most_pages == 6
    for num in (1, slots, slots + 1, 603, 604, 10_000):
        assert tokens.num_pages(num) == -(-min(num, 604) // slots)
    assert tokens.engine_schedule.policy.budget == 600
    own = specs("ra", policy(budget=60))["layers.1"].schedule
    assert tokens.num_pages(10_000, own) == 1


def test_vllm_groups_them() -> None:
    """As many states share a page's number as there are layers that attend."""
    groups = kv_cache_planning()._get_kv_cache_groups_uniform_page_size(specs("rarrar", policy()))
    kinds = [type(group.kv_cache_spec) for group in groups]
    assert kinds == [KVPolicySpec, StateSpec, StateSpec]
    assert [len(group.layer_names) for group in groups] == [2, 2, 2]


def test_saved_bytes_are_those_of_tokens() -> None:
    """States are as large without a policy."""
    made = specs("raar", policy())
    spec = made["layers.1"]
    stock = 2 * (13 * BLOCK + 3 * BLOCK) * TOKEN
    assert saved_bytes(spec, [200, 40], 2) == stock - 2 * 2 * spec.page_size_bytes


def test_refused_together() -> None:
    run = policy()
    window = SlidingWindowSpec(
        block_size=1, sliding_window=20, num_kv_heads=2, head_size=8, dtype=torch.bfloat16
    )
    with pytest.raises(KVPolicyError, match="recurrent layers and layers with sliding windows"):
        beside_states(bounded({"w": window}, run, BLOCK), {"r": state()}, run, BLOCK)
    with pytest.raises(KVPolicyError, match="all layers of the model are recurrent"):
        beside_states({}, {"r": state()}, run, BLOCK)
    with pytest.raises(AssertionError, match="states of several tokens"):
        specs("ra", run, mode="align")


class Managers:
    """A request's pages and two groups of states, of one pool."""

    def __init__(self, num_blocks: int, **settings: object) -> None:
        made = specs("ar", policy(**settings))
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK)
        common = {"block_pool": self.pool, "enable_caching": True, "scheduler_block_size": BLOCK}
        self.tokens = KVPolicyManager(made["layers.0"], kv_cache_group_id=0, **common)
        self.states = [
            StateManager(made["layers.1"], kv_cache_group_id=group, **common) for group in (1, 2)
        ]
        self.tokens.states = self.states

    def need(self, name: str, tokens: int) -> int:
        managers = (self.tokens, *self.states)
        return sum(m.get_num_blocks_to_allocate(name, tokens, (), 0, 0, tokens) for m in managers)

    def allocate(self, name: str, tokens: int) -> list[int]:
        return [
            len(m.allocate_new_blocks(name, tokens, tokens)) for m in (self.tokens, *self.states)
        ]


def test_one_page_a_group_for_a_requests_whole_life() -> None:
    all_of = Managers(20, budget=600)
    all_of.tokens.set_limit("a", 10_000)
    assert all_of.need("a", 1) == 6 + 2
    assert all_of.allocate("a", 1) == [1, 1, 1]
    assert all_of.need("a", 113) == 1
    assert all_of.allocate("a", 113) == [1, 0, 0] and all_of.need("a", 114) == 0
    all_of.tokens.set_limit("b", 10_000)
    assert all_of.need("b", 1) == 6 + 2 + 4  # four are promised to the first
    (own,) = {id(m.req_to_blocks["a"][0]) for m in all_of.states[:1]}
    assert own != id(all_of.states[1].req_to_blocks["a"][0])
    for manager in all_of.states:
        manager.cache_blocks(None, 1000)
        assert manager.req_to_blocks["a"][0].block_hash is None
        all_of.pool.free_blocks(manager.pop_blocks_for_free("a"))
        assert not manager.req_to_blocks.get("a")


@pytest.mark.parametrize("room", [20, 10])
def test_a_snapshot_brings_the_states_back(room: int) -> None:
    """Copies where there is room, the snapshot's own pages where there is not."""
    all_of = Managers(room, budget=600)
    manager, store = all_of.tokens, all_of.tokens.snapshots
    manager.set_limit("a", 600)
    all_of.allocate("a", 200)
    state_after = manager.state_after("a", 200)
    assert len(state_after) == 2 + 2
    assert state_after[2:] == [m.req_to_blocks["a"][0] for m in all_of.states]
    hashes = [bytes([i]) * 32 for i in range(12)]
    schedule = manager.kv_cache_spec.engine_schedule
    store.take(schedule, hashes, 192, state_after, 0)
    taken = [(c.src_block_id, c.dst_block_id) for c in store.end_of_step()]
    snapshot = store.find(schedule, hashes, 192)
    assert taken == [
        (a.block_id, b.block_id) for a, b in zip(state_after, snapshot.blocks, strict=True)
    ]
    for owner in (manager, *all_of.states):
        all_of.pool.free_blocks(owner.pop_blocks_for_free("a"))
    manager.set_limit("b", 600)
    manager.add_local_computed_blocks("b", snapshot.blocks, 192, 0)
    own = manager.state_after("b", 192)
    copies = [(c.src_block_id, c.dst_block_id) for c in store.end_of_step()]
    if room == 20:
        ids = [block.block_id for block in snapshot.blocks]
        assert copies == list(zip(ids, [block.block_id for block in own], strict=True))
        assert not {block.block_id for block in own} & set(ids)
    else:
        assert not copies and own == list(snapshot.blocks)
    assert all_of.allocate("b", 200) == [0, 0, 0]
    assert [m.req_to_blocks["b"] for m in all_of.states] == [[block] for block in own[2:]]


def test_a_padded_page_keeps_its_size() -> None:
    """A policy's page may be padded to another's, and is never smaller than its own bytes."""
    spec = specs("ra", policy())["layers.1"]
    assert replace(spec, least_page_bytes=1 << 20).page_size_bytes == 1 << 20
    assert replace(spec, least_page_bytes=1).page_size_bytes == spec.page_size_bytes
    half = replace(spec, slots=spec.page_slots // 2, least_page_bytes=0)
    assert spec.page_size_bytes <= 2 * half.page_size_bytes < spec.page_size_bytes + 128


def test_the_documents_example() -> None:
    """Granite 4.0 H Small, 128,000 tokens, pages of 16, cascade of 4,096: as MEMORY.md."""
    run = resolve({"name": "cascade", "budget": 4096})
    full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    conv, ssm = (3, 2 * 4096 + 2 * 128), (128, 64, 128)
    mamba = MambaSpec(4096, (conv, ssm), (torch.bfloat16,) * 2)
    layers = {f"layers.{i}": mamba for i in range(36)}
    tokens = {f"layers.{i}": KVPolicySpec.from_full(full, run) for i in range(36, 40)}
    made = beside_states(tokens, layers, run, 16)
    spec = made["layers.36"]
    groups = len(kv_cache_planning()._get_kv_cache_groups_uniform_page_size(made)) - 1
    assert (spec.page_slots, spec.num_pages(128_000), groups) == (528, 8, 9)
    page = 4 * spec.page_size_bytes
    stock = 4 * 128_000 * 8 * 2 * 128 * 2 + 36 * mamba.page_size_bytes
    row = (
        f"| Granite 4.0 H Small | 4 + 36 | {mamba.page_size_bytes / 1e6:.2f} MB | 528 | "
        f"{stock / 1e6:,.0f} MB | {(8 + groups) * page / 1e6:,.0f} MB | "
        f"{groups * page / 1e6:,.0f} MB |"
    )
    print(row)
    assert row in MEMORY.read_text(encoding="utf-8")
