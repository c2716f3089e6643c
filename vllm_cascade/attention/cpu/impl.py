# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU."""

from typing import Any

import torch

from vllm_cascade.attention.cpu.builder import CPUMetadata
from vllm_cascade.attention.cpu.paths import Path, choose
from vllm_cascade.attention.layer import KVPolicyImpl, NewTokens
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import Rotary


class CPUKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: all single tokens at once, each longer stride on its own."""

    knows_windows = knows_sinks = True
    path: Path | None = None

    def prepare(self, spec: KVPolicySpec, *args: Any, **kwargs: Any) -> None:
        super().prepare(spec, *args, **kwargs)
        self.path = choose(self._layer, self._pages, self.num_heads, spec.schedule)

    def rotation_table(self, rotary: Rotary, positions: int, device: torch.device) -> torch.Tensor:
        return rotary.table(positions)

    def run(self, name: str, metadata: CPUMetadata, new: NewTokens, kv_cache: torch.Tensor) -> None:
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        for wave in metadata.waves:
            if wave.singles is not None:
                self.path.tokens(wave.singles, new)
            for stride in wave.strides:
                self.path.stride(stride, new)
            if self.recorder is not None:
                self.recorder.record(name, self._pages, wave.rows, metadata.table)
