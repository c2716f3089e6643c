# SPDX-License-Identifier: Apache-2.0
"""A scheduling step as waves of strides, planned on the host before the forward pass.

A request's tokens of this step are cut into strides; its next stride needs the one before. Wave
``k`` holds every request's ``k``-th stride. Its one-token strides (all of decode) are a single
batch for each arithmetic of scores, which requests with policies of their own may differ in; longer
ones are prefill, and so is a single token at which a policy evicts several. Everything here is a
function of token counts.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_cascade.attention.rows import Batch
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import CachePositions
from vllm_cascade.cache.strides import cut_strides
from vllm_cascade.policies import Policy, stride_plan


@dataclass(frozen=True)
class TokenBatch:
    """One-token strides of many requests.

    ``B`` requests, ``P`` pages (of the request with most). Tensors are int64 unless noted.

    Attributes:
        policy: whose arithmetic of scores applies to all of them.
        index: ``[B]``, the tokens' places in the step.
        stream: ``[B]``, their indices in their streams.
        pages: ``[B, P]``, block numbers; the null block 0 where a request has fewer.
        used: ``[U, 2]``, the (request, page) pairs that exist; None where all do.
        cached: ``[B, 1, 1]``, tokens cached before, which is the new token's position.
        old_slots: ``[B, 1, 1]``, slots that hold valid metadata before.
        new_slots: ``[B, 1, 1]``, slots that do afterwards.
        lo, hi: ``[B, 1, 1]``, ranks among which the lowest score is deleted.
        moved: whether any key may have left the position it was written at.
        may_drop_new: whether the new token itself may be the one deleted.
        logit_scale: fp32 ``[B, 1, 1, 1]``, factors on the logits, or None.
        scored: ``[B, 1, 1]``, ranks of the tokens that get a score from the host; -2: none.
        host_scores: fp32 ``[B, 1, 1]``, these scores; None where the host gives none.
    """

    policy: Policy
    index: torch.Tensor
    stream: torch.Tensor
    pages: torch.Tensor
    used: torch.Tensor | None
    cached: torch.Tensor
    old_slots: torch.Tensor
    new_slots: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    moved: bool
    may_drop_new: bool
    logit_scale: torch.Tensor | None = None
    scored: torch.Tensor | None = None
    host_scores: torch.Tensor | None = None


@dataclass(frozen=True)
class Stride:
    """One request's stride of more than one token.

    Attributes:
        policy: the request's.
        start, num_tokens: its tokens' places in the step.
        stream: index of its first token in the stream.
        pages: int64 ``[P]``, block numbers, enough for what is cached afterwards.
        cached: tokens cached before.
        old_slots, new_slots: slots that hold valid metadata before and afterwards.
        plan: the policy's index tables.
        moved: whether any key may have left the position it was written at.
        logit_scale: fp32 ``[T, 1]``, factors on the logits of each query, or None.
        scored: rank of the first token that gets a score from the host (negative: before the
            stream's start), the others follow.
        host_scores: fp32 ``[T]``, these scores; None where the host gives none.
    """

    policy: Policy
    start: int
    num_tokens: int
    stream: int
    pages: torch.Tensor
    cached: int
    old_slots: int
    new_slots: int
    plan: object
    moved: bool
    logit_scale: torch.Tensor | None = None
    scored: int = 0
    host_scores: torch.Tensor | None = None


@dataclass(frozen=True)
class Wave:
    tokens: list[TokenBatch]
    strides: list[Stride]


@dataclass
class KVPolicyMetadata(AttentionMetadata):
    """What every layer of this step shares."""

    policy: Policy
    spec: KVPolicySpec
    waves: list[Wave]


@dataclass
class StepCounters:
    """What the policy has done in this process, summed over requests (not over layers)."""

    steps: int = 0
    tokens: int = 0
    strides: int = 0
    evicted_tokens: int = 0
    moved_reads: int = 0


@dataclass(frozen=True)
class _Row:
    """A request in this step.

    ``index`` is its row, ``place`` where its tokens begin in the step, ``first`` the index of the
    first one in its stream; ``bounds`` are its stride boundaries, in stream indices.
    ``host_scores`` are fp32, one a token of this step.
    """

    policy: Policy
    index: int
    place: int
    first: int
    bounds: list[int]
    host_scores: np.ndarray | None = None


def arithmetic(policy: Policy) -> tuple[Any, ...]:
    """What a batch of single tokens must agree on; counts and ranks are each row's own."""
    if policy.token_scores is not None:
        return "host", policy.tie
    if not policy.uses_scores:
        return (False,)
    age = type(policy).__name__ if policy.needs_age else ""
    return True, policy.decay, policy.weight, policy.tie, policy.head_reduction, age


class KVPolicyMetadataBuilder(AttentionMetadataBuilder[KVPolicyMetadata]):
    """Plans a step and publishes its cache positions."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    kv_cache_spec: KVPolicySpec

    def __init__(
        self,
        kv_cache_spec: KVPolicySpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.policy = kv_cache_spec.policy
        self.batch = Batch()
        self.positions = CachePositions(vllm_config.scheduler_config.max_num_batched_tokens, device)
        self.counters = StepCounters()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> KVPolicyMetadata:
        common = common_attn_metadata
        offsets = common.query_start_loc_cpu.numpy()
        lengths = np.diff(offsets)
        firsts = common.seq_lens_cpu_upper_bound.numpy()[: len(lengths)] - lengths
        prefilling = self.batch.prefilling(common)
        policies = dict(enumerate(self.batch.policies(common)))
        rows = []
        for row in np.flatnonzero(lengths > 0):
            first, end = int(firsts[row]), int(firsts[row] + lengths[row])
            bounds = cut_strides(first, end, self.policy.prefill_stride, bool(prefilling[row]))
            policy = policies.get(int(row), self.policy)
            scores = None
            if policy.token_scores is not None:
                lag = policy.token_scores.lag
                scores = self.batch.token_scores(common, int(row), first, end, lag)
            rows.append(_Row(policy, row, int(offsets[row]), first, bounds, scores))
        self._publish_positions(rows)
        self._count(rows)
        table = common.block_table_tensor
        depth = max((len(row.bounds) - 1 for row in rows), default=0)
        waves = [self._wave(rows, depth_index, table) for depth_index in range(depth)]
        return KVPolicyMetadata(self.policy, self.kv_cache_spec, waves)

    def _publish_positions(self, rows: list[_Row]) -> None:
        """A stride's tokens follow the tokens cached at its start."""
        if not rows:
            return
        begins = np.asarray([begin for row in rows for begin in row.bounds[:-1]])
        lengths = np.asarray([end for row in rows for end in row.bounds[1:]]) - begins
        policies = [row.policy for row in rows for _ in row.bounds[1:]]
        counts = np.empty_like(begins)
        for same in by(range(len(policies)), lambda stride: id(policies[stride])):
            counts[same] = policies[same[0]].counts(begins[same])
        places = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(counts - places, lengths)
        self.positions.fill(torch.from_numpy(positions))

    def _count(self, rows: list[_Row]) -> None:
        self.counters.steps += 1
        for same in by(rows, lambda row: id(row.policy)):
            policy = same[0].policy
            ends = np.asarray([(row.bounds[0], row.bounds[-1]) for row in same])
            evicted = ends - policy.counts(ends)
            self.counters.tokens += int((ends[:, 1] - ends[:, 0]).sum())
            self.counters.evicted_tokens += int((evicted[:, 1] - evicted[:, 0]).sum())
        self.counters.strides += sum(len(row.bounds) - 1 for row in rows)

    def _wave(self, rows: list[_Row], depth: int, table: torch.Tensor) -> Wave:
        singles, strides = [], []
        for row in rows:
            if depth + 1 >= len(row.bounds):
                continue
            begin, end = row.bounds[depth], row.bounds[depth + 1]
            if end - begin == 1:
                singles.append((row, begin))
            else:
                strides.append(self._stride(row, begin, end, table))
        groups: dict[Any, list[tuple[_Row, int]]] = {}
        for same in by(singles, lambda single: id(single[0].policy)):
            policy = same[0][0].policy
            batches = policy.batches(np.asarray([begin for _, begin in same])).tolist()
            for (row, begin), several in zip(same, batches, strict=True):
                if several:
                    strides.append(self._stride(row, begin, begin + 1, table))
                else:
                    groups.setdefault(arithmetic(policy), []).append((row, begin))
        return Wave([self._token_batch(same, table) for same in groups.values()], strides)

    def _stride(self, row: _Row, begin: int, end: int, table: torch.Tensor) -> Stride:
        cached = row.policy.count(begin)
        moved = cached < begin
        self.counters.moved_reads += moved
        new_slots = row.policy.peak(end)
        num_pages = cdiv(new_slots, self.kv_cache_spec.block_size)
        scores = None
        if row.host_scores is not None:
            scores = torch.from_numpy(row.host_scores[begin - row.first : end - row.first])
        return Stride(
            policy=row.policy,
            start=row.place + begin - row.first,
            num_tokens=end - begin,
            stream=begin,
            pages=table[row.index, :num_pages].long(),
            cached=cached,
            old_slots=row.policy.peak(begin),
            new_slots=new_slots,
            plan=stride_plan(row.policy, begin, end - begin),
            moved=moved,
            logit_scale=_logit_scale(
                row.policy, np.arange(begin, end), cached + np.arange(end - begin)
            ),
            scored=cached - lag_of(row.policy),
            host_scores=scores,
        )

    def _token_batch(self, singles: list[tuple[_Row, int]], table: torch.Tensor) -> TokenBatch:
        stream = np.asarray([begin for _, begin in singles])
        place = np.asarray([row.place + begin - row.first for row, begin in singles])
        schedule = _schedule([row.policy for row, _ in singles], stream)
        cached, new_slots = schedule.cached, schedule.new_slots
        num_pages = -(-new_slots // self.kv_cache_spec.block_size)
        most = int(num_pages.max())
        pages = table[[row.index for row, _ in singles], :most].long()
        exists = np.arange(most) < num_pages[:, None]
        used = None
        if not exists.all():
            used = torch.from_numpy(np.argwhere(exists))
            pages = pages.masked_fill(~torch.from_numpy(exists), 0)
        moved = cached < stream
        self.counters.moved_reads += int(moved.sum())
        host_scores = [
            float(row.host_scores[begin - row.first])
            for row, begin in singles
            if row.host_scores is not None
        ]
        may_drop_new = (schedule.hi > cached) & (schedule.hi > schedule.lo)

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64)).view(-1, 1, 1)

        return TokenBatch(
            policy=singles[0][0].policy,
            index=torch.from_numpy(place),
            stream=torch.from_numpy(stream),
            pages=pages,
            used=used,
            cached=column(cached),
            old_slots=column(schedule.old_slots),
            new_slots=column(new_slots),
            lo=column(schedule.lo),
            hi=column(schedule.hi),
            moved=bool(moved.any()),
            may_drop_new=bool(may_drop_new.any()),
            logit_scale=schedule.logit_scale,
            scored=column(schedule.scored),
            host_scores=torch.tensor(host_scores).view(-1, 1, 1) if host_scores else None,
        )


@dataclass
class _Schedule:
    """What the policies' tables say about inserting one token into each of ``B`` streams.

    int64 ``[B]``, as in ``TokenBatch``; ``logit_scale`` fp32 ``[B, 1, 1, 1]`` or None.
    """

    cached: np.ndarray
    old_slots: np.ndarray
    new_slots: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    scored: np.ndarray
    logit_scale: torch.Tensor | None = None


def _schedule(policies: list[Policy], stream: np.ndarray) -> _Schedule:
    """One look-up a table for all rows of a policy."""
    result = _Schedule(*(np.empty_like(stream) for _ in range(6)))
    for rows in by(range(len(policies)), lambda row: id(policies[row])):
        policy, t = policies[rows[0]], stream[rows]
        result.cached[rows] = policy.counts(t)
        result.old_slots[rows] = policy.peaks(t)
        result.new_slots[rows] = policy.peaks(t + 1)
        result.lo[rows], result.hi[rows] = policy.victims(t)
        scored = result.cached[rows] - lag_of(policy)
        result.scored[rows] = np.where(scored < 0, -2, scored)
        scale = _logit_scale(policy, t, result.cached[rows])
        if scale is not None:
            if result.logit_scale is None:
                result.logit_scale = torch.ones(len(policies), 1, 1, 1)
            result.logit_scale[rows] = scale.view(-1, 1, 1, 1)
    return result


def lag_of(policy: Policy) -> int:
    """How many tokens later a token gets its score from the host."""
    return 0 if policy.token_scores is None else policy.token_scores.lag


def _logit_scale(policy: Policy, stream: np.ndarray, cached: np.ndarray) -> torch.Tensor | None:
    """fp32 ``[n, 1]`` for queries that see ``cached`` keys before their own."""
    scale = policy.logit_scale(stream, cached + 1)
    return None if scale is None else torch.from_numpy(scale).float().unsqueeze(1)


def by(items: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    """Items grouped by a key; groups in the order in which they first occur.

    Policies are told apart by identity: comparing their settings takes longer than the work, and
    ``request_policy`` returns the same object for the same request arguments.
    """
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
