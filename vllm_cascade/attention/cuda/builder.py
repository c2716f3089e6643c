# SPDX-License-Identifier: Apache-2.0
"""A scheduling step for the Triton kernels: step rows on the device instead of Python objects.

A batch of single tokens is described by persistent buffers that ``kernels.schedule`` rewrites from
the sequence lengths, so that a captured CUDA graph finds the next step in the same memory and the
host reads nothing back. A step with a prompt in it is planned on the host as on the CPU, wave by
wave, and runs outside full graphs; so does every step of a policy that victim rules cannot
describe, which PyTorch runs on the device.
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

from vllm_cascade.attention.cuda.tables import DeviceTables, score_numbers
from vllm_cascade.attention.metadata import (
    KVPolicyMetadataBuilder,
    Stride,
    arithmetic,
    by,
    lag_of,
)
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.kernels.triton.schedule import schedule
from vllm_cascade.kernels.triton.tiles import STEP_COLUMNS
from vllm_cascade.policies import Policy, stride_plan
from vllm_cascade.policies.rules import rule_tables


@dataclass(frozen=True)
class Tokens:
    """Single tokens of ``B`` requests.

    Attributes:
        index: int64 ``[B]``, the tokens' places in the step; None: they are its first ``B``.
        steps: int32 ``[B, 14]`` step rows (``kernels.tiles``).
        table: int32 ``[B, P]`` block numbers.
        logit_scale: fp32 ``[B]``, or None.
        no_scores: fp32 ``[B, num_sets]`` zeros, the new scores of a policy that computes none.
        scored: int32 ``[B]``, ranks of the tokens that get a score from the host; negative: none.
        given: fp32 ``[B]``, these scores; None where the host gives none.
    """

    index: torch.Tensor | None
    steps: torch.Tensor
    table: torch.Tensor
    logit_scale: torch.Tensor | None
    no_scores: torch.Tensor
    scored: torch.Tensor | None = None
    given: torch.Tensor | None = None


@dataclass(frozen=True)
class StridePlan:
    """What the host knows about one stride: where it begins, and the policy's own plan.

    ``place`` is its first token's place in the step; ``plan`` is None where nothing is deleted.
    ``scored`` and ``given`` are as in ``metadata.Stride``.
    """

    policy: Policy
    place: int
    stream: int
    cached: int
    num_tokens: int
    plan: object | None
    scored: int = 0
    given: torch.Tensor | None = None


@dataclass(frozen=True)
class Strides:
    """Strides of ``R`` requests whose policies share an arithmetic of scores.

    Attributes:
        steps: int32 ``[R, 14]`` step rows.
        table: int32 ``[R, P]``.
        fades: fp32 ``[R]``, ``decay ** num_tokens``.
        decays: fp32 ``[prefill_stride]``: ``weight * decay ** i``.
        plans: one a request.
    """

    steps: torch.Tensor
    table: torch.Tensor
    fades: torch.Tensor
    decays: torch.Tensor
    plans: list[StridePlan]

    @property
    def policy(self) -> Policy:
        """Whose arithmetic applies to all."""
        return self.plans[0].policy

    @property
    def max_length(self) -> int:
        return max(plan.num_tokens for plan in self.plans)

    @property
    def max_cached(self) -> int:
        return max(plan.cached for plan in self.plans)


@dataclass(frozen=True)
class DeviceWave:
    """One stride of each request: single tokens, longer ones, and those for PyTorch."""

    tokens: Tokens | None
    strides: list[Strides]
    others: list[Stride]


@dataclass
class TritonMetadata(AttentionMetadata):
    """What every layer of this step shares.

    Attributes:
        policy: the engine's.
        rules: int32 ``[n, 4]``, what steps have beyond their first victim rule.
        logit_scale: fp32 ``[num_tokens]`` over the step, or None.
    """

    policy: Policy
    spec: KVPolicySpec
    waves: list[DeviceWave]
    rules: torch.Tensor
    logit_scale: torch.Tensor | None = None


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
        self.tables = DeviceTables(policy, device, vllm_config.scheduler_config.max_num_seqs)
        self.steps = torch.full((most, STEP_COLUMNS), -1, dtype=torch.int32, device=device)
        self.engine_rows = torch.zeros(most, dtype=torch.int32, device=device)
        self.no_scores = torch.zeros(most, kv_cache_spec.num_sets, device=device)
        self.scale = torch.ones(most, device=device)
        self.scored = torch.full((most,), -1, dtype=torch.int32, device=device)
        self.given = torch.zeros(most, device=device)
        zero = np.zeros(1, dtype=np.int64)
        self._scales = policy.logit_scale(zero, zero + 1) is not None
        self._scale_rows: torch.Tensor | None = None
        self._decays: dict[tuple[float, float], torch.Tensor] = {}
        self._warm_up: np.ndarray | None = None
        self._has_rules = rule_tables(policy) is not None

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVPolicySpec
    ) -> AttentionCGSupport:
        """Full graphs for decode, unless victim rules cannot say what the policy does."""
        if rule_tables(kv_cache_spec.policy) is None:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        common = common_attn_metadata
        if common.max_query_len == 1 and self._has_rules:
            waves, scale = [DeviceWave(self._decode(common), [], [])], None
        else:
            if common.is_prefilling is None:
                none = torch.zeros(common.num_reqs, dtype=torch.bool)
                common = common.replace(is_prefilling=none)
            self._warm_up = None
            waves = super().build(common_prefix_len, common, fast_build).waves
            scale = self._scale_rows
        rules = self.tables.rules
        return TritonMetadata(self.policy, self.kv_cache_spec, waves, rules, scale)

    # --- a batch of single tokens, nothing of which the host has to know -------------------------

    def _decode(self, common: CommonAttentionMetadata) -> Tokens:
        num_rows, table = common.num_reqs, common.block_table_tensor
        policies = self.batch.policies(common)[:num_rows]
        policies += [self.policy] * (num_rows - len(policies))
        policy_of = self.engine_rows
        if any(policy is not self.policy for policy in policies):
            policy_of = self._sent(self.tables.numbers(policies))
        seq_lens, tables = common.seq_lens[:num_rows], self.tables.schedule
        assert tables is not None
        schedule(seq_lens, table, tables, policy_of, self.steps, self.positions.buffer)
        stream = common.seq_lens_cpu_upper_bound.numpy()[:num_rows].astype(np.int64) - 1
        self._describe(policies, stream)
        scored = self._judge(common, policies, stream)
        return Tokens(
            index=None,
            steps=self.steps[:num_rows],
            table=table[:num_rows],
            logit_scale=self.scale[:num_rows] if self._scales else None,
            no_scores=self.no_scores[:num_rows],
            scored=self.scored[:num_rows] if scored else None,
            given=self.given[:num_rows] if scored else None,
        )

    def _describe(self, policies: list[Policy], stream: np.ndarray) -> None:
        """Count the step, and scale its logits where a policy does."""
        counters = self.counters
        counters.steps += 1
        scale = np.ones(len(stream), dtype=np.float32)
        real = np.flatnonzero(stream >= 0)
        for rows in by(real.tolist(), lambda row: id(policies[row])):
            policy, t = policies[rows[0]], stream[rows]
            cached = policy.counts(t)
            counters.tokens += len(rows)
            counters.strides += len(rows)
            counters.evicted_tokens += int((cached + 1 - policy.counts(t + 1)).sum())
            counters.moved_reads += int((cached < t).sum())
            factors = policy.logit_scale(t, cached + 1)
            if factors is not None:
                scale[rows] = factors
        if self._scales:
            self.scale[: len(scale)].copy_(self._sent(scale), non_blocking=True)

    def _judge(
        self, common: CommonAttentionMetadata, policies: list[Policy], stream: np.ndarray
    ) -> bool:
        """Scores of token ids into the buffers that a graph reads; False: the engine has none."""
        if self.policy.token_scores is None:
            return False
        given = np.zeros(len(stream), dtype=np.float32)
        scored = np.full(len(stream), -1, dtype=np.int32)
        for row in np.flatnonzero(stream >= 0).tolist():
            policy, t = policies[row], int(stream[row])
            if policy.token_scores is not None:
                lag = policy.token_scores.lag
                given[row] = self.batch.token_scores(common, row, t, t + 1, lag)[0]
                scored[row] = policy.count(t) - lag
        self.given[: len(given)].copy_(self._sent(given), non_blocking=True)
        self.scored[: len(scored)].copy_(self._sent(scored), non_blocking=True)
        return True

    # --- a step planned on the host ---------------------------------------------------------------

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """A small array on the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _publish_positions(self, rows: list[Any]) -> None:
        super()._publish_positions(rows)
        self._scale_rows = None
        if self._scales and rows:
            parts = np.concatenate([self._logit_scales(row) for row in rows])
            self._scale_rows = self._sent(parts.astype(np.float32))

    @staticmethod
    def _logit_scales(row: Any) -> np.ndarray:
        """Factors of a request's tokens of this step."""
        bounds = np.asarray(row.bounds)
        stream = np.arange(bounds[0], bounds[-1])
        begins = np.repeat(bounds[:-1], np.diff(bounds))
        visible = row.policy.counts(begins) + stream - begins + 1
        scale = row.policy.logit_scale(stream, visible)
        return np.ones(len(stream)) if scale is None else scale

    def _wave(self, rows: list[Any], depth: int, table: torch.Tensor) -> DeviceWave:
        singles, strides, others = [], [], []
        policies = {id(row.policy): row.policy for row in rows}  # asking costs more than the rows
        ruled = {key: rule_tables(policy) is not None for key, policy in policies.items()}
        for row in rows:
            if depth + 1 >= len(row.bounds):
                continue
            begin, end = row.bounds[depth], row.bounds[depth + 1]
            if not ruled[id(row.policy)]:
                if not self._is_warm_up(row.index, table):
                    others.append(moved(self._stride(row, begin, end, table), self.device))
            elif end - begin == 1:
                singles.append((row, begin, end))
            else:
                strides.append((row, begin, end))
        groups = by(strides, lambda stride: arithmetic(stride[0].policy))
        return DeviceWave(
            self._tokens(singles, table) if singles else None,
            [self._strides(group, table) for group in groups],
            others,
        )

    def _is_warm_up(self, index: int, table: torch.Tensor) -> bool:
        """Whether a row has only the null block, which the kernels see for themselves."""
        if self._warm_up is None:
            self._warm_up = (table[:, 0] == 0).cpu().numpy()
        return bool(self._warm_up[index])

    def _step_rows(
        self, parts: list[tuple[Any, int, int]], table: torch.Tensor, places: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Step rows and their block tables; ``places``: of strides, ``[R, 2]`` start and length."""
        columns = np.zeros((len(parts), STEP_COLUMNS), dtype=np.int64)
        for same in by(range(len(parts)), lambda part: id(parts[part][0].policy)):
            policy = parts[same[0]][0].policy
            begins = np.asarray([parts[part][1] for part in same])
            ends = np.asarray([parts[part][2] for part in same])
            cached = policy.counts(begins)
            self.counters.moved_reads += int((cached < begins).sum())
            common = [begins, cached, policy.peaks(begins), policy.peaks(ends)]
            columns[same, :4] = np.stack(common, 1)
            if places is None:
                columns[same, 4:10] = self.tables.rows(policy, begins)
            else:
                columns[same, 4:6] = places[same]
            columns[same, 10:] = score_numbers(policy)
        steps = self._sent(columns.astype(np.int32))
        rows = table[self._sent(np.asarray([row.index for row, _, _ in parts]))]
        # Warm-up brings block tables of nothing but the null block: those rows are padding.
        steps[:, 0] = torch.where(rows[:, 0] == 0, -1, steps[:, 0])
        return steps, rows

    def _tokens(self, singles: list[tuple[Any, int, int]], table: torch.Tensor) -> Tokens:
        place = np.asarray([row.place + begin - row.first for row, begin, _ in singles])
        steps, rows = self._step_rows(singles, table, None)
        index = self._sent(place)
        scales, scored, given = self._scale_rows, None, None
        if self.policy.token_scores is not None:
            judged = [_judged(row, begin) for row, begin, _ in singles]
            scored = self._sent(np.asarray([rank for rank, _ in judged], dtype=np.int32))
            given = self._sent(np.asarray([score for _, score in judged], dtype=np.float32))
        return Tokens(
            index=index,
            steps=steps,
            table=rows,
            logit_scale=None if scales is None else scales[index],
            no_scores=self.no_scores[: len(singles)],
            scored=scored,
            given=given,
        )

    def _strides(self, strides: list[tuple[Any, int, int]], table: torch.Tensor) -> Strides:
        plans = [self._plan(row, begin, end) for row, begin, end in strides]
        places = np.asarray([[plan.place, plan.num_tokens] for plan in plans])
        steps, rows = self._step_rows(strides, table, places)
        policy = plans[0].policy
        fades = [policy.decay**plan.num_tokens for plan in plans]
        fades = self._sent(np.asarray(fades, dtype=np.float32))
        return Strides(steps, rows, fades, self._decays_of(policy), plans)

    def _decays_of(self, policy: Policy) -> torch.Tensor:
        key = policy.decay, policy.weight
        if key not in self._decays:
            power = torch.arange(max(self.policy.prefill_stride, 1), dtype=torch.float64)
            self._decays[key] = (key[1] * key[0] ** power).float().to(self.device)
        return self._decays[key]

    def _plan(self, row: Any, begin: int, end: int) -> StridePlan:
        policy, length = row.policy, end - begin
        cached = policy.count(begin)
        plan = given = None
        if cached + length > policy.count(end):
            plan = moved(stride_plan(policy, begin, length), self.device)
        if row.host_scores is not None:
            given = self._sent(row.host_scores[begin - row.first : end - row.first])
        place, scored = row.place + begin - row.first, cached - lag_of(policy)
        return StridePlan(policy, place, begin, cached, length, plan, scored, given)


def _judged(row: Any, begin: int) -> tuple[int, float]:
    """Rank and score of the token that the host judges as token ``begin`` is read."""
    if row.host_scores is None:
        return -1, 0.0
    rank = row.policy.count(begin) - lag_of(row.policy)
    return rank, float(row.host_scores[begin - row.first])
