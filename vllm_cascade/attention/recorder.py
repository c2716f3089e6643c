# SPDX-License-Identifier: Apache-2.0
"""Which original tokens the cache holds, recorded as a stream goes by.

Needs the policy setting ``trace: true``, which keeps a unit's index in the stream beside its
rank. Used by the tests against the oracle, the demo's picture and ``vllm-cascade trace``.
"""

from dataclasses import dataclass

import torch

from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.columns import LENGTH, NEW_SLOTS, STREAM
from vllm_cascade.step.rows import StrideRows


@dataclass(frozen=True)
class Kept:
    """One layer's kept tokens of one request after ``end`` tokens.

    ``first_page`` tells requests apart while they live; ``tokens`` is ``[num_sets][count]``.
    """

    layer: str
    first_page: int
    end: int
    tokens: list[list[int]]


class Recorder:
    """Collects the kept tokens of every stride end that is a multiple of ``every`` tokens."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.kept: list[Kept] = []

    def record(self, layer: str, pages: Pages, rows: StrideRows, table: torch.Tensor) -> None:
        """Note what each stride of a wave left in the cache.

        Args:
            table: int ``[B, P]``, the batch's block table.
        """
        for i, row in enumerate(rows.steps.tolist()):
            blocks = table[int(rows.request[i])].long()
            if blocks[0] != 0:  # a warm-up has the null block only
                self.add(layer, pages, blocks, row[NEW_SLOTS], row[STREAM] + row[LENGTH])

    def add(self, layer: str, pages: Pages, blocks: torch.Tensor, num_slots: int, end: int) -> None:
        """Note one request's kept tokens after ``end`` tokens, from its first slots."""
        if end % self.every == 0:
            tokens = kept_tokens(pages, blocks, num_slots, end)
            self.kept.append(Kept(layer, int(blocks[0]), end, tokens))


def kept_tokens(pages: Pages, blocks: torch.Tensor, num_slots: int, end: int) -> list[list[int]]:
    """Stream indices of the cached ones of ``end`` tokens, chronological, per head set."""
    assert pages.token is not None, "needs the policy setting trace: true"
    num_units = num_slots // pages.unit
    rank = pages.rank[blocks].transpose(0, 1).flatten(1)[:, :num_units]
    first = pages.token[blocks].transpose(0, 1).flatten(1)[:, :num_units]
    kept = []
    for row, order in enumerate(rank.argsort(dim=1)):
        units = first[row][order[rank[row][order] >= 0]]
        tokens = (units[:, None] + torch.arange(pages.unit)).flatten()
        kept.append(tokens[tokens < end].tolist())
    return kept
