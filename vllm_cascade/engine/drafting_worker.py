# SPDX-License-Identifier: Apache-2.0
"""A worker whose engine may have a drafting model (speculative decoding), with either runner."""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from vllm.config import ModelConfig
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.cache.kinds import DraftingLayers
from vllm_cascade.engine.drafter import BoundedDrafter
from vllm_cascade.engine.worker import KVPolicyWorker, Loaded
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import MODEL_DRAFTERS, Drafts, ModelDrafts, most_drafts
from vllm_cascade.step.requests import DraftingRequests


class DraftingWorker(KVPolicyWorker):
    """Mixin for vLLM's workers: layers of a drafting model have bounded caches, too."""

    _drafter: BoundedDrafter | None = None

    def load_model(self, **kwargs: Any) -> None:
        drafts = self.vllm_config.speculative_config
        if drafts is not None and drafts.method in MODEL_DRAFTERS:
            module = "speculators" if self.use_v2_model_runner else "proposers"
            bounded = resolve_name(f"vllm_cascade.engine.{module}:bounded")
            self._drafter = bounded(self.model_runner, self.vllm_config)
        super().load_model(**kwargs)

    def _drafting(self) -> DraftingLayers:
        if self._drafter is None:
            return DraftingLayers()
        model = self._draft_config().hf_text_config
        last = getattr(model, "max_position_embeddings", None)
        most = ModelDrafts.saved(most_drafts(self.vllm_config))
        return DraftingLayers(self._drafter.layer_names, most, last)

    def _models(self) -> list[Loaded]:
        models, drafter = super()._models(), self._drafter
        if drafter is None:
            return models
        layers = self._all_layers()
        own = {name: layers[name] for name in layers if name in drafter.layer_names}
        return [*models, Loaded(drafter.model, self._draft_config(), own)]

    def _draft_config(self) -> ModelConfig:
        drafts = self.vllm_config.speculative_config
        assert drafts is not None, "there is a drafter"
        return drafts.draft_model_config

    def _keep_drafts(self) -> None:
        super()._keep_drafts()
        if self._drafter is not None:
            most_requests = self.scheduler_config.max_num_seqs
            drafts = ModelDrafts(most_requests, most_drafts(self.vllm_config))
            for builder in self._drafter.builders:
                builder.drafts = drafts
            self._drafter.drafts = drafts

    def _all_drafts(self) -> Sequence[Drafts]:
        drafts = super()._all_drafts()
        return drafts if self._drafter is None else [*drafts, self._drafter.drafts]

    def _connect(self, builders: list[StepBuilder]) -> None:
        super()._connect(builders)
        if self._drafter is None:
            return
        own, drafting = list(self._drafter.builders), self._models()[-1]
        self._prepare(drafting.model, drafting.config, own, drafting.layers)
        self._drafter.requests = self._requests
        for builder in own:
            builder.requests = DraftingRequests(self._requests)

    def _undo_drafts(self, output: SchedulerOutput) -> None:
        super()._undo_drafts(output)
        if self._drafter is not None:
            self._undo(self._drafter.drafts.note(output), self._drafter.builders)
