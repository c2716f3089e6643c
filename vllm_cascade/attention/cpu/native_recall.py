# SPDX-License-Identifier: Apache-2.0
"""Recall in one layer through the C++ library: selects units, and moves them to pages and back.

What the library is given of a step's requests is the same in all layers; the first one makes it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.torch.recall import FILTERING, JUDGING, most_scored
from vllm_cascade.kernels.columns import NEW_SLOTS, OLD_SLOTS, START
from vllm_cascade.kernels.cpp import library as cpp
from vllm_cascade.recall.log import CHUNK_UNITS, Part
from vllm_cascade.step.inputs import Singles, Stride
from vllm_cascade.step.recall import RecallStride


class Requests(NamedTuple):
    """The library's structs of several requests, and what their addresses need alive."""

    structs: cpp.Requests
    kept: Any


class NativeRecall:
    """One layer's calls into the library; ``recall.py`` does the same in PyTorch.

    Args:
        layer: the library's layer struct. The caller keeps it and its tensors alive.
        index: the layer's index in its requests' logs.
    """

    def __init__(self, library: cpp.Library, layer: cpp.Layer, index: int) -> None:
        assert library.chunk_units == CHUNK_UNITS, "units.h and chain.py differ"
        self._library, self._layer, self._index = library, layer, index

    def select_for_tokens(self, singles: Singles, rows: cpp.Rows) -> int:
        """Recall what single tokens' queries select; returns how many units were not there.

        Args:
            rows: addresses of the step's new rows.
        """
        made = _once(singles.kept, "recalls", lambda: _selecting_tokens(singles))
        return self._select(made, rows)

    def select_for_stride(self, stride: Stride, place: np.ndarray, rows: cpp.Rows) -> int:
        """The same for the queries of a stride.

        Args:
            place: int64 ``[queries]``, the selecting tokens' places in the step.
        """
        made = _once(stride.kept, "recalls", lambda: _selecting_stride(stride, place))
        return self._select(made, rows)

    def _select(self, made: Requests | None, rows: cpp.Rows) -> int:
        if made is None:
            return 0
        return self._library.recall_requests(self._layer, rows, made.structs, self._index)

    def note_ranks(self, singles: Singles) -> None:
        """Keep the ranks of requests that evict units, before their tokens are inserted."""
        made = _once(singles.kept, "leaving", lambda: _leaving(singles))
        if made is not None:
            self._library.note_ranks(self._layer, made.structs)

    def store_of_tokens(self, singles: Singles) -> None:
        """Store the units that single tokens evicted; their freed slots still hold the rows."""
        made = singles.kept["leaving"]
        if made is not None:
            self._library.store_leaving(self._layer, made.structs, self._index)

    def store(self, plan: RecallStride, gone: Evicted) -> None:
        """Write evicted units, and what selects them, to a log's memory."""
        evicted = cpp.Gone(
            rows=gone.rows.data_ptr(),
            scale=None if gone.scale is None else gone.scale.data_ptr(),
            born=gone.born.data_ptr(),
            token=gone.token.data_ptr(),
            num=len(gone),
        )
        units = units_of(plan.stored)
        self._library.store_units(self._layer, units, self._index, evicted)


def _once(kept: dict[str, Any], name: str, make: Any) -> Any:
    """Return ``kept[name]``, which the first layer makes for all layers."""
    if name not in kept:
        kept[name] = make()
    return kept[name]


def units_of(part: Part) -> cpp.Units:
    """The library's struct of a part of a log."""
    shape = part.chunks[0].shape
    return cpp.Units(
        chunks=part.addresses.ctypes.data,
        offsets=shape.offsets.ctypes.data,
        num_chunks=len(part.chunks),
        begin=part.begin,
        end=part.end,
        in_8_bits=shape.in_8_bits,
    )


def asking_of(
    places: np.ndarray, positions: np.ndarray, pages: torch.Tensor, num_chosen: int, num_sinks: int
) -> cpp.Asking:
    """The library's struct of queries that select units.

    Args:
        places: int64 ``[queries]``, the queries' tokens in the step.
        positions: int64 ``[queries]``, positions by which the queries are rotated back.
        pages: int32, the request's block numbers.
        num_sinks: units; they are the first ones in the pages.
    """
    assert places.dtype == positions.dtype == np.int64 and len(places) == len(positions)
    assert pages.dtype == torch.int32 and pages.is_contiguous()
    return cpp.Asking(
        places=places.ctypes.data,
        positions=positions.ctypes.data,
        num=len(places),
        num_candidates=most_scored(num_chosen),
        num_filtering=FILTERING,
        num_judging=JUDGING,
        num_chosen=num_chosen,
        pages=pages.data_ptr(),
        num_sinks=num_sinks,
    )


def _selecting(
    plan: RecallStride, places: np.ndarray, pages: torch.Tensor, slots: int, unit: int
) -> tuple[cpp.Recall, Any]:
    """A request's struct, and what must stay alive.

    Args:
        slots: slots of the pages that are in use, or free among them.
    """
    positions, shown = np.full(len(places), plan.middle * unit), plan.log.tokens
    exchange = cpp.Exchange(
        pages=pages.data_ptr(),
        shown=shown.data_ptr(),
        shown_layer=shown.stride(0),
        shown_stride=shown.stride(1),
        num_units=slots // unit,
        before=plan.before,
        now=plan.now,
        sinks=plan.sinks,
    )
    asking = asking_of(places, positions, pages, plan.now, plan.sinks)
    units = units_of(plan.candidates)
    return cpp.Recall(units, asking, exchange), (plan, places, positions)


def _selecting_stride(stride: Stride, place: np.ndarray) -> Requests | None:
    plan = stride.recall
    assert plan is not None
    unit = plan.log.shape.unit
    return _requests(cpp.Recall, [_selecting(plan, place, stride.pages, stride.old_slots, unit)])


def _selecting_tokens(singles: Singles) -> Requests | None:
    steps, found = singles.steps.tolist(), []
    for plan, step, pages in zip(singles.recall, steps, singles.table, strict=True):
        if plan is not None and plan.selects:
            unit = plan.log.shape.unit
            found.append(_selecting(plan, np.asarray([step[START]]), pages, step[OLD_SLOTS], unit))
    return _requests(cpp.Recall, found)


def _leaving(singles: Singles) -> Requests | None:
    """Structs of the requests whose tokens evict units."""
    steps, found = singles.steps.tolist(), []
    for plan, step, pages in zip(singles.recall, steps, singles.table, strict=True):
        if plan is None or not len(plan.stored):
            continue
        shape = plan.log.shape
        before = np.empty((shape.num_sets, step[OLD_SLOTS] // shape.unit), dtype=np.int32)
        freed = cpp.Freed(
            pages=pages.data_ptr(),
            before=before.ctypes.data,
            num_before=before.shape[1],
            num_units=step[NEW_SLOTS] // shape.unit,
        )
        units = units_of(plan.stored)
        found.append((cpp.Leaving(units, freed), (plan, before)))
    return _requests(cpp.Leaving, found)


def _requests(kind: Any, found: Sequence[tuple[Any, Any]]) -> Requests | None:
    if not found:
        return None
    structs = (kind * len(found))(*(struct for struct, _ in found))
    return Requests(structs, [kept for _, kept in found])
