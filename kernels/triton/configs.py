# SPDX-License-Identifier: Apache-2.0
"""Launch configurations: tile sizes, warps and splits from a layer's shape, without autotuning."""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """``tile`` keys per iteration, ``warps`` and, in prefill, ``queries`` per program."""

    tile: int
    warps: int
    stages: int
    queries: int = 0


TURNED = 16
"""Tokens per rotated query in decode, which is one tensor-core tile; a unit is a multiple of it, or
smaller."""
DEFAULT_SMS = 132
MAX_SPLITS = 32
LEAST_SLOTS = 64
"""Fewest slots of a request per part in decode. For one request of 2,048 tokens, attention in parts
of 64 took two thirds of the time of parts of 128 on an H200; merging them takes a little longer."""
MERGED = 8
"""Parts of decode attention that are merged at a time."""
HEADS_PER_SM = 4
"""Fewest KV heads of a batch per multiprocessor in decode, one warp each. Rounding up to a power of
two at most doubles them, and they still fit."""
LEAST_PART = 256
"""Fewest cached keys per part when a stride's attention is split; fewer cost more to merge."""
ENOUGH = 15 / 16
"""Share of busy multiprocessors from which splitting a stride gains nothing."""


LONG = 256
"""Most channels of a head with the usual tiles. Longer ones have smaller tiles, because registers
hold fewer of their rows and queries. Does not apply to latent rows."""


SHARING, LONG_SHARING = 16, 8
"""Most query heads of a decode program: of latent rows, which all heads share; of long heads."""


def sharing(head_size: int, group: int, latent: int | None) -> int:
    """Programs that share a KV head in decode; more than one for latent rows and long heads."""
    if latent is None and head_size <= LONG:
        return 1
    most = LONG_SHARING if latent is None else SHARING
    return next(group // size for size in range(most, 0, -1) if group % size == 0)


def fills_memory(head_size: int, latent: int | None) -> bool:
    """Whether rows are so long that shared memory holds only half as many keys or queries."""
    return head_size > (LONG if latent is None else 512)


def capability(device: torch.device) -> int:
    """10 * major + minor of a CUDA device, 0 elsewhere."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H100's count elsewhere, for realistic launch shapes."""
    if device.type != "cuda":
        return DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_config(
    dtype: torch.dtype,
    head_size: int,
    group: int,
    num_heads: int,
    num_sets: int,
    latent: int | None = None,
) -> tuple[Config, int]:
    """Decode of single tokens, of units smaller than ``TURNED``, and of latent rows.

    Returns:
        The configuration, and the KV heads per program, one warp each. Two heads of one set share a
        tile's rotations. On an H200 that takes 9 to 30 % less time than 8 heads, of which a
        multiprocessor holds one program. Of long heads, which were not timed, 4 share them. A head
        that does not fit one warp's registers gets a program with several warps.
    """
    wide = max(triton.next_power_of_2(group), 8) * triton.next_power_of_2(head_size)
    long = head_size > 128  # registers are scarce
    if dtype.itemsize == 4 or wide > 2048:
        several = long and dtype.itemsize < 4  # warps share a tile of keys
        shared = Config(tile=32, warps=8, stages=2)
        if head_size > 512:
            shared = Config(tile=16, warps=8, stages=3)
        stages = 1 if fills_memory(head_size, latent) else 2 if long else 3
        alone = Config(tile=16, warps=4, stages=stages)
        return shared if several else alone, 1
    heads = 1 if num_sets > 1 else min(num_heads & -num_heads, 4 if long else 2)
    return Config(tile=16, warps=heads, stages=2), heads


def units_config(dtype: torch.dtype, head_size: int, group: int, coded: bool) -> Config:
    """Decode of units of at least ``TURNED`` tokens: ``TURNED`` keys per iteration, by one warp.

    A tensor-core tile has 8 columns for query heads. With more query heads, longer heads or fp32,
    the accumulated values are spread over more warps so that they stay in registers.

    Args:
        coded: rows are stored in 8 bits, and decoding long ones takes fewer registers in 4 warps.
    """
    if head_size > LONG:
        if dtype.itemsize == 4:
            return Config(tile=TURNED, warps=4, stages=1)
        return Config(tile=TURNED, warps=4 if coded else 8, stages=3)
    wide = max(triton.next_power_of_2(group), 8) * triton.next_power_of_2(head_size) // 1024
    warps = 4 if dtype.itemsize == 4 else max(1, min(wide, 8))
    return Config(tile=TURNED, warps=warps, stages=3)


def attend_splits(device: torch.device, batch: int, num_kv_heads: int, num_slots: int) -> int:
    """Number of splits of a request's slots in decode, so that a small batch fills the GPU.

    It depends on shapes only, so every captured CUDA graph has a fixed value.
    """
    wanted = triton.cdiv(HEADS_PER_SM * num_sms(device), max(batch * num_kv_heads, 1))
    longest = max(num_slots // LEAST_SLOTS, 1)
    return triton.next_power_of_2(max(1, min(wanted, longest, MAX_SPLITS)))


def merge_config(heads: int, value_size: int) -> Config:
    """Decode's merge of parts, beside scores of ``heads`` query heads for ``tile`` slots a program.

    A warp has 1,024 numbers of either.
    """
    heads = triton.next_power_of_2(heads)
    tile = max(32, min(128, 1024 // heads))
    most = max(heads * tile, MERGED * triton.next_power_of_2(value_size))
    return Config(tile=tile, warps=max(1, min(most // 1024, 8)), stages=1)


def stride_config(device: torch.device, dtype: torch.dtype, head_size: int) -> Config:
    """Prompts: queries by gathered keys of a flash-attention tile, which are loaded ahead.

    Without a CUDA device it is an H100's.
    """
    if dtype.itemsize == 4:
        return Config(tile=16, queries=16, warps=8, stages=1)
    if head_size > 128:
        return Config(tile=32, queries=64 if head_size <= 256 else 32, warps=8, stages=2)
    if capability(device) in (0, 90, 100):
        return Config(tile=64, queries=128, warps=8, stages=3)
    return Config(tile=64, queries=64, warps=8, stages=2)  # with more queries registers spill


@dataclass(frozen=True)
class Split:
    """A stride's cached keys in ``splits`` parts of ``keys`` each; one part means no split.

    The last part has the remaining keys and the stride's own tokens.
    """

    splits: int
    keys: int


WHOLE = Split(splits=1, keys=0)


def stride_split(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    num_queries: int,
    longest: int,
    most_keys: int,
    least: int = LEAST_PART,
) -> Split:
    """How a stride's attention is split over keys, so that few query heads still fill the GPU.

    The split depends only on what is fixed per layer, not on the strides in a launch or their
    cached tokens. A request's outputs are therefore bit-identical in any batch.

    Args:
        num_queries: query heads.
        longest: tokens of the longest possible stride.
        most_keys: tokens a request may have cached.
        least: fewest keys per part.
    """
    config, sms = stride_config(device, dtype, head_size), num_sms(device)
    programs = num_queries * triton.cdiv(longest, config.queries)
    most = min(most_keys // least, MAX_SPLITS)
    if most < 2 or programs >= ENOUGH * sms:
        return WHOLE
    wanted = min(triton.cdiv(sms, programs), most)
    # Minimise the programs that the busiest multiprocessor runs one after another.
    splits = min(
        range(wanted, min(2 * wanted, most) + 1), key=lambda n: triton.cdiv(programs * n, sms) / n
    )
    # The stride's own tokens are not split: balance them with the other parts, or give them a part.
    keys = min(triton.cdiv(most_keys + longest, splits), triton.cdiv(most_keys, splits - 1))
    keys = triton.cdiv(keys, config.tile) * config.tile
    return Split(min(splits, triton.cdiv(most_keys, keys) + 1), keys)


def mass_config(dtype: torch.dtype, head_size: int) -> Config:
    """Column sums: a program holds a tile of rotated keys and streams the queries.

    Programs of heads up to 128 are so small that a multiprocessor holds three, which hide each
    other's latencies.
    """
    if dtype.itemsize == 4:
        return Config(tile=16, queries=32 if head_size <= 512 else 16, warps=8, stages=1)
    if head_size > 128:
        stages = 2 if head_size <= 512 else 1
        return Config(tile=32, queries=64 if head_size <= 256 else 32, warps=8, stages=stages)
    return Config(tile=64, queries=64, warps=4, stages=2)
