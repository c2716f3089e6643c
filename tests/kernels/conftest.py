# SPDX-License-Identifier: Apache-2.0
"""Interpreted kernels may touch nothing but the memory of the tensors they were given."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


class Guard:
    """Triton's interpreter, with every address checked before it is read or written.

    A wrong address in a process often hits other memory without a sign; on a GPU it is another
    request's page, or the end of the engine.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.ranges = np.empty((0, 2), dtype=np.uint64)
        self._spans: list[tuple[int, int]] = []
        self.accesses = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allow(self, tensors: list[torch.Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        self.ranges = np.asarray(self._spans, dtype=np.uint64)

    def _check(self, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        first = np.asarray(addresses)[np.asarray(mask).astype(bool)].astype(np.uint64)
        self.accesses += first.size
        if first.size == 0 or self._in_one_tensor(int(first.min()), int(first.max()) + size):
            return
        begins, ends = self.ranges[:, :1], self.ranges[:, 1:]
        inside = (first >= begins) & (first + np.uint64(size) <= ends)
        assert inside.any(0).all(), f"{(~inside.any(0)).sum()} addresses outside of all tensors"

    def _in_one_tensor(self, begin: int, end: int) -> bool:
        """Most accesses are; this is several times faster than to look at every address."""
        return any(first <= begin and end <= last for first, last in self._spans)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(addresses, mask, np.dtype(dtype).itemsize)
        return self._inner.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._check(addresses, mask, np.asarray(values).itemsize)
        return self._inner.store(addresses, values, mask)


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """Every kernel of every test here runs under a ``Guard``."""
    guard = Guard(interpreter._interpreter)
    original = interpreter.GridExecutor._init_args_hst

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        found = original(self, args, kwargs)
        every = [*found[0], *found[1].values()]
        guard.allow([arg for arg in every if isinstance(arg, torch.Tensor)])
        return found

    monkeypatch.setattr(interpreter, "_interpreter", guard)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", init_args)
    yield guard
