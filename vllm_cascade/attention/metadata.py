# SPDX-License-Identifier: Apache-2.0
"""A scheduling step as waves of strides, planned on the host before the forward pass.

A request's tokens of this step are cut into strides; its next stride needs the one before. Wave
``k`` holds every request's ``k``-th stride. Its one-token strides (all of decode) are a single
batch; longer ones are prefill, and so is a single token at which a policy evicts several.
Everything here is a function of token counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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

from vllm_cascade.paging import KVPolicySpec
from vllm_cascade.policies import Policy, stride_plan
from vllm_cascade.positions import CachePositions


@dataclass(frozen=True)
class TokenBatch:
    """One-token strides of many requests.

    ``B`` requests, ``P`` pages (of the request with most). Tensors are int64 unless noted.

    Attributes:
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
    tokens: TokenBatch | None
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

    index: int
    place: int
    first: int
    bounds: list[int]
    host_scores: np.ndarray | None = None


def cut_strides(first: int, end: int, prefill_stride: int, prefilling: bool) -> list[int]:
    """Stride boundaries ``[first, ..., end]``: absolute multiples in a prompt, else each token."""
    if not prefilling or prefill_stride == 1:
        return list(range(first, end + 1))
    inner = range((first // prefill_stride + 1) * prefill_stride, end, prefill_stride)
    return [first, *inner, end]


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
        self.positions = CachePositions(vllm_config.scheduler_config.max_num_batched_tokens, device)
        self.counters = StepCounters()
        self.token_scores: Callable[[int, int, int], np.ndarray] | None = None
        """Scores of a row's tokens from ``begin`` to ``end`` (``Policy.token_scores``), fp32."""

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
        prefilling = common.is_prefilling.numpy()
        rows = [
            self._row(
                int(row), int(offsets[row]), int(firsts[row]), int(lengths[row]), prefilling[row]
            )
            for row in np.flatnonzero(lengths > 0)
        ]
        self._publish_positions(rows)
        self._count(rows)
        table = common.block_table_tensor
        depth = max((len(row.bounds) - 1 for row in rows), default=0)
        waves = [self._wave(rows, depth_index, table) for depth_index in range(depth)]
        return KVPolicyMetadata(self.policy, self.kv_cache_spec, waves)

    def _row(self, row: int, place: int, first: int, length: int, prefilling: bool) -> _Row:
        end = first + length
        bounds = cut_strides(first, end, self.policy.prefill_stride, bool(prefilling))
        if self.policy.token_scores is None:
            return _Row(row, place, first, bounds)
        assert self.token_scores is not None, "the worker gives scores of tokens"
        return _Row(row, place, first, bounds, self.token_scores(row, first, end))

    def _publish_positions(self, rows: list[_Row]) -> None:
        """A stride's tokens follow the tokens cached at its start."""
        parts = []
        for row in rows:
            bounds = np.asarray(row.bounds)
            tokens = np.arange(bounds[0], bounds[-1])
            starts = np.repeat(bounds[:-1], np.diff(bounds))
            counts = np.repeat(self.policy.counts(bounds[:-1]), np.diff(bounds))
            parts.append(counts + tokens - starts)
        if parts:
            self.positions.fill(torch.from_numpy(np.concatenate(parts)))

    def _count(self, rows: list[_Row]) -> None:
        self.counters.steps += 1
        ends = np.asarray([(row.bounds[0], row.bounds[-1]) for row in rows]).reshape(-1, 2)
        before, after = ends - self.policy.counts(ends), ends
        self.counters.tokens += int((after[:, 1] - after[:, 0]).sum())
        self.counters.evicted_tokens += int((before[:, 1] - before[:, 0]).sum())
        self.counters.strides += sum(len(row.bounds) - 1 for row in rows)

    def _wave(self, rows: list[_Row], depth: int, table: torch.Tensor) -> Wave:
        singles, strides = [], []
        for row in rows:
            if depth + 1 >= len(row.bounds):
                continue
            begin, end = row.bounds[depth], row.bounds[depth + 1]
            if end - begin == 1 and not self.policy.batches(np.asarray(begin)):
                singles.append((row, begin))
            else:
                strides.append(self._stride(row, begin, end, table))
        return Wave(self._token_batch(singles, table) if singles else None, strides)

    def _stride(self, row: _Row, begin: int, end: int, table: torch.Tensor) -> Stride:
        cached = self.policy.count(begin)
        moved = cached < begin
        self.counters.moved_reads += moved
        new_slots = self.policy.peak(end)
        num_pages = cdiv(new_slots, self.kv_cache_spec.block_size)
        scores = None
        if row.host_scores is not None:
            scores = torch.from_numpy(row.host_scores[begin - row.first : end - row.first])
        return Stride(
            start=row.place + begin - row.first,
            num_tokens=end - begin,
            stream=begin,
            pages=table[row.index, :num_pages].long(),
            cached=cached,
            old_slots=self.policy.peak(begin),
            new_slots=new_slots,
            plan=stride_plan(self.policy, begin, end - begin),
            moved=moved,
            logit_scale=self._logit_scale(np.arange(begin, end), cached + np.arange(end - begin)),
            scored=cached - self._lag,
            host_scores=scores,
        )

    @property
    def _lag(self) -> int:
        """How many tokens later a token gets its score from the host."""
        source = self.policy.token_scores
        return 0 if source is None else source.lag

    def _logit_scale(self, stream: np.ndarray, cached: np.ndarray) -> torch.Tensor | None:
        """fp32 ``[n, 1]`` for queries that see ``cached`` keys before their own."""
        scale = self.policy.logit_scale(stream, cached + 1)
        return None if scale is None else torch.from_numpy(scale).float().unsqueeze(1)

    def _token_batch(self, singles: list[tuple[_Row, int]], table: torch.Tensor) -> TokenBatch:
        stream = np.asarray([begin for _, begin in singles])
        place = np.asarray([row.place + begin - row.first for row, begin in singles])
        cached = self.policy.counts(stream)
        new_slots = self.policy.peaks(stream + 1)
        lo, hi = self.policy.victims(stream)
        num_pages = -(-new_slots // self.kv_cache_spec.block_size)
        most = int(num_pages.max())
        pages = table[[row.index for row, _ in singles], :most].long()
        exists = np.arange(most) < num_pages[:, None]
        moved = cached < stream
        self.counters.moved_reads += int(moved.sum())

        scale = self._logit_scale(stream, cached)
        host_scores = [
            row.host_scores[begin - row.first]
            for row, begin in singles
            if row.host_scores is not None
        ]

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64)).view(-1, 1, 1)

        return TokenBatch(
            index=torch.from_numpy(place),
            stream=torch.from_numpy(stream),
            pages=pages.masked_fill(~torch.from_numpy(exists), 0),
            used=None if exists.all() else torch.from_numpy(np.argwhere(exists)),
            cached=column(cached),
            old_slots=column(self.policy.peaks(stream)),
            new_slots=column(new_slots),
            lo=column(lo),
            hi=column(hi),
            moved=bool(moved.any()),
            may_drop_new=bool((hi > cached).any() and (hi > lo)[hi > cached].any()),
            logit_scale=None if scale is None else scale.view(-1, 1, 1, 1),
            scored=column(np.where(cached < self._lag, -2, cached - self._lag)),
            host_scores=torch.tensor(host_scores).view(-1, 1, 1) if host_scores else None,
        )
