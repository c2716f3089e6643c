# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.drafting_worker import DraftingWorker
from vllm_cascade.engine.recall_memory import memory_beside
from vllm_cascade.engine.seeds import unfinished_prompts_draw_nothing
from vllm_cascade.engine.stages import expect_hidden_states
from vllm_cascade.log import logger
from vllm_cascade.models.rotary import rotate_latent_keys_natively
from vllm_cascade.patches import latent_cache_types, rejection_sampler
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.memory import GIB
from vllm_cascade.step.drafts import most_drafts


class CPUKVPolicyWorker(DraftingWorker, CPUWorker):
    """Worker on the CPU, whose platform has one attention backend; ours takes its name."""

    device_entry = DEVICES["cpu"]

    @contextmanager
    def _our_backend(self) -> Iterator[None]:
        with super()._our_backend(), latent_cache_types.left_to_backend():
            yield

    def load_model(self, **kwargs: Any) -> None:
        if most_drafts(self.vllm_config):
            rejection_sampler.apply()
        super().load_model(**kwargs)
        for one in self._models():
            rotate_latent_keys_natively(one.model)

    def determine_available_memory(self) -> int:
        """Bytes of this worker's pool: what vLLM gives it, unless evicted units and sessions, which
        take their memory later, would find too little.

        Raises:
            KVPolicyError: nothing is left for the pool; names the settings.
        """
        found, cache = super().determine_available_memory(), self.cache_config
        if cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
            return found
        rest = memory_beside(self.vllm_config)
        if rest <= 0:
            raise KVPolicyError(
                "kv_policy: recall_memory and --kv-sessions-memory leave no host memory for the "
                "pool; lower them"
            )
        if rest < found:
            logger.info(
                "KV pool: %.3g of %.3g GiB, so that evicted units (recall_memory) and sessions "
                "(--kv-sessions-memory) have room",
                rest / GIB,
                found / GIB,
            )
        return min(found, rest)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        expect_hidden_states(self.model_runner)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        with unfinished_prompts_draw_nothing(self.model_runner):
            return super().sample_tokens(grammar_output)
