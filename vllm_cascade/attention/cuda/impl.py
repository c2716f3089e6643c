# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer by the Triton kernels: the backend for CUDA.

What the kernels do not know (tokens that are merged, or out of chronological order) runs in
PyTorch, on the same pages. The implementation itself knows no device: where Triton interprets
kernels it runs on the CPU, and so it is tested.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionLayer, MultipleOf

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.cpu.impl import KVPolicyImpl, layer_config
from vllm_cascade.attention.cuda.builder import (
    DeviceWave,
    Strides,
    Tokens,
    TritonMetadata,
    TritonMetadataBuilder,
)
from vllm_cascade.attention.metadata import Stride
from vllm_cascade.attention.torch.stride import attend_and_insert
from vllm_cascade.cache.layout import Pages, page_views
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import Rotary
from vllm_cascade.kernels.triton.assign import assign
from vllm_cascade.kernels.triton.attend import attend
from vllm_cascade.kernels.triton.column_sums import column_sums, stride_scores
from vllm_cascade.kernels.triton.combine import merge, update
from vllm_cascade.kernels.triton.configs import attend_splits
from vllm_cascade.kernels.triton.insert import insert
from vllm_cascade.kernels.triton.insert_stride import insert_strides
from vllm_cascade.kernels.triton.prefill import attend_strides
from vllm_cascade.kernels.triton.rotate import gather, rotation_table
from vllm_cascade.kernels.triton.xformers_prefill import attend_with_xformers, use_xformers


class TritonKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: all single tokens by the decode kernels, all strides by prefill's."""

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
        device = kv_cache.device
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        rotation = None
        if rotary is not None:
            rotation = rotation_table(rotary.inv_freq, spec.policy.max_position, device)
        self._layer = layer_config(self, spec, rotation, rotary, num_ranks)
        self._pages = page_views(kv_cache, spec)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and move the cache to its next state; shapes as in ``CPUKVPolicyImpl``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported")
        if attn_metadata is None:
            return output.zero_()
        # Before the real pool exists, vLLM measures what graphs need on one that it throws away:
        # its block tables are empty, so every row is padding.
        pages = self._pages or page_views(kv_cache, attn_metadata.spec)
        for wave in attn_metadata.waves:
            if wave.tokens is not None:
                self._decode(pages, attn_metadata, wave.tokens, query, key, value, output)
            for strides in wave.strides:
                self._prefill(pages, attn_metadata, strides, query, key, value, output)
            for stride in wave.others:
                self._in_pytorch(pages, stride, query, key, value, output)
            if self.recorder is not None:
                self._record(layer.layer_name, pages, wave)
        return output

    def _decode(
        self,
        pages: Pages,
        metadata: TritonMetadata,
        tokens: Tokens,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        policy, steps, table = metadata.policy, tokens.steps, tokens.table
        rows = slice(0, len(steps)) if tokens.index is None else tokens.index
        query, key, value = query[rows], key[rows], value[rows]
        place = output[rows] if tokens.index is None else torch.empty_like(query)
        num_slots = table.shape[1] * pages.block_size
        splits = attend_splits(query.device, len(query), self.num_kv_heads, num_slots)
        parts, parts_lse, logits, own = attend(
            *(query, key, value, pages.kv, pages.rank, pages.born, table, steps),
            *(self._rotation, self.alibi_slopes, tokens.logit_scale, self.scale, self.softcap),
            *(self._interleaved, splits, policy.uses_scores),
        )
        lse = merge(parts, parts_lse, steps, place)
        if tokens.index is not None:
            output[rows] = place
        new_score = tokens.no_scores
        if policy.uses_scores:
            logits, own, lse = self._all_ranks(logits, own, lse)
            new_score = update(
                *(logits, own, lse, pages.rank, pages.score, table, steps, policy.head_reduction)
            )
        elif tokens.given is not None:
            assign(tokens.given, tokens.scored, pages.rank, pages.score, table, steps)
        # Only policies with scores have rules of cells, and requests may bring their own.
        insert(
            *(key, value, new_score, pages.kv, pages.rank, pages.born, pages.score, pages.token),
            *(table, steps, metadata.rules, policy.uses_scores),
        )

    @property
    def _rotation(self) -> torch.Tensor | None:
        return None if self._layer is None else self._layer.rotation

    @property
    def _interleaved(self) -> bool:
        return self._layer is not None and not self._layer.is_neox

    def _all_ranks(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """``[rows, heads, ...]`` of all tensor-parallel ranks, where those decide together."""
        if self._layer is None or self._layer.gather_heads is None:
            return list(tensors)
        from vllm.distributed import tensor_model_parallel_all_gather

        return [tensor_model_parallel_all_gather(x, dim=1).contiguous() for x in tensors]

    def _prefill(
        self,
        pages: Pages,
        metadata: TritonMetadata,
        strides: Strides,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        policy, steps, table = strides.policy, strides.steps, strides.table
        longest = strides.max_length
        words = (pages.kv, pages.rank, pages.born, pages.score, pages.token)
        keys, values, old_scores, old_tokens = gather(
            *words, table, steps, self._rotation, self._interleaved, strides.max_cached
        )
        bias = (self.alibi_slopes, metadata.logit_scale)
        plain = self.alibi_slopes is None and metadata.logit_scale is None
        plain &= self.softcap == 0 and strides.max_cached > 0
        plain &= len(strides.plans) == 1
        if use_xformers(query.device, query.dtype, self.head_size, longest, plain):
            start = strides.plans[0].place
            rows = slice(start, start + longest)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            output[rows], lse[rows] = attend_with_xformers(
                query[rows], key[rows], value[rows], keys[0], values[0], self.scale
            )
        else:
            lse = attend_strides(
                *(query, key, value, keys, values, steps, *bias, output),
                *(self.scale, self.softcap, longest),
            )
        if policy.uses_scores:
            sums = column_sums(
                *(query, key, keys, lse, strides.decays, steps, *bias),
                *(self.scale, self.softcap, longest),
            )
            (sums,) = self._all_ranks(sums)
            reduction = policy.head_reduction
            scores = stride_scores(sums, old_scores, strides.fades, steps, reduction)
        else:
            scores = _given_scores(strides, old_scores)
        keep = _keep(strides, scores, old_tokens)
        insert_strides(key, value, keep, scores, *words, table, steps, longest)

    def _in_pytorch(
        self,
        pages: Pages,
        stride: Stride,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        assert self._layer is not None, "warm-up rows are left out"
        layer = self._layer
        if stride.policy is not layer.policy:
            layer = replace(layer, policy=stride.policy)
        rows = slice(stride.start, stride.start + stride.num_tokens)
        with torch.device(query.device):  # where the path makes its index tables
            output[rows] = attend_and_insert(
                layer, pages, stride, query[rows], key[rows], value[rows]
            ).to(output.dtype)

    def _record(self, layer: str, pages: Pages, wave: DeviceWave) -> None:
        """Note what the wave left in the cache; reads the device, for inspection only."""
        assert self.recorder is not None
        for part in (wave.tokens, *wave.strides):
            if part is None:
                continue
            lengths = [1] * len(part.steps) if part is wave.tokens else part.steps[:, 5].tolist()
            for row, length in enumerate(lengths):
                stream, slots = part.steps[row, 0].item(), part.steps[row, 3].item()
                if stream >= 0:
                    blocks = part.table[row].long()
                    self.recorder.add(layer, pages, blocks, slots, stream + length)
        for stride in wave.others:
            end = stride.stream + stride.num_tokens
            self.recorder.add(layer, pages, stride.pages, stride.new_slots, end)


def _given_scores(strides: Strides, old_scores: torch.Tensor) -> torch.Tensor:
    """Scores fp32 ``[R, S, C]`` that attention has no part in: 0, or from the host."""
    columns = strides.max_cached + strides.max_length
    scores = old_scores.new_zeros(*old_scores.shape[:2], columns)
    for row, plan in enumerate(strides.plans):
        if plan.given is not None:
            skip = max(-plan.scored, 0)
            given, first = plan.given[skip:], plan.scored + skip
            scores[row, :, : plan.cached] = old_scores[row, :, : plan.cached]
            scores[row, :, first : first + len(given)] = given
    return scores


def _keep(strides: Strides, scores: torch.Tensor, old_tokens: torch.Tensor) -> torch.Tensor:
    """bool like ``scores``: the policy's choice in every stride that deletes something."""
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    for row, stride in enumerate(strides.plans):
        if stride.plan is None:
            continue
        policy, total = stride.policy, stride.cached + stride.num_tokens
        compared = scores[row, :, :total]
        if policy.needs_age:
            end = stride.stream + stride.num_tokens
            new = torch.arange(stride.stream, end, device=scores.device)
            tokens = [old_tokens[row, :, : stride.cached], new.expand(len(compared), -1)]
            compared = policy.comparable(compared, end - torch.cat(tokens, dim=1))
        keep[row, :, :total] = policy.keep(compared, stride.plan)
    return keep


class CUDAKVPolicyBackend(KVPolicyBackend):
    """vLLM's ``CUSTOM`` backend while a policy is on."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonKVPolicyImpl]:
        return TritonKVPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        return TritonMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256
