# SPDX-License-Identifier: Apache-2.0
"""What is chosen by rule from a shape."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_cascade.kernels.columns import STEP_COLUMNS
from vllm_cascade.kernels.triton import configs
from vllm_cascade.kernels.triton.configs import attend_config, attend_splits
from vllm_cascade.kernels.triton.merge import ScoredMerge
from vllm_cascade.kernels.triton.singles import Singles

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_slots", [16, 128, 2064, 8208])
@pytest.mark.parametrize("heads", [1, 8, 32])
def test_splits_fill_the_card_and_no_more(heads: int, num_slots: int) -> None:
    splits = [attend_splits(CPU, batch, heads, num_slots) for batch in (1, 4, 16, 64, 256)]
    assert splits == sorted(splits, reverse=True), "a larger batch never needs more splits"
    assert all(s & (s - 1) == 0 and 1 <= s <= configs.MAX_SPLITS for s in splits)
    assert splits[-1] == 1 or heads * 256 < configs.HEADS_PER_SM * configs.DEFAULT_SMS
    assert splits[0] <= max(num_slots // configs.LEAST_SLOTS, 1)
    if num_slots < 128:
        assert splits[0] == 1, "too little to split"


@pytest.mark.parametrize(("num_sets", "group", "num_slots"), [(8, 4, 1 << 20), (128, 1, 1 << 16)])
def test_grids_of_scores_of_long_caches(num_sets: int, group: int, num_slots: int) -> None:
    """A card refuses more than 65,535 programs on any axis but the first; nothing runs here."""
    page, rows, heads = 16, 1024, num_sets * group
    made: dict[str, Any] = {"device": "meta"}
    words = torch.empty(4, num_sets, page, **made)
    merge = ScoredMerge(heads, 128, None, rank=words, score=words, reduction="mean", unit=1)
    grids: list[tuple[int, ...]] = []
    merge._launch = lambda grid, *args, **own: grids.append(grid)
    merge(
        SimpleNamespace(variant=0, output=None, places=(0, 0, 0, 0)),
        Singles(
            steps=torch.empty(rows, STEP_COLUMNS, dtype=torch.int32, **made),
            table=torch.empty(rows, num_slots // page, dtype=torch.int32, **made),
            partial=torch.empty(rows, heads, 1, 128, **made),
            partial_lse=torch.empty(rows, heads, 1, **made),
            logits=torch.empty(rows, heads, num_slots, **made),
            own=torch.empty(rows, heads, **made),
            new_score=torch.empty(rows, num_sets, **made),
        ),
    )
    (grid,) = grids
    assert max(grid[1:]) <= 65_535, grid
    tiles = -(-num_slots // merge._tile)
    assert grid[0] * grid[1] * grid[2] == rows * (heads + num_sets * tiles)


def test_heads_of_a_program() -> None:
    """Two share a tile's rotations; of a head set each, or an odd number, none do."""
    heads = [attend_config(torch.bfloat16, 128, 4, num, sets)[1] for num, sets in
             ((8, 1), (2, 1), (3, 1), (1, 1), (8, 8))]  # fmt: skip
    assert heads == [2, 2, 1, 1, 1]
    assert attend_config(torch.bfloat16, 256, 4, 8, 1)[1] == 4, "a long head"
