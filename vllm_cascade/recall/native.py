# SPDX-License-Identifier: Apache-2.0
"""The judge of evicted units in C++."""

import numpy as np

from vllm_cascade.kernels.cpp import library as cpp
from vllm_cascade.recall.log import CHUNK_UNITS, Part


class NativeJudge:
    """One layer's; see ``evidence.py`` for what it computes.

    Args:
        layer: the library's structure of the layer, which the caller keeps alive with its tensors.
        index: of the layer in its requests' logs.
    """

    def __init__(self, library: cpp.Library, layer: cpp.Layer, index: int) -> None:
        self._library, self._layer, self._index = library, layer, index

    def choose(
        self, units: Part, num: int, rows: cpp.Rows, places: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The units that some queries ask for most.

        Args:
            places: int64 ``[asking]``, of their tokens in the step.
            positions: int64 ``[asking]``, by which their queries are turned back.

        Returns:
            int64 ``[sets, num]``, counted from the part's first unit and ascending, and fp32
            ``[H * G, len(units)]``, what each query head asks for, at most of all tokens.
        """
        layer, (codes, scales) = self._layer, units.addresses
        assert places.dtype == positions.dtype == np.int64 and len(places) == len(positions)
        asked = np.empty((layer.num_heads * layer.group, len(units)), dtype=np.float32)
        chosen = np.empty((layer.num_sets, num), dtype=np.int64)
        store = cpp.Store(
            codes=codes.ctypes.data,
            scales=scales.ctypes.data,
            num_chunks=len(units.chunks),
            chunk_units=CHUNK_UNITS,
            begin=units.begin,
            end=units.end,
            places=places.ctypes.data,
            positions=positions.ctypes.data,
            num_asking=len(places),
            num=num,
        )
        self._library.recall_units(
            layer, rows, store, self._index, asked.ctypes.data, chosen.ctypes.data
        )
        return chosen, asked
