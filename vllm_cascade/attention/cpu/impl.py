# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU.

In Gemma 3n and Gemma 4 E2B and E4B the last layers attend to the caches of earlier ones. Such a
layer must see the cache as its owner saw it. So the owner attends first and inserts only when the
last of these layers has attended. A step then has at most one stride of a request
(``engine/scheduler.py``). In IQuest Loop Coder a layer attends to its own cache again in the second
run, without keys, and inserts then.
"""

from dataclasses import replace
from typing import Any, Self

import torch

from vllm_cascade.attention.cpu.builder import CPUMetadata, CPUWave
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.cpu.paths import Path, choose
from vllm_cascade.attention.cpu.recall import LayerRecall
from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.latent import LatentImpl
from vllm_cascade.attention.layer import NewTokens, Part
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.recall.stores import Stores
from vllm_cascade.step.inputs import Singles, Stride, Undone


class CPUKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: single tokens in one batch, longer strides one by one.

    Attributes:
        path: attends and inserts; only inserts if other layers attend to this layer's cache.
        attending: attends only; None if no cache is shared.
        owner: the layer whose cache this one attends to; itself if it attends twice; None: its own.
        last: name of the last layer that attends to this layer's cache; empty: no other does.
        waiting: rows of the step that are not inserted yet.
    """

    knows_windows = knows_sinks = knows_codes = knows_sharing = True
    path: Path | None = None
    attending: Path | None = None
    owner: Self | None = None
    last: str = ""
    waiting: NewTokens | None = None
    recall: LayerRecall | None = None

    def prepare(self, spec: KVPolicySpec, *args: Any, **kwargs: Any) -> None:
        super().prepare(spec, *args, **kwargs)
        assert self._layer is not None and self._pages is not None, "set by KVPolicyImpl"
        self.path = choose(self._layer, self._pages, self.num_heads, spec.schedule)
        self._schedule = spec.schedule

    def attend_to(self, owner: Self) -> None:
        self.owner, owner.last = owner, self.name
        owner.path, self.attending = owner._path("insert"), self._path("attend")
        owner.attending = owner._path("attend")

    def _path(self, part: Part) -> Path:
        assert self._layer is not None and self._pages is not None, "prepare() was not called"
        layer = replace(self._layer, part=part)
        return choose(layer, self._pages, self.num_heads, self._schedule)

    def recall_from(self, stores: Stores, index: int, most_queries: int) -> None:
        assert self._layer is not None and self._pages is not None, "prepare() was not called"
        in_8_bits, native = stores.shape.in_8_bits, None
        if isinstance(self.path, NativePath):
            native = self.path.recall(index)
        self.recall = LayerRecall(self._layer, self._pages, index, most_queries, native, in_8_bits)

    def keep_drafts(self, most_requests: int) -> None:
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        self.path.keep_drafts(Journal(self._pages, most_requests))

    def undo(self, undone: Undone) -> None:
        assert self.path is not None, "prepare() was not called"
        self.path.undo(undone)
        self._forget(undone)

    def rotation_table(
        self, rotary: Rotary, spec: KVPolicySpec, device: torch.device
    ) -> torch.Tensor:
        forward = spec.policy.recalled
        return rotary.table(spec.max_distance, forward)[forward:]

    def run(self, name: str, metadata: CPUMetadata, new: NewTokens, kv_cache: torch.Tensor) -> None:
        if self.owner is not None and (self.owner is not self or new.key is None):
            self._attend_as_sharer(self.owner, name, metadata, new)
        elif self.last:
            self._attend_as_owner(metadata, new)
        elif metadata.singles and not self._recalls(metadata) and self.recorder is None:
            assert self.path is not None, "prepare() was not called"
            self.path.tokens(metadata.singles, new)
        else:
            for wave in metadata.waves:
                self._select(wave, new)
                self._update(wave, new, metadata.table)

    def _recalls(self, metadata: CPUMetadata) -> bool:
        return self.recall is not None and metadata.recalls

    # --- shared caches ------------------------------------------------------------------------

    def _attend_as_owner(self, metadata: CPUMetadata, new: NewTokens) -> None:
        """Attend, and keep the step's rows until other layers have attended."""
        assert self.waiting is None, f"{self.last} did not run in the previous step"
        assert len(metadata.waves) <= 1, "a step has several strides of a request"
        assert self.attending is not None, "attend_to() sets it"
        for wave in metadata.waves:
            self._select(wave, new)
            _attend(self.attending, wave, new)
        # A compiled model may overwrite the rows; attending again overwrites the output.
        query, key, value = (rows.clone() for rows in new[:3])
        self.waiting = NewTokens(query, key, value, torch.empty_like(new.output))

    def _attend_as_sharer(
        self, owner: Self, name: str, metadata: CPUMetadata, new: NewTokens
    ) -> None:
        """Attend to the owner's cache, and end its step if this is the last layer to do so."""
        waiting = owner.waiting
        assert waiting is not None and self.attending is not None, (
            f"{owner.name} did not run before {name}"
        )
        shared = new._replace(key=waiting.key, value=waiting.value)
        for wave in metadata.waves:
            _attend(self.attending, wave, shared)
        if name == owner.last:
            for wave in metadata.waves:
                owner._update(wave, waiting, metadata.table)
            owner.waiting = None

    # --- one wave -----------------------------------------------------------------------------

    def _select(self, wave: CPUWave, new: NewTokens) -> None:
        """Recall the units that the wave's queries select."""
        if self.recall is None:
            return
        if wave.singles is not None and wave.singles.recall:
            self.recall.select_for_tokens(wave.singles, new)
        for stride in wave.strides:
            self.recall.select_for_stride(stride, new)

    def _update(self, wave: CPUWave, new: NewTokens, table: torch.Tensor) -> None:
        """Attend and insert, and store what is evicted."""
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        if wave.singles is not None:
            self._tokens(self.path, wave.singles, new)
        for stride in wave.strides:
            self._stride(self.path, stride, new)
        if self.recorder is not None:
            self.recorder.record(self.name, self._pages, wave.rows, table)

    def _tokens(self, path: Path, singles: Singles, new: NewTokens) -> None:
        if not singles.recall or self.recall is None:
            path.tokens([singles], new)
            return
        before = self.recall.ranks_before(singles)
        path.tokens([singles], new)
        self.recall.store_of_tokens(singles, before)

    def _stride(self, path: Path, stride: Stride, new: NewTokens) -> None:
        plan = stride.recall
        if plan is None or self.recall is None:
            path.stride(stride, new)
            return
        gone = self.recall.room(plan.stored) if len(plan.stored) else None
        path.stride(stride, new, gone)
        if gone is not None:
            self.recall.store(plan, gone)


def _attend(path: Path, wave: CPUWave, new: NewTokens) -> None:
    if wave.singles is not None:
        path.tokens([wave.singles], new)
    for stride in wave.strides:
        path.stride(stride, new)


class CPULatentImpl(LatentImpl, CPUKVPolicyImpl):
    """One layer of multi-head latent attention."""
