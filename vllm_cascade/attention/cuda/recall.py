# SPDX-License-Identifier: Apache-2.0
"""Recall in one layer on CUDA: nothing in it waits for the host, so it is part of full graphs.

Which rows choose, and which store, stands in rows of numbers on the device; the kernels are
launched for all rows alike and leave out the others.
"""

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.triton.recall import judge_units
from vllm_cascade.kernels.triton.recall_choose import recall_units
from vllm_cascade.kernels.triton.recall_store import ranks_before, store_units
from vllm_cascade.recall.rings import Rings


class LayerRings:
    """One layer's part of the rings.

    Args:
        index: of the layer in them.
        most_queries: tokens of a stride that choose.
    """

    def __init__(
        self, layer: LayerConfig, pages: Pages, rings: Rings, index: int, most_queries: int
    ) -> None:
        self._layer, self._pages, self._most_queries = layer, pages, most_queries
        self._shape = rings.shape
        self._rows, self._codes, self._scales = (
            tensor[index] for tensor in (rings.rows, rings.codes, rings.scales)
        )
        self._words = rings.born[index], rings.token[index]
        self._exchanged = torch.zeros(1, dtype=torch.int32, device=pages.kv.device)

    @property
    def exchanged(self) -> int:
        """Units that choices have brought back; waits for the device."""
        return int(self._exchanged)

    def choose(
        self,
        query: torch.Tensor,
        table: torch.Tensor,
        steps: torch.Tensor,
        recall: torch.Tensor,
        single: bool,
    ) -> None:
        """Bring back what strides ask for, before they attend.

        Args:
            query: of the whole step.
            recall: int32 ``[R, RECALL_COLUMNS]``.
            single: whether they are strides of one token.
        """
        layer, pages, shape = self._layer, self._pages, self._shape
        evidence = judge_units(
            *(query, self._codes, self._scales, steps, recall),
            *(layer.rotation, not layer.is_neox, layer.scale, shape.most_units, shape.num_sets),
            1 if single else self._most_queries,
        )
        recall_units(
            *(evidence, self._rows, *self._words),
            *(pages.kv, pages.rank, pages.born, pages.score, pages.token),
            *(table, steps, recall, self._exchanged, shape.most_recalled),
        )

    def ranks(self, table: torch.Tensor, steps: torch.Tensor, recall: torch.Tensor) -> torch.Tensor:
        """What ``store`` has to know of lines into which single tokens are about to be inserted."""
        return ranks_before(self._pages.rank, table, steps, recall, self._pages.unit)

    def store(
        self,
        table: torch.Tensor,
        steps: torch.Tensor,
        recall: torch.Tensor,
        *,
        ranks: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
    ) -> None:
        """Store what strides evict: of single tokens when they were inserted, with ``ranks``; of
        longer ones before, with ``keep``, ``key`` and ``value``."""
        layer, pages = self._layer, self._pages
        store_units(
            *(keep, ranks, key, value, pages.kv, pages.rank, pages.born, pages.token),
            *(table, steps, recall, layer.rotation, not layer.is_neox),
            *(self._rows, self._codes, self._scales, *self._words, self._shape.most_units),
        )
