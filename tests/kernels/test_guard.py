# SPDX-License-Identifier: Apache-2.0
"""The fixture that watches addresses (``conftest.py``) does."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.checks import Case, check_insert
from tests.kernels.conftest import Guard


@triton.jit
def _copy(source, target, n, SHIFT: tl.constexpr):
    index = tl.arange(0, 16)
    inside = index < n
    value = tl.load(source + index + SHIFT, mask=inside, other=0.0)
    tl.store(target + index, value, mask=inside)


@pytest.mark.parametrize(("shift", "n", "room"), [(1, 10, 10), (-1, 10, 10), (0, 11, 10)])
def test_outside(shift: int, n: int, room: int) -> None:
    source, target = torch.rand(10), torch.zeros(room)
    with pytest.raises(Exception, match="addresses outside of all tensors"):
        _copy[(1,)](source, target, n, SHIFT=shift)


def test_inside(guard: Guard) -> None:
    source, target = torch.rand(10), torch.zeros(12)
    _copy[(1,)](source, target, 9, SHIFT=1)
    assert torch.equal(target[:9], source[1:]) and guard.accesses == 18


def test_the_kernels_run_under_it(guard: Guard) -> None:
    check_insert(Case(head_size=16, lengths=(3,)), "cpu")
    assert guard.accesses > 100
