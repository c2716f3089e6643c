# SPDX-License-Identifier: Apache-2.0
"""Records which tokens of the stream the cache holds.

Requires the policy setting ``trace: true``, which stores each unit's stream index beside its rank.
The oracle tests, the demo's picture and ``vllm-cascade trace`` use it.
"""

from dataclasses import dataclass

import torch

from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.columns import LENGTH, NEW_SLOTS, STREAM
from vllm_cascade.step.rows import StrideRows


@dataclass(frozen=True)
class Kept:
    """One layer's kept tokens of one request after ``end`` tokens.

    Attributes:
        first_page: the request's first block, which identifies it while it runs.
        tokens: stream indices, ``[num_sets][count]``.
    """

    layer: str
    first_page: int
    end: int
    tokens: list[list[int]]


class Recorder:
    """Collects kept tokens at every stride end that is a multiple of ``every`` tokens."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.kept: list[Kept] = []

    def record(self, layer: str, pages: Pages, rows: StrideRows, table: torch.Tensor) -> None:
        """Record the cache after each stride of a wave.

        Args:
            table: int ``[B, P]``, the batch's block table.
        """
        for i, row in enumerate(rows.steps.tolist()):
            blocks = table[int(rows.request[i])].long()
            if blocks[0] != 0:  # warm-up rows have only the null block
                self.add(layer, pages, blocks, row[NEW_SLOTS], row[STREAM] + row[LENGTH])

    def forget(self, layer: str, first_page: int, end: int) -> None:
        """Drop what a layer kept of a request after more than ``end`` tokens: they were drafts.

        These are its last ones. Earlier ones on the same page may be those of another request.
        """
        for i in reversed(range(len(self.kept))):
            kept = self.kept[i]
            if (kept.layer, kept.first_page) == (layer, first_page):
                if kept.end <= end:
                    return
                del self.kept[i]

    def add(self, layer: str, pages: Pages, blocks: torch.Tensor, num_slots: int, end: int) -> None:
        """Record what one request's first ``num_slots`` slots keep after ``end`` tokens."""
        if end % self.every == 0:
            tokens = kept_tokens(pages, blocks, num_slots, end)
            self.kept.append(Kept(layer, int(blocks[0]), end, tokens))


def kept_tokens(pages: Pages, blocks: torch.Tensor, num_slots: int, end: int) -> list[list[int]]:
    """Stream indices of the tokens cached after ``end`` tokens, chronological, per head set."""
    assert pages.token is not None, "needs the policy setting trace: true"
    num_units = num_slots // pages.unit
    rank = pages.rank[blocks].transpose(0, 1).flatten(1)[:, :num_units]
    first = pages.token[blocks].transpose(0, 1).flatten(1)[:, :num_units]
    kept = []
    for row, order in enumerate(rank.argsort(dim=1)):
        units = first[row][order[rank[row][order] >= 0]]
        tokens = (units[:, None] + torch.arange(pages.unit, device=units.device)).flatten()
        kept.append(tokens[tokens < end].tolist())
    return kept
