# SPDX-License-Identifier: Apache-2.0
"""Recall in one layer on CUDA: nothing in it waits for the host, so it is part of full graphs.

Which rows choose, and which store, stands in rows of numbers on the device; the kernels are
launched for all rows alike and leave out the others.
"""

import numpy as np
import torch

from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.cache.layout import Pages
from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import END, RING, STORED
from vllm_cascade.kernels.triton.recall import judge_units
from vllm_cascade.kernels.triton.recall_choose import recall_units
from vllm_cascade.kernels.triton.recall_store import ranks_before, store_units
from vllm_cascade.kernels.triton.stored import Codes
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.inputs import Stride


class LayerRings:
    """One layer's part of the rings.

    Args:
        stored: how the pages' rows are stored in 8 bits, or None.
        index: of the layer in them.
        most_queries: tokens of a stride that choose.
    """

    def __init__(
        self,
        layer: LayerConfig,
        pages: Pages,
        stored: Codes | None,
        rings: Rings,
        index: int,
        most_queries: int,
    ) -> None:
        self._layer, self._pages, self._most_queries = layer, pages, most_queries
        scales = rings.row_scales
        self._row_scales = None if scales is None else scales[index]
        self._kept = {"latent": layer.latent, "stored": stored, "row_scales": self._row_scales}
        self._shape, self._num_requests = rings.shape, rings.num_requests
        self._rows, self._codes, self._scales = (
            tensor[index] for tensor in (rings.rows, rings.codes, rings.scales)
        )
        self._born, self._token = rings.born[index], rings.token[index]
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
        assert pages.token is not None, "recall keeps units' indices"
        asking = 1 if single else self._most_queries
        # What memory is profiled for: the queries of one stride, or one of each request.
        num = max(self._num_requests // asking, 1)
        found = [
            judge_units(
                query=query,
                codes=self._codes,
                scales=self._scales,
                steps=steps[first : first + num],
                recall=recall[first : first + num],
                rotation=layer.rotation,
                interleaved=not layer.is_neox,
                scale=layer.scale,
                capacity=shape.most_units,
                num_sets=shape.num_sets,
                most_asking=asking,
                latent=layer.latent,
            )
            for first in range(0, len(steps), num)
        ]
        total = found[0] if len(found) == 1 else torch.cat(found)
        if layer.over_ranks is not None:  # whose heads select together
            total = layer.over_ranks(total, "max")
        recall_units(
            evidence=total,
            rows=self._rows,
            stored_born=self._born,
            stored_token=self._token,
            kv=pages.kv,
            rank=pages.rank,
            born=pages.born,
            score=pages.score,
            token=pages.token,
            table=table,
            steps=steps,
            recall=recall,
            exchanged=self._exchanged,
            most=shape.most_recalled,
            **self._kept,
        )

    def ranks(self, table: torch.Tensor, steps: torch.Tensor, recall: torch.Tensor) -> torch.Tensor:
        """What ``store`` has to know of lines into which single tokens are about to be inserted."""
        pages = self._pages
        return ranks_before(
            rank=pages.rank, table=table, steps=steps, recall=recall, unit=pages.unit
        )

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
        assert pages.token is not None, "recall keeps units' indices"
        store_units(
            keep=keep,
            ranks=ranks,
            key=key,
            value=value,
            kv=pages.kv,
            rank=pages.rank,
            born=pages.born,
            token=pages.token,
            table=table,
            steps=steps,
            recall=recall,
            rotation=layer.rotation,
            interleaved=not layer.is_neox,
            rows=self._rows,
            codes=self._codes,
            scales=self._scales,
            stored_born=self._born,
            stored_token=self._token,
            capacity=self._shape.most_units,
            **self._kept,
        )

    # --- a stride that runs in PyTorch ------------------------------------------------------------

    def choose_alone(self, stride: Stride, row: np.ndarray, query: torch.Tensor) -> Evicted | None:
        """``choose`` for one stride; returns room for the units that it evicts, if any.

        Args:
            row: int32 ``[RECALL_COLUMNS]``, the stride's.
        """
        device = query.device
        steps, recall = (sent(x, device)[None] for x in (stride.step, torch.from_numpy(row)))
        self.choose(query, stride.pages[None].int(), steps, recall, single=False)
        with torch.device(device):
            num = int(row[STORED])
            return Evicted.room(self._layer, self._pages, num) if num else None

    def store_evicted(self, row: np.ndarray, gone: Evicted) -> None:
        """Units that PyTorch has found to leave, into the request's ring."""
        layer, (ring, end) = self._layer, row[[RING, END]].tolist()
        room = self._shape.most_units
        last = slice(max(len(gone) - room, 0), len(gone))
        place = ring + (end + torch.arange(len(gone))[last]) % room
        sets = torch.arange(layer.num_kv_heads) % layer.num_sets
        position = gone.born[sets].unsqueeze(-1) + torch.arange(self._pages.unit)
        rows = self._pages.read(gone.rows, gone.scale)
        keys = evidence.unrotated(layer, rows[..., : layer.head_size], position)
        codes, scale = evidence.encode(keys)
        host = self._rows.device
        self._rows[:, place.to(host)] = gone.rows[:, last].to(host)
        if self._row_scales is not None and gone.scale is not None:
            self._row_scales[:, place.to(host)] = gone.scale[:, last].to(host)
        self._codes[:, place], self._scales[:, place] = codes[:, last], scale[:, last]
        self._born[:, place], self._token[:, place] = gone.born[:, last], gone.token[:, last]
