# SPDX-License-Identifier: Apache-2.0
"""A layer's kernels, bound to the layer's constants.

The impl makes them once its pages exist, and calls them in every step.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.cache.layout import Pages
from vllm_cascade.cache.spec import TRACE_WORDS, KVPolicySpec
from vllm_cascade.kernels.triton.assign import Assignment
from vllm_cascade.kernels.triton.attend import DecodeAttention
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.chunk import ChunkAttention
from vllm_cascade.kernels.triton.column_sums import ColumnSums
from vllm_cascade.kernels.triton.configs import Split
from vllm_cascade.kernels.triton.drafts import Saved, VersionSaver
from vllm_cascade.kernels.triton.gather import StrideGather
from vllm_cascade.kernels.triton.insert import Insertion
from vllm_cascade.kernels.triton.insert_stride import StrideInsertion
from vllm_cascade.kernels.triton.keep import StrideChoice
from vllm_cascade.kernels.triton.merge import Merge, ScoredMerge
from vllm_cascade.kernels.triton.prefill import StrideAttention
from vllm_cascade.kernels.triton.scores import HeadMasses, MassScores
from vllm_cascade.kernels.triton.stored import Codes
from vllm_cascade.policies.registry import may_have_cells


class SingleKernels(NamedTuple):
    """A layer's kernels for single tokens, bound to its constants.

    ``rank_scores``: before and after tensor-parallel ranks put masses together, if they do.
    """

    attention: DecodeAttention
    merge: Merge | ScoredMerge
    plain_merge: Merge
    assignment: Assignment
    insertion: Insertion
    versions: VersionSaver | None
    rank_scores: tuple[HeadMasses, MassScores] | None
    num_sets: int


class StrideKernels(NamedTuple):
    """A layer's kernels for a prompt's strides, bound to its constants."""

    gather: StrideGather
    attention: StrideAttention
    sums: ColumnSums
    choice: StrideChoice
    insertion: StrideInsertion
    num_sets: int
    unit: int
    reduction: str


class LayerKernels(NamedTuple):
    """A layer's kernels; ``strides``: None in layers with a window."""

    singles: SingleKernels
    strides: StrideKernels | None
    chunks: ChunkAttention


def make_kernels(
    cached: CachedLayer,
    pages: Pages,
    spec: KVPolicySpec,
    layer: LayerConfig | None,
    saved: Saved | None,
    split: Split,
) -> LayerKernels:
    """Create one layer's kernels.

    Args:
        cached: the layer's constants, on ``pages``.
        layer: None while vLLM profiles memory on a temporary pool.
        saved: what drafts replace, or None.
        split: of a stride's attention.
    """
    sinks = None if layer is None or layer.sinks is None else layer.sinks.flatten()
    rotation = None if layer is None else layer.rotation
    salts = None if layer is None else layer.salts
    together = layer is not None and layer.over_ranks is not None
    singles = _single_kernels(cached, pages, spec, sinks, salts, saved, together)
    chunks = ChunkAttention(cached, rotation, sinks, spec.window, spec.chunked)
    if spec.window is not None:
        return LayerKernels(singles, None, chunks)
    reduction = spec.policy.head_reduction
    strides = StrideKernels(
        gather=StrideGather(cached),
        attention=StrideAttention(cached, sinks, split),
        sums=ColumnSums(cached, reduction),
        choice=StrideChoice(pages.token, pages.unit, reduction, salts),
        insertion=StrideInsertion(replace(cached, rotation=rotation), reduction, salts),
        num_sets=cached.num_sets,
        unit=cached.unit,
        reduction=reduction,
    )
    return LayerKernels(singles, strides, chunks)


def _single_kernels(
    cached: CachedLayer,
    pages: Pages,
    spec: KVPolicySpec,
    sinks: torch.Tensor | None,
    salts: torch.Tensor | None,
    saved: Saved | None,
    together: bool,
) -> SingleKernels:
    """``together``: whether tensor-parallel ranks share the heads of a set."""
    reduction, scores = spec.policy.head_reduction, spec.policy.uses_attention
    where = cached.num_queries, cached.value_size, sinks
    has_cells = spec.window is None and may_have_cells(spec.policy)
    merge: Merge | ScoredMerge = (plain := Merge(*where))
    rank_scores = None
    if scores and not together:
        words = words_of(pages, "rank", "score")
        merge = ScoredMerge(*where, **words, reduction=reduction, unit=pages.unit)
    elif scores and reduction != "median":
        masses = HeadMasses(pages.rank, cached.num_queries, reduction, pages.unit)
        rank_scores = masses, MassScores(pages.rank, pages.score, pages.unit)
    versions = None  # none before there are pages
    if saved is not None:
        versions = VersionSaver(**words_of(pages, "rank", "score", "versions"), unit=pages.unit)
    return SingleKernels(
        attention=DecodeAttention(cached, keep_logits=scores),
        merge=merge,
        plain_merge=plain,
        assignment=Assignment(pages.rank, pages.score, pages.unit, salts),
        versions=versions,
        insertion=Insertion(cached, has_cells, saved),
        rank_scores=rank_scores,
        num_sets=cached.num_sets,
    )


def stored_of(pages: Pages) -> Codes | None:
    """How kernels read and write the rows of pages in 8 bits; None: rows are not quantised."""
    quantised = pages.quantised
    if quantised is None:
        return None
    scales = quantised.scales if pages.scale is None else pages.scale
    assert scales is not None, "rows or the layer have scales"
    return Codes(quantised.code, scales)


def words_of(pages: Pages, *names: str) -> dict[str, Any]:
    """Views of the pages by name: these, or rows and all numbers of units."""
    return {name: getattr(pages, name) for name in names or ("kv", *TRACE_WORDS)}
