# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel ranks exchange if they share the heads of a set and so decide together.

Results are left in tensors that all layers of a step share. So layers that repeat the launches of
the first one exchange theirs between them (``kernels/triton/launch.py``).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.kernels.triton.launch import between, note
from vllm_cascade.kernels.triton.strides import Strides

OverRanks = Callable[[torch.Tensor, str], torch.Tensor]
"""``LayerConfig.over_ranks``."""
GatherHeads = Callable[[torch.Tensor], torch.Tensor]
"""``LayerConfig.gather_heads``."""
Exchange = Callable[..., torch.Tensor]
"""Applies one of these two to sums."""


def put_together(over_ranks: OverRanks, reduction: str, values: torch.Tensor) -> None:
    """Reduce ``values`` over all ranks, in place, by ``mean`` or ``max``."""
    between(_reduce, over_ranks, reduction, values)


def _reduce(over_ranks: OverRanks, reduction: str, values: torch.Tensor) -> None:
    values.copy_(over_ranks(values, reduction))


def all_heads(gather_heads: GatherHeads, values: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, ...]`` of all ranks."""
    num_rows, heads, *rest = values.shape
    found = gather_heads(values.reshape(num_rows, heads, 1, math.prod(rest)))
    return found.reshape(num_rows, found.shape[1], *rest).contiguous()


def sums_of_all(strides: Strides, known: Strides | None, layer: LayerConfig) -> Strides:
    """With ``sums`` of all ranks: fp32 ``[R, heads, W * parts]``.

    Every rank reduces its heads before it sends them, if it can: not for a median, nor before the
    parts of units are added up.

    Args:
        known: what another layer of the step was given.
        layer: one whose ranks decide together.
    """
    sums = strides.sums
    exchange: Exchange = _gathered
    reach: OverRanks | GatherHeads | None = layer.gather_heads
    assert sums is not None, "the caller computed them"
    if layer.reduction == "mean":
        exchange, reach = _mean, layer.over_ranks
    elif layer.reduction == "max" and sums.shape[1] == layer.num_kv_heads:
        exchange, reach = _max, layer.over_ranks
    if known is not None:
        assert known.sums is not None
        between(_into, exchange, reach, sums, known.sums)
        return known
    found = exchange(reach, sums)
    note(_into, exchange, reach, sums, found)
    heads = found.shape[1] if exchange is _gathered else strides.query_heads
    return replace(strides, sums=found, query_heads=heads)


def _into(
    exchange: Exchange, reach: OverRanks | GatherHeads, sums: torch.Tensor, found: torch.Tensor
) -> None:
    found.copy_(exchange(reach, sums))


def _mean(over_ranks: OverRanks, sums: torch.Tensor) -> torch.Tensor:
    return over_ranks(sums.sum(1, keepdim=True), "mean")


def _max(over_ranks: OverRanks, sums: torch.Tensor) -> torch.Tensor:
    return over_ranks(sums.amax(1, keepdim=True), "max")


def _gathered(gather_heads: GatherHeads, sums: torch.Tensor) -> torch.Tensor:
    return all_heads(gather_heads, sums)
