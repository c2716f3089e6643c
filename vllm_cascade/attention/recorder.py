# SPDX-License-Identifier: Apache-2.0
"""Which original tokens the cache holds, recorded as a stream goes by.

Needs the policy setting ``trace: true``, which keeps a token's index in the stream beside its
rank. Used by the tests against the oracle, the demo's picture and ``vllm-cascade trace``.
"""

from dataclasses import dataclass

import torch

from vllm_cascade.attention.metadata import Wave
from vllm_cascade.cache.layout import Pages


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

    def record(self, layer: str, pages: Pages, wave: Wave) -> None:
        """Note what each stride of the wave left in the cache."""
        for batch in wave.tokens:
            for row in range(len(batch.index)):
                end = int(batch.stream[row]) + 1
                self.add(layer, pages, batch.pages[row], int(batch.new_slots[row]), end)
        for stride in wave.strides:
            end = stride.stream + stride.num_tokens
            self.add(layer, pages, stride.pages, stride.new_slots, end)

    def add(self, layer: str, pages: Pages, blocks: torch.Tensor, num_slots: int, end: int) -> None:
        """Note one request's kept tokens after ``end`` tokens, from its first slots."""
        if end % self.every == 0:
            tokens = kept_tokens(pages, blocks, num_slots)
            self.kept.append(Kept(layer, int(blocks[0]), end, tokens))


def kept_tokens(pages: Pages, blocks: torch.Tensor, num_slots: int) -> list[list[int]]:
    """Stream indices of the cached tokens, chronological, per head set."""
    assert pages.token is not None, "needs the policy setting trace: true"
    rank = pages.rank[blocks].transpose(0, 1).flatten(1)[:, :num_slots]
    token = pages.token[blocks].transpose(0, 1).flatten(1)[:, :num_slots]
    return [
        token[row][order[rank[row][order] >= 0]].tolist()
        for row, order in enumerate(rank.argsort(dim=1))
    ]
