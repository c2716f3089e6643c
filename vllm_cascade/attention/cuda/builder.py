# SPDX-License-Identifier: Apache-2.0
"""A step for the Triton kernels: the plan's rows on the device.

A batch of single tokens is described by persistent buffers that the kernel ``schedule`` rewrites
from the sequence lengths, so that a captured CUDA graph finds the next step in the same memory and
the host reads nothing back. A step with a prompt in it is planned on the host as for any device
(``attention/step.py``), wave by wave, and runs outside full graphs; so does every step of a policy
that moves tokens, which rules do not say and PyTorch runs on the device.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.config import SchedulerConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, CommonAttentionMetadata

from vllm_cascade.attention.builder import StepBuilder
from vllm_cascade.attention.cuda.tables import DeviceTables
from vllm_cascade.attention.inputs import NOBODY, Stride, strides_of
from vllm_cascade.attention.step import Step, StrideRows, by_schedule, split
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import (
    CACHED,
    LENGTH,
    RECALL_COLUMNS,
    START,
    STEP_COLUMNS,
    STREAM,
)
from vllm_cascade.kernels.triton.schedule import schedule as write_steps
from vllm_cascade.policies import Schedule
from vllm_cascade.policies.execute import Plan
from vllm_cascade.recall.rings import Rings


@dataclass(frozen=True)
class DecodeRows:
    """Single tokens of ``B`` requests, on the device.

    Attributes:
        index: int64 ``[B]``, the tokens' places in the step; None: they are its first ``B``.
        steps: int32 ``[B, STEP_COLUMNS]``.
        table: int32 ``[B, P]`` block numbers.
        logit_scale: fp32 ``[B]``, or None.
        no_scores: fp32 ``[B, num_sets]`` zeros, the new scores of a policy that computes none.
        scored: int32 ``[B]``, ranks of the units that get a token's score from the host; negative:
            none.
        given: fp32 ``[B]``, these scores; None where the host gives none.
        recall: int32 ``[B, RECALL_COLUMNS]``; None where no evicted units come back.
    """

    index: torch.Tensor | None
    steps: torch.Tensor
    table: torch.Tensor
    logit_scale: torch.Tensor | None
    no_scores: torch.Tensor
    scored: torch.Tensor | None = None
    given: torch.Tensor | None = None
    recall: torch.Tensor | None = None


@dataclass(frozen=True)
class PrefillRows:
    """Longer strides of ``R`` requests whose scores are made and compared alike.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]``.
        table: int32 ``[R, P]``.
        fades: fp32 ``[R]``, ``decay ** num_tokens``.
        decays: fp32 ``[prefill_stride]``: ``weight * decay ** i``.
        strides: what the host knows of each.
        plans: how each is inserted, on the device; None where all tokens stay.
        recall: int32 ``[R, RECALL_COLUMNS]``; None where no evicted units come back.
    """

    steps: torch.Tensor
    table: torch.Tensor
    fades: torch.Tensor
    decays: torch.Tensor
    strides: list[Stride]
    plans: list[Plan | None]
    recall: torch.Tensor | None = None

    @property
    def max_length(self) -> int:
        return max(stride.num_tokens for stride in self.strides)

    @property
    def max_cached(self) -> int:
        """Rounded up to whole units: warm-up's rows, which only pad, may begin inside one."""
        unit = self.strides[0].schedule.unit
        return -(-max(stride.cached for stride in self.strides) // unit) * unit


@dataclass(frozen=True)
class DeviceWave:
    """One stride of each request: single tokens, longer ones, and those for PyTorch.

    ``rows`` is None where the host does not know them.
    """

    rows: StrideRows | None
    decode: DecodeRows | None
    prefill: list[PrefillRows]
    others: list[Stride]


@dataclass
class TritonMetadata(AttentionMetadata):
    """What every layer of this step shares.

    Attributes:
        table: int32 ``[B, P]``, the batch's block table.
        rules: int32 ``[n, 4]``, what steps have beyond their first victim rule.
        logit_scale: fp32 ``[num_tokens]`` over the step, or None.
    """

    spec: KVPolicySpec
    waves: list[DeviceWave]
    table: torch.Tensor
    rules: torch.Tensor
    logit_scale: torch.Tensor | None = None


class CUDABuilder(StepBuilder[TritonMetadata]):
    """Plans a step for the Triton kernels and publishes its cache positions.

    Attributes:
        stores: where evicted units wait; the worker sets it where a policy recalls them.
    """

    stores: Rings | None = None

    def make_tables(self, limits: SchedulerConfig) -> None:
        most, device = len(self.positions.buffer), self.device
        self.tables = DeviceTables(self.schedule, device, limits.max_num_seqs)
        self.steps = torch.full((most, STEP_COLUMNS), -1, dtype=torch.int32, device=device)
        self.engine_rows = torch.zeros(most, dtype=torch.int32, device=device)
        self.no_scores = torch.zeros(most, self.kv_cache_spec.num_sets, device=device)
        self.scale = torch.ones(most, device=device)
        self.scored = torch.full((most,), NOBODY, dtype=torch.int32, device=device)
        self.given = torch.zeros(most, device=device)
        self.recall = torch.zeros(most, RECALL_COLUMNS, dtype=torch.int32, device=device)
        self._decays: dict[int, torch.Tensor] = {}
        self._plans: dict[Plan, Plan] = {}

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVPolicySpec
    ) -> AttentionCGSupport:
        """Full graphs for decode, unless rules do not say all that the policy does."""
        if kv_cache_spec.schedule.moves_tokens:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def rules_at(self, schedule: Schedule) -> int:
        return self.tables.begin(schedule)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        common, table = common_attn_metadata, common_attn_metadata.block_table_tensor
        scale = None
        if common.max_query_len == 1 and not self.schedule.moves_tokens:
            waves = [DeviceWave(None, self._decode(common), [], [])]
        else:
            if common.is_prefilling is None:
                none = torch.zeros(common.num_reqs, dtype=torch.bool)
                common = common.replace(is_prefilling=none)
            step = self.plan(common)
            if step.logit_scale is not None:
                scale = self._sent(step.logit_scale)
            names = self.requests.names(common)
            planned = [self._with_recall(rows, names) for rows in step.waves]
            waves = [self._wave(rows, step, scale, table) for rows in planned]
        return TritonMetadata(self.kv_cache_spec, waves, table, self.tables.rules, scale)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(array), self.device)

    # --- a batch of single tokens, nothing of which the host has to know -------------------------

    def _decode(self, common: CommonAttentionMetadata) -> DecodeRows:
        num_rows, table = common.num_reqs, common.block_table_tensor
        schedules = self.requests.schedules(common)[:num_rows]
        schedules += [self.schedule] * (num_rows - len(schedules))
        schedule_of = self.engine_rows
        if any(schedule is not self.schedule for schedule in schedules):
            schedule_of = self._sent(self.tables.numbers(schedules))
        write_steps(
            seq_lens=common.seq_lens[:num_rows],
            blocks=table,
            tables=self.tables.schedules,
            schedule_of=schedule_of,
            steps=self.steps,
            positions=self.positions.buffer,
        )
        stream = common.seq_lens_cpu_upper_bound.numpy()[:num_rows].astype(np.int64) - 1
        self._count(schedules, stream)
        judged = self._judge(common, schedules, stream)
        if self.stores is not None:
            names, one = self.requests.names(common), np.ones_like(stream)
            rows = self.stores.plan(names, schedules, stream, one)
            self.recall[:num_rows].copy_(self._sent(rows), non_blocking=True)
        return DecodeRows(
            index=None,
            steps=self.steps[:num_rows],
            table=table[:num_rows],
            logit_scale=self.scale[:num_rows] if self.schedule.scales_logits else None,
            no_scores=self.no_scores[:num_rows],
            scored=self.scored[:num_rows] if judged else None,
            given=self.given[:num_rows] if judged else None,
            recall=None if self.stores is None else self.recall[:num_rows],
        )

    def _count(self, schedules: list[Schedule], stream: np.ndarray) -> None:
        """Count the step, and scale its logits where a policy does."""
        counters = self.counters
        counters.steps += 1
        scale = np.ones(len(stream), dtype=np.float32)
        for schedule, rows in by_schedule(schedules):
            rows = np.arange(len(stream))[rows]
            rows = rows[stream[rows] >= 0]
            t = stream[rows]
            cached = schedule.counts(t)
            counters.tokens += len(rows)
            counters.strides += len(rows)
            counters.evicted_tokens += int((cached + 1 - schedule.counts(t + 1)).sum())
            counters.moved_reads += int((cached < t).sum())
            if schedule.scales_logits:
                scale[rows] = schedule.policy.logit_scale(t, cached + 1)
        if self.schedule.scales_logits:
            self.scale[: len(scale)].copy_(self._sent(scale), non_blocking=True)

    def _judge(
        self, common: CommonAttentionMetadata, schedules: list[Schedule], stream: np.ndarray
    ) -> bool:
        """Scores of token ids into the buffers that a graph reads; False: the engine has none."""
        if self.schedule.scoring.source != "text":
            return False
        given = np.zeros(len(stream), dtype=np.float32)
        scored = np.full(len(stream), NOBODY, dtype=np.int32)
        for row in np.flatnonzero(stream >= 0).tolist():
            schedule, t = schedules[row], int(stream[row])
            if schedule.scoring.source == "text":
                (given[row],) = self.requests.token_scores(common, row, t, t + 1, schedule.lag)
                cached = int(schedule.positions(stream[row]))
                scored[row] = (cached - schedule.lag) // schedule.unit
        self.given[: len(given)].copy_(self._sent(given), non_blocking=True)
        self.scored[: len(scored)].copy_(self._sent(scored), non_blocking=True)
        return True

    # --- a step planned on the host ---------------------------------------------------------------

    def _with_recall(self, rows: StrideRows, names: list[str | None]) -> StrideRows:
        """A wave with what its strides do with evicted units; waves are planned in their order."""
        if self.stores is None:
            return rows
        whose = [names[row] if row < len(names) else None for row in rows.request.tolist()]
        stream, length = rows.steps[:, [STREAM, LENGTH]].astype(np.int64).T
        plan = self.stores.plan(whose, rows.schedules, stream, length)
        return replace(rows, recall=list(plan))

    def _recall(self, rows: StrideRows) -> torch.Tensor | None:
        return self._sent(np.stack(rows.recall)) if rows.recall else None

    def _wave(
        self, rows: StrideRows, step: Step, scale: torch.Tensor | None, table: torch.Tensor
    ) -> DeviceWave:
        single, longer = split(rows)
        decode = self._singles(single, step, scale, table) if len(single) else None
        moves = np.asarray([schedule.moves_tokens for schedule in longer.schedules], dtype=bool)
        alike: dict[int, list[int]] = {}
        for i in np.flatnonzero(~moves).tolist():
            alike.setdefault(longer.schedules[i].arithmetic, []).append(i)
        groups = [longer.select(np.asarray(same)) for same in alike.values()]
        prefill = [self._strides(group, step, table) for group in groups]
        moving = longer.select(np.flatnonzero(moves))
        others = strides_of(moving, step, table, self.kv_cache_spec.block_size)
        others = [stride for stride in others if int(stride.pages[0]) != 0]  # not a warm-up's
        return DeviceWave(rows, decode, prefill, others)

    def _mirrored(self, rows: StrideRows, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Step rows and their block tables on the device."""
        steps = self._sent(rows.steps.copy())  # its own: padding is marked in it
        blocks = table[self._sent(rows.request)]
        # Warm-up brings block tables of nothing but the null block: those rows are padding.
        steps[:, STREAM] = torch.where(blocks[:, 0] == 0, -1, steps[:, STREAM])
        return steps, blocks

    def _singles(
        self, rows: StrideRows, step: Step, scale: torch.Tensor | None, table: torch.Tensor
    ) -> DecodeRows:
        steps, blocks = self._mirrored(rows, table)
        place = rows.steps[:, START].astype(np.int64)
        index = self._sent(place)
        scored = given = None
        if step.given is not None:
            lag = np.asarray([schedule.lag for schedule in rows.schedules])
            text = np.asarray([schedule.scoring.source == "text" for schedule in rows.schedules])
            rank = (rows.steps[:, CACHED] - lag) // self.schedule.unit
            rank = np.where(text, rank, NOBODY)
            scored = self._sent(rank.astype(np.int32))
            given = self._sent(step.given[place])
        return DecodeRows(
            index=index,
            steps=steps,
            table=blocks,
            logit_scale=None if scale is None else scale[index],
            no_scores=self.no_scores[: len(rows)],
            scored=scored,
            given=given,
            recall=self._recall(rows),
        )

    def _strides(self, rows: StrideRows, step: Step, table: torch.Tensor) -> PrefillRows:
        steps, blocks = self._mirrored(rows, table)
        strides = strides_of(rows, step, table, self.kv_cache_spec.block_size)
        schedule = rows.schedules[0]
        fades = schedule.scoring.decay ** rows.steps[:, LENGTH].astype(np.float64)
        return PrefillRows(
            steps=steps,
            table=blocks,
            fades=self._sent(fades.astype(np.float32)),
            decays=self._decays_of(schedule),
            strides=strides,
            plans=[self._plan(stride) for stride in strides],
            recall=self._recall(rows),
        )

    def _decays_of(self, schedule: Schedule) -> torch.Tensor:
        if schedule.arithmetic not in self._decays:
            power = torch.arange(self.schedule.policy.prefill_stride, dtype=torch.float64)
            decays = schedule.scoring.weight * schedule.scoring.decay**power
            self._decays[schedule.arithmetic] = sent(decays.float(), self.device)
        return self._decays[schedule.arithmetic]

    def _plan(self, stride: Stride) -> Plan | None:
        """A stride's plan on the device; plans repeat with the schedule's period."""
        own = stride.cached - stride.recalled * stride.schedule.unit
        if own + stride.num_tokens == stride.schedule.count_at(stride.end):
            return None
        plan = stride.schedule.plan(stride.stream, stride.num_tokens)
        assert plan is not None, "something is deleted"
        if plan not in self._plans:
            if len(self._plans) >= 4096:
                self._plans.clear()
            groups = None if plan.groups is None else sent(plan.groups, self.device)
            self._plans[plan] = replace(plan, groups=groups)
        return self._plans[plan]
