# SPDX-License-Identifier: Apache-2.0
"""Layers with a window on the Triton kernels, interpreted: the CPU paths' own tests, and a graph.

The kernels are given the positions that other layers' counts make, in a buffer; the window's own
builder never has them, and is asked before the others' builder has written them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention import test_windows
from tests.attention.conftest import use_triton
from tests.attention.test_cuda import AtOnce, common
from tests.attention.test_paged import Shape
from tests.attention.test_replay import Graph
from tests.attention.test_windows import (
    CASES,
    SINK,
    WindowLayer,
    check_own_frames,
    random_streams,
    run_streams,
)
from vllm_cascade.kernels import columns

SLOW = ("window beyond the budget", "recall beyond the budget", "many", "token by token")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch, layers=test_windows)


def cases() -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]


@pytest.mark.parametrize("name", cases())
def test_a_window_is_a_window(name: str) -> None:
    """Prompts stride by stride, beside single tokens of others."""
    run_streams(WindowLayer(*CASES[name]), CASES[name][2]["prefill_stride"], interpreted=True)


@pytest.mark.parametrize("name", cases())
def test_strides_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All strides of a chunk in one launch: windows end inside strides, and between them."""
    monkeypatch.setattr(test_windows, "CPUBuilder", AtOnce)
    layer = WindowLayer(*CASES[name])
    run_streams(layer, CASES[name][2]["prefill_stride"], interpreted=True)
    assert not layer.builder.finished.any(), "the next launch counts from 0"


def test_a_request_of_its_own_policy_has_its_own_frame() -> None:
    check_own_frames(WindowLayer(*CASES["plain"]))


def test_a_model_of_windows_only_says_its_positions_itself() -> None:
    """No other layers' builder is there: positions are still those of the policy."""
    layer = WindowLayer(*CASES["plain"])
    others = layer.builder.frames
    assert len(others.rules) == 1, "of frames only counts are read"
    alone = type(layer.builder)(
        layer.spec,
        ["window"],
        SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=8)
        ),
        torch.device("cpu"),
    )
    assert alone.publishes and others.engine is layer.spec.engine_schedule
    table = torch.ones(1, layer.spec.most_pages, dtype=torch.int32)
    for t in range(60):
        decode = alone.build(0, common([t + 1], table)).waves[0].decode
        assert int(alone.positions.buffer[0]) == min(t, 16)
        assert decode.steps[0, columns.CACHED] == min(t, 8)
    assert alone.counters.evicted_tokens == 60 - 8


def test_capture_writes_nothing() -> None:
    """Block tables of nothing but the null block, decode and prompt: not a byte changes."""
    layer = WindowLayer(*CASES["plain"])
    before = layer.pool.clone()
    table = torch.zeros(3, layer.spec.most_pages, dtype=torch.int32)
    rows = random_streams(layer.shape, [60, 60, 60])
    layer.step(rows, [50, 0, 7], [1, 1, 1], [False] * 3, table)
    layer.step(rows, [50, 0, 7], [9, 2, 1], [True] * 3, table)
    assert torch.equal(layer.pool, before)


@pytest.mark.parametrize(
    ("shape", "window", "settings"),
    [
        (Shape(sinks=True), 9, {**SINK, "prefill_stride": 8}),
        (Shape(group=3), 21, {"name": "lazy", "budget": 12, "overflow": 6, "prefill_stride": 8}),
    ],
    ids=["below the budget", "beyond the budget"],
)
def test_decode_as_a_graph(
    shape: Shape, window: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's launches, recorded on empty block tables, serve all later ones."""
    layer = WindowLayer(shape, window, settings)
    rows, num_heads, size = 3, shape.num_kv_heads * shape.group, shape.head_size
    streams, most = random_streams(shape, [40, 40]), layer.spec.most_pages
    table, seq_lens = torch.zeros(rows, most, dtype=torch.int32), torch.ones(rows).int()
    query = torch.randn(rows, num_heads, size)
    key, value = torch.randn(2, rows, shape.num_kv_heads, size)
    output, graph, before = torch.empty_like(query), Graph(), layer.pool.clone()
    captured = layer.builder.build_for_cudagraph_capture(common([1] * rows, table))
    with graph.capture(monkeypatch):
        name = SimpleNamespace(layer_name="window")
        layer.impl.forward(name, query, key, value, layer.pool, captured, output)
    assert torch.equal(layer.pool, before), "capture writes nothing"
    assert len(graph) == 3, "attend, merge, insert"
    table[:2] = torch.arange(1, 1 + 2 * most).view(2, most)
    for step in range(40):
        lengths = [step + 1, max(step - 5, 0), 0]
        seq_lens.copy_(torch.tensor(lengths))
        for builder in (layer.builder, layer.others):  # whose buffers are all that a replay sees
            builder.build(0, common(lengths, table).replace(seq_lens=seq_lens))
        positions = layer.others.positions.buffer[:rows]
        for row, length in enumerate(lengths[:2]):
            if length:
                now, at = slice(length - 1, length), positions[row : row + 1]
                query[row] = layer.turned(streams[row]["query"][now], at)[0]
                key[row] = layer.turned(streams[row]["key"][now], at)[0]
                value[row] = streams[row]["value"][now]
        output.fill_(torch.nan)
        graph.replay()
        for row, length in enumerate(lengths):
            expected = torch.zeros(num_heads, size, dtype=torch.float64)
            if length:
                expected = layer.expected(streams[row], length - 1)
            torch.testing.assert_close(output[row].double(), expected, atol=3e-5, rtol=1e-4)
    assert (layer.pool[0] == 0x11).all(), "the null block was written"
