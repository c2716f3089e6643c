# SPDX-License-Identifier: Apache-2.0
"""Strides of few query heads on the CUDA path: attention is split over keys, and nobody sees it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.attention import test_paged
from tests.attention.conftest import use_triton
from tests.attention.test_paged import CASCADE, H2O, OWN, PagedLayer, Shape
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.workspace import workspace_of

LEAST, STRIDE = 8, 16
POLICIES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "cascade": (Shape(num_kv_heads=1), {**CASCADE, "budget": 32}),
    "h2o-heads": (Shape(sinks=True, group=1), {**H2O, "budget": 28, "head_policy": "per_kv_head"}),
    "units": (
        Shape(num_kv_heads=1, block_size=32),
        {**CASCADE, "budget": 32, "num_sinks": 16, "unit": 16},
    ),
}


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth a part is lowered to what these caches have."""
    use_triton(monkeypatch)
    monkeypatch.setattr(TritonKVPolicyImpl, "least_part", LEAST)


def splits_of(layer: PagedLayer) -> int:
    """Parts of a stride; what they count with is 0 between launches."""
    counters = workspace_of(torch.device("cpu")).counters(1)
    assert not counters.any() and not workspace_of(torch.device("cpu"))._counters.any()
    return layer.impl._made.strides.attention.split.splits


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "h2o-heads")) for n in POLICIES]
)
def test_equal_the_oracle(name: str) -> None:
    """Prompts beside each other and beside decode, caches that are empty, filling and full."""
    shape, settings = POLICIES[name]
    settings, full = {**settings, "prefill_stride": STRIDE}, settings["budget"]
    prompts, totals = [23, 24 + full], [25, 25 + full]
    layer = test_paged.run_mixed_requests(None, shape, settings, prompts, totals, len(name))
    assert splits_of(layer) >= 3


@pytest.mark.slow
def test_requests_with_policies_of_their_own() -> None:
    """Parts are the engine's, whatever a request's budget: some are without slots."""
    engine = {**test_paged.ENGINE, "prefill_stride": STRIDE}
    asked = [(extra, {**own, "prefill_stride": STRIDE}) for extra, own in OWN[:2]]
    prompts, totals = [40, 48], [41, 49]
    layer = test_paged.run_mixed_requests(
        None, Shape(num_kv_heads=1), engine, prompts, totals, 3, asked=asked
    )
    assert splits_of(layer) >= 2


PROMPTS = (9, 40)


def read(who: Sequence[int]) -> tuple[PagedLayer, dict[int, torch.Tensor]]:
    """Outputs of the prompts of requests that run together, a stride of each at a time."""
    shape, settings = POLICIES["cascade"]
    layer = PagedLayer(shape, {**settings, "prefill_stride": STRIDE}, 1 + 8 * len(PROMPTS))
    tables = torch.arange(1, 1 + 8 * len(PROMPTS), dtype=torch.int32).view(len(PROMPTS), -1)
    heads = shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.num_kv_heads
    generator = torch.Generator().manual_seed(5)
    rows = [
        [torch.randn(n, h, shape.head_size, generator=generator) for h in heads] for n in PROMPTS
    ]
    outputs: dict[int, list[torch.Tensor]] = {r: [] for r in who}
    for begin in range(0, max(PROMPTS[r] for r in who), STRIDE):
        now = [r for r in who if PROMPTS[r] > begin]
        lengths = [min(STRIDE, PROMPTS[r] - begin) for r in now]
        new = [torch.cat([rows[r][i][begin : begin + STRIDE] for r in now]) for i in range(3)]
        made = layer.step(
            *(lengths, [begin] * len(now), [True] * len(now), tables[now], *new),
            rotate=lambda x, _: x,
        )
        for r, output in zip(now, made.split(lengths), strict=True):
            outputs[r].append(output)
    return layer, {r: torch.cat(given) for r, given in outputs.items()}


def test_the_same_bytes_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what one program for all keys gives, but for rounding."""
    layer, together = read(range(len(PROMPTS)))
    assert splits_of(layer) >= 3
    for r in range(len(PROMPTS)):
        assert torch.equal(read([r])[1][r], together[r])
    monkeypatch.setattr(TritonKVPolicyImpl, "least_part", 1000)
    layer, whole = read(range(len(PROMPTS)))
    assert splits_of(layer) == 1
    for r, output in together.items():
        torch.testing.assert_close(output, whole[r], atol=2e-5, rtol=2e-5)
    assert any(not torch.equal(output, whole[r]) for r, output in together.items())
