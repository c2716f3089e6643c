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


def bits_of(unit: int) -> int:
    """Most bits, 24 at most, of ``unit`` whole numbers whose sum is at most 2**24."""
    return next(bits for bits in range(24, 0, -1) if unit << bits <= 1 << 24)


def draw(seed: int, layer: str, head_set: int, token: int, unit: int = 1) -> float:
    """What a token is worth in one layer and head set: a whole number of ``bits_of(unit)`` bits."""
    first = scrambled(token ^ scrambled(seed)) >> 8
    salt = scrambled(scrambled(head_set) ^ zlib.crc32(layer.encode()))
    return float(scrambled(first ^ salt) >> (32 - bits_of(unit)))


def draws(seed: int, layer: str, num_tokens: int, unit: int = 1) -> Callable[[int], list[float]]:
    """The numbers of a layer's tokens, by head set."""
    return lambda head_set: [
        draw(seed, layer, head_set, token, unit) for token in range(num_tokens)
    ]
