# SPDX-License-Identifier: Apache-2.0
"""Codes of every number that there is, and of every number between two of them.

Random rows, which other tests have, hold no ties.
"""

import pytest
import torch
import triton
import triton.language as tl

from tests.oracle.quantised import E4M3, E5M2, INT8, Quantiser
from vllm_cascade.kernels.triton.stored import encoded, factor_of, widened

GRIDS = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}


@triton.jit
def _encode(x, out, back, N: tl.constexpr, CODE: tl.constexpr):
    i = tl.arange(0, N)
    scale = tl.full([N], 1.0, tl.float32)
    codes = encoded(tl.load(x + i), scale, CODE)
    tl.store(out + i, codes)
    tl.store(back + i, widened(codes, CODE) * factor_of(scale, CODE))


@pytest.mark.parametrize("code", GRIDS)
def test_codes_and_ties(code: str) -> None:
    grid = GRIDS[code]
    numbers = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 3])
    numbers = torch.cat([numbers, -numbers])
    padded = torch.zeros(1024)
    padded[: len(numbers)] = numbers
    out = torch.empty(1024, dtype=torch.int8 if code == "int8" else torch.uint8)
    back = torch.empty(1024)
    _encode[(1,)](padded, out, back, 1024, code)
    expected = Quantiser(grid).nearest(padded.clamp(-grid[-1], grid[-1]))
    assert torch.equal(back, expected)
    assert torch.equal(Quantiser(grid).numbers(out), expected)
