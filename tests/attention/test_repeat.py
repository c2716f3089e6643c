# SPDX-License-Identifier: Apache-2.0
"""Layers that repeat the first layer's launches, beside layers that make all their own.

Kernels are interpreted. ``test_mixed_steps.py`` compares what compiled kernels are given, byte for
byte; here is when layers repeat, and that pages and outputs are the same.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.test_paged import BEEHIVE, CASCADE, DGC, H2O, IN_UNITS, PagedLayer, Shape
from tests.attention.test_recall import new, output
from vllm_cascade.attention.cuda import impl, repeats
from vllm_cascade.attention.cuda.warm_up import _AllDrafts
from vllm_cascade.attention.recorder import Recorder
from vllm_cascade.kernels.cpp.build import BuildError
from vllm_cascade.kernels.triton.repeat import Repeater
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.recall import unit_shape

LAYERS, PAGES = 2, 7
pytestmark = pytest.mark.usefixtures("triton")

CPU = torch.device("cpu")
POLICIES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "window": (Shape(), {"name": "window", "budget": 17}),
    "sink": (Shape(sinks=True), {"name": "sink", "budget": 13, "num_sinks": 3}),
    "cascade": (Shape(group=4), CASCADE),
    "heads": (Shape(is_neox=False), {**CASCADE, "head_policy": "per_kv_head"}),
    "h2o": (Shape(softcap=2.0), H2O),
    "beehive": (Shape(), BEEHIVE),
    "dgc": (Shape(), {**DGC, "importance": "attention"}),
    "units": (Shape(), IN_UNITS),
    "int8": (Shape(cache_dtype="int8_per_token_head"), IN_UNITS),
    "alibi": (Shape(alibi=True), CASCADE),
    "random": (Shape(), {"name": "random", "budget": 14, "window": 5, "num_sinks": 2}),
    "recall": (
        Shape(num_kv_heads=1),
        {**IN_UNITS, "recall": 2, "recall_store": 24, "recall_every": 1},
    ),
}
QUICK = ("sink",)
WORDS = ("rows", "codes", "scales", "born", "token")
"""Of rings."""
STEPS = [[1, 24], [1, 8], [1, 8], *[[1, 1]] * 5, [8, 1], *[[1, 1]] * 3, [1, 7]]
"""New tokens of two requests. In one step the prompt comes first; in some a unit ends."""


class Model:
    """Layers of one shape with their own pages, which are planned once a step."""

    def __init__(self, shape: Shape, settings: dict[str, Any], drafts: int = 0) -> None:
        settings = {"prefill_stride": 8, **settings}
        made = [PagedLayer(shape, settings, PAGES, drafts) for _ in range(LAYERS)]
        self.shape, self.layers, self.builder = shape, made, made[0].builder
        if drafts:
            self.builder.drafts = _AllDrafts(2, drafts)
            for layer in made:
                layer.impl.keep_drafts(2)
                for saved in layer.impl._saved[:2]:
                    saved.zero_()
        policy, spec = made[0].policy, made[0].spec
        if policy.recall:
            unit = unit_shape(spec, num_layers=LAYERS)
            rings = self.builder.stores = Rings(unit, 2, CPU)
            for word in WORDS:
                getattr(rings, word).zero_()
            rings.note(output(scheduled_new_reqs=[new("a", 1), new("b", 2)]))
            self.builder.requests.names = lambda _: ["a", "b"]
            for index, layer in enumerate(made):
                layer.impl.recall_from(rings, index, policy.recall_queries)
        self.rings = self.builder.stores

    def plan(self, firsts: list[int], lengths: list[int], prompts: bool = True) -> Any:
        """A step's metadata; several new tokens are a prompt's, or drafts."""
        table = torch.arange(1, PAGES, dtype=torch.int32).view(2, -1)
        prefilling = [prompts and length > 1 for length in lengths]
        return self.builder.build(0, step_of(firsts, lengths, prefilling, table))

    def run(self, metadata: Any, num: int, seed: int) -> list[torch.Tensor]:
        """Outputs of all layers, each with rows of its own."""
        generator, outputs = torch.Generator().manual_seed(seed), []
        for layer in self.layers:
            heads = self.shape.num_kv_heads
            size, queries = self.shape.head_size, heads * self.shape.group
            rows = torch.randn(num, queries + 2 * heads, size, generator=generator)
            query, key, value = rows.split([queries, heads, heads], dim=1)
            output = torch.full_like(query.contiguous(), torch.nan)
            name = SimpleNamespace(layer_name="layer")
            layer.impl.forward(name, query, key, value, layer.pool, metadata, output)
            outputs.append(output)
        return outputs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in POLICIES]
)
def test_layers_that_repeat_do_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decode, both at once, and rows in another order: outputs and pages."""
    shape, settings = POLICIES[name]
    model = Model(shape, settings)
    monkeypatch.setenv(repeats.SWITCH, "python")
    plain = Model(shape, settings)
    repeated, seen = [], np.zeros(2, dtype=int)
    for seed, lengths in enumerate(STEPS):
        firsts, seen = seen.tolist(), seen + lengths
        before = Repeater.number
        ours, theirs = (
            each.run(each.plan(firsts, lengths), sum(lengths), seed) for each in (model, plain)
        )
        repeated.append(Repeater.number - before)
        assert all(map(torch.equal, ours, theirs)), (firsts, lengths)
        for layer, other in zip(model.layers, plain.layers, strict=True):
            assert torch.equal(layer.pool, other.pool), (firsts, lengths)
        if model.rings is not None:
            for word in WORDS:
                ours, theirs = (getattr(each.rings, word) for each in (model, plain))
                assert torch.equal(ours, theirs), word
            stored = int(model.rings.end.max())
    if model.rings is not None:
        assert stored > 4 and all(layer.impl.recalled_units > 0 for layer in model.layers)
    assert set(repeated) == {0, LAYERS - 1}, "all other layers, or none"
    assert repeated[0] == 0, "no layer has launched anything yet"
    assert sum(number > 0 for number in repeated) >= 6


def test_drafts_are_saved_by_layers_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(Shape(), H2O, drafts=2)
    monkeypatch.setenv(repeats.SWITCH, "python")
    plain, before = Model(Shape(), H2O, drafts=2), Repeater.number
    for seed in range(5):
        firsts, lengths, prompts = [8 + 3 * seed] * 2, [3, 3], False
        if seed == 0:
            firsts, lengths, prompts = [0, 0], [8, 8], True
        for each in (model, plain):
            each.run(each.plan(firsts, lengths, prompts), sum(lengths), seed)
        for layer, other in zip(model.layers, plain.layers, strict=True):
            assert torch.equal(layer.pool, other.pool), seed
            for ours, theirs in zip(layer.impl._saved[:2], other.impl._saved[:2], strict=True):
                assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), seed
    assert Repeater.number - before >= 3


def test_what_else_a_layer_does_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides in PyTorch, the trace, a capture, a median over ranks: no layer repeats."""
    cases: dict[str, Model] = {
        "in PyTorch": Model(Shape(), {**DGC, "importance": "cluster"}),
        "trace": Model(Shape(), CASCADE),
        "capture": Model(Shape(), CASCADE),
        "median": Model(Shape(), {**H2O, "head_reduction": "median"}),
    }
    for layer in cases["trace"].layers:
        layer.impl.recorder = Recorder()
    decide_together(cases["median"])
    before = Repeater.number
    for case, model in cases.items():
        monkeypatch.setattr(impl, "_is_captured", lambda _, now=case == "capture": now)
        for seed in range(3):
            metadata = model.plan([seed] * 2, [1, 1])
            model.run(metadata, 2, seed)
            assert not metadata.launched, f"{case}: launches are noted"
        assert Repeater.number == before, case


exchanged: list[str] = []
"""How values were put together with another rank's, in order."""


def with_another_rank(values: torch.Tensor, how: str) -> torch.Tensor:
    exchanged.append(how)
    theirs = torch.arange(values.numel()).sin().abs().view_as(values)
    return (values + theirs) / 2 if how == "mean" else values.maximum(theirs)


def with_its_heads(values: torch.Tensor) -> torch.Tensor:
    exchanged.append("gather")
    return torch.cat([values, values.flip(-3)], -3)


def decide_together(model: Model) -> None:
    """As on tensor-parallel ranks with one head set."""
    together = {"over_ranks": with_another_rank, "gather_heads": with_its_heads}
    for layer in model.layers:
        layer.impl._layer = replace(layer.impl._layer, **together)
        if layer.impl.recall is not None:
            layer.impl.recall._layer = layer.impl._layer


LARGE_UNITS = {"name": "cascade", "num_subcaches": 2, "cascade_base": 2, "budget": 128, "unit": 32}
OVER_RANKS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "mean": POLICIES["cascade"],
    "max": (Shape(group=4), {**IN_UNITS, "head_reduction": "max"}),
    "no scores": POLICIES["sink"],
    "recall": POLICIES["recall"],
    "large units": (
        Shape(block_size=64),
        {**LARGE_UNITS, "head_reduction": "max", "prefill_stride": 32},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OVER_RANKS)
def test_ranks_that_decide_together_exchange_between_launches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many times, of the same values, as layers that launch themselves."""
    shape, settings = OVER_RANKS[name]
    model, before, asked = Model(shape, settings), Repeater.number, []
    with monkeypatch.context() as launching:
        launching.setenv(repeats.SWITCH, "python")
        plain = Model(shape, settings)
    seen = np.zeros(2, dtype=int)
    for each in (model, plain):
        decide_together(each)
    for seed, lengths in enumerate(STEPS):
        firsts, seen = seen.tolist(), seen + lengths
        outputs = []
        for each in (model, plain):
            exchanged.clear()
            outputs.append(each.run(each.plan(firsts, lengths), sum(lengths), seed))
            asked.append(list(exchanged))
        assert asked[-2] == asked[-1], (firsts, lengths)
        assert all(map(torch.equal, *outputs)), (firsts, lengths)
        for layer, other in zip(model.layers, plain.layers, strict=True):
            assert torch.equal(layer.pool, other.pool), (firsts, lengths)
    most = {"recall": 9, "large units": 10}  # fewer variants come twice
    assert Repeater.number - before >= most.get(name, 12), "exchanges in strides are noted, too"
    kinds = {how for step in asked for how in step}
    wanted = {"mean": {"mean"}, "max": {"max"}, "no scores": set(), "recall": {"mean", "max"}}
    assert kinds == wanted.get(name, {"max", "gather"})


def test_rows_out_of_order_are_gathered() -> None:
    """Where vLLM's first runner puts a prompt between two that decode, rows are copied."""
    model = Model(Shape(), CASCADE)
    table = torch.arange(1, PAGES, dtype=torch.int32).view(3, -1)
    before = Repeater.number
    for seed in range(3):
        step = step_of([seed, 8 * seed, seed], [1, 8, 1], [False, True, False], table)
        metadata = model.builder.build(0, step)
        model.run(metadata, 10, seed)
        assert not metadata.launched
    assert Repeater.number == before


def test_where_layers_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(repeats.SWITCH, "c")
    with pytest.raises(KVPolicyError, match=f"{repeats.SWITCH}=c: set it to python, or not at all"):
        repeats.make_repeater()
    monkeypatch.setenv(repeats.SWITCH, "python")
    assert repeats.make_repeater() is None
    monkeypatch.delenv(repeats.SWITCH)
    assert repeats.make_repeater() is not None
    with monkeypatch.context() as unknown:  # a version of Triton whose kernels we do not launch
        unknown.setattr(repeats, "DIRECT", False)
        unknown.setattr(repeats.knobs.runtime, "interpret", False)
        assert repeats.make_repeater() is None

    def fails() -> None:
        raise BuildError("no C++ compiler")

    warned: list[str] = []
    monkeypatch.setattr(repeats, "library", fails)
    monkeypatch.setattr(repeats.logger, "warning_once", lambda text, *a: warned.append(text % a))
    assert repeats.make_repeater() is None
    assert len(warned) == 1 and warned[0].endswith("not repeated in C: no C++ compiler")
