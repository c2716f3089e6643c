# SPDX-License-Identifier: Apache-2.0
"""What draft tokens change in one layer's pages: saved by place, and restored for rejected ones.

A request's drafts have consecutive places, ``most`` of them at most. Version ``place % most`` on
the request's pages has all ranks and scores before the draft (``Pages.versions``). A ``Journal``
has the row that the draft replaces in each head, and the words of its unit. C++ does the same
(``kernels/cpp/drafts.h``).
"""

import torch

from vllm_cascade.cache.layout import Pages
from vllm_cascade.step.inputs import Undone

NO_SLOT = -1


class Journal:
    """One layer's rows and words that drafts replaced.

    Attributes:
        most: drafts of a request in a step.
        rows: ``[places, H, row_size]``, as in the pages.
        scale: fp32 ``[places, H, 2]``; None if rows have no scales of their own.
        words: int32 ``[places, 3, S]``: the slot or ``NO_SLOT``, and its unit's ``born`` and
            ``token``.
    """

    def __init__(self, pages: Pages, most_requests: int) -> None:
        assert pages.versions is not None, "pages have no room for drafts"
        self.most, num_sets = pages.versions.shape[1], pages.rank.shape[1]
        _, num_heads, _, row_size = pages.kv.shape
        places = most_requests * self.most
        with pages.kv.device:
            # On CPUs not touched before it is used: memory for requests with drafts only.
            self.rows = torch.empty(places, num_heads, row_size, dtype=pages.kv.dtype)
            self.scale = None if pages.scale is None else torch.empty(places, num_heads, 2)
            self.words = torch.empty(places, 3, num_sets, dtype=torch.int32)
        self._pages, self._versions = pages, pages.versions

    def save_words(self, place: int, blocks: torch.Tensor) -> None:
        """Save the ranks and scores of a request with these pages, int64 ``[P]``."""
        pages, version = self._pages, place % self.most
        self._versions[blocks, version, 0] = pages.rank[blocks]
        self._versions[blocks, version, 1] = pages.score[blocks].view(torch.int32)

    def save_slots(self, place: int, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Save what is in the slots, int64 ``[S]``, that the draft's row is written to."""
        pages = self._pages
        self.words[place, 0] = slots
        block, unit, head_set, head, offset = self._at(blocks, slots)
        self.words[place, 1, head_set] = pages.born[block, head_set, unit]
        if pages.token is not None:
            self.words[place, 2, head_set] = pages.token[block, head_set, unit]
        block = block.expand(len(head))
        self.rows[place, head] = pages.kv[block, head, offset]
        if self.scale is not None:
            assert pages.scale is not None
            self.scale[place, head] = pages.scale[block, head, offset]

    def undo(self, undone: Undone) -> None:
        """Restore requests as they were before their first rejected drafts."""
        for (place, num, slots, _), table in zip(undone.rows.tolist(), undone.table, strict=True):
            blocks = table.long()
            for i in reversed(range(place, place + num)):
                self._restore_slots(i, blocks)
            pages, version = self._pages, place % self.most
            blocks = blocks[: -(-slots // pages.block_size)]
            pages.rank[blocks] = self._versions[blocks, version, 0]
            pages.score[blocks] = self._versions[blocks, version, 1].view(torch.float32)

    def _restore_slots(self, place: int, blocks: torch.Tensor) -> None:
        pages = self._pages
        block, unit, head_set, head, offset = self._at(blocks, self.words[place, 0].long())
        pages.born[block, head_set, unit] = self.words[place, 1, head_set]
        if pages.token is not None:
            pages.token[block, head_set, unit] = self.words[place, 2, head_set]
        block = block.expand(len(head))
        pages.kv[block, head, offset] = self.rows[place, head]
        if self.scale is not None:
            assert pages.scale is not None
            pages.scale[block, head, offset] = self.scale[place, head]

    def _at(self, blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Where slots are: blocks, units, sets, and for each head of a set, the head and offset.

        Slots of ``NO_SLOT`` are left out.
        """
        pages, num_heads = self._pages, self.rows.shape[1]
        head_set = (slots >= 0).nonzero().squeeze(1)
        slots = slots[head_set]
        offset = slots % pages.block_size
        head = torch.arange(num_heads) if pages.rank.shape[1] == 1 else head_set
        head = head if len(slots) else head[:0]
        return (
            blocks[slots // pages.block_size],
            offset // pages.unit,
            head_set,
            head,
            offset.expand(len(head)),
        )
