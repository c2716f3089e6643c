# SPDX-License-Identifier: Apache-2.0
"""A worker whose engine has a drafting model (speculative decoding), with Model Runner V1."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.cache.kinds import DraftingLayers
from vllm_cascade.engine.drafter import BOUNDED, BoundedDrafter
from vllm_cascade.engine.worker import KVPolicyWorker, Loaded
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import ModelDrafts, most_drafts
from vllm_cascade.step.requests import DraftingRequests


class DraftingWorker(KVPolicyWorker):
    """Mixin for vLLM's workers, whose layers of a drafting model are bounded, too."""

    _drafter: BoundedDrafter | None = None

    def load_model(self, **kwargs: Any) -> None:
        runner: Any = self.model_runner
        ours = BOUNDED.get(type(getattr(runner, "drafter", None)))
        if ours is not None:
            self._drafter = runner.drafter = ours(self.vllm_config, runner.device, runner)
        super().load_model(**kwargs)

    def _drafting(self) -> DraftingLayers:
        if self._drafter is None:
            return DraftingLayers()
        model = self._drafter.draft_model_config.hf_text_config
        last = getattr(model, "max_position_embeddings", None)
        most = ModelDrafts.saved(most_drafts(self.vllm_config))
        return DraftingLayers(self._drafter.layer_names, most, last)

    def _models(self) -> list[Loaded]:
        models, drafter = super()._models(), self._drafter
        if drafter is None:
            return models
        layers = self._all_layers()
        own = {name: layers[name] for name in layers if name in drafter.layer_names}
        return [*models, Loaded(drafter.model, drafter.draft_model_config, own)]

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
        own, drafting = list(self._drafter.builders), self._models()[-1]
        self._prepare(drafting.model, drafting.config, own, drafting.layers)
        for builder in own:
            builder.requests = DraftingRequests(self._requests)

    def _undo_drafts(self, output: SchedulerOutput) -> None:
        super()._undo_drafts(output)
        if self._drafter is not None:
            self._undo(self._drafter.drafts.note(output), self._drafter.builders)
