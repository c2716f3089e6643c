# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU."""

from typing import Any

import torch

from vllm_cascade.attention.cpu.builder import CPUMetadata
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.cpu.paths import Path, choose
from vllm_cascade.attention.cpu.recall import LayerRecall
from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.latent import LatentImpl
from vllm_cascade.attention.layer import NewTokens
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.recall.stores import Stores
from vllm_cascade.step.inputs import Singles, Stride, Undone


class CPUKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: single tokens in one batch, longer strides one by one."""

    knows_windows = knows_sinks = knows_codes = True
    path: Path | None = None
    recall: LayerRecall | None = None

    def prepare(self, spec: KVPolicySpec, *args: Any, **kwargs: Any) -> None:
        super().prepare(spec, *args, **kwargs)
        assert self._layer is not None and self._pages is not None, "set by KVPolicyImpl"
        self.path = choose(self._layer, self._pages, self.num_heads, spec.schedule)

    def recall_from(self, stores: Stores, index: int, most_queries: int) -> None:
        assert self._layer is not None and self._pages is not None, "prepare() was not called"
        judge = self.path.judge(index) if isinstance(self.path, NativePath) else None
        self.recall = LayerRecall(
            self._layer, self._pages, index, most_queries, judge, stores.shape.in_8_bits
        )

    def keep_drafts(self, most_requests: int) -> None:
        """Save what draft tokens change, for ``undo``; called once, after ``prepare``."""
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        self.path.keep_drafts(Journal(self._pages, most_requests))

    def undo(self, undone: Undone) -> None:
        """Undo rejected drafts; called between steps."""
        assert self.path is not None, "prepare() was not called"
        self.path.undo(undone)
        if self.recorder is not None:
            ends, first_pages = undone.rows[:, 3].tolist(), undone.table[:, 0].tolist()
            for end, page in zip(ends, first_pages, strict=True):
                self.recorder.forget(self.name, page, end)

    def rotation_table(
        self, rotary: Rotary, spec: KVPolicySpec, device: torch.device
    ) -> torch.Tensor:
        forward = spec.policy.recalled
        return rotary.table(spec.max_distance, forward)[forward:]

    def run(self, name: str, metadata: CPUMetadata, new: NewTokens, kv_cache: torch.Tensor) -> None:
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        for wave in metadata.waves:
            if wave.singles is not None:
                self._tokens(self.path, wave.singles, new)
            for stride in wave.strides:
                self._stride(self.path, stride, new)
            if self.recorder is not None:
                self.recorder.record(name, self._pages, wave.rows, metadata.table)

    def _tokens(self, path: Path, singles: Singles, new: NewTokens) -> None:
        if not singles.recall or self.recall is None:
            path.tokens(singles, new)
            return
        self.recall.select_for_tokens(singles, new)
        before = self.recall.ranks_before(singles)
        path.tokens(singles, new)
        self.recall.store_of_tokens(singles, before)

    def _stride(self, path: Path, stride: Stride, new: NewTokens) -> None:
        plan = stride.recall
        if plan is None or self.recall is None:
            path.stride(stride, new)
            return
        self.recall.select_for_stride(stride, new)
        gone = self.recall.room(plan.stored) if len(plan.stored) else None
        path.stride(stride, new, gone)
        if gone is not None:
            self.recall.store(plan.stored, gone)


class CPULatentImpl(LatentImpl, CPUKVPolicyImpl):
    """One layer of multi-head latent attention."""
