# SPDX-License-Identifier: Apache-2.0
"""Units on their way between pages and logs: C++ moves the same bytes as PyTorch.

What PyTorch does is compared with the oracle in whole engines (``tests/engine/test_recall.py``).
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention.test_launches import calls_in
from tests.attention.test_paged import PagedLayer, Shape
from tests.conftest import ROOT
from tests.cpp_library import CALLS
from vllm_cascade.attention.cpu.paths import SWITCH
from vllm_cascade.attention.layer import NewTokens
from vllm_cascade.kernels.cpp.build import build
from vllm_cascade.models.rotary import rotate
from vllm_cascade.recall.log import CHUNK_UNITS, Log
from vllm_cascade.recall.stores import Stores
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.recall import unit_shape

SINK = {"name": "sink", "budget": 24, "num_sinks": 4, "unit": 4, "recall": 3, "recall_every": 4}
HEADS = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 4, "unit": 4}
HEADS |= {"recall": 2, "recall_every": 4, "head_policy": "per_kv_head"}
LAZY = {"name": "lazy", "budget": 16, "num_sinks": 4, "unit": 4, "recall": 3, "recall_every": 4}
LAZY |= {"overflow": 8, "slack": 8, "max_drop": 8}
LATENT = Shape(num_kv_heads=1, group=3, head_size=28, rotary_dim=8, latent=True)

CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "fp32": (Shape(), SINK),
    "heads": (Shape(num_kv_heads=3), HEADS),
    "several units a token": (Shape(), LAZY),
    "bf16": (Shape(head_size=64, rotary_dim=64, dtype=torch.bfloat16), SINK),
    "rotary in pairs": (Shape(head_size=20, rotary_dim=12, is_neox=False), SINK),
    "a part is rotary": (Shape(head_size=48, rotary_dim=20), HEADS),
    "not rotary": (Shape(alibi=True), SINK),
    "units of 64": (Shape(block_size=128), {**SINK, "unit": 64, "budget": 384, "num_sinks": 64}),
    "8 bits": (Shape(head_size=32, rotary_dim=20), {**SINK, "recall_rows": "int8"}),
    "8 bits, bf16": (
        Shape(head_size=64, rotary_dim=64, dtype=torch.bfloat16),
        {**HEADS, "recall_rows": "int8"},
    ),
    "8 bits in pairs": (
        Shape(head_size=20, rotary_dim=12, is_neox=False, dtype=torch.float16),
        {**SINK, "recall_rows": "int8"},
    ),
    "int8 pages": (Shape(cache_dtype="int8_per_token_head"), HEADS),
    "fp8 pages": (Shape(cache_dtype="fp8", scales=(0.25, 0.5)), SINK),
    "latent": (LATENT, SINK),
    "latent int8 pages": (replace(LATENT, cache_dtype="int8_per_token_head"), SINK),
}


def layer_of(
    path: str, shape: Shape, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> PagedLayer:
    monkeypatch.setenv(SWITCH, path)
    torch.manual_seed(5)
    layer = PagedLayer(shape, settings, 40)
    stores = Stores(unit_shape(layer.spec, 2))
    layer.builder.stores = stores
    stores.logs.update({first: Log(stores.shape) for first in (1, 20)})
    layer.impl.recall_from(stores, 1, layer.policy.recall_queries)
    return layer


def run(layer: PagedLayer, lengths: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Steps of two requests, so many tokens of each; their outputs."""
    torch.manual_seed(7)
    shape, firsts, outputs = layer.shape, [0, 0], []
    table = torch.stack([torch.arange(1, 20), torch.arange(20, 39)]).int()
    for pair in lengths:
        total = sum(pair)
        query = torch.randn(total, shape.num_kv_heads * shape.group, shape.head_size)
        key, value = torch.randn(2, total, shape.num_kv_heads, shape.head_size).unbind(0)
        # A query asks for one of a few things, so that something is looked up.
        topics = torch.randn(6, shape.head_size) * 2
        query += topics[torch.randint(6, (total,))].unsqueeze(1)
        key += topics[torch.randint(6, (total,))].unsqueeze(1)
        prefilling = [n > 1 for n in pair]
        turn = partial(turned, layer)
        rows = layer.step(list(pair), firsts, prefilling, table, query, key, value, turn)
        outputs.append(rows.clone())
        firsts = [first + n for first, n in zip(firsts, pair, strict=True)]
    return outputs


def turned(layer: PagedLayer, x: torch.Tensor, position: int) -> torch.Tensor:
    if layer.inv_freq is None:
        return x
    angle = position * layer.inv_freq.double()
    table = torch.stack([angle.cos(), angle.sin()]).float()
    return rotate(x.float(), table, layer.shape.is_neox)


def units_of(log: Log) -> dict[str, torch.Tensor]:
    """The second layer's numbers of all units that the log holds."""
    names = "rows", "row_scale", "codes", "scale", "centre", "centre_scale", "spread"
    names += "born", "token"
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for chunk, at, _ in log.part(log.begin, log.end).pieces():
        for name in names:
            of_layer = getattr(chunk, name)[1]
            axis = 2 if name == "centre" else 1
            assert of_layer.shape[axis] == CHUNK_UNITS
            found[name].append(of_layer.movedim(axis, 0)[at])
    return {name: torch.cat(parts).contiguous() for name, parts in found.items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize("name", CASES)
def test_cpp_moves_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and logs after prompts in strides and single tokens."""
    compare(name, monkeypatch)


def test_requests_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests as threads, each on one of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare("heads", monkeypatch)
    finally:
        torch.set_num_threads(before)


def compare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and logs of PyTorch and C++; tokens of both requests select in the same steps."""
    shape, settings = CASES[name]
    unit = settings["unit"]
    settings = {**settings, "prefill_stride": 2 * unit, "recall_store": 40 * unit}
    lengths = [(9 * unit, 5 * unit + 1), (7 * unit + 1, 1), (1, 6 * unit), *[(1, 1)] * (3 * unit)]
    plain, layer = (layer_of(p, shape, settings, monkeypatch) for p in ("pytorch", "native"))
    before = dict(CALLS)
    close = 2e-4 if shape.dtype == torch.float32 else 5e-2
    for a, b in zip(run(plain, lengths), run(layer, lengths), strict=True):
        torch.testing.assert_close(a, b, atol=close, rtol=0)
    assert all(CALLS[call] > before[call] for call in ("recalls", "stores"))
    assert plain.impl.recall.exchanged == layer.impl.recall.exchanged > 10
    for first, log in plain.builder.stores.logs.items():
        other = layer.builder.stores.logs[first]
        assert (log.begin, log.end, log.shown) == (other.begin, other.end, other.shown)
        assert log.end >= 5
        assert torch.equal(log.tokens[1], other.tokens[1])
        for kind, numbers in units_of(log).items():
            assert same_bytes(numbers, units_of(other)[kind]), (first, kind)
    assert torch.equal(plain.pages.rank, layer.pages.rank)
    rank, sinks = plain.pages.rank, settings["num_sinks"] // unit
    recalled = (rank >= sinks) & (rank < sinks + settings["recall"])
    assert recalled.sum() == 2 * layer.spec.num_sets * settings["recall"]
    for word in ("born", "token", "score"):
        a, b = (getattr(pages, word)[recalled] for pages in (plain.pages, layer.pages))
        torch.testing.assert_close(a, b, atol=1e-3 if word == "score" else 0, rtol=0)
    for page, head_set, place in recalled.nonzero().tolist():
        heads = slice(None) if layer.spec.num_sets == 1 else head_set
        at = page, heads, slice(place * unit, (place + 1) * unit)
        for stored in ("kv", "scale"):
            rows = getattr(plain.pages, stored)
            assert rows is None or same_bytes(rows[at], getattr(layer.pages, stored)[at]), stored


def selecting(lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A call for the requests that have one new token, which has been made once."""
    shape, settings = CASES["fp32"]
    layer = layer_of("native", shape, {**settings, "prefill_stride": 8}, monkeypatch)
    run(layer, [(60, 60)])
    table = torch.stack([torch.arange(1, 20), torch.arange(20, 39)]).int()
    metadata = layer.builder.build(0, step_of([60, 60], lengths, [n > 1 for n in lengths], table))
    new = NewTokens(*(torch.randn(sum(lengths), heads, shape.head_size) for heads in (4, 2, 2, 4)))

    def selects() -> None:
        layer.impl.recall.select_for_tokens(metadata.waves[0].singles, new)

    selects()
    return selects


@pytest.mark.parametrize("lengths", [(1, 1), (1, 12)], ids=["both", "one"])
def test_calls_do_not_grow_with_requests(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer after the first one calls Python as often for two requests that select as for one."""
    selects = selecting(lengths, monkeypatch)
    recalls = CALLS["recalls"]
    assert calls_in(selects) <= 12
    assert CALLS["recalls"] - recalls == lengths.count(1)


COUNTER = """
#include <dlfcn.h>
#include <pthread.h>

typedef void* (*Work)(void*);
static int count = 0;
extern "C" int created() { return count; }
extern "C" int pthread_create(pthread_t* id, const pthread_attr_t* how, Work work, void* with) {
  static auto create = (int (*)(pthread_t*, const pthread_attr_t*, Work, void*))dlsym(
      RTLD_NEXT, "pthread_create");
  __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
  return create(id, how, work, with);
}
"""


@pytest.mark.slow
def test_threads_that_share_a_request(tmp_path: Path) -> None:
    """Those of the first call serve all others."""
    source = tmp_path / "counter.cpp"
    source.write_text(COUNTER)
    preload = f"{build(tmp_path, 'counter', source)} {os.environ.get('LD_PRELOAD', '')}"
    environment = {**os.environ, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", f"import {__name__} as this; this.print_threads()"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "0 threads in 5 calls"


def print_threads() -> None:
    """Print how many threads are started by calls for one request."""
    assert torch.get_num_threads() == 2
    with pytest.MonkeyPatch.context() as patch:
        selects = selecting((1, 12), patch)
    created = ctypes.CDLL(None).created
    before = created()
    assert before > 0
    for _ in range(5):
        selects()
    print(created() - before, "threads in 5 calls")
