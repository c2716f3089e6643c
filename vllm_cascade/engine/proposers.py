# SPDX-License-Identifier: Apache-2.0
"""Drafting models with bounded caches in Model Runner V1, whose drafters are proposers.

On CUDA they use vLLM's graphs of the model's compiled parts, between which attention runs.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config import replace as changed
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_cascade.engine.drafter import BoundedDrafter, Images, States, TargetStep

_Base = DraftModelProposer if TYPE_CHECKING else object


class BoundedProposer(BoundedDrafter, _Base):
    """Mixin for vLLM's proposers that run a model.

    Args:
        runner: vLLM's model runner.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        # Near this length vLLM would skip the drafter, and its layers would miss tokens.
        runner.effective_drafter_max_model_len = runner.max_model_len + self.num_speculative_tokens

    @property
    def layer_names(self) -> set[str]:
        return getattr(self, "_draft_attn_layer_names", set())

    @property
    def sees_hidden_states(self) -> bool:
        return self.pass_hidden_states_to_model

    def _create_draft_vllm_config(self) -> VllmConfig:
        """The drafting model's configuration, with the target's attention backend: ours."""
        own, ours = super()._create_draft_vllm_config(), self.vllm_config.attention_config.backend
        return changed(own, attention_config=changed(own.attention_config, backend=ours))

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Take the drafting model's layers from the runner, which has made their builders.

        vLLM's proposer would make one builder for all kinds of layers, and the runner would plan
        the target's steps for these layers, too.
        """
        self.validate_same_kv_cache_group(kv_cache_config)
        self.draft_attn_groups = []  # there are some after the profile of CUDA graphs' memory
        for groups in self._runner.attn_groups:
            own = [group for group in groups if self.layer_names.issuperset(group.layer_names)]
            self.draft_attn_groups += own
            groups[:] = [group for group in groups if group not in own]
        self.kv_cache_gid = self.draft_attn_groups[0].kv_cache_group_id
        self.take_builders(self.draft_attn_groups)

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Images | None = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Draft what follows a step's accepted tokens.

        Returns:
            int ``[num_reqs, num_speculative_tokens]``. Requests whose prompt is not complete have
            rows without meaning, which the scheduler ignores.
        """
        batch, common = self._runner.input_batch, common_attn_metadata
        num_reqs = common.num_reqs
        assert common.seq_lens_cpu_upper_bound is not None, "runners set it"
        end = common.seq_lens_cpu_upper_bound.numpy()[:num_reqs].astype(np.int64)
        first = end - np.diff(common.query_start_loc_cpu.numpy()[: num_reqs + 1])
        if num_rejected_tokens_gpu is not None:
            end -= num_rejected_tokens_gpu.cpu().numpy()
        asked = ~self._runner.discard_request_mask.np[:num_reqs]
        others = np.flatnonzero(~asked)
        step = TargetStep(
            common,
            first,
            end,
            asked,
            prompt=first < batch.num_prompt_tokens[:num_reqs],
            token_ids=target_token_ids,
            hidden=target_hidden_states,
            sampled=next_token_ids,
            following=self.sent(batch.token_ids_cpu[others, end[others]]),
            images=mm_embed_inputs,
        )
        probs: list[torch.Tensor] = []

        def sample(last: torch.Tensor, end: np.ndarray, number: int) -> torch.Tensor:
            sampled, probabilities = self._sample_draft_tokens(last, sampling_metadata)
            probs.extend([] if probabilities is None else [probabilities])
            return sampled

        drafts = self.draft(step, num_speculative_tokens, sample)
        self._last_draft_probs = torch.stack(probs, dim=1) if probs else None
        if not drafts:
            return next_token_ids.new_empty(num_reqs, 0)
        return torch.stack(drafts, dim=1)

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: Any = None,
    ) -> None:
        if is_graph_capturing or not self.shares_experts:
            super().dummy_run(num_tokens, use_cudagraphs, is_graph_capturing, slot_mappings)
            return
        hidden = self.hidden_states[:num_tokens] if self.sees_hidden_states else None
        self.run_padding(num_tokens, hidden, self.num_speculative_tokens)

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.combine_hidden_states(hidden) if self.method == "eagle3" else hidden

    def call_model(
        self,
        metadata: dict[str, Any] | None,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        images: Images | None,
    ) -> States:
        num = len(token_ids)
        mode, padded, everywhere = self._determine_batch_execution_and_padding(num)
        inputs = self.inputs_of(token_ids, hidden, images)
        # A batch that was padded for a graph stays so if another engine's batch has none.
        if mode != CUDAGraphMode.NONE or padded > num:
            inputs = self._in_buffers(inputs, padded)
        if self.eplb_state is not None:
            self.eplb_state.prepare_forward(self.draft_model_config, num)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=everywhere,
            cudagraph_runtime_mode=mode,
        ):
            out: Any = self.model(**inputs, positions=self._unread_positions(padded))
        last, states = out if self.model_returns_tuple() else (out, out)
        return last[:num], states[:num]

    def _in_buffers(
        self, inputs: dict[str, torch.Tensor | None], padded: int
    ) -> dict[str, torch.Tensor | None]:
        """The inputs in the memory that vLLM's CUDA graphs of the drafting model read."""
        moved: dict[str, torch.Tensor | None] = {}
        for name, values in inputs.items():
            moved[name] = None
            if values is not None:
                buffer: torch.Tensor = getattr(self, name)
                buffer[: len(values)].copy_(values)
                moved[name] = buffer[:padded]
        return moved

    def _unread_positions(self, num: int) -> torch.Tensor:
        """Positions whose values nothing reads, of the shape that the model was compiled for."""
        axes = self.mrope_positions.shape[:1] if self.uses_mrope else ()
        return torch.zeros(*axes, num, dtype=torch.int64, device=self.device)


class BoundedDraftModel(BoundedProposer, DraftModelProposer):
    """A smaller model of the same vocabulary."""


class BoundedEagle(BoundedProposer, EagleProposer):
    """Layers behind the target's: EAGLE, EAGLE-3 and MTP."""


def bounded(runner: Any, config: VllmConfig) -> BoundedDrafter | None:
    """Replace the runner's drafter by a bounded one; None: it runs no model."""
    kinds: dict[type, Any] = {DraftModelProposer: BoundedDraftModel, EagleProposer: BoundedEagle}
    ours = kinds.get(type(getattr(runner, "drafter", None)))
    if ours is None:
        return None
    runner.drafter = None  # frees its buffers first
    runner.drafter = ours(config, runner.device, runner)
    runner.drafter.shares_experts = config.parallel_config.data_parallel_size > 1
    return runner.drafter
