# SPDX-License-Identifier: Apache-2.0
"""What is chosen by rule from a shape, and xformers' part of prefill."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_cascade.kernels.testing.checks import Case
from vllm_cascade.kernels.triton import configs
from vllm_cascade.kernels.triton.configs import (
    Config,
    attend_config,
    attend_splits,
    prefers_xformers,
)
from vllm_cascade.kernels.triton.prefill import attend_strides_reference
from vllm_cascade.kernels.triton.xformers_prefill import (
    attend_with_xformers,
    has_xformers,
    use_xformers,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_slots", [16, 128, 2064, 8208])
@pytest.mark.parametrize("heads", [1, 8, 32])
def test_splits_fill_the_card_and_no_more(heads: int, num_slots: int) -> None:
    splits = [attend_splits(CPU, batch, heads, num_slots) for batch in (1, 4, 16, 64, 256)]
    assert splits == sorted(splits, reverse=True), "a larger batch never needs more splits"
    assert all(s & (s - 1) == 0 and 1 <= s <= configs.MAX_SPLITS for s in splits)
    assert splits[-1] == 1 or heads * 256 < configs.HEADS_PER_SM * configs.DEFAULT_SMS
    if num_slots < 256:
        assert splits[0] == 1, "too little to split"


def test_a_tuned_configuration_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Config(tile=64, warps=8, stages=3)
    monkeypatch.setitem(configs.TUNED, ("attend", 0, "float16", 128), tuned)
    assert attend_config(CPU, torch.float16, 128, 4, 8, 1)[0] == tuned
    assert attend_config(CPU, torch.bfloat16, 128, 4, 8, 1)[0] != tuned


def test_xformers_is_used_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configs.XFORMERS_SHAPES == {}, "an entry needs a measurement in results/"
    assert not has_xformers()
    monkeypatch.setitem(configs.XFORMERS_SHAPES, (0, "float16", 128), 512)
    assert prefers_xformers(CPU, torch.float16, 128, 512)
    assert not prefers_xformers(CPU, torch.float16, 128, 511)
    assert not use_xformers(CPU, torch.float16, 128, 512, plain=True), "not without its operators"


class LowerTriangularMask:
    pass


def partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: object = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What xformers documents: ``[B, M, G, H, K]`` tensors, log-sum-exp ``[B, G, H, M]``."""
    assert query.dim() == key.dim() == value.dim() == 5 and query.shape[2:] == key.shape[2:]
    logits = torch.einsum("bmghk,bnghk->bghmn", query, key) * scale
    if isinstance(attn_bias, LowerTriangularMask):
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    output = torch.einsum("bghmn,bnghk->bmghk", logits.softmax(-1), value)
    return output, logits.logsumexp(-1)


def merge(
    outputs: list[torch.Tensor], norms: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.stack(norms).logsumexp(0)
    weights = [(norm - total).exp().permute(0, 3, 1, 2)[..., None] for norm in norms]
    return sum(o * w for o, w in zip(outputs, weights, strict=True)), total


@pytest.mark.parametrize("group", [1, 4])
def test_layouts_given_to_xformers(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """xformers needs a GPU; functions with its documented shapes stand in for it here."""
    fmha = SimpleNamespace(
        memory_efficient_attention_partial=partial,
        merge_attentions=merge,
        attn_bias=SimpleNamespace(LowerTriangularMask=LowerTriangularMask),
    )
    ops = ModuleType("xformers.ops")
    ops.fmha = fmha
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    case = Case(group=group, num_heads=3, head_size=16)
    query = torch.randn(7, case.num_heads * group, 16)
    key, value = torch.randn(2, 7, 3, 16)
    old_keys, old_values = torch.randn(2, 3, 11, 16)
    output, lse = attend_with_xformers(query, key, value, old_keys, old_values, 0.25)
    expected, norm, _ = attend_strides_reference(
        query, key, value, old_keys, old_values, scale=0.25
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), norm, atol=1e-5, rtol=1e-5)
