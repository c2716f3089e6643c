# SPDX-License-Identifier: Apache-2.0
"""Attention of strides split over keys: every part against fp64, whoever comes last."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels import checks
from tests.kernels.checks import Case
from tests.kernels.prefill_checks import StrideBatch, bits
from vllm_cascade.kernels.triton import configs
from vllm_cascade.kernels.triton.configs import WHOLE, Split, stride_split

FEW = {"head_size": 16, "num_heads": 1}
CASES: dict[str, tuple[Case, Split]] = {
    # keys: none, of the first part, of one in the middle, of the last, and more than all
    "two": (
        Case(**FEW, group=1, lengths=(0, 15, None, 40), strides=(9, 17), holes=1),
        Split(2, 16),
    ),
    "three": (Case(**FEW, group=1, lengths=(10, 25, 40, 70), strides=(5,)), Split(3, 16)),
    "holes": (Case(**FEW, lengths=(3, 1), strides=(4,), holes=45), Split(3, 16)),
    "heads": (
        Case(head_size=16, num_heads=2, group=1, per_head=True, lengths=(33, 0), strides=(18, 2)),
        Split(3, 16),
    ),
    "units": (Case(**FEW, group=1, unit=16, lengths=(0, 32, 80), strides=(9, 18)), Split(3, 32)),
    "units-heads": (
        Case(head_size=16, num_heads=2, per_head=True, unit=16, lengths=(64,), strides=(5,)),
        Split(2, 48),
    ),
    "sinks": (Case(**FEW, group=3, sinks=True, lengths=(0, 35), strides=(7,)), Split(3, 16)),
    "alibi": (Case(**FEW, alibi=True, softcap=1.5, lengths=(50,), strides=(18,)), Split(2, 32)),
    "logit-scale": (
        Case(**FEW, logit_scale=True, reduction="max", lengths=(1, 49), strides=(3,)),
        Split(3, 16),
    ),
    "bf16": (
        Case(**FEW, group=1, dtype=torch.bfloat16, lengths=(65,), strides=(66,)),
        Split(2, 64),
    ),
    "size-20": (
        Case(
            num_heads=1, head_size=20, rotary_dim=8, interleaved=True, lengths=(34,), strides=(6,)
        ),
        Split(2, 16),
    ),
}  # fmt: skip


QUICK = ("two", "holes", "units", "sinks", "bf16")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]
)
def test_in_parts(name: str) -> None:
    case, split = CASES[name]
    checks.check_split(case, "cpu", split)


ORDERS: dict[str, Callable[[int], list[int]]] = {
    "backwards": lambda n: list(range(n))[::-1],
    "shuffled": lambda n: random.Random(n).sample(range(n), n),
}


@pytest.mark.parametrize("order", ORDERS)
def test_whoever_comes_last(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in another order than that of parts give the same bytes."""
    case, split = Case(**FEW, sinks=True, lengths=(40, 12), strides=(18,)), Split(4, 16)
    batch = StrideBatch(case, "cpu")
    expected = batch.attend(split, batch.partial(split))
    builder = interpreter.interpreter_builder
    plain, begun = builder.set_grid_idx, []

    def set_grid_idx(x: int, y: int, z: int) -> None:
        begun.append(ORDERS[order](builder.grid_dim[0])[x])
        plain(begun[-1], y, z)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
    partial = batch.partial(split)
    found = batch.attend(split, partial)
    assert begun != sorted(begun) and sorted(set(begun)) == list(range(2 * 4))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert not partial.arrived.any()


def test_a_part_without_keys_is_nobodys_work() -> None:
    """What it would have left stays poison: nothing is computed for it, nothing waits."""
    case, split = Case(**FEW, lengths=(20,), strides=(5,), holes=1), Split(5, 16)
    batch = StrideBatch(case, "cpu")
    partial = batch.partial(split)
    batch.attend(split, partial)
    left = partial.marks[3:8].isfinite().all(-1).all(0).all(0)
    assert left.tolist() == [True, True, True, False, False], "two with keys, one with the stride"
    assert not partial.marks[3:8, :, 3:].isfinite().any()


def split_of(heads: int, longest: int = 256, slots: int = 2052, **options: Any) -> Split:
    return stride_split(torch.device("cpu"), torch.float16, 128, heads, longest, slots, **options)


def test_as_many_parts_as_fill_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 132 multiprocessors, with 128 queries a program and tiles of 64 keys."""
    assert split_of(8) == Split(8, 320), "Llama 70B at TP 8: 16 programs become 128"
    assert split_of(16) == Split(8, 320), "32 programs: 5 to 8 parts are two rounds"
    assert split_of(32) == Split(4, 640), "64 programs: 256 are two rounds, 192 as well"
    assert split_of(64) == WHOLE, "128 programs are a card"
    assert split_of(8, longest=1024) == Split(4, 704) and split_of(8, longest=2048) == WHOLE
    assert split_of(4) == Split(8, 320), "no more parts than have 256 keys"
    assert split_of(8, slots=511) == WHOLE and split_of(8, slots=512) == Split(2, 384)
    assert split_of(8, slots=64, least=16) == Split(2, 64), "a tile is the least part"
    # 512 own tokens are more than an eighth of all keys: the others get the cached ones
    assert split_of(4, longest=512) == Split(8, 320)
    assert split_of(1, longest=64, slots=10**6).splits == configs.MAX_SPLITS
    monkeypatch.setattr(configs, "num_sms", lambda _: 16)
    assert split_of(8) == WHOLE


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24])
@pytest.mark.parametrize("slots", [600, 1028, 2052, 4100, 32772])
def test_programs_fill_the_card_and_parts_all_slots(heads: int, slots: int) -> None:
    """At least 132 programs, unless parts would be too small; of a full cache none is idle."""
    split = split_of(heads, slots=slots)
    assert split.keys % 64 == 0 and split.keys * split.splits >= slots
    assert split.keys * (split.splits - 2) < slots, "the last but one has keys"
    enough = heads * 2 * split.splits >= 132
    fewest = split.keys <= 256 + 64  # in whole tiles
    assert enough or fewest or split.splits in (slots // 256, configs.MAX_SPLITS)
