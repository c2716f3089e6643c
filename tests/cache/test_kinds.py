# SPDX-License-Identifier: Apache-2.0
"""Layers with windows beside a policy's: slots of a page, pages of a request, bytes of both."""

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.conftest import ROOT
from vllm_cascade.cache.kinds import DraftingLayers, bounded
from vllm_cascade.cache.manager import KVPolicyManager
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.metrics import saved_bytes
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError

MEMORY = ROOT / "docs/MEMORY.md"


def policy(**settings: object) -> Policy:
    return resolve({"name": "sink", "budget": 60, "prefill_stride": 16, **settings})


def specs(
    windows: list[int | None], run: Policy, block_size: int = 16, heads: int = 2, size: int = 8
) -> dict[str, KVCacheSpec]:
    """One layer for each window; None: full attention."""
    same = {"num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    made: dict[str, KVCacheSpec] = {}
    for index, window in enumerate(windows):
        if window is None:
            full = FullAttentionSpec(block_size=block_size, **same)
            made[f"layers.{index}"] = KVPolicySpec.from_full(full, run)
        else:
            made[f"layers.{index}"] = SlidingWindowSpec(block_size=1, sliding_window=window, **same)
    return bounded(made, run, block_size)


def request_bytes(made: dict[str, KVCacheSpec], num_tokens: int) -> int:
    """Bytes that a request of ``num_tokens`` tokens holds under a policy, in all layers."""
    pages = next(iter(made.values())).num_pages(num_tokens)
    return pages * sum(spec.page_size_bytes for spec in made.values())


def stock_bytes(made: dict[str, KVCacheSpec], num_tokens: int) -> int:
    """Bytes that vLLM without a policy holds for it; of windows only the blocks that it retains."""
    spec = next(iter(made.values()))
    return sum(kind.stock_bytes(num_tokens, spec.block_size) for kind in spec.kinds)


def test_a_window_beside_recall_fits_on_the_pages_of_both() -> None:
    """16 sinks, 64 tokens, 32 recalled ones and a unit that fills: eight pages of 16."""
    run = policy(budget=64, recall=2)
    window, full = specs([49, None], run).values()
    assert run.capacity == 128 and full.most_pages == window.most_pages == 8
    assert (window.page_slots, full.page_slots) == (6, 16)
    assert (window.policy.recall, window.policy.unit) == (0, 1)
    for tokens in (1, 48, 80, 96, 112, 2000):
        units = min(-(-tokens // 16), 5 + 2 + 1)
        need = max(units, -(-min(tokens, 48) // 6))
        assert window.num_pages(tokens) == full.num_pages(tokens) == need


def test_without_windows_nothing_changes() -> None:
    run = policy()
    made = specs([None, None], run)
    assert all(spec.kinds == () and spec.page_slots == 16 for spec in made.values())


@pytest.mark.parametrize(
    ("window", "slots"), [(49, 12), (50, 13), (2, 1), (65, 16), (66, 17), (1025, 256)]
)
def test_a_window_fits_on_the_policys_pages(window: int, slots: int) -> None:
    """64 tokens on four pages of 16; the window's tokens on the same four."""
    made = specs([window, None, window], policy())
    first, full, last = made.values()
    assert first == last and first.page_slots == slots and full.page_slots == 16
    assert first.policy.budget == window - 1 and first.window == window
    assert first.most_pages == full.most_pages == 4
    assert {spec.max_num_blocks_per_req(None, 10**6) for spec in made.values()} == {4}
    for tokens in (0, 1, 5, 16, 17, 48, 49, 64, 65, 2000):
        need = max(-(-min(tokens, 64) // 16), -(-min(tokens, window - 1) // slots))
        assert [spec.num_pages(tokens) for spec in made.values()] == [need] * 3


def whole(num_bytes: int) -> int:
    """A page's size: a multiple of 64 bytes."""
    return -(-num_bytes // 64) * 64


def test_chunks_hold_what_is_left_of_the_current_one() -> None:
    """64 tokens on four pages of 16; up to 47 of a chunk on the same four, then none."""
    run, same = policy(), {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    full = KVPolicySpec.from_full(FullAttentionSpec(block_size=16, **same), run)
    chunk = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=48, **same)
    made = bounded({"layers.0": chunk, "layers.1": full}, run, 16)
    chunk, full = made.values()
    assert (chunk.window, chunk.chunked, full.window, full.chunked) == (48, True, None, False)
    assert (chunk.page_slots, full.page_slots) == (12, 16)
    counts = [chunk.schedule.count_at(t) for t in range(200)]
    assert counts == [t % 48 for t in range(200)]
    assert [chunk.schedule.peak_at(t) for t in (1, 47, 48, 49, 10**6)] == [1, 47, 47, 47, 47]
    for tokens in (0, 1, 12, 47, 48, 49, 64, 65, 2000):
        need = max(-(-min(tokens, 64) // 16), -(-min(tokens, 47) // 12))
        assert chunk.num_pages(tokens) == full.num_pages(tokens) == need
    token = 2 * 2 * 8 * 2
    for tokens, blocks in ((47, 3), (48, 0), (50, 1), (100, 1), (143, 3)):
        held = -(-tokens // 16) + blocks
        assert stock_bytes(made, tokens) == held * 16 * token


def test_bytes_of_a_page_are_the_layers_own() -> None:
    window, full = specs([49, None], policy()).values()
    assert full.page_size_bytes == 16 * 2 * 2 * 8 * 2 + 16 * 12
    assert window.page_size_bytes == whole(12 * 2 * 2 * 8 * 2 + 12 * 12)
    # One set of tokens for all heads, and unit 1, whatever the policy of the others.
    each = policy(head_policy="per_kv_head", num_sinks=4, unit=4, trace=True)
    window, full = specs([49, None], each).values()
    assert full.page_size_bytes == whole(16 * 2 * 2 * 8 * 2 + 2 * 4 * 16)
    assert (window.num_sets, window.policy.unit) == (1, 1)
    assert window.page_size_bytes == whole(window.page_slots * (2 * 2 * 8 * 2 + 16))


def test_all_kinds_are_one_group() -> None:
    made = specs([49, None, 30], policy())
    group = UniformTypeKVCacheSpecs.from_specs(made)
    assert group is not None and group.max_num_blocks_per_req(None, 10**6) == 4
    assert [kind.window for kind in made["layers.0"].kinds] == [None, 49, 30]


def test_the_policy_is_the_engines_whatever_layer_is_asked() -> None:
    run = policy()
    for spec in specs([49, None], run).values():
        assert spec.engine_schedule.policy == run
    only = specs([49, 49], run)["layers.0"]
    assert only.engine_schedule.policy == run and only.num_pages(10**6) == 4


def test_a_request_of_its_own_budget_needs_pages_for_the_windows() -> None:
    run = policy()
    pool = BlockPool(9, enable_caching=False, hash_block_size=16)
    manager = KVPolicyManager(
        specs([49, None], run)["layers.0"],
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=16,
    )
    own = specs([None], policy(budget=12))["layers.0"].schedule
    manager.set_limit("own", 1000, own)
    assert manager.final_pages("own") == 4  # 48 of a window, 12 a page
    manager.set_limit("short", 13, own)
    assert manager.final_pages("short") == 2
    manager.allocate_new_blocks("own", 30, 30)
    assert len(manager.req_to_blocks["own"]) == 3
    assert manager.final_pages("nobody") == 4


def test_a_window_as_long_as_the_model_is_none() -> None:
    same = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    made = {"layers.0": SlidingWindowSpec(block_size=1, sliding_window=4096, **same)}
    (spec,) = bounded(made, policy(), 16, max_position=4096).values()
    full = KVPolicySpec.from_full(FullAttentionSpec(block_size=16, **same), policy())
    assert spec == full
    (spec,) = bounded(made, policy(), 16, max_position=4097).values()
    assert spec.window == 4096


@pytest.mark.parametrize("windows", [[None], [32]])
def test_another_kind_of_cache_is_refused(windows: list[int | None]) -> None:
    """Of layers of a model's own, which ask neither the backend nor us."""
    made = specs(windows, policy())
    made["layers.1.indexer"] = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
    )
    with pytest.raises(KVPolicyError, match=r"layers.1.indexer .* kind \(FullAttentionSpec\)"):
        bounded(made, policy(), 16)


def test_a_window_of_one_token_is_refused() -> None:
    with pytest.raises(KVPolicyError, match="a window of 1 token"):
        specs([1, None], policy())


def test_saved_bytes_count_both_kinds() -> None:
    made = specs([49, None], policy())
    spec = made["layers.0"]
    token = 2 * 2 * 8 * 2
    pages = [spec.num_pages(n) for n in (200, 40)]
    stock = (13 * 16 + 4 * 16) * token + (3 * 16 + 3 * 16) * token
    ours = sum(pages) * sum(s.page_size_bytes for s in made.values())
    assert saved_bytes(spec, [200, 40], sum(pages)) == stock - ours


def test_bytes_of_latent_rows() -> None:
    """DeepSeek V3, as MEMORY.md: 128,000 tokens in bfloat16, pages of 128."""
    stock = MLAAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=512 + 64, dtype=torch.bfloat16
    )
    spec = KVPolicySpec.from_full(stock, resolve({"name": "cascade", "budget": 4096}))
    assert spec.latent and spec.num_sets == 1
    assert spec.page_size_bytes == 128 * 576 * 2 + 128 * 12 == 148_992
    assert 61 * 1000 * stock.page_size_bytes == 8_994_816_000
    assert 61 * request_bytes({"layer": spec}, 128_000) == 61 * 33 * 148_992 == 299_920_896


MODELS = {
    # layers' windows, KV heads, head size
    "Gemma-3-27B": ([None if (i + 1) % 6 == 0 else 1024 for i in range(62)], 16, 128),
    "gpt-oss-20b": ([128 if i % 2 == 0 else None for i in range(24)], 8, 64),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_documents_examples(name: str) -> None:
    """128,000 tokens in bfloat16, pages of 16, cascade with a budget of 4,096: as MEMORY.md."""
    windows, heads, size = MODELS[name]
    run = resolve({"name": "cascade", "budget": 4096})
    made = specs(windows, run, 16, heads, size)
    stock = stock_bytes(made, 128_000)
    ours = request_bytes(made, 128_000)
    in_windows = [spec for spec in made.values() if spec.window is not None]
    of_windows = 257 * sum(spec.page_size_bytes for spec in in_windows)
    slots, num = in_windows[0].page_slots, len(in_windows)
    token = 2 * heads * size * 2
    assert made["layers.0"].num_pages(128_000) == 257
    assert slots == {"Gemma-3-27B": 4, "gpt-oss-20b": 1}[name]
    full = (len(windows) - num) * whole(16 * (token + 12))
    assert ours == 257 * (full + num * whole(slots * (token + 12)))
    row = (
        f"| {name} | {len(windows) - num} + {num} of {windows[0] or windows[1]} | "
        f"{stock / 1e6:,.0f} MB | {ours / 1e6:,.0f} MB | {of_windows / 1e6:,.0f} MB |"
    )
    print(row)
    assert row in MEMORY.read_text(encoding="utf-8")


def test_layers_of_a_drafting_model() -> None:
    """They recall nothing, keep two versions of each draft, and take no pages of their own."""
    run, same = policy(budget=64, recall=2), {"head_size": 8, "dtype": torch.bfloat16}
    made: dict[str, KVCacheSpec] = {}
    for name, heads in (("layers.0", 2), ("draft_model.layers.0", 4)):
        full = FullAttentionSpec(block_size=16, num_kv_heads=heads, **same)
        made[name] = KVPolicySpec.from_full(full, run, 3)
    window = SlidingWindowSpec(block_size=1, sliding_window=49, num_kv_heads=4, **same)
    made["draft_model.layers.1"] = window
    drafting = DraftingLayers({"draft_model.layers.0", "draft_model.layers.1"}, 6, 49)
    target, draft, unlimited = bounded(made, run, 16, None, 3, drafting).values()
    assert (target.drafts, draft.drafts, draft.policy.recall) == (3, 6, 0)
    assert draft.window is unlimited.window is None, "a window as long as the model's positions"
    assert draft.schedule == target.schedule.without_recall != target.schedule
    assert not target.windows and [kind.num_layers for kind in target.kinds] == [1, 2]
    rows, words = 16 * 4 * 16 * 2, (3 + 2 * 6) * 4  # a page is one unit
    assert draft.page_size_bytes == -(-(rows + words) // 64) * 64
    for tokens in (1, 96, 2000):
        alone = KVPolicySpec.from_full(full, run).num_pages(tokens)
        assert target.num_pages(tokens) == draft.num_pages(tokens) == alone
    drafting = DraftingLayers(drafting.names, 6)
    *_, limited = bounded(made, run, 16, None, 3, drafting).values()
    assert (limited.window, limited.page_slots, limited.drafts) == (49, 6, 6)
    assert len(limited.windows) == 1
