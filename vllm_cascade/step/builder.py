# SPDX-License-Identifier: Apache-2.0
"""The metadata builder that plans each step before the forward pass, shared by all devices.

Each device adds how it mirrors the plan (``cpu/builder.py``, ``cuda/builder.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from vllm.config import SchedulerConfig, VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.cache.transfer import sent
from vllm_cascade.policies.random import drawn
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.recall.stores import UnitStores
from vllm_cascade.step.drafts import Drafted, Drafts
from vllm_cascade.step.inputs import Undone
from vllm_cascade.step.plan import describe
from vllm_cascade.step.positions import CachePositions
from vllm_cascade.step.requests import Requests
from vllm_cascade.step.rows import RequestTokens, Step

Metadata = TypeVar("Metadata", bound=AttentionMetadata)


def step_of(
    firsts: Sequence[int], lengths: Sequence[int], prefilling: Sequence[bool], table: torch.Tensor
) -> CommonAttentionMetadata:
    """What vLLM says of a step on the device of ``table``.

    Args:
        firsts: tokens of each request before the step; ``lengths``: in it.
        prefilling: whether each request's tokens are its prompt's.
        table: int32 ``[B, P]``, pages.
    """
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = torch.tensor(np.add(firsts, lengths), dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=offsets.to(table.device, non_blocking=True),
        query_start_loc_cpu=offsets,
        seq_lens=ends.to(table.device, non_blocking=True),
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=int(ends.max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(0, device=table.device),
        is_prefilling=torch.tensor(prefilling),
    )


@dataclass
class StepCounters:
    """Counts of a policy's work in this process, summed over requests (not over layers)."""

    steps: int = 0
    tokens: int = 0
    strides: int = 0
    evicted_tokens: int = 0


class StepBuilder(AttentionMetadataBuilder[Metadata]):
    """Base class of the devices' builders. A device implements ``make_tables``, ``rules_at`` and
    vLLM's ``build``.

    Attributes:
        schedule: schedule of this builder's layers: the engine's, or that of their window.
        engine_schedule: the engine's schedule, that of rows without a request.
        requests: maps a step's rows to requests; set by the worker.
        positions: cache positions, which the model sees instead of vLLM's positions.
        stores: evicted units; set by the worker for policies with recall.
        drafts: draft tokens of the step; set by the worker with speculative decoding.
        publishes: whether this builder writes ``positions``. If not, the builder of another kind
            of layer does.
    """

    reorder_batch_threshold: int | None = None  # rows keep the runner's order

    kv_cache_spec: KVPolicySpec
    stores: UnitStores | None = None
    drafts: Drafts | None = None

    def __init__(
        self,
        kv_cache_spec: KVPolicySpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.schedule = kv_cache_spec.schedule
        self.engine_schedule = kv_cache_spec.engine_schedule
        self.requests = Requests()
        limits = vllm_config.scheduler_config
        # A drafting model also gets the token that each request has sampled.
        most = limits.max_num_batched_tokens + kv_cache_spec.drafting * limits.max_num_seqs
        self.positions = CachePositions(most, device)
        self.publishes = True
        self.counters = StepCounters()
        self.make_tables(limits)

    def follow(self, first: "StepBuilder") -> None:
        """Share the positions that ``first``, the builder of another kind of layer, writes."""
        self.positions, self.publishes = first.positions, False

    def make_tables(self, limits: SchedulerConfig) -> None:
        """Allocate the device's state across steps; called once, at the end of ``__init__``."""
        raise NotImplementedError

    def rules_at(self, schedule: Schedule) -> int:
        """First row of a schedule's further rules in the device's rule table."""
        raise NotImplementedError

    def plan(self, common: CommonAttentionMetadata) -> Step:
        """Plan the step that vLLM is about to run; count it and publish its positions."""
        tokens = self._tokens(common)
        step = describe(tokens, self.schedule.policy.prefill_stride, self.rules_at)
        if len(step.positions) and self.publishes:
            self.positions.fill(torch.from_numpy(step.positions))
        counters = self.counters
        counters.steps += 1
        counters.tokens += len(step.positions)
        counters.strides += sum(map(len, step.waves))
        counters.evicted_tokens += step.evicted
        return step

    def undone(self, rejected: Sequence[Drafted], blocks: Sequence[Sequence[int]]) -> Undone:
        """Rejected drafts as this builder's layers undo them; they no longer count.

        Args:
            blocks: the requests' block numbers.
        """
        rows = np.zeros((len(rejected), 4), dtype=np.int32)
        table = np.zeros((len(rejected), max(map(len, blocks))), dtype=np.int32)
        for i, one in enumerate(rejected):
            schedule = self.requests.schedule_of(one.name)
            if self.kv_cache_spec.window is not None:
                schedule = self.schedule
            rows[i] = one.place, one.num, schedule.peak_at(one.begin), one.begin
            table[i, : len(blocks[i])] = blocks[i]
            self.discount(schedule, one.begin, one.begin + one.num)
        return Undone(*(sent(torch.from_numpy(array), self.device) for array in (rows, table)))

    def discount(self, schedule: Schedule, begin: int, end: int) -> None:
        """No longer count single tokens ``[begin, end)``, which were drafts and are undone."""
        counters, number = self.counters, end - begin
        counters.tokens -= number
        counters.strides -= number
        counters.evicted_tokens -= schedule.count_at(begin) + number - schedule.count_at(end)

    def peaks(self, common: CommonAttentionMetadata, ends: np.ndarray) -> np.ndarray:
        """Slots that rows use in these layers after ``ends`` tokens: int ``[B]`` each."""
        schedules = self._frames(common, len(ends))
        if self.kv_cache_spec.window is not None:
            schedules = [self.schedule] * len(ends)
        peaks = [schedule.peak_at(t) for schedule, t in zip(schedules, ends.tolist(), strict=True)]
        return np.asarray(peaks)

    def _frames(self, common: CommonAttentionMetadata, num_rows: int) -> list[Schedule]:
        """The rows' schedules, which set positions."""
        schedules = self.requests.schedules(common)[:num_rows]
        return schedules + [self.engine_schedule] * (num_rows - len(schedules))

    def _tokens(self, common: CommonAttentionMetadata) -> RequestTokens:
        offsets = common.query_start_loc_cpu.numpy().astype(np.int64)
        length = np.diff(offsets)
        assert common.seq_lens_cpu_upper_bound is not None, "runners set it"
        ends = common.seq_lens_cpu_upper_bound.numpy()[: len(length)].astype(np.int64)
        schedules = self._frames(common, len(length))
        prefilling = self.requests.prefilling(common)
        tokens = RequestTokens(schedules, ends - length, length, offsets[:-1], prefilling)
        if self.kv_cache_spec.window is not None:
            same = [self.schedule] * len(length)
            return replace(tokens, schedules=same, frames=schedules)
        if not self.schedule.scoring.from_host:
            return tokens
        return replace(tokens, given=self._given(common, tokens))

    def _given(self, common: CommonAttentionMetadata, tokens: RequestTokens) -> np.ndarray:
        """Host scores, fp32 ``[num_tokens]``; 0 for requests that do not use them."""
        given = np.zeros(int(tokens.length.sum()), dtype=np.float32)
        for row in np.flatnonzero(tokens.length > 0).tolist():
            schedule = tokens.schedules[row]
            if schedule.scoring.from_host:
                first, num, place = (
                    int(column[row]) for column in (tokens.first, tokens.length, tokens.place)
                )
                given[place : place + num] = self.host_scores(
                    common, row, schedule, first, first + num
                )
        return given

    def host_scores(
        self, common: CommonAttentionMetadata, row: int, schedule: Schedule, begin: int, end: int
    ) -> np.ndarray:
        """Scores that a row's tokens ``[begin, end)`` set, fp32 ``[end - begin]``."""
        if schedule.scoring.source == "random":
            return drawn(schedule.scoring.seed, begin - schedule.lag, end - schedule.lag)
        return self.requests.token_scores(common, row, begin, end, schedule.lag)
