# SPDX-License-Identifier: Apache-2.0
"""Derives each head set's own score from the host's score."""

import triton
import triton.language as tl


@triton.jit
def own_scores(given, salts, head_set, UNIT: tl.constexpr):
    """Hash a head set's salt into scores.

    The results are whole numbers with as many bits, 24 at most, as keep the sum of a unit's scores
    exact in fp32.

    Args:
        given: fp32, any shape; with salts, whole numbers below 2**24.
        salts: int32 ``[num_sets]``, or None: the scores stay as they are.
    """
    if salts is not None:
        x = given.to(tl.uint32) ^ tl.load(salts + head_set).to(tl.uint32, bitcast=True)
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        given = ((x ^ (x >> 16)) // (256 * triton.next_power_of_2(UNIT))).to(tl.float32)
    return given
