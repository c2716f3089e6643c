# SPDX-License-Identifier: Apache-2.0
"""Drafting models with bounded caches in Model Runner V2, whose drafters are speculators.

vLLM captures the passes of its speculators as CUDA graphs, with rows that are padded with rejected
tokens. Rows of accepted tokens differ from step to step, so these passes run outside graphs.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_cascade.engine.drafter import BoundedDrafter, Images, States, TargetStep

_Base = DraftModelSpeculator if TYPE_CHECKING else object


class BoundedSpeculator(BoundedDrafter, _Base):
    """Mixin for vLLM's speculators that run a model."""

    current_draft_step: torch.Tensor
    _joins = False
    """Whether hidden states are those of several layers (EAGLE-3)."""

    @property
    def layer_names(self) -> set[str]:
        return getattr(self, "draft_attn_layer_names", set())

    @property
    def sees_hidden_states(self) -> bool:
        return self.method != "draft_model"

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: list[list[Any]],
    ) -> None:
        """Take the drafting model's layers from the runner, which would plan the target's steps for
        them, too."""
        others = target_input_buffers, target_attn_groups
        super().set_attn(model_state, kv_cache_config, block_tables, *others)
        for groups in target_attn_groups:
            groups[:] = [g for g in groups if not self.layer_names.issuperset(g.layer_names)]
        self.take_builders([group for groups in self.attn_groups for group in groups])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """There are no graphs, and nothing to ``capture``."""

    def capture(self) -> None:
        pass

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Images | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft what follows a step's accepted tokens.

        Returns:
            int64 ``[num_reqs, num_speculative_steps]``. Requests whose prompt is not complete have
            rows without meaning, which the scheduler ignores.
        """
        num_reqs, rows = input_batch.num_reqs, input_batch.idx_mapping
        drafts = self.draft_tokens[:num_reqs]
        hidden = torch.cat(aux_hidden_states, dim=-1) if aux_hidden_states else last_hidden_states
        self._joins = bool(aux_hidden_states)
        if dummy_run:
            self._run_dummies(input_batch, hidden, mm_inputs)
            return drafts
        self._copy_request_inputs(num_reqs, rows, temperature, seeds)
        sampled, rejected = torch.stack((num_sampled, num_rejected))[:, :num_reqs].cpu().numpy()
        asked, common = sampled > 0, self._common(input_batch)
        end = input_batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs].astype(np.int64)
        first = end - input_batch.num_scheduled_tokens[:num_reqs]
        others = rows[self.sent(np.flatnonzero(~asked))]
        step = TargetStep(
            common,
            first,
            end - rejected,
            asked,
            prompt=self.requests.prefilling(common),
            token_ids=input_batch.input_ids[: input_batch.num_tokens],
            hidden=hidden,
            sampled=last_sampled[rows].view(num_reqs, -1)[:, 0],
            following=next_prefill_tokens.view(-1, next_prefill_tokens.shape[-1])[0, others],
            images=mm_inputs,
        )

        def sample(last: torch.Tensor, end: np.ndarray, number: int) -> torch.Tensor:
            self.current_draft_step.fill_(number)
            # Random numbers follow from the index of the token before the sampled one.
            before = self.sent(end - 1 + self.sees_hidden_states)
            own = self.idx_mapping[:num_reqs], self.temperature, self.seeds
            return self.sample_draft(last, before, *own, self.current_draft_step, self.draft_logits)

        num = self.num_speculative_steps
        if num_speculative_tokens is not None:
            num = num_speculative_tokens
        for number, tokens in enumerate(self.draft(step, num, sample)):
            drafts[:, number] = tokens
        return drafts

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.combine_hidden_states(hidden) if self._joins else hidden

    def call_model(
        self,
        metadata: dict[str, Any] | None,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        images: Images | None,
    ) -> States:
        num = len(token_ids)
        inputs = self.inputs_of(token_ids, hidden, images)
        self._prepare_eplb_forward(num)
        with set_forward_context(metadata, self.vllm_config, num_tokens=num):
            # What is read in a dummy run; later the model reads those of its first builder.
            positions = torch.zeros(num, dtype=torch.int64, device=self.device)
            out: Any = self.model(**inputs, positions=positions)
        return out if isinstance(out, tuple) else (out, out)

    def _run_dummies(
        self, input_batch: InputBatch, hidden: torch.Tensor, images: Images | None
    ) -> None:
        """The model alone, on as many tokens as the target has run."""
        num = input_batch.num_tokens
        passed = self.combined(hidden[:num]) if self.sees_hidden_states else None
        last, _ = self.call_model(None, input_batch.input_ids[:num].int(), passed, images)
        self.model.compute_logits(last[: input_batch.num_reqs])
        if self.shares_experts:
            self._runs = 1
            one = None if passed is None else passed[:1]
            self.run_padding(1, one, self.num_speculative_steps)

    def _common(self, input_batch: InputBatch) -> CommonAttentionMetadata:
        """The step as vLLM's metadata has it."""
        num, starts = input_batch.num_reqs, input_batch.query_start_loc_np
        (group,) = [number for number, own in enumerate(self.attn_groups) if own]
        ends = input_batch.seq_lens_cpu_upper_bound[:num]
        return CommonAttentionMetadata(
            query_start_loc=input_batch.query_start_loc[: num + 1],
            query_start_loc_cpu=torch.from_numpy(starts[: num + 1]),
            seq_lens=input_batch.seq_lens[:num],
            seq_lens_cpu_upper_bound=ends,
            num_reqs=num,
            num_actual_tokens=input_batch.num_tokens,
            max_query_len=int(input_batch.num_scheduled_tokens.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self.block_tables.input_block_tables[group][:num],
            slot_mapping=input_batch.idx_mapping.new_empty(0),
            is_prefilling=torch.from_numpy(input_batch.is_prefilling_np[:num]),
            req_idx=input_batch.idx_mapping_np[:num],
        )


class BoundedDraftModel(BoundedSpeculator, StandaloneARSpeculator):
    """A smaller model of the same vocabulary."""


class BoundedEagle(BoundedSpeculator, EagleSpeculator):
    """A layer trained on the target's hidden states: EAGLE and EAGLE-3."""


class BoundedMTP(BoundedSpeculator, MTPSpeculator):
    """The model's own layer for drafts."""


def bounded(runner: Any, config: VllmConfig) -> BoundedDrafter | None:
    """Replace the runner's drafter by a bounded one; None: it runs no model."""
    kinds: dict[type, type[DraftModelSpeculator]] = {
        StandaloneARSpeculator: BoundedDraftModel,
        EagleSpeculator: BoundedEagle,
        MTPSpeculator: BoundedMTP,
    }
    ours: Any = kinds.get(type(runner.speculator))
    if ours is None:
        return None
    runner.speculator = None  # frees its buffers first
    runner.speculator = ours(config, runner.device)
    runner.speculator.shares_experts = config.parallel_config.data_parallel_size > 1
    return runner.speculator
