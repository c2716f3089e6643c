# SPDX-License-Identifier: Apache-2.0
"""What is constant about one attention layer, on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class LayerConfig:
    """One layer.

    Attributes:
        num_sets: head sets with tokens of their own: 1, or ``num_kv_heads``.
        scale: multiplies the logits.
        softcap: ``softcap * tanh(logits / softcap)``; 0 is none.
        slopes: fp32 ``[num_kv_heads, group]`` of ALiBi, or None.
        rotation: fp32 ``[max_distance + 1, 2, rotary_dim / 2]``, cos and sin of a rotation back
            by a distance; None where keys are not rotated. Where units are recalled, which may
            move others forward, rows of negative distances lie in memory before it.
        is_neox: how channels pair up.
        uses_attention: whether the engine's policy needs attention's probabilities as scores.
        reduction: over the query heads of a set: ``mean``, ``max`` or ``median``.
        gather_heads: gives the ``[..., num_kv_heads, group, n]`` of all tensor-parallel ranks,
            concatenated over KV heads; None where a rank decides on its own.
        over_ranks: gives the ``mean`` or ``max`` over ranks of what each has reduced to one number
            a head set; None where a rank decides on its own.
        window: tokens that a query sees, its own included; None: all that are kept.
        sinks: fp32 ``[num_kv_heads, group]``, learned logits of nothing: one more term of each
            head's softmax, whose probability no token gets. None: no such term.
        dtype: of new tokens' rows; None: that of the rows in pages.
    """

    num_kv_heads: int
    head_size: int
    num_sets: int
    scale: float
    softcap: float
    slopes: torch.Tensor | None
    rotation: torch.Tensor | None
    is_neox: bool
    uses_attention: bool
    reduction: str
    gather_heads: Callable[[torch.Tensor], torch.Tensor] | None = None
    over_ranks: Callable[[torch.Tensor, str], torch.Tensor] | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    dtype: torch.dtype | None = None

    def reduce_heads(self, mass: torch.Tensor) -> torch.Tensor:
        """Attention mass of query heads to one number a head set, over all ranks if need be.

        Ranks exchange what they have reduced; a median needs all heads. Every rank gets the same
        bits, so all come to the same decisions.
        """
        if self.gather_heads is None:
            return reduce_heads(mass, self.num_sets, self.reduction)
        if self.reduction == "median":
            return reduce_heads(self.gather_heads(mass), self.num_sets, self.reduction)
        assert self.over_ranks is not None
        return self.over_ranks(reduce_heads(mass, self.num_sets, self.reduction), self.reduction)

    def soft_cap(self, logits: torch.Tensor) -> torch.Tensor:
        if self.softcap == 0:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of the keys, from logits ``[..., num_kv_heads, group, queries, keys]``."""
        if self.sinks is None:
            return logits.softmax(dim=-1)
        nothing = self.sinks[:, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, nothing], dim=-1).softmax(dim=-1)[..., :-1]


class NewTokens(NamedTuple):
    """A step's rows of one layer, rotated at cache positions.

    ``query`` and ``output``, which is written, are ``[num_tokens, num_heads, head_size]``, ``key``
    and ``value`` ``[num_tokens, num_kv_heads, head_size]``, all in the model's dtype.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor

    def at(self, places: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of some tokens."""
        return self.query[places], self.key[places], self.value[places]


def reduce_heads(mass: torch.Tensor, num_sets: int, reduction: str) -> torch.Tensor:
    """Attention mass of each query head to one number a head set.

    Args:
        mass: ``[..., num_kv_heads, group, n]``.
        num_sets: 1 reduces over all query heads, ``num_kv_heads`` over each group.
        reduction: ``mean``, ``max`` or ``median`` (the lower one of an even number).

    Returns:
        ``[..., num_sets, n]``.
    """
    if num_sets == 1:
        mass = mass.flatten(-3, -2).unsqueeze(-3)
    if reduction == "mean":
        return mass.mean(-2)
    return mass.amax(-2) if reduction == "max" else mass.median(-2).values


def gather_kv_heads(mass: torch.Tensor) -> torch.Tensor:
    """Attention mass of the heads of all tensor-parallel ranks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(mass.contiguous(), dim=-3)


def over_ranks(mass: torch.Tensor, reduction: str) -> torch.Tensor:
    """The ``mean`` or ``max`` over all tensor-parallel ranks of a tensor that each of them has."""
    from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

    group, mass = get_tp_group(), mass.contiguous()
    if reduction == "mean":
        return tensor_model_parallel_all_reduce(mass) / group.world_size
    most = torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(mass, op=most, group=group.device_group)
    return mass
