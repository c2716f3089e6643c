# SPDX-License-Identifier: Apache-2.0
"""Queries that attend to thousands of sinks, such as a kept prompt, in PyTorch and C++."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.attention.test_launches import calls_in
from tests.attention.test_paged import PagedLayer, Shape
from tests.attention.test_recall import choose, literal, write
from tests.oracle.recall import may_round_either_way
from vllm_cascade.attention.cpu.paths import SWITCH
from vllm_cascade.attention.cpu.recall import LayerRecall
from vllm_cascade.attention.layer import NewTokens
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.kernels.cpp.library import row_addresses
from vllm_cascade.recall.log import Log
from vllm_cascade.step.recall import unit_shape

UNIT, STORED, GROUP = 4, 40, 3
SETTINGS = {"name": "sink", "budget": 64, "num_sinks": 4, "unit": UNIT, "recall": 3}
PLAIN = Shape(group=GROUP, head_size=20, rotary_dim=12, block_size=24)
LATENT = Shape(num_kv_heads=1, group=GROUP, head_size=28, rotary_dim=8, latent=True)
CASES: dict[str, tuple[Shape, int]] = {
    "fp32": (PLAIN, 525),
    "bf16": (replace(PLAIN, head_size=64, dtype=torch.bfloat16), 300),
    "fp16": (replace(PLAIN, head_size=80, dtype=torch.float16), 140),
    "whole parts": (replace(PLAIN, head_size=36), 256),
    "no sinks": (PLAIN, 0),
    "fp8 pages": (replace(PLAIN, cache_dtype="fp8", scales=(0.5, 2.0)), 150),
    "int8 pages": (replace(PLAIN, cache_dtype="int8_per_token_head"), 150),
    "latent": (LATENT, 150),
    "latent fp8 pages": (replace(LATENT, cache_dtype="fp8", scales=(0.5, 2.0)), 150),
    "latent int8 pages": (replace(LATENT, cache_dtype="int8_per_token_head"), 150),
}


class Asked:
    """A layer whose queries select 3 of 40 units, with so many units of sinks in mixed pages."""

    def __init__(self, shape: Shape, sinks: int, num_queries: int) -> None:
        torch.manual_seed(sinks + num_queries)
        num_pages = -(-max(sinks, 1) * UNIT // shape.block_size)
        layer = PagedLayer(shape, SETTINGS, num_pages + 1)
        self.config, self.path, self.pages = layer.impl._layer, layer.impl.path, layer.pages
        self.sinks, self.table = sinks, 1 + torch.randperm(num_pages).int()
        heads, size = shape.num_kv_heads, shape.head_size
        rows = torch.randn(num_pages, heads, shape.block_size, shape.row_size)
        self.pages.write_rows((self.table.long(),), rows)
        units = torch.arange(num_pages * shape.block_size // UNIT, dtype=torch.int32)
        self.pages.rank[self.table.long(), 0] = units.view(num_pages, -1)
        stored = self.pages.rows(self.table.long()).transpose(0, 1).flatten(1, 2)
        self.sink_keys = stored[:, : sinks * UNIT, :size]
        self.keys = torch.randn(heads, STORED, UNIT, size) * 2
        log = Log(unit_shape(layer.spec, 2))
        write(log.grow(STORED), 1, self.keys)
        self.part = log.part(0, STORED)
        query = torch.randn(num_queries, heads * GROUP, size).to(shape.dtype)
        self.new = NewTokens(query, *(query[:, :heads],) * 2, query)

    def plain(self) -> torch.Tensor:
        """Queries turned back from position 7, times the logits' scale."""
        at = torch.full(self.new.query.shape[:2], 7)
        return evidence.unrotated(self.config, self.new.query, at) * self.config.scale

    def logits(self) -> torch.Tensor:
        """Of the sinks, fp64 ``[Q, H * G, n]``."""
        keys = self.sink_keys.double().repeat_interleave(GROUP, 0)
        return torch.einsum("qhd,hnd->qhn", self.new.query.double(), keys) * self.config.scale

    def choose(self) -> tuple[np.ndarray, np.ndarray]:
        """What C++ selects, and each query head's worth of each unit."""
        place, where = np.arange(len(self.new.query)), np.full(len(self.new.query), 7)
        rows = row_addresses(self.new)
        chosen, _, asked = choose(
            self.path, self.part, 3, rows, place, where, self.table, self.sinks
        )
        return chosen, asked


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(SWITCH, "native")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_queries", [1, 7])
def test_worth_beside_many_sinks(name: str, num_queries: int) -> None:
    """Against fp64; the sinks get a large part of the attention, so that each of them counts."""
    case = Asked(*CASES[name], num_queries)
    plain, logits = case.plain(), case.logits()
    expected = literal(case.keys, plain, logits)
    alone = literal(case.keys, plain, logits[..., :0])
    assert case.sinks == 0 or (expected < 0.9 * alone).all(), "no matter what sinks there are"
    sure = ~may_round_either_way(plain).any(0).view(expected.shape[:2])
    assert sure.any()
    asked = torch.from_numpy(case.choose()[1]).view(expected.shape)
    torch.testing.assert_close(asked[sure].double(), expected[sure], atol=2e-5, rtol=2e-5)
    sinks = evidence.to_sinks(case.config, case.new.query, case.sink_keys)
    torch.testing.assert_close(sinks.double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
    asked = evidence.asked(case.config, 1, case.part, plain, sinks)
    torch.testing.assert_close(asked[sure].double(), expected[sure], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads", [1, 4])
def test_threads_change_no_bit(heads: int) -> None:
    """With fewer heads than threads, and more."""
    case = Asked(replace(PLAIN, num_kv_heads=heads), 525, 7)
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.append([array.tobytes() for array in case.choose()])
    assert found == found[:1] * 4


@pytest.mark.parametrize("name", CASES)
def test_keys_of_sinks_in_one_read(name: str) -> None:
    """As ranks read them; Python's time does not grow with the sinks."""
    case = Asked(*CASES[name], 1)
    recall = LayerRecall(case.config, case.pages, 1, 32)
    assert torch.equal(recall.sink_keys(case.table, case.sinks), case.sink_keys)
    if case.sinks:
        calls = [calls_in(lambda n=n: recall.sink_keys(case.table, n)) for n in (1, case.sinks)]
        assert calls[0] == calls[1]
