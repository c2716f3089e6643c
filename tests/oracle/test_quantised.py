# SPDX-License-Identifier: Apache-2.0
"""The oracle's own codes, and how far it takes those that somebody else has chosen."""

import pytest
import torch

from tests.oracle.quantised import DOUBT, Quantiser, Stored

TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
}


@pytest.mark.parametrize("cache_dtype", TYPES)
def test_all_codes_stand_for_what_pytorch_says(cache_dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(TYPES[cache_dtype]).float()
    there = numbers.isfinite() & (numbers != -128)  # which no row has: its largest is 127
    assert torch.equal(Quantiser.of(cache_dtype).numbers(codes[there]), numbers[there])


def stored(rows: torch.Tensor, codes: torch.Tensor, scale: float) -> Stored:
    """One row [D] of one head, whose value is its key."""
    layer = Stored.none(1, 1, len(rows), torch.uint8)
    layer.codes[0, 0] = codes.view(torch.uint8).repeat(2)
    layer.scales[:] = scale
    layer.there[:] = True
    return layer


def test_codes_stand_where_rounding_decides() -> None:
    """In the middle of two: either, as it was stored; and with the scale that was stored."""
    quantiser = Quantiser.of("int8_per_token_head")
    rows = torch.tensor([127.0, 3.5, -2.0, 8.0])
    for chosen in (3, 4):
        codes = torch.tensor([127, chosen, -2, 8], dtype=torch.int8)
        layer = stored(rows, codes, 1.0 + DOUBT / 2)
        read = layer.settle(quantiser, rows[None, None], [0], 0)[0, 0]
        assert torch.equal(read, codes.float() * (1.0 + DOUBT / 2))
        assert (layer.compared, layer.others) == (4, int(chosen == 3))


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        ([127, 5, -2, 8], 1.0, "1 of 4 codes"),
        ([127, 4, -1, 7], 1.0, "2 of 4 codes"),
        ([127, 4, -2, 8], 1.0 + 2 * DOUBT, "scales"),
    ],
    ids=["beyond the middle", "not in the middle", "scale"],
)
def test_other_codes_and_scales_are_refused(codes: list[int], scale: float, message: str) -> None:
    rows = torch.tensor([127.0, 3.5, -2.0, 8.0])
    layer = stored(rows, torch.tensor(codes, dtype=torch.int8), scale)
    with pytest.raises(ValueError, match=message):
        layer.settle(Quantiser.of("int8_per_token_head"), rows[None, None], [0], 1)


def test_a_row_that_is_not_known_gets_the_oracles_codes() -> None:
    quantiser = Quantiser.of("fp8")
    layer = Stored.none(2, 3, 4, torch.uint8)
    rows = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer.settle(quantiser, rows, [1], 0), quantiser.read(rows, 0))
    assert layer.compared == layer.others == 0
