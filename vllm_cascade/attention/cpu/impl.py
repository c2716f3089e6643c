# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU."""

import torch
from vllm.v1.attention.backend import AttentionLayer

from vllm_cascade.attention.cpu.builder import CPUMetadata
from vllm_cascade.attention.cpu.paths import Path, choose
from vllm_cascade.attention.layer import KVPolicyImpl
from vllm_cascade.cache.layout import page_views
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import Rotary


class CPUKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: all single tokens at once, each longer stride on its own."""

    path: Path | None = None

    def prepare(
        self,
        spec: KVPolicySpec,
        kv_cache: torch.Tensor,
        rotary: Rotary | None,
        num_ranks: int = 1,
    ) -> None:
        """Fix what no step changes; called once the page pool exists.

        Args:
            num_ranks: tensor-parallel ranks that the model's heads are spread over.
        """
        rotation = None if rotary is None else rotary.table(spec.policy.max_position)
        self._layer = self.layer_config(spec, rotation, rotary, num_ranks)
        self._pages = page_views(kv_cache, spec)
        self.path = choose(self._layer, self._pages, self.num_heads, spec.schedule)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and move the cache to its next state.

        Args:
            query: ``[num_tokens, num_heads, head_size]``, rotated at cache positions.
            key, value: ``[num_tokens, num_kv_heads, head_size]``.
            kv_cache: the layer's page pool; read through the views made in ``prepare``.
            attn_metadata: None in a profiling run, which must not touch the cache.
            output: like ``query``; written.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported")
        if attn_metadata is None:
            return output.zero_()
        assert self.path is not None and self._pages is not None, "prepare() was not called"
        for wave in attn_metadata.waves:
            if wave.singles is not None:
                self.path.tokens(wave.singles, query, key, value, output)
            for stride in wave.strides:
                self.path.stride(stride, query, key, value, output)
            if self.recorder is not None:
                table = attn_metadata.table
                self.recorder.record(layer.layer_name, self._pages, wave.rows, table)
        return output
