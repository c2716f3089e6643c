# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a policy."""

from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.seeds import unfinished_prompts_draw_nothing
from vllm_cascade.engine.stages import expect_hidden_states
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.models.rotary import rotate_latent_keys_natively
from vllm_cascade.step.drafts import Drafts, most_drafts


class CPUKVPolicyWorker(KVPolicyWorker, CPUWorker):
    """Worker on the CPU, whose platform has one attention backend; ours takes its name."""

    device_entry = DEVICES["cpu"]

    _drafts: Drafts | None = None

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        rotate_latent_keys_natively(self.model_runner.get_model())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        expect_hidden_states(self.model_runner)
        self._keep_drafts()

    def _keep_drafts(self) -> None:
        """Prepare layers and builders for speculative decoding, if it is on."""
        most = most_drafts(self.vllm_config)
        if not most:
            return
        most_requests = self.scheduler_config.max_num_seqs
        self._drafts = Drafts(most_requests, most)
        for builder in self._builders():
            assert isinstance(builder, CPUBuilder)
            builder.drafts = self._drafts
        for layer in self._attention_layers().values():
            layer.impl.keep_drafts(most_requests)

    def _undo_drafts(self, output: SchedulerOutput) -> None:
        """Undo the drafts that the last steps rejected, before anything reads or copies pages."""
        assert self._drafts is not None
        rejected = self._drafts.note(output)
        if not rejected:
            return
        known = self.model_runner.requests
        blocks = [known[one.name].block_ids[0] for one in rejected]
        layers = self._attention_layers()
        for builder in self._builders():
            assert isinstance(builder, CPUBuilder)
            undone = builder.undone(rejected, blocks)
            for name in builder.layer_names:
                layers[name].impl.undo(undone)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self._drafts is not None:
            self._undo_drafts(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        with unfinished_prompts_draw_nothing(self.model_runner):
            return super().sample_tokens(grammar_output)
