# SPDX-License-Identifier: Apache-2.0
"""What every kernel over pages is told of a layer: its rows, how keys turn, how logits are made."""

from dataclasses import dataclass
from typing import Any

import torch

from .configs import LONG
from .stored import Codes, codes_arguments
from .tiles import check_pages, head_size_of


@dataclass(eq=False)
class CachedLayer:
    """One layer's pages, checked once.

    ``H`` KV heads, ``G`` query heads each, ``D`` channels.

    Attributes:
        kv, rank, born, score, token: ``vllm_cascade.cache.layout.Pages`` views; None where no
            kernel of the caller reads or writes them.
        rotation: ``[max_distance + 1, 2, rotary_dim / 2]`` of ``rotate``, or None: keys are not
            rotated.
        interleaved: rotary pairs are (2i, 2i + 1).
        slopes: fp32 ``[H * G]``, ALiBi slopes, or None.
        scale: factor on the logits.
        softcap: soft cap of the logits; 0: none.
        num_queries: query heads, ``H * G``; 0 for kernels without queries.
        latent: channels of a latent row's value, or None (``tiles.head_size_of``).
        stored: how ``kv`` is stored in 8 bits; None: in the new tokens' type.
        dtype: of new tokens; None: that of ``kv``.
        unit, page, num_sets, head_size, value_size: sizes of these.
        heads: ``Tokens.heads`` of tokens that match.
    """

    kv: torch.Tensor
    rank: torch.Tensor
    born: torch.Tensor
    score: torch.Tensor | None = None
    token: torch.Tensor | None = None
    rotation: torch.Tensor | None = None
    interleaved: bool = False
    slopes: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    num_queries: int = 0
    latent: int | None = None
    stored: Codes | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        words = (self.rank, self.born, self.score, self.token)
        self.unit = check_pages(self.kv, *(word for word in words if word is not None))
        _, num_heads, self.page, self._width = self.kv.shape
        assert self.num_queries % num_heads == 0, (self.num_queries, num_heads)
        self.num_sets, self.head_size = self.rank.shape[1], head_size_of(self.kv, self.latent)
        self.value_size = self.latent or self.head_size
        self.heads = self.num_queries, num_heads, self.head_size, self.dtype or self.kv.dtype
        assert self.stored is not None or self.heads[3] == self.kv.dtype, self.heads
        self._codes = codes_arguments(self.stored, self.kv, self.rank, self.latent)

    @property
    def pages(self) -> dict[str, Any]:
        """Arguments that find a row and its numbers."""
        return {
            "kv": self.kv,
            "rank": self.rank,
            "born": self.born,
            "page_stride": self.kv.stride(0),
            "word_stride": self.rank.stride(0),
            "NUM_SETS": self.num_sets,
            "HEAD": self.head_size,
            "UNIT": self.unit,
            **self._codes,
        }

    @property
    def words(self) -> dict[str, Any]:
        """Numbers of units that only some kernels need."""
        return {"score": self.score, "token": self.token}

    @property
    def rows(self) -> dict[str, int]:
        """Channels of a row's value, and of a row."""
        return {"VALUE": self.value_size, "ROW": self._width}

    def copied(self, most: int) -> int:
        """Rows per tile that is copied to pages: ``most``, or fewer of long heads."""
        if self.latent is not None or self.head_size <= LONG:
            return most
        return most // self.kv.dtype.itemsize

    @property
    def turning(self) -> dict[str, Any]:
        """How keys are rotated."""
        half = 0 if self.rotation is None else self.rotation.shape[2]
        return {"rotation": self.rotation, "HALF": half, "INTERLEAVED": self.interleaved}

    @property
    def logits(self) -> dict[str, Any]:
        """How a product becomes a logit."""
        return {"slopes": self.slopes, "scale": self.scale, "cap": self.softcap or None}
