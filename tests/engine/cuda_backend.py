# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's code in engines on the CPU; its kernels are interpreted."""

from typing import Any

from vllm_cascade.attention.cpu.backend import CPUKVPolicyBackend, CPULatentBackend
from vllm_cascade.attention.cuda.backend import CUDAKVPolicyBackend, CUDALatentBackend
from vllm_cascade.engine.devices import CPU


def use_cuda_backend(setattr_: Any = setattr) -> None:
    """Every engine created from here on; ``monkeypatch.setattr`` undoes it after a test."""
    for name in ("get_impl_cls", "get_builder_cls", "make_stores", "count_stores"):
        setattr_(CPUKVPolicyBackend, name, getattr(CUDAKVPolicyBackend, name))
    setattr_(CPULatentBackend, "get_impl_cls", CUDALatentBackend.get_impl_cls)
    setattr_(CPU, "memory_bytes", lambda _: 1 << 40)  # of a card, which bounds its stores
