# SPDX-License-Identifier: Apache-2.0
"""The paged attention paths (PyTorch, C++) and their metadata against the literal fp64 cache."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.offloader.prefetch import _CpuParamOffloader
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

from tests.attention.reference import LiteralCache
from tests.cpp_library import CALLS
from tests.oracle.draws import draw, draws
from tests.oracle.quantised import Quantiser
from tests.oracle.settings import logit_scale, make_sim, score_rule
from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.cpu.paths import CHOICES, SWITCH, PyTorchPath
from vllm_cascade.attention.recorder import kept_tokens
from vllm_cascade.cache.layout import page_views
from vllm_cascade.cache.quantised import Quantised
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.kernels.cpp.library import load
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.builder import step_of


@dataclass
class Shape:
    """A layer's shape; odd on purpose where that is legal."""

    num_kv_heads: int = 2
    group: int = 2
    head_size: int = 16
    rotary_dim: int = 16
    is_neox: bool = True
    alibi: bool = False
    softcap: float = 0.0
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    spread: float = 1.0  # how large queries, and so differences of logits, are
    cache_dtype: str = "auto"
    scales: tuple[float, float] = (1.0, 1.0)  # the layer's, where rows have none of their own
    latent: bool = False  # values are the keys' channels that do not rotate

    @property
    def row_size(self) -> int:
        return self.head_size if self.latent else 2 * self.head_size

    @property
    def value_size(self) -> int:
        return self.head_size - self.rotary_dim if self.latent else self.head_size

    def value_of(self, key: torch.Tensor) -> torch.Tensor:
        """Views of latent values in keys ``[..., head_size]``."""
        return key[..., self.rotary_dim :]

    @property
    def stored_dtype(self) -> torch.dtype:
        """As vLLM has it for a layer's pages."""
        return STR_DTYPE_TO_TORCH_DTYPE.get(self.cache_dtype, self.dtype)

    @property
    def sink_logits(self) -> torch.Tensor | None:
        """Learned logits of nothing, one a query head; some large, some small."""
        num_heads = self.num_kv_heads * self.group
        return torch.linspace(-2.0, 3.0, num_heads) if self.sinks else None


@pytest.fixture(params=CHOICES)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that layers built in this test get."""
    monkeypatch.setenv(SWITCH, request.param)
    return request.param


class PagedLayer:
    """The real implementation, builder and page views over a poisoned page pool."""

    def __init__(
        self,
        shape: Shape,
        settings: dict[str, Any],
        num_pages: int,
        drafts: int = 0,
        drafting: bool = False,
        slots: int | None = None,
    ) -> None:
        self.shape = shape
        self.policy = resolve({**settings, "trace": True})
        full = (MLAAttentionSpec if shape.latent else FullAttentionSpec)(
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=shape.stored_dtype,
            kv_quant_mode=get_kv_quant_mode(shape.cache_dtype),
        )
        bounded = KVPolicySpec.from_full(full, self.policy, drafts)
        self.spec = replace(bounded, drafting=drafting, slots=slots)
        # Uninitialised memory may hold anything: NaN keys and values, absurd ranks.
        self.pool = torch.full((num_pages, self.spec.page_size_bytes), 0xFF, dtype=torch.uint8)
        self.pool[0] = 0x11  # the null block: any write to it shows
        view = torch.as_strided(
            self.pool.view(shape.stored_dtype),
            (num_pages, shape.num_kv_heads, self.spec.page_slots, shape.row_size),
            (
                self.spec.page_size_bytes // shape.stored_dtype.itemsize,
                self.spec.page_slots * shape.row_size,
                shape.row_size,
                1,
            ),
        )
        slopes = None
        if shape.alibi:
            slopes = [2.0 ** -(i + 1) for i in range(shape.num_kv_heads * shape.group)]
        self.impl = CPUKVPolicyImpl(
            shape.num_kv_heads * shape.group,
            shape.head_size,
            shape.head_size**-0.5,
            shape.num_kv_heads,
            slopes,
            None,
            shape.cache_dtype,
            shape.softcap,
            sinks=shape.sink_logits,
        )
        self.impl.latent = shape.value_size if shape.latent else None
        self.impl.spec = self.spec
        self.inv_freq = None
        if not shape.alibi:
            exponent = torch.arange(0, shape.rotary_dim, 2) / shape.rotary_dim
            self.inv_freq = 1.0 / 100.0**exponent
        rotary = None if shape.alibi else Rotary(self.inv_freq, shape.is_neox)
        place = "layer", 0
        self.impl.prepare(self.spec, view, rotary, 1, shape.dtype, shape.scales, place)
        quantised = Quantised.of(shape.cache_dtype, shape.scales, self.impl.latent)
        self.pages = page_views(view, self.spec, quantised)
        scheduler = SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=8)
        config = SimpleNamespace(scheduler_config=scheduler)
        self.builder = CPUBuilder(self.spec, ["layer"], config, torch.device("cpu"))

    def step(
        self,
        lengths: list[int],
        firsts: list[int],
        prefilling: list[bool],
        table: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotate: Any,
    ) -> torch.Tensor:
        """One scheduling step of unrotated tensors ``[num_tokens, heads, head_size]``."""
        metadata = self.builder.build(0, step_of(firsts, lengths, prefilling, table))
        positions = self.builder.positions.buffer[: sum(lengths)].tolist()
        query = torch.stack([rotate(q, p) for q, p in zip(query, positions, strict=True)])
        key = torch.stack([rotate(k, p) for k, p in zip(key, positions, strict=True)])
        layer = SimpleNamespace(layer_name="layer")
        query, key, value = (rows.to(self.shape.dtype) for rows in (query, key, value))
        if self.shape.latent:
            value = self.shape.value_of(key)
        output = query.new_full((*query.shape[:2], self.shape.value_size), torch.nan)
        return self.impl.forward(layer, query, key, value, self.pool, metadata, output)


def oracle_for(
    settings: dict[str, Any],
    shape: Shape,
    layer: PagedLayer,
    token_scores: list[float] | None = None,
) -> LiteralCache:
    shown = None if token_scores is None else lambda _: token_scores
    if settings["name"] == "random":
        unit = settings.get("unit", 1)
        shown = lru_cache(draws(settings.get("seed", 0), "layer", 4096, unit))
    slopes = layer.impl.alibi_slopes
    return LiteralCache(
        lambda: make_sim(settings),
        num_sets=layer.spec.num_sets,
        **score_rule(settings),
        reduction=settings.get("head_reduction", "mean"),
        scale=shape.head_size**-0.5,
        inv_freq=layer.inv_freq,
        is_neox=shape.is_neox,
        slopes=None if slopes is None else slopes.flatten().double(),
        softcap=shape.softcap,
        logit_scale=logit_scale(settings),
        token_scores=shown,
        sinks=shape.sink_logits,
        quantiser=Quantiser.of(shape.cache_dtype, shape.scales),
        latent=shape.latent,
    )


def judged(scores: list[float], lag: int, begin: int, end: int) -> np.ndarray:
    """What the host gives the builder: scores of the tokens ``lag`` before, 0 where none is."""
    return np.float32([scores[i - lag] if i >= lag else 0.0 for i in range(begin, end)])


CASCADE = {"name": "cascade", "budget": 16, "num_subcaches": 2, "num_sinks": 2}
HEADS = {**CASCADE, "head_policy": "per_kv_head"}
LAZY = {"name": "lazy", "budget": 12, "num_sinks": 2, "overflow": 6, "slack": 5, "max_drop": 2}
H2O = {"name": "h2o", "budget": 14, "window": 7, "num_sinks": 1}
RANDOM = {"name": "random", "budget": 14, "window": 5, "num_sinks": 2, "seed": 7}
DGC = {"name": "dgc", "budget": 15, "num_sinks": 2, "global_size": 6}
BY_IMPORTANCE = {**DGC, "order": "importance"}
CLUSTER = {**DGC, "importance": "cluster"}
BEEHIVE = {
    "name": "beehive",
    "budget": 17,
    "num_sinks": 2,
    "window": 4,
    "stride": 3,
    "threshold": 13,
}
LATENT = Shape(num_kv_heads=1, group=5, head_size=28, rotary_dim=8, latent=True)
CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "sink": (Shape(), {"name": "sink", "budget": 13, "num_sinks": 3, "prefill_stride": 8}),
    "window": (Shape(group=1), {"name": "window", "budget": 17, "prefill_stride": 16}),
    "cascade": (Shape(group=4), {**CASCADE, "prefill_stride": 8}),
    "cascade-mha": (Shape(num_kv_heads=3, group=1), {**CASCADE, "prefill_stride": 32}),
    "cascade-gqa8": (Shape(num_kv_heads=1, group=8), {**CASCADE, "prefill_stride": 5}),
    "cascade-paper": (
        Shape(block_size=32),
        {**CASCADE, "eager_fill": False, "tie": "resident", "prefill_stride": 1},
    ),
    "heads": (Shape(), {**HEADS, "prefill_stride": 8}),
    "heads-max": (Shape(group=3), {**HEADS, "head_reduction": "max", "prefill_stride": 40}),
    "heads-median": (Shape(group=4), {**HEADS, "head_reduction": "median", "prefill_stride": 4}),
    "heads-paper": (Shape(), {**HEADS, "eager_fill": False, "prefill_stride": 16}),
    "partial": (Shape(head_size=20, rotary_dim=8), {**HEADS, "prefill_stride": 8}),
    "interleaved": (Shape(is_neox=False), {**HEADS, "prefill_stride": 8}),
    "partial-interleaved": (
        Shape(is_neox=False, head_size=24, rotary_dim=12),
        {**CASCADE, "prefill_stride": 8},
    ),
    "alibi": (Shape(alibi=True), {**HEADS, "prefill_stride": 8}),
    "cascade-overflow": (Shape(), {**CASCADE, "overflow": 5, "prefill_stride": 8}),
    "heads-overflow-1": (Shape(), {**HEADS, "overflow": 6, "prefill_stride": 1}),
    "sink-overflow": (Shape(), {"name": "sink", "budget": 9, "overflow": 4, "prefill_stride": 7}),
    "lazy": (Shape(), {**LAZY, "prefill_stride": 8}),
    "lazy-1": (Shape(alibi=True), {**LAZY, "overflow": 7, "max_drop": 3, "prefill_stride": 1}),
    "h2o": (Shape(), {**H2O, "prefill_stride": 8}),
    "h2o-heads": (Shape(), {**H2O, "head_policy": "per_kv_head", "prefill_stride": 32}),
    "random": (Shape(), {**RANDOM, "prefill_stride": 8}),
    "random-heads": (
        Shape(),
        {**RANDOM, "head_policy": "per_kv_head", "overflow": 3, "prefill_stride": 32},
    ),
    "random-4": (
        Shape(block_size=16),
        {
            **RANDOM,
            "budget": 20,
            "window": 8,
            "num_sinks": 4,
            "unit": 4,
            "prefill_stride": 8,
            "head_policy": "per_kv_head",
        },
    ),
    "h2o-normalise": (Shape(), {**H2O, "normalise": True, "window": 4, "prefill_stride": 5}),
    "h2o-normalise-1": (Shape(), {**H2O, "normalise": True, "overflow": 3, "prefill_stride": 1}),
    "beehive": (Shape(), {**BEEHIVE, "prefill_stride": 8}),
    "beehive-1": (Shape(), {**BEEHIVE, "prefill_stride": 1, "head_policy": "homogeneous"}),
    "beehive-40": (Shape(), {**BEEHIVE, "stride": 4, "prefill_stride": 40}),
    "beehive-overflow": (Shape(), {**BEEHIVE, "overflow": 4, "prefill_stride": 9}),
    "beehive-log-n": (Shape(), {**BEEHIVE, "log_n": True, "prefill_stride": 6}),
    "dgc": (Shape(), {**DGC, "prefill_stride": 8}),
    "dgc-1": (Shape(), {**DGC, "prefill_stride": 1, "tie": "resident"}),
    "dgc-heads-overflow": (
        Shape(),
        {**DGC, "overflow": 4, "head_policy": "per_kv_head", "prefill_stride": 20},
    ),
    "dgc-attention": (Shape(), {**DGC, "importance": "attention", "prefill_stride": 6}),
    "dgc-by-importance": (Shape(), {**BY_IMPORTANCE, "prefill_stride": 8}),
    "dgc-by-importance-overflow": (
        Shape(is_neox=False),
        {**BY_IMPORTANCE, "overflow": 3, "prefill_stride": 1},
    ),
    "dgc-by-importance-alibi": (Shape(alibi=True), {**BY_IMPORTANCE, "prefill_stride": 5}),
    "dgc-by-attention": (
        Shape(head_size=20, rotary_dim=8),
        {
            **BY_IMPORTANCE,
            "importance": "attention",
            "head_policy": "per_kv_head",
            "prefill_stride": 7,
        },
    ),
    "dgc-cluster": (Shape(), {**CLUSTER, "prefill_stride": 8}),
    "dgc-cluster-1": (Shape(is_neox=False), {**CLUSTER, "prefill_stride": 1}),
    "dgc-cluster-heads": (
        Shape(head_size=20, rotary_dim=8),
        {**CLUSTER, "head_policy": "per_kv_head", "prefill_stride": 40},
    ),
    "dgc-cluster-alibi-overflow": (
        Shape(alibi=True),
        {**CLUSTER, "overflow": 5, "prefill_stride": 7},
    ),
    "latent": (LATENT, {**CASCADE, "prefill_stride": 8}),
    "latent-interleaved-1": (
        replace(LATENT, is_neox=False),
        {**CASCADE, "prefill_stride": 1, "head_policy": "per_kv_head"},
    ),
    "latent-large": (
        replace(LATENT, head_size=96, rotary_dim=32, group=16),
        {**H2O, "head_reduction": "max", "prefill_stride": 16},
    ),
    "latent-cluster": (LATENT, {**CLUSTER, "prefill_stride": 8}),
    "soft-cap": (Shape(softcap=2.0), {**CASCADE, "prefill_stride": 8}),
    "sinks": (Shape(sinks=True), {**CASCADE, "prefill_stride": 8}),
    "sinks-heads-1": (Shape(sinks=True, group=3), {**HEADS, "prefill_stride": 1}),
    "base-3": (
        Shape(),
        {**CASCADE, "budget": 18, "cascade_base": 3, "ema_gamma": 0.8, "prefill_stride": 7},
    ),
}


IN_UNITS = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 4, "unit": 4}
LARGE = {"name": "cascade", "num_subcaches": 2, "cascade_base": 2}
UNIT_CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "sink-2": (Shape(), {"name": "sink", "budget": 16, "unit": 2, "prefill_stride": 8}),
    "window-4": (Shape(group=1), {"name": "window", "budget": 16, "unit": 4, "prefill_stride": 16}),
    "cascade-4": (Shape(group=4), {**IN_UNITS, "prefill_stride": 8}),
    "cascade-4-heads": (
        Shape(group=3),
        {**IN_UNITS, "head_policy": "per_kv_head", "head_reduction": "max", "prefill_stride": 12},
    ),
    "cascade-4-median": (
        Shape(num_kv_heads=1, group=8),
        {**IN_UNITS, "head_reduction": "median", "prefill_stride": 40},
    ),
    "cascade-2-of-many": (
        Shape(num_kv_heads=1),
        {**IN_UNITS, "budget": 96, "unit": 2, "prefill_stride": 16},
    ),
    "h2o-2-of-many-heads": (
        Shape(group=1),
        {"name": "h2o", "budget": 96, "num_sinks": 2, "unit": 2, "head_policy": "per_kv_head",
         "prefill_stride": 32},
    ),
    "cascade-4-gated": (
        Shape(is_neox=False),
        {**IN_UNITS, "eager_fill": False, "tie": "resident", "prefill_stride": 4},
    ),
    "cascade-4-overflow": (Shape(), {**IN_UNITS, "overflow": 12, "prefill_stride": 8}),
    "cascade-8-partial": (
        Shape(head_size=20, rotary_dim=8, block_size=8),
        {**IN_UNITS, "num_sinks": 8, "unit": 8, "prefill_stride": 8},
    ),
    "cascade-3": (
        Shape(block_size=12),
        {**IN_UNITS, "budget": 24, "num_sinks": 3, "unit": 3, "prefill_stride": 9},
    ),
    "cascade-4-latent": (LATENT, {**IN_UNITS, "prefill_stride": 8}),
    "cascade-16-latent": (
        replace(LATENT, head_size=64, rotary_dim=16, block_size=32),
        {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 16},
    ),
    "cascade-16": (Shape(), {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 16}),
    "cascade-16-heads": (
        Shape(group=4, head_size=64, rotary_dim=64, block_size=32),
        {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 32, "head_policy": "per_kv_head"},
    ),
    "cascade-16-gqa8": (
        Shape(num_kv_heads=1, group=8, block_size=32, head_size=24, rotary_dim=12, is_neox=False),
        {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 48},
    ),
    "cascade-32": (
        Shape(block_size=64, head_size=32, rotary_dim=32),
        {**LARGE, "budget": 128, "unit": 32, "prefill_stride": 32},
    ),
    "cascade-64": (
        Shape(block_size=64),
        {**LARGE, "budget": 128, "num_sinks": 0, "unit": 64, "prefill_stride": 64},
    ),
    "alibi-16": (
        Shape(alibi=True, block_size=32),
        {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 32},
    ),
    "soft-cap-16": (
        Shape(softcap=2.0),
        {**LARGE, "budget": 64, "unit": 16, "prefill_stride": 16},
    ),
    "lazy-4": (
        Shape(),
        {**LAZY, "unit": 4, "num_sinks": 4, "overflow": 12, "slack": 8, "max_drop": 4,
         "prefill_stride": 8},
    ),
    "h2o-4": (
        Shape(),
        {"name": "h2o", "budget": 20, "num_sinks": 0, "unit": 4, "prefill_stride": 8},
    ),
    "h2o-4-normalise": (
        Shape(),
        {"name": "h2o", "budget": 20, "window": 8, "unit": 4, "normalise": True,
         "overflow": 8, "prefill_stride": 12},
    ),
    "h2o-16-normalise-heads": (
        Shape(),
        {"name": "h2o", "budget": 64, "unit": 16, "normalise": True,
         "head_policy": "per_kv_head", "prefill_stride": 16},
    ),
    "beehive-2": (
        Shape(),
        {**BEEHIVE, "unit": 2, "budget": 18, "threshold": 14, "prefill_stride": 8},
    ),
    "beehive-2-log-n": (
        Shape(),
        {**BEEHIVE, "unit": 2, "budget": 18, "threshold": 14, "log_n": True, "overflow": 4,
         "prefill_stride": 6},
    ),
    "dgc-4": (Shape(), {**DGC, "budget": 20, "num_sinks": 4, "global_size": 8, "unit": 4,
                        "prefill_stride": 8}),
    "dgc-4-attention": (
        Shape(),
        {**DGC, "budget": 20, "num_sinks": 4, "global_size": 8, "unit": 4,
         "importance": "attention", "prefill_stride": 20},
    ),
}  # fmt: skip


ENGINE = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 2, "prefill_stride": 8}
Asked = tuple[dict[str, Any], dict[str, Any]]
"""What a request asks for, and what that means to the oracle (``policies/per_request.py``)."""
OWN: list[Asked] = [
    ({}, ENGINE),
    ({"kv_budget": 16}, {**ENGINE, "budget": 16}),
    ({"kv_policy": "sink", "kv_budget": 9}, {"name": "sink", "budget": 9, "num_sinks": 2}),
    ({"kv_policy": "h2o", "kv_budget": 20}, {"name": "h2o", "budget": 20, "num_sinks": 2}),
    (
        {"kv_policy": "beehive", "kv_budget": 24},
        # By the paper's theorem one in 5.33 tokens is the window.
        {
            "name": "beehive",
            "budget": 24,
            "num_sinks": 2,
            "window": 4,
            "stride": 5,
            "threshold": 20,
        },
    ),
    ({"kv_policy": "window", "kv_budget": 5}, {"name": "window", "budget": 5}),
]


def test_requests_with_policies_of_their_own(path: str) -> None:
    prompts, totals = [1, 23, 32, 48, 60, 7], [70, 60, 40, 90, 66, 30]
    run_mixed_requests(path, Shape(), ENGINE, prompts, totals, 3, asked=OWN)


@pytest.mark.parametrize("name", CASES)
def test_mixed_requests(name: str, path: str) -> None:
    shape, settings = CASES[name]
    pytorch_only = settings.get("order") == "importance" or settings.get("importance") == "cluster"
    if path == "native" and pytorch_only:
        with pytest.raises(KVPolicyError, match="native cannot be: policy dgc"):
            PagedLayer(shape, settings, 2)
        return
    run_mixed_requests(path, shape, settings, [1, 5, 23, 32, 48], [40, 5, 30, 32, 60], len(name))


LONG = ("cascade-16-heads", "cascade-32", "cascade-64", "alibi-16", "soft-cap-16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in UNIT_CASES]
)
def test_mixed_requests_in_units(name: str, path: str) -> None:
    """Prompts that end inside a unit, budgets that wrap several times."""
    shape, settings = UNIT_CASES[name]
    if path == "native" and name == "cascade-3":
        with pytest.raises(KVPolicyError, match="native cannot be: units of 3 tokens"):
            PagedLayer(shape, settings, 2)
        return
    more = settings["budget"]
    prompts, totals = [1, 5, 23, 32, 48 + more], [40 + more, 5, 30 + more, 32, 60 + more]
    run_mixed_requests(path, shape, settings, prompts, totals, len(name))


@pytest.mark.parametrize("name", ["random-heads", "random-4"])
def test_stored_numbers_are_those_drawn(name: str, path: str) -> None:
    check_stored_numbers(path, *CASES[name])


def check_stored_numbers(path: str | None, shape: Shape, settings: dict[str, Any]) -> None:
    """A unit's score is the sum of the numbers of those tokens that have left the window."""
    unit, seen = settings.get("unit", 1), 90
    layer = run_mixed_requests(path, shape, settings, [48], [seen], 1)
    judged, found, expected = seen - layer.policy.score_lag, [], []
    for page, head_set, slot in (layer.pages.rank[1:] >= 0).nonzero().tolist():
        where = page + 1, head_set, slot
        first = int(layer.pages.token[where])
        numbers = [
            draw(settings["seed"], "layer", head_set, token, unit)
            for token in range(first, min(first + unit, judged))
        ]
        found.append(float(layer.pages.score[where]))
        expected.append(sum(numbers))
    assert found == expected and sum(map(bool, found)) > 4 * shape.num_kv_heads


def test_requests_with_policies_of_their_own_in_units(path: str) -> None:
    engine = {**ENGINE, "budget": 32, "num_sinks": 4, "unit": 4}
    asked = [
        ({}, engine),
        ({"kv_budget": 16}, {**engine, "budget": 16}),
        ({"kv_policy": "sink", "kv_budget": 12},
         {"name": "sink", "budget": 12, "num_sinks": 4, "unit": 4}),
        ({"kv_policy": "h2o", "kv_budget": 20},
         {"name": "h2o", "budget": 20, "num_sinks": 4, "unit": 4}),
        ({"kv_policy": "window", "kv_budget": 8}, {"name": "window", "budget": 8, "unit": 4}),
    ]  # fmt: skip
    prompts, totals = [1, 23, 48, 60, 7], [70, 60, 90, 66, 30]
    run_mixed_requests(path, Shape(), engine, prompts, totals, 3, asked=asked)


def run_mixed_requests(
    path: str | None,
    shape: Shape,
    settings: dict[str, Any],
    prompts: list[int],
    totals: list[int],
    seed: int,
    tolerance: float = 2e-5,
    asked: Sequence[Asked] | None = None,
) -> PagedLayer:
    """Prompts of odd lengths in chunks, decode beside prefill, rows that change places.

    Request ``i`` has ``totals[i]`` tokens, of which the first ``prompts[i]`` are its prompt, and
    with ``asked`` a policy of its own. ``path``: which CPU implementation must run; None: another
    device's.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    unit = settings.get("unit", 1)
    sinks = max(4, unit, settings.get("num_sinks", 0))
    slots = settings["budget"] + sinks + settings.get("overflow", 1) + unit - 1
    pages_each = -(-slots // shape.block_size)
    layer = PagedLayer(shape, settings, 1 + pages_each * len(prompts))
    if path is not None:
        assert type(layer.impl.path) is {"native": NativePath, "pytorch": PyTorchPath}[path]
    calls, steps = sum(CALLS.values()), 0
    stride = settings["prefill_stride"]
    source = layer.policy.token_scores
    scores = [rng.integers(0, 9, total).astype(float).tolist() for total in totals]
    asked = asked or [({}, settings)] * len(totals)
    own_schedules = PerRequest(layer.spec.schedule)
    schedules = [own_schedules.schedule(extra_args) for extra_args, _ in asked]
    literal = [
        oracle_for(own, shape, layer, given if source else None)
        for (_, own), given in zip(asked, scores, strict=True)
    ]
    tables = torch.randperm(pages_each * len(prompts)).view(len(prompts), -1).int() + 1
    num_q = shape.num_kv_heads * shape.group
    query = [torch.randn(total, num_q, shape.head_size) * shape.spread for total in totals]
    key = [torch.randn(total, shape.num_kv_heads, shape.head_size) * 2 for total in totals]
    value = [torch.randn(total, shape.num_kv_heads, shape.head_size) for total in totals]
    if shape.latent:
        value = [shape.value_of(rows) for rows in key]
    done = [0] * len(prompts)
    null_page = layer.pool[0].clone()
    while any(d < t for d, t in zip(done, totals, strict=True)):
        rows = [r for r in rng.permutation(len(prompts)) if done[r] < totals[r]]
        lengths = [chunk(done[r], prompts[r], stride, int(rng.integers(1, 50))) for r in rows]
        parts = [slice(done[r], done[r] + n) for r, n in zip(rows, lengths, strict=True)]
        layer.builder.requests.schedules = lambda _, rows=rows: [schedules[r] for r in rows]
        if source is not None:
            layer.builder.requests.token_scores = lambda _, row, begin, end, lag, rows=rows: judged(
                scores[rows[row]], lag, begin, end
            )
        output = layer.step(
            lengths,
            [done[r] for r in rows],
            [done[r] < prompts[r] for r in rows],
            tables[rows],
            *(
                torch.cat([x[r][part] for r, part in zip(rows, parts, strict=True)])
                for x in (query, key, value)
            ),
            rotate=literal[0].rotate,
        )
        expected = [
            run_literal(literal[r], query[r], key[r], value[r], part, prompts[r], stride)
            for r, part in zip(rows, parts, strict=True)
        ]
        torch.testing.assert_close(
            output.double(), torch.cat(expected), atol=tolerance, rtol=tolerance
        )
        steps += 1
        for r, n in zip(rows, lengths, strict=True):
            done[r] += n
            slots = schedules[r].peak_at(done[r])
            kept = kept_tokens(layer.pages, tables[r].long(), slots, done[r])
            assert kept == [sim.tokens() for sim in literal[r].sims]
    assert torch.equal(layer.pool[0], null_page), "the null block was written"
    ran = sum(CALLS.values()) - calls
    assert ran >= steps if path == "native" else ran == 0
    assert layer.builder.counters.tokens == sum(totals)
    assert layer.builder.counters.evicted_tokens == sum(
        total - schedule.count_at(total) for total, schedule in zip(totals, schedules, strict=True)
    )
    return layer


def chunk(done: int, prompt: int, stride: int, wanted: int) -> int:
    """A chunk as the scheduler would cut it (at least one stride)."""
    if done >= prompt:
        return 1
    end = max((done + wanted) // stride * stride, (done // stride + 1) * stride)
    return min(end, prompt) - done


def run_literal(
    cache: LiteralCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: slice,
    prompt: int,
    stride: int,
) -> torch.Tensor:
    outputs, begin = [], part.start
    while begin < part.stop:
        end = min((begin // stride + 1) * stride, prompt) if begin < prompt else begin + 1
        outputs.append(cache.step(query[begin:end], key[begin:end], value[begin:end]))
        begin = end
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close(path: str, dtype: torch.dtype) -> None:
    """Keys and values round once, when they are written; scores and softmax stay fp32."""
    if path == "native" and dtype not in load().dtypes:
        pytest.skip("this compiler has no fp16")
    shape = Shape(dtype=dtype)
    settings = {"name": "sink", "budget": 12, "num_sinks": 2, "prefill_stride": 8}
    layer = PagedLayer(shape, settings, 4)
    literal = oracle_for(settings, shape, layer)
    torch.manual_seed(0)
    query = torch.randn(80, 4, 16).to(dtype)
    key, value = torch.randn(2, 80, 2, 16).to(dtype).unbind(0)
    table = torch.tensor([[2]], dtype=torch.int32)
    output = torch.cat(
        [
            layer.step([n], [at], [at == 0], table, query[at:][:n], key[at:][:n], value[at:][:n],
                       literal.rotate)
            for at, n in [(0, 64), *((at, 1) for at in range(64, 80))]
        ]
    )  # fmt: skip
    expected = run_literal(literal, query, key, value, slice(0, 80), 64, 8)
    torch.testing.assert_close(output.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_the_mean_of_a_cluster_never_stands_still(dtype: torch.dtype, tolerance: float) -> None:
    """In 16 bits a member of a large cluster would change the mean by less than rounding does."""
    shape = Shape(num_kv_heads=1, group=1, alibi=True, dtype=dtype)
    settings = {**CLUSTER, "budget": 4, "num_sinks": 1, "global_size": 1, "prefill_stride": 1}
    layer = PagedLayer(shape, settings, 2)
    table = torch.tensor([[1]], dtype=torch.int32)
    values, key = [1.0] * 300 + [2.0] * 600, torch.ones(1, 1, shape.head_size)
    for at, value in enumerate(values):
        layer.step([1], [at], [False], table, key, key, value * key, lambda rows, _: rows)
    centre = (layer.pages.rank[1, 0] == settings["num_sinks"]).nonzero().item()
    members = values[1:-3]  # without the sink and the recent tokens
    assert layer.pages.score[1, 0, centre] == len(members) - 1
    mean = layer.pages.kv[1, 0, centre, shape.head_size :].float()
    torch.testing.assert_close(
        mean, torch.full_like(mean, np.mean(members)), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prompt", [1, 8], ids=["decode", "stride"])
def test_outputs_round_to_nearest(path: str, dtype: torch.dtype, prompt: int) -> None:
    """A query of zeros sees all keys alike: the output is the mean of the values, rounded once."""
    if path == "native" and dtype not in load().dtypes:
        pytest.skip("this compiler has no fp16")
    shape = Shape(dtype=dtype)
    layer = PagedLayer(shape, {"name": "sink", "budget": 12, "prefill_stride": 8}, 4)
    torch.manual_seed(0)
    query = torch.zeros(8, 4, shape.head_size, dtype=dtype)
    key, value = torch.randn(2, 8, 2, shape.head_size).to(dtype).unbind(0)
    table = torch.tensor([[2]], dtype=torch.int32)
    steps = [(0, prompt), *((at, 1) for at in range(prompt, 8))]
    output = torch.cat(
        [
            layer.step([n], [at], [at == 0], table, query[at:][:n], key[at:][:n], value[at:][:n],
                       lambda row, position: row)
            for at, n in steps
        ]
    )  # fmt: skip
    for count in (1, 2, 4, 8):  # powers of two, so that the mean is exact before it is rounded
        mean = value[:count].double().mean(0).to(dtype).repeat_interleave(2, 0)
        assert torch.equal(output[count - 1], mean), count


@pytest.mark.parametrize("name", ["sink", "cascade"])
def test_a_page_that_is_a_unit(name: str, path: str) -> None:
    """Outside evictions a step changes the page that it fills, and of others at most scores."""
    shape, budget = Shape(), 64
    settings = {"name": name, "budget": budget, "unit": 16, "prefill_stride": 16}
    settings |= {"num_subcaches": 2} if name == "cascade" else {}
    layer = PagedLayer(shape, settings, 9)
    table = torch.tensor([[3, 1, 5, 8, 2, 7, 4]], dtype=torch.int32)
    torch.manual_seed(0)
    literal = oracle_for(settings, shape, layer)
    query = torch.randn(240, 4, 16)
    key, value = torch.randn(2, 240, 2, 16).unbind(0)
    evictions = 0
    for at, n in [(0, 160), *((at, 1) for at in range(160, 240))]:
        before, scores = layer.pool.clone(), layer.pages.score.clone()
        new = query[at:][:n], key[at:][:n], value[at:][:n]
        layer.step([n], [at], [at == 0], table, *new, literal.rotate)
        if n > 1 or at % 16 == 15:
            evictions += n == 1
            continue
        if name == "cascade":
            assert not torch.equal(scores, layer.pages.score)
            layer.pages.score.copy_(scores)
        (page,) = (layer.pool != before).any(1).nonzero().flatten().tolist()
        assert layer.pages.rank[page].item() == budget // 16 + 1, "the newest, after the sinks"
        held = layer.pages.kv[page].numel() * 4
        rows = (layer.pool[page] != before[page])[:held].view(2, 16, -1).any(-1)
        assert rows.any(0).nonzero().flatten().tolist() == [at % 16], "one row a head"
    assert evictions == 5 and layer.builder.counters.evicted_tokens == 160


@pytest.mark.parametrize("unit", [2, 4])
def test_a_prompt_part_that_begins_inside_a_unit(path: str, unit: int) -> None:
    """vLLM's streaming-input requests go on with a prompt after generated tokens."""
    shape = Shape()
    settings = {"name": "cascade", "budget": 16, "num_subcaches": 2, "num_sinks": 4}
    settings |= {"unit": unit, "prefill_stride": 8}
    layer = PagedLayer(shape, settings, 8)
    literal = oracle_for(settings, shape, layer)
    table, heads = torch.arange(1, 5, dtype=torch.int32)[None], shape.num_kv_heads
    torch.manual_seed(unit)
    query = torch.randn(45, heads * shape.group, shape.head_size)
    key, value = torch.randn(2, 45, heads, shape.head_size)
    parts = [(0, 27, True), (27, 28, False), (28, 29, False), (29, 45, True)]
    strides = {0: [8, 16, 24, 27], 27: [28], 28: [29], 29: [30, 31, 32, 40, 45]}
    if unit == 2:
        strides[29] = [30, 32, 40, 45]
    for begin, end, prefilling in parts:
        part = slice(begin, end)
        output = layer.step(
            [end - begin], [begin], [prefilling], table, query[part], key[part], value[part],
            rotate=literal.rotate,
        )  # fmt: skip
        expected, at = [], begin
        for stop in strides[begin]:
            own = slice(at, stop)
            expected.append(literal.step(query[own], key[own], value[own]))
            at = stop
        torch.testing.assert_close(output.double(), torch.cat(expected), atol=2e-5, rtol=2e-5)
    assert layer.policy.capacity < 45


def test_sinks_of_changed_weights(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer attends with new sinks as one that was made with them."""
    shape, settings = Shape(sinks=True), {"name": "sink", "budget": 16, "prefill_stride": 8}
    heads = shape.num_kv_heads * shape.group
    layer = PagedLayer(shape, settings, 8)
    monkeypatch.setattr(Shape, "sink_logits", torch.linspace(3.0, -1.0, heads))
    other = PagedLayer(shape, settings, 8)
    table = torch.arange(1, 5, dtype=torch.int32)[None]

    def step(layer: PagedLayer, begin: int, end: int) -> torch.Tensor:
        torch.manual_seed(begin)
        query = torch.randn(end - begin, heads, shape.head_size)
        key, value = torch.randn(2, end - begin, shape.num_kv_heads, shape.head_size)
        new = [end - begin], [begin], [begin == 0], table, query, key, value
        return layer.step(*new, lambda x, _: x).clone()

    assert not torch.allclose(step(layer, 0, 24), step(other, 0, 24))
    layer.impl.sinks = shape.sink_logits.bfloat16().float()  # the same numbers, as weights
    other.impl.sinks = layer.impl.sinks
    for one in (layer, other):
        one.impl.read_sinks()
    for begin, end in ((24, 25), (25, 41), (41, 42)):
        assert torch.equal(step(layer, begin, end), step(other, begin, end))


def test_sinks_of_offloaded_layers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's prefetch offloading points their parameters at one buffer before ``prepare``."""
    shape, settings = Shape(sinks=True), {"name": "sink", "budget": 16, "prefill_stride": 8}
    heads = shape.num_kv_heads * shape.group
    buffer, prepare = torch.full((heads,), 5.0), CPUKVPolicyImpl.prepare

    def loaded(impl: CPUKVPolicyImpl, *args: Any, **kwargs: Any) -> None:
        """What vLLM does between the load of a model and the pool of pages."""
        block, layer = nn.Module(), Attention.__new__(Attention)
        nn.Module.__init__(layer)
        block.sinks, layer.impl, layer.quant_config = impl.sinks, impl, None
        set_default_quant_scales(layer, register_buffer=True)
        offloader = _CpuParamOffloader(block, "sinks")
        layer.process_weights_after_loading(torch.float32)
        offloader.sync_cpu_storage()
        offloader.assign_static_buffer(buffer)
        prepare(impl, *args, **kwargs)

    for first in (-2.0, 1.0):
        own = torch.linspace(first, 3.0, heads)
        monkeypatch.setattr(Shape, "sink_logits", own)
        resident = PagedLayer(shape, settings, 4).impl
        monkeypatch.setattr(Shape, "sink_logits", nn.Parameter(own.clone(), requires_grad=False))
        monkeypatch.setattr(CPUKVPolicyImpl, "prepare", loaded)
        offloaded = PagedLayer(shape, settings, 4).impl
        monkeypatch.setattr(CPUKVPolicyImpl, "prepare", prepare)
        assert offloaded.sinks is not None and offloaded.sinks.data_ptr() == buffer.data_ptr()
        for impl in (resident, offloaded):
            assert torch.equal(impl.layer_config.sinks.flatten(), own)


@pytest.mark.parametrize("recall", [0, 3])
def test_layers_share_a_rotation_table(recall: int, path: str) -> None:
    """Layers with equal frequencies have one, computed in fp64, which is freed with the last."""
    settings = {"name": "sink", "budget": 24, "num_sinks": 4, "unit": 4, "recall": recall}
    layers = [PagedLayer(Shape(), settings, 3) for _ in range(2)]
    other = PagedLayer(Shape(rotary_dim=8), settings, 3)
    tables = [layer.impl._layer.rotation for layer in (*layers, other)]
    assert tables[0].data_ptr() == tables[1].data_ptr() != tables[2].data_ptr()
    forward, backward = recall * 4, layers[0].spec.max_distance
    distance = torch.arange(-forward, backward + 1, dtype=torch.float64)
    angle = -distance[:, None] * layers[0].inv_freq.double()
    expected = torch.stack([angle.cos(), angle.sin()], dim=1).float()
    whole = tables[0].as_strided(expected.shape, tables[0].stride(), 0)
    assert torch.equal(whole, expected) and torch.equal(tables[0], expected[forward:])
    gone = [ref(table) for table in tables]
    del tables, whole
    layers.pop()
    gc.collect()
    assert gone[0]() is not None, "the other layer reads it"
    del layers, other
    gc.collect()
    assert [table() for table in gone] == [None] * 3
