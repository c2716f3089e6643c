# SPDX-License-Identifier: Apache-2.0
"""The CPU backend, which replaces vLLM's ``CPU_ATTN`` while a policy is active."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import MultipleOf

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl, CPULatentImpl
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.memory import RecallMemory
from vllm_cascade.recall.stores import Stores


class CPUKVPolicyBackend(KVPolicyBackend):
    """Attention over a bounded cache on the CPU."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUKVPolicyImpl]:
        return CPUKVPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[CPUBuilder]:
        return CPUBuilder

    @classmethod
    def make_stores(cls, shape: UnitShape, memory: RecallMemory, device: torch.device) -> Stores:
        return Stores(shape)

    @classmethod
    def count_stores(
        cls, shape: UnitShape, schedule: Schedule, limit_bytes: int, config: VllmConfig
    ) -> RecallMemory:
        most_tokens = config.scheduler_config.max_num_batched_tokens
        return RecallMemory(schedule, limit_bytes, shape.chunk_bytes, most_tokens)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]


class CPULatentBackend(CPUKVPolicyBackend):
    """The same for layers of multi-head latent attention."""

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type[CPULatentImpl]:
        return CPULatentImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True
