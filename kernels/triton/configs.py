# SPDX-License-Identifier: Apache-2.0
"""Tile sizes, warps and splits by rule from the shape; nothing is tuned while serving.

``TUNED`` holds what measurement on a card found better than the rule (``benchmarks.gpu_check``);
it is empty until there is one.
"""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """``tile`` keys at a time (and ``queries`` queries in prefill), by ``warps`` warps."""

    tile: int
    warps: int
    stages: int
    queries: int = 0


TUNED: dict[tuple[str, int, str, int], Config] = {}
"""(kernel, compute capability, dtype, head size) to a configuration."""

TURNED = 16
"""Tokens that are worth a rotated query in decode, and that a tensor core takes at a time; a unit
is a multiple of so many, or has less."""
DEFAULT_SMS = 132
MAX_SPLITS = 32
HEADS_PER_SM = 4
"""KV heads of requests that each multiprocessor should have at least, a warp each in decode; up to
twice as many by rounding, which it can hold at a time."""
LEAST_PART = 256
"""Cached slots of a stride that are worth a program of their own, whose sums others must add up."""
ENOUGH = 15 / 16
"""Of the multiprocessors; where so many have a program of a stride, splitting gains nothing."""


def capability(device: torch.device) -> int:
    """10 * major + minor of a CUDA device, 0 elsewhere."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H100's elsewhere, so that shapes stay realistic."""
    if device.type != "cuda":
        return DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tuned(kernel: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Config | None:
    return TUNED.get((kernel, capability(device), str(dtype).removeprefix("torch."), head_size))


def attend_config(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    num_heads: int,
    num_sets: int,
) -> tuple[Config, int]:
    """Decode in single tokens, or in units too small for a query of their own.

    Returns:
        The configuration, and the KV heads that one program takes, a warp each: they share a
        tile's rotations. Heads with tokens of their own have nothing to share. What does not fit a
        warp's registers is a head alone, of several warps.
    """
    wide = max(triton.next_power_of_2(group), 8) * triton.next_power_of_2(head_size)
    tuned = _tuned("attend", device, dtype, head_size)
    long = head_size > 128  # where registers are short
    if dtype.itemsize == 4 or wide > 2048:
        several = long and dtype.itemsize < 4  # tiles of keys that warps share out
        shared = Config(tile=32, warps=8, stages=2)
        alone = Config(tile=16, warps=4, stages=2 if long else 3)
        return tuned or (shared if several else alone), 1
    heads = 1 if num_sets > 1 else min(num_heads & -num_heads, 4 if long else 8)
    return tuned or Config(tile=16, warps=heads, stages=2 if long else 3), heads


def units_config(device: torch.device, dtype: torch.dtype, head_size: int, group: int) -> Config:
    """Decode in units of ``TURNED`` or more tokens: ``TURNED`` at a time, by one warp.

    A tensor core's tile has 8 columns for query heads. More of them, longer heads or fp32 share
    out the sums of values, which stay in registers, over more warps.
    """
    wide = max(triton.next_power_of_2(group), 8) * triton.next_power_of_2(head_size) // 1024
    warps = 4 if dtype.itemsize == 4 else max(1, min(wide, 8))
    return _tuned("attend_units", device, dtype, head_size) or Config(
        tile=TURNED, warps=warps, stages=3
    )


def attend_splits(device: torch.device, batch: int, num_kv_heads: int, num_slots: int) -> int:
    """Parts that one request's slots are split into, so that a small batch fills the card.

    A function of shapes alone: a captured graph keeps its own number.
    """
    wanted = triton.cdiv(HEADS_PER_SM * num_sms(device), max(batch * num_kv_heads, 1))
    longest = max(num_slots // 128, 1)  # a part of fewer keys is not worth its merge
    return triton.next_power_of_2(max(1, min(wanted, longest, MAX_SPLITS)))


def prefill_config(device: torch.device, dtype: torch.dtype, head_size: int) -> Config:
    """Prefill: queries by keys of one flash-attention tile; keys are rotated in registers."""
    tuned = _tuned("prefill", device, dtype, head_size)
    if tuned is not None:
        return tuned
    if dtype.itemsize == 4:
        return Config(tile=16, queries=16, warps=8, stages=1)
    if head_size > 128:
        return Config(tile=16, queries=64 if head_size <= 256 else 32, warps=8, stages=1)
    return Config(tile=32, queries=64, warps=8, stages=2)


@dataclass(frozen=True)
class Split:
    """The cached slots of a stride in ``splits`` parts of ``slots`` each; 1 is no split.

    The last part has what is left, and the stride itself.
    """

    splits: int
    slots: int


WHOLE = Split(splits=1, slots=0)


def stride_split(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    num_queries: int,
    longest: int,
    most_slots: int,
    least: int = LEAST_PART,
) -> Split:
    """How attention of a stride is split over keys, so that few query heads fill the card as well.

    A function of what is fixed for a layer: not of how many strides are in a launch, nor of what
    they have cached, so that a request gets the same bytes alone and in any batch.

    Args:
        num_queries: query heads.
        longest: tokens of the longest stride.
        most_slots: that a request may have cached.
        least: slots that are worth a part.
    """
    config, sms = prefill_config(device, dtype, head_size), num_sms(device)
    programs = num_queries * triton.cdiv(longest, config.queries)
    most = min(most_slots // least, MAX_SPLITS)
    if most < 2 or programs >= ENOUGH * sms:
        return WHOLE
    wanted = min(triton.cdiv(sms, programs), most)
    # The busiest multiprocessor runs so many programs, one after another.
    splits = min(
        range(wanted, min(2 * wanted, most) + 1), key=lambda n: triton.cdiv(programs * n, sms) / n
    )
    # The stride's own tokens are not split: as much work as other parts have, or a part alone.
    slots = min(triton.cdiv(most_slots + longest, splits), triton.cdiv(most_slots, splits - 1))
    return Split(splits, triton.cdiv(slots, config.tile) * config.tile)


def mass_config(
    device: torch.device, dtype: torch.dtype, head_size: int, slopes: bool = False
) -> Config:
    """Column sums: keys resident, rotated once, and queries streamed.

    Args:
        slopes: whether logits change with distance (ALiBi): numbers of a tile's own size.
    """
    tuned = _tuned("mass", device, dtype, head_size)
    if tuned is not None:
        return tuned
    if dtype.itemsize == 4:
        return Config(tile=16, queries=32, warps=8, stages=1)
    if head_size > 128:
        return Config(tile=32, queries=64 if head_size <= 256 else 32, warps=8, stages=2)
    if head_size > 64:
        return Config(tile=64, queries=64 if slopes else 128, warps=8, stages=2)
    return Config(tile=64, queries=64, warps=4, stages=2)
