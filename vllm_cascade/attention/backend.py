# SPDX-License-Identifier: Apache-2.0
"""The attention backend that vLLM sees: what all devices share (``engine/devices.py``)."""

from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.engine.lookup import policy_of
from vllm_cascade.policies.settings import KVPolicyError


class KVPolicyBackend(AttentionBackend):
    """A bounded cache that the backend addresses itself, on any device."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Every full-attention layer's cache becomes a bounded one."""
        policy = policy_of(get_current_vllm_config())
        if type(spec) is not FullAttentionSpec or policy is None:
            raise KVPolicyError(
                f"kv_policy: a layer with {type(spec).__name__} cannot be bounded; use a model "
                "whose layers all use plain full attention"
            )
        return KVPolicySpec.from_full(spec, policy)
