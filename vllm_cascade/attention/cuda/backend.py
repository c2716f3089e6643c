# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``CUSTOM`` backend while a policy is on."""

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import MultipleOf

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl, TritonLatentImpl
from vllm_cascade.kernels.columns import LONGEST_HEAD
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.memory import RecallMemory
from vllm_cascade.recall.rings import RingMemory, Rings


class CUDAKVPolicyBackend(KVPolicyBackend):
    """Bounded-cache attention in Triton."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonKVPolicyImpl]:
        return TritonKVPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[CUDABuilder]:
        return CUDABuilder

    @classmethod
    def make_stores(cls, shape: UnitShape, memory: RecallMemory, device: torch.device) -> Rings:
        assert isinstance(memory, RingMemory)
        return Rings(shape, memory.capacity, device, memory.num_chunks, memory.ranks)

    @classmethod
    def count_stores(
        cls, shape: UnitShape, schedule: Schedule, limit_bytes: int, config: VllmConfig
    ) -> RecallMemory:
        most_rings = config.scheduler_config.max_num_seqs
        keeps_snapshots = config.cache_config.enable_prefix_caching
        return RingMemory(schedule, shape, limit_bytes, most_rings, keeps_snapshots)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """True, because vLLM asks even if the cache's type does not use them."""
        return True  # ``engine.worker.scales_of`` refuses layers that would use them

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= LONGEST_HEAD


class CUDALatentBackend(CUDAKVPolicyBackend):
    """The backend for multi-head latent attention."""

    @staticmethod
    def get_impl_cls() -> type[TritonLatentImpl]:
        return TritonLatentImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 576
