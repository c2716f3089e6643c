# SPDX-License-Identifier: Apache-2.0
"""Python bindings of the compiled library: its calls, and the C++ structures as ctypes.

Addresses are ``data_ptr()`` of CPU tensors, which the caller must keep alive. Calls release the
GIL.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_cascade.kernels.cpp.build import BuildError, build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of new rows. Rows in pages may also have ``CODES``."""
CODES = {torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
REDUCTIONS = {"mean": 0, "max": 1, "median": 2}
MAX_QUERY_HEADS = 256
TILE = 32
"""Tokens per tile; see tile.h."""


def _of(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Layer(ctypes.Structure):
    """One layer's cache. No step changes these fields."""

    _fields_: ClassVar = [
        *_of(c_void_p, "kv rank born score token slopes rotation sinks scales"),
        *_of(c_void_p, "row_scale salts versions draft_rows draft_scales draft_words"),
        *_of(c_int64, "page_bytes page_words num_heads group head_size num_sets block_size"),
        *_of(c_int64, "value_size value_at row_size"),
        *_of(c_int64, "unit page_units half is_neox dtype stored stored_bytes uses_scores"),
        *_of(c_int64, "reduction window chunked attends inserts drafts"),
        *_of(c_float, "scale softcap"),
    ]


class Rows(ctypes.Structure):
    """Rows of new tokens: addresses, and strides in elements between tokens."""

    _fields_: ClassVar = [
        *_of(c_void_p, "query key value output"),
        *_of(c_int64, "query_stride key_stride value_stride output_stride"),
    ]


_ROWS = struct.Struct("4P4q")


def row_addresses(new: Sequence[torch.Tensor]) -> Rows:
    """Addresses of query, key, value and output, each ``[num_tokens, heads, channels]``.

    They may be slices of a fused projection.
    """
    dtype, strides = new[0].dtype, []
    for rows in new:  # called per layer and step, so it must be fast
        step, head, channel = rows.stride()
        _, heads, size = rows.shape
        assert channel == 1 and (head == size or heads == 1), (rows.stride(), size)
        assert rows.dtype == dtype, (rows.dtype, dtype)
        strides.append(step)
    made, (query, key, value, output) = Rows(), new
    addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
    _ROWS.pack_into(made, 0, *addresses, *strides)
    return made


class Tokens(ctypes.Structure):
    """Single tokens of many requests: step rows, block numbers, and addresses as in C++."""

    _fields_: ClassVar = [
        *_of(c_int64, "count num_pages"),
        *_of(c_void_p, "steps pages logit_scale given scored rules shift saves"),
        *_of(c_int64, "moved"),
    ]


class Batches:
    """Batches of single tokens that run one after the other."""

    def __init__(self, *batches: Tokens) -> None:
        self.count, self._kept = len(batches), batches
        self.pointers = (POINTER(Tokens) * len(batches))(*map(ctypes.pointer, batches))


class Stride(ctypes.Structure):
    """A stride of one request, with the rules of its schedule."""

    _fields_: ClassVar = [
        *_of(c_void_p, "step pages"),
        *_of(c_int64, "moved"),
        *_of(c_void_p, "logit_scale given"),
        *_of(c_int64, "scored shift"),
        *_of(c_void_p, "rules first"),
        *_of(c_int64, "transient period recalled recalls_more num_evicted"),
        *_of(c_void_p, "evicted_rows evicted_scale evicted_born evicted_token"),
    ]


class Undone(ctypes.Structure):
    """Rejected drafts of many requests, int32 ``[count, 4]``, and block numbers."""

    _fields_: ClassVar = [*_of(c_int64, "count num_pages"), *_of(c_void_p, "rows pages")]


class Units(ctypes.Structure):
    """Consecutive units of a request's store: addresses of its chunks, and offsets of tensors."""

    _fields_: ClassVar = [
        *_of(c_void_p, "chunks offsets"),
        *_of(c_int64, "num_chunks begin end in_8_bits"),
    ]


class Asking(ctypes.Structure):
    """The queries that select from a store, and how many units."""

    _fields_: ClassVar = [
        *_of(c_void_p, "places positions"),
        *_of(c_int64, "num num_candidates num_filtering num_judging num_chosen"),
        *_of(c_void_p, "pages"),
        *_of(c_int64, "num_sinks"),
    ]


class Exchange(ctypes.Structure):
    """Units that replace the recalled ones in a request's pages."""

    _fields_: ClassVar = [
        *_of(c_void_p, "pages chosen shown"),
        *_of(c_int64, "shown_layer shown_stride num_units before now sinks"),
    ]


class Recall(ctypes.Structure):
    """A request whose queries select units of its store."""

    _fields_: ClassVar = [("units", Units), ("asking", Asking), ("exchange", Exchange)]


class Gone(ctypes.Structure):
    """Evicted units, on their way to a store."""

    _fields_: ClassVar = [*_of(c_void_p, "rows scale born token"), *_of(c_int64, "num")]


class Freed(ctypes.Structure):
    """Evicted units that are still in the slots that they freed."""

    _fields_: ClassVar = [*_of(c_void_p, "pages before"), *_of(c_int64, "num_before num_units")]


class Leaving(ctypes.Structure):
    """A request whose token evicts units."""

    _fields_: ClassVar = [("units", Units), ("freed", Freed)]


def _shares_threads(native: ctypes.CDLL) -> bool:
    """Whether the library's OpenMP runtime is PyTorch's.

    Two runtimes have two pools of threads, which compete for the same cores. Where vLLM binds
    threads, all of the second pool would be on the first one's main core.
    """
    native.set_threads.argtypes, native.set_threads.restype = [c_int64], None
    threads = torch.get_num_threads()
    native.set_threads(threads + 1)
    try:
        return torch.get_num_threads() == threads + 1
    finally:
        native.set_threads(threads)


Requests = ctypes.Array[Any]
"""``Recall`` or ``Leaving`` of several requests."""


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            native = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path.name} does not load: {error}") from error
        for name, kind in (
            ("tokens", Tokens),
            ("stride", Stride),
            ("layer", Layer),
            ("rows", Rows),
            ("asking", Asking),
            ("recall", Recall),
            ("gone", Gone),
            ("leaving", Leaving),
            ("undone", Undone),
        ):
            size = getattr(native, f"{name}_size")
            size.restype = c_int64
            assert size() == ctypes.sizeof(kind), f"C++ and library.py differ in {name}"
        if not _shares_threads(native):
            raise BuildError(
                f"{path.name} and PyTorch use two OpenMP runtimes; compile it with CXX=g++, or set "
                "LD_PRELOAD to the runtime that both shall use"
            )
        layer, rows, length = POINTER(Layer), POINTER(Rows), c_int64
        for name, result, *given in (
            ("has_fp16", c_int64),
            ("chunk_units", c_int64),
            ("attend_and_insert_tokens", None, layer, POINTER(POINTER(Tokens)), length, rows),
            ("attend_and_insert_stride", None, layer, POINTER(Stride), rows),
            ("recall_requests", c_int64, layer, rows, c_void_p, length, c_int64),
            ("note_ranks", None, layer, c_void_p, length),
            ("store_leaving", c_int64, layer, c_void_p, length, c_int64),
            ("store_units", None, layer, POINTER(Units), c_int64, POINTER(Gone)),
            ("undo_tokens", None, layer, POINTER(Undone)),
        ):
            function = getattr(native, name)
            function.restype, function.argtypes = result, given
        self._native = native
        wide = native.has_fp16()  # floating-point codes are decoded to fp16
        self.dtypes = {d for d in DTYPES if d != torch.float16 or wide}
        self.codes = {code for code in CODES if code == torch.int8 or wide}
        self.chunk_units = native.chunk_units()  # units of a store's chunk

    def attend_and_insert_tokens(self, layer: Layer, batches: Batches, rows: Rows) -> None:
        """Attend, update scores, apply each row's rules, and insert, for single tokens."""
        self._native.attend_and_insert_tokens(layer, batches.pointers, batches.count, rows)

    def attend_and_insert_stride(self, layer: Layer, stride: Stride, rows: Rows) -> None:
        """Attend, update scores, apply the rules of all tokens, and insert, for a stride."""
        self._native.attend_and_insert_stride(layer, stride, rows)

    def undo_tokens(self, layer: Layer, undone: Undone) -> None:
        """Undo rejected draft tokens."""
        self._native.undo_tokens(layer, undone)

    def recall_requests(self, layer: Layer, rows: Rows, requests: Requests, index: int) -> int:
        """Put the units that ``Recall``s select into pages; returns how many were not there."""
        came = self._native.recall_requests(layer, rows, requests, len(requests), index)
        assert came >= 0, "recalled units are missing, or there is no room for them"
        return came

    def store_units(self, layer: Layer, units: Units, index: int, gone: Gone) -> None:
        """Write evicted units to a store."""
        self._native.store_units(layer, units, index, gone)

    def note_ranks(self, layer: Layer, requests: Requests) -> None:
        """Copy requests' ranks to their ``before``, before their tokens are inserted."""
        self._native.note_ranks(layer, requests, len(requests))

    def store_leaving(self, layer: Layer, requests: Requests, index: int) -> None:
        """Write units to stores that the tokens of ``Leaving``s have just evicted."""
        num = self._native.store_leaving(layer, requests, len(requests), index)
        assert num >= 0, "a token evicted another number of units"


@lru_cache(maxsize=1)
def load() -> Library:
    """The library, compiled if needed and loaded once per process.

    Raises:
        BuildError: it cannot be built or loaded on this machine.
    """
    return Library(build())
