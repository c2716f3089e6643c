# SPDX-License-Identifier: Apache-2.0
"""No kernel has a race, and no barrier can go without being missed (``races.py``).

Of one program and the same element of the same shape, a load before a store needs no barrier where
no thread but the store's uses what it loads. Where there are fewer elements than threads, others
load it, too: ``REPLICAS`` are the functions in which these keep nothing of it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import checks, recall_checks
from tests.kernels import test_kernels as kernels
from tests.kernels import test_recall as recall
from tests.kernels.checks import Case
from tests.kernels.races import Detector, Launch, barriers, summary
from tests.kernels.stride_checks import check_insert_strides
from tests.kernels.test_split import CASES as SPLITS

REPLICAS = {"_assign", "score_tile", "_choose", "_bring", "_remember", "_list_gone"}
SHORT = {name: case for name, case in kernels.INSERTION.items() if name != "long"}
RULES = Case(**kernels.SMALL, unit=4, per_head=True, lengths=(3, 43, None, 83))
Check = Callable[[], object]


def on_cpu(check: Callable[..., object], *cases: Case, **options: object) -> list[Check]:
    return [partial(check, case, "cpu", **options) for case in cases]


def at_units(cases: dict[str, Case]) -> list[Case]:
    return [kernels.at_units(case) for case in cases.values()]


ATTENTION, WINDOWS, UNITS = kernels.ATTENTION, kernels.WINDOWS, kernels.UNITS
STORED = [
    replace(kernels.LATENT[name], cache_dtype=cache_dtype) for name, cache_dtype in kernels.STORED
]
"""Latent rows in 8 bits."""
CODED = list(kernels.IN_8_BITS.values())
WITHOUT_WINDOWS = [kernels.at_units(case) for case in CODED if case.window is None]
"""Other rows in 8 bits."""
EVICTED = list(recall.CASES.values())
GROUPS: dict[str, list[Check]] = {
    "decode": on_cpu(checks.check_decode, *ATTENTION.values(), *WINDOWS.values(), *UNITS.values()),
    "prefill": on_cpu(checks.check_prefill, *ATTENTION.values(), *at_units(UNITS)),
    "chunks": on_cpu(
        checks.check_chunks,
        *(*ATTENTION.values(), *WINDOWS.values(), *kernels.CHUNKS.values(), *at_units(UNITS)),
    ),
    "insert": [
        partial(checks.check_insert, case, "cpu", v)
        for case in SHORT.values()
        for v in range(checks.NUM_RULES)
    ],
    "insert-units": [
        *on_cpu(checks.check_insert_units, *UNITS.values()),
        *(partial(checks.check_insert_units, RULES, "cpu", v) for v in range(checks.NUM_RULES)),
    ],
    "drafts": [
        *(partial(checks.check_drafts, SHORT[name], "cpu", v) for name in SHORT for v in (4, 10)),
        *on_cpu(checks.check_drafts, *UNITS.values()),
    ],
    "assign": on_cpu(checks.check_assign, *kernels.INSERTION.values(), *UNITS.values()),
    "insert_strides": on_cpu(
        check_insert_strides,
        *(
            replace(case, seed=n, scored=s)
            for case in SHORT.values()
            for n in (0, 1)
            for s in (1, 0)
        ),
        *at_units(UNITS),
    ),
    "split": [partial(checks.check_split, case, "cpu", split) for case, split in SPLITS.values()],
    "schedule": [
        *(partial(checks.check_schedule, "cpu", seed) for seed in range(3)),
        partial(checks.check_schedule, "cpu", unit=16),
    ],
    "judge": on_cpu(recall_checks.check_judge, *EVICTED),
    "recall": on_cpu(recall_checks.check_recall, *EVICTED),
    "store-tokens": on_cpu(recall_checks.check_store_tokens, *EVICTED),
    "store-strides": on_cpu(recall_checks.check_store_strides, *at_units(recall.CASES)),
    "stored": [
        *on_cpu(checks.check_decode, *STORED),
        *on_cpu(checks.check_prefill, *map(kernels.at_units, STORED)),
        *on_cpu(checks.check_chunks, *map(kernels.at_units, STORED)),
        *on_cpu(check_insert_strides, *map(kernels.at_units, STORED)),
        *on_cpu(checks.check_insert, *(case for case in STORED if case.unit == 1)),
        *on_cpu(checks.check_insert_units, *(case for case in STORED if case.unit > 1)),
    ],
    "coded": [
        *on_cpu(checks.check_decode, *CODED),
        *on_cpu(checks.check_prefill, *WITHOUT_WINDOWS),
        *on_cpu(checks.check_chunks, *map(kernels.at_units, CODED)),
        *on_cpu(check_insert_strides, *WITHOUT_WINDOWS),
        *on_cpu(checks.check_insert, *(case for case in CODED if case.unit == 1)),
        *on_cpu(checks.check_insert_units, *(case for case in CODED if case.unit > 1)),
        *on_cpu(checks.check_drafts, *CODED),
    ],
    "copy": [partial(recall.test_a_ring_in_chunks, number, 5) for number in (1, 10, 12)],
    "recall-strides": on_cpu(check_insert_strides, *at_units(recall.CASES), recalls=True),
}
QUICK = {"decode": 2, "chunks": 1, "insert": 4, "drafts": 2, "insert-units": 1,
         "insert_strides": 1, "split": 1, "recall": 1, "store-tokens": 1, "stored": 1,
         "coded": 1}  # fmt: skip
"""Checks of a group in every run."""


@contextmanager
def detected(orders: int = 2, without: str = "") -> Iterator[Detector]:
    detector = Detector(orders=orders, without=without)
    with detector():
        yield detector
    assert detector.launches


def conflicts(launch: Launch) -> list[object]:
    """What is not harmless."""
    found: list[object] = [*launch.cross, *launch.orders_differ, *launch.duplicate]
    for hazard, how, before, after in launch.within:
        owner = after[0].split(":")[1]
        own = hazard == "WAR" and how.startswith("same element")
        if not own or ("replicated" in how and "one warp" not in how and owner not in REPLICAS):
            found.append((hazard, how, before, after))
    return found


@pytest.mark.parametrize("group", QUICK)
def test_no_races(group: str) -> None:
    check_group(GROUPS[group][: QUICK[group]])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_no_races_in_any_check(group: str) -> None:
    check_group(GROUPS[group])


def check_group(group: list[Check]) -> None:
    with detected() as detector:
        for check in group:
            check()
    names = {launch.kernel for launch in detector.launches}
    print(f"{len(detector.launches)} launches of {len(names)} kernels")
    for launch in detector.launches:
        assert not conflicts(launch), summary([launch])


OF_OTHER_GROUPS = {"_unit_of:0": "insert-units", "_insert:1": "drafts"}
OTHERS = {
    "choose": "insert_strides", "keep": "insert_strides", "insert_stride": "insert_strides",
    "insert": "insert", "drafts": "drafts", "split": "split",
    "chunk_write": "chunks",
    "recall_choose": "recall", "recall_store": "store-tokens",
}  # fmt: skip
"""A group of checks that runs a file's barriers."""


def missed(barrier: str) -> Counter[object]:
    """What is found without a barrier, until something is."""
    file = barriers()[barrier].split(".")[0]
    group = GROUPS[OF_OTHER_GROUPS.get(barrier, OTHERS[file])]
    found: Counter[object] = Counter()
    for check in group[:40]:
        with detected(orders=0, without=barrier) as detector:
            check()
        found.update(x for launch in detector.launches for x in conflicts(launch))
        if found:
            break
    return found


@pytest.mark.parametrize(
    "barrier",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("_insert:0", "leave_part:0")))
     for n in barriers()],
)  # fmt: skip
def test_a_missing_barrier_is_noticed(barrier: str) -> None:
    found = missed(barrier)
    print(f"without {barrier}: {found.total()} conflicts")
    assert found


# --- the detector itself --------------------------------------------------------------------------


@triton.jit
def _neighbours(x, out, N: tl.constexpr, WAITS: tl.constexpr):
    """Other elements of the same program."""
    i = tl.arange(0, N)
    tl.store(x + i, i)
    if WAITS:
        tl.debug_barrier()
    tl.store(out + i, tl.load(x + (i + 1) % N))


@triton.jit
def _others(x, n):
    """Programs read what others write."""
    p = tl.program_id(0)
    tl.store(x + p, tl.load(x + (p + 1) % n) + 1)


@triton.jit
def _last_one(x, count, out, n, WAITS: tl.constexpr):
    p = tl.program_id(0)
    tl.store(x + p, p)
    if WAITS:
        tl.debug_barrier()
    if tl.atomic_add(count, 1) == n - 1:
        total = tl.full([], 0, tl.int32)
        for q in range(n):
            total += tl.load(x + q)
        tl.store(out, total)


@triton.jit
def _twice(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i // 2, i)


def launch_of(kernel: object, programs: int, *arguments: object, **options: object) -> Launch:
    detector = Detector(folder="tests/kernels/test_races")
    with detector():
        kernel[(programs,)](*arguments, **options)
    (launch,) = detector.launches
    assert launch.accesses > 0 and np.prod(launch.grid) == programs
    return launch


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_a_conflict(waits: bool) -> None:
    found = launch_of(_neighbours, 1, zeros(256), zeros(256), N=256, WAITS=waits)
    assert not found.cross and bool(conflicts(found)) is not waits
    found = launch_of(_last_one, 8, zeros(8), zeros(1), zeros(1), 8, WAITS=waits)
    assert not found.orders_differ and bool(found.cross) is not waits


def test_other_conflicts() -> None:
    found = launch_of(_others, 8, zeros(8), 8)
    assert found.cross and found.orders_differ
    assert launch_of(_twice, 1, zeros(8), N=16).duplicate
