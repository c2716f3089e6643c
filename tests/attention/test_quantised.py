# SPDX-License-Identifier: Apache-2.0
"""Rows in 8 bits on both CPU paths: against the literal cache, which quantises them for itself."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.test_paged import (
    BEEHIVE,
    CASCADE,
    H2O,
    HEADS,
    IN_UNITS,
    LARGE,
    PagedLayer,
    Shape,
    path,
    run_mixed_requests,
)
from tests.oracle.quantised import Quantiser
from vllm_cascade.attention.cpu.paths import SWITCH
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.cache.layout import page_views
from vllm_cascade.cache.quantised import CODES, Quantised
from vllm_cascade.engine.worker import scales_of
from vllm_cascade.kernels.cpp.library import load
from vllm_cascade.policies.settings import KVPolicyError

__all__ = ["path"]  # a fixture
PER_ROW = [name for name in CODES if name.endswith("per_token_head")]
SCALES = (0.25, 0.75)  # of all keys and all values; the largest e4m3 is then 112, and 336


def shaped(cache_dtype: str, **changed: Any) -> Shape:
    return Shape(cache_dtype=cache_dtype, scales=SCALES, **changed)


SMALL: dict[str, tuple[Shape, dict[str, Any]]] = {
    "cascade": (shaped("fp8_per_token_head"), {**CASCADE, "prefill_stride": 8}),
    "heads": (shaped("int8_per_token_head"), {**HEADS, "prefill_stride": 8}),
    "h2o": (shaped("fp8", group=4), {**H2O, "prefill_stride": 8}),
    "h2o-1": (shaped("int8_per_token_head", group=1), {**H2O, "prefill_stride": 1}),
    "beehive": (shaped("fp8_e5m2"), {**BEEHIVE, "prefill_stride": 8}),
    "overflow": (
        shaped("fp8_per_token_head"),
        {"name": "sink", "budget": 9, "overflow": 4, "prefill_stride": 7},
    ),
    "alibi": (shaped("int8_per_token_head", alibi=True), {**HEADS, "prefill_stride": 8}),
    # Channels that fill no register, pages of 12 slots, keys in pairs of neighbours.
    "odd": (
        shaped("fp8_per_token_head", head_size=20, rotary_dim=8, block_size=12),
        {**HEADS, "prefill_stride": 8},
    ),
    "interleaved": (
        shaped("fp8_e4m3", is_neox=False, head_size=24, rotary_dim=12),
        {**CASCADE, "prefill_stride": 8},
    ),
    "large-heads": (
        shaped("fp8_per_token_head", head_size=64, rotary_dim=64),
        {**CASCADE, "prefill_stride": 8},
    ),
    "sinks": (shaped("fp8", sinks=True), {**CASCADE, "prefill_stride": 8}),
    # Two scales of a row: of its rotated channels, and of its latent.
    "latent": (
        shaped(
            "int8_per_token_head", num_kv_heads=1, group=5, head_size=28, rotary_dim=8, latent=True
        ),
        {**CASCADE, "prefill_stride": 8},
    ),
    "latent-fp8-1": (
        shaped(
            "fp8", num_kv_heads=1, group=3, head_size=40, rotary_dim=8, latent=True, is_neox=False
        ),
        {**H2O, "prefill_stride": 1},
    ),
    # The cache in another type than the model.
    "bfloat16": (shaped("bfloat16"), {**HEADS, "prefill_stride": 8}),
}
UNITS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "cascade-4": (shaped("fp8_per_token_head"), {**IN_UNITS, "prefill_stride": 8}),
    "h2o-4-each": (
        shaped("int8_per_token_head"),
        {
            "name": "h2o",
            "budget": 20,
            "num_sinks": 0,
            "unit": 4,
            "head_policy": "per_kv_head",
            "prefill_stride": 8,
        },
    ),
    "cascade-16": (
        shaped("int8_per_token_head", head_size=64, rotary_dim=64, block_size=32),
        {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 32, "head_policy": "per_kv_head"},
    ),
    "latent-4": (
        shaped(
            "fp8_per_token_head", num_kv_heads=1, group=6, head_size=80, rotary_dim=16, latent=True
        ),
        {**IN_UNITS, "prefill_stride": 8},
    ),
    "cascade-16-fp8": (shaped("fp8"), {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 16}),
}


@pytest.mark.parametrize("name", SMALL)
def test_mixed_requests(name: str, path: str) -> None:
    shape, policy = SMALL[name]
    run_mixed_requests(path, shape, policy, [1, 5, 23, 32, 48], [40, 5, 30, 32, 60], len(name))


@pytest.mark.parametrize("name", UNITS)
def test_mixed_requests_in_units(name: str, path: str) -> None:
    """Prompts that end inside a unit, whose keys turn before they are quantised."""
    shape, policy = UNITS[name]
    more = policy["budget"]
    prompts, totals = [1, 5, 23, 32, 48 + more], [40 + more, 5, 30 + more, 32, 60 + more]
    run_mixed_requests(path, shape, policy, prompts, totals, len(name))


@pytest.mark.parametrize("cache_dtype", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_paths_leave_the_same_bytes(
    cache_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all sizes, among them zeros, steps' middles and what is beyond the largest code."""
    torch.manual_seed(0)
    shape = shaped(cache_dtype, dtype=dtype)
    new = torch.randn(3, 40, 2, 16) * torch.logspace(-6, 4, 40)[:, None, None]
    new[:, ::7, :, 3] = 448.0
    new[:, 1::7] = torch.randint(-30, 30, (16,)) / 2
    new[:, 5] = 0.0
    pools = []
    for choice in ("native", "pytorch"):
        monkeypatch.setenv(SWITCH, choice)
        layer = PagedLayer(shape, {"name": "sink", "budget": 60, "prefill_stride": 16}, 4)
        for at, n in [(0, 32), *((at, 1) for at in range(32, 40))]:
            query, key, value = new[:, at : at + n]
            query, table = query.repeat_interleave(2, 1), torch.tensor([[2, 1, 3]]).int()
            layer.step([n], [at], [at == 0], table, query, key, value, lambda row, position: row)
        pools.append(layer.pages)
    native, pytorch = pools
    assert torch.equal(native.kv[[2, 1]], pytorch.kv[[2, 1]])
    assert torch.equal(native.kv[3, :, :8], pytorch.kv[3, :, :8])
    if cache_dtype in PER_ROW:
        for at in ((2,), (1,), (3, slice(None), slice(8))):
            assert torch.equal(native.scale[at], pytorch.scale[at])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_codes(data: st.DataObject) -> None:
    """PyTorch's types and the list of all numbers: what a row is read as."""
    cache_dtype = data.draw(st.sampled_from(list(CODES)))
    scales = data.draw(st.sampled_from([(1.0, 1.0), (0.5, 2.0), (0.01, 3.0)]))
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    size = 10.0 ** data.draw(st.integers(-7, 5))
    rows = torch.randn(3, 2, 2 * 12) * size
    if data.draw(st.booleans()):  # of numbers that lie in the middle of two
        rows = torch.randint(-40, 40, rows.shape) / data.draw(st.sampled_from([2, 8, 64]))
    ours, other = Quantised.of(cache_dtype, scales), Quantiser.of(cache_dtype, scales)
    codes, scale = ours.encode(rows)
    assert codes.itemsize == 1 and codes.shape == rows.shape
    assert (scale is None) == (cache_dtype not in PER_ROW)
    keys, values = rows.split(12, dim=-1)
    expected = torch.cat([other.read(keys, 0), other.read(values, 1)], dim=-1)
    found = ours.decode(codes, scale)
    near = (found - expected).abs() <= 1e-6 * expected.abs()
    # Products and quotients round differently: a number in the middle of two may go either way.
    torch.testing.assert_close(
        (found - rows)[~near].abs(), (expected - rows)[~near].abs(), rtol=1e-4, atol=0.0
    )
    twice = ours.decode(*ours.encode(found))
    torch.testing.assert_close(twice, found, rtol=2e-6, atol=0.0)


def test_pages_shrink_as_computed() -> None:
    """Per head and token 2 D bytes, and 8 of scales; the numbers of units stay."""
    sizes = {}
    for name in ("auto", "fp8", "int8_per_token_head"):
        shape = Shape(cache_dtype=name, head_size=64, rotary_dim=64, dtype=torch.bfloat16)
        layer = PagedLayer(shape, {**CASCADE, "prefill_stride": 8, "unit": 1}, 2)
        sizes[name] = layer.spec.page_size_bytes
    words = 4 * 16 * 4  # rank, born, score, token of 16 slots
    assert sizes["auto"] == 16 * 2 * (2 * 64 * 2) + words
    assert sizes["fp8"] == 16 * 2 * (2 * 64) + words
    assert sizes["int8_per_token_head"] == 16 * 2 * (2 * 64 + 8) + words


@pytest.mark.parametrize("cache_dtype", PER_ROW)
def test_scales_stand_behind_the_words(cache_dtype: str) -> None:
    """Every head's and slot's own, which nothing else shares."""
    layer = PagedLayer(shaped(cache_dtype), {**HEADS, "prefill_stride": 8}, 3)
    pages, spec = layer.pages, layer.spec
    layer.pool.zero_()
    pages.scale[1, 1, 15, 1] = 7.0
    end = 16 * 2 * 2 * spec.head_size + 2 * 16 * len(spec.words) * 4 + 2 * 16 * 2 * 4
    assert spec.page_size_bytes == -(-end // 64) * 64
    last = layer.pool[1][end - 4 : end].view(torch.float32)
    assert last.item() == 7.0
    pages.scale[1, 0, 0, 0] = 5.0
    begin = end - 2 * 16 * 2 * 4
    assert layer.pool[1][begin : begin + 4].view(torch.float32).item() == 5.0
    assert int((layer.pool != 0).sum()) == 4, "two numbers of two bytes that are not 0"
    for words in (pages.rank, pages.born, pages.token):
        assert not words.any()
    assert not pages.kv.any()


def test_a_moved_token_keeps_its_bytes(path: str) -> None:
    """Far beyond the budget the sinks' rows are those that were written."""
    shape = shaped("fp8_per_token_head")
    layer = run_mixed_requests(
        path, shape, {"name": "sink", "budget": 9, "num_sinks": 4, "prefill_stride": 8}, [8], [9], 0
    )
    page = int((layer.pages.rank[1:, 0, 0] == 0).nonzero()[0]) + 1
    before = layer.pages.kv[page, :, :4].clone(), layer.pages.scale[page, :, :4].clone()
    table = torch.tensor([[page]], dtype=torch.int32)
    for at in range(9, 90):
        new = (torch.randn(1, heads, 16) for heads in (4, 2, 2))
        layer.step([1], [at], [False], table, *new, lambda row, position: row)
    assert int(layer.pages.born[page].max()) > 8
    assert torch.equal(before[0], layer.pages.kv[page, :, :4])
    assert torch.equal(before[1], layer.pages.scale[page, :, :4])


@pytest.mark.parametrize("cache_dtype", ["auto", *CODES])
@pytest.mark.parametrize("unit", [1, 16])
def test_nan_stays_nan(cache_dtype: str, unit: int, path: str) -> None:
    """In every channel of what attends to it: 20 are registers and a rest."""
    shape = Shape(cache_dtype=cache_dtype, head_size=20, rotary_dim=8)
    settings = {"name": "sink", "budget": 64, "unit": unit, "prefill_stride": 16}
    layer, table = PagedLayer(shape, settings, 8), torch.arange(1, 8).int()[None]
    first = 0
    for n in (16, 1, 16):
        query, (key, value) = torch.randn(n, 4, 20), torch.randn(2, n, 2, 20)
        if first == 0:
            value[3] = torch.nan
        output = layer.step([n], [first], [n > 1], table, query, key, value, lambda row, _: row)
        assert output[3 if first == 0 else 0 :].isnan().all()
        first += n


@pytest.mark.parametrize("cache_dtype", CODES)
def test_one_nan_is_read_as_pytorch_reads_it(cache_dtype: str, path: str) -> None:
    """With scales of rows, its whole key or value; in a layer's steps, only itself."""
    layer = PagedLayer(shaped(cache_dtype), {"name": "sink", "budget": 64, "prefill_stride": 16}, 3)
    torch.manual_seed(0)
    new = torch.randn(3, 16, 2, 16)
    new[1, 3, 0, 5], new[2, 7, 1, 9] = torch.nan, -torch.tensor(torch.nan)
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    query, key, value = new[0].repeat_interleave(2, 1), new[1], new[2]
    layer.step([16], [0], [True], table, query, key, value, lambda row, _: row)
    found = layer.pages.rows(torch.tensor([1]))[0]
    expected = layer.pages.read(*layer.pages.stored(torch.cat([key, value], dim=-1)))
    expected = expected.transpose(0, 1)
    assert int(expected.isnan().sum()) == (32 if cache_dtype in PER_ROW else 2)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_compiler_without_fp16_leaves_fp8_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "native")
    monkeypatch.setattr(load(), "codes", {torch.int8})
    policy = {**CASCADE, "prefill_stride": 8}
    with pytest.raises(KVPolicyError, match=r"the compiler has no torch\.float8_e4m3fn"):
        PagedLayer(shaped("fp8"), policy, 2)
    PagedLayer(shaped("int8_per_token_head"), policy, 2)


def test_views_want_to_know_the_codes() -> None:
    """A spec with scales of rows and nobody who says what they are of."""
    layer = PagedLayer(shaped("int8_per_token_head"), {**CASCADE, "prefill_stride": 8}, 2)
    with pytest.raises(AssertionError, match="INT8_PER_TOKEN_HEAD"):
        page_views(layer.pages.kv, layer.spec)
    plain = replace(layer.pages.quantised, scales=torch.ones(2))
    with pytest.raises(AssertionError):
        page_views(layer.pages.kv, layer.spec, plain)


def test_other_devices_refuse_it_by_name() -> None:
    class Other(TritonKVPolicyImpl):
        knows_codes = False

    TritonKVPolicyImpl(4, 16, 0.25, 2, None, None, "fp8_e5m2")
    with pytest.raises(KVPolicyError, match="--kv-cache-dtype fp8_e5m2 is not built for this"):
        Other(4, 16, 0.25, 2, None, None, "fp8_e5m2")


def test_the_layers_scales() -> None:
    """Those of the checkpoint; one for every head is refused."""
    layer = SimpleNamespace(
        kv_cache_dtype="fp8", _k_scale=torch.tensor(0.5), _v_scale=torch.tensor([2.0])
    )
    assert scales_of(layer) == (0.5, 2.0)
    layer._v_scale = torch.ones(2)
    with pytest.raises(KVPolicyError, match="set --kv-cache-dtype to fp8_per_token_head"):
        scales_of(layer)


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", *PER_ROW])
def test_scales_that_no_row_is_in_steps_of(cache_dtype: str) -> None:
    """A checkpoint has them for every cache type, maybe one for every head."""
    layer = SimpleNamespace(
        kv_cache_dtype=cache_dtype, _k_scale=torch.full((2,), 0.5), _v_scale=torch.ones(2)
    )
    assert scales_of(layer) == (1.0, 1.0)


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_scales_of_changed_weights(cache_dtype: str, path: str) -> None:
    """A layer that is given other scales writes and reads rows as one that was made with them."""
    settings = {"name": "sink", "budget": 16, "prefill_stride": 8}
    layer = PagedLayer(shaped(cache_dtype), settings, 8)
    other = PagedLayer(replace(layer.shape, scales=(0.5, 0.01)), settings, 8)

    def step(layer: PagedLayer, begin: int, end: int, first: int) -> torch.Tensor:
        torch.manual_seed(begin)
        query, (key, value) = torch.randn(end - begin, 4, 16), torch.randn(2, end - begin, 2, 16)
        table = torch.arange(first, first + 3, dtype=torch.int32)[None]
        new = [end - begin], [begin], [begin == 0], table, query, key, value
        return layer.step(*new, lambda row, _: row).clone()

    step(layer, 0, 24, first=1)
    layer.impl.read_scales((0.5, 0.01))
    for begin, end in ((0, 24), (24, 25), (25, 41), (41, 42)):
        assert torch.equal(step(layer, begin, end, first=4), step(other, begin, end, first=4))
    assert torch.equal(layer.pages.kv[4], other.pages.kv[4])


def test_scales_of_rows_are_no_weights(path: str) -> None:
    """So there are none to read again."""
    layer = PagedLayer(shaped("int8_per_token_head"), {"name": "sink", "budget": 16}, 8)
    layer.impl.read_scales((0.5, 0.01))
