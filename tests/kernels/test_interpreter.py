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
