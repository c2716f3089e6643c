# SPDX-License-Identifier: Apache-2.0
"""Attention of a stride split over keys: what parts leave each other, and who joins them.

A stride of few query heads is too few programs for a GPU. So the slots that a request has in use
are cut into parts, always in the same places, and each is a program that leaves its softmax as far
as it got. The one that is the last to arrive adds all of them up in the order of parts, whichever
it is itself: the result is the same bytes whoever was last. A part without a slot in use is no
program's work, and nobody waits for it. Source: split-K of FlashDecoding
(https://pytorch.org/blog/flash-decoding/), joined within one launch as in stream-K
(https://arxiv.org/abs/2301.03598).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .softmax import empty_softmax
from .tiles import load_rows, store_rows

MARKS = 2
"""Numbers of a query in a part beside its values: the largest logit, and the sum."""


@dataclass(eq=False)
class Partial:
    """What the parts of strides leave each other, for all tokens of a step.

    Attributes:
        output: fp32 ``[num_tokens, H * G, splits, D]``, sums of values.
        marks: fp32 ``[num_tokens, H * G, splits, MARKS]``, largest logits, and sums.
        arrived: int32 ``[>= num_tokens * H * G]`` zeros, which they are again after every launch.
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
def slots_of_part(part, slots, SPLITS: tl.constexpr, SLOTS: tl.constexpr):
    """The slots ``[begin, end)`` of a part, and how many parts a stride with ``slots`` in use has.

    The last one of these has the stride's own tokens.
    """
    there = tl.minimum(tl.cdiv(slots, SLOTS), SPLITS - 1) + 1
    begin = part * SLOTS
    end = tl.where(part == there - 1, slots, tl.minimum(begin + SLOTS, slots))
    return begin, end, there


@triton.jit
def leave_part(partial, marks, place, real, top, total, acc, HEAD: tl.constexpr):
    """A part's softmax of queries, each to its ``place``."""
    store_rows(partial + place * HEAD, acc, real, 0, HEAD)
    tl.store(marks + place * 2, top, mask=real)
    tl.store(marks + place * 2 + 1, total, mask=real)


@triton.jit
def is_last(arrived, there):
    """Whether all other parts have left theirs; the next launch counts from 0 again.

    What a program's threads have written is there for whoever arrives later.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == there - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def join_parts(partial, marks, place, real, there, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """The softmax over the keys of all parts, of which ``place`` is the first's."""
    top, total, acc = empty_softmax(ROWS, HEAD)
    for part in range(there):
        at = place + part
        their_top = tl.load(marks + at * 2, mask=real, other=float("-inf"))
        their_total = tl.load(marks + at * 2 + 1, mask=real, other=0.0)
        their_acc = load_rows(partial + at * HEAD, real, 0, HEAD)
        highest = tl.maximum(top, their_top)
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
        fade, weight = tl.exp(top - shift), tl.exp(their_top - shift)
        total = total * fade + their_total * weight
        acc = acc * fade[:, None] + their_acc * weight[:, None]
        top = highest
    return top, total, acc
