# SPDX-License-Identifier: Apache-2.0
"""The devices that policies run on: each has a folder in ``attention/`` and an entry here."""

from dataclasses import dataclass

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


@dataclass(frozen=True)
class Device:
    """The classes that run a policy on one kind of device.

    Attributes:
        stock_worker: vLLM's worker class.
        worker: our worker class, which replaces it.
        slot: vLLM's backend name that our backend is registered under while layers are built.
        backend: our backend class.
    """

    stock_worker: str
    worker: str
    slot: AttentionBackendEnum
    backend: str


DEVICES = {
    "cpu": Device(
        stock_worker="vllm.v1.worker.cpu_worker.CPUWorker",
        worker="vllm_cascade.engine.worker.CPUKVPolicyWorker",
        slot=AttentionBackendEnum.CPU_ATTN,  # the CPU platform knows no other
        backend="vllm_cascade.attention.cpu.backend.CPUKVPolicyBackend",
    ),
    "cuda": Device(
        stock_worker="vllm.v1.worker.gpu_worker.Worker",
        worker="vllm_cascade.engine.gpu_worker.GPUKVPolicyWorker",
        slot=AttentionBackendEnum.CUSTOM,
        backend="vllm_cascade.attention.cuda.backend.CUDAKVPolicyBackend",
    ),
}
"""Devices by vLLM's platform name, as in ``current_platform.is_cpu``."""


def this_device() -> Device | None:
    """The device of vLLM's current platform, or None if policies do not support it."""
    found = (name for name in DEVICES if getattr(current_platform, f"is_{name}")())
    return DEVICES.get(next(found, ""))
