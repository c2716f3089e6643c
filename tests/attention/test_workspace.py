# SPDX-License-Identifier: Apache-2.0
"""Scratch memory on the device: vLLM's profile sees all of it, and captured graphs keep theirs."""

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.worker.block_table import get_block_table_width

from tests.attention.conftest import use_triton
from tests.attention.test_cuda import Comb, common
from tests.attention.test_launches import counted
from tests.attention.test_paged import PagedLayer, Shape
from tests.attention.test_recall import new, output
from vllm_cascade.attention.cuda import impl as layers
from vllm_cascade.attention.cuda import workspace
from vllm_cascade.attention.cuda.workspace import Workspace, size_of, workspace_of
from vllm_cascade.kernels import rotation_table
from vllm_cascade.kernels.columns import RECALL_COLUMNS, STEP_COLUMNS
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.recall import unit_shape

CPU = torch.device("cpu")
CASCADE = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 4, "unit": 4}
RECALL = {**CASCADE, "recall": 2, "recall_store": 24, "prefill_stride": 8, "recall_queries": 4}
HEADS, GROUP, SIZE = 2, 2, 8


def limits(tokens: int, requests: int) -> Any:
    return SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=requests)


# --- no batch needs more than the profile ---------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    requests=st.integers(1, 40),
    tokens=st.integers(8, 200),
    gathered=st.integers(1, 40000),
    data=st.data(),
)
def test_strides_fit(requests: int, tokens: int, gathered: int, data: st.DataObject) -> None:
    """A launch has as many strides as may gather what they have cached."""
    policy = resolve(CASCADE | {"prefill_stride": 8})
    query, slots = torch.empty(1, HEADS * GROUP, 64), 48
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "MOST_GATHERED", gathered)
        worst = workspace.worst_shapes(
            policy, limits(tokens, requests), query, HEADS, 16, None, slots
        )
        used = data.draw(st.integers(0, policy.capacity))
        most = workspace.rows_at_once(HEADS * used * 2 * 64)
        rows = data.draw(st.integers(1, max(min(requests, tokens // 2, most), 1)))
        needed = workspace.stride_shapes(
            num_rows=rows,
            num_sets=1,
            width=(used + 8) // policy.unit + 1,
            num_tokens=tokens,
            query=query,
            num_heads=HEADS,
            unit=policy.unit,
            reduction=policy.head_reduction,
            splits=workspace.split_of(policy, query, 16).splits,
            most_slots=used,
        )
        assert size_of(needed) <= size_of(worst)
        assert workspace.counters_of(needed) <= workspace.counters_of(worst)


@settings(max_examples=200, deadline=None)
@given(strides=st.integers(1, 60), gathered=st.integers(1, 40000), data=st.data())
def test_chunks_fit(strides: int, gathered: int, data: st.DataObject) -> None:
    query, slots = torch.empty(1, HEADS * GROUP, 64), 48
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "MOST_GATHERED", gathered)
        worst = workspace.worst_chunks(strides, query, HEADS, slots, None)
        cached = data.draw(st.integers(0, slots))
        rows = data.draw(st.integers(1, strides))
        assert size_of(workspace.chunk_shapes(rows, query, HEADS, cached, None)) <= size_of(worst)


@pytest.mark.parametrize("name", ["cascade", "comb"])
@pytest.mark.parametrize("requests", [1, 3, 12, 40])
def test_single_tokens_fit(name: str, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's cached tokens are attended in more parts where fewer rows decode."""
    monkeypatch.setitem(POLICIES, "comb", Comb)
    policy = resolve({"name": name, "budget": 32, "prefill_stride": 8, "recall": 0})
    layer, _ = layer_of(CASCADE | {"recall": 0}, monkeypatch, requests, rings=1)
    monkeypatch.setattr(layers, "attend_splits", splits_of)
    monkeypatch.setattr(workspace, "MOST_GATHERED", 1)  # strides take little
    query, heads = torch.empty(1, HEADS * GROUP, SIZE), HEADS * GROUP
    layer.impl._config = None  # one rank
    most, _ = layer.impl._worst(policy, limits(8, requests), query, 480)
    for rows in range(1, requests + 1):
        splits = splits_of(CPU, rows, 0, 0)
        needed = workspace.worst_singles(rows, heads, splits, SIZE, 0, 1)
        needed["cells"] = (rows, 1, 480), torch.float32
        assert size_of(needed) <= most


def splits_of(_: torch.device, rows: int, programs: int, slots: int) -> int:
    """As on a card with 132 multiprocessors."""
    return 1 << max(math.ceil(math.log2(132 * 8 / rows)), 0)


@pytest.mark.parametrize("head_policy", ["homogeneous", "per_kv_head"])
@pytest.mark.parametrize("requests", [1, 3, 13])
def test_recall_fits(head_policy: str, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode of all requests, and strides of as many; however many rings there are."""
    settings = {**RECALL, "head_policy": head_policy}
    layer, _ = layer_of(settings, monkeypatch, requests, rings=1)
    sets = HEADS if head_policy == "per_kv_head" else 1
    most = workspace.worst_recall(layer.policy, requests, HEADS * GROUP, sets, SIZE)
    for columns in (None, 12):
        memory = fresh(monkeypatch)
        rows_of(layer, requests, columns)
        assert 0 < memory.num_bytes <= most
    assert workspace.worst_recall(resolve(CASCADE), requests, HEADS * GROUP, sets, SIZE) == 0


# --- recall ---------------------------------------------------------------------------------------


def fresh(monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """An empty workspace."""
    monkeypatch.setattr(workspace, "_of_devices", {})
    return workspace_of(CPU)


def layer_of(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, requests: int, rings: int
) -> tuple[PagedLayer, Rings]:
    """A layer of the CUDA backend for so many requests, of which fewer may evict."""
    use_triton(monkeypatch)
    shape = Shape(num_kv_heads=HEADS, group=GROUP, head_size=SIZE, rotary_dim=SIZE)
    layer = PagedLayer(shape, settings, 60)
    layer.impl._config = SimpleNamespace(scheduler_config=limits(64, requests))
    stores = Rings(unit_shape(layer.spec, 1), rings, CPU)
    layer.builder.stores = stores
    layer.impl.recall_from(stores, 0, layer.policy.recall_queries)
    return layer, stores


def rows_of(
    layer: PagedLayer, num_rows: int, columns: int | None, judged: np.ndarray | None = None
) -> Any:
    steps = torch.zeros(num_rows, STEP_COLUMNS, dtype=torch.int32)
    table = torch.zeros(num_rows, 3, dtype=torch.int32)
    recall = torch.zeros(num_rows, RECALL_COLUMNS, dtype=torch.int32)
    return layer.impl.recall.rows(table, steps, recall, HEADS * GROUP, columns, judged)


@pytest.mark.parametrize("rings", [1, 5])
def test_launches_do_not_depend_on_rings(rings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a decode step, which a graph keeps for every later one."""
    rows = 5
    layer, _ = layer_of(RECALL, monkeypatch, rows, rings)
    table = torch.zeros(rows, 4, dtype=torch.int32)
    metadata = layer.builder.build_for_cudagraph_capture(common([1] * rows, table))
    with counted() as (kernels, _):
        forward(layer, metadata, rows)
    assert kernels.total() == 3 + 8 and set(kernels.values()) == {1}


def test_strides_share_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, of 8 requests and 4 queries each; only those parts that judge anything."""
    layer, _ = layer_of(RECALL, monkeypatch, requests=8, rings=2)
    judged = np.asarray([False, True, False, False, True, True, False])
    made = rows_of(layer, 7, 12, judged)
    assert [part.num_rows for part in made.parts] == [2, 2]
    first, second = made.parts
    assert first.of_units.data_ptr() == second.of_units.data_ptr()
    each = made.evidence.stride(0) * made.evidence.itemsize
    found = [(part.evidence.data_ptr() - made.evidence.data_ptr()) // each for part in made.parts]
    assert found == [0, 4]
    assert [part.num_rows for part in rows_of(layer, 7, 12).parts] == [2, 2, 2, 1]
    assert [part.num_rows for part in rows_of(layer, 7, None).parts] == [7], "a query each"


def test_short_prompts_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched or allocated for strides that select and evict nothing; and where one of
    several does, the others are not judged."""
    layer, rings = layer_of(RECALL, monkeypatch, requests=8, rings=2)
    names = [str(row) for row in range(6)]
    monkeypatch.setattr(layer.builder.requests, "names", lambda common: names, raising=False)
    rings.note(output(scheduled_new_reqs=[new(name, 1 + i) for i, name in enumerate(names)]))
    table = torch.arange(1, 25, dtype=torch.int32).view(6, 4)
    short = step_of([0] * 6, [8] * 6, [True] * 6, table)
    metadata = layer.builder.build(0, short)
    with counted() as (kernels, _):
        forward(layer, metadata, 48)
    (rows,) = metadata.waves[0].prefill
    assert not rows.recalling and not any(rows.recalls) and not rows.judged.any()
    assert set(kernels) == {"attend_strides", "column_sums", "insert_strides"}
    evicted = layer.spec.schedule.evicted(np.asarray(64))
    rings.end[rings.take("4")] = evicted
    metadata = layer.builder.build(0, step_of([8] * 4 + [64, 8], [8] * 6, [True] * 6, table))
    (rows,) = metadata.waves[0].prefill
    assert rows.judged.tolist() == [False] * 4 + [True, False]
    with counted() as (kernels, _):
        forward(layer, metadata, 48)
    assert kernels["ask"] == kernels["judge"] == kernels["weigh"] == kernels["choose"] == 1


def forward(
    layer: PagedLayer, metadata: Any, tokens: int, pool: torch.Tensor | None = None
) -> None:
    """One call of the layer, on its pages or on another pool."""
    shape = layer.shape
    query = torch.randn(tokens, shape.num_kv_heads * shape.group, shape.head_size)
    key, value = torch.randn(2, tokens, shape.num_kv_heads, shape.head_size)
    name, made = SimpleNamespace(layer_name="layer"), torch.empty_like(query)
    pool = layer.pool if pool is None else pool
    layer.impl.forward(name, query, key, value, pool, metadata, made)


@pytest.mark.parametrize("slots", [None, 64], ids=["blocks", "larger-pages"])
@pytest.mark.parametrize("runner", [1, 2])
def test_masses_of_ranks_are_reserved(
    runner: int, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of as many requests as may be, which decode with all slots in use, takes no more.

    The block tables of Model Runner V1 are wider than what a request needs. Beside recurrent layers
    pages have more slots than a block has tokens.
    """
    use_triton(monkeypatch)
    memory, rows = fresh(monkeypatch), 40
    shape = Shape(num_kv_heads=1, group=16, head_size=SIZE, rotary_dim=SIZE)
    own = {**CASCADE, "unit": 1, "prefill_stride": 4}
    layer = PagedLayer(shape, own, 5, slots=slots)
    layer.impl._config = SimpleNamespace(
        additional_config={"kv_policy": {"recall": 0, **own}},
        scheduler_config=limits(8, rows),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        model_config=SimpleNamespace(hf_text_config=None),
        speculative_config=None,
        use_v2_model_runner=runner == 2,
    )
    layer.impl.reserve(torch.zeros(8, 16, SIZE))
    taken = memory.num_bytes
    together = replace(layer.impl._layer, over_ranks=lambda values, _: values)
    layer.impl._layer = together
    pages = -(-layer.policy.capacity // layer.spec.page_slots)
    alignment = 128 if runner == 1 else layer.spec.block_table_token_alignment
    width = get_block_table_width(pages, shape.block_size, token_alignment=alignment)
    table = torch.zeros(rows, width, dtype=torch.int32)
    assert (table.shape[1] > pages) == (runner == 1)
    table[:, :pages] = torch.arange(1, 1 + pages)
    metadata = layer.builder.build(0, common([100] * rows, table))
    forward(layer, metadata, rows)
    (singles,) = metadata.waves[0].decode.singles.values()
    assert singles.masses is not None and (singles.masses != 0).any()  # pages may hold NaN
    assert taken == memory.num_bytes


# --- graphs, and the pool of the profile ----------------------------------------------------------


def test_a_graph_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace may grow after a capture: what the graph writes into stays allocated."""
    memory = fresh(monkeypatch)
    layer, _ = layer_of(RECALL, monkeypatch, requests=2, rings=2)
    table = torch.zeros(2, 4, dtype=torch.int32)
    metadata = layer.builder.build_for_cudagraph_capture(common([1] * 2, table))
    monkeypatch.setattr(layers, "_is_captured", lambda device: True)
    forward(layer, metadata, 2)
    assert memory.grown, "choices use it"
    kept, taken = StorageWeakRef(memory._memory.untyped_storage()), memory.num_bytes
    memory.reserve(2 * taken)
    gc.collect()
    assert not kept.expired()
    monkeypatch.setattr(layers, "_is_captured", lambda device: False)
    kept = StorageWeakRef(memory._memory.untyped_storage())
    memory.reserve(4 * taken)
    gc.collect()
    assert kept.expired(), "which no graph uses"


def test_what_layers_share_is_freed_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of rotations and the workspace: another engine of the process begins without them."""
    monkeypatch.setattr(workspace, "_of_devices", type(workspace._of_devices)())
    gc.collect()
    before = set(rotation_table._tables)
    made = [layer_of(RECALL, monkeypatch, requests=2, rings=2) for _ in range(2)]
    layers_of_one, table = [layer for layer, _ in made], torch.arange(1, 9, dtype=torch.int32)
    for layer in layers_of_one:
        forward(layer, layer.builder.build(0, common([20] * 2, table.view(2, 4))), 2)
    assert len({layer.impl._layer.rotation.data_ptr() for layer in layers_of_one}) == 1
    memory = workspace_of(CPU)
    assert memory.num_bytes and all(one.impl._workspace is memory for one in layers_of_one)
    gone = [weakref.ref(memory), StorageWeakRef(memory._memory.untyped_storage())]
    gone += [
        StorageWeakRef(rotation.untyped_storage())
        for rotation in (layer.impl._layer.rotation, layer.impl._decode_rotation)
    ]
    del memory, layer, made[1], layers_of_one[1]
    gc.collect()
    assert workspace_of(CPU) is layers_of_one[0].impl._workspace is gone[0]()
    del made, layers_of_one
    gc.collect()
    assert gone[0]() is None and all(one.expired() for one in gone[1:])
    assert set(rotation_table._tables) <= before and not workspace._of_devices


def test_the_pool_of_the_profile_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures graphs on a pool that it throws away, here of rows with scales in the pages."""
    use_triton(monkeypatch)
    layer = PagedLayer(Shape(cache_dtype="int8_per_token_head"), CASCADE, 4)
    metadata = layer.builder.build_for_cudagraph_capture(
        common([1] * 2, torch.zeros(2, 4, dtype=torch.int32))
    )
    shown = layer.impl._pages.kv
    pool = torch.zeros_like(layer.pool).view(shown.dtype)
    pool = torch.as_strided(pool, shown.shape, shown.stride())
    layer.impl._pages = layer.impl._made = layer.impl._stored = None  # before there is a pool
    forward(layer, metadata, 2, pool)
    held = StorageWeakRef(pool.untyped_storage())
    del pool
    gc.collect()
    assert held.expired()
