# SPDX-License-Identifier: Apache-2.0
"""Random: a uniform random sample of older tokens, and the most recent ones."""

import zlib
from typing import ClassVar

import numpy as np
from pydantic import Field

from vllm_cascade.policies.recent import Recent
from vllm_cascade.policies.rules import Scoring

BITS = 24
"""Bits of a drawn number, as many as fp32 holds exactly."""


class Random(Recent):
    """A drawn number, in place of attention, decides among all but the last ``window`` tokens.

    Every token gets one number, by a hash of ``seed``, layer, head set and its index in the stream.
    The tokens with the largest numbers stay, so the older part of the cache is a uniform sample of
    all tokens behind the window. It is the control that a policy with scores must beat.
    """

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = (
        "Random Sampling with a Reservoir (Vitter, 1985), https://doi.org/10.1145/3147.3165"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"head_reduction", "ema_gamma"})

    seed: int = Field(0, ge=0, lt=1 << 32, description="of the drawn numbers")

    @property
    def scoring(self) -> Scoring:
        return Scoring("random", newest_stays=self.tie == "incoming", seed=self.seed)

    @property
    def score_lag(self) -> int:
        return self.in_units.recent * self.unit  # half of an odd number of units is rounded down


def mixed(numbers: np.ndarray) -> np.ndarray:
    """A 32-bit hash of each number: uint32, any shape (Wellons, "lowbias32")."""
    x = numbers.astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def drawn(seed: int, begin: int, end: int) -> np.ndarray:
    """Numbers of tokens ``[begin, end)`` of any stream; 0 for negative indices.

    Returns:
        fp32 ``[end - begin]``, integers below ``2**BITS``. Layers and head sets mix in their own
        ``salts`` (``LayerConfig``).
    """
    tokens = np.arange(begin, end)
    start = mixed(np.asarray([seed]))
    bits = mixed(tokens.clip(0).astype(np.uint32) ^ start) >> np.uint32(32 - BITS)
    return np.where(tokens < 0, 0, bits).astype(np.float32)


def salts_of(layer: str, first_set: int, num_sets: int) -> np.ndarray:
    """Bits that make the numbers of a layer's head sets independent: int32 ``[num_sets]``."""
    sets = np.arange(first_set, first_set + num_sets, dtype=np.uint32)
    return mixed(mixed(sets) ^ np.uint32(zlib.crc32(layer.encode()))).view(np.int32)
