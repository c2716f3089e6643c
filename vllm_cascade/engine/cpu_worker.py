# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a policy."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.cache.kinds import DraftingLayers
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.drafter import BOUNDED, BoundedDrafter
from vllm_cascade.engine.seeds import unfinished_prompts_draw_nothing
from vllm_cascade.engine.stages import expect_hidden_states
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.models.rotary import rotate_latent_keys_natively
from vllm_cascade.patches import rejection_sampler
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import Drafts, ModelDrafts, Rejected, most_drafts
from vllm_cascade.step.requests import DraftingRequests


class CPUKVPolicyWorker(KVPolicyWorker, CPUWorker):
    """Worker on the CPU, whose platform has one attention backend; ours takes its name."""

    device_entry = DEVICES["cpu"]

    _drafts: Drafts | None = None
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

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        expect_hidden_states(self.model_runner)
        self._keep_drafts()

    def _keep_drafts(self) -> None:
        """Prepare layers and builders for speculative decoding, if it is on."""
        most, most_requests = most_drafts(self.vllm_config), self.scheduler_config.max_num_seqs
        if not most:
            return
        self._drafts = Drafts(most_requests, most)
        for builder in self._builders():
            assert isinstance(builder, CPUBuilder)
            builder.drafts = self._drafts
        for layer in self._all_layers().values():
            layer.impl.keep_drafts(most_requests)
        if self._drafter is not None:
            drafts = ModelDrafts(most_requests, most)
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
        """Undo the drafts that the last steps rejected, before anything reads or copies pages."""
        assert self._drafts is not None
        builders: list[Any] = self._builders()
        self._undo(self._drafts.note(output), builders)
        if self._drafter is not None:
            self._undo(self._drafter.drafts.note(output), self._drafter.builders)

    def _undo(self, rejected: Sequence[Rejected], builders: Sequence[CPUBuilder]) -> None:
        if not rejected:
            return
        known, layers = self.model_runner.requests, self._all_layers()
        blocks = [known[one.name].block_ids[0] for one in rejected]
        for builder in builders:
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
