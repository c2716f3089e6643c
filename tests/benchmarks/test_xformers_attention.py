# SPDX-License-Identifier: Apache-2.0
"""What is given to xformers, which needs a GPU: functions with its documented shapes stand in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.gpu.xformers_attention import attend_with_xformers, has_xformers


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
def test_layouts(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ModuleType("xformers.ops")
    ops.fmha = SimpleNamespace(
        memory_efficient_attention_partial=partial,
        merge_attentions=merge,
        attn_bias=SimpleNamespace(LowerTriangularMask=LowerTriangularMask),
    )
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    heads, tokens, cached, size = 3, 7, 11, 16
    query = torch.randn(tokens, heads * group, size)
    key, value = torch.randn(2, tokens, heads, size)
    old_keys, old_values = torch.randn(2, heads, cached, size)
    output, lse = attend_with_xformers(query, key, value, old_keys, old_values, 0.25)
    for token in range(tokens):
        for head in range(heads * group):
            kv = head // group
            keys = torch.cat([old_keys[kv], key[: token + 1, kv]]).double()
            values = torch.cat([old_values[kv], value[: token + 1, kv]]).double()
            logits = keys @ query[token, head].double() * 0.25
            torch.testing.assert_close(lse[token, head].double(), logits.logsumexp(0))
            torch.testing.assert_close(
                output[token, head].double(), logits.softmax(0) @ values, atol=1e-5, rtol=1e-5
            )


def test_without_a_gpu_there_is_none() -> None:
    assert not has_xformers()
