# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with a policy, for Model Runner V1 and V2."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.policies.settings import KVPolicyError


class GPUKVPolicyWorker(KVPolicyWorker, Worker):
    """On CUDA, where layers are told to use vLLM's ``CUSTOM`` backend."""

    device_entry = DEVICES["cuda"]

    def kv_policy_trace(self, every: int = 1) -> None:
        """Start recording which tokens every layer keeps.

        Raises:
            KVPolicyError: the policy's ``trace`` is off, or a captured graph would skip recording.
        """
        if not self.vllm_config.model_config.enforce_eager:
            raise KVPolicyError("kv_policy: tracing on a GPU needs --enforce-eager")
        super().kv_policy_trace(every)
