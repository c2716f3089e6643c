# SPDX-License-Identifier: Apache-2.0
"""A model that calls a layer twice in a forward pass would cache each of its tokens twice."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl, CPULatentImpl
from vllm_cascade.attention.latent import connect
from vllm_cascade.policies.settings import KVPolicyError

SIZES = {
    "num_heads": 2,
    "head_size": 8,
    "scale": 1.0,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
}
TWICE = r"calls layer several times in a step.*use --kv-policy full"


def step() -> Any:
    return set_forward_context(None, VllmConfig(), num_tokens=3)


def layer_of(impl: CPUKVPolicyImpl) -> Any:
    """A profiling run's call, with keys or without."""
    rows, layer = torch.zeros(3, 2, 8), SimpleNamespace(layer_name="layer")
    return lambda key: impl.forward(layer, rows, key, key, rows, None, torch.empty_like(rows))


def test_a_layer_that_is_called_twice_stops_the_start() -> None:
    call, rows = layer_of(CPUKVPolicyImpl(**SIZES)), torch.zeros(3, 2, 8)
    for _ in range(2):
        with step():
            call(rows)
    with step():
        call(rows)
        with pytest.raises(KVPolicyError, match=TWICE):
            call(rows)


def test_a_layer_may_attend_again_without_keys() -> None:
    """IQuest Loop Coder's, which insert once."""
    call = layer_of(CPUKVPolicyImpl(**SIZES))
    with step():
        call(torch.zeros(3, 2, 8))
        call(None)


def test_other_layers_may_be_called_in_the_same_step() -> None:
    with step():
        for impl in (CPUKVPolicyImpl(**SIZES), CPUKVPolicyImpl(**SIZES)):
            layer_of(impl)(torch.zeros(3, 2, 8))


def test_a_layer_of_latents() -> None:
    impl = CPULatentImpl(kv_lora_rank=8, qk_nope_head_dim=4, v_head_dim=4, **SIZES)
    layer = SimpleNamespace(layer_name="layer", impl=impl, forward_impl=None)
    connect(layer)
    rows, output = torch.zeros(3, 2, 8), torch.empty(3, 8)
    for _ in range(2):
        with step():
            layer.forward_impl(rows, None, None, None, None, output)
    with step():
        layer.forward_impl(rows, None, None, None, None, output)
        with pytest.raises(KVPolicyError, match=TWICE):
            layer.forward_impl(rows, None, None, None, None, output)
