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

Data-parallel engines that share a model's experts run it at the same time. So each runs the
drafting model equally often in a step: an engine with no token or request to run runs one padding
token. In a step without drafts each runs it once.

``proposers.py`` has the drafters of Model Runner V1, ``speculators.py`` those of V2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_cascade.cache.transfer import sent
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import ModelDrafts
from vllm_cascade.step.requests import Requests

Images = tuple[list[torch.Tensor], torch.Tensor]
"""Embeddings of a step's images, and bool ``[num_tokens]``: whether a token is part of one."""
States = tuple[torch.Tensor, torch.Tensor]
"""Of each token, ``[num_tokens, hidden_size]``: what the next one's logits are computed from, and
the hidden state."""
Sample = Callable[[torch.Tensor, np.ndarray, int], torch.Tensor]
"""Samples one draft for each request, int ``[B]``. Takes the states of the last tokens,
``[B, hidden_size]``, the number of tokens in the layers, int ``[B]``, and the draft's number."""


@dataclass(frozen=True)
class TargetStep:
    """A step of the target, of ``B`` requests, once its tokens are sampled.

    Attributes:
        common: vLLM's metadata.
        first, end: int ``[B]``, the accepted tokens ``[first, end)``.
        asked: bool ``[B]``, whether a request has a sampled token, and is to get drafts.
        prompt: bool ``[B]``, whether the accepted tokens are part of a prompt.
        token_ids: int ``[num_tokens]``, the step's.
        hidden: ``[num_tokens, hidden_size]``, the target's hidden states.
        sampled: int ``[B]``.
        following: int ``[number of others]``, the next token of each prompt that goes on.
        images: of the step's tokens, a token earlier, as EAGLE's and MTP's layers see them.
    """

    common: CommonAttentionMetadata
    first: np.ndarray
    end: np.ndarray
    asked: np.ndarray
    prompt: np.ndarray
    token_ids: torch.Tensor
    hidden: torch.Tensor
    sampled: torch.Tensor
    following: torch.Tensor
    images: Images | None = None

    @property
    def place(self) -> np.ndarray:
        """int64 ``[B + 1]``, the requests' first tokens in the step."""
        place = self.common.query_start_loc_cpu.numpy()
        return place[: len(self.first) + 1].astype(np.int64)


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


class BoundedDrafter:
    """Mixin for vLLM's drafters that run a model.

    Attributes:
        model: the drafting model.
        requests: the worker's requests; set by the worker.
        drafts: the tokens that may be undone; set by the worker.
        supports_mm_inputs: whether the target and the drafting model take images; set by vLLM.
        builders: the metadata builders of the drafting model's layers, one for each kind.
        shares_experts: whether other engines share the model's experts; set by ``bounded``.
    """

    model: Any
    device: torch.device
    supports_mm_inputs: bool
    requests: Requests
    drafts: ModelDrafts
    builders: Sequence[StepBuilder] = ()
    shares_experts = False
    _runs = 0
    """Of the model, in this step."""

    @property
    def layer_names(self) -> set[str]:
        """The drafting model's attention layers, once it is loaded."""
        raise NotImplementedError

    @property
    def sees_hidden_states(self) -> bool:
        """Whether the model's layers follow the target's: EAGLE and MTP."""
        raise NotImplementedError

    def call_model(
        self,
        metadata: dict[str, Any] | None,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        images: Images | None,
    ) -> States:
        """Run the model; it reads the positions that its first builder has set.

        Args:
            metadata: by layer; None: a dummy run.
            token_ids: int32 ``[num_tokens]``.
            hidden: ``[num_tokens, hidden_size]``, with ``sees_hidden_states``.
        """
        raise NotImplementedError

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as the model takes them."""
        raise NotImplementedError

    def draft(self, step: TargetStep, num: int, sample: Sample) -> list[torch.Tensor]:
        """Run the model on a step's accepted tokens, and draft what follows them.

        Returns:
            ``num`` drafts, int ``[B]`` each. Those of requests that are not asked for mean nothing.
        """
        state = self._run_accepted(step, alone=num == 0)
        drafts: list[torch.Tensor] = []
        for i in range(num):
            if i > 0:
                state = self._run_one_more(step, drafts[-1], state)
            drafts.append(sample(state.last, state.end, i))
        for name, end in zip(self.requests.names(step.common), state.end.tolist(), strict=True):
            if name is not None:
                self.drafts.ran(name, end)
        if self.shares_experts:
            hidden = self.combined(step.hidden[:1]) if self.sees_hidden_states else None
            self.run_padding(1, hidden, num)
        return drafts

    def run_padding(self, num_tokens: int, hidden: torch.Tensor | None, num: int) -> None:
        """Run padding until the model has run as often as in any step of ``num`` drafts.

        Args:
            num_tokens: of padding.
            hidden: ``[num_tokens, hidden_size]``, with ``sees_hidden_states``.
        """
        # In a draft model, the sampled token may be apart from those that the target has run.
        most = num if self.sees_hidden_states else num + 1
        for _ in range(most - self._runs):
            token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
            self.call_model(None, token_ids, hidden, None)
        self._runs = 0

    def inputs_of(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, images: Images | None
    ) -> dict[str, torch.Tensor | None]:
        """The model's arguments besides positions; tokens as embeddings if it takes images."""
        inputs: dict[str, torch.Tensor | None] = {"input_ids": token_ids, "inputs_embeds": None}
        if self.supports_mm_inputs:
            embeds, part_of = images or (None, None)
            inputs["inputs_embeds"] = self.model.embed_input_ids(
                token_ids, multimodal_embeddings=embeds, is_multimodal=part_of
            )
            inputs["input_ids"] = None
        if hidden is not None:
            inputs["hidden_states"] = hidden
        return inputs

    def take_builders(self, groups: Sequence[Any]) -> None:
        """Take the builders of vLLM's attention groups of the model's layers."""
        builders: list[Any] = [group.get_metadata_builder() for group in groups]
        self.builders = sorted(builders, key=lambda one: one.kv_cache_spec.window is not None)

    def _run_accepted(self, step: TargetStep, alone: bool) -> _State:
        """Run the target's accepted tokens, and in a draft model those sampled, too.

        Args:
            alone: whether nothing is drafted. Sampled tokens that would need a pass of their own
                are then left to the next step, which runs them again anyway.
        """
        place, num, shifts = step.place[:-1], step.end - step.first, self.sees_hidden_states
        # The sampled token is a stride of its own, and no part of a prompt's last one.
        apart = not shifts and bool((step.asked & step.prompt).any())
        rows, total = np.arange(len(num)), len(step.token_ids)
        last = np.full(len(num), -1)
        if not apart:
            last[step.asked] = total + rows[step.asked]
        if shifts:
            others = ~step.asked
            last[others] = total + len(num) + np.arange(others.sum())
        order = _followed(_ranges(place + shifts, num - shifts), num - shifts, last)
        source = [one.int() for one in (step.token_ids, step.sampled, step.following)]
        token_ids = torch.cat(source)[self.sent(order)]
        hidden = images = None
        if shifts:
            kept = self.sent(_ranges(place, num))
            hidden = self.combined(step.hidden[kept])
            if step.images is not None:
                embeds, part_of = step.images
                images = embeds, part_of.to(self.device)[kept]
        length = num - shifts + (last >= 0)
        states = self._run(step, step.first, length, token_ids, step.prompt, hidden, images)
        at = self.sent(length.cumsum() - 1)
        state = _State(step.first + length, *(values[at] for values in states))
        return self._run_one_more(step, step.sampled, state) if apart and not alone else state

    def _run_one_more(self, step: TargetStep, token_ids: torch.Tensor, state: _State) -> _State:
        """Run one token more of the requests that are asked for drafts and have room for it.

        Args:
            token_ids: int ``[B]``, the tokens.
        """
        runs = step.asked & self._have_room(step.common, state.end + 1)
        if not runs.any():
            return state
        length, prompt = runs.astype(np.int64), np.zeros_like(runs)
        token_ids, hidden, rows = token_ids.int(), state.hidden, None
        if not runs.all():
            rows = self.sent(np.flatnonzero(runs))
            token_ids, hidden = token_ids[rows], hidden[rows]
        passed = hidden if self.sees_hidden_states else None
        found = self._run(step, state.end, length, token_ids, prompt, passed)
        if rows is not None:
            before = state.last, state.hidden
            found = [a.index_copy(0, rows, b) for a, b in zip(before, found, strict=True)]
        return _State(state.end + length, *found)

    def _have_room(self, common: CommonAttentionMetadata, end: np.ndarray) -> np.ndarray:
        """bool ``[B]``: whether the pages that requests hold have slots for ``end`` tokens.

        They do up to the end of the longest answer. Drafts behind it would have no use.
        """
        names = self.requests.names(common)
        held = np.asarray([len(self.requests.blocks(name)) if name else 0 for name in names])
        fits = np.ones(len(end), dtype=bool)
        for builder in self.builders:
            fits &= builder.peaks(common, end) <= held * builder.kv_cache_spec.page_slots
        return fits

    def _run(
        self,
        step: TargetStep,
        first: np.ndarray,
        length: np.ndarray,
        token_ids: torch.Tensor,
        prompt: np.ndarray,
        hidden: torch.Tensor | None,
        images: Images | None = None,
    ) -> States:
        """Run tokens ``[first, first + length)``.

        Args:
            first, length: int ``[B]``.
            token_ids: int32 ``[num_tokens]``, request after request.
            prompt: bool ``[B]``, whether they are part of a prompt.
            hidden: ``[num_tokens, hidden_size]``, hidden states that EAGLE and MTP take.
            images: embeddings of tokens that are parts of images.
        """
        starts = torch.from_numpy(np.append(0, length.cumsum()).astype(np.int32))
        ends = torch.from_numpy((first + length).astype(np.int32))
        own = step.common.replace(
            query_start_loc=sent(starts, self.device),
            query_start_loc_cpu=starts,
            seq_lens=sent(ends, self.device),
            seq_lens_cpu_upper_bound=ends,
            num_actual_tokens=len(token_ids),
            max_query_len=int(length.max()),
            max_seq_len=int(ends.max()),
            is_prefilling=torch.from_numpy(prompt),
        )
        self._runs += 1 if self.shares_experts else 0
        metadata: dict[str, Any] = {}
        for builder in self.builders:
            metadata |= dict.fromkeys(builder.layer_names, builder.build(0, own))
        return self.call_model(metadata, token_ids, hidden, images)

    def sent(self, array: np.ndarray) -> torch.Tensor:
        """A host array on the model's device."""
        return sent(torch.from_numpy(array), self.device)


def _ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: for each row the numbers from its begin on, row after row."""
    offsets = np.append(0, lengths.cumsum()[:-1])
    return np.repeat(begins - offsets, lengths) + np.arange(lengths.sum())


def _followed(values: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Rows of ``values``, one after the other, each followed by its ``last``, unless that is -1."""
    follow = last >= 0
    return np.insert(values, lengths.cumsum()[follow], last[follow])
