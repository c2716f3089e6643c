# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel ranks exchange if they share the heads of a set and so decide together.

Results are left in tensors that all layers of a step share. So layers that repeat the launches of
the first one exchange theirs between them (``kernels/triton/launch.py``).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_cascade.kernels.triton.launch import between, note
from vllm_cascade.kernels.triton.strides import Strides

OverRanks = Callable[[torch.Tensor, str], torch.Tensor]
"""``layer.over_ranks``."""
Exchange = Callable[[OverRanks, torch.Tensor], torch.Tensor]


def put_together(over_ranks: OverRanks, reduction: str, values: torch.Tensor) -> None:
    """Reduce ``values`` over all ranks, in place, by ``mean`` or ``max``."""
    between(_reduce, over_ranks, reduction, values)


def _reduce(over_ranks: OverRanks, reduction: str, values: torch.Tensor) -> None:
    values.copy_(over_ranks(values, reduction))


def all_heads(values: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, ...]`` of all ranks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(values, dim=1).contiguous()


def sums_of_all(
    strides: Strides, known: Strides | None, over_ranks: OverRanks, reduction: str, num_heads: int
) -> Strides:
    """With ``sums`` of all ranks: fp32 ``[R, heads, W * parts]``.

    Every rank reduces its heads before it sends them, if it can: not for a median, nor before the
    parts of units are added up.

    Args:
        known: what another layer of the step was given.
        num_heads: KV heads of a rank.
    """
    sums, exchange = strides.sums, _gathered
    assert sums is not None, "the caller computed them"
    if reduction == "mean":
        exchange = _mean
    elif reduction == "max" and sums.shape[1] == num_heads:
        exchange = _max
    if known is not None:
        assert known.sums is not None
        between(_into, exchange, over_ranks, sums, known.sums)
        return known
    found = exchange(over_ranks, sums)
    note(_into, exchange, over_ranks, sums, found)
    heads = found.shape[1] if exchange is _gathered else strides.query_heads
    return replace(strides, sums=found, query_heads=heads)


def _into(
    exchange: Exchange, over_ranks: OverRanks, sums: torch.Tensor, found: torch.Tensor
) -> None:
    found.copy_(exchange(over_ranks, sums))


def _mean(over_ranks: OverRanks, sums: torch.Tensor) -> torch.Tensor:
    return over_ranks(sums.sum(1, keepdim=True), "mean")


def _max(over_ranks: OverRanks, sums: torch.Tensor) -> torch.Tensor:
    return over_ranks(sums.amax(1, keepdim=True), "max")


def _gathered(_: OverRanks, sums: torch.Tensor) -> torch.Tensor:
    return all_heads(sums)
