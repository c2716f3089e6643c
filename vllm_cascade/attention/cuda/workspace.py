# SPDX-License-Identifier: Apache-2.0
"""Memory that the kernels of a stride leave each other, the same for all layers and strides.

They run one after another, so one piece serves all; so does one row of counters, which every kernel
leaves at 0. Both are made in vLLM's profiling run, as large as the worst batch needs (``reserve``),
so that what vLLM gives to pages is what is left; after that nothing is allocated for a stride.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import SchedulerConfig

from vllm_cascade.kernels.triton.column_sums import num_sums
from vllm_cascade.kernels.triton.configs import Split, stride_split
from vllm_cascade.kernels.triton.insert_stride import num_programs
from vllm_cascade.kernels.triton.split import MARKS, Partial
from vllm_cascade.kernels.triton.strides import LINE_WORDS, NUMBER_ROWS, VALUE_ROWS
from vllm_cascade.policies.policy import Policy

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
ALIGNED = 256
"""Bytes; where a tensor begins decides which variant of a kernel is launched."""

_of_devices: dict[torch.device, "Workspace"] = {}


class Workspace:
    """One piece of memory and one of counters, which grow where they have to.

    Attributes:
        grown: how often it has.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self.grown = 0

    @property
    def num_bytes(self) -> int:
        return len(self._memory) + 4 * len(self._counters)

    def reserve(self, num_bytes: int, num_counters: int = 0) -> None:
        """Have at least so much; tensors that were carved before keep what they have."""
        if num_counters > len(self._counters):
            self._counters = self._counters.new_zeros(num_counters)
        if num_bytes > len(self._memory):
            self._memory = self._memory.new_empty(num_bytes)
            self.grown += 1

    def carve(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Tensors side by side, until somebody carves again; what they hold is anything."""
        self.reserve(size_of(shapes))
        made, begin = {}, 0
        for name, (shape, dtype) in shapes.items():
            size = math.prod(shape) * dtype.itemsize
            made[name] = self._memory[begin : begin + size].view(dtype).view(shape)
            begin += -(-size // ALIGNED) * ALIGNED
        return made

    def counters(self, number: int) -> torch.Tensor:
        """int32 zeros, which whoever counts leaves behind."""
        self.reserve(0, number)
        return self._counters[:number]


def size_of(shapes: Shapes) -> int:
    """Bytes that ``carve`` needs."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def workspace_of(device: torch.device) -> Workspace:
    """A device's, for all engines of this process: none computes while another does."""
    if device not in _of_devices:
        _of_devices[device] = Workspace(device)
    return _of_devices[device]


def split_of(policy: Policy, query: torch.Tensor, least: int) -> Split:
    """How a layer's attention of strides is split over keys; ``query``: ``[.., H * G, D]``.

    A request's own policy may have fewer slots in use than the engine's, and then fewer parts.
    """
    num_queries, head_size = query.shape[1:]
    return stride_split(
        *(query.device, query.dtype, head_size, num_queries),
        longest=policy.prefill_stride,
        most_slots=policy.capacity,
        least=least,
    )


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
) -> Shapes:
    """What the kernels of strides leave each other.

    Args:
        width: as ``PrefillRows.width``.
        num_tokens: of the whole step.
        query: ``[.., H * G, D]``.
        num_heads: KV heads.
        reduction: over the query heads of a set; None: attention makes no scores.
        splits: of attention over keys.
    """
    shared = num_rows, num_sets, num_programs(num_rows, num_sets)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
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
        shapes["partial"] = ((*each, query.shape[2]), torch.float32)
        shapes["marks"] = ((*each, MARKS), torch.float32)
    return shapes


def counters_of(shapes: Shapes) -> int:
    """Counters of the workspace that go with them."""
    return math.prod(shapes["marks"][0][:2]) if "marks" in shapes else 0


def memory_of(workspace: Workspace, shapes: Shapes) -> dict[str, Any]:
    """What ``Strides`` has of the workspace, by name."""
    made: dict[str, Any] = workspace.carve(shapes)
    if "marks" in made:
        arrived = workspace.counters(counters_of(shapes))
        made["partial"] = Partial(made["partial"], made.pop("marks"), arrived)
    return made


def worst_shapes(
    policy: Policy, limits: SchedulerConfig, query: torch.Tensor, num_heads: int, least: int
) -> Shapes:
    """``stride_shapes`` of the most strides in a wave, one of them as long as it can be."""
    tokens = limits.max_num_batched_tokens
    longest = policy.capacity + min(policy.prefill_stride, tokens)
    return stride_shapes(
        num_rows=max(min(limits.max_num_seqs, tokens // 2), 1),
        num_sets=num_heads if policy.head_policy == "per_kv_head" else 1,
        width=longest // policy.unit + 1,
        num_tokens=tokens,
        query=query,
        num_heads=num_heads,
        unit=policy.unit,
        reduction=policy.head_reduction if policy.uses_attention else None,
        splits=split_of(policy, query, least).splits,
    )
