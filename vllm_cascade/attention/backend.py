# SPDX-License-Identifier: Apache-2.0
"""The attention backend that vLLM sees: what all devices share (``engine/devices.py``)."""

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import UnitShape


class KVPolicyBackend(AttentionBackend):
    """A bounded cache that the backend addresses itself, on any device."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def make_stores(cls, shape: UnitShape, max_num_seqs: int, device: torch.device) -> Any:
        """Where evicted units wait, in a worker whose policy recalls them.

        Raises:
            KVPolicyError: there is not the memory for it.
        """
        raise NotImplementedError

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Every full-attention layer's cache becomes a bounded one.

        One with a window stays as it is: how it is laid out depends on what other layers there are
        (``cache/kinds.py``), and this sees one layer at a time.
        """
        config = get_current_vllm_config_or_none()
        if config is None:  # vLLM compares a token's bytes with a recurrent state's
            return spec
        policy = policy_of(config.additional_config)
        if spec.head_size_v != spec.head_size:
            raise KVPolicyError(
                f"kv_policy: a layer's values have {spec.head_size_v} channels and its keys "
                f"{spec.head_size}, which no policy supports; use --kv-policy full"
            )
        if type(spec) is SlidingWindowSpec and policy is not None:
            return spec
        if type(spec) is not FullAttentionSpec or policy is None:
            raise KVPolicyError(
                f"kv_policy: a layer with {type(spec).__name__} cannot be bounded; use a model "
                "whose layers use full attention or sliding windows"
            )
        return KVPolicySpec.from_full(spec, policy)
