# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer through the C++ library: one call per batch of tokens or per stride."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_cascade.attention.cpu.native_recall import NativeRecall
from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.layer import LayerConfig, NewTokens
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.cpp import library as cpp
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.step.inputs import Singles, Stride, Undone


def refusal(
    layer: LayerConfig, pages: Pages, num_heads: int, schedule: Schedule, library: cpp.Library
) -> str | None:
    """The reason why the library cannot run a layer, or None if it can."""
    if layer.gather_heads is not None and layer.uses_attention:
        return "tensor-parallel ranks exchange scores in the middle of a step"
    for dtype in (_stored(pages), _dtype(layer, pages)):
        if dtype not in library.dtypes | library.codes:
            return f"the compiler has no {dtype}"
    if schedule.moves_tokens:
        return f"policy {schedule.policy.name} merges tokens, or puts them out of order"
    if cpp.TILE % pages.unit and pages.unit % cpp.TILE:
        return f"units of {pages.unit} tokens neither divide {cpp.TILE} nor are multiples of it"
    if num_heads > cpp.MAX_QUERY_HEADS:
        return f"more than {cpp.MAX_QUERY_HEADS} query heads"
    return None


class NativePath:
    """One layer's calls into the library; ``PyTorchPath`` is the reference."""

    def __init__(
        self,
        library: cpp.Library,
        layer: LayerConfig,
        pages: Pages,
        num_heads: int,
        schedule: Schedule,
    ) -> None:
        self.library = library
        self._kept: tuple[Any, ...] = layer, pages  # keeps the tensors behind the addresses alive
        self._layer = _layer(layer, pages, num_heads, schedule)
        self._dtype = _dtype(layer, pages)

    def recall(self, index: int) -> NativeRecall:
        """Create the object that selects and moves the layer's evicted units.

        Args:
            index: the layer's index in its requests' logs.
        """
        return NativeRecall(self.library, self._layer, index)

    def keep_drafts(self, journal: Journal) -> None:
        """Save what draft tokens change from now on."""
        versions = self._kept[1].versions
        assert versions is not None and versions[0].is_contiguous()
        self._kept = *self._kept[:2], journal
        layer = self._layer
        layer.versions, layer.drafts = versions.data_ptr(), journal.most
        layer.draft_rows, layer.draft_words = journal.rows.data_ptr(), journal.words.data_ptr()
        layer.draft_scales = _address(journal.scale)

    def undo(self, undone: Undone) -> None:
        rows, table = undone.rows, undone.table
        assert rows.is_contiguous() and table.is_contiguous()
        made = cpp.Undone(len(rows), table.shape[1], rows.data_ptr(), table.data_ptr())
        self.library.undo_tokens(self._layer, made)

    def tokens(self, waves: Sequence[Singles], new: NewTokens) -> None:
        assert new.query.dtype == self._dtype, (new.query.dtype, self._dtype)
        batches, rows = _batches(waves), cpp.row_addresses(new)
        self.library.attend_and_insert_tokens(self._layer, batches, rows)

    def stride(self, stride: Stride, new: NewTokens, evicted: Evicted | None = None) -> None:
        assert new.query.dtype == self._dtype, (new.query.dtype, self._dtype)
        made = _stride(stride)
        if evicted is not None:
            made.num_evicted, made.evicted_rows = len(evicted), evicted.rows.data_ptr()
            made.evicted_scale = _address(evicted.scale)
            made.evicted_born = evicted.born.data_ptr()
            made.evicted_token = evicted.token.data_ptr()
        self.library.attend_and_insert_stride(self._layer, made, cpp.row_addresses(new))


def _layer(layer: LayerConfig, pages: Pages, num_heads: int, schedule: Schedule) -> cpp.Layer:
    rotation, stored = layer.rotation, _stored(pages)
    quantised = pages.quantised
    if pages.scale is not None:
        assert pages.scale.stride()[:2] == (pages.rank.stride(0), 2 * pages.block_size)
    for words in (pages.rank, pages.born, pages.score):
        assert words.stride() == pages.rank.stride() and words[0].is_contiguous(), words.stride()
    assert rotation is None or rotation.is_contiguous()
    for heads in (layer.slopes, layer.sinks):
        assert heads is None or heads.is_contiguous()
    return cpp.Layer(
        kv=pages.kv.data_ptr(),
        rank=pages.rank.data_ptr(),
        born=pages.born.data_ptr(),
        score=pages.score.data_ptr(),
        token=_address(pages.token),
        slopes=_address(layer.slopes),
        rotation=_address(rotation),
        sinks=_address(layer.sinks),
        scales=_address(None if quantised is None else quantised.scales),
        row_scale=_address(pages.scale),
        salts=_address(layer.salts),
        page_bytes=pages.kv.stride(0) * pages.kv.element_size(),
        page_words=pages.rank.stride(0),
        num_heads=layer.num_kv_heads,
        group=num_heads // layer.num_kv_heads,
        head_size=layer.head_size,
        value_size=layer.value_size,
        value_at=layer.row_size - layer.value_size,
        row_size=layer.row_size,
        num_sets=layer.num_sets,
        block_size=pages.block_size,
        unit=pages.unit,
        page_units=pages.rank.shape[2],
        half=0 if rotation is None else rotation.shape[-1],
        is_neox=layer.is_neox,
        dtype=cpp.DTYPES[_dtype(layer, pages)],
        stored=(cpp.DTYPES | cpp.CODES)[stored],
        stored_bytes=stored.itemsize,
        uses_scores=schedule.scoring.source != "none",
        reduction=cpp.REDUCTIONS[layer.reduction],
        window=layer.window or 0,
        chunked=layer.chunked,
        attends=layer.part != "insert" or schedule.scoring.source == "attention",
        inserts=layer.part != "attend",
        scale=layer.scale,
        softcap=layer.softcap,
    )


def _stored(pages: Pages) -> torch.dtype:
    """Dtype of the rows in pages."""
    return pages.kv.dtype if pages.quantised is None else pages.quantised.code


def _dtype(layer: LayerConfig, pages: Pages) -> torch.dtype:
    """Dtype of new tokens' rows."""
    return layer.dtype or pages.kv.dtype


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _batches(waves: Sequence[Singles]) -> cpp.Batches:
    """The library's structs of waves of single tokens, built once per step for all layers."""
    kept, key = waves[0].kept, f"native {len(waves)}"
    if key not in kept:
        kept[key] = cpp.Batches(*map(_tokens, waves))
    return kept[key]


def _tokens(singles: Singles) -> cpp.Tokens:
    assert singles.steps.is_contiguous() and singles.table.is_contiguous()
    assert singles.steps.dtype == singles.table.dtype == singles.rules.dtype == torch.int32
    return cpp.Tokens(
        count=len(singles.steps),
        num_pages=singles.table.shape[1],
        steps=singles.steps.data_ptr(),
        pages=singles.table.data_ptr(),
        logit_scale=_address(singles.logit_scale),
        given=_address(singles.given),
        scored=_address(singles.scored),
        rules=singles.rules.data_ptr(),
        shift=_address(singles.shift),
        saves=_address(singles.saves),
        moved=singles.moved,
    )


def _stride(stride: Stride) -> cpp.Stride:
    """The library's struct of a stride, built once per stride for all layers."""
    made = stride.kept.get("native")
    if made is not None:
        return made
    schedule = stride.schedule
    assert stride.step.is_contiguous() and stride.pages.is_contiguous()
    assert stride.step.dtype == stride.pages.dtype == torch.int32
    made = cpp.Stride(
        step=stride.step.data_ptr(),
        pages=stride.pages.data_ptr(),
        moved=stride.moved,
        logit_scale=_address(stride.logit_scale),
        given=_address(stride.given),
        scored=stride.scored,
        shift=stride.shift,
        rules=schedule.rules.ctypes.data,
        first=schedule.first.ctypes.data,
        transient=schedule.transient,
        period=schedule.period,
        recalled=stride.recalled,
        recalls_more=stride.recalls_more,
    )
    stride.kept["native"] = made
    return made
