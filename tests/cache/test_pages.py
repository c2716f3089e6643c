# SPDX-License-Identifier: Apache-2.0
"""Pages: sizes, counts, reservation, and the numbers in a page's tail."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_cascade.cache.layout import page_views
from vllm_cascade.cache.manager import KVPolicyManager
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import resolve


def full(block_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=8, dtype=dtype)


def spec(block_size: int = 16, drafts: int = 0, **kwargs) -> KVPolicySpec:
    policy = resolve({"name": "cascade", "budget": 64, "prefill_stride": 8, **kwargs})
    return KVPolicySpec.from_full(full(block_size), policy, drafts)


def manager(num_pages: int, **kwargs) -> KVPolicyManager:
    pool = BlockPool(num_pages + 1, enable_caching=False, hash_block_size=16)
    return KVPolicyManager(
        spec(**kwargs),
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=16,
    )


def needed(m: KVPolicyManager, request: str, num_tokens: int) -> int:
    return m.get_num_blocks_to_allocate(request, num_tokens, [], 0, 0, num_tokens)


def test_page_size_counts_every_byte() -> None:
    dense = full().page_size_bytes
    assert dense == 16 * 2 * 2 * 8 * 2
    assert spec().page_size_bytes == dense + 16 * 12
    assert spec(head_policy="per_kv_head").page_size_bytes == dense + 2 * 16 * 12
    assert spec(trace=True).page_size_bytes == dense + 16 * 16
    assert spec(drafts=2).page_size_bytes == dense + 16 * (12 + 2 * 8)
    assert spec(drafts=4, trace=True).page_size_bytes == dense + 16 * (16 + 4 * 8)
    assert spec(drafts=4, head_policy="per_kv_head").num_pages(10**6) == spec().num_pages(10**6)
    assert spec().copy_with_new_block_size(32).page_size_bytes == 2 * spec().page_size_bytes


@pytest.mark.parametrize("unit", [1, 2, 8, 16])
@pytest.mark.parametrize("trace", [False, True])
def test_pages_begin_where_rows_can_be_read_at_once(unit: int, trace: bool) -> None:
    """At multiples of 64 bytes, so that Triton's divisor of 16 holds for words and numbers."""
    settings = {"budget": 64, "num_sinks": 16, "unit": unit, "trace": trace}
    settings["prefill_stride"] = 16
    made = spec(**settings)
    own = full().page_size_bytes + 16 // unit * (16 if trace else 12)
    assert made.page_size_bytes % 64 == 0
    assert own <= made.page_size_bytes < own + 64


@pytest.mark.parametrize("eager", [True, False])
def test_pages_follow_the_count(eager: bool) -> None:
    s = spec(eager_fill=eager)
    for t in [0, 1, 16, 17, 40, 68, 69, 1000, 10**6]:
        most = max(s.schedule.count_at(u) for u in range(min(t, 400) + 1))
        assert s.num_pages(t) == -(-most // 16)
    assert s.num_pages(10**6) == -(-68 // 16)


def test_bounds_that_vllm_asks_for() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100_000))
    s = spec()
    assert s.max_num_blocks_per_req(config, 100_000) == 5
    assert s.max_memory_usage_bytes(config) == 5 * s.page_size_bytes
    short = SimpleNamespace(model_config=SimpleNamespace(max_model_len=20))
    assert s.max_memory_usage_bytes(short) == 2 * s.page_size_bytes
    assert not s.prefix_cacheable and not s.uses_slot_mapping


UNITS = {"num_sinks": 16, "unit": 16, "recall": 8, "prefill_stride": 16}


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ({"budget": 256, "eager_fill": False}, {"kv_policy": "sink"}),
        ({"budget": 256, **UNITS}, {"kv_budget": 192}),
        ({"budget": 256, **UNITS}, {"kv_recall": 2}),
        ({"budget": 256, **UNITS, "keep_prompt": 128}, {}),
        ({"budget": 96, "keep_prompt": 60, "overflow": 30}, {"kv_policy": "window"}),
        ({"budget": 256, **UNITS, "overflow": 64}, {}),
        ({"name": "beehive", "budget": 256, **UNITS}, {}),
    ],
    ids=[
        *("fills up sooner", "evicts sooner", "recalls less", "kept prompts", "overflow"),
        *("overflow and recall", "evicts many and recalls"),
    ],
)
def test_a_table_has_room_for_every_request(
    engine: dict[str, Any], asked: dict[str, Any], block_size: int
) -> None:
    """vLLM's runners raise where a request's pages exceed its row, and that ends the engine."""
    own = spec(block_size, **engine)
    requests = PerRequest(own.schedule)
    more = 0
    for prompt_len in (1, 20, 50, 100, 300):
        schedule = requests.schedule(asked, prompt_len)
        for num in range(1, own.policy.capacity + 100):
            width, pages = own.max_num_blocks_per_req(None, num), own.num_pages(num)
            assert max(own.num_pages(num, schedule), pages) <= width <= own.most_pages
            more += own.num_pages(num, schedule) > pages
            more += pages > -(-(num + own.policy.unit) // block_size)
    assert more or block_size > 16 or "kv_recall" in asked or "kv_policy" in asked


@pytest.mark.parametrize("drafts", [0, 16])
def test_a_table_has_room_for_vllms_warm_up(drafts: int) -> None:
    """Of one decode step and six of verified drafts, whatever the policy may keep."""
    own = spec(16, name="sink", budget=48, num_sinks=4, drafts=drafts)
    config: Any = SimpleNamespace(use_v2_model_runner=True)
    tokens = 4 * drafts + 7
    assert tokens > own.policy.capacity or not drafts
    assert own.table_slots(config) >= tokens
    assert (own.table_slots(config) == own.most_pages * 16) == (not drafts)


def test_registered_beside_vllms_own() -> None:
    assert KVCacheSpecRegistry.get_manager_class(spec()) is KVPolicyManager
    assert KVCacheSpecRegistry.get_manager_class(full()) is FullAttentionManager


def test_layers_merge_only_under_one_policy() -> None:
    assert KVPolicySpec.merge([spec(), spec()]) == spec()
    with pytest.raises(AssertionError):
        KVPolicySpec.merge([spec(), spec(tie="resident")])


def test_admission_reserves_a_whole_life() -> None:
    m = manager(num_pages=8)
    m.set_limit("a", 1000)
    assert needed(m, "a", 8) == 5  # all it will ever hold
    m.allocate_new_blocks("a", 8, 8)
    assert len(m.req_to_blocks["a"]) == 1
    assert needed(m, "a", 40) == 2  # running: just the next pages
    m.set_limit("b", 20)
    assert needed(m, "b", 20) == 2 + 4  # b's, and what is promised to a
    m.set_limit("c", 1000)
    assert needed(m, "c", 8) == 5 + 4 > m.block_pool.get_num_free_blocks()


def test_pages_come_back() -> None:
    m = manager(num_pages=8)
    free = m.block_pool.get_num_free_blocks()
    m.set_limit("a", 1000)
    for t in (8, 16, 64, 100, 5000):
        m.allocate_new_blocks("a", t, t)
    assert len(m.req_to_blocks["a"]) == 5
    assert all(not block.is_null for block in m.req_to_blocks["a"])
    m.free("a")
    assert m.block_pool.get_num_free_blocks() == free
    assert not m._limits and m.reserved_pages() == 0
    m.set_limit("never-started", 10)
    m.free("never-started")
    assert not m._limits


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_an_admitted_request_never_waits(data: st.DataObject) -> None:
    """Whatever is admitted and however it grows, the pool always has the next page."""
    m = manager(num_pages=data.draw(st.integers(5, 20)), eager_fill=data.draw(st.booleans()))
    running: dict[str, tuple[int, int]] = {}
    for step in range(60):
        request = f"r{step}"
        limit = data.draw(st.integers(1, 300))
        m.set_limit(request, limit)
        if needed(m, request, 1) <= m.block_pool.get_num_free_blocks():
            m.allocate_new_blocks(request, 1, 1)
            running[request] = (1, limit)
        else:
            m.free(request)
        for name, (t, last) in list(running.items()):
            t = min(t + data.draw(st.integers(1, 60)), last)
            assert needed(m, name, t) <= m.block_pool.get_num_free_blocks()
            m.allocate_new_blocks(name, t, t)
            running[name] = (t, last)
            if t == last:
                m.free(running and name)
                del running[name]


def test_page_views_share_the_pools_bytes() -> None:
    s = spec(head_policy="per_kv_head", trace=True)
    layers, blocks = 2, 3
    raw = torch.zeros(layers * blocks * s.page_size_bytes, dtype=torch.uint8)
    stride = s.page_size_bytes // 2
    for layer in range(layers):
        view = torch.as_strided(
            raw.view(torch.bfloat16),
            (blocks, 2, 16, 16),
            (stride, 256, 16, 1),
            layer * blocks * stride,
        )
        pages = page_views(view, s)
        assert pages.kv.data_ptr() == view.data_ptr()
        for index, words in enumerate((pages.rank, pages.born, pages.score, pages.token)):
            assert words.shape == (blocks, 2, 16)
            words[1, 1, 15] = 7 + index
        tail = raw.view(layers, blocks, -1)[layer, 1, s.unpadded_page_size_bytes :]
        words = tail.clone().view(torch.int32).view(4, 2, 16)
        assert words[[0, 1, 3], 1, 15].tolist() == [7, 8, 10]
        assert words[2].view(torch.float32)[1, 15] == 9.0
        assert int((tail != 0).sum()) == 3 + 2  # nothing else was touched
        assert not view.any(), "keys and values must not overlap the numbers"


def test_versions_follow_the_words_of_a_page() -> None:
    s = spec(drafts=3, trace=True, head_policy="per_kv_head")
    raw = torch.zeros(2 * s.page_size_bytes, dtype=torch.uint8)
    stride = s.page_size_bytes // 2
    view = torch.as_strided(raw.view(torch.bfloat16), (2, 2, 16, 16), (stride, 256, 16, 1))
    pages = page_views(view, s)
    assert pages.versions.shape == (2, 3, 2, 2, 16) and pages.versions[1].is_contiguous()
    pages.versions[1] = torch.arange(3 * 2 * 2 * 16, dtype=torch.int32).view(3, 2, 2, 16) + 1
    tail = raw.view(2, -1)[1, s.unpadded_page_size_bytes :].view(torch.int32)
    used = tail[4 * 2 * 16 : (4 + 6) * 2 * 16]
    assert used.tolist() == list(range(1, 193)) and int((tail != 0).sum()) == 192
    assert not view.any() and not pages.token.any() and not raw[: s.page_size_bytes].any()
    assert page_views(view, spec(trace=True, head_policy="per_kv_head")).versions is None
