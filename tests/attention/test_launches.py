# SPDX-License-Identifier: Apache-2.0
"""What a step launches, and what it takes the host: the CUDA path, counted.

A prompt's 4,096 tokens in one chunk, and a decode step of 256 requests. Kernels are not run:
nothing that they leave decides what comes next.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.conftest import use_triton
from tests.attention.host_time import decode_step, nothing_launched, prompt
from tests.attention.test_cuda import AtOnce, common
from tests.attention.test_paged import PagedLayer, Shape
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.workspace import workspace_of
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.drafts import Drafted, Drafts

pytestmark = pytest.mark.usefixtures("launched_in_python")

TOKENS, STRIDE = 4096, 256
LAUNCHES = ("gather_strides", "attend_strides", "column_sums", "insert_strides")
SHAPE = Shape(num_kv_heads=1, group=2, head_size=16, rotary_dim=16)
STRIDES_WAIT: dict[str, dict[str, Any]] = {
    "cascade": {"name": "cascade", "budget": 64, "num_subcaches": 2},
    "h2o": {"name": "h2o", "budget": 64, "normalise": True},
    "beehive": {"name": "beehive", "budget": 64},
    "units": {"name": "cascade", "budget": 64, "num_subcaches": 2, "unit": 16, "num_sinks": 16},
}
NOBODY_WAITS: dict[str, dict[str, Any]] = {
    "window": {"name": "window", "budget": 64},
    "sink": {"name": "sink", "budget": 64},
    "lazy": {"name": "lazy", "budget": 64},
    "units": {"name": "sink", "budget": 64, "unit": 16, "num_sinks": 16},
}
FREE = ("aten.slice", "aten.select", "aten.view", "aten.as_strided", "aten.detach", "aten.alias",
        "aten.empty", "aten.new_empty")  # fmt: skip
"""What PyTorch does without the device. Launchers are plain functions: as operators of our own each
would take the host some 50 us a call."""
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal",
           "aten._to_copy", "aten.unique", "aten.masked_select")  # fmt: skip
"""What would wait for a device, or copy to one and wait."""


class Operations(TorchDispatchMode):
    """Counts what PyTorch does: launches, allocations, and what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waiting: list[str] = []
        self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.allocations += name.startswith(("aten.empty", "aten.new_empty"))
        if name.startswith(WAITING):
            self.waiting.append(name)
        if not name.startswith(FREE):
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))


class Questions(TorchFunctionMode):
    """Counts what tensors are asked, be it only for a shape or a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def calls_in(run: Callable[[], Any]) -> int:
    """Calls of functions that are written in Python, without those the garbage collector makes,
    such as hypothesis's two."""
    number = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return number


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Operations]]:
    """Kernel launches by name, and what PyTorch does between them."""
    kernels: Counter[str] = Counter()
    operations = Operations()
    with nothing_launched() as launched, operations:
        yield kernels, operations
    kernels.update(name.removeprefix("_") for name in launched)


def served(
    settings: dict[str, Any], patch: pytest.MonkeyPatch, requests: int = 1, drafts: int = 0
) -> PagedLayer:
    use_triton(patch, AtOnce)
    layer = PagedLayer(SHAPE, {**settings, "prefill_stride": STRIDE}, 1 + 30 * requests, drafts)
    assert isinstance(layer.builder, CUDABuilder)
    return layer


def forward(layer: PagedLayer, metadata: Any, tokens: int) -> Callable[[], Any]:
    """A call of the layer."""
    query = torch.randn(tokens, SHAPE.num_kv_heads * SHAPE.group, SHAPE.head_size)
    key, value = torch.randn(2, tokens, SHAPE.num_kv_heads, SHAPE.head_size)
    output, name = torch.empty_like(query), SimpleNamespace(layer_name="layer")
    return lambda: layer.impl.forward(name, query, key, value, layer.pool, metadata, output)


def count_layer(layer: PagedLayer, metadata: Any, tokens: int) -> tuple[Counter[str], Operations]:
    run = forward(layer, metadata, tokens)
    with counted() as found:
        run()
    return found


def chunk(layer: PagedLayer) -> tuple[Counter[str], Operations, Operations]:
    """Launches of one layer, what PyTorch does in it, and what it does to plan the step.

    The prompt's second chunk of so many tokens, and its second layer.
    """
    table = torch.arange(1, 31, dtype=torch.int32).view(1, -1)
    for begin in (0, TOKENS):
        step = step_of([begin], [TOKENS], [True], table)
        with counted() as (_, planning):
            metadata = layer.builder.build(0, step)
        if begin == 0:
            count_layer(layer, metadata, TOKENS)
    memory = workspace_of(torch.device("cpu"))
    count_layer(layer, metadata, TOKENS)
    taken = memory.num_bytes, memory.grown
    kernels, operations = count_layer(layer, metadata, TOKENS)
    assert (memory.num_bytes, memory.grown) == taken, "memory after the first prompt"
    return kernels, operations, planning


@pytest.mark.parametrize("least", [256, 16], ids=["whole", "in-parts"])
@pytest.mark.parametrize("name", STRIDES_WAIT)
def test_a_stride_is_four_launches(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few query heads share out the keys: parts are programs of the same launch."""
    monkeypatch.setattr(TritonKVPolicyImpl, "least_part", least)
    layer = served(STRIDES_WAIT[name], monkeypatch)
    kernels, operations, planning = chunk(layer)
    assert (layer.impl._made.strides.attention.split.splits > 1) == (least < 64)
    strides = TOKENS // STRIDE
    assert kernels == dict.fromkeys(LAUNCHES, strides)
    assert not operations.launches and not operations.allocations and not operations.waiting
    assert not planning.waiting
    assert sum(planning.launches.values()) <= 8, "for a whole step and all layers"


@pytest.mark.parametrize("least", [256, 16], ids=["whole", "in-parts"])
@pytest.mark.parametrize("name", STRIDES_WAIT)
def test_a_stride_only_launches(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch is given was found for the layer, or by the first layer for all: however many
    strides there are, a layer asks as many questions of tensors, and each is a handful of calls."""
    monkeypatch.setattr(TritonKVPolicyImpl, "least_part", least)
    layer, found = served(STRIDES_WAIT[name], monkeypatch), []
    table = torch.arange(1, 31, dtype=torch.int32).view(1, -1)
    for tokens in (TOKENS, TOKENS // 2):
        metadata = layer.builder.build(0, step_of([TOKENS], [tokens], [True], table))
        run = forward(layer, metadata, tokens)
        with nothing_launched() as launched:
            run()
            with Questions() as asked:
                run()
            calls = calls_in(run)
        found.append((asked.number, calls, len(launched) // 3))
    (asked, calls, launches), (asked_of_half, calls_of_half, launches_of_half) = found
    assert launches == len(LAUNCHES) * TOKENS // STRIDE == 2 * launches_of_half
    assert 0 < asked == asked_of_half <= 40
    assert calls - calls_of_half <= 28 * (TOKENS // STRIDE // 2)


@pytest.mark.parametrize("name", NOBODY_WAITS)
def test_a_chunk_is_three_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, operations, planning = chunk(served(NOBODY_WAITS[name], monkeypatch))
    assert kernels == {"gather_chunks": 1, "attend_strides": 1, "write_chunks": 1}
    assert not operations.launches and not operations.allocations and not operations.waiting
    assert not planning.waiting and sum(planning.launches.values()) <= 8


def test_scores_by_the_host_are_a_launch_less(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, operations, _ = chunk(served({"name": "dgc", "budget": 64}, monkeypatch))
    assert kernels == dict.fromkeys(sorted(set(LAUNCHES) - {"column_sums"}), TOKENS // STRIDE)
    assert not operations.launches and not operations.allocations and not operations.waiting


def test_a_decode_step_of_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned by one launch, none of PyTorch's; and three launches a layer."""
    layer = served(STRIDES_WAIT["cascade"], monkeypatch, requests=1)
    rows = 256
    table = torch.zeros(rows, 8, dtype=torch.int32)
    table[:2] = torch.arange(1, 17, dtype=torch.int32).view(2, 8)
    lengths = [1] * rows
    step = common(lengths, table)
    with counted() as (kernels, planning):
        metadata = layer.builder.build(0, step)
    assert kernels == {"schedule": 1} and not planning.waiting
    assert not planning.launches
    kernels, operations = count_layer(layer, metadata, rows)
    assert kernels == dict.fromkeys(("attend", "merge_scored", "insert"), 1)
    assert not operations.launches and not operations.waiting


@pytest.mark.parametrize("name", ["cascade", "sink"])
def test_rows_with_drafts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch plans them all. A draft is a token and a launch more; one launch undoes several.

    Also of policies whose strides of a prompt run at once.
    """
    most, rows = 3, 64
    layer = served((STRIDES_WAIT | NOBODY_WAITS)[name], monkeypatch, drafts=most)
    layer.impl.keep_drafts(rows)
    layer.builder.drafts = drafts = Drafts(rows, most)
    layer.builder.requests.names = lambda _: [str(row) for row in range(rows)]
    layer.builder.requests.schedule_of = lambda _: layer.spec.schedule
    for row in range(rows):
        drafts._drafted[str(row)] = Drafted(str(row), begin=101, num=most, place=row * most)
    table = torch.ones(rows, 8, dtype=torch.int32)
    merging = "merge_scored" if name == "cascade" else "merge"
    one = dict.fromkeys(("attend", merging, "insert"), 1)
    for lengths in ([1 + most] * rows, [1 + most] * (rows - 1) + [2]):
        step = step_of([100] * rows, lengths, [False] * rows, table)
        with counted() as (kernels, planning):
            metadata = layer.builder.build(0, step)
        alike = len(set(lengths)) == 1
        assert kernels == ({"schedule": 1} if alike else {})
        assert not alike or not planning.waiting
        assert [wave.decode.saves is None for wave in metadata.waves] == [True, *[False] * most]
        kernels, operations = count_layer(layer, metadata, sum(lengths))
        expected = dict.fromkeys(one, 1 + most) | {"save_versions": most}
        assert kernels == expected and not operations.waiting
        assert not alike or not operations.launches
    rejected = [Drafted(str(row), 102, 2, row * most + 1) for row in range(rows)]
    undone = layer.builder.undone(rejected, [[1, 2]] * rows)
    with counted() as (kernels, operations):
        layer.impl.undo(undone)
    assert kernels == {"undo": 1} and not operations.launches and not operations.waiting


def test_host_time() -> None:
    """Bounds that a busy machine keeps; ``tests.attention.host_time`` prints the times."""
    settings = {"name": "cascade", "budget": 2048}
    assert decode_step(settings, trials=30) < 1500
    found = prompt(settings, trials=10)
    assert found["launches"] == 4 * 16 and found["stride_us"] < 100
    found = prompt({"name": "sink", "budget": 2048}, trials=10)
    assert found["launches"] == 3 and found["stride_us"] < 40
