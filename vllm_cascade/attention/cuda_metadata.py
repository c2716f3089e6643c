# SPDX-License-Identifier: Apache-2.0
"""A scheduling step for the Triton kernels: step rows on the device instead of Python objects.

A batch of single tokens is described by persistent buffers that ``kernels.schedule`` rewrites from
the sequence lengths, so that a captured CUDA graph finds the next step in the same memory and the
host reads nothing back. A step with a prompt in it, or of a policy that deletes several tokens at
once by score, is planned on the host as on the CPU, wave by wave, and runs outside full graphs.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
)

from vllm_cascade.attention.metadata import KVPolicyMetadataBuilder, cut_strides
from vllm_cascade.kernels.schedule import Schedule, schedule
from vllm_cascade.kernels.tiles import STEP_COLUMNS
from vllm_cascade.paging import KVPolicySpec
from vllm_cascade.policies import Policy, stride_plan
from vllm_cascade.policies.base import step_tables


@dataclass(frozen=True)
class Tokens:
    """Single tokens of ``B`` requests.

    Attributes:
        index: int64 ``[B]``, the tokens' places in the step; None: they are its first ``B``.
        steps: int32 ``[B, 7]`` step rows (``kernels.tiles``).
        table: int32 ``[B, P]`` block numbers.
        logit_scale: fp32 ``[B]``, or None.
        no_scores: fp32 ``[B, num_sets]`` zeros, the new scores of a policy that computes none.
    """

    index: torch.Tensor | None
    steps: torch.Tensor
    table: torch.Tensor
    logit_scale: torch.Tensor | None
    no_scores: torch.Tensor


@dataclass(frozen=True)
class StridePlan:
    """What the host knows about one stride: where it begins, and the policy's own plan.

    ``place`` is its first token's place in the step; ``plan`` is None where nothing is deleted.
    """

    place: int
    stream: int
    cached: int
    num_tokens: int
    plan: object | None


@dataclass(frozen=True)
class Strides:
    """Strides of ``R`` requests, of which at most one token each is a stride of one.

    Attributes:
        steps: int32 ``[R, 7]`` step rows.
        table: int32 ``[R, P]``.
        fades: fp32 ``[R]``, ``decay ** num_tokens``.
        plans: one a request.
    """

    steps: torch.Tensor
    table: torch.Tensor
    fades: torch.Tensor
    plans: list[StridePlan]

    @property
    def max_length(self) -> int:
        return max(plan.num_tokens for plan in self.plans)

    @property
    def max_cached(self) -> int:
        return max(plan.cached for plan in self.plans)


@dataclass(frozen=True)
class DeviceWave:
    tokens: Tokens | None
    strides: Strides | None


@dataclass
class TritonMetadata(AttentionMetadata):
    """What every layer of this step shares.

    ``decays`` is fp32 ``[prefill_stride]``: ``weight * decay ** i``. ``logit_scale`` is fp32
    ``[num_tokens]`` over the step, or None.
    """

    policy: Policy
    spec: KVPolicySpec
    waves: list[DeviceWave]
    decays: torch.Tensor
    logit_scale: torch.Tensor | None = None


def device_schedule(policy: Policy, device: torch.device) -> Schedule | None:
    """The policy's step tables for the kernels; None if some step is more than one victim rule.

    A batch step that deletes the same contiguous ranks whatever the scores is a rule too.
    """
    tables = step_tables(policy)
    rows = len(tables.lo)
    peaks = np.maximum.accumulate(tables.count)
    evicts = (tables.hi > tables.lo).astype(np.int32)
    columns = np.stack([tables.lo, tables.hi, evicts, tables.count, peaks], axis=1)
    batch = np.zeros(rows, dtype=bool) if tables.batch is None else tables.batch
    if batch.any() and policy.uses_scores:
        return None
    for row in np.flatnonzero(batch):
        keep = policy.keep(torch.zeros(1, policy.count(int(row)) + 1), policy.plan(int(row), 1))
        gone = (~keep[0]).nonzero().flatten().tolist()
        if gone != list(range(gone[0], gone[-1] + 1)):
            return None
        columns[row, :3] = gone[0], gone[-1] + 1, len(gone)
    table = torch.from_numpy(columns.astype(np.int32)).to(device)
    return Schedule(table.contiguous(), tables.transient)


def moved(value: Any, device: torch.device) -> Any:
    """A plan with every tensor in it on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **changes)
    return value


class TritonMetadataBuilder(KVPolicyMetadataBuilder):
    """Plans a step for the Triton kernels and publishes its cache positions."""

    reorder_batch_threshold: int | None = None

    def __init__(
        self,
        kv_cache_spec: KVPolicySpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        policy, most = self.policy, len(self.positions.buffer)
        rules = device_schedule(policy, torch.device("cpu"))
        self._host_rules = None if rules is None else rules.table.numpy()
        self.schedule: Schedule | None = None
        if rules is not None:
            self.schedule = Schedule(rules.table.to(device), rules.transient)
        self._scale_rows: torch.Tensor | None = None
        self.steps = torch.full((most, STEP_COLUMNS), -1, dtype=torch.int32, device=device)
        self.no_scores = torch.zeros(most, kv_cache_spec.num_sets, device=device)
        self.scale = torch.ones(most, device=device)
        power = torch.arange(max(policy.prefill_stride, 1), dtype=torch.float64)
        self.decays = (policy.weight * policy.decay**power).float().to(device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVPolicySpec
    ) -> AttentionCGSupport:
        """Full graphs for decode, unless the policy deletes batches of tokens by their scores."""
        if device_schedule(kv_cache_spec.policy, torch.device("cpu")) is None:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        common = common_attn_metadata
        if common.max_query_len == 1 and self.schedule is not None:
            return self._decode(common)
        assert all(policy == self.policy for policy in self.row_policies()), "refused on CUDA"
        self._scale_rows = None
        if common.is_prefilling is None:
            common = common.replace(is_prefilling=torch.zeros(common.num_reqs, dtype=torch.bool))
        self._logit_scales(common)
        planned = super().build(common_prefix_len, common, fast_build)
        return TritonMetadata(
            self.policy, self.kv_cache_spec, planned.waves, self.decays, self._scale_rows
        )

    # --- a batch of single tokens, nothing of which the host has to know -------------------------

    def _decode(self, common: CommonAttentionMetadata) -> TritonMetadata:
        num_rows, table = common.num_reqs, common.block_table_tensor
        seq_lens = common.seq_lens[:num_rows]
        schedule(seq_lens, table, self.schedule, self.steps, self.positions.buffer)
        stream = common.seq_lens_cpu_upper_bound.numpy()[:num_rows].astype(np.int64) - 1
        scale = self.policy.logit_scale(
            np.maximum(stream, 0), self.policy.counts(np.maximum(stream, 0)) + 1
        )
        if scale is not None:
            self.scale[:num_rows].copy_(self._sent(scale.astype(np.float32)), non_blocking=True)
        self._count_tokens(stream[stream >= 0])
        tokens = Tokens(
            index=None,
            steps=self.steps[:num_rows],
            table=table[:num_rows],
            logit_scale=None if scale is None else self.scale[:num_rows],
            no_scores=self.no_scores[:num_rows],
        )
        waves = [DeviceWave(tokens, None)]
        return TritonMetadata(self.policy, self.kv_cache_spec, waves, self.decays)

    def _count_tokens(self, stream: np.ndarray) -> None:
        counters, cached = self.counters, self.policy.counts(stream)
        counters.steps += 1
        counters.tokens += len(stream)
        counters.strides += len(stream)
        counters.evicted_tokens += int((cached + 1 - self.policy.counts(stream + 1)).sum())
        counters.moved_reads += int((cached < stream).sum())

    # --- a step planned on the host ---------------------------------------------------------------

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """A small array on the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _logit_scales(self, common: CommonAttentionMetadata) -> None:
        """Factors of all tokens of the step, in its order."""
        offsets = common.query_start_loc_cpu.numpy()
        lengths = np.diff(offsets)
        ends = common.seq_lens_cpu_upper_bound.numpy()[: len(lengths)].astype(np.int64)
        parts = []
        for row in np.flatnonzero(lengths > 0):
            first, end = int(ends[row] - lengths[row]), int(ends[row])
            stride, prefilling = self.policy.prefill_stride, bool(common.is_prefilling[row])
            bounds = np.asarray(cut_strides(first, end, stride, prefilling))
            stream = np.arange(first, end)
            begins = np.repeat(bounds[:-1], np.diff(bounds))
            scale = self.policy.logit_scale(
                stream, self.policy.counts(begins) + stream - begins + 1
            )
            if scale is None:
                return
            parts.append(scale)
        if parts:
            self._scale_rows = self._sent(np.concatenate(parts).astype(np.float32))

    def _wave(self, rows: list[Any], depth: int, table: torch.Tensor) -> DeviceWave:
        singles, strides = [], []
        for row in rows:
            if depth + 1 >= len(row.bounds):
                continue
            begin, end = row.bounds[depth], row.bounds[depth + 1]
            single = end - begin == 1
            if single and self._one_rule(begin):
                singles.append((row, begin, end))
            else:
                strides.append((row, begin, end))
        return DeviceWave(
            self._tokens(singles, table) if singles else None,
            self._strides(strides, table) if strides else None,
        )

    def _one_rule(self, t: int) -> bool:
        return self.schedule is not None or not self.policy.batches(np.asarray(t))

    def _step_rows(
        self, parts: list[tuple[Any, int, int]], table: torch.Tensor, last: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Step rows and their block tables; ``last`` are the columns that depend on the kind."""
        begins = np.asarray([begin for _, begin, _ in parts])
        ends = np.asarray([end for _, _, end in parts])
        policy = self.policy
        self.counters.moved_reads += int((policy.counts(begins) < begins).sum())
        common = [begins, policy.counts(begins), policy.peaks(begins), policy.peaks(ends)]
        steps = self._sent(np.concatenate([np.stack(common, 1), last], 1).astype(np.int32))
        rows = table[self._sent(np.asarray([row.index for row, _, _ in parts]))]
        # Warm-up brings block tables of nothing but the null block: those rows are padding.
        steps[:, 0] = torch.where(rows[:, 0] == 0, -1, steps[:, 0])
        return steps, rows

    def _tokens(self, singles: list[tuple[Any, int, int]], table: torch.Tensor) -> Tokens:
        stream = np.asarray([begin for _, begin, _ in singles])
        place = np.asarray([row.place + begin - row.first for row, begin, _ in singles])
        lo, hi = self.policy.victims(stream)
        evicts = (hi > lo).astype(np.int64)
        if self._host_rules is not None:  # its rows also know the batches that are one rule
            rules = self._host_rules[step_tables(self.policy).rows(stream)]
            lo, hi, evicts = rules[:, 0], rules[:, 1], rules[:, 2]
        steps, rows = self._step_rows(singles, table, np.stack([lo, hi, evicts], 1))
        index = self._sent(place)
        scales = self._scale_rows
        return Tokens(
            index=index,
            steps=steps,
            table=rows,
            logit_scale=None if scales is None else scales[index],
            no_scores=self.no_scores[: len(singles)],
        )

    def _strides(self, strides: list[tuple[Any, int, int]], table: torch.Tensor) -> Strides:
        place = np.asarray([row.place + begin - row.first for row, begin, _ in strides])
        lengths = np.asarray([end - begin for _, begin, end in strides])
        zeros = np.zeros_like(place)
        steps, rows = self._step_rows(strides, table, np.stack([place, lengths, zeros], 1))
        plans = [
            self._plan(int(start), begin, end)
            for start, (_, begin, end) in zip(place, strides, strict=True)
        ]
        fades = self._sent((self.policy.decay ** lengths.astype(np.float64)).astype(np.float32))
        return Strides(steps, rows, fades, plans)

    def _plan(self, place: int, begin: int, end: int) -> StridePlan:
        policy, length = self.policy, end - begin
        cached = policy.count(begin)
        plan = None
        if cached + length > policy.count(end):
            plan = moved(stride_plan(policy, begin, length), self.device)
        return StridePlan(place, begin, cached, length, plan)
