# SPDX-License-Identifier: Apache-2.0
"""Where strides end, against a walk over the tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_cascade.policies.strides import count_strides, cut_strides


def walk(first: int, end: int, stride: int, prefilling: bool, unit: int) -> list[int]:
    """Boundaries, token by token: a stride ends after this token, or goes on."""
    bounds = [first]
    for token in range(first, end):
        inside = bounds[-1] % unit != 0  # the stride began inside a unit
        if not prefilling or inside or (token + 1) % stride == 0 or token + 1 == end:
            bounds.append(token + 1)
    return bounds


@given(
    st.integers(0, 90), st.integers(1, 90), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5),
    st.booleans(),
)  # fmt: skip
def test_strides(first: int, length: int, unit: int, units: int, prefilling: bool) -> None:
    end, stride = first + length, unit * units
    expected = walk(first, end, stride, prefilling, unit)
    assert cut_strides(first, end, stride, prefilling, unit) == expected
    prompt = end if prefilling else 0
    count = count_strides(*(np.asarray([n]) for n in (first, end, prompt)), stride, unit)
    assert count.tolist() == [len(expected) - 1]
