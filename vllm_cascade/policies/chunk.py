# SPDX-License-Identifier: Apache-2.0
"""Attention within chunks: the cache empties where a chunk of the stream ends.

For layers that were trained so (``cache/kinds.py``). It is not a choice of users, so the registry
does not have it.
"""

from typing import ClassVar

from vllm_cascade.policies.rules import Insertions, Rule, Rules
from vllm_cascade.policies.window import Window


class Chunk(Window):
    """Chunks of ``budget + 1`` tokens. The last token of a chunk evicts all of them."""

    name: ClassVar[str] = "chunk"

    def insertions(self) -> Insertions:
        size = self.budget + 1
        chunk: list[Rules] = [()] * self.budget + [(Rule(0, size, size),)]
        return Insertions(2 * chunk, period=size)  # the cache grows in the first one

    def regions(self, t: int, count: int) -> list[str]:
        return ["chunk"] * count
