# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a policy."""

from typing import Any

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.drafting_worker import DraftingWorker
from vllm_cascade.engine.recall_memory import promised_bytes
from vllm_cascade.engine.seeds import unfinished_prompts_draw_nothing
from vllm_cascade.engine.stages import expect_hidden_states
from vllm_cascade.log import logger
from vllm_cascade.models.rotary import rotate_latent_keys_natively
from vllm_cascade.patches import rejection_sampler
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.memory import GIB
from vllm_cascade.step.drafts import most_drafts


class CPUKVPolicyWorker(DraftingWorker, CPUWorker):
    """Worker on the CPU, whose platform has one attention backend; ours takes its name."""

    device_entry = DEVICES["cpu"]

    def load_model(self, **kwargs: Any) -> None:
        if most_drafts(self.vllm_config):
            rejection_sampler.apply()
        super().load_model(**kwargs)
        for one in self._models():
            rotate_latent_keys_natively(one.model)

    def determine_available_memory(self) -> int:
        """Bytes of this worker's pool: vLLM gives it all that is left, of which evicted units and
        sessions also take some, later.

        Raises:
            KVPolicyError: nothing is left for the pool; names the settings.
        """
        found = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return found
        taken = promised_bytes(self.vllm_config) // self.parallel_config.world_size
        if found <= taken:
            raise KVPolicyError(
                f"kv_policy: vLLM has {found / GIB:.3g} GiB for its pool, and recall_memory and "
                f"--kv-sessions-memory take {taken / GIB:.3g} GiB of that; lower them, or set "
                "--kv-cache-memory-bytes"
            )
        if taken:
            logger.info(
                "KV pool: %.3g GiB of what vLLM gives it are left for evicted units "
                "(recall_memory) and sessions (--kv-sessions-memory)",
                taken / GIB,
            )
        return found - taken

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        expect_hidden_states(self.model_runner)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        with unfinished_prompts_draw_nothing(self.model_runner):
            return super().sample_tokens(grammar_output)
