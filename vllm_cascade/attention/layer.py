# SPDX-License-Identifier: Apache-2.0
"""Constants of one attention layer, and its reductions over heads and ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Part = Literal["both", "attend", "insert"]


@dataclass(frozen=True)
class LayerConfig:
    """Constants of one attention layer.

    Attributes:
        num_sets: head sets that keep separate tokens: 1 or ``num_kv_heads``.
        scale: factor on the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 disables it.
        slopes: fp32 ``[num_kv_heads, group]``, ALiBi slopes, or None.
        rotation: fp32 ``[max_distance + 1, 2, rotary_dim / 2]``, cos and sin of backward rotations
            by a distance; None if keys are not rotated. With recall, keys may also move forward:
            rows for negative distances then precede this tensor in memory.
        is_neox: whether rotary channels pair in NeoX style.
        uses_attention: whether the engine's policy scores tokens by attention probabilities.
        reduction: reduction over the query heads of a set: ``mean``, ``max`` or ``median``.
        gather_heads: concatenates ``[..., num_kv_heads, group, n]`` of all tensor-parallel ranks
            over KV heads; None if each rank decides alone.
        over_ranks: reduces per-set values over ranks by ``mean`` or ``max``; None if each rank
            decides alone.
        window: tokens that a query attends to, itself included; None attends to all kept tokens.
        chunked: whether a query attends to its chunk of ``window`` tokens instead. A chunk begins
            at a rank that is a multiple of ``window``.
        sinks: fp32 ``[num_kv_heads, group]``, learned sink logits. They add one term to each head's
            softmax denominator. None if the model has no sinks.
        dtype: dtype of new tokens' rows; None uses the dtype of the pages.
        salts: int32 ``[num_sets]``, hashed into each score from the host, so that layers and head
            sets get scores of their own; None: all use the host's score.
        latent: channels of the value if a row is a latent one (``latent.py``): the key is the whole
            row, and the value is its last ``latent`` channels. None: a row is a key, then a value.
        part: what a call does. Layers that share a cache call ``attend`` and ``insert`` apart
            (``attention/shared.py``); ``insert`` attends again where attention gives scores.
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
    chunked: bool = False
    sinks: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    salts: torch.Tensor | None = None
    latent: int | None = None
    part: Part = "both"

    @property
    def row_size(self) -> int:
        """Channels of a stored row."""
        return 2 * self.head_size if self.latent is None else self.head_size

    @property
    def value_size(self) -> int:
        return self.head_size if self.latent is None else self.latent

    def row(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The rows ``[..., row_size]`` of keys and values."""
        return torch.cat([key, value], dim=-1) if self.latent is None else key

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values in rows ``[..., row_size]``."""
        return rows[..., : self.head_size], rows[..., self.row_size - self.value_size :]

    def reduce_heads(self, mass: torch.Tensor) -> torch.Tensor:
        """Reduce the attention mass of query heads to one value per head set, over all ranks.

        Ranks exchange reduced values, except for a median, which needs all heads. The result is
        bit-identical on every rank, so that all ranks evict the same tokens.
        """
        if self.gather_heads is None:
            return reduce_heads(mass, self.num_sets, self.reduction)
        if self.reduction == "median":
            return reduce_heads(self.gather_heads(mass), self.num_sets, self.reduction)
        assert self.over_ranks is not None
        return self.over_ranks(reduce_heads(mass, self.num_sets, self.reduction), self.reduction)

    def own_scores(self, given: torch.Tensor, unit: int) -> torch.Tensor:
        """Scores of each head set, fp32 ``[..., num_sets, n]``, from the host's ``[..., 1, n]``.

        Salted scores are whole numbers with as many bits, 24 at most, as keep the sum of a unit's
        ``unit`` scores exact in fp32.
        """
        if self.salts is None:
            return given.expand(*given.shape[:-2], self.num_sets, given.shape[-1])
        low = 0xFFFFFFFF
        x = (given.long() ^ self.salts.long().unsqueeze(-1)) & low
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & low
        return ((x ^ (x >> 16)) >> (8 + (unit - 1).bit_length())).float()

    def soft_cap(self, logits: torch.Tensor) -> torch.Tensor:
        if self.softcap == 0:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Key probabilities from logits ``[..., num_kv_heads, group, queries, keys]``."""
        if self.sinks is None:
            return logits.softmax(dim=-1)
        nothing = self.sinks[:, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, nothing], dim=-1).softmax(dim=-1)[..., :-1]


class NewTokens(NamedTuple):
    """A step's rows of one layer, rotated at cache positions, in the model's dtype.

    Attributes:
        query: ``[num_tokens, num_heads, head_size]``.
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: ``[num_tokens, num_kv_heads, value_size]``.
        output: ``[num_tokens, num_heads, value_size]``, written by attention.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor

    def at(self, places: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the tokens at ``places``."""
        return self.query[places], self.key[places], self.value[places]


def reduce_heads(mass: torch.Tensor, num_sets: int, reduction: str) -> torch.Tensor:
    """Reduce the attention mass of query heads to one value per head set.

    Args:
        mass: ``[..., num_kv_heads, group, n]``.
        num_sets: 1 reduces over all query heads, ``num_kv_heads`` over each group.
        reduction: ``mean``, ``max`` or ``median`` (the lower middle value of an even count).

    Returns:
        ``[..., num_sets, n]``.
    """
    if num_sets == 1:
        mass = mass.flatten(-3, -2).unsqueeze(-3)
    if reduction == "mean":
        return mass.mean(-2)
    return mass.amax(-2) if reduction == "max" else mass.median(-2).values


def gather_kv_heads(mass: torch.Tensor) -> torch.Tensor:
    """Concatenate attention mass over the KV heads of all tensor-parallel ranks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(mass.contiguous(), dim=-3)


def over_ranks(mass: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce a tensor over all tensor-parallel ranks by ``mean`` or ``max``; the same bits on all.

    vLLM's sum on CPUs begins with a rank's own part, so sums of three ranks differ in the last bit.
    There all ranks get all parts and add them in the order of ranks. vLLM's sum on CUDA may go
    through FlashInfer, which adds in no fixed order and raises an error at rows that are not
    divisible by 4. So NCCL reduces, by the communicator that vLLM captures in graphs; its memory is
    allocated at start.
    """
    from vllm.distributed import get_tp_group

    group, mass = get_tp_group(), mass.contiguous()
    if reduction == "mean" and mass.is_cpu:
        return group.all_gather(mass.unsqueeze(0), dim=0).mean(0)
    operations = torch.distributed.ReduceOp
    operation = operations.SUM if reduction == "mean" else operations.MAX
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is not None and not nccl.disabled:
        mass = nccl.all_reduce(mass, op=operation)
    else:
        torch.distributed.all_reduce(mass, op=operation, group=group.device_group)
    return mass / group.world_size if reduction == "mean" else mass


class Exchanges(NamedTuple):
    """``LayerConfig.gather_heads`` and ``over_ranks`` of tensor-parallel ranks."""

    gather_heads: Callable[[torch.Tensor], torch.Tensor]
    over_ranks: Callable[[torch.Tensor, str], torch.Tensor]


WITH_OTHERS = Exchanges(gather_kv_heads, over_ranks)
