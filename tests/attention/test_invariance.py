# SPDX-License-Identifier: Apache-2.0
"""Attention gives a request the same bytes alone, among others, and however it is cut into steps.

In every type: what the batch changes in a bfloat16 model is then the model's own matrix products.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.test_paged import CASCADE, H2O, PagedLayer, Shape, chunk
from vllm_cascade.attention.cpu.paths import SWITCH
from vllm_cascade.kernels.cpp.library import load

STRIDE = 32
PROMPTS = (150, 1, 64, 33, 97, 200)
DECODED = 20
POLICIES: dict[str, dict[str, Any]] = {
    "sink": {"name": "sink", "budget": 90},
    "sink-units": {"name": "sink", "budget": 96, "num_sinks": 16, "unit": 16},
    "cascade": {**CASCADE, "budget": 64},
    "h2o-heads": {**H2O, "budget": 60, "window": 20, "head_policy": "per_kv_head"},
    "cascade-units": {
        "name": "cascade",
        "budget": 64,
        "num_subcaches": 2,
        "num_sinks": 16,
        "unit": 16,
        "head_policy": "per_kv_head",
    },
}


class Requests:
    """Queries, keys and values of some requests, which a layer may be given in any steps."""

    def __init__(self, shape: Shape, prompts: Sequence[int] = PROMPTS) -> None:
        generator = torch.Generator().manual_seed(5)
        heads = (shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.num_kv_heads)
        self.shape, self.prompts = shape, prompts
        self.totals = [prompt + DECODED for prompt in prompts]
        self.rows = [
            [torch.randn(total, n, shape.head_size, generator=generator) for n in heads]
            for total in self.totals
        ]

    def read(self, settings: dict[str, Any], who: Sequence[int], wanted: int, seed: int) -> Any:
        """Outputs ``[total, H * G, D]`` of requests that run together.

        Args:
            wanted: tokens of a prompt in a step, cut where strides begin.
            seed: of the order of rows, and of the requests that sit a step out.
        """
        num_pages = len(who) * (max(self.totals) // self.shape.block_size + 1)
        layer = PagedLayer(self.shape, {**settings, "prefill_stride": STRIDE}, 1 + num_pages)
        tables = torch.arange(1, 1 + num_pages, dtype=torch.int32).view(len(who), -1)
        rng = np.random.default_rng(seed)
        done = dict.fromkeys(who, 0)
        outputs: dict[int, list[torch.Tensor]] = {r: [] for r in who}
        while any(done[r] < self.totals[r] for r in who):
            left = [r for r in rng.permutation(who).tolist() if done[r] < self.totals[r]]
            rows = [r for r in left if rng.random() < 0.8] or left
            lengths = [chunk(done[r], self.prompts[r], STRIDE, wanted) for r in rows]
            parts = [(r, slice(done[r], done[r] + n)) for r, n in zip(rows, lengths, strict=True)]
            new = [torch.cat([self.rows[r][i][part] for r, part in parts]) for i in range(3)]
            firsts = [done[r] for r in rows]
            prefilling = [done[r] < self.prompts[r] for r in rows]
            table = tables[[list(who).index(r) for r in rows]]
            made = layer.step(lengths, firsts, prefilling, table, *new, rotate=lambda x, _: x)
            for r, output in zip(rows, made.split(lengths), strict=True):
                outputs[r].append(output)
                done[r] += len(output)
        return {r: torch.cat(given) for r, given in outputs.items()}


PARTIAL = Shape(num_kv_heads=2, group=3, head_size=64, rotary_dim=32)
SHAPES: dict[str, tuple[Shape, str]] = {
    "partial": (PARTIAL, "sink"),
    "partial-mha": (replace(PARTIAL, group=1, rotary_dim=16), "sink"),
    "partial-gqa2": (replace(PARTIAL, group=2, head_size=128), "h2o-heads"),
    "partial-gqa4": (replace(PARTIAL, group=4, dtype=torch.float16), "cascade"),
    "partial-gqa8": (replace(PARTIAL, group=8), "sink"),
    "partial-units": (PARTIAL, "cascade-units"),
    "partial-fp8": (replace(PARTIAL, cache_dtype="fp8", scales=(0.25, 0.5)), "sink-units"),
    "partial-int8": (replace(PARTIAL, cache_dtype="int8_per_token_head"), "cascade-units"),
    "interleaved": (replace(PARTIAL, rotary_dim=64, is_neox=False), "sink"),
    "interleaved-int8": (
        replace(PARTIAL, rotary_dim=64, is_neox=False, cache_dtype="int8_per_token_head"),
        "sink-units",
    ),
    "whole-fp8": (replace(PARTIAL, rotary_dim=64, cache_dtype="fp8"), "sink-units"),
    "odd": (replace(PARTIAL, head_size=36, rotary_dim=20), "sink"),
    "alibi": (replace(PARTIAL, alibi=True), "sink"),
    "latent": (Shape(num_kv_heads=1, group=2, head_size=96, rotary_dim=32, latent=True), "sink"),
    "latent-int8": (
        Shape(1, 4, head_size=64, rotary_dim=16, latent=True, cache_dtype="int8_per_token_head"),
        "sink-units",
    ),
    "latent-gqa16": (Shape(1, 16, head_size=96, rotary_dim=32, latent=True), "sink"),
}
"""Layers whose keys cannot all be rotated in registers, and some others."""


@pytest.mark.parametrize("path", ["native", "pytorch"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bytes(
    dtype: torch.dtype, policy: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(num_kv_heads=2, group=3, head_size=64, rotary_dim=64, dtype=dtype)
    compare(shape, policy, path, monkeypatch)


@pytest.mark.parametrize("path", ["native", "pytorch"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bytes_in_any_shape(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have evicted tokens run together with requests that have not."""
    shape, policy = SHAPES[name]
    compare(shape, policy, path, monkeypatch)


def compare(shape: Shape, policy: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "native" and shape.dtype not in load().dtypes:
        pytest.skip("this compiler has no fp16")
    monkeypatch.setenv(SWITCH, path)
    check(Requests(shape), POLICIES[policy])


@pytest.mark.parametrize("path", ["native", "pytorch"])
@pytest.mark.parametrize("group", [1, 3])
def test_the_same_bytes_of_many_tokens(
    group: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a request that has many more."""
    monkeypatch.setenv(SWITCH, path)
    shape = Shape(num_kv_heads=2, group=group, head_size=64, rotary_dim=64)
    check(Requests(shape, [390, 1000]), {"name": "sink", "budget": 1200})


def check(requests: Requests, settings: dict[str, Any]) -> None:
    everyone = range(len(requests.prompts))
    together = requests.read(settings, everyone, wanted=70, seed=1)
    otherwise = requests.read(settings, everyone, wanted=1000, seed=2)
    for r in everyone:
        alone = requests.read(settings, [r], wanted=STRIDE, seed=3)[r]
        assert alone.isfinite().all()
        assert torch.equal(alone, together[r]), "among others"
        assert torch.equal(alone, otherwise[r]), "in other steps"
