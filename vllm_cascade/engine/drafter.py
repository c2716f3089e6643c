# SPDX-License-Identifier: Apache-2.0
"""Drafting models whose layers have bounded caches (speculative decoding).

In each step, when the target's tokens are sampled, vLLM asks the drafter for the next drafts. The
drafting model first runs the tokens that the target has run and accepted, in the same strides, so
its layers keep what they would keep if the model ran alone under the policy. Then it runs what
follows one by one: a draft model the sampled token, and every drafting model its own drafts but the
last. The next step undoes these (``step/drafts.py``).

EAGLE's and MTP's layers see at token ``i`` the embedding of token ``i + 1`` and the hidden state of
token ``i``: the target's, or their own behind the last token that the target has run.

vLLM's own passes pad rows with rejected tokens, whose slots it leaves out. Here slots follow from
counts, so rows hold accepted tokens only, and the host has to know how many there are: on CUDA it
waits for the target's step, and scheduling is synchronous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

from vllm_cascade.cache.transfer import sent
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import ModelDrafts

Pictures = tuple[list[torch.Tensor], torch.Tensor]
"""Embeddings of a step's pictures, and bool ``[num_tokens]``: whether a token is part of one."""


@dataclass(frozen=True)
class _State:
    """Where the drafting model stands in each of ``B`` requests.

    Attributes:
        end: int ``[B]``, tokens in its layers.
        last: ``[B, hidden_size]``, what the next token's logits are computed from.
        hidden: ``[B, hidden_size]``, the hidden state of the last token.
    """

    end: np.ndarray
    last: torch.Tensor
    hidden: torch.Tensor


_Base = DraftModelProposer if TYPE_CHECKING else object


class BoundedDrafter(_Base):
    """Mixin for vLLM's proposers that run a model.

    Args:
        runner: vLLM's model runner.

    Attributes:
        drafts: the tokens that may be undone; set by the worker.
        builders: the metadata builders of the drafting model's layers, one for each kind.
    """

    drafts: ModelDrafts
    builders: Sequence[StepBuilder] = ()

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        # Near this length vLLM would skip the drafter, and its layers would miss tokens.
        runner.effective_drafter_max_model_len = runner.max_model_len + self.num_speculative_tokens

    @property
    def layer_names(self) -> set[str]:
        """The drafting model's attention layers, once it is loaded."""
        return getattr(self, "_draft_attn_layer_names", set())

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
        self.draft_attn_groups = []  # the profile of CUDA graphs has had some
        for groups in self._runner.attn_groups:
            own = [group for group in groups if self.layer_names.issuperset(group.layer_names)]
            self.draft_attn_groups += own
            groups[:] = [group for group in groups if group not in own]
        self.kv_cache_gid = self.draft_attn_groups[0].kv_cache_group_id
        builders: list[Any] = [group.get_metadata_builder() for group in self.draft_attn_groups]
        self.builders = sorted(builders, key=lambda one: one.kv_cache_spec.window is not None)

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
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Run the drafting model on a step's accepted tokens, and draft what follows them.

        Returns:
            int ``[num_reqs, num_speculative_tokens]``. Requests whose prompt is not complete have
            rows without meaning, which the scheduler ignores.
        """
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        place = common.query_start_loc_cpu.numpy()[: num_reqs + 1].astype(np.int64)
        assert common.seq_lens_cpu_upper_bound is not None, "runners set it"
        end = common.seq_lens_cpu_upper_bound.numpy()[:num_reqs].astype(np.int64)
        first = end - np.diff(place)
        if num_rejected_tokens_gpu is not None:
            end -= num_rejected_tokens_gpu.cpu().numpy()
        asked = ~self._runner.discard_request_mask.np[:num_reqs]
        given = target_token_ids, target_hidden_states, next_token_ids, mm_embed_inputs
        state = self._run_accepted(common, first, end, asked, place, *given)
        drafts: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for i in range(num_speculative_tokens):
            if i > 0:
                state = self._run_one_more(common, asked, drafts[-1], state)
            sampled, probabilities = self._sample_draft_tokens(state.last, sampling_metadata)
            drafts.append(sampled)
            probs += [] if probabilities is None else [probabilities]
        for name, stop in zip(self._runner.input_batch.req_ids, state.end.tolist(), strict=True):
            self.drafts.ran(name, stop)
        self._last_draft_probs = torch.stack(probs, dim=1) if probs else None
        if not drafts:
            return next_token_ids.new_empty(num_reqs, 0)
        return torch.stack(drafts, dim=1)

    def _run_accepted(
        self,
        common: CommonAttentionMetadata,
        first: np.ndarray,
        end: np.ndarray,
        asked: np.ndarray,
        place: np.ndarray,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        sampled: torch.Tensor,
        pictures: Pictures | None,
    ) -> _State:
        """Run the target's accepted tokens, and in a draft model those sampled, too.

        Args:
            first, end: int ``[B]``, the accepted tokens ``[first, end)``.
            asked: bool ``[B]``, whether a request has a sampled token.
            place: int ``[B + 1]``, the requests' first tokens in the step.
            token_ids: int ``[num_tokens]``, the step's.
            hidden: ``[num_tokens, hidden_size]``, the target's hidden states.
            sampled: int ``[B]``.
            pictures: of the step's tokens, a token earlier, as EAGLE's and MTP's layers see them.
        """
        batch, shifts = self._runner.input_batch, self.pass_hidden_states_to_model
        prompt = first < batch.num_prompt_tokens[: len(first)]
        # The sampled token is a stride of its own, and no part of a prompt's last one.
        apart = not shifts and bool((asked & prompt).any())
        num, rows = end - first, np.arange(len(first))
        kept = _ranges(place[:-1], num)
        source, last = [token_ids, sampled.to(token_ids.dtype)], np.full(len(rows), -1)
        if not apart:
            last[asked] = len(token_ids) + rows[asked]
        if shifts and not asked.all():  # prompts that go on
            last[~asked] = len(token_ids) + len(rows) + np.arange((~asked).sum())
            following = batch.token_ids_cpu[rows[~asked], end[~asked]]
            source.append(self._sent(following).to(token_ids.dtype))
        order = _followed(_ranges(place[:-1] + shifts, num - shifts), num - shifts, last)
        length = num - shifts + (last >= 0)
        passed = self._combined(hidden[self._sent(kept)]) if shifts else None
        if pictures is not None:
            embeds, part_of = pictures
            seen = part_of.to(hidden.device)[self._sent(kept)]
            pictures = (embeds, seen) if shifts else None
        tokens = torch.cat(source)[self._sent(order)]
        output = self._run(common, first, length, tokens, prompt, passed, pictures)
        at = self._sent(length.cumsum() - 1)
        state = _State(first + length, *(states[at] for states in output))
        return self._run_one_more(common, asked, sampled, state) if apart else state

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(array), self.device)

    def _combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as the drafting model takes them."""
        model: Any = self.model
        return model.combine_hidden_states(hidden) if self.method == "eagle3" else hidden

    def _run_one_more(
        self,
        common: CommonAttentionMetadata,
        asked: np.ndarray,
        token_ids: torch.Tensor,
        state: _State,
    ) -> _State:
        """Run one token more of the requests that are asked for drafts and have room for it.

        Args:
            token_ids: int ``[B]``, the tokens.
        """
        runs = asked & self._have_room(common, state.end + 1)
        if not runs.any():
            return state
        length, prompt = runs.astype(np.int64), np.zeros_like(runs)
        if runs.all():
            output = self._run(common, state.end, length, token_ids, prompt, state.hidden)
            return _State(state.end + length, *output)
        rows = self._sent(np.flatnonzero(runs))
        last, hidden = self._run(
            common, state.end, length, token_ids[rows], prompt, state.hidden[rows]
        )
        return _State(
            state.end + length,
            last=state.last.index_copy(0, rows, last),
            hidden=state.hidden.index_copy(0, rows, hidden),
        )

    def _have_room(self, common: CommonAttentionMetadata, end: np.ndarray) -> np.ndarray:
        """bool ``[B]``: whether the pages that requests hold have slots for ``end`` tokens.

        They do up to the end of the longest answer. Drafts behind it would have no use.
        """
        (table, *_) = self._runner.input_batch.block_table.block_tables
        held, fits = table.num_blocks_per_row[: len(end)], np.ones(len(end), dtype=bool)
        for builder in self.builders:
            fits &= builder.peaks(common, end) <= held * builder.kv_cache_spec.page_slots
        return fits

    def _run(
        self,
        common: CommonAttentionMetadata,
        first: np.ndarray,
        length: np.ndarray,
        token_ids: torch.Tensor,
        prompt: np.ndarray,
        passed: torch.Tensor | None,
        pictures: Pictures | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens ``[first, first + length)``.

        Args:
            first, length: int ``[B]``.
            token_ids: int ``[num_tokens]``, request after request.
            prompt: bool ``[B]``, whether they are part of a prompt.
            passed: ``[num_tokens, hidden_size]``, hidden states that EAGLE and MTP take.
            pictures: embeddings of tokens that are parts of pictures.

        Returns:
            As ``_State.last`` and ``_State.hidden``, of all tokens.
        """
        starts = torch.from_numpy(np.append(0, length.cumsum()).astype(np.int32))
        ends, num = torch.from_numpy((first + length).astype(np.int32)), len(token_ids)
        own = common.replace(
            query_start_loc=sent(starts, self.device),
            query_start_loc_cpu=starts,
            seq_lens=sent(ends, self.device),
            seq_lens_cpu_upper_bound=ends,
            num_actual_tokens=num,
            max_query_len=int(length.max()),
            max_seq_len=int(ends.max()),
            is_prefilling=torch.from_numpy(prompt),
        )
        metadata: dict[str, Any] = {}
        for builder in self.builders:
            metadata |= dict.fromkeys(builder.layer_names, builder.build(0, own))
        mode, padded, _ = self._determine_batch_execution_and_padding(num)
        inputs = self._inputs(token_ids.int(), passed, pictures)
        if mode != CUDAGraphMode.NONE:
            inputs = self._in_buffers(inputs, padded)
        # The model reads the positions that its first builder has set (``step/positions.py``).
        inputs["positions"] = self._unread_positions(padded)
        if self.eplb_state is not None:
            self.eplb_state.prepare_forward(self.draft_model_config, num)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=padded, cudagraph_runtime_mode=mode
        ):
            out: Any = self.model(**inputs)
        last, hidden = out if self.model_returns_tuple() else (out, out)
        return last[:num], hidden[:num]

    def _inputs(
        self, token_ids: torch.Tensor, passed: torch.Tensor | None, pictures: Pictures | None
    ) -> dict[str, torch.Tensor | None]:
        """What the model takes; with a target that sees pictures, embeddings of all tokens."""
        inputs: dict[str, torch.Tensor | None] = {"input_ids": token_ids, "inputs_embeds": None}
        if self.supports_mm_inputs:
            embeds, part_of = pictures or (None, None)
            model: Any = self.model
            inputs["input_ids"], inputs["inputs_embeds"] = (
                None,
                model.embed_input_ids(
                    token_ids, multimodal_embeddings=embeds, is_multimodal=part_of
                ),
            )
        if self.pass_hidden_states_to_model:
            inputs["hidden_states"] = passed
        return inputs

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
        return torch.empty(*axes, num, dtype=torch.int64, device=self.device)


def _ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: for each row the numbers from its begin on, row after row."""
    offsets = np.append(0, lengths.cumsum()[:-1])
    return np.repeat(begins - offsets, lengths) + np.arange(lengths.sum())


def _followed(values: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Rows of ``values``, one after the other, each followed by its ``last``, unless that is -1."""
    follow = last >= 0
    return np.insert(values, lengths.cumsum()[follow], last[follow])


class BoundedDraftModel(BoundedDrafter, DraftModelProposer):
    """A smaller model of the same vocabulary."""


class BoundedEagle(BoundedDrafter, EagleProposer):
    """Layers behind the target's: EAGLE, EAGLE-3 and MTP."""


BOUNDED: dict[type, Any] = {DraftModelProposer: BoundedDraftModel, EagleProposer: BoundedEagle}
"""Our proposers by vLLM's."""
