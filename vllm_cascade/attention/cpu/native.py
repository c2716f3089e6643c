# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the CPU in C++: both kinds of stride, one or two calls each."""

from typing import Any

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.metadata import Stride, TokenBatch
from vllm_cascade.attention.torch.stride import chronological_slots, comparable
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.cpp import library as native
from vllm_cascade.policies import Policy


def refusal(
    layer: LayerConfig, pages: Pages, num_heads: int, library: native.Library
) -> str | None:
    """Why a layer cannot run in the library; None where it can."""
    if layer.gather_heads is not None:
        return "tensor-parallel ranks exchange scores in the middle of a step"
    if pages.kv.dtype not in library.dtypes:
        return f"the compiler has no {pages.kv.dtype}"
    if type(layer.policy).comparable is not Policy.comparable:
        return f"policy {layer.policy.name} compares something else than scores"
    if layer.policy.arranges:
        return f"policy {layer.policy.name} puts tokens at other positions than their ranks"
    if layer.policy.merge_into is not None:
        return f"policy {layer.policy.name} merges tokens"
    if num_heads > native.MAX_QUERY_HEADS:
        return f"more than {native.MAX_QUERY_HEADS} query heads"
    return None


class NativePath:
    """One layer's calls into the library; see ``PyTorchPath`` for what they compute."""

    def __init__(
        self, library: native.Library, layer: LayerConfig, pages: Pages, num_heads: int
    ) -> None:
        self._library = library
        self._config = layer
        self._pages = pages
        self._args = _layer_args(layer, pages, num_heads)

    def tokens(
        self,
        batch: TokenBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        rows = _rows(query, key, value, output)
        self._library.attend_and_insert_tokens(self._args, _token_args(batch), rows)

    def stride(
        self,
        stride: Stride,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        config = self._config
        total = stride.cached + stride.num_tokens
        scored = _has_scores(config.policy)
        scores = (torch.empty if scored else torch.zeros)(config.num_sets, total)
        args = _stride_args(stride, scores if scored else None)
        rows = _rows(query, key, value, output)
        self._library.attend_stride(self._args, args, rows)
        values = scores
        if config.policy.needs_age:
            order = chronological_slots(self._pages, stride)
            values = comparable(config, self._pages, stride, order, scores)
        keep = config.policy.keep(values, stride.plan).contiguous()
        assert keep.shape == scores.shape and keep.dtype == torch.bool, keep.shape
        self._library.insert_stride(self._args, args, rows, keep)


def _has_scores(policy: Policy) -> bool:
    """Whether anything is compared, be it attention's or the host's."""
    return policy.uses_scores or policy.token_scores is not None


def _layer_args(layer: LayerConfig, pages: Pages, num_heads: int) -> native.Layer:
    """The tensors stay alive as members of ``layer`` and ``pages``."""
    policy, rotation = layer.policy, layer.rotation
    for words in (pages.rank, pages.born, pages.score):
        assert words.stride() == pages.rank.stride() and words[0].is_contiguous(), words.stride()
    assert rotation is None or rotation.is_contiguous()
    assert layer.slopes is None or layer.slopes.is_contiguous()
    return native.Layer(
        kv=pages.kv.data_ptr(),
        rank=pages.rank.data_ptr(),
        born=pages.born.data_ptr(),
        score=pages.score.data_ptr(),
        token=_address(pages.token),
        slopes=_address(layer.slopes),
        rotation=_address(rotation),
        page_bytes=pages.kv.stride(0) * pages.kv.element_size(),
        page_words=pages.rank.stride(0),
        num_heads=layer.num_kv_heads,
        group=num_heads // layer.num_kv_heads,
        head_size=layer.head_size,
        num_sets=layer.num_sets,
        block_size=pages.block_size,
        half=0 if rotation is None else rotation.shape[-1],
        is_neox=layer.is_neox,
        dtype=native.DTYPES[pages.kv.dtype],
        uses_scores=_has_scores(policy),
        reduction=native.REDUCTIONS[policy.head_reduction],
        newest_stays=policy.tie == "incoming",
        per_age=policy.needs_age,
        scale=layer.scale,
        softcap=layer.softcap,
        decay=policy.decay,
        weight=policy.weight,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_last: tuple[Any, native.Tokens] | None = None


def _token_args(batch: TokenBatch) -> native.Tokens:
    """All layers of a step share a batch, so its structure is made once."""
    global _last
    last = _last
    if last is not None and last[0] is batch:
        return last[1]
    count, num_pages = batch.pages.shape
    args = native.Tokens(
        count=count,
        num_pages=num_pages,
        index=batch.index.data_ptr(),
        stream=batch.stream.data_ptr(),
        pages=batch.pages.data_ptr(),
        cached=batch.cached.data_ptr(),
        old_slots=batch.old_slots.data_ptr(),
        new_slots=batch.new_slots.data_ptr(),
        lo=batch.lo.data_ptr(),
        hi=batch.hi.data_ptr(),
        logit_scale=_address(batch.logit_scale),
        given=_address(batch.host_scores),
        scored=_address(batch.scored),
        moved=batch.moved,
    )
    _last = batch, args
    return args


def _stride_args(stride: Stride, scores: torch.Tensor | None) -> native.Stride:
    return native.Stride(
        pages=stride.pages.data_ptr(),
        start=stride.start,
        num_tokens=stride.num_tokens,
        stream=stride.stream,
        cached=stride.cached,
        old_slots=stride.old_slots,
        new_slots=stride.new_slots,
        moved=stride.moved,
        logit_scale=_address(stride.logit_scale),
        given=_address(stride.host_scores),
        scored=stride.scored,
        scores=_address(scores),
    )


def _rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> native.Rows:
    """``[num_tokens, heads, head_size]`` each; slices of a fused projection will do."""
    size, strides = query.shape[2], []
    for rows in (query, key, value, output):  # called for every layer and step: microseconds count
        step, head, channel = rows.stride()
        assert channel == 1 and head == size and rows.dtype == query.dtype, (rows.stride(), size)
        strides.append(step)
    return native.Rows(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(), *strides
    )
