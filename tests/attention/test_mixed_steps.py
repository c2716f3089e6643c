# SPDX-License-Identifier: Apache-2.0
"""What a layer does on the host in a step that mixes decode with a prompt: launches, and no more.

Such steps run outside CUDA graphs, so every launch and every operation of PyTorch in a layer costs
the host time in each of a model's layers. Counts do not depend on the machine's load;
``mixed_time.py`` prints times, beside stock vLLM's.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tests.attention.conftest import use_triton
from tests.attention.host_time import nothing_launched
from tests.attention.test_cuda import AtOnce
from tests.attention.test_launches import SHAPE, Questions, calls_in, forward
from tests.attention.test_paged import PagedLayer
from tests.conftest import ROOT
from vllm_cascade.attention.cuda.repeats import SWITCH
from vllm_cascade.kernels.triton import launch
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.builder import step_of

pytestmark = pytest.mark.usefixtures("launched_in_python")

ROWS, CHUNK, STRIDE, STORE = 16, 512, 256, 64
UNITS = {"num_subcaches": 2, "unit": 4, "num_sinks": 4}
CASCADE = {"name": "cascade", "budget": 64, "num_subcaches": 2}
DECODE = {"attend": 1, "merge": 1, "insert": 1}
SCORED = {"attend": 1, "merge_scored": 1, "insert": 1}
OF_STRIDES = dict.fromkeys(
    ("gather_strides", "attend_strides", "column_sums", "insert_strides"), CHUNK // STRIDE
)
OF_CHUNKS = {"gather_chunks": 1, "attend_strides": 1, "write_chunks": 1}
CHOOSING = ("ask", "judge", "weigh", "choose", "bring")
STORING = ("list_gone", "store_units")
RECALLING = {**dict.fromkeys(CHOOSING + STORING, 1 + CHUNK // STRIDE), "remember": 1}
RECALLING["keep_of_strides"] = CHUNK // STRIDE
STEPS: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "sink": ({"name": "sink", "budget": 64}, 1000, DECODE | OF_CHUNKS),
    "cascade": (CASCADE, 1000, SCORED | OF_STRIDES),
    "grows": ({**CASCADE, "budget": 2048}, 100, SCORED | OF_STRIDES | {"gather_strides": 1}),
    "units": ({**CASCADE, **UNITS}, 1000, SCORED | OF_STRIDES),
    "recall": (
        {**CASCADE, **UNITS, "recall": 2, "recall_store": 4 * STORE, "recall_every": 1},
        1003,  # every token is the last of its unit
        SCORED | OF_STRIDES | RECALLING,
    ),
    "recall, grows": (
        {**CASCADE, **UNITS, "budget": 2048, "recall": 2, "recall_store": 4 * STORE},
        103,
        SCORED | OF_STRIDES | {"gather_strides": 1},
    ),
}
"""Settings, tokens that every request has seen, and a layer's launches."""


class Everything(TorchDispatchMode):
    """Counts all that PyTorch does, be it only a view."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done[str(func)] += 1
        return func(*args, **(kwargs or {}))


def layer_of(settings: dict[str, Any], patch: pytest.MonkeyPatch) -> PagedLayer:
    use_triton(patch, AtOnce)
    layer = PagedLayer(SHAPE, {**settings, "prefill_stride": STRIDE}, 200)
    if layer.policy.recall:
        policy = layer.policy
        shape = UnitShape(
            num_layers=1,
            num_kv_heads=SHAPE.num_kv_heads,
            num_sets=1,
            unit=policy.unit,
            head_size=SHAPE.head_size,
            dtype=SHAPE.dtype,
            most_units=STORE,
            most_recalled=policy.recall,
        )
        rings = Rings(shape, ROWS + 1, torch.device("cpu"))
        names = [str(row) for row in range(ROWS + 1)]
        rings.rings = {name: row for row, name in enumerate(names)}
        layer.builder.stores = rings
        patch.setattr(layer.builder.requests, "names", lambda _: names, raising=False)
        layer.impl.recall_from(rings, 0, layer.policy.recall_queries)
    return layer


def plan(layer: PagedLayer, begun: int) -> Any:
    """Metadata of a step in which all requests have seen so many tokens."""
    return layer.builder.build(0, step_at(layer, begun))


def step_at(layer: PagedLayer, begun: int) -> Any:
    """What vLLM says of that step."""
    rings, schedule = layer.builder.stores, layer.spec.schedule
    if rings is not None:
        rings.end[:] = schedule.evicted(np.full(ROWS + 1, begun))
        rings.shown[:] = schedule.recalled(np.full(ROWS + 1, begun))
    table = torch.ones(ROWS + 1, 150, dtype=torch.int32)
    prompt = begun // STRIDE * STRIDE
    if rings is not None:
        rings.end[ROWS] = schedule.evicted(np.full(1, prompt))[0]
        rings.shown[ROWS] = schedule.recalled(np.full(1, prompt))[0]
    firsts, lengths = [begun] * ROWS + [prompt], [1] * ROWS + [CHUNK]
    return step_of(firsts, lengths, [False] * ROWS + [True], table)


@pytest.mark.parametrize("name", STEPS)
def test_a_layer_only_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's second layer: so many launches, nothing by PyTorch, not even a view, and few calls.

    Each launch takes the host about as long as 20 calls of functions in Python.
    """
    settings, begun, expected = STEPS[name]
    layer = layer_of(settings, monkeypatch)
    run = forward(layer, plan(layer, begun), ROWS + CHUNK)
    with nothing_launched() as launched:
        run()
        launched.clear()
        with Everything() as torch_:
            run()
        assert Counter(one.removeprefix("_") for one in launched) == expected
        assert not torch_.done
        with Questions() as asked:
            run()
        calls = calls_in(run)
    number = sum(expected.values())
    assert asked.number <= 40 + 4 * expected.get("list_gone", 0)
    assert calls <= 30 + 10 * number


def test_a_step_is_planned_by_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(CASCADE, monkeypatch)
    plan(layer, 1000)
    step = step_at(layer, 1000)
    with Everything() as torch_:
        layer.builder.build(0, step)
    assert sum(torch_.done.values()) <= 24, torch_.done


@pytest.mark.parametrize("begin", [0, 5])
def test_rows_that_follow_each_other_are_not_gathered(
    begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding requests come first in vLLM's second runner; anywhere in a row they are a slice."""
    layer = layer_of(CASCADE, monkeypatch)
    lengths = [2] * begin + [1] * ROWS + [CHUNK]
    prompts = [length > 1 for length in lengths]
    table = torch.ones(len(lengths), 150, dtype=torch.int32)
    firsts = [0 if prompt else 1000 for prompt in prompts]
    metadata = layer.builder.build(0, step_of(firsts, lengths, prompts, table))
    decode = metadata.waves[0].decode
    assert decode.index == slice(2 * begin, 2 * begin + ROWS, 1)
    assert decode.leads == (begin == 0)


@pytest.mark.parametrize("known", [True, False])
def test_only_known_versions_of_triton_are_bypassed(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DIRECT", known)
    monkeypatch.setattr(launch, "driver", MagicMock())
    kernel = MagicMock(spec=JITFunction, arg_names=["a", "b"])
    kernel.__getitem__ = MagicMock()
    compiled = kernel.__getitem__.return_value.return_value
    launcher = launch.Launcher(kernel, b=7)
    for a in (1, 2, 3):
        launcher((4, 5, 6), 0, a=a)
    assert kernel.__getitem__.call_count == (1 if known else 3)
    direct = [(*call.args[:3], *call.args[-2:]) for call in compiled.run.call_args_list]
    assert direct == ([(4, 5, 6, 2, 7), (4, 5, 6, 3, 7)] if known else [])


def test_empty_grids_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "driver", MagicMock())
    kernel = MagicMock(spec=JITFunction, arg_names=["a"])
    kernel.__getitem__ = MagicMock()
    launcher = launch.Launcher(kernel)
    for grid in ((0, 5, 6), (4, 0, 6), (4, 5, 0)):
        launcher(grid, 0, a=1)
    assert kernel.__getitem__.call_count == 0
    launcher((4, 5, 6), 0, a=1)
    assert kernel.__getitem__.call_count == 1


@pytest.mark.slow
def test_launches_are_triton_s() -> None:
    """Grids, kernels, options and arguments, in a process that launches as on an H100; also those
    that C repeats."""
    unset = "TRITON_INTERPRET", SWITCH
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    command = [sys.executable, "-m", "tests.attention.launch_bytes", "--steps", "6"]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr[-2000:]
    cases, repeated = (int(word) for word in re.findall(r"\d+", found.stdout)[:2])
    assert cases > 80 and repeated > 25 * cases
