# SPDX-License-Identifier: Apache-2.0
"""Recall in one layer through the C++ library: selects units, and moves them to pages and back."""

import numpy as np
import torch

from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.torch.recall import CANDIDATES, FILTERING, JUDGING
from vllm_cascade.kernels.cpp import library as cpp
from vllm_cascade.recall.log import CHUNK_UNITS, Part
from vllm_cascade.step.recall import RecallStride


class NativeRecall:
    """One layer's calls into the library; ``recall.py`` does the same in PyTorch.

    Args:
        layer: the library's layer struct. The caller keeps it and its tensors alive.
        index: the layer's index in its requests' logs.
        in_8_bits: whether the logs store rows in 8 bits (``UnitShape``).
    """

    def __init__(self, library: cpp.Library, layer: cpp.Layer, index: int, in_8_bits: bool) -> None:
        self._library, self._layer, self._index = library, layer, index
        self._in_8_bits = in_8_bits

    def choose(
        self,
        units: Part,
        num: int,
        rows: cpp.Rows,
        places: np.ndarray,
        positions: np.ndarray,
        pages: torch.Tensor,
        num_sinks: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Select the ``num`` units with the highest worth for some queries.

        Args:
            places: int64 ``[queries]``, the queries' tokens in the step.
            positions: int64 ``[queries]``, positions by which the queries are rotated back.
            pages: int32, the request's block numbers.
            num_sinks: units; they are the first ones in the pages.

        Returns:
            Unit indices within the part, int64 ``[sets, num]``, ascending; the judged units, int64
            ``[sets, judged]``, all or ``CANDIDATES`` of them; and their worth for each query head,
            fp32 ``[H * G, judged]``, of all queries.
        """
        layer = self._layer
        assert places.dtype == positions.dtype == np.int64 and len(places) == len(positions)
        assert pages.dtype == torch.int32 and pages.is_contiguous()
        judged = min(len(units), CANDIDATES)
        asked = np.empty((layer.num_heads * layer.group, judged), dtype=np.float32)
        listed = np.empty((layer.num_sets, judged), dtype=np.int64)
        chosen = np.empty((layer.num_sets, num), dtype=np.int64)
        asking = cpp.Asking(
            places=places.ctypes.data,
            positions=positions.ctypes.data,
            num=len(places),
            num_candidates=CANDIDATES,
            num_filtering=FILTERING,
            num_judging=JUDGING,
            num_chosen=num,
            pages=pages.data_ptr(),
            num_sinks=num_sinks,
        )
        addresses = asked.ctypes.data, listed.ctypes.data, chosen.ctypes.data
        self._library.recall_units(layer, rows, self._units(units), asking, self._index, *addresses)
        return chosen, listed, asked

    def exchange(
        self, plan: RecallStride, chosen: np.ndarray, pages: torch.Tensor, num_units: int
    ) -> int:
        """Put the chosen units into the pages in place of those recalled before.

        Args:
            chosen: int64 ``[sets, plan.now]``, indices within the candidates.
            pages: int32, the request's block numbers.
            num_units: units in the pages, used or free.

        Returns:
            How many units were not in the pages.
        """
        shown = plan.log.tokens[self._index]
        assert pages.dtype == torch.int32 and pages.is_contiguous() and chosen.flags.c_contiguous
        exchange = cpp.Exchange(
            pages=pages.data_ptr(),
            chosen=chosen.ctypes.data,
            shown=shown.data_ptr(),
            shown_stride=shown.stride(0),
            num_units=num_units,
            before=plan.before,
            now=plan.now,
            sinks=plan.sinks,
        )
        units = self._units(plan.candidates)
        return self._library.exchange_units(self._layer, units, self._index, exchange)

    def store(self, part: Part, gone: Evicted) -> None:
        """Write evicted units, and what selects them, to a log's memory."""
        evicted = cpp.Gone(
            rows=gone.rows.data_ptr(),
            scale=None if gone.scale is None else gone.scale.data_ptr(),
            born=gone.born.data_ptr(),
            token=gone.token.data_ptr(),
            num=len(gone),
        )
        self._library.store_units(self._layer, self._units(part), self._index, evicted)

    def store_freed(
        self, part: Part, pages: torch.Tensor, before: np.ndarray, num_units: int
    ) -> None:
        """Write units that a single token evicted; their freed slots still hold the rows.

        Args:
            pages: int32, the request's block numbers.
            before: int32 ``[sets, units]``, ranks before the token.
            num_units: units in the pages now, used or free.
        """
        assert before.dtype == np.int32 and before.strides[1] == before.itemsize
        freed = cpp.Freed(
            pages=pages.data_ptr(),
            before=before.ctypes.data,
            before_stride=before.strides[0] // before.itemsize,
            num_before=before.shape[1],
            num_units=num_units,
        )
        self._library.store_freed_units(self._layer, self._units(part), self._index, freed)

    def _units(self, part: Part) -> cpp.Units:
        return cpp.Units(
            addresses=part.addresses.ctypes.data,
            num_chunks=len(part.chunks),
            chunk_units=CHUNK_UNITS,
            begin=part.begin,
            end=part.end,
            in_8_bits=self._in_8_bits,
        )
