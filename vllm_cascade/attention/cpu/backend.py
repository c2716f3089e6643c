# SPDX-License-Identifier: Apache-2.0
"""The CPU backend, which replaces vLLM's ``CPU_ATTN`` while a policy is active."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.stores import Stores, check_host_memory


class CPUKVPolicyBackend(KVPolicyBackend):
    """Attention over a bounded cache on the CPU."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *CODES]

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
    def make_stores(cls, shape: UnitShape, max_num_seqs: int, device: torch.device) -> Stores:
        check_host_memory(shape, max_num_seqs)
        return Stores(shape)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]
