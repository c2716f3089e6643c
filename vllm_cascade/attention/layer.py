# SPDX-License-Identifier: Apache-2.0
"""What is constant about one attention layer, on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from vllm_cascade.attention.recorder import Recorder
from vllm_cascade.cache.layout import Pages, page_views
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import Rotary
from vllm_cascade.cache.positions import alibi_slopes as _slopes
from vllm_cascade.cache.quantised import CODES, Quantised
from vllm_cascade.policies.settings import KVPolicyError


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


class KVPolicyImpl(AttentionImpl[Any]):
    """One layer on any device; a device says how it rotates and how it runs a step's waves.

    Attributes:
        knows_windows, knows_sinks, knows_codes: whether the device's code has sliding windows,
            learned sinks, quantised rows.
    """

    knows_windows: ClassVar[bool] = False
    knows_sinks: ClassVar[bool] = False
    knows_codes: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refused = {
            "sliding windows": sliding_window is not None and not self.knows_windows,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV caches shared between layers": kv_sharing_target_layer_name is not None,
            "learned attention sinks": sinks is not None and not self.knows_sinks,
        }
        for feature, present in refused.items():
            if present:
                raise KVPolicyError(
                    f"kv_policy: the model uses {feature}, which no policy supports on this "
                    "device; use --kv-policy full"
                )
        if kv_cache_dtype in CODES and not self.knows_codes:
            raise KVPolicyError(
                f"kv_policy: --kv-cache-dtype {kv_cache_dtype} is not built for this device; set "
                "it to auto"
            )
        self.window = sliding_window
        self.sinks = sinks  # weights are loaded later
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = _slopes(alibi_slopes)
        self.recorder: Recorder | None = None
        self._layer: LayerConfig | None = None
        self._pages: Pages | None = None

    def prepare(
        self,
        spec: KVPolicySpec,
        kv_cache: torch.Tensor,
        rotary: Rotary | None,
        num_ranks: int = 1,
        dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Fix what no step changes; called once the page pool exists.

        Args:
            num_ranks: tensor-parallel ranks that the model's heads are spread over.
            dtype: of new rows; None: the cache's, where that is not quantised.
            scales: of all keys and all values, where they are quantised in steps of these.
        """
        slopes, device = self.alibi_slopes, kv_cache.device
        if slopes is not None:
            self.alibi_slopes = slopes = slopes.to(device)
            slopes = slopes.view(self.num_kv_heads, -1)
        shared = spec.policy.head_policy == "homogeneous"  # all ranks must keep the same tokens
        scores, sinks = spec.window is None, self.sinks  # windows compare none
        rotation = None
        if rotary is not None:
            rotation = self.rotation_table(rotary, spec, device)
        self._pages = page_views(kv_cache, spec, Quantised.of(self.kv_cache_dtype, scales))
        self._layer = LayerConfig(
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            num_sets=spec.num_sets,
            scale=self.scale,
            softcap=self.softcap,
            slopes=slopes,
            rotation=rotation,
            is_neox=rotary is None or rotary.is_neox,
            uses_attention=spec.policy.uses_attention,
            reduction=spec.policy.head_reduction,
            gather_heads=gather_kv_heads if num_ranks > 1 and shared and scores else None,
            over_ranks=over_ranks if num_ranks > 1 and shared and scores else None,
            window=spec.window,
            sinks=None if sinks is None else sinks.detach().float().view(self.num_kv_heads, -1),
            dtype=dtype,
        )

    def rotation_table(
        self, rotary: Rotary, spec: KVPolicySpec, device: torch.device
    ) -> torch.Tensor:
        """cos and sin of a rotation back, for every distance that a key of the layer can move."""
        raise NotImplementedError

    def run(self, name: str, metadata: Any, new: NewTokens, kv_cache: torch.Tensor) -> None:
        """Attend and move the cache to its next state.

        Args:
            name: the layer's.
            metadata: what the device's builder made.
            kv_cache: the layer's page pool, for a step before ``prepare`` has been called.
        """
        raise NotImplementedError

    def reserve(self, query: torch.Tensor) -> None:
        """Take the memory that the worst batch needs beside pages, so that a profile counts it."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's call; ``attn_metadata`` is None in a profiling run, which touches no cache."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported")
        if attn_metadata is None:
            self.reserve(query)
            return output.zero_()
        self.run(layer.layer_name, attn_metadata, NewTokens(query, key, value, output), kv_cache)
        return output
