# SPDX-License-Identifier: Apache-2.0
"""Maps the rows of a scheduling step to requests, for both model runners.

vLLM's metadata has the length of each row, but not its request. The model runners know the request:
V1 keeps requests in row order, with token ids on the host. V2 identifies a row by its index in a
table of requests, and keeps token ids on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.text_importance import TokenImportance


class Requests:
    """Rows without requests, as in a warm-up; base class of the runners' mappings."""

    def note(self, output: SchedulerOutput) -> None:
        """Record requests that start or end; called before every step."""

    def schedules(self, common: CommonAttentionMetadata) -> list[Schedule]:
        """The rows' schedules; rows beyond the list run under the engine's schedule."""
        return []

    def schedule_of(self, name: str) -> Schedule:
        """The schedule of a request that the runner knows."""
        raise KeyError(name)

    def blocks(self, name: str) -> list[int]:
        """Block numbers of a request that the runner knows, as of the previous step."""
        raise KeyError(name)

    def names(self, common: CommonAttentionMetadata) -> list[str | None]:
        """The rows' request ids; rows beyond the list have no request."""
        return []

    def all_dummies(self, common: CommonAttentionMetadata) -> bool:
        """Whether no row has a request, as in vLLM's dummy runs once the runner is known."""
        return False

    def prefilling(self, common: CommonAttentionMetadata) -> np.ndarray:
        """bool ``[B]``: whether a row's tokens are part of its prompt.

        Rows of padding may be missing.
        """
        assert common.is_prefilling is not None, "runners set it"
        return common.is_prefilling.numpy()

    def token_scores(
        self, common: CommonAttentionMetadata, row: int, begin: int, end: int, lag: int
    ) -> np.ndarray:
        """Host scores of a row's tokens (``TokenImportance.advance``); 0 without a request."""
        return np.zeros(end - begin, dtype=np.float32)


class NoRequests(Requests):
    """A dummy batch, run while other data-parallel engines have requests. All rows are padding."""

    def all_dummies(self, common: CommonAttentionMetadata) -> bool:
        return True


class RunnerRequests(Requests):
    """A runner's requests and their schedules.

    A request's schedule never changes: a prompt that grows (streaming input) has the schedule of
    its first part, and a preempted request that of its prompt without generated tokens.
    """

    def __init__(self, runner: Any, schedule: Schedule, importance: TokenImportance | None) -> None:
        self._runner, self._importance = runner, importance
        self._own = PerRequest(schedule)
        self._schedules: dict[str, Schedule] = {}

    def note(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._schedules.pop(name, None)
        if self._importance is not None:
            for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
                self._importance.forget(name)
        for new in output.scheduled_new_reqs:
            if new.req_id not in self._schedules:
                params = new.sampling_params
                extra_args = params.extra_args if params else None
                self._schedules[new.req_id] = self._own.schedule(extra_args, new.prompt_len)

    def schedule_of(self, name: str) -> Schedule:
        return self._schedules[name]


class DraftingRequests(Requests):
    """The same requests in the layers of a drafting model, which recall nothing."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def schedules(self, common: CommonAttentionMetadata) -> list[Schedule]:
        return [schedule.without_recall for schedule in self._requests.schedules(common)]

    def schedule_of(self, name: str) -> Schedule:
        return self._requests.schedule_of(name).without_recall

    def names(self, common: CommonAttentionMetadata) -> list[str | None]:
        return self._requests.names(common)

    def all_dummies(self, common: CommonAttentionMetadata) -> bool:
        return self._requests.all_dummies(common)


class RunnerV1Requests(RunnerRequests):
    """The rows of Model Runner V1, the only one on CPUs."""

    def schedules(self, common: CommonAttentionMetadata) -> list[Schedule]:
        return [self._schedules[name] for name in self._runner.input_batch.req_ids]

    def blocks(self, name: str) -> list[int]:
        return self._runner.requests[name].block_ids[0]

    def names(self, common: CommonAttentionMetadata) -> list[str | None]:
        return list(self._runner.input_batch.req_ids)

    def all_dummies(self, common: CommonAttentionMetadata) -> bool:
        return not self._runner.input_batch.req_ids

    def token_scores(
        self, common: CommonAttentionMetadata, row: int, begin: int, end: int, lag: int
    ) -> np.ndarray:
        assert self._importance is not None
        batch = self._runner.input_batch
        if row >= batch.num_reqs:
            return super().token_scores(common, row, begin, end, lag)
        name, tokens = batch.req_ids[row], batch.token_ids_cpu[row]
        return self._importance.advance(name, tokens, begin, end, lag)


@dataclass
class _Request:
    """A request as the scheduler sent it, with the token ids and block numbers known so far."""

    prompt_len: int
    tokens: np.ndarray
    blocks: list[int]
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)

    def append(self, token: int) -> None:
        if self.num_tokens == len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * self.num_tokens + 16)
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1


class RunnerV2Requests(RunnerRequests):
    """The rows of Model Runner V2, the default on GPUs.

    This runner keeps neither sampling parameters nor token ids on the host, so ``note`` records
    them from the scheduler's output. The scheduler sends a resumed request again and counts its
    generated tokens as prefill. Policies still treat these as single tokens, as in the first run.
    """

    def __init__(self, runner: Any, schedule: Schedule, importance: TokenImportance | None) -> None:
        super().__init__(runner, schedule, importance)
        self._requests: dict[str, _Request] = {}
        self._sampled: np.ndarray | None = None
        self._batch: np.ndarray | None = None

    def watch(self, model_state: Any) -> None:
        """Record the rows of each batch that the runner prepares attention for.

        vLLM's metadata does not have them where a model has recurrent layers.
        """
        stock = model_state.prepare_attn

        def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = input_batch.idx_mapping_np
            return stock(input_batch, *args, **kwargs)

        model_state.prepare_attn = prepare_attn

    def _indices(self, common: CommonAttentionMetadata) -> list[int]:
        """The rows' indices in the runner's table; rows beyond the list pad the batch."""
        known = self._batch if common.req_idx is None else common.req_idx
        return [] if known is None else known.tolist()

    def note(self, output: SchedulerOutput) -> None:
        super().note(output)
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self._importance is not None else ()
            tokens = np.asarray(tokens, dtype=np.int64)
            self._requests[new.req_id] = _Request(new.prompt_len, tokens, [*new.block_ids[0]])
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._requests[name].blocks += blocks[0] if blocks else []
        self._sampled = None

    def names(self, common: CommonAttentionMetadata) -> list[str | None]:
        """The rows' request ids; None for warm-up rows without a request."""
        return [self._name(index) for index in self._indices(common)]

    def blocks(self, name: str) -> list[int]:
        return self._requests[name].blocks

    def _name(self, index: int) -> str | None:
        names: Mapping[int, str] = self._runner.req_states.index_to_req_id
        return names.get(index)

    def all_dummies(self, common: CommonAttentionMetadata) -> bool:
        return not any(name in self._requests for name in self.names(common))

    def schedules(self, common: CommonAttentionMetadata) -> list[Schedule]:
        return [self._schedules.get(name or "", self._own.engine) for name in self.names(common)]

    def prefilling(self, common: CommonAttentionMetadata) -> np.ndarray:
        prefilling = super().prefilling(common).copy()
        num = len(prefilling)  # a full graph's batch is padded in all but this
        assert common.seq_lens_cpu_upper_bound is not None, "runners set it"
        ends = common.seq_lens_cpu_upper_bound.numpy()[:num]
        firsts = ends - np.diff(common.query_start_loc_cpu.numpy())[:num]
        for row, name in enumerate(self.names(common)):
            request = self._requests.get(name or "")
            if request is not None:
                prefilling[row] = firsts[row] < request.prompt_len
        return prefilling

    def token_scores(
        self, common: CommonAttentionMetadata, row: int, begin: int, end: int, lag: int
    ) -> np.ndarray:
        assert self._importance is not None
        indices = self._indices(common)
        index = indices[row] if row < len(indices) else -1
        name = self._name(index)
        request = self._requests.get(name or "")
        if name is None or request is None:
            return super().token_scores(common, row, begin, end, lag)
        if end > request.num_tokens:
            assert end == request.num_tokens + 1, "a step decodes one token a request"
            request.append(self._last_sampled(index))
        return self._importance.advance(name, request.tokens, begin, end, lag)

    def _last_sampled(self, index: int) -> int:
        """The last token that a request sampled; copied once a step, while the device is idle."""
        sampled = self._sampled
        if sampled is None:
            sampled = self._runner.req_states.last_sampled_tokens[:, 0].cpu().numpy()
            self._sampled = sampled
        return int(sampled[index])
