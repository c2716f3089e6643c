# SPDX-License-Identifier: Apache-2.0
"""Attention of a stride split over keys, merged within the same launch.

A stride with few query heads has too few programs for a GPU. So a request's cached keys are divided
into parts at fixed ranks, and one program per part writes its partial softmax. The last program to
arrive merges all parts in order, so the result is the same bytes whichever program is last. Parts
without keys are skipped. Source: split-K of FlashDecoding
(https://pytorch.org/blog/flash-decoding/), merged within one launch as in stream-K
(https://arxiv.org/abs/2301.03598).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .softmax import empty_softmax
from .tiles import load_rows, store_rows

MARKS = 2
"""Numbers per query and part beside the values: the largest base-2 logit and the sum."""


@dataclass(eq=False)
class Partial:
    """Partial softmax results of all parts, for all tokens of a step.

    Attributes:
        output: fp32 ``[num_tokens, H * G, splits, D]``, sums of values.
        marks: fp32 ``[num_tokens, H * G, splits, MARKS]``, largest logits and sums.
        arrived: int32 ``[>= num_tokens * H * G]`` counters; zero before and after a launch.
    """

    output: torch.Tensor
    marks: torch.Tensor
    arrived: torch.Tensor

    def __post_init__(self) -> None:
        tokens, heads, splits, _ = self.output.shape
        assert self.marks.shape == (tokens, heads, splits, MARKS), self.marks.shape
        assert self.output.is_contiguous() and self.marks.is_contiguous()
        assert self.arrived.dtype == torch.int32 and self.arrived.is_contiguous()
        assert self.arrived.numel() >= tokens * heads, self.arrived.shape
        self.shape = tuple(self.output.shape[1:])


@triton.jit
def keys_of_part(part, cached, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Ranks ``[begin, end)`` of a part's keys, and the number of parts with ``cached`` keys.

    The last part also covers the stride's own tokens.
    """
    there = tl.minimum(tl.cdiv(cached, KEYS), SPLITS - 1) + 1
    begin = part * KEYS
    end = tl.where(part == there - 1, cached, tl.minimum(begin + KEYS, cached))
    return begin, end, there


@triton.jit
def leave_part(partial, marks, place, real, top, total, acc, HEAD: tl.constexpr):
    """Write a part's partial softmax of each query to its ``place``."""
    store_rows(partial + place * HEAD, acc, real, 0, HEAD)
    tl.store(marks + place * 2, top, mask=real)
    tl.store(marks + place * 2 + 1, total, mask=real)


@triton.jit
def is_last(arrived, there):
    """Whether all other parts have arrived. The last one resets the counter for the next launch.

    Release and acquire make each program's writes visible to programs that arrive later.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == there - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def join_parts(partial, marks, place, real, there, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Merge the partial softmax of all parts; ``place`` is that of the first part."""
    top, total, acc = empty_softmax(ROWS, HEAD)
    for part in range(there):
        at = place + part
        their_top = tl.load(marks + at * 2, mask=real, other=float("-inf"))
        their_total = tl.load(marks + at * 2 + 1, mask=real, other=0.0)
        their_acc = load_rows(partial + at * HEAD, real, 0, HEAD)
        highest = tl.maximum(top, their_top)
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
        fade, weight = tl.exp2(top - shift), tl.exp2(their_top - shift)
        total = total * fade + their_total * weight
        acc = acc * fade[:, None] + their_acc * weight[:, None]
        top = highest
    return top, total, acc
