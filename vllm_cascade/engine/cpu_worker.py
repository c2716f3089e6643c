# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a policy."""

from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_cascade.cache.kinds import DraftingLayers
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.drafter import BOUNDED, BoundedDrafter
from vllm_cascade.engine.seeds import unfinished_prompts_draw_nothing
from vllm_cascade.engine.stages import expect_hidden_states
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.models.norms import move_key_weights
from vllm_cascade.models.rotary import rotate_latent_keys_natively
from vllm_cascade.patches import rejection_sampler
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import ModelDrafts, most_drafts
from vllm_cascade.step.requests import DraftingRequests


class CPUKVPolicyWorker(KVPolicyWorker, CPUWorker):
    """Worker on the CPU, whose platform has one attention backend; ours takes its name."""

    device_entry = DEVICES["cpu"]

    _drafter: BoundedDrafter | None = None

    def load_model(self, **kwargs: Any) -> None:
        if most_drafts(self.vllm_config):
            rejection_sampler.apply()
        runner: Any = self.model_runner
        ours = BOUNDED.get(type(getattr(runner, "drafter", None)))
        if ours is not None:
            self._drafter = runner.drafter = ours(self.vllm_config, runner.device, runner)
        super().load_model(**kwargs)
        for model in self._models():
            rotate_latent_keys_natively(model)

    def _drafting(self) -> DraftingLayers:
        if self._drafter is None:
            return DraftingLayers()
        model = self._drafter.draft_model_config.hf_text_config
        last = getattr(model, "max_position_embeddings", None)
        most = ModelDrafts.saved(most_drafts(self.vllm_config))
        return DraftingLayers(self._drafter.layer_names, most, last)

    def _models(self) -> list[Any]:
        return super()._models() + ([] if self._drafter is None else [self._drafter.model])

    def _move_key_weights(self) -> None:
        super()._move_key_weights()
        if self._drafter is not None:
            config = self._drafter.draft_model_config.hf_text_config
            move_key_weights(self._drafter.model, config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        expect_hidden_states(self.model_runner)

    def _keep_drafts(self) -> None:
        super()._keep_drafts()
        if self._drafter is not None:
            most_requests = self.scheduler_config.max_num_seqs
            drafts = ModelDrafts(most_requests, most_drafts(self.vllm_config))
            for builder in self._drafter.builders:
                builder.drafts = drafts
            self._drafter.drafts = drafts

    def _connect(self, builders: list[StepBuilder]) -> None:
        super()._connect(builders)
        if self._drafter is None:
            return
        layers = self._all_layers()
        own = {name: layers[name] for name in self._drafter.layer_names}
        config = self._drafter.draft_model_config
        self._prepare(self._drafter.model, config, list(self._drafter.builders), own)
        for builder in self._drafter.builders:
            builder.requests = DraftingRequests(self._requests)

    def _undo_drafts(self, output: SchedulerOutput) -> None:
        super()._undo_drafts(output)
        if self._drafter is not None:
            self._undo(self._drafter.drafts.note(output), self._drafter.builders)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        with unfinished_prompts_draw_nothing(self.model_runner):
            return super().sample_tokens(grammar_output)
