# SPDX-License-Identifier: Apache-2.0
"""What is chosen by rule from a shape."""

import pytest
import torch

from vllm_cascade.kernels.triton import configs
from vllm_cascade.kernels.triton.configs import attend_config, attend_splits

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


def test_heads_of_a_program() -> None:
    """Two share a tile's rotations; of a head set each, or an odd number, none do."""
    heads = [attend_config(torch.bfloat16, 128, 4, num, sets)[1] for num, sets in
             ((8, 1), (2, 1), (3, 1), (1, 1), (8, 8))]  # fmt: skip
    assert heads == [2, 2, 1, 1, 1]
    assert attend_config(torch.bfloat16, 256, 4, 8, 1)[1] == 4, "a long head"
