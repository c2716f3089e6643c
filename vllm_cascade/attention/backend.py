# SPDX-License-Identifier: Apache-2.0
"""Base class of the attention backends, one per device in ``engine/devices.py``."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_cascade.cache.quantised import CODES
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.memory import RecallMemory
from vllm_cascade.recall.stores import UnitStores
from vllm_cascade.step.drafts import most_drafts


class KVPolicyBackend(AttentionBackend):
    """Attention backend that reads and writes a bounded cache itself."""

    forward_includes_kv_cache_update: bool = True  # else vLLM would write keys and values too
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *CODES]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def make_stores(
        cls, shape: UnitShape, memory: RecallMemory, device: torch.device
    ) -> UnitStores:
        """Create a worker's stores for evicted units; called once, for policies with recall.

        Args:
            shape: a unit in all of the worker's layers.
            memory: what ``count_stores`` returned.
            device: the layers' device.

        Raises:
            KVPolicyError: the stores do not fit in memory.
        """
        raise NotImplementedError

    @classmethod
    def count_stores(
        cls, shape: UnitShape, schedule: Schedule, limit_bytes: int, config: VllmConfig
    ) -> RecallMemory:
        """Create the scheduler's count of the stores that ``make_stores`` makes in a rank.

        Args:
            shape: units in all layers of the model.
            limit_bytes: most host memory of the rank.
        """
        raise NotImplementedError

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Replace a full-attention layer's spec with a bounded one.

        A spec of a layer with windows or chunks is returned unchanged. Its layout depends on the
        model's other layers (``cache/kinds.py``), and this method sees one layer at a time.

        Raises:
            KVPolicyError: the layer's spec cannot be bounded.
        """
        config = get_current_vllm_config_or_none()
        if config is None:  # vLLM compares the bytes of a token and of a recurrent state
            return spec
        policy = policy_of(config.additional_config)
        latent = type(spec) is MLAAttentionSpec and cls.is_mla()
        if spec.head_size_v != spec.head_size and not latent:
            raise KVPolicyError(
                f"kv_policy: a layer's values have {spec.head_size_v} channels and its keys "
                f"{spec.head_size}, which no policy supports; use --kv-policy full"
            )
        if type(spec) in (SlidingWindowSpec, ChunkedLocalAttentionSpec) and policy is not None:
            return spec
        if not (latent or type(spec) is FullAttentionSpec) or policy is None:
            raise KVPolicyError(
                f"kv_policy: a layer with {type(spec).__name__} cannot be bounded; use a model "
                "whose layers use full attention or sliding windows"
            )
        assert isinstance(spec, FullAttentionSpec)
        return KVPolicySpec.from_full(spec, policy, most_drafts(config))
