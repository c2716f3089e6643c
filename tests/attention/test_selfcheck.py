# SPDX-License-Identifier: Apache-2.0
"""The check on the user's own device: right kernels pass it, and every broken one is named.

Kernels run in Triton's interpreter. A mutant is one piece of a kernel's source that is replaced.
"""

import errno
import inspect
import json
import linecache
import os
import resource
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from transformers import GPTNeoXConfig

from vllm_cascade.attention import selfcheck
from vllm_cascade.attention.cpu.backend import CPUKVPolicyBackend
from vllm_cascade.attention.cuda import SWITCH, ranks
from vllm_cascade.attention.cuda.backend import CUDAKVPolicyBackend
from vllm_cascade.attention.selfcheck import Check, Mismatch
from vllm_cascade.attention.selfcheck_kept import num_differing, same_units
from vllm_cascade.attention.selfcheck_layer import LayerShape
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.attention.torch import strides
from vllm_cascade.engine import certify, devices
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.kernels.triton import (
    assign,
    attend,
    attend_tiles,
    attend_units,
    choose,
    chunk,
    chunk_write,
    column_sums,
    configs,
    drafts,
    gather,
    insert,
    insert_stride,
    merge,
    prefill,
    recall,
    recall_choose,
    recall_sinks,
    recall_store,
    recall_vectors,
    repeat,
    schedule,
    scores,
    stored,
    tiles,
)
from vllm_cascade.kernels.triton.repeat import Repeater
from vllm_cascade.policies.registry import POLICIES as BUILT_IN
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError

CPU = torch.device("cpu")
SHAPE = LayerShape(num_heads=2, num_kv_heads=1, head_size=8, dtype=torch.float32)
POLICIES: dict[str, dict[str, Any]] = {
    "cascade": {"name": "cascade", "budget": 16, "num_subcaches": 2, "num_sinks": 2,
                "prefill_stride": 8},
    "h2o": {"name": "h2o", "budget": 12, "num_sinks": 2, "prefill_stride": 8},
    "sink": {"name": "sink", "budget": 12, "num_sinks": 2, "prefill_stride": 8},
    "units": {"name": "cascade", "num_subcaches": 2, "budget": 32, "num_sinks": 16,
              "prefill_stride": 16, "unit": 16},
    "log-n": {"name": "beehive", "budget": 24, "window": 8, "stride": 3, "threshold": 12,
              "num_sinks": 2, "prefill_stride": 8, "log_n": True},
    "dgc": {"name": "dgc", "budget": 16, "global_size": 6, "num_sinks": 2, "prefill_stride": 8},
    "recall": {"name": "h2o", "budget": 16, "num_sinks": 4, "prefill_stride": 8, "unit": 4,
               "recall": 2, "recall_store": 24, "recall_every": 3, "recall_queries": 3},
}  # fmt: skip
WINDOWED = LayerShape(num_heads=2, num_kv_heads=1, head_size=8, dtype=torch.float32, window=7)
CHUNKED = replace(WINDOWED, chunked=True)
LATENT = LayerShape(
    num_heads=3, num_kv_heads=1, head_size=24, dtype=torch.float32, is_neox=False, latent=16
)
STORED = {
    f"latent-{cache_dtype}": replace(LATENT, cache_dtype=cache_dtype)
    for cache_dtype in ("int8_per_token_head", "fp8", "fp8_e5m2")
}
NEIGHBOURS = replace(SHAPE, is_neox=False)
UNROTATED = replace(SHAPE, rotary_dim=0)
LONG = replace(SHAPE, num_heads=8, head_size=512)
CODED = replace(SHAPE, num_heads=4, num_kv_heads=2, cache_dtype="int8_per_token_head")
OTHER_SHAPES = {
    "window": ("sink", WINDOWED),
    "chunks": ("sink", CHUNKED),
    "chunks-units": ("units", replace(CHUNKED, window=12)),
    "latent": ("cascade", LATENT),
    "latent-sink": ("sink", LATENT),
    "latent-recall": ("recall", LATENT),
    "stored": ("cascade", STORED["latent-int8_per_token_head"]),
    "stored-sink": ("sink", STORED["latent-fp8"]),
    "stored-units": ("units", STORED["latent-fp8_e5m2"]),
    "stored-recall": ("recall", STORED["latent-int8_per_token_head"]),
    "coded": ("cascade", CODED),
    "coded-sink": ("sink", replace(CODED, cache_dtype="fp8")),
    "coded-window": ("sink", replace(CODED, cache_dtype="fp8_per_token_head", window=7)),
    "coded-chunks": ("cascade", replace(CODED, window=9, chunked=True)),
    "coded-units": ("units", CODED),
    "coded-recall": ("recall", replace(CODED, cache_dtype="fp8_per_token_head")),
    "long": ("cascade", LONG),
    "long-units": ("units", LONG),
    "long-recall": ("recall", LONG),
    "neighbours": ("cascade", NEIGHBOURS),
    "neighbours-sink": ("sink", NEIGHBOURS),
    "neighbours-units": ("units", NEIGHBOURS),
    "neighbours-recall": ("recall", NEIGHBOURS),
    "unrotated": ("cascade", UNROTATED),
    "unrotated-recall": ("recall", UNROTATED),
}
"""``window``: a layer with one, and ``chunks``: one whose queries see their own chunk, beside those
that run ``sink``. ``stored``: latent rows in 8 bits; ``coded``: other rows in 8 bits.
``long``: heads as Gemma 4's. ``neighbours``: channels ``2i`` and ``2i + 1`` rotate together."""


PARTS = {"name": "h2o", "budget": 28, "num_sinks": 2, "prefill_stride": 8}
"""Its cache has two parts where a part may have 16 slots."""


def check(name: str, backend: Any = CUDAKVPolicyBackend, drafts: int = 0) -> list[Any]:
    policy, shape = OTHER_SHAPES.get(name, (name, SHAPE))
    settings = PARTS if policy == "parts" else POLICIES[policy]
    return Check(resolve(settings), shape, backend, CPU, 2, drafts).run()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "sink")) for n in (*POLICIES, *OTHER_SHAPES)],
)
def test_right_kernels_pass(name: str) -> None:
    rows = check(name)
    compared = {row.compared for row in rows}
    assert name.endswith("recall") == ("stored units" in compared) == ("evidence" in compared)
    assert {"decode", "mixed", "prompt"} == {row.what for row in rows}
    assert {"positions", "output", "kept tokens", "rows"} <= {row.compared for row in rows}
    assert 0 < max(row.error for row in rows) < 1e-5


@pytest.mark.slow
def test_the_reference_judges_as_many_units_as_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have no candidates; the CPU's library has, and so has its reference."""
    monkeypatch.setattr(evidence, "CANDIDATES", 2)
    monkeypatch.setattr(evidence, "JUDGING", 1)
    assert check("recall")
    sides = [
        Check(resolve(POLICIES["recall"]), SHAPE, backend, CPU, 1)
        for backend in (CUDAKVPolicyBackend, CPUKVPolicyBackend)
    ]
    assert [one.plain.impl.recall.judges_all for one in sides] == [True, False]


def test_evidence_of_right_kernels_passes() -> None:
    """It is compared after attention has taken its memory; and before a part of it is handed on,
    which happens here: every unit continues the one before."""
    one = Check(resolve(POLICIES["recall"] | {"name": "sink"}), SHAPE, CUDAKVPolicyBackend, CPU, 1)
    rows = (row for step in one.steps() for row in one._compare(step))
    judged = (row for row in rows if row.compared == "evidence")
    errors = [row.error for row in judged]
    assert len(errors) > 4 and 0 < max(errors) < 1e-5


@pytest.mark.parametrize("name", ["sink", pytest.param("recall", marks=pytest.mark.slow)])
def test_repeated_launches_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later runs of a step repeat the first one's launches, as later layers do."""
    runs, before = 4, Repeater.number
    one = Check(resolve(POLICIES[name]), SHAPE, CUDAKVPolicyBackend, CPU, runs)
    first = list(one._compare(next(one.steps())))
    assert Repeater.number > before and not any(row.failure for row in first)
    plain = repeat._interpret

    def forgets(launchers: Any, launches: Any, tokens: Any) -> None:
        plain(launchers[:-1], SimpleNamespace(launched=launches.launched[:-1]), tokens)

    monkeypatch.setattr(repeat, "_interpret", forgets)
    with pytest.raises(Mismatch, match=f"bytes of another run differ .*{SWITCH}=python avoids"):
        Check(resolve(POLICIES[name]), SHAPE, CUDAKVPolicyBackend, CPU, runs).run()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POLICIES, *OTHER_SHAPES])
def test_right_kernels_pass_with_drafts(name: str) -> None:
    rows = check(name, drafts=3)
    compared = {row.compared for row in rows if row.what == "drafts"}
    assert {"output", "kept tokens", "tokens without drafts", "rows without drafts"} <= compared
    assert 0 < max(row.error for row in rows) < 1e-5


@pytest.mark.parametrize("name", [*POLICIES, *OTHER_SHAPES])
def test_the_cpus_library_passes_with_drafts(name: str) -> None:
    assert check(name, CPUKVPolicyBackend, drafts=3)


@pytest.mark.parametrize("name", [*POLICIES, *OTHER_SHAPES])
def test_the_cpus_library_passes(name: str) -> None:
    assert check(name, CPUKVPolicyBackend)


@pytest.mark.parametrize("name", ["sink", "lazy"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_scores_that_nothing_reads_may_differ(name: str, drafts: int) -> None:
    """C++ does not write them, and the pools start as NaN."""
    settings = {**POLICIES["recall"], "name": name}
    one = Check(resolve(settings), SHAPE, CPUKVPolicyBackend, CPU, 1, drafts)
    assert "scores" not in {row.compared for row in one.run()}


LONG = {"name": "h2o", "budget": 256, "num_sinks": 4, "prefill_stride": 64}
"""Hundreds of tokens' scores are compared in a prompt."""


def test_scores_that_rounding_may_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right device may keep the other of two tokens whose scores are almost equal.

    The reference's scores are off by up to 0.8 %.
    """
    exact = strides._new_scores

    def rounded(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = exact(*args, **kwargs)
        return found * (1 + 8e-3 * torch.arange(found.shape[-1]).sin())

    monkeypatch.setattr(strides, "_new_scores", rounded)
    shape = LayerShape(num_heads=2, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    check = Check(resolve(LONG), shape, CPUKVPolicyBackend, CPU, 2)
    assert check.run() and check.close_calls > 0
    monkeypatch.setitem(selfcheck.CLOSE_SCORES, torch.bfloat16, 0.0)
    with pytest.raises(Mismatch, match="kept tokens differ in a prompt step"):
        Check(resolve(LONG), shape, CPUKVPolicyBackend, CPU, 2).run()


def units_of(tokens: list[int], scores: list[float]) -> dict[str, torch.Tensor]:
    """Kept units of one token each. The same token has the same row on both sides."""
    numbers = torch.tensor(tokens)
    rows = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))[numbers]
    words = {"rank": torch.arange(len(tokens)), "born": numbers + 5}
    return words | {"compared": torch.tensor(scores), "kv": rows[None, :, None]}


@pytest.mark.parametrize(
    ("tokens", "scores", "num"),
    [
        ([1, 2, 3, 7], [0.5, 0.4, 0.30003, 0.2], 1),  # 3 instead of 4
        ([1, 2, 3, 7], [0.5, 0.4, 0.31, 0.2], None),  # which has another score
        ([1, 2, 9, 7], [0.5, 0.4, 0.3, 0.2], None),  # a token that was never there
        ([2, 1, 3, 7], [0.5, 0.4, 0.3, 0.2], None),  # in another order
        ([1, 3, 5, 7], [0.5, 0.4, 0.3, 0.2], None),  # too many others
        ([1, 2, 4, 7], [0.5, 0.4, 0.3, 0.2], 0),
    ],
)
def test_kept_units(tokens: list[int], scores: list[float], num: int | None) -> None:
    theirs = units_of([1, 2, 4, 7], [0.5, 0.4, 0.3, 0.2])
    offered = units_of(list(range(8)), [0.0] * 8)["kv"][0, :, 0, -3:]
    found = same_units(units_of(tokens, scores), theirs, 3, lambda: offered, 1e-3, 1e-6)
    assert (found and found.num) == num
    if num is None:
        assert num_differing(units_of(tokens, scores), theirs, 3) == (2 if tokens[2] == 5 else 1)
    if num:
        assert found is not None and found.ours["born"].tolist() == [6, 7, 12]


def test_kept_units_have_their_own_places() -> None:
    """A close call does not hide that another unit's key was rotated elsewhere."""
    theirs = units_of([1, 2, 4, 7], [0.5, 0.4, 0.3, 0.2])
    ours = units_of([1, 2, 3, 7], [0.5, 0.4, 0.3, 0.2])
    ours["born"][0] += 1
    offered = units_of(list(range(8)), [0.0] * 8)["kv"][0, :, 0, -3:]
    assert same_units(ours, theirs, 3, lambda: offered, 1e-3, 1e-6) is None


MUTANTS: list[tuple[str, ModuleType, str, str, str]] = [
    # a policy, a kernel's file and function, what is replaced, and by what
    ("sink", schedule, "_schedule", "out + CACHED, cached", "out + CACHED, cached + 1"),
    ("sink", schedule, "_schedule", "positions + row, cached", "positions + row, 0 * cached"),
    ("sink", schedule, "_table_row", "t < transient, t,", "t < transient, t // 2,"),
    ("sink", attend, "_attend", "valid = unit_rank >= 0", "valid = unit_rank > 0"),
    (
        "sink",
        attend,
        "_attend",
        "distance = unit_born - unit_rank * UNIT",
        "distance = 0 * unit_born",
    ),
    ("sink", attend, "_attend", "total * fade + tl.sum", "total + tl.sum"),
    ("parts", merge, "_merge_head", "merged / total", "merged"),
    ("h2o", scores, "score_tile", "weight * mass, mask", "0.5 * mass, mask"),
    ("h2o", merge, "_norm", "top + tl.log(", "1 + tl.log("),
    ("h2o", scores, "_own_mass", "- norm", "- 0 * norm"),
    ("h2o", insert, "_insert", "hi = lo + 1\n", "hi = lo + 2\n"),
    ("sink", insert, "_insert", "place - evicts, place)", "place, place)"),
    ("sink", insert, "_insert", "rank + word, own,", "rank + word, own - 1,"),
    ("sink", insert, "_insert", "born + word, written_at", "born + word, written_at + 1"),
    ("h2o", insert, "_insert", "score + word, mine", "score + word, 2 * mine"),
    ("sink", chunk, "_from_chunk", "written_at - rank_now - shift", "0 * written_at"),
    ("sink", chunk, "_from_pages", "at >= kept + dropped", "at > kept + dropped"),
    ("sink", chunk_write, "_after", "index, index - gone)", "index, index)"),
    (
        "cascade",
        prefill,
        "_attend_strides",
        "logits, position, cached + place",
        "logits, position, place",
    ),
    ("cascade", prefill, "_attend_strides", "end_key, first_query + 1", "end_key + TILE, length"),
    ("cascade", prefill, "in_base_2", "scale * LOG2_E", "scale"),
    ("cascade", gather, "_gather_strides", "unit, bits,", "unit, 0 * bits,"),
    (
        "cascade",
        gather,
        "_gather_strides",
        "distance=distance",
        "distance=0 * distance",
    ),
    ("cascade", prefill, "_attend_strides", "norm = (top + ", "norm = (top - "),
    ("cascade", column_sums, "_column_sums", "is_old, 0, first //", "is_old, QUERIES, first //"),
    ("cascade", column_sums, "_column_sums", "length - 1 - index", "index"),
    ("cascade", column_sums, "_column_sums", "is_old, 0, first + TILE", "is_old, 0, first"),
    ("cascade", choose, "score_columns", "fade * result", "result"),
    ("h2o", choose, "without_lowest", "ordered(tl.load(", "ordered(-tl.load("),
    (
        "cascade",
        insert_stride,
        "_place",
        "score + word, value",
        "score + word, 2 * value",
    ),
    ("units", attend_units, "_attend_units", "total * fade + mass", "total + mass"),
    ("dgc", assign, "_assign", "== wanted", "== wanted + 1"),
    ("dgc", assign, "_assign", "score + word, given_there", "score + word, -given_there"),
    ("units", tiles, "page_tile", "unit, 0) * UNIT", "unit, 0)"),
    ("window", attend, "_attend", "positions, tl.load(steps", "positions, 0 * tl.load(steps"),
    (
        "window",
        insert,
        "_insert",
        "written_at = tl.load(positions",
        "written_at = 1 + tl.load(positions",
    ),
    ("window", chunk, "_from_pages", "moved - shift", "moved + shift"),
    ("chunks", prefill, "first_seen", "position % window", "position % (window + 1)"),
    ("window", chunk, "_gather_chunks", "hidden + 1 + gone", "hidden + 3 + gone"),
    (
        "window",
        chunk_write,
        "_write_words",
        "tl.load(positions + at, mask",
        "1 + tl.load(positions + at, mask",
    ),
    (
        "recall",
        recall_vectors,
        "ask",
        "+ tl.load(columns + NOW) // 2",
        "+ 3 * tl.load(columns + NOW)",
    ),
    ("recall", recall_vectors, "ask", "x * levels", "0.5 * x * levels"),
    ("recall", recall_sinks, "attend_sinks", "top + tl.log2(", "4.0 + top + tl.log2("),
    ("recall", recall_sinks, "attend_sinks", "slot < num_keys", "slot < num_keys // 2"),
    (
        "recall",
        recall_vectors,
        "ask",
        "attend_sinks(\n        source,",
        "attend_sinks(\n        source - head * HEAD,",
    ),
    (
        "recall",
        recall,
        "_judge",
        "to(tl.float32) * step[None, :]",
        "to(tl.float32) + 0 * step[None, :]",
    ),
    ("recall", recall, "_judge", "(oldest + first) % CAPACITY", "first % CAPACITY"),
    ("recall", recall, "_weigh", "tl.exp2(value - top[:, None])", "tl.exp2(value)"),
    ("recall", recall_choose, "_largest", "(value + 0.0).to(", "(1.0 / (1.0 + value)).to("),
    ("recall", recall_choose, "_choose", "theirs) < begins)", "theirs) > begins)"),
    (
        "recall",
        recall_choose,
        "_choose",
        "tl.load(stored_born + source",
        "4 + tl.load(stored_born + source",
    ),
    ("recall", recall_choose, "_choose", "sinks + nth, left", "sinks + (now - 1 - nth), left"),
    (
        "recall",
        recall_choose,
        "_bring",
        "tl.load(chosen + mine) % CAPACITY",
        "(1 + tl.load(chosen + mine)) % CAPACITY",
    ),
    ("recall", recall_store, "_list_gone", "sources + nth, place,", "sources + nth, place ^ 1,"),
    (
        "recall",
        recall_store,
        "_store_units",
        "(end + nth) % CAPACITY",
        "(end + nth + 1) % CAPACITY",
    ),
    (
        "recall",
        recall_store,
        "_store_units",
        "written = tl.load(born + word)",
        "written = 1 + tl.load(born + word)",
    ),
    (
        "recall",
        recall_store,
        "_store_plain",
        "tl.div_rn(most, LEVELS)",
        "tl.div_rn(most, 2 * LEVELS)",
    ),
]


DRAFTING: list[tuple[str, str, str, str]] = [
    ("h2o", "_save_versions", "place % MOST", "0 * place"),
    ("h2o", "_save_versions", "tl.load(score + word", "tl.load(rank + word"),
    ("cascade", "save_slot", "note, slot)", "note, slot * 0)"),
    ("cascade", "save_slot", "tl.load(born + word)", "1 + tl.load(born + word)"),
    ("cascade", "save_slot", "own, ROW, HEADS, ROW,", "own, ROW, HEADS, ROW // 2,"),
    ("cascade", "_undo", "range(num)", "range(num - 1)"),
    ("sink", "_undo", "tl.store(rank + word,", "tl.store(versions + word,"),
]
"""The same of the kernels for drafts, which are in one file."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DRAFTING)))
def test_a_broken_kernel_of_drafts_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, *replaced = DRAFTING[number]
    broken(drafts, *replaced, monkeypatch)
    with pytest.raises(Mismatch, match=r"without drafts differ .*(save_versions|insert) or undo"):
        check(policy, drafts=3)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_broken_kernel_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, module, function, old, new = MUTANTS[number]
    if policy == "parts":
        monkeypatch.setattr(configs, "LEAST_SLOTS", 16)
    broken(module, function, old, new, monkeypatch)
    file = module.__name__.rpartition(".")[2]
    with pytest.raises(Mismatch) as raised:
        check(policy)
    message = str(raised.value)
    assert any(kernel in message for kernel in NAMED.get(file, (file,))), message
    assert "2/1 heads of 8, float32" in message and "error" in message
    assert (policy == "window") == ("window of 7" in message)
    assert (policy == "chunks") == ("chunks of 7" in message)


OF_SHAPES: list[tuple[str, ModuleType, str, str, str]] = [
    ("coded", stored, "scale_place", "head * (2 * SLOTS)", "head * SLOTS"),
    ("coded", stored, "scale_of_word", "head * (2 * PAGE)", "head * PAGE"),
    ("coded", stored, "write_codes", "place + APART, value_scale", "place + APART, scale"),
    ("coded-sink", chunk, "_from_chunk", "scales + 1", "scales"),
    ("coded-units", attend_units, "_attend_units", "factor_of(key_scale", "factor_of(value_scale"),
    ("coded-recall", recall_store, "_store_rows", "row_scales + 1, second", "row_scales, second"),
    ("neighbours", attend_tiles, "turned_products", "2 * FROM, 2 * TO, 2", "FROM, TO + WIDTH, 2"),
    ("neighbours-sink", stored, "load_turned", "pair = channel // 2", "pair = channel % HALF"),
    ("neighbours-units", tiles, "pair_channels", "2 * index, 2 * index + 1", "index, index + HALF"),
    ("neighbours-recall", tiles, "pair_channels", "2 * index + 1", "(2 * index + 3) % (2 * HALF)"),
]
"""The same of rows in 8 bits, whose head and scales kernels may mix up, and of channels that rotate
together with their neighbours."""
LABELS = {
    "coded": r"4/2 heads of 8, float32, \w+ cache; .* kernels: ",
    "neighbours": "2/1 heads of 8, float32, neighbours rotated; .* kernels: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OF_SHAPES)))
def test_a_kernel_that_is_broken_for_some_shapes_is_noticed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, *replaced = OF_SHAPES[number]
    broken(*replaced, monkeypatch)
    with pytest.raises(Mismatch, match=LABELS[policy.partition("-")[0]]):
        check(policy)


def of_ranks(num_ranks: int, reduction: str = "mean", policy: str = "h2o") -> list[Any]:
    """The check on one of so many tensor-parallel ranks."""
    settings = {**POLICIES[policy], "head_reduction": reduction}
    check = Check(resolve(settings), SHAPE, CUDAKVPolicyBackend, CPU, 2, num_ranks=num_ranks)
    return check.run()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "max", "median"])
@pytest.mark.parametrize("policy", ["h2o", "units", "recall"])
def test_right_kernels_of_ranks_pass(policy: str, reduction: str) -> None:
    rows = of_ranks(3, reduction, policy)
    assert {"scores", "output", "kept tokens"} <= {row.compared for row in rows}
    assert 0 < max(row.error for row in rows) < 1e-5


OF_RANKS: list[tuple[str, str, str, str]] = [
    # a reduction, a function in scores.py, what is replaced, and by what
    ("mean", "score_tile", "tl.where(valid, mass, 0.0)", "tl.where(valid, 0.5 * mass, 0.0)"),
    ("mean", "score_tile", "mass = tl.load(masses + slot", "mass = 2 * tl.load(masses + slot"),
    ("max", "score_tile", "mine = tl.load(masses", "mine = 2 * tl.load(masses"),
    ("median", "_update", "norm = tl.load(lse", "norm = 1 + tl.load(lse"),
]
"""Kernels before and after an exchange between ranks, and the one that gets the heads of all."""


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow) for n in range(len(OF_RANKS))]
)
def test_a_broken_kernel_of_ranks_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without tensor parallelism does not run it."""
    reduction, *replaced = OF_RANKS[number]
    broken(scores, *replaced, monkeypatch)
    if number == 0:
        assert of_ranks(1, reduction), "not noticed on one rank"
    with pytest.raises(Mismatch, match=r"; 2 tensor-parallel ranks\).* kernels: .*update"):
        of_ranks(2, reduction)


@pytest.mark.parametrize(
    ("reduction", "exchange"),
    [
        ("mean", "_mean"),
        pytest.param("max", "_max", marks=pytest.mark.slow),
        pytest.param("median", "_gathered", marks=pytest.mark.slow),
    ],
)
def test_wrong_sums_of_ranks_are_noticed(
    reduction: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(ranks, exchange)
    monkeypatch.setattr(ranks, exchange, lambda reach, sums: 2 * right(reach, sums))
    with pytest.raises(Mismatch, match=r"a prompt step .* kernels: .*column_sums"):
        of_ranks(2, reduction)


NAMED = {
    "merge": ("merge", "merge_scored"),
    "scores": ("merge_scored",),
    "chunk": ("gather_chunks",),
    "chunk_write": ("write_chunks",),
    "gather": ("gather_strides",),
    "prefill": ("attend_strides", "insert_strides"),
    "column_sums": ("column_sums",),
    "choose": ("insert_strides",),
    "insert_stride": ("insert_strides",),
    "tiles": ("gather_strides",),
    "recall_vectors": ("ask",),
    "recall_sinks": ("ask",),
    "recall": ("judge or weigh",),
    "recall_choose": ("choose, bring", "choose or bring"),
    "recall_store": ("list_gone or store_units",),
}
"""What the message may name for a mutant of a file."""


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("unit", [1, 16])
def test_large_budgets_are_checked_with_less(name: str, unit: int) -> None:
    """The reference's time grows with the square of the budget."""
    units = {"unit": unit} | ({"recall": 8} if unit > 1 else {})
    units |= {"num_sinks": 0 if name == "window" else unit}
    settings = {"name": name, "budget": 131072, "keep_prompt": 8192, "prefill_stride": 256}
    policy = resolve(settings | units)
    small = certify.small(policy)
    assert 1024 < small.budget <= 2048 == small.keep_prompt and small.budget % unit == 0
    changed = {"budget": policy.budget, "keep_prompt": 8192}
    assert small.model_copy(update=changed) == policy
    assert certify.small(small) is small


def test_the_check_runs_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the verdict is of the policy that was asked for."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(certify, "MOST_CHECKED", 64)
    policies: list[Any] = []

    def note(policy: Any, *args: Any) -> Any:
        policies.append(policy.budget)
        return SimpleNamespace(run=lambda: [SimpleNamespace(error=0.0)])

    monkeypatch.setattr(certify, "Check", note)
    for budget in (60, 4096, 4096, 8192):
        policy = resolve({"name": "h2o", "budget": budget, "num_sinks": 4, "prefill_stride": 16})
        certify.certify(policy, (SHAPE,), DEVICES["cpu"], CPU)
    assert policies == [60, 64, 64] and len(list(tmp_path.rglob("checks/*.json"))) == 3


def test_a_verdict_is_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with another kind of layers has that one checked."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    shapes: list[LayerShape] = []

    def note(policy: Any, shape: LayerShape, *args: Any) -> Any:
        shapes.append(shape)
        return SimpleNamespace(run=lambda: [selfcheck.Row("decode", "output", 0.0)])

    monkeypatch.setattr(certify, "Check", note)
    for asked in ((SHAPE,), (SHAPE, NEIGHBOURS), (NEIGHBOURS,), (UNROTATED, SHAPE)):
        certify.certify(resolve(POLICIES["sink"]), asked, DEVICES["cpu"], CPU)
    assert shapes == [SHAPE, NEIGHBOURS, UNROTATED]


@pytest.mark.parametrize("mode", ["once", "always", "off"])
def test_a_verdict_is_kept(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By everything it depends on; ``always`` ignores it, and ``off`` runs nothing."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    policy = resolve(POLICIES["h2o"])
    first = certify.certify(policy, (SHAPE,), DEVICES["cpu"], CPU, mode)
    again = certify.certify(policy, (SHAPE,), DEVICES["cpu"], CPU, mode)
    assert bool(first) == (mode != "off") and bool(again) == (mode == "always")
    other = resolve({**POLICIES["h2o"], "budget": 11})
    assert bool(certify.certify(other, (SHAPE,), DEVICES["cpu"], CPU, mode)) == (mode != "off")


@pytest.mark.parametrize("given", [{}, {"kv_policy_check": None}])
def test_no_word_on_the_check_is_the_devices_default(
    given: dict[str, None], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(certify, "certify", lambda *arguments: modes.append(arguments[4]))
    parallel = SimpleNamespace(tensor_parallel_size=1)
    config: Any = SimpleNamespace(
        additional_config=given, speculative_config=None, parallel_config=parallel
    )
    for entry in (DEVICES["cpu"], DEVICES["cuda"]):
        certify.certify_layers(config, resolve(POLICIES["sink"]), lambda: (SHAPE,), entry, CPU)
    assert modes == ["once"], "on CUDA"


def test_a_verdict_is_of_a_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that decide together run other kernels."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    checked: list[int] = []

    def note(*args: Any) -> Any:
        checked.append(args[-1])
        return SimpleNamespace(run=lambda: [selfcheck.Row("decode", "output", 0.0)])

    monkeypatch.setattr(certify, "Check", note)
    for size in (1, 2, 2, 4):
        config: Any = SimpleNamespace(
            additional_config={"kv_policy_check": "once"},
            parallel_config=SimpleNamespace(tensor_parallel_size=size),
            speculative_config=None,
        )
        policy = resolve(POLICIES["h2o"])
        certify.certify_layers(config, policy, lambda: (SHAPE,), DEVICES["cpu"], CPU)
    assert checked == [1, 2, 4]


def test_a_cache_that_may_not_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's folder: the check runs."""

    def denied(file: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "is_file", denied)
    assert not certify._is_kept(Path("/root/checks/verdict.json"))


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_verdict_that_cannot_be_written_does_not_count(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves no file, neither an empty one nor a part."""
    file = tmp_path / "checks" / "verdict.json"
    said: list[str] = []
    monkeypatch.setattr(certify.logger, "warning", lambda text, *_: said.append(text))
    with monkeypatch.context() as patch:
        if step != "write":
            patch.setattr(os, step, full_disk)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if step == "write" else most[0], most[1]))
        try:
            certify._keep(file, {"rows": []})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert len(said) == 1 and "the next start repeats it" in said[0]
    assert list(file.parent.iterdir()) == []
    certify._keep(file, {"rows": []})
    certify._keep(file, {"rows": [1]})
    assert json.loads(file.read_text()) == {"rows": [1]}, "another rank's, which comes later"
    assert list(file.parent.iterdir()) == [file] and len(said) == 1


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_ranks_write_one_verdict_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader finds no file, or a whole one; here another rank writes while one does."""
    file, replace, interrupted = tmp_path / "verdict.json", os.replace, []

    def beside(partial: str, target: Path) -> None:
        interrupted.append(partial)
        monkeypatch.setattr(os, "replace", replace)
        assert not file.exists()
        certify._keep(file, {"rank": 1})
        assert json.loads(file.read_text()) == {"rank": 1}
        replace(partial, target)

    monkeypatch.setattr(os, "replace", beside)
    certify._keep(file, {"rank": 0})
    assert len(interrupted) == 1
    assert json.loads(file.read_text()) == {"rank": 0} and list(tmp_path.iterdir()) == [file]


def test_a_verdict_does_not_depend_on_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which recall takes a share that differs from start to start."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    policy = resolve({**POLICIES["recall"], "recall_memory": 4.123})
    assert certify.certify(policy, (SHAPE,), DEVICES["cpu"], CPU)
    other = policy.model_copy(update={"recall_memory": 4.124})
    assert not certify.certify(other, (SHAPE,), DEVICES["cpu"], CPU)


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ({}, [None]),
        ({"sliding_window": 512}, [None, 512]),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, [None]),
        ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]},
         [None, 512]),
        ({"sliding_window": 4096}, [None]),  # masks nothing
    ],
)  # fmt: skip
def test_kinds_of_layers(text: dict[str, Any], windows: list[int | None]) -> None:
    """Layers with a window are checked beside those without, and with both pairs of channels."""
    config = _config(64, False, model_type="llama", max_position_embeddings=4096, **text)
    shapes = certify.shapes_of(config)
    assert [(shape.window, shape.is_neox) for shape in shapes] == [
        (window, is_neox) for window in windows for is_neox in (True, False)
    ]


def test_channels_that_rotate_are_those_of_the_model() -> None:
    """Transformers keeps GPT-NeoX's share with its rope parameters only."""
    text = vars(GPTNeoXConfig(rotary_pct=0.25)) | {"model_type": "gpt_neox"}
    assert "partial_rotary_factor" not in text
    shapes = certify.shapes_of(_config(64, False, **text))
    assert [shape.rotary_dim for shape in shapes] == [16, 16]


def test_latent_rows_are_checked() -> None:
    """As the model has them: 64 channels of 576 rotate in pairs of neighbours."""
    config = _config(576, True, model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    (shape,) = certify.shapes_of(config)
    assert (shape.head_size, shape.latent, shape.rotary_dim, shape.is_neox) == (576, 512, 64, False)
    assert shape.label() == "8/2 heads of 576, bfloat16, neighbours rotated, latents of 512"


def _config(head_size: int, use_mla: bool, **text: Any) -> Any:
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(**text),
        dtype=torch.bfloat16,
        uses_alibi=False,
        use_mla=use_mla,
        get_num_attention_heads=lambda parallel: 8,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: head_size,
    )
    cache = SimpleNamespace(block_size=16, cache_dtype="auto")
    return SimpleNamespace(model_config=model, parallel_config=None, cache_config=cache)


def test_a_cards_verdict_holds_for_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML gives the driver's version, also where PyTorch does not, and is closed again."""
    calls: list[str] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlShutdown=lambda: calls.append("shutdown"),
    )
    properties = SimpleNamespace(name="A card", major=9, minor=0)
    monkeypatch.setattr(devices, "import_pynvml", lambda: nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv(SWITCH, "python")
    facts = DEVICES["cuda"].facts()
    assert facts | {"cuda": None} == {
        "card": "A card", "capability": [9, 0], "driver": "580.1", "cuda": None, "repeats": False,
    }  # fmt: skip
    assert calls == ["init", "shutdown"]


def test_a_card_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jetson has none, and vLLM runs there."""

    class NVMLError(Exception):
        pass

    def init() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    nvml = SimpleNamespace(nvmlInit=init, NVMLError=NVMLError)
    monkeypatch.setattr(devices, "import_pynvml", lambda: nvml)
    assert devices.driver_version() == "unknown"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("out of resource: shared memory, Required: 74752"),
            "cannot be checked.*RuntimeError: out of resource.*report.*'none'.*--kv-policy full",
        ),
        (
            torch.OutOfMemoryError("Tried to allocate 2 GiB"),
            r"no memory to check .*\(Tried to allocate 2 GiB\); .* set --kv-policy-check off",
        ),
    ],
    ids=["kernel", "memory"],
)
def test_a_check_that_does_not_run_stops_the_start(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error alone would not say what to report, and what runs without it."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(certify.Check, "run", fail)
    entry = DEVICES["cuda"]
    monkeypatch.setattr(type(entry), "facts", lambda self: {"card": "none"})
    with pytest.raises(KVPolicyError, match=message):
        certify.certify(resolve(POLICIES["sink"]), (SHAPE,), entry, CPU)
    assert not list(tmp_path.rglob("*.json"))


def test_a_failure_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no verdict behind."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    broken(
        chunk,
        "_from_chunk",
        "written_at - rank_now - shift",
        "0 * written_at",
        monkeypatch,
    )
    entry = DEVICES["cuda"]
    monkeypatch.setattr(type(entry), "facts", lambda self: {"card": "none"})
    with pytest.raises(KVPolicyError, match=r"does not start: .*gather_chunks.*report"):
        certify.certify(resolve(POLICIES["sink"]), (SHAPE,), entry, CPU)
    assert not list(tmp_path.rglob("*.json"))


def broken(
    module: ModuleType, function: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace ``old``, which a kernel's source must have, in all modules that use the kernel."""
    kernel = getattr(module, function)
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    assert source.count(old) >= 1, f"{function} has no {old!r}"
    text = source[source.index("def ") :].replace(old, new)
    decorator = source[: source.index("def ")]
    name = str(Path(__file__).with_name(f"mutant_{function}.py"))
    linecache.cache[name] = (len(text), None, (decorator + text).splitlines(True), name)
    scope: dict[str, Any] = {**vars(module), "triton": triton}
    exec(compile(decorator + text, name, "exec"), scope)
    mutant = scope[function]
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("vllm_cascade.kernels.triton"):
            for key, value in list(vars(other).items()):
                if value is kernel:
                    monkeypatch.setattr(other, key, mutant)


class Kernels(CPUKVPolicyBackend):
    """An engine's backend on the CPU whose kernels are the CUDA backend's."""

    get_impl_cls = staticmethod(CUDAKVPolicyBackend.get_impl_cls)
    get_builder_cls = staticmethod(CUDAKVPolicyBackend.get_builder_cls)


@pytest.mark.slow
def test_an_engine_starts_once_its_kernels_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``--kv-policy-check`` says, with the shapes of the model's own layers."""
    from tests.engine.pool import EnginePool

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    # The reference is the CPU's backend, which stays as it is.
    monkeypatch.setattr(DEVICES["cpu"], "backend", f"{__name__}.{Kernels.__name__}")
    pool = EnginePool()
    policy = {"kv_policy": {"recall": 0, **POLICIES["sink"]}, "kv_policy_check": "once"}
    with monkeypatch.context() as patch:
        broken(chunk, "_from_chunk", "written_at - rank_now - shift", "0 * written_at", patch)
        with pytest.raises(Exception, match=r"does not start: .*gather_chunks"):
            pool.get(None, additional_config=policy, max_model_len=256, block_size=16)
    assert not list(tmp_path.rglob("checks/*.json"))
    assert pool.get(None, additional_config=policy, max_model_len=256, block_size=16)
    assert len(list(tmp_path.rglob("checks/*.json"))) == 1
    pool.close()


def test_a_card_whose_memory_nvml_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """GB10's is the host's; stock vLLM starts there."""
    nvml = devices.import_pynvml()

    def fails(*_: object) -> int:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(type(devices.current_platform), "get_device_total_memory", fails)
    properties = SimpleNamespace(total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert DEVICES["cuda"].memory_bytes() == 7
