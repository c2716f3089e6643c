# SPDX-License-Identifier: Apache-2.0
"""Write the host's score of one cached token per request into its pages.

Scores that do not depend on attention come with the step: tf-idf (Dynamic Global Context,
https://github.com/aaron-jx-li/augmented_streamingLLM) and drawn numbers.
"""

import torch
import triton
import triton.language as tl

from .launch import Launcher, variant_of
from .salted import own_scores
from .tiles import OLD_SLOTS, STEP, STREAM, check_steps, grid_of_places, slot_tile


@triton.jit
def _assign(
    given,
    salts,
    ranks,
    rank,
    score,
    table,
    steps,
    word_stride,
    table_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    wanted = tl.load(ranks + row)
    if (tl.load(steps + row * STEP + STREAM) < 0) | (wanted < 0):
        return
    slots = tl.load(steps + row * STEP + OLD_SLOTS) // UNIT
    value = own_scores(tl.load(given + row), salts, head_set, UNIT)
    table += row * table_stride
    first = tl.program_id(2) * TILE
    _, inside, _, word = slot_tile(table, first, slots, head_set, word_stride, PAGE, TILE)
    found = tl.load(rank + word, mask=inside, other=-1) == wanted
    given_there = tl.zeros([TILE], tl.float32) + value
    if UNIT > 1:  # a unit's score is the sum of its tokens' scores
        given_there += tl.load(score + word, mask=found, other=0.0)
    tl.store(score + word, given_there, mask=found)


class Assignment:
    """Sets the score of one rank per request, in every head set. A unit's score is added to.

    Args:
        rank, score: ``Pages`` views; ``score`` is written.
        unit: slots that share one rank and score.
        salts: int32 ``[num_sets]``, hashed into given scores; None: they are used as they are.
    """

    def __init__(
        self,
        rank: torch.Tensor,
        score: torch.Tensor,
        unit: int = 1,
        salts: torch.Tensor | None = None,
    ) -> None:
        self._num_sets, self._page = rank.shape[1:]
        self._launch = Launcher(
            _assign,
            salts=salts,
            rank=rank,
            score=score,
            word_stride=rank.stride(0),
            PAGE=self._page,
            UNIT=unit,
            num_warps=4,
        )

    def __call__(
        self, given: torch.Tensor, ranks: torch.Tensor, table: torch.Tensor, steps: torch.Tensor
    ) -> None:
        """Launch.

        Args:
            given: fp32 ``[>= B]``.
            ranks: int32 ``[>= B]``; negative: no score.
            table: int32 ``[>= B, P]``.
            steps: int32 ``[B, STEP_COLUMNS]``; rows with ``STREAM`` -1 write nothing.
        """
        check_steps(steps, table)
        num_rows, table_stride = len(steps), table.stride(0)
        assert given.dtype == torch.float32 and ranks.dtype == torch.int32
        assert given.is_contiguous() and ranks.is_contiguous()
        assert min(len(given), len(ranks)) >= num_rows, (given.shape, ranks.shape)
        grid, tile = grid_of_places(num_rows, self._num_sets, table.shape[1] * self._page)
        self._launch(
            grid,
            variant_of(given, ranks, table, steps, table_stride, tile),
            given=given,
            ranks=ranks,
            table=table,
            steps=steps,
            table_stride=table_stride,
            TILE=tile,
        )
