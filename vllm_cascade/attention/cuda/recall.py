# SPDX-License-Identifier: Apache-2.0
"""Recall in one layer on CUDA: nothing in it waits for the host, so it is part of full graphs.

Recall rows on the device say which requests select units and which store some. Kernels are
launched for all requests and skip the others.
"""

import numpy as np
import torch

from vllm_cascade.attention.cuda.metadata import EVERYTHING, Recalls
from vllm_cascade.attention.cuda.ranks import put_together
from vllm_cascade.attention.cuda.workspace import Workspace, judged_at_once, workspace_of
from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.cache.layout import Pages
from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import END, RING, STORED
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.recall import Judge
from vllm_cascade.kernels.triton.recall_choose import Recaller
from vllm_cascade.kernels.triton.recall_rows import RecallRows
from vllm_cascade.kernels.triton.recall_store import UnitStore
from vllm_cascade.kernels.triton.stored import Codes
from vllm_cascade.kernels.triton.strides import Tokens
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.inputs import Stride


class LayerRings:
    """One layer's part of the rings.

    Attributes:
        judged: list that receives judged rows and copies of their evidence, whose memory attention
            reuses; None: no copies.

    Args:
        stored: how the pages' rows are stored in 8 bits, or None.
        index: of the layer in them.
        most_queries: tokens of a stride that choose.
        most_requests: that may run at once, with rings or without.
    """

    def __init__(
        self,
        layer: LayerConfig,
        pages: Pages,
        stored: Codes | None,
        rings: Rings,
        index: int,
        most_queries: int,
        most_requests: int,
    ) -> None:
        self._layer, self._pages, self._most_queries = layer, pages, most_queries
        self._most_requests = most_requests
        assert pages.token is not None, "recall keeps units' indices"
        scales = rings.row_scales
        self._row_scales = None if scales is None else scales[index]
        self._shape = rings.shape
        self._rows, self._codes, self._scales = (
            tensor[index] for tensor in (rings.rows, rings.codes, rings.scales)
        )
        self._born, self._token = rings.born[index], rings.token[index]
        self._exchanged = torch.zeros(1, dtype=torch.int64, device=pages.kv.device)
        self._judges: dict[int, Judge] = {}
        self._workspace: Workspace | None = None
        self.judged: list[tuple[RecallRows, torch.Tensor]] | None = None
        self._cached = cached = CachedLayer(
            kv=pages.kv,
            rank=pages.rank,
            born=pages.born,
            score=pages.score,
            token=pages.token,
            rotation=layer.rotation,
            interleaved=not layer.is_neox,
            scale=layer.scale,
            latent=layer.latent,
            stored=stored,
            dtype=layer.dtype,
        )
        common = {
            "rows": self._rows,
            "stored_born": self._born,
            "stored_token": self._token,
            "capacity": rings.shape.most_units,
            "row_scales": self._row_scales,
        }
        most = rings.shape.most_recalled
        self._recaller = Recaller(cached, **common, exchanged=self._exchanged, most=most)
        self._store = UnitStore(cached, **common, codes=self._codes, scales=self._scales)

    @property
    def exchanged(self) -> int:
        """Units that choices have brought back; waits for the device."""
        return int(self._exchanged)

    def rows(
        self,
        table: torch.Tensor,
        steps: torch.Tensor,
        recall: torch.Tensor,
        num_queries: int,
        columns: int | None = None,
        judged: np.ndarray | None = None,
    ) -> RecallRows:
        """Launch arguments for strides, and memory that all layers can share.

        What is used until units are chosen is carved from the workspace; what ``before`` and
        ``store`` use, while attention has the workspace, is allocated.

        Args:
            recall: int32 ``[R, RECALL_COLUMNS]``.
            num_queries: query heads.
            columns: units per row of ``keep``; None: strides of one token, which have none.
            judged: as in ``PrefillRows``.
        """
        asking = 1 if columns is None else self._most_queries
        judge, num_rows = self._judge(asking, num_queries), len(steps)
        at_once = judged_at_once(self._most_requests, asking)
        shapes = {**judge.shapes(num_rows, at_once), **self._recaller.shapes(num_rows)}
        self._workspace = workspace_of(steps.device)  # held, so that it stays
        memory = self._workspace.carve(shapes)
        parts = judge.parts(steps, table, recall, memory, judged)
        chosen = {name: memory[name] for name in ("evidence", "chosen", "moves", "scratch")}
        stored = self._store.room(num_rows, table.shape[1], columns, steps.device)
        return RecallRows(steps, table, recall, parts, **chosen, **stored)

    def _judge(self, asking: int, num_queries: int) -> Judge:
        if asking not in self._judges:
            self._judges[asking] = Judge(
                codes=self._codes,
                scales=self._scales,
                layer=self._cached,
                capacity=self._shape.most_units,
                num_queries=num_queries,
                most_asking=asking,
            )
        return self._judges[asking]

    def choose(self, tokens: Tokens, rows: RecallRows, single: bool, does: Recalls) -> None:
        """Bring back what strides ask for, before they attend.

        Args:
            tokens: of the whole step.
            single: whether they are strides of one token.
        """
        if not does.selects:
            return
        if does.judges:
            asking = 1 if single else self._most_queries
            self._judge(asking, tokens.heads[0])(tokens, rows)
            if self._layer.over_ranks is not None:  # whose heads select together
                assert rows.evidence is not None, "the judge wrote it"
                put_together(self._layer.over_ranks, "max", rows.evidence)
        self._recaller(rows)
        if self.judged is not None and does.judges and rows.evidence is not None:
            self.judged.append((rows, rows.evidence.clone()))

    def before(self, rows: RecallRows, does: Recalls) -> None:
        """Note what ``store`` must know of lines into which single tokens are inserted next."""
        if does.stores:
            self._store.before(rows)

    def store(
        self,
        rows: RecallRows,
        does: Recalls,
        tokens: Tokens | None = None,
        keep: torch.Tensor | None = None,
    ) -> None:
        """Store what strides evict: of single tokens when they were inserted; of longer ones
        before, with the step's ``tokens`` and ``keep``."""
        if does.stores:
            self._store(rows, tokens, keep)

    # --- a stride that runs in PyTorch ------------------------------------------------------------

    def choose_alone(self, stride: Stride, row: np.ndarray, query: torch.Tensor) -> None:
        """``choose`` for one stride.

        Args:
            row: int32 ``[RECALL_COLUMNS]``, the stride's.
        """
        device = query.device
        steps, recall = (sent(x, device)[None] for x in (stride.step, torch.from_numpy(row)))
        table, num_queries = stride.pages[None].int(), query.shape[1]
        rows = self.rows(table, steps, recall, num_queries, columns=0)
        tokens = Tokens(query, query[:, : self._layer.num_kv_heads])  # no key is read
        self.choose(tokens, rows, single=False, does=EVERYTHING)

    def room(self, row: np.ndarray) -> Evicted | None:
        """Room for the units that a stride evicts, if any."""
        with torch.device(self._pages.kv.device):
            num = int(row[STORED])
            return Evicted.room(self._layer, self._pages, num) if num else None

    def store_evicted(self, row: np.ndarray, gone: Evicted) -> None:
        """Write units that a stride in PyTorch evicts to the request's ring."""
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
