# SPDX-License-Identifier: Apache-2.0
"""The interpreter that tests run kernels in: looked over once, and left as it was."""

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def squares(values):
    return values * values


@triton.jit
def sum_of_squares(rows, sums, SIZE: tl.constexpr):
    row = tl.program_id(0)
    values = tl.load(rows + row * SIZE + tl.arange(0, SIZE))
    for _ in tl.static_range(2):
        values = squares(values)
    tl.store(sums + row, tl.sum(values))


def run(rows: torch.Tensor) -> torch.Tensor:
    sums = torch.empty(len(rows))
    sum_of_squares[(len(rows),)](rows, sums, rows.shape[1])
    return sums


def test_kernels_compute_what_they_say() -> None:
    rows = torch.arange(24.0).view(3, 8)
    assert torch.equal(run(rows), (rows**4).sum(-1))


def test_operations_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch replaces them and puts them back; a function that it calls does neither."""
    run(torch.ones(1, 8))
    searched: list[Any] = []
    replaced: list[str] = []
    plain = interpreter._patch_attr

    def replace(package: Any, name: str, *args: Any) -> None:
        replaced.append(name)
        plain(package, name, *args)

    monkeypatch.setattr(inspect, "getmembers", lambda package, *_: searched.append(package) or [])
    monkeypatch.setattr(interpreter, "_patch_attr", replace)
    before = {name: getattr(tl, name) for name in ("load", "store", "arange", "static_range")}
    assert run(torch.ones(2, 8)).tolist() == [8, 8]
    assert searched == [] and replaced.count("arange") == 1
    assert {name: getattr(tl, name) for name in before} == before


@triton.jit
def halves(rows, found, SIZE: tl.constexpr):
    """The same shape in four types, one of them of pointers."""
    places = rows + tl.arange(0, SIZE)
    values = tl.load(places)
    tl.store(found + tl.arange(0, SIZE), tl.where(values > 1, values.to(tl.float32) / 2, 0.0))


def test_types_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape and of one element; what is kept of one tensor is not another's."""
    rows = torch.tensor([1, 3, 5, 7], dtype=torch.int32)
    outputs = [torch.empty(4), torch.empty(4, dtype=torch.double)]
    for found in outputs:
        halves[(1,)](rows, found, 4)
    described: list[Any] = []
    monkeypatch.setattr(tl.core, "validate_block_shape", described.append)
    for found in outputs:
        halves[(1,)](rows, found.zero_(), 4)
        assert found.tolist() == [0, 1.5, 2.5, 3.5]
    assert described == []
    names = {tl.block_type(element, [513]).name for element in (tl.int8, tl.int16)}
    assert len(names) == len(described) == 2
    again = tl.block_type(tl.pointer_type(tl.int8, 3), [tl.constexpr(513)])
    same = tl.block_type(tl.pointer_type(tl.int8, 1), [513])
    assert (again.element_ty.address_space, same.element_ty.address_space) == (3, 1)


@triton.jit
def add_one(rows, found, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(found + places, tl.load(rows + places) + 1)


def test_integers_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in 64 bits, too, for a check that nobody sees; they wrap around as on a device."""
    wide: list[Any] = []
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.device_assert
    monkeypatch.setattr(semantic, "device_assert", lambda *args: wide.append(args) or check(*args))
    rows = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
    add_one[(1,)](rows, rows, 2)
    assert rows.tolist() == [-(2**31), 6] and wide == []
