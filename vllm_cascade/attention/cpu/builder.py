# SPDX-License-Identifier: Apache-2.0
"""Builds a step's metadata for the CPU: the plan's arrays with the requests' pages."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import SchedulerConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
)

from vllm_cascade.kernels.columns import STREAM
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.recall.stores import Stores
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.inputs import Singles, Stride, singles_of, strides_of
from vllm_cascade.step.plan import RuleBook
from vllm_cascade.step.recall import RecallStride, plan_logs
from vllm_cascade.step.rows import StrideRows, split


@dataclass(frozen=True)
class CPUWave:
    """At most one stride per request: single tokens, and longer strides."""

    rows: StrideRows
    singles: Singles | None
    strides: list[Stride]


@dataclass
class CPUMetadata(AttentionMetadata):
    """Metadata that all layers of a step share; ``table`` is the batch's block table.

    The last four are for vLLM's layers of multi-head latent attention.

    Attributes:
        singles: the waves' single tokens, if they have nothing else; empty otherwise.
        recalls: whether any stride selects units or stores evicted ones.
    """

    waves: list[CPUWave]
    singles: list[Singles]
    recalls: bool
    table: torch.Tensor
    num_actual_tokens: int
    num_prefills: int
    num_decodes: int = 0
    num_decode_tokens: int = 0


class CPUBuilder(StepBuilder[CPUMetadata]):
    """Plans a step for the CPU."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    stores: Stores | None = None

    def make_tables(self, limits: SchedulerConfig) -> None:
        self._rules = RuleBook(limits.max_num_seqs)

    def rules_at(self, schedule: Schedule) -> int:
        return self._rules.begin(schedule)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUMetadata:
        table, size = common_attn_metadata.block_table_tensor, self.kv_cache_spec.page_slots
        self._rules.prune()
        step = self.plan(common_attn_metadata)
        recall: list[dict[int, RecallStride]] = [{}] * len(step.waves)
        if self.stores is not None:
            recall = plan_logs(step.waves, table, self.stores.logs)
        waves = []
        names = [] if self.drafts is None else self.requests.names(common_attn_metadata)
        for rows, recalling in zip(step.waves, recall, strict=True):
            single, longer = split(rows)
            singles = None
            if len(single):
                saves = None
                if self.drafts is not None:
                    saves = self.drafts.saves(names, single.request, single.steps[:, STREAM])
                rules = self._rules.rules
                singles = singles_of(single, step, table, rules, size, recalling, saves)
            strides = strides_of(longer, step, table, size, recalling)
            waves.append(CPUWave(rows, singles, strides))
        singles = [wave.singles for wave in waves if wave.singles is not None and not wave.strides]
        singles = singles if len(singles) == len(waves) else []
        common = common_attn_metadata
        recalls = any(plan.moves for planned in recall for plan in planned.values())
        counts = common.num_actual_tokens, common.num_reqs
        return CPUMetadata(waves, singles, recalls, table, *counts)
