# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU."""

from dataclasses import replace

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from vllm_cascade.attention.cpu.paths import Path, choose
from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.metadata import KVPolicyMetadata
from vllm_cascade.attention.recorder import Recorder
from vllm_cascade.cache.layout import Pages, page_views
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import Rotary
from vllm_cascade.cache.positions import alibi_slopes as _slopes
from vllm_cascade.policies import Policy
from vllm_cascade.policies.settings import KVPolicyError

MAX_OWN_PATHS = 64
"""Policies of requests' own that a layer remembers."""


def _gather_kv_heads(mass: torch.Tensor) -> torch.Tensor:
    """Attention mass of the heads of all tensor-parallel ranks."""
    return tensor_model_parallel_all_gather(mass.contiguous(), dim=-3)


class KVPolicyImpl(AttentionImpl[KVPolicyMetadata]):
    """What a layer's constructor refuses and keeps, on any device."""

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
            "sliding windows": sliding_window is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV caches shared between layers": kv_sharing_target_layer_name is not None,
            "learned attention sinks": sinks is not None,
        }
        for feature, present in refused.items():
            if present:
                raise KVPolicyError(
                    f"kv_policy: the model uses {feature}, which no policy supports; "
                    "use --kv-policy full"
                )
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
        self.path: Path | None = None
        self._own_paths: dict[Policy, Path] = {}


def layer_config(
    impl: KVPolicyImpl,
    spec: KVPolicySpec,
    rotation: torch.Tensor | None,
    rotary: Rotary | None,
    num_ranks: int,
) -> LayerConfig:
    """What ``impl``'s layer is to the code that computes it, once the page pool exists."""
    slopes = impl.alibi_slopes
    if slopes is not None:
        slopes = slopes.view(impl.num_kv_heads, -1)
    shared = spec.policy.head_policy == "homogeneous"  # all ranks must keep the same tokens
    return LayerConfig(
        policy=spec.policy,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        scale=impl.scale,
        num_sets=spec.num_sets,
        softcap=impl.softcap,
        slopes=slopes,
        rotation=rotation,
        is_neox=rotary is None or rotary.is_neox,
        gather_heads=_gather_kv_heads if num_ranks > 1 and shared else None,
    )


class CPUKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: all one-token strides as a batch, each longer stride on its own."""

    def prepare(
        self,
        spec: KVPolicySpec,
        kv_cache: torch.Tensor,
        rotary: Rotary | None,
        num_ranks: int = 1,
    ) -> None:
        """Fix what no step changes; called once the page pool exists.

        Args:
            num_ranks: tensor-parallel ranks that the model's heads are spread over.
        """
        rotation = None if rotary is None else rotary.table(spec.policy.max_position)
        self._layer = layer_config(self, spec, rotation, rotary, num_ranks)
        self._pages = page_views(kv_cache, spec)
        self.path = choose(self._layer, self._pages, self.num_heads)
        self._own_paths = {}

    def _path_under(self, policy: Policy) -> Path:
        """This layer under a request's policy; all else is the engine's."""
        assert self._layer is not None and self._pages is not None and self.path is not None
        if policy is self._layer.policy:
            return self.path
        if policy not in self._own_paths:
            if len(self._own_paths) >= MAX_OWN_PATHS:
                self._own_paths.clear()
            layer = replace(self._layer, policy=policy)
            self._own_paths[policy] = choose(layer, self._pages, self.num_heads)
        return self._own_paths[policy]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KVPolicyMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and move the cache to its next state.

        Args:
            query: ``[num_tokens, num_heads, head_size]``, rotated at cache positions.
            key, value: ``[num_tokens, num_kv_heads, head_size]``.
            kv_cache: the layer's page pool; read through the views made in ``prepare``.
            attn_metadata: None in a profiling run, which must not touch the cache.
            output: like ``query``; written.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported")
        if attn_metadata is None:
            return output.zero_()
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        for wave in attn_metadata.waves:
            for batch in wave.tokens:
                self._path_under(batch.policy).tokens(batch, query, key, value, output)
            for stride in wave.strides:
                self._path_under(stride.policy).stride(stride, query, key, value, output)
            if self.recorder is not None:
                self.recorder.record(layer.layer_name, self._pages, wave)
        return output
