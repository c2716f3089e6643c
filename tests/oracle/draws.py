# SPDX-License-Identifier: Apache-2.0
"""The numbers that ``random`` draws, written out with Python's integers."""

import zlib
from collections.abc import Callable

LOW = (1 << 32) - 1


def scrambled(x: int) -> int:
    """Wellons' 32-bit hash "lowbias32"."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)


def draw(seed: int, layer: str, head_set: int, token: int) -> float:
    """What a token is worth in one layer and head set: a whole number below 2**16."""
    first = scrambled(token ^ scrambled(seed)) >> 8
    salt = scrambled(scrambled(head_set) ^ zlib.crc32(layer.encode()))
    return float(scrambled(first ^ salt) >> 16)


def draws(seed: int, layer: str, num_tokens: int) -> Callable[[int], list[float]]:
    """The numbers of a layer's tokens, by head set."""
    return lambda head_set: [draw(seed, layer, head_set, token) for token in range(num_tokens)]
