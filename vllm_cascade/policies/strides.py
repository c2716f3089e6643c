# SPDX-License-Identifier: Apache-2.0
"""Defines where strides end.

A stride is the tokens of one request that are attended before the next eviction. In a prompt,
strides end at absolute multiples of ``prefill_stride`` and at the prompt's end. After the prompt
every token is its own stride, also when generated tokens are replayed after a preemption. The
result of a request therefore does not depend on how its prompt is chunked.

A prompt part may begin inside a unit, after generated tokens: vLLM's streaming-input requests do
so. Single tokens then fill the unit.
"""

from collections.abc import Sequence

import numpy as np


def cut_strides(
    first: int, end: int, prefill_stride: int, prefilling: bool, unit: int = 1
) -> list[int]:
    """Stride boundaries ``[first, ..., end]`` of tokens ``first .. end - 1``."""
    if not prefilling or prefill_stride == 1:
        return list(range(first, end + 1))
    whole = min(-(-first // unit) * unit, end)
    inner = range((whole // prefill_stride + 1) * prefill_stride, end, prefill_stride)
    return [*range(first, whole), whole, *inner, *([end] if whole < end else [])]


def count_strides(
    first: np.ndarray, end: np.ndarray, prompt_len: np.ndarray, prefill_stride: int, unit: int = 1
) -> np.ndarray:
    """Number of strides in tokens ``first .. end - 1``; int arrays of one shape."""
    whole = np.minimum(-(-first // unit) * unit, end)
    longer = np.where(whole < end, -(-end // prefill_stride) - whole // prefill_stride, 0)
    return np.where(first < prompt_len, whole - first + longer, end - first)


def aligned_chunk(
    start: int, num_tokens: int, prompt_len: int, prefill_stride: int, stops: Sequence[int] = ()
) -> int:
    """Largest chunk of at most ``num_tokens`` tokens from ``start`` that ends at a stride's end.

    A chunk never crosses the prompt's end. The result is 0 if no whole stride fits.

    Args:
        stops: multiples of ``prefill_stride`` that a chunk must not cross.
    """
    if start >= prompt_len:
        return num_tokens
    end = min([start + num_tokens, *(stop for stop in stops if stop > start)])
    if end >= prompt_len:
        return prompt_len - start
    return max(end // prefill_stride * prefill_stride - start, 0)


def first_stride(
    start: int, num_tokens: int, prompt_len: int, prefill_stride: int, unit: int = 1
) -> int:
    """Tokens of the first stride among ``num_tokens`` from ``start``."""
    end = start + num_tokens
    bounds = cut_strides(start, end, prefill_stride, start < prompt_len, unit)
    return bounds[1] - start if num_tokens else 0
