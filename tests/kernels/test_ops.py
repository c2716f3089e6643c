# SPDX-License-Identifier: Apache-2.0
"""What the launchers of decode and recall write: what they say, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels import decode_calls, recall_calls
from tests.kernels.checks import Case, make_cache
from tests.kernels.recall_checks import Rings
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.kernels.triton import assign, scores
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.singles import Singles

CASE = Case(head_size=16, lengths=(9, 17))


def calls(unit: int = 1) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every launcher with arguments it can run on."""
    lengths = CASE.lengths if unit == 1 else (0, unit)
    cache, steps = make_cache(replace(CASE, unit=unit, lengths=lengths))
    query = torch.randn(10, 4, 16)
    key = torch.randn(10, 2, 16)
    names = "kv", "rank", "born", "score", "token"
    pages = {name: getattr(cache, name) for name in names}
    scored = {"rank": cache.rank, "score": cache.score, "table": cache.table, "steps": steps}
    rotation = rotation_table(CASE.inv_freq, 301, "cpu")
    turning = {"rotation": rotation, "interleaved": False}
    layer = CachedLayer(**pages, **turning)
    decode = {
        "query": query[:2],
        "key": key[:2],
        "value": key[:2],
        **{name: pages[name] for name in ("kv", "rank", "born")},
        "table": cache.table,
        "steps": steps,
        **turning,
        "slopes": None,
        "logit_scale": None,
        "scale": 0.25,
        "softcap": 0.0,
    }
    parts, parts_lse, logits, own = decode_calls.attend(**decode, splits=2, keep_logits=True)
    lse, num_places = torch.rand(10, 4), cache.table.shape[1] * cache.rank.shape[2]
    made = {"logits": logits, "own": own, "lse": lse[:2], "reduction": "max", "unit": unit}
    rings = Rings(replace(CASE, unit=unit, lengths=lengths), 6)
    for tensor in rings.tensors:
        tensor.zero_()
    stored = {"stored_born": rings.born, "stored_token": rings.token}
    codes = {"codes": rings.codes, "scales": rings.scales, "capacity": 6}
    both = torch.zeros(2, columns.RECALL_COLUMNS, dtype=torch.int32)
    both[1, columns.HOW], both[1, columns.RING], both[1, columns.END] = columns.JUDGED, 6, 6
    both[1, columns.NOW] = both[1, columns.STORED] = 1
    where = {"table": cache.table, "steps": steps, "recall": both}
    store = {"layer": layer, "rows": rings.rows, **stored, **codes}
    strides = steps.clone()
    strides[:, columns.START], strides[:, columns.LENGTH] = torch.tensor([0, 5]), 5
    stays = torch.zeros(2, 1, max(lengths) // unit + 5, dtype=torch.int32)
    stays[:, :, 0] = -1
    return {
        "judge_units": (
            recall_calls.judge_units,
            {
                "query": query,
                **where,
                "steps": strides,
                **codes,
                "layer": layer,
                "most_asking": 3,
            },
        ),
        "recall_units": (
            recall_calls.recall_units,
            {
                "evidence": torch.rand(2, 1, 6),
                "rows": rings.rows,
                **stored,
                "layer": layer,
                **where,
                "exchanged": torch.zeros(1, dtype=torch.int64),
                "most": 3,
            },
        ),
        "ranks_before": (recall_calls.ranks_before, {**where, **store}),
        "store_units": (
            recall_calls.store_units,
            {
                "keep": stays,
                "ranks": None,
                "key": key,
                "value": key,
                **where,
                "steps": strides,
                **store,
            },
        ),
        "attend": (decode_calls.attend, {**decode, "splits": 2, "keep_logits": True}),
        "attend without logits": (
            decode_calls.attend,
            {**decode, "splits": 4, "keep_logits": False},
        ),
        "merge": (
            decode_calls.merge,
            {
                "partial": parts,
                "partial_lse": parts_lse,
                "steps": steps,
                "output": torch.empty(2, 4, 16),
            },
        ),
        "merge_scored": (
            decode_calls.merge_scored,
            {
                **{name: made[name] for name in made if name != "lse"},
                **scored,
                "partial": parts,
                "partial_lse": parts_lse,
                "output": torch.empty(2, 4, 16),
            },
        ),
        "update": (scores.update, {**made, **scored}),
        "head_masses": (
            _head_masses,
            {
                **{name: made[name] for name in ("logits", "own", "lse")},
                **{name: scored[name] for name in ("rank", "table", "steps")},
                "masses": torch.zeros(2, num_places + 1),
                "unit": unit,
            },
        ),
        "mass_scores": (
            _mass_scores,
            {
                **scored,
                "masses": torch.rand(2, num_places + 1),
                "new_score": torch.zeros(2, 1),
                "unit": unit,
            },
        ),
        "assign": (
            _assign,
            {
                "given": torch.rand(2),
                "ranks": torch.tensor([3, 0]).int(),
                **scored,
                "unit": unit,
            },
        ),
        "insert": (
            decode_calls.insert,
            {
                "key": key[:2],
                "value": key[:2],
                "new_score": torch.rand(2, 1),
                **pages,
                "table": cache.table,
                "steps": steps,
                "rules": torch.zeros(1, 4, dtype=torch.int32),
                "has_cells": True,
            },
        ),
    }


def _assign(rank: torch.Tensor, score: torch.Tensor, unit: int, **step: torch.Tensor) -> None:
    assign.Assignment(rank, score, unit)(**step)


def _head_masses(rank: torch.Tensor, unit: int, **step: torch.Tensor) -> None:
    scores.HeadMasses(rank, 4, "max", unit)(Singles(**step))


def _mass_scores(rank: torch.Tensor, score: torch.Tensor, unit: int, **step: torch.Tensor) -> None:
    scores.MassScores(rank, score, unit)(Singles(**step))


WRITES: dict[str, tuple[str, ...]] = {
    "merge": ("output",),
    "merge_scored": ("output", "score"),
    "update": ("score",),
    "head_masses": ("masses",),
    "mass_scores": ("score", "new_score"),
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
    every = {**arguments, **vars(arguments.get("layer", object))}
    tensors = {one: a for one, a in every.items() if isinstance(a, torch.Tensor)}
    before = {one: tensor.clone() for one, tensor in tensors.items()}
    launch(**arguments)
    written = {one for one, new in tensors.items() if not torch.equal(bits(before[one]), bits(new))}
    assert written <= set(WRITES.get(name, ())), written
    assert bool(written) == (name in WRITES)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_wrong_layouts_are_caught_at_the_boundary() -> None:
    op, arguments = calls()["attend"]
    with pytest.raises(AssertionError):
        op(**{**arguments, "kv": arguments["kv"].transpose(1, 2)})
    with pytest.raises(AssertionError):
        op(**{**arguments, "query": arguments["query"].to(torch.float16)})
