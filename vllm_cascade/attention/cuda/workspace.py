# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the kernels, shared by all layers, strides and tokens.

Kernels run one after another, so one buffer and one row of counters serve all. Every kernel resets
its counters to 0. vLLM's profiling run reserves both for the worst batch (``reserve``), so that
vLLM sizes the page pool by the memory that is left. Strides then allocate nothing.
"""

import math
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.config import SchedulerConfig

from vllm_cascade.kernels.triton.column_sums import num_sums
from vllm_cascade.kernels.triton.configs import Split, stride_split
from vllm_cascade.kernels.triton.insert_stride import num_programs
from vllm_cascade.kernels.triton.recall import judged_shapes
from vllm_cascade.kernels.triton.recall_choose import chosen_shapes
from vllm_cascade.kernels.triton.shapes import Shapes
from vllm_cascade.kernels.triton.split import MARKS, Partial
from vllm_cascade.kernels.triton.strides import LINE_WORDS, NUMBER_ROWS, VALUE_ROWS
from vllm_cascade.policies.policy import Policy

ALIGNED = 256
"""Alignment of tensors in bytes. A pointer's alignment selects a kernel variant."""
MOST_GATHERED = 128 << 20
"""Most channels gathered per launch over strides, unless one stride alone needs more."""

_of_devices: WeakValueDictionary[torch.device, "Workspace"] = WeakValueDictionary()


class Workspace:
    """One scratch buffer and one row of counters, which grow on demand.

    Attributes:
        grown: times that the buffer has grown.
        reserved_for: what describes layers for which ``reserve`` was called.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._counters = torch.empty(0, dtype=torch.int32, device=device)
        self._of_graphs: dict[int, torch.Tensor] = {}
        self.grown = 0
        self.reserved_for: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        return len(self._memory) + 4 * len(self._counters)

    def reserve(self, num_bytes: int, num_counters: int = 0) -> None:
        """Grow to at least these sizes. Tensors carved earlier keep their memory."""
        if num_counters > len(self._counters):
            self._counters = self._counters.new_zeros(num_counters)
        if num_bytes > len(self._memory):
            self._memory = self._memory.new_empty(num_bytes)
            self.grown += 1

    def carve(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Uninitialised tensors side by side in the buffer, valid until the next ``carve``."""
        self.reserve(size_of(shapes))
        made, begin = {}, 0
        for name, (shape, dtype) in shapes.items():
            size = math.prod(shape) * dtype.itemsize
            made[name] = self._memory[begin : begin + size].view(dtype).view(shape)
            begin += -(-size // ALIGNED) * ALIGNED
        return made

    def keep(self) -> None:
        """Never free the buffer as it is now: a captured graph writes into it."""
        self._of_graphs[self._memory.data_ptr()] = self._memory

    def counters(self, number: int) -> torch.Tensor:
        """Zeroed int32 counters; kernels must reset them."""
        self.reserve(0, number)
        return self._counters[:number]


def size_of(shapes: Shapes) -> int:
    """Bytes that ``carve`` needs for ``shapes``."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def workspace_of(device: torch.device) -> Workspace:
    """A device's workspace. All engines of a process share it, as they never run concurrently.

    Callers must hold it as long as they use its memory: it is freed with the last layer.
    """
    found = _of_devices.get(device)
    if found is None:
        found = _of_devices[device] = Workspace(device)
    return found


def split_of(policy: Policy, query: torch.Tensor, least: int) -> Split:
    """How a layer splits attention of strides over keys; ``query``: ``[.., H * G, D]``.

    A per-request policy may use fewer slots than the engine's policy, and then fewer parts.
    """
    num_queries, head_size = query.shape[1:]
    return stride_split(
        query.device,
        query.dtype,
        head_size=head_size,
        num_queries=num_queries,
        longest=policy.prefill_stride,
        most_keys=policy.capacity,
        least=least,
    )


def rows_at_once(channels: int) -> int:
    """Strides in a launch, if so many channels are gathered for each."""
    return max(MOST_GATHERED // max(channels, 1), 1)


def stride_shapes(
    num_rows: int,
    num_sets: int,
    width: int,
    num_tokens: int,
    query: torch.Tensor,
    num_heads: int,
    unit: int,
    reduction: str | None,
    splits: int,
    most_slots: int,
    latent: int | None = None,
) -> Shapes:
    """Shapes of the tensors that the stride kernels pass to each other.

    Args:
        num_rows: strides in a launch.
        num_sets: head sets.
        width: units, as in ``PrefillRows.width``.
        num_tokens: tokens of the whole step.
        query: ``[.., H * G, D]``.
        num_heads: KV heads.
        unit: tokens per unit.
        reduction: reduction over the query heads of a set; None if attention computes no scores.
        splits: splits of attention over keys.
        most_slots: most slots in use of a request.
        latent: channels of a latent row's value, or None.
    """
    shared = num_rows, num_sets, num_programs(num_rows, num_sets)
    row = query.shape[2] * (1 if latent else 2)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "gathered": ((num_rows, num_heads, most_slots, row), query.dtype),
        "lse": ((num_tokens, query.shape[1]), torch.float32),
        "line": ((num_rows, num_sets, LINE_WORDS, width), torch.int32),
        "notes": ((*shared, NUMBER_ROWS, width), torch.int32),
        "values": ((*shared, VALUE_ROWS, width), torch.float32),
    }
    if reduction is not None:
        heads, parts = num_sums(query, num_heads, unit, reduction)
        shapes["sums"] = ((num_rows, heads, width * parts), torch.float32)
    if splits > 1:
        each = num_tokens, query.shape[1], splits
        shapes["partial"] = ((*each, latent or query.shape[2]), torch.float32)
        shapes["marks"] = ((*each, MARKS), torch.float32)
    return shapes


def chunk_shapes(
    num_rows: int, query: torch.Tensor, num_heads: int, most_cached: int, latent: int | None
) -> Shapes:
    """Shapes of the memory for a chunk's strides.

    Args:
        num_rows: strides of all chunks.
        query: ``[.., H * G, D]``.
        num_heads: KV heads.
        most_cached: most tokens that a stride sees before its own.
        latent: channels of a latent row's value, or None.
    """
    row, cached = query.shape[2] * (1 if latent else 2), max(most_cached, 1)
    most = rows_at_once(num_heads * cached * row)
    shape = min(num_rows, most), num_heads, cached, row
    return {"gathered": (shape, query.dtype)}


def worst_chunks(
    num_rows: int, query: torch.Tensor, num_heads: int, slots: int, latent: int | None
) -> Shapes:
    """``chunk_shapes`` of the strides that need the most memory: the fewer cached tokens they see,
    at most ``slots``, the more of them share a launch."""
    (gathered,) = chunk_shapes(1, query, num_heads, slots, latent).values()
    one = math.prod(gathered[0])
    most = min(max(MOST_GATHERED, one), num_rows * one)
    return {"gathered": ((most,), query.dtype)}


def worst_singles(
    num_rows: int,
    num_queries: int,
    splits: int,
    value_size: int,
    slots: int,
    num_sets: int,
    cells: int = 0,
    num_ranks: int = 1,
) -> Shapes:
    """Shapes of what the kernels of so many single tokens leave each other (``Singles``).

    Args:
        slots: of a request; 0 where attention computes no scores.
        cells: slots of a request; 0 where no rules have cells.
        num_ranks: tensor-parallel ranks, which put masses together.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "partial": (num_rows, num_queries, splits, value_size),
        "partial_lse": (num_rows, num_queries, splits),
        "lse": (num_rows, num_queries),
        "logits": (num_rows, num_queries, slots),
        "own": (num_rows, num_queries),
        "cells": (num_rows, num_sets, max(cells, 1)),
        "new_score": (num_rows, num_sets),
    }
    if num_ranks > 1 and slots:
        shapes["masses"] = num_rows, slots + 1
    return {name: (shape, torch.float32) for name, shape in shapes.items()}


def judged_at_once(most_requests: int, asking: int) -> int:
    """Strides in a launch of recall's judge, with ``asking`` queries each: together no more queries
    than a decode step has, which is one per request."""
    return max(most_requests // asking, 1)


def worst_recall(
    policy: Policy, most_requests: int, num_queries: int, num_sets: int, head_size: int
) -> int:
    """Bytes of what recall's kernels leave each other while units are chosen, at most.

    Args:
        most_requests: ``max_num_seqs``.
        num_queries, num_sets, head_size: as for ``judged_shapes``.
    """
    if not policy.recall:
        return 0
    chosen = size_of(chosen_shapes(most_requests, num_sets, policy.recall))
    judged = [
        judged_shapes(
            most_requests,
            judged_at_once(most_requests, asking),
            asking,
            num_queries,
            num_sets,
            policy.recall_store // policy.unit,
            policy.unit,
            head_size,
        )
        for asking in (1, policy.recall_queries)
    ]
    return chosen + max(map(size_of, judged))


def counters_of(shapes: Shapes) -> int:
    """Workspace counters that kernels with these shapes need."""
    return math.prod(shapes["marks"][0][:2]) if "marks" in shapes else 0


def memory_of(workspace: Workspace, shapes: Shapes) -> dict[str, Any]:
    """Carve the workspace tensors of ``Strides``, by attribute name."""
    made: dict[str, Any] = workspace.carve(shapes)
    if "marks" in made:
        arrived = workspace.counters(counters_of(shapes))
        made["partial"] = Partial(made["partial"], made.pop("marks"), arrived)
    return made


def worst_shapes(
    policy: Policy,
    limits: SchedulerConfig,
    query: torch.Tensor,
    num_heads: int,
    least: int,
    latent: int | None,
    slots: int,
) -> Shapes:
    """``stride_shapes`` of the strides in a launch that need the most memory.

    More of them fit into a launch if they have fewer slots in use (``rows_at_once``).

    Args:
        latent: channels of a latent row's value, or None.
        slots: of a request.
    """
    tokens, sets = limits.max_num_batched_tokens, 1
    if policy.head_policy == "per_kv_head":
        sets = num_heads
    row = num_heads * query.shape[2] * (1 if latent else 2)
    splits = split_of(policy, query, least).splits
    worst: list[Shapes] = []
    for num_rows in range(1, max(min(limits.max_num_seqs, tokens // 2), 1) + 1):
        most = slots if num_rows == 1 else min(slots, MOST_GATHERED // (num_rows * row))
        longest = min(policy.capacity, most) + min(policy.prefill_stride, tokens)
        shapes = stride_shapes(
            num_rows=num_rows,
            num_sets=sets,
            width=longest // policy.unit + 1,
            num_tokens=tokens,
            query=query,
            num_heads=num_heads,
            unit=policy.unit,
            reduction=policy.head_reduction if policy.uses_attention else None,
            splits=splits,
            most_slots=most,
            latent=latent,
        )
        worst.append(shapes)
    return max(worst, key=size_of)
