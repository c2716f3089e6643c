# SPDX-License-Identifier: Apache-2.0
"""Recall's kernels in Triton's interpreter: evidence against fp64, the rest against literal lists.

``tests/kernels/recall_checks.py`` fills rings and pages with junk and compares all of them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels import recall_checks as checks
from tests.kernels.random_pool import Case, at_units
from tests.kernels.recall_calls import empty
from tests.kernels.references import chosen_reference
from tests.kernels.stride_checks import check_insert_strides
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton import recall, recall_choose, recall_copy
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.recall import Judge, span_of, tile_of_units
from vllm_cascade.kernels.triton.recall_choose import MOST_TILE
from vllm_cascade.kernels.triton.recall_copy import WORDS, copy_ring

BF16, FP16 = torch.bfloat16, torch.float16
FEW = {"head_size": 16, "num_heads": 1}
SMALL = {"head_size": 16, "num_heads": 2}
CASES: dict[str, Case] = {
    # units of 2 to a page, powers of two and not; pages of one unit and of several
    "2": Case(**SMALL, unit=2, lengths=(5, 8, None, 9, 13), strides=(7, 2), holes=3),
    "3": Case(**FEW, unit=3, block_size=48, group=3, lengths=(2, 33), strides=(7, 3), holes=4),
    "4-heads": Case(
        **SMALL, unit=4, per_head=True, lengths=(7, 23, 11, 31), strides=(21,), holes=2
    ),
    "16": Case(**SMALL, unit=16, group=4, lengths=(47, None, 79, 95), strides=(37, 16), holes=3),
    "16-of-32": Case(
        **SMALL, unit=16, block_size=32, per_head=True, lengths=(63, 15), strides=(40,), holes=5,
        dtype=BF16,
    ),
    "24-alibi": Case(**SMALL, unit=24, block_size=48, alibi=True, lengths=(47,), strides=(49,)),
    "128": Case(**FEW, unit=128, block_size=128, lengths=(255,), strides=(130,), holes=2),
    # channels: not a power of two, partly rotated, in pairs of neighbours
    "partial": Case(num_heads=1, head_size=20, rotary_dim=8, unit=8, lengths=(15, 31), holes=1),
    "interleaved": Case(
        num_heads=1, head_size=24, rotary_dim=12, interleaved=True, unit=8, lengths=(39,), holes=2,
        dtype=FP16,
    ),
    # rows whose value is their key's end
    "latent": Case(
        num_heads=1, group=5, head_size=48, latent=32, rotary_dim=16, interleaved=True, unit=8,
        lengths=(15, None, 39), strides=(20, 9), holes=2,
    ),
    "latent-unrotated": Case(
        num_heads=1, group=2, head_size=40, latent=24, alibi=True, unit=4, lengths=(11, 27),
        strides=(14,), holes=2,
    ),
    "latent-as-served": Case(
        num_heads=1, group=16, head_size=576, latent=512, rotary_dim=64, interleaved=True, unit=16,
        lengths=(31,), strides=(19,), dtype=BF16, holes=1,
    ),
    "as-gemma-4": Case(
        num_heads=1, group=8, head_size=512, unit=16, lengths=(31,), strides=(19,), dtype=BF16,
        holes=1,
    ),
    "as-served": Case(
        num_heads=1, group=4, head_size=128, unit=16, lengths=(79,), strides=(35,), dtype=BF16,
        holes=2,
    ),
}  # fmt: skip


CASES |= {
    f"{name} {cache_dtype}": replace(CASES[name], cache_dtype=cache_dtype)
    for name, cache_dtype in (
        ("latent", "int8_per_token_head"), ("latent", "fp8"),
        ("latent-as-served", "fp8_per_token_head"), ("latent-unrotated", "int8_per_token_head"),
        ("latent-unrotated", "fp8_e5m2"), ("4-heads", "int8_per_token_head"), ("16", "fp8"),
        ("16-of-32", "fp8_per_token_head"), ("partial", "int8_per_token_head"),
        ("24-alibi", "fp8_per_token_head"), ("interleaved", "fp8_e5m2"),
    )
}  # fmt: skip
OFTEN = ("3", "4-heads", "16", "interleaved")


MOST_PROGRAMS = 65_535
"""Of a grid's second and third axis; the first may have 2**31 - 1."""


@pytest.mark.parametrize(
    ("group", "head_size", "latent", "stored", "asking"),
    [
        pytest.param(20, 576, 512, 1 << 18, 256, id="latent"),
        pytest.param(128, 576, 512, 1 << 18, 32, id="all-heads-on-a-rank"),
        pytest.param(48, 128, None, 1 << 20, 256, id="one-kv-head"),
    ],
)
def test_grids_of_long_stores(
    group: int, head_size: int, latent: int | None, stored: int, asking: int
) -> None:
    """A card refuses a launch with more; nothing runs here."""
    unit, nowhere = 16, {"device": "meta"}
    row = head_size if latent else 2 * head_size
    words = torch.empty(4, 1, 1, dtype=torch.int32, **nowhere)
    kv = torch.empty(4, 1, unit, row, dtype=torch.bfloat16, **nowhere)
    layer = CachedLayer(kv=kv, rank=words, born=words, latent=latent)
    codes = torch.empty(1, stored // unit, unit, head_size, dtype=torch.int8, **nowhere)
    scales = torch.empty(codes.shape[:3], **nowhere)
    judge = Judge(codes, scales, layer, stored // unit, group, asking)
    grids: list[tuple[int, ...]] = []
    for name in ("_ask", "_judge", "_weigh"):
        setattr(judge, name, lambda grid, *args, **own: grids.append(grid))
    rows = 1024
    steps = torch.empty(rows, columns.STEP_COLUMNS, dtype=torch.int32, **nowhere)
    recall = torch.empty(rows, columns.RECALL_COLUMNS, dtype=torch.int32, **nowhere)
    table = torch.empty(rows, 2, dtype=torch.int32, **nowhere)
    parts = judge.parts(steps, table, recall, empty(judge.shapes(rows, rows), torch.device("meta")))
    judge(SimpleNamespace(variant=0, query=None, places=(0,)), SimpleNamespace(parts=parts))
    assert len(grids) == 3
    assert all(max(grid[1:]) <= MOST_PROGRAMS for grid in grids), grids


def seeds(number: int) -> pytest.MarkDecorator:
    """The first one in every run."""
    later = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, number)]
    return pytest.mark.parametrize("seed", [0, *later])


@pytest.mark.parametrize("name", CASES)
def test_evidence_of_single_tokens(name: str) -> None:
    checks.check_judge(CASES[name], "cpu")


@pytest.mark.parametrize("most_asking", [pytest.param(3, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize("name", CASES)
def test_evidence_of_strides(name: str, most_asking: int) -> None:
    """Fewer tokens than may ask, and more; also more than are taken down at a time."""
    checks.check_judge(at_units(CASES[name]), "cpu", capacity=19, most_asking=most_asking)


def test_evidence_over_several_spans() -> None:
    """Rings of more units than one program judges, and than one weighs."""
    case = Case(**SMALL, unit=8, lengths=(3, 9, 17), strides=(4,))
    assert 3 * span_of(8) < 230
    checks.check_judge(case, "cpu", capacity=230)
    checks.check_judge(at_units(case), "cpu", capacity=230, most_asking=2)


def test_evidence_of_long_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans become longer where a request would have more than so many, and are added in parts."""
    monkeypatch.setattr(recall, "MOST_SPANS", 3)
    monkeypatch.setattr(recall, "PARTS", 2)
    case = Case(**SMALL, unit=8, lengths=(3, 9, 17), strides=(4,))
    assert 4 * span_of(8) < 330
    checks.check_judge(case, "cpu", capacity=330)
    checks.check_judge(at_units(case), "cpu", capacity=330, most_asking=2)


@pytest.mark.parametrize("unit", [1, 2, 3, 16, 24, 64, 100, 128])
def test_a_tile_holds_whole_units(unit: int) -> None:
    units, room = tile_of_units(unit)
    assert unit <= room < 2 * unit and room & (room - 1) == 0 and units * room in (64, 128)
    assert span_of(unit) % units == 0


@seeds(4)
@pytest.mark.parametrize("name", CASES)
def test_what_comes_back(name: str, seed: int) -> None:
    checks.check_recall(replace(CASES[name], seed=seed), "cpu")


@pytest.mark.parametrize(
    ("most", "sinks"), [(1, 0), (2, 3), pytest.param(20, 1, marks=pytest.mark.slow)]
)
def test_how_much_comes_back(most: int, sinks: int) -> None:
    """One unit, and more than there are at first; no sinks, and several."""
    case = Case(**SMALL, unit=4, per_head=True, lengths=(19, 43, None, 80, 120), holes=21)
    for seed in range(3):
        checks.check_recall(replace(case, seed=seed), "cpu", most=most, sinks=sinks)


def test_a_choice_among_more_than_a_tile() -> None:
    """More stored units than are looked at together, and a line of more places."""
    case = Case(**{**FEW, "head_size": 8}, unit=2, lengths=(2200,), holes=9, strides=(1,))
    for seed in range(2):
        checks.check_recall(replace(case, seed=seed), "cpu", capacity=MOST_TILE + 90, most=7)


def test_a_choice_from_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile begins with the best units of those before, in order: ties go to the first."""
    monkeypatch.setattr(recall_choose, "MOST_TILE", 16)
    case = Case(**{**FEW, "head_size": 8}, unit=2, lengths=(60, 80), holes=9, strides=(1, 1))
    for seed in range(6):
        checks.check_recall(replace(case, seed=seed), "cpu", capacity=75, most=7)


@pytest.mark.parametrize("nth", [1, 2])
def test_evidence_is_handed_on_once(nth: int) -> None:
    """Over the end of the first tile, whose last units but ``nth - 1`` have some, and no further.

    A tile has room for 8 units that were taken before.
    """
    case = Case(**{**FEW, "head_size": 8}, unit=2, lengths=(2200,), holes=9, strides=(1,))
    only, capacity = MOST_TILE - 8 - nth, MOST_TILE + 90
    for seed in range(3):
        checks.check_recall(replace(case, seed=seed), "cpu", capacity=capacity, most=7, only=only)


def test_of_equal_evidence_the_first() -> None:
    assert chosen_reference([0.5, 0.25, 0.5, 0.25, 0.25], [0] * 5, 4, 4) == [0, 1, 2, 3]


@seeds(3)
@pytest.mark.parametrize("name", CASES)
def test_what_single_tokens_evict(name: str, seed: int) -> None:
    checks.check_store_tokens(replace(CASES[name], seed=seed), "cpu")


@seeds(3)
@pytest.mark.parametrize("name", CASES)
def test_what_strides_evict(name: str, seed: int) -> None:
    """Units of the pages and of the stride itself, also more than a ring holds."""
    checks.check_store_strides(at_units(replace(CASES[name], seed=seed)), "cpu")


@seeds(4)
@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_strides_behind_recalled_units(name: str, seed: int) -> None:
    """Plans know nothing of these, and who leaves is known before; more will stand before the unit
    that is not complete."""
    case = replace(CASES[name], seed=seed, scored=seed % 4 < 2)
    check_insert_strides(at_units(case), "cpu", recalls=True)


@pytest.mark.parametrize("words", [1, 5, WORDS // 3])
@pytest.mark.parametrize("number", [0, 1, 4, 10, 12])
def test_a_ring_in_chunks(number: int, words: int) -> None:
    """A snapshot's chunks lie anywhere; nothing but their places, and the ring's, is written."""
    generator = torch.Generator().manual_seed(number)
    ring, kept = (
        torch.randint(-(2**31), 2**31 - 1, (3, places, words), generator=generator).int()
        for places in (40, 24)
    )
    chunks, first, size = [4, 0, 3][: -(-number // 4) or 1], 13, 4
    expected = kept.clone()
    for nth in range(number):
        expected[:, chunks[nth // size] * size + nth % size] = ring[:, first + nth]
    numbers = torch.tensor(chunks).int()
    copy_ring(ring, kept, numbers, size, number, first, restores=False)
    assert torch.equal(kept, expected)
    other, restored = ring.flip(1).contiguous(), ring.flip(1)
    restored[:, 20 : 20 + number] = ring[:, first : first + number]
    copy_ring(other, kept, numbers, size, number, 20, restores=True)
    assert torch.equal(other, restored) and torch.equal(kept, expected)


def test_the_grid_of_a_long_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a grid's first axis has room for the chunks of a long store; nothing runs here."""
    grids: list[tuple[int, ...]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **_: grids.append(grid)

    monkeypatch.setattr(recall_copy, "_copy_ring", Noted())
    lines, num_chunks, size = 6, 70_000, 16
    units = num_chunks * size
    ring, kept = (torch.empty(lines, units, 4, dtype=torch.int32, device="meta") for _ in "rk")
    chunks = torch.empty(num_chunks, dtype=torch.int32, device="meta")
    for restores in (False, True):
        copy_ring(ring, kept, chunks, size, units, 0, restores)
    assert len(grids) == 2
    assert all(math.prod(grid) == lines * num_chunks for grid in grids), grids
    assert all(max(grid[1:]) <= MOST_PROGRAMS for grid in grids), grids
