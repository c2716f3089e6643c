# SPDX-License-Identifier: Apache-2.0
"""What is constant about one attention layer, and the pieces its two paths share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_cascade.policies import Policy


@dataclass(frozen=True)
class LayerConfig:
    """One layer under one policy.

    Attributes:
        scale: multiplies the logits.
        num_sets: head sets with tokens of their own: 1, or ``num_kv_heads``.
        softcap: ``softcap * tanh(logits / softcap)``; 0 is none.
        slopes: fp32 ``[num_kv_heads, group]`` of ALiBi, or None.
        rotation: fp32 ``[max_distance + 1, 2, rotary_dim / 2]``, cos and sin of a rotation back
            by a distance; None where keys are not rotated.
        is_neox: how channels pair up.
        gather_heads: gives the ``[..., num_kv_heads, group, n]`` of all tensor-parallel ranks,
            concatenated over KV heads; None where a rank decides on its own.
    """

    policy: Policy
    num_kv_heads: int
    head_size: int
    scale: float
    num_sets: int
    softcap: float
    slopes: torch.Tensor | None
    rotation: torch.Tensor | None
    is_neox: bool
    gather_heads: Callable[[torch.Tensor], torch.Tensor] | None = None

    def reduce_heads(self, mass: torch.Tensor) -> torch.Tensor:
        """Attention mass of query heads to one number a head set, over all ranks if need be.

        Every rank reduces the same gathered tensor, so all come to the same decisions.
        """
        if self.gather_heads is not None:
            mass = self.gather_heads(mass)
        return reduce_heads(mass, self.num_sets, self.policy.head_reduction)

    def soft_cap(self, logits: torch.Tensor) -> torch.Tensor:
        if self.softcap == 0:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


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
