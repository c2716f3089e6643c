# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU."""

from dataclasses import replace
from typing import Any

import torch

from vllm_cascade.attention.cpu.builder import CPUMetadata, CPUWave
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.cpu.paths import Path, choose
from vllm_cascade.attention.cpu.recall import LayerRecall
from vllm_cascade.attention.latent import LatentImpl
from vllm_cascade.attention.layer import NewTokens, Part
from vllm_cascade.attention.shared import SharingImpl
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.recall.stores import Stores
from vllm_cascade.step.inputs import Singles, Stride, Undone


class CPUKVPolicyImpl(SharingImpl):
    """Runs a step's waves: single tokens in one batch, longer strides one by one.

    Attributes:
        path: attends and inserts; only inserts if layers share the cache. ``prepare`` sets it.
        attending: attends only; None if no cache is shared.
    """

    knows_windows = knows_sinks = knows_codes = True
    path: Path
    attending: Path | None = None
    recall: LayerRecall | None = None

    def prepare(self, spec: KVPolicySpec, *args: Any, **kwargs: Any) -> None:
        super().prepare(spec, *args, **kwargs)
        self.path = choose(self.layer_config, self.pages, self.num_heads, spec.schedule)
        self._schedule = spec.schedule

    def attend_to(self, owner: Any) -> None:
        super().attend_to(owner)
        owner.path, self.attending = owner._path("insert"), self._path("attend")
        owner.attending = owner._path("attend")

    def _path(self, part: Part) -> Path:
        layer = replace(self.layer_config, part=part)
        return choose(layer, self.pages, self.num_heads, self._schedule)

    def recall_from(self, stores: Stores, index: int, most_queries: int) -> None:
        layer, in_8_bits, native = self.layer_config, stores.shape.in_8_bits, None
        if isinstance(self.path, NativePath) and layer.gather_heads is None:
            native = self.path.recall(index)  # ranks that choose together do so in PyTorch
        self.recall = LayerRecall(layer, self.pages, index, most_queries, native, in_8_bits)

    def keep_drafts(self, most_requests: int) -> None:
        self.path.keep_drafts(Journal(self.pages, most_requests))

    def undo(self, undone: Undone) -> None:
        self.path.undo(undone)
        self._forget(undone)

    def run(self, name: str, metadata: CPUMetadata, new: NewTokens, kv_cache: torch.Tensor) -> None:
        if self.run_shared(name, metadata, new):
            return
        if metadata.singles and not self._recalls(metadata) and self.recorder is None:
            self.path.tokens(metadata.singles, new)
        else:
            for wave in metadata.waves:
                self._select_units(metadata, wave, new)
                self._end_wave(metadata, wave, new)

    def _recalls(self, metadata: CPUMetadata) -> bool:
        return self.recall is not None and metadata.recalls

    # --- one wave -----------------------------------------------------------------------------

    def _select_units(self, metadata: CPUMetadata, wave: CPUWave, new: NewTokens) -> None:
        if self.recall is None:
            return
        if wave.singles is not None and wave.singles.recall:
            self.recall.select_for_tokens(wave.singles, new)
        for stride in wave.strides:
            self.recall.select_for_stride(stride, new)

    def _only_attend(self, metadata: CPUMetadata, wave: CPUWave, new: NewTokens) -> None:
        assert self.attending is not None, "attend_to() sets it"
        if wave.singles is not None:
            self.attending.tokens([wave.singles], new)
        for stride in wave.strides:
            self.attending.stride(stride, new)

    def _end_wave(self, metadata: CPUMetadata, wave: CPUWave, new: NewTokens) -> None:
        if wave.singles is not None:
            self._tokens(wave.singles, new)
        for stride in wave.strides:
            self._stride(stride, new)
        if self.recorder is not None:
            self.recorder.record(self.name, self.pages, wave.rows, metadata.table)

    def _tokens(self, singles: Singles, new: NewTokens) -> None:
        if not singles.recall or self.recall is None:
            self.path.tokens([singles], new)
            return
        before = self.recall.ranks_before(singles)
        self.path.tokens([singles], new)
        self.recall.store_of_tokens(singles, before)

    def _stride(self, stride: Stride, new: NewTokens) -> None:
        plan = stride.recall
        if plan is None or self.recall is None:
            self.path.stride(stride, new)
            return
        gone = self.recall.room(plan.stored) if len(plan.stored) else None
        self.path.stride(stride, new, gone)
        if gone is not None:
            self.recall.store(plan, gone)


class CPULatentImpl(LatentImpl, CPUKVPolicyImpl):
    """One layer of multi-head latent attention."""
