# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets in fp32 in vLLM's place, whose kernels for CPUs compute in bfloat16 only.

One token after the other, from the definition (Yang et al., "Gated Delta Networks", section 3.1):
with a decay a and a rate b for each token and head, S <- a S (1 - b k k^T) + b v k^T, o = S q.
States are read from and written to the pages that vLLM gives a request.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import normalize, silu, softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import register_cpu_gdn_attention_ops
from vllm.utils.torch_utils import _resolve_layer_name

from vllm_cascade.engine import devices


@contextmanager
def delta_rule_in_fp32() -> Iterator[list[int]]:
    """While it lasts, vLLM's layers call this module, and fp32 is not refused.

    Yields:
        The tokens of each call.
    """
    register_cpu_gdn_attention_ops()
    calls: list[int] = []

    def core(
        mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, output: torch.Tensor, name: Any
    ) -> None:
        context = get_forward_context()
        if context.attn_metadata is None:
            return  # a warm-up
        assert mixed.dtype == torch.float32
        name = _resolve_layer_name(name)
        layer, metadata = context.no_compile_layers[name], context.attn_metadata[name]
        calls.append(metadata.num_actual_tokens)
        starts = metadata.non_spec_query_start_loc.tolist()
        pages = metadata.non_spec_state_indices_tensor.tolist()
        requests = metadata.num_decodes + metadata.num_prefills
        known = metadata.has_initial_state
        for i in range(requests):
            rows = slice(starts[i], starts[i + 1])
            fresh = known is not None and not known[i]
            output[rows] = _request(layer, pages[i], fresh, mixed[rows], b[rows], a[rows])

    with (
        patch.object(torch.ops.vllm, "cpu_gdn_attention_core", core),
        patch.object(devices, "DELTA_NETS", ()),
    ):
        yield calls


def _request(
    layer: Any, page: int, fresh: bool, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor
) -> torch.Tensor:
    """Output [T, heads, V] of one request's tokens; its states are then those after them."""
    convolved, state = layer.kv_cache[0][page], layer.kv_cache[1][page]
    if fresh:
        convolved.zero_()
        state.zero_()
    assert state.dtype == convolved.dtype == torch.float32
    weight = layer.conv1d.weight.squeeze(1)  # [channels, width]
    past = weight.shape[1] - 1
    if convolved.shape[0] != past:
        convolved = convolved.T
    inputs = torch.cat([convolved, mixed])
    convolved.copy_(inputs[-past:])
    windows = inputs.unfold(0, past + 1, 1)  # [T, channels, width]
    query, key, value = silu((windows * weight).sum(-1)).split(
        [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1
    )
    per_key = layer.num_v_heads // layer.num_k_heads
    query, key = (
        normalize(rows.unflatten(-1, (-1, layer.head_k_dim)), dim=-1).repeat_interleave(per_key, 1)
        for rows in (query, key)
    )
    value = value.unflatten(-1, (-1, layer.head_v_dim))
    decay = (-layer.A_log.exp() * softplus(a + layer.dt_bias)).exp()
    rate = b.sigmoid()
    output = torch.empty_like(value)
    for t in range(len(mixed)):
        state.mul_(decay[t, :, None, None])  # [heads, V, K]
        recalled = (state @ key[t].unsqueeze(-1)).squeeze(-1)
        change = rate[t, :, None] * (value[t] - recalled)
        state.add_(change.unsqueeze(-1) * key[t].unsqueeze(-2))
        output[t] = (state @ query[t].unsqueeze(-1)).squeeze(-1) * layer.head_k_dim**-0.5
    return output
