# SPDX-License-Identifier: Apache-2.0
"""The devices that policies run on; each is a folder in ``attention/`` and an entry here."""

from dataclasses import dataclass

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


@dataclass(frozen=True)
class Device:
    """How a policy gets into vLLM on one kind of device.

    Attributes:
        stock_worker, worker: vLLM's worker class, and ours that takes its place.
        slot: the backend's name under which layers find ours while they are built.
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
        slot=AttentionBackendEnum.CPU_ATTN,  # the only one that the CPU platform knows
        backend="vllm_cascade.attention.cpu.backend.CPUKVPolicyBackend",
    ),
    "cuda": Device(
        stock_worker="vllm.v1.worker.gpu_worker.Worker",
        worker="vllm_cascade.engine.gpu_worker.GPUKVPolicyWorker",
        slot=AttentionBackendEnum.CUSTOM,
        backend="vllm_cascade.attention.cuda.backend.CUDAKVPolicyBackend",
    ),
}
"""By vLLM's word for a platform, as in ``current_platform.is_cpu``."""


def this_device() -> Device | None:
    """The device that vLLM runs on here; None where policies know none such."""
    found = (name for name in DEVICES if getattr(current_platform, f"is_{name}")())
    return DEVICES.get(next(found, ""))
