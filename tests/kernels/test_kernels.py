# SPDX-License-Identifier: Apache-2.0
"""Every kernel in Triton's interpreter against its fp64 reference, over a grid of odd shapes.

The checks (``checks.py``) poison what must not be read and compare what must not be
written byte by byte; ``benchmarks.gpu_check`` runs the same on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels import checks
from tests.kernels.checks import NUM_RULES, Case
from tests.kernels.prefill_checks import StrideBatch
from tests.kernels.random_pool import at_units
from vllm_cascade.kernels.triton import insert

FP16, BF16 = torch.float16, torch.bfloat16
SMALL = {"head_size": 16, "num_heads": 2}
ATTENTION: dict[str, Case] = {
    # GQA 1, 4, 8; pages of 16 and 32; counts around page and tile edges; padding in the middle
    "gqa-1": Case(**SMALL, group=1, lengths=(0, 15, None, 16, 17)),
    "many-parts": Case(**SMALL, lengths=(0, 300, None), splits=16),
    "gqa-4": Case(**SMALL, group=4, lengths=(31, 32, 33)),
    "gqa-8": Case(**{**SMALL, "num_heads": 1}, group=8, block_size=32, lengths=(0, 1, 63, 65)),
    "gqa-3": Case(**{**SMALL, "num_heads": 3}, group=3, lengths=(2, None, 70)),
    "heads": Case(**SMALL, per_head=True, lengths=(5, 47, 48, 49)),
    "heads-32": Case(**SMALL, per_head=True, block_size=32, lengths=(33, 0, 96), splits=4),
    "one-split": Case(**SMALL, splits=1, lengths=(1, 130)),
    "more-splits-than-tiles": Case(**SMALL, splits=16, lengths=(40, 3)),
    "whole-tiles-of-holes": Case(**SMALL, holes=90, lengths=(3, 1), splits=4),
    "all-padding": Case(**SMALL, lengths=(None, None)),
    # head sizes, some not powers of two
    "size-64": Case(head_size=64, num_heads=1, group=4, lengths=(40,)),
    "size-80": Case(head_size=80, num_heads=1, lengths=(20,), strides=(9,)),
    "size-96": Case(head_size=96, num_heads=1, lengths=(20,), dtype=FP16, strides=(9,)),
    "size-128": Case(head_size=128, num_heads=1, lengths=(36,), dtype=BF16, strides=(9,)),
    "size-256": Case(head_size=256, num_heads=1, lengths=(19,), strides=(5,)),
    # heads that are turned in four parts, some of them not whole
    "size-192": Case(head_size=192, num_heads=1, group=4, lengths=(33,), strides=(5,)),
    "size-512": Case(
        head_size=512, num_heads=1, group=2, dtype=BF16, lengths=(17,), strides=(35,),
    ),
    "size-512-many": Case(
        head_size=512, num_heads=2, group=12, per_head=True, lengths=(17,), splits=2
    ),
    "size-256-many": Case(head_size=256, num_heads=1, group=16, lengths=(70,), strides=(5,)),
    "size-256-interleaved": Case(
        head_size=256, num_heads=1, rotary_dim=160, interleaved=True, block_size=8, lengths=(21,),
        strides=(5,), dtype=FP16,
    ),
    # rotation
    "partial": Case(**{**SMALL, "head_size": 20}, rotary_dim=8),
    "partial-wide": Case(num_heads=1, head_size=80, rotary_dim=20, lengths=(25,)),
    "interleaved": Case(**SMALL, interleaved=True),
    "partial-interleaved": Case(**{**SMALL, "head_size": 24}, rotary_dim=12, interleaved=True),
    # what changes logits
    "alibi": Case(**SMALL, alibi=True, per_head=True),
    "soft-cap": Case(**SMALL, softcap=1.5),
    "logit-scale": Case(**SMALL, logit_scale=True),
    "everything": Case(
        **SMALL, alibi=True, softcap=2.0, logit_scale=True, reduction="max", group=4, dtype=FP16
    ),
    # head reductions over groups and over all heads
    "max": Case(**SMALL, group=3, reduction="max"),
    "median-odd": Case(**{**SMALL, "num_heads": 3}, group=1, reduction="median"),
    "median-even": Case(**SMALL, group=4, reduction="median"),
    "median-heads": Case(**SMALL, group=4, per_head=True, reduction="median"),
    "median-one": Case(**SMALL, group=1, per_head=True, reduction="median"),
    "sinks": Case(**SMALL, group=3, sinks=True),
    "sinks-and-all": Case(
        **SMALL, sinks=True, softcap=2.0, logit_scale=True, reduction="max", per_head=True,
        group=4, dtype=FP16, lengths=(0, 33, None, 5),
    ),
    # types
    "fp16": Case(**SMALL, group=4, dtype=FP16),
    "bf16": Case(**SMALL, group=1, dtype=BF16, per_head=True),
}  # fmt: skip
OF_SPLITS = ("many-parts", "one-split", "more-splits-than-tiles", "size-512-many")
"""Only decode is split as a case says, and has programs that share a long head."""
OF_REDUCTIONS = ("max", "median-odd", "median-even", "median-heads", "median-one")
"""Chunks of the stream have no scores to reduce."""
ONE = {"num_heads": 1, "rotary_dim": 16}
LATENT: dict[str, Case] = {
    # one row for all heads, whose value is its key's end; more heads than one program has
    "five": Case(**ONE, group=5, head_size=48, latent=32, lengths=(0, 15, None, 40)),
    "many": Case(**ONE, group=32, head_size=80, latent=64, lengths=(33,), dtype=BF16, splits=2),
    "interleaved": Case(
        **ONE, group=16, head_size=40, latent=24, interleaved=True, block_size=32,
        lengths=(70, 1), reduction="median", logit_scale=True,
    ),
    "as-served": Case(
        num_heads=1, group=16, head_size=576, latent=512, rotary_dim=64, interleaved=True,
        lengths=(19,), strides=(5,), dtype=BF16, splits=1,
    ),
    "units": Case(
        **ONE, group=32, head_size=48, latent=32, unit=16, lengths=(0, 35), strides=(9, 20),
        interleaved=True, reduction="max",
    ),
    "small-units": Case(**ONE, group=3, head_size=48, latent=32, unit=4, lengths=(22, None)),
    "unrotated": Case(
        num_heads=1, group=2, head_size=40, latent=24, alibi=True, lengths=(0, 21), strides=(9, 18),
    ),
}  # fmt: skip
STORED = [
    # every code, with scales of rows and of the layer, and every case
    ("five", "fp8_e5m2"), ("many", "int8_per_token_head"), ("interleaved", "fp8"),
    ("as-served", "fp8_per_token_head"), ("units", "int8_per_token_head"),
    ("small-units", "fp8_per_token_head"), ("small-units", "fp8"), ("unrotated", "fp8"),
    ("unrotated", "int8_per_token_head"),
]  # fmt: skip
WINDOWS: dict[str, Case] = {
    # whose positions are others', above and below ranks; pages of any size; strides longer than
    # the window, and windows that end inside a tile
    "plain": Case(**SMALL, window=9, lengths=(0, 5, None, 8), strides=(3, 17, 40)),
    "odd-pages": Case(**SMALL, window=34, block_size=11, lengths=(33, 12, 0), strides=(5, 66)),
    "small-pages": Case(**SMALL, window=48, block_size=3, group=4, lengths=(47, 46), sinks=True),
    "large-pages": Case(
        **SMALL, window=70, block_size=47, group=1, lengths=(69, None, 31), strides=(33, 129)
    ),
    "alibi": Case(**SMALL, window=20, alibi=True, lengths=(19, 3)),
    "as-gpt-oss": Case(
        num_heads=1, group=8, head_size=64, window=40, block_size=13, lengths=(39, 7),
        strides=(70,), dtype=BF16, sinks=True,
    ),
    "as-gemma": Case(
        num_heads=1, head_size=256, window=24, block_size=5, lengths=(23,), strides=(37,),
        softcap=1.5,
    ),
    "interleaved": Case(
        num_heads=1, head_size=24, rotary_dim=12, interleaved=True, window=17, block_size=6,
        lengths=(16, 2), strides=(19, 4), dtype=FP16,
    ),
}  # fmt: skip


CHUNKS: dict[str, Case] = {
    # strides that begin in a chunk, cross one or several, and end where one ends
    "plain": Case(**SMALL, window=9, chunked=True, lengths=(0, 5, None, 8), strides=(3, 17, 40)),
    "large": Case(
        **SMALL, window=70, chunked=True, block_size=47, group=1, lengths=(69, 31),
        strides=(33, 129),
    ),
    "as-llama-4": Case(
        num_heads=1, group=5, head_size=128, window=64, chunked=True, lengths=(39, 7),
        strides=(70,), dtype=BF16,
    ),
    "codes": Case(
        **SMALL, window=9, chunked=True, lengths=(8, 3), cache_dtype="fp8_per_token_head"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_decode(name: str) -> None:
    checks.check_decode(ATTENTION[name], "cpu")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "units")) for n in LATENT]
)
def test_latent_rows(name: str) -> None:
    """Every kernel on rows whose value is part of their key."""
    check_latent(LATENT[name])


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [pytest.param(n, d, marks=[pytest.mark.slow] * (n in ("units", "many"))) for n, d in STORED],
)
def test_latent_rows_in_8_bits(name: str, cache_dtype: str) -> None:
    """What is read are codes, and what is written are the same codes as PyTorch's."""
    check_latent(replace(LATENT[name], cache_dtype=cache_dtype))


def check_latent(case: Case) -> None:
    checks.check_decode(case, "cpu")
    checks.check_prefill(at_units(case), "cpu")
    checks.check_chunks(at_units(case), "cpu")
    for scored in (True, False):
        checks.check_insert_strides(at_units(replace(case, scored=scored)), "cpu")
    if case.unit == 1:
        checks.check_insert(case, "cpu")
    else:
        checks.check_insert_units(case, "cpu")


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    """Single tokens, and all strides of a chunk; in a window nobody is compared."""
    checks.check_decode(WINDOWS[name], "cpu")
    checks.check_chunks(WINDOWS[name], "cpu")
    checks.check_insert(WINDOWS[name], "cpu", 1)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_the_stream(name: str) -> None:
    """All strides of a step, whose queries see no token of an earlier chunk."""
    checks.check_chunks(CHUNKS[name], "cpu")


@pytest.mark.parametrize("name", [n for n in ATTENTION if n not in OF_SPLITS])
def test_prefill(name: str) -> None:
    checks.check_prefill(ATTENTION[name], "cpu")


def test_prefill_longer_than_its_tiles() -> None:
    """Several query tiles and key tiles, on both sides of the cache's end."""
    case = Case(**SMALL, lengths=(70, 0, 64), strides=(100, 65, 129))
    checks.check_prefill(case, "cpu")


INSERTION: dict[str, Case] = {
    "homogeneous": Case(**SMALL, lengths=(0, 1, 15, 16, 17, None, 40)),
    "heads": Case(**SMALL, per_head=True, lengths=(0, 5, 31, 32, 33), block_size=32),
    "resident": Case(**SMALL, newest_stays=False, lengths=(3, 47, 48, 49)),
    "resident-heads": Case(**{**SMALL, "num_heads": 3}, per_head=True, newest_stays=False),
    "per-query": Case(**SMALL, per_age=True, lengths=(2, 21, 64)),
    "fp16": Case(head_size=80, num_heads=1, dtype=FP16, lengths=(9, 33)),
    "long": Case(head_size=16, num_heads=1, lengths=(4200, 1023), seed=3),  # several tiles
}


def test_ranks_that_nobody_has_are_ignored() -> None:
    """A warm-up's requests share the null block, and read what any of them wrote there."""
    case = Case(**SMALL, lengths=(20,), strides=(5,), holes=4)
    expected = StrideBatch(case, "cpu").attend()
    batch = StrideBatch(case, "cpu")
    ranks = batch.ours.words("rank", 0)
    used = ranks[:, : batch.ours.slots[0] // case.unit]
    assert (used < 0).any()
    used[used < 0] = 20
    batch.ours.put_all("rank", 0, ranks)
    for one, other in zip(batch.attend(), expected, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("variant", range(NUM_RULES))
@pytest.mark.parametrize("name", INSERTION)
def test_insert(name: str, variant: int) -> None:
    checks.check_insert(INSERTION[name], "cpu", variant)


@pytest.mark.parametrize("variant", [1, 4])
def test_insert_many_heads(variant: int) -> None:
    """A row of more numbers than are loaded before its place is known."""
    case = Case(head_size=192, num_heads=12, lengths=(5, None, 33))
    assert 2 * case.head_size * case.num_heads > insert.AHEAD
    checks.check_insert(case, "cpu", variant)


@pytest.mark.parametrize("variant", range(NUM_RULES))
@pytest.mark.parametrize("name", INSERTION)
def test_drafts(name: str, variant: int) -> None:
    checks.check_drafts(INSERTION[name], "cpu", variant)


@pytest.mark.parametrize("name", LATENT)
def test_drafts_of_latent_rows(name: str) -> None:
    checks.check_drafts(LATENT[name], "cpu")


@pytest.mark.parametrize("name", INSERTION)
def test_assign(name: str) -> None:
    checks.check_assign(INSERTION[name], "cpu")


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > 1)) for n in range(4)]
)
@pytest.mark.parametrize("name", INSERTION)
def test_insert_strides(name: str, seed: int) -> None:
    for scored in (True, False):
        case = replace(INSERTION[name], seed=seed, scored=scored)
        checks.check_insert_strides(case, "cpu")


@pytest.mark.parametrize("name", [n for n in ATTENTION if n not in OF_SPLITS + OF_REDUCTIONS])
def test_chunks(name: str) -> None:
    checks.check_chunks(ATTENTION[name], "cpu")


def test_chunks_that_drop_a_long_cache() -> None:
    """Tokens move by more positions than any of the other cases."""
    case = Case(
        head_size=16, num_heads=1, group=1, lengths=(3000,), strides=(2,), dtype=torch.float16
    )
    checks.check_chunks(case, "cpu")


def test_chunks_longer_than_their_tiles() -> None:
    """Of 16 queries by 16 keys in fp32."""
    case = Case(**SMALL, lengths=(35, 0, 32), strides=(50, 17, 65))
    checks.check_chunks(case, "cpu")


@pytest.mark.parametrize("seed", range(5))
def test_schedule(seed: int) -> None:
    checks.check_schedule("cpu", seed)


FEW = {"head_size": 16, "num_heads": 1}
UNITS: dict[str, Case] = {
    # caches that end before, at and inside a unit's end; more units than one tile holds
    "8": Case(**FEW, unit=8, lengths=(0, 7, None, 9, 40), strides=(3, 16)),
    "16-heads": Case(**SMALL, unit=16, per_head=True, lengths=(1, 47, 79), strides=(21,)),
    "16-of-32": Case(
        **FEW, group=4, unit=16, block_size=32, lengths=(130,), softcap=2.0, reduction="max"
    ),
    "32-interleaved": Case(
        num_heads=1, head_size=24, rotary_dim=12, interleaved=True, unit=32, block_size=64,
        lengths=(65,), strides=(37,), dtype=BF16,
    ),
    "64-median": Case(
        **FEW, group=3, unit=64, block_size=64, lengths=(70, 127), strides=(5,), reduction="median",
        per_age=True, logit_scale=True,
    ),
    "16-partial": Case(
        num_heads=1, group=8, head_size=20, rotary_dim=8, unit=16, lengths=(0, 35), strides=(9,),
        dtype=FP16, softcap=1.5,
    ),
    "as-served": Case(
        num_heads=1, group=4, head_size=128, unit=16, lengths=(70, None), strides=(5,), dtype=BF16,
        splits=2,
    ),
    "16-sinks": Case(**SMALL, unit=16, sinks=True, lengths=(17, 40), strides=(18, 5)),
    "24-alibi": Case(**SMALL, unit=24, block_size=48, alibi=True, lengths=(30,), strides=(25,)),
    "3-resident": Case(
        **FEW, group=1, unit=3, block_size=48, newest_stays=False, lengths=(5, 33), strides=(7, 3)
    ),
    "page-mha": Case(**FEW, group=1, unit=16, lengths=(33,), strides=(18,), dtype=FP16),
    "as-gemma-4": Case(
        num_heads=1, group=8, head_size=512, unit=16, lengths=(19,), strides=(20,), dtype=BF16
    ),
}  # fmt: skip


CODED = [
    # every code, with scales of rows and of the layer, for each form of every kernel
    ("gqa-3", "fp8_per_token_head"), ("heads", "int8_per_token_head"), ("gqa-8", "fp8_e5m2"),
    ("size-80", "fp8"), ("size-192", "int8_per_token_head"), ("partial", "fp8_per_token_head"),
    ("size-512", "fp8_per_token_head"), ("as-gemma-4", "int8_per_token_head"),
    ("partial-interleaved", "fp8"), ("alibi", "int8_per_token_head"), ("sinks", "fp8"),
    ("everything", "fp8_per_token_head"), ("bf16", "int8_per_token_head"),
    ("plain", "int8_per_token_head"), ("odd-pages", "fp8_per_token_head"), ("as-gpt-oss", "fp8"),
    ("8", "int8_per_token_head"), ("16-heads", "fp8_per_token_head"),
    ("32-interleaved", "int8_per_token_head"), ("16-partial", "fp8_e5m2"),
    ("64-median", "fp8_per_token_head"), ("24-alibi", "fp8"), ("as-served", "fp8_per_token_head"),
]  # fmt: skip
IN_8_BITS: dict[str, Case] = {
    f"{name} {cache_dtype}": replace((ATTENTION | WINDOWS | UNITS)[name], cache_dtype=cache_dtype)
    for name, cache_dtype in CODED
}
"""Ordinary rows in 8 bits."""


RARE = (
    *("heads", "16-heads", "gqa-3", "partial", "odd-pages", "sinks", "bf16", "8"),
    *("size-512", "as-gemma-4"),
)
"""Cases of ``IN_8_BITS`` that are slow tests."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n.split()[0] in RARE)) for n in IN_8_BITS],
)
def test_rows_in_8_bits(name: str) -> None:
    """Keys and values of every head with scales of their own, or with the layer's."""
    case = IN_8_BITS[name]
    checks.check_decode(case, "cpu")
    checks.check_chunks(at_units(case), "cpu")
    if case.window is None:
        checks.check_prefill(at_units(case), "cpu")
        for scored in (True, False):
            checks.check_insert_strides(at_units(replace(case, scored=scored)), "cpu")
    if case.unit == 1:
        checks.check_insert(case, "cpu", 1)
    else:
        checks.check_insert_units(case, "cpu")
    checks.check_drafts(case, "cpu")


@pytest.mark.parametrize("name", UNITS)
def test_decode_in_units(name: str) -> None:
    checks.check_decode(UNITS[name], "cpu")


@pytest.mark.parametrize("name", UNITS)
def test_prefill_in_units(name: str) -> None:
    checks.check_prefill(at_units(UNITS[name]), "cpu")


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("name", UNITS)
def test_insert_strides_in_units(name: str, scored: bool) -> None:
    for seed in range(3):
        case = at_units(replace(UNITS[name], seed=seed, scored=scored))
        checks.check_insert_strides(case, "cpu")


@pytest.mark.parametrize("name", UNITS)
def test_chunks_in_units(name: str) -> None:
    checks.check_chunks(at_units(UNITS[name]), "cpu")


@pytest.mark.parametrize("name", UNITS)
def test_insert_in_units(name: str) -> None:
    checks.check_insert_units(UNITS[name], "cpu")
    checks.check_drafts(UNITS[name], "cpu")
    checks.check_assign(UNITS[name], "cpu")


@pytest.mark.parametrize("variant", range(NUM_RULES))
@pytest.mark.parametrize("newest_stays", [True, False])
def test_rules_come_with_a_units_last_token(newest_stays: bool, variant: int) -> None:
    lengths = (3, 43, None, 83)
    case = Case(**SMALL, unit=4, per_head=True, newest_stays=newest_stays, lengths=lengths)
    checks.check_insert_units(case, "cpu", variant)
    checks.check_drafts(case, "cpu", variant)


def test_schedule_in_units() -> None:
    checks.check_schedule("cpu", unit=16)


def test_rotation_table() -> None:
    checks.check_rotation_table("cpu")
