# SPDX-License-Identifier: Apache-2.0
"""What only tests ask of the C++ library: how often it is called, and symbols without a binding."""

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm_cascade.kernels.cpp.library import Library, load

CALLS = {"tokens": 0, "strides": 0, "recalls": 0, "stores": 0, "undone": 0}
"""Calls in this process by kind; those for several requests count each of them."""


def symbols() -> ctypes.CDLL:
    """The compiled library as ``ctypes`` finds it."""
    return ctypes.CDLL(str(load().path))


def count(kind: str, name: str, requests: int | None = None) -> None:
    """Count calls of a method of ``Library``; ``requests``: the place of that argument."""
    method: Callable[..., Any] = getattr(Library, name)

    @wraps(method)
    def counted(*args: Any) -> Any:
        CALLS[kind] += 1 if requests is None else len(args[requests])
        return method(*args)

    setattr(Library, name, counted)


count("tokens", "attend_and_insert_tokens")
count("strides", "attend_and_insert_stride")
count("recalls", "recall_requests", requests=3)
count("stores", "store_units")
count("stores", "store_leaving", requests=2)
count("undone", "undo_tokens")
