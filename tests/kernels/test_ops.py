# SPDX-License-Identifier: Apache-2.0
"""What the launchers of decode and recall write: what they say, and nothing else."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.checks import Case, make_cache
from tests.kernels.recall_checks import Rings
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton import (
    assign,
    attend,
    combine,
    insert,
    recall,
    recall_choose,
    recall_store,
    rotate,
)

CASE = Case(head_size=16, lengths=(9, 17))


def calls(unit: int = 1) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every launcher with arguments it can run on."""
    lengths = CASE.lengths if unit == 1 else (0, unit)
    cache, steps = make_cache(replace(CASE, unit=unit, lengths=lengths))
    query = torch.randn(10, 4, 16)
    key = torch.randn(10, 2, 16)
    pages = cache.kv, cache.rank, cache.born, cache.score, cache.token
    table = cache.table
    rotation = rotate.rotation_table(CASE.inv_freq, 301, "cpu")
    decode = (query[:2], key[:2], key[:2], *pages[:3], table, steps, rotation, None, None, 0.25)
    parts, parts_lse, logits, own = attend.attend(*decode, 0.0, False, 2, True)
    lse = torch.rand(10, 4)
    rules = torch.zeros(1, 4, dtype=torch.int32)
    rings = Rings(replace(CASE, unit=unit, lengths=lengths), 6)
    for tensor in rings.tensors:
        tensor.zero_()
    both = torch.zeros(2, columns.RECALL_COLUMNS, dtype=torch.int32)
    both[1, columns.HOW], both[1, columns.RING], both[1, columns.END] = columns.JUDGED, 6, 6
    both[1, columns.NOW] = both[1, columns.STORED] = 1
    strides = steps.clone()
    strides[:, columns.START], strides[:, columns.LENGTH] = torch.tensor([0, 5]), 5
    stays = torch.zeros(2, 1, max(lengths) // unit + 5, dtype=torch.int32)
    stays[:, :, 0] = -1
    evidence, turned = torch.rand(2, 1, 6), (rotation, False)
    lines = cache.kv, cache.rank, cache.born, cache.token, table
    return {
        "judge_units": (
            recall.judge_units,
            (query, rings.codes, rings.scales, strides, both, *turned, 0.25, 6, 1, 3),
        ),
        "recall_units": (
            recall_choose.recall_units,
            (
                *(evidence, rings.rows, rings.born, rings.token, *pages, table, steps, both),
                *(torch.zeros(1, dtype=torch.int32), 3),
            ),
        ),
        "ranks_before": (recall_store.ranks_before, (cache.rank, table, steps, both, unit)),
        "store_units": (
            recall_store.store_units,
            (stays, None, key, key, *lines, strides, both, *turned, *rings.tensors, 6),
        ),
        "attend": (attend.attend, (*decode, 0.0, False, 2, True)),
        "attend without logits": (attend.attend, (*decode, 0.0, False, 4, False)),
        "merge": (combine.merge, (parts, parts_lse, steps, torch.empty(2, 4, 16))),
        "update": (
            combine.update,
            (logits, own, lse[:2], cache.rank, cache.score, table, steps, "max", unit),
        ),
        "head_masses": (
            combine.head_masses,
            (logits, own, lse[:2], cache.rank, table, steps, "max", unit),
        ),
        "update_from": (
            combine.update_from,
            (
                torch.rand(2, table.shape[1] * cache.rank.shape[2] + 1),
                *(cache.rank, cache.score, table, steps, unit),
            ),
        ),
        "assign": (
            assign.assign,
            (
                *(torch.rand(2), torch.tensor([3, 0]).int(), cache.rank, cache.score),
                *(table, steps, unit),
            ),
        ),
        "insert": (
            insert.insert,
            (key[:2], key[:2], torch.rand(2, 1), *pages, table, steps, rules, True),
        ),
    }


WRITES: dict[str, tuple[str, ...]] = {
    "merge": ("output",),
    "update": ("score",),
    "update_from": ("score",),
    "assign": ("score",),
    "insert": ("kv", "rank", "born", "score", "token"),
    "recall_units": ("kv", "rank", "born", "score", "token", "exchanged"),
    "store_units": ("rows", "codes", "scales", "stored_born", "stored_token"),
}
"""Arguments that a launcher writes, by its name."""


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("name", list(calls()))
def test_nothing_else_is_written(name: str, unit: int) -> None:
    launch, arguments = calls(unit)[name]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    launch(*arguments)
    names = list(inspect.signature(launch).parameters)
    written = {
        one
        for one, old, new in zip(names, before, arguments, strict=False)
        if isinstance(new, torch.Tensor) and not torch.equal(bits(old), bits(new))
    }
    assert written <= set(WRITES.get(name, ())), written
    assert bool(written) == (name in WRITES)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_wrong_layouts_are_caught_at_the_boundary() -> None:
    op, arguments = calls()["attend"]
    wrong = list(arguments)
    wrong[3] = arguments[3].transpose(1, 2)
    with pytest.raises(AssertionError):
        op(*wrong)
    wrong = list(arguments)
    wrong[0] = arguments[0].to(torch.float16)
    with pytest.raises(AssertionError):
        op(*wrong)
