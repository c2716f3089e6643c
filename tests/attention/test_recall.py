# SPDX-License-Identifier: Apache-2.0
"""The judge of evicted units, in PyTorch and C++, and the logs that hold them."""

import math
from ctypes import byref, c_int64, c_void_p
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cpp_library import symbols
from tests.oracle import recall as oracle
from tests.oracle.recall import in_8_bits, may_round_either_way
from vllm_cascade.attention.cpu import native_recall
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.layer import LayerConfig, NewTokens
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.cpp.library import Rows, load, row_addresses
from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.models.rotary import rotate
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.recall.log import CHUNK_UNITS, Log, Part, UnitShape
from vllm_cascade.recall.stores import Stores


def layer_of(num_kv_heads: int, head_size: int, num_sets: int = 1) -> LayerConfig:
    """A layer as far as the judge looks at it."""
    return LayerConfig(
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_sets=num_sets,
        scale=head_size**-0.5,
        softcap=0.0,
        slopes=None,
        rotation=None,
        is_neox=True,
        uses_attention=False,
        reduction="mean",
    )


def shape_of(unit: int = 4, most: int = 1000, **changed: int) -> UnitShape:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "num_sets": 1, "head_size": 8, **changed}
    return UnitShape(**sizes, unit=unit, dtype=torch.float32, most_units=most, most_recalled=3)


def write(part: Part, layer: int, keys: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
    """Keys ``[H, n, unit, D]`` and first tokens ``[n]`` into a log's memory.

    By default no unit goes on with another's text.
    """
    codes, scale = evidence.encode(keys)
    if tokens is None:
        tokens = torch.arange(keys.shape[1]) * 2 * keys.shape[2]
    for chunk, to, place in part.pieces():
        evidence.write_keys(chunk, layer, to, codes[:, place], scale[:, place])
        chunk.token[layer, :, to] = tokens[place]


def text_of(num_units: int, unit: int) -> torch.Tensor:
    """First tokens of units, of which about half go on with the text of the one before."""
    steps = torch.where(torch.rand(num_units) < 0.5, unit, unit + 1)
    return steps.cumsum(0)


def with_next(
    worth: list[float], units: list[int], tokens: torch.Tensor, unit: int
) -> dict[int, float]:
    """The worth of units; those that go on with their text have an eighth of it, or their own."""
    own = dict(zip(units, worth, strict=True))
    found = dict(own)
    for u, value in own.items():
        if u + 1 < len(tokens) and int(tokens[u + 1] - tokens[u]) == unit:
            found[u + 1] = max(own.get(u + 1, 0.0), value / 8)
    return found


def path_of(
    layer: LayerConfig, unit: int, num_heads: int, dtype: torch.dtype = torch.float32
) -> NativePath:
    """The library's calls for a layer with ``num_heads`` query heads, on pages of two units."""
    words = torch.zeros(3, layer.num_sets, 2, dtype=torch.int32)
    kv = torch.randn(3, layer.num_kv_heads, 2 * unit, 2 * layer.head_size).to(dtype)
    pages = Pages(kv, words, words.clone(), words.float(), words.clone())
    schedule = compiled(resolve({"name": "sink", "budget": 4 * unit, "unit": unit}))
    return NativePath(load(), layer, pages, num_heads, schedule)


PAGES = torch.tensor([2, 0, 1], dtype=torch.int32)


def choose(
    path: NativePath, part: Part, num: int, rows: Rows, places: np.ndarray, *where: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What queries select in C++ in the second layer, at ``where``: the rest of ``asking_of``.

    Returns:
        Unit indices within the part, int64 ``[sets, num]``, ascending; the judged units, int64
        ``[sets, judged]``, all or ``CANDIDATES`` of them; and their worth for each query head, fp32
        ``[H * G, judged]``, of all queries.
    """
    layer = path._layer
    judged = min(len(part), evidence.most_scored(num))
    asked = np.empty((layer.num_heads * layer.group, judged), dtype=np.float32)
    listed = np.empty((layer.num_sets, judged), dtype=np.int64)
    chosen = np.empty((layer.num_sets, num), dtype=np.int64)
    positions, pages, num_sinks = where
    asking = native_recall.asking_of(places, positions, pages, num, num_sinks)
    units = native_recall.units_of(part)
    results = (c_void_p(array.ctypes.data) for array in (asked, listed, chosen))
    structs = map(byref, (layer, rows, units, asking))
    symbols().recall_units(*structs, c_int64(1), *results)
    return chosen, listed, asked


def sinks_of(path: NativePath, layer: LayerConfig, num: int) -> torch.Tensor:
    """Keys in the first ``num`` units of a request with ``PAGES``, fp32 ``[H, num * unit, D]``."""
    pages = path._kept[1]
    slots = pages.kv[PAGES.long()].transpose(0, 1).flatten(1, 2)
    return slots[:, : num * pages.unit, : layer.head_size].float()


def logits_of(layer: LayerConfig, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[Q, H * G, n]`` of queries ``[Q, H * G, D]`` and keys ``[H, n, D]``."""
    group = queries.shape[1] // len(keys)
    logits = torch.einsum("qhd,hnd->qhn", queries.float(), keys.repeat_interleave(group, 0))
    return logits * layer.scale


def largest(queries: torch.Tensor, most: int) -> torch.Tensor:
    """Of each head of ``[Q, heads, D]`` the last query and the largest ones, so many."""
    norms = in_8_bits(queries).double().norm(dim=-1)
    norms[-1] = torch.inf
    heads = [
        queries[sorted(sorted(range(len(queries)), key=lambda q, h=h: -norms[q, h])[:most]), h]
        for h in range(queries.shape[1])
    ]
    return torch.stack(heads, 1)


def literal(keys: torch.Tensor, queries: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """``[H, G, n]`` in fp64, from keys ``[H, n, unit, D]`` and queries ``[Q, H * G, D]``; of sinks
    their logits ``[Q, H * G, sinks]``."""
    coarse = in_8_bits(keys).double()
    num_heads, num_units, unit, _ = keys.shape
    group = queries.shape[1] // num_heads
    found = torch.zeros(num_heads, group, num_units, dtype=torch.float64)
    for head in range(num_heads):
        for g in range(group):
            of_head = in_8_bits(queries[:, head * group + g]).double()
            pairs = zip(of_head, sinks[:, head * group + g].double(), strict=True)
            for nth, (query, others) in enumerate(pairs):
                logits = coarse[head].reshape(num_units * unit, -1) @ query
                probs = torch.cat((logits, others)).softmax(0)[: len(logits)]
                times = 8 if nth == len(of_head) - 1 else 1
                found[head, g] += times * probs.view(num_units, unit).sum(1).square()
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([8, 16, 20, 64, 80, 128]),
    st.sampled_from([2, 4, 8, 16, 24]),
    st.integers(1, 40),
    st.integers(0, 20),
    st.integers(1, 3),
    st.integers(0, 1 << 30),
)
def test_evidence(
    num_heads: int,
    group: int,
    size: int,
    unit: int,
    num_units: int,
    dropped: int,
    num_queries: int,
    seed: int,
) -> None:
    """Over several chunks, of which the first units are gone; the memory around them is junk."""
    torch.manual_seed(seed)
    layer = layer_of(num_heads, size)
    shape = shape_of(unit, num_units, num_kv_heads=num_heads, head_size=size)
    log = Log(shape)
    log.grow(dropped)
    for chunk in log.chunks:
        chunk.scale.fill_(torch.nan)
    keys = torch.randn(num_heads, num_units, unit, size) * 2
    write(log.grow(num_units), 1, keys)
    part = log.part(log.begin, log.end)
    assert len(part) == num_units
    queries = torch.randn(num_queries, num_heads * group, size) * 0.5
    sinks = torch.randn(num_queries, num_heads * group, seed % 3) * 3
    expected = literal(keys, queries, sinks)
    found = evidence.asked(layer, 1, part, queries, sinks.logsumexp(-1))
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([8, 16, 20, 64, 80, 128]),
    st.sampled_from([2, 4, 8, 16, 32]),
    st.integers(2, 40),
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.data(),
)
def test_the_judge_in_cpp(
    num_heads: int,
    group: int,
    size: int,
    unit: int,
    num_units: int,
    dropped: int,
    dtype: torch.dtype,
    per_head: bool,
    data: st.DataObject,
) -> None:
    """Tokens of a step: turned back from their positions, their units chosen."""
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    frequencies = 1 / 100 ** (torch.arange(0, size, 2) / size)
    table, num_asking = rotation_table(frequencies, 50, "cpu"), data.draw(st.integers(1, 9))
    position = torch.randint(0, 51, (num_asking,))
    place = torch.randint(0, 4, (num_asking,))
    num_sets = num_heads if per_head else 1
    layer = replace(layer_of(num_heads, size, num_sets), rotation=table)
    log = Log(shape_of(unit, num_units, num_kv_heads=num_heads, num_sets=num_sets, head_size=size))
    log.grow(dropped)
    for chunk in log.chunks:
        chunk.scale.fill_(torch.nan)
    keys = torch.randn(num_heads, num_units, unit, size) * 2
    tokens = text_of(num_units, unit)
    write(log.grow(num_units), 1, keys, tokens)
    part, num = log.part(log.begin, log.end), data.draw(st.integers(1, num_units - 1))
    new = NewTokens(
        *(torch.randn(4, heads, size).to(dtype) for heads in (num_heads * group, num_heads)),
        *(torch.randn(4, heads, size).to(dtype) for heads in (num_heads, num_heads * group)),
    )
    path, num_sinks = path_of(layer, unit, num_heads * group, dtype), data.draw(st.integers(0, 5))
    chosen, listed, asked = choose(
        path, part, num, row_addresses(new), place.numpy(), position.numpy(), PAGES, num_sinks
    )
    assert (listed == np.arange(num_units)).all()
    at = position[:, None].expand(-1, num_heads * group)
    plain = rotate(new.query[place].float(), table[at], True) * layer.scale
    sinks = sinks_of(path, layer, num_sinks)
    expected = literal(keys, plain, logits_of(layer, new.query[place], sinks))
    found = torch.from_numpy(asked).view(expected.shape)
    sure = ~may_round_either_way(plain).any(0).view(expected.shape[:2])
    torch.testing.assert_close(found[sure].double(), expected[sure], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.2)
    for head_set, row in enumerate(evidence.over_heads(layer, found).numpy()):
        mine = set(chosen[head_set].tolist())
        assert len(mine) == num and sorted(mine) == chosen[head_set].tolist()
        worth = with_next(row.tolist(), listed[head_set].tolist(), tokens, unit)
        theirs = set(sorted(worth, key=lambda u, worth=worth: (-worth[u], u))[:num])
        least = min(worth[u] for u in theirs)
        assert all(abs(worth[u] - least) <= 1e-6 * least for u in mine ^ theirs)


@pytest.mark.parametrize("unit", [16, 32])
def test_few_queries_find_what_many_do(unit: int) -> None:
    """The C++ judge multiplies keys as they are stored for few queries, and in lanes for many.

    The same query twelve times asks for 19 times as much, because the last one counts 8 times.
    """
    torch.manual_seed(0)
    layer, log = layer_of(2, 64, 1), Log(shape_of(unit, 37, num_kv_heads=2, head_size=64))
    write(log.grow(37), 1, torch.randn(2, 37, unit, 64) * 2)
    new = NewTokens(*(torch.randn(1, heads, 64) for heads in (6, 2, 2, 6)))
    path, worth, units = path_of(layer, unit, 6), [], []
    for num in (1, 12):
        place, position = np.zeros(num, dtype=np.int64), np.full(num, 7)
        chosen, _, asked = choose(
            path, log.part(log.begin, log.end), 5, row_addresses(new), place, position, PAGES, 1
        )
        worth.append(asked / (num + 7))
        units.append(chosen.tolist())
    np.testing.assert_allclose(worth[0], worth[1], rtol=1e-6)
    assert units[0] == units[1] and worth[0].max() > 100 * worth[0].min()


def test_numbers_of_candidates() -> None:
    """Engines have too few units for them in quick tests, so the oracle's numbers are compared."""
    for name in ("CANDIDATES", "FILTERING", "JUDGING"):
        assert getattr(evidence, name) == getattr(oracle, name), name
    assert (native_recall.FILTERING, native_recall.JUDGING) == (oracle.FILTERING, oracle.JUDGING)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([8, 20, 64]),
    st.sampled_from([2, 16]),
    st.integers(20, 300),
    st.integers(0, 20),
    st.integers(1, 40),
    st.sampled_from([3, 17]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
@example(1, 1, 8, 16, 60, 0, 1, 17, False, 1)  # the 17th unit's probability is 1e-48
def test_candidates(
    num_heads: int,
    group: int,
    size: int,
    unit: int,
    num_units: int,
    dropped: int,
    num_asking: int,
    most: int,
    per_head: bool,
    seed: int,
) -> None:
    """Of many units, those that a few queries ask for, by mean and variance of their keys.

    PyTorch, C++ and plain loops.
    """
    torch.manual_seed(seed)
    few, some, num = 3, 5, 3
    num_sets = num_heads if per_head else 1
    layer = layer_of(num_heads, size, num_sets)
    log = Log(shape_of(unit, num_units, num_kv_heads=num_heads, num_sets=num_sets, head_size=size))
    log.grow(dropped)
    for chunk in log.chunks:
        chunk.centre_scale.fill_(torch.nan)
        chunk.spread.fill_(torch.nan)
    # Units of likely keys, so that their means tell them apart, some more alike than others.
    keys, spread = torch.randn(2, num_heads, num_units, 1, size) * 2
    keys = keys + torch.randn(num_heads, num_units, unit, size) * spread[..., :1]
    tokens = text_of(num_units, unit)
    write(log.grow(num_units), 1, keys, tokens)
    part = log.part(log.begin, log.end)
    new = NewTokens(*(torch.randn(num_asking, num_heads * group, size),) * 4)
    plain = new.query * layer.scale
    path, places = path_of(layer, unit, num_heads * group), np.arange(num_asking)
    sinks = sinks_of(path, layer, 1)
    numbers = {"FILTERING": few, "JUDGING": some}
    with (
        patch.object(evidence, "CANDIDATES", most),
        patch.multiple(evidence, **numbers),
        patch.multiple(native_recall, **numbers),
    ):
        listed = evidence.candidates(layer, 1, part, plain, most)
        to_sinks = evidence.to_sinks(layer, new.query, sinks)
        chosen = evidence.choose(layer, 1, part, plain, to_sinks, num)
        found = choose(path, part, num, row_addresses(new), places, np.zeros_like(places), PAGES, 1)
    assert listed is not None and listed.shape == (num_sets, most)
    coarse = in_8_bits(keys).double()
    centres, variance = in_8_bits(coarse.mean(2).float()).double(), coarse.var(2, correction=0)
    select, judge = largest(plain, few), largest(plain, some)
    which = [[(plain[:, h] == one).all(-1).nonzero()[0, 0] for one in judge[:, h]]
             for h in range(num_heads * group)]  # fmt: skip
    to_sinks = logits_of(layer, new.query, sinks)
    to_sinks = torch.stack([to_sinks[places, h] for h, places in enumerate(which)], 1)
    for head_set in range(num_sets):
        heads = [head_set] if per_head else range(num_heads)
        worth = torch.zeros(num_units, dtype=torch.float64)
        for head in heads:
            for query in in_8_bits(select[:, head * group : (head + 1) * group]).double():
                added = 0.7 * variance[head].mean(-1)[:, None] * query.square().sum(-1)
                worth = worth.maximum((centres[head] @ query.T + added).softmax(0).amax(1))
        worth = worth.clamp(min=1e-37)  # fp32 has no smaller ones
        least = worth.sort(descending=True).values[most - 1]
        for units in (listed[head_set].tolist(), found[1][head_set].tolist()):
            assert units == sorted(set(units)) and len(units) == most
            assert all(worth[u] >= least * (1 - 1e-4) for u in units)
            others = set(range(num_units)) - set(units)
            assert all(worth[u] <= least * (1 + 1e-4) for u in others)
        # The candidates' own shares decide what comes back: they, or what continues them.
        assert len(set(chosen[head_set])) == len(set(found[0][head_set])) == num
        shares = (
            literal(keys[:, listed[head_set]], judge, to_sinks)[list(heads)].flatten(0, 1).amax(0)
        )
        value = with_next(shares.tolist(), listed[head_set].tolist(), tokens, unit)
        last = sorted(value.values(), reverse=True)[num - 1]
        assert all(value[u] >= last * (1 - 1e-4) for u in chosen[head_set].tolist())
        if (found[1][head_set] == listed[head_set].numpy()).all():
            assert all(value[u] >= last * (1 - 1e-4) for u in found[0][head_set].tolist())


@pytest.mark.parametrize("num", [20, 30, 99])
def test_more_units_than_candidates(num: int) -> None:
    """As many as are brought back are judged; no text goes on, so these are the filter's."""
    layer, log = layer_of(2, 8), Log(shape_of(4, 100, head_size=8))
    torch.manual_seed(num)
    write(log.grow(100), 1, torch.randn(2, 100, 4, 8) * 2, 5 * torch.arange(100))
    part, query = log.part(0, 100), torch.randn(3, 2, 8) * 2
    new, places = NewTokens(*(query,) * 4), np.arange(3)
    path = path_of(layer, 4, 2)
    sinks = evidence.to_sinks(layer, query, sinks_of(path, layer, 1))
    with patch.object(evidence, "CANDIDATES", 20):
        (slow,) = evidence.choose(layer, 1, part, query * layer.scale, sinks, num)
        (fast,), (listed,), _ = choose(
            path, part, num, row_addresses(new), places, 0 * places, PAGES, 1
        )
    (expected,) = evidence.candidates(layer, 1, part, query * layer.scale, num).tolist()
    assert slow.tolist() == fast.tolist() == listed.tolist() == expected


def by_oracle(
    keys: torch.Tensor, queries: torch.Tensor, sinks: torch.Tensor, num: int, most: int
) -> list[int]:
    """The ``num`` units that the oracle selects where it judges ``most`` of them.

    Args:
        keys: ``[H, n, unit, D]``, of units that are stored in the order of a text without gaps.
        queries: ``[Q, H * G, D]``.
        sinks: logits ``[Q, H * G, sinks]``.
    """
    _, num_units, unit, _ = keys.shape
    store = oracle.RecallSettings(num, unit, num_units * unit, 4, len(queries), "exact")
    simulated = oracle.RecallSim(store, evicted=list(range(num_units)))
    with patch.object(oracle, "CANDIDATES", most):
        simulated.choose(queries, keys.flatten(1, 2), sinks)
    return simulated.shown


ALL = slice(None)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize(
    ("queries", "heads", "channels"),
    [(ALL, ALL, ALL), (ALL, 1, ALL), (slice(0, 19), ALL, ALL), (3, 0, 5), (-1, ALL, -1)],
)
def test_queries_that_are_no_numbers(queries: Any, heads: Any, channels: Any, value: float) -> None:
    """A model that overflows: they ask for nothing, and the other ones select.

    Where no query is left these are the first units, as of any that are asked for as much.
    """
    torch.manual_seed(5)
    layer, log = layer_of(2, 24), Log(shape_of(4, 100, head_size=24))
    keys, query = torch.randn(2, 100, 4, 24) * 2, torch.randn(20, 2, 24) * 2
    query[queries, heads, channels] = value
    write(log.grow(100), 1, keys, torch.arange(100) * 4)
    part, places, new = log.part(0, 100), np.arange(20), [query] * 4  # kept: C++ has its address
    path, rows = path_of(layer, 4, 2), row_addresses(new)
    for most, num_sinks in ((100, 0), (100, 1), (20, 0), (20, 1)):
        sink_keys = sinks_of(path, layer, num_sinks)
        sinks = evidence.to_sinks(layer, query, sink_keys)
        expected = by_oracle(keys, query, logits_of(layer, query, sink_keys), 3, most)
        asked = rows, places, 0 * places, PAGES, num_sinks
        with patch.object(evidence, "CANDIDATES", most):
            (slow,) = evidence.choose(layer, 1, part, query * layer.scale, sinks, 3)
            (fast,), *_ = choose(path, part, 3, *asked)
        assert slow.tolist() == fast.tolist() == expected, (most, num_sinks)
        assert (expected == [0, 1, 2]) == (queries == heads == channels == ALL)


def test_a_head_that_attends_to_sinks_does_not_look_up() -> None:
    """Its attention to the store would count as much as the other head's, or more."""
    log = Log(shape_of(2, 40, num_kv_heads=1, num_sets=1, head_size=8))
    keys, queries = torch.zeros(1, 40, 2, 8), torch.zeros(1, 2, 8)
    keys[0, 5, 0, 0], queries[0, 0, 0] = 6.0, 1.0
    keys[0, 20, :, 1], queries[0, 1, 1] = 6.0, 1.0
    write(log.grow(40), 1, keys)
    for sinks, first in ((torch.tensor([[-9.0, 9.0]]), 5), (torch.full((1, 2), -9.0), 20)):
        found = evidence.asked(layer_of(1, 8), 1, log.part(0, 40), queries, sinks)
        assert evidence.most_asked(found.numpy().max((0, 1)), 1).tolist() == [first]


def test_several_lookups_count_more_than_one_and_than_many_glances() -> None:
    """Of a head with 30 queries, one looks up unit 2, two unit 5, and the rest glance at unit 9."""
    log = Log(shape_of(2, 40, num_kv_heads=1, num_sets=1, head_size=8))
    keys, queries = torch.zeros(1, 40, 2, 8), torch.zeros(30, 1, 8)
    for channel, unit in enumerate((2, 5, 9)):
        keys[0, unit, :, channel] = 6.0
    queries[0, 0, 0] = queries[1:3, 0, 1] = 1.0
    queries[3:, 0, 2] = 0.3
    write(log.grow(40), 1, keys)
    found = evidence.asked(layer_of(1, 8), 1, log.part(0, 40), queries, torch.zeros(30, 1))[0, 0]
    assert evidence.most_asked(found.numpy(), 1).tolist() == [5]
    assert found[2] > found[9] > found[0], found


@pytest.mark.parametrize(("others", "first"), [(6, 3), (10, 5)])
def test_the_last_lookup_counts_eight_times(others: int, first: int) -> None:
    """The last query looks up unit 3, and some before it look up unit 5."""
    log = Log(shape_of(2, 40, num_kv_heads=1, num_sets=1, head_size=8))
    keys, queries = torch.zeros(1, 40, 2, 8), torch.zeros(12, 1, 8)
    keys[0, 3, :, 0] = keys[0, 5, :, 1] = 6.0
    queries[-1, 0, 0] = queries[:others, 0, 1] = 1.0
    write(log.grow(40), 1, keys)
    found = evidence.asked(layer_of(1, 8), 1, log.part(0, 40), queries, torch.zeros(12, 1))[0, 0]
    assert evidence.most_asked(found.numpy(), 1).tolist() == [first]


@pytest.mark.parametrize("candidates", [40, 8])
@pytest.mark.parametrize(
    ("continued", "expected"),
    [
        ([], [5, 9]),
        ([6], [5, 6]),
        ([], [5, 6, 9, 20]),
        ([10], [5, 6, 9, 10]),
        ([6, 7], [5, 6, 9]),
    ],
)
def test_text_that_goes_on(continued: list[int], expected: list[int], candidates: int) -> None:
    """What continues a unit has an eighth of its worth: 6 then beats unit 9, and 10 unit 20.

    Unit 6 does not hand on what unit 5 gave it. Of 8 candidates, neither 7 nor 10 is one.
    """
    layer, log = layer_of(1, 8), Log(shape_of(2, 40, num_kv_heads=1, num_sets=1, head_size=8))
    keys, new = torch.zeros(1, 40, 2, 8), NewTokens(*(torch.zeros(1, 1, 8),) * 4)
    new.query[..., 0] = 1.0
    worth = {5: 1.0, 9: 1e-2, 6: 5e-3, **dict.fromkeys(range(20, 26), 1e-6)}
    for unit, value in worth.items():  # squares of probabilities
        keys[0, unit, :, 0] = (14 + math.log(value) / 2) / layer.scale
    tokens = torch.arange(40) * 3
    for unit in continued:
        tokens[unit] = tokens[unit - 1] + 2
    write(log.grow(40), 1, keys, tokens)
    part, plain, num = log.part(0, 40), new.query * layer.scale, len(expected)
    path, places = path_of(layer, 2, 1), np.zeros(1, dtype=np.int64)
    sinks = evidence.to_sinks(layer, new.query, sinks_of(path, layer, 0))
    with patch.object(evidence, "CANDIDATES", candidates):
        (slow,) = evidence.choose(layer, 1, part, plain, sinks, num)
        (fast,), *_ = choose(path, part, num, row_addresses(new), places, places, PAGES, 0)
    assert slow.tolist() == fast.tolist() == expected


@pytest.mark.parametrize("candidates", [40, 8])
def test_of_units_with_equal_worth_the_first_is_chosen(candidates: int) -> None:
    """The last query looks up unit 5, which counts eight times, so unit 6, which continues it, is
    worth as much as unit 30, which one other query looks up. Of 8 candidates, 6 is none."""
    layer, log = layer_of(1, 8), Log(shape_of(2, 40, num_kv_heads=1, num_sets=1, head_size=8))
    keys, new = torch.zeros(1, 40, 2, 8), NewTokens(*(torch.zeros(2, 1, 8),) * 4)
    new.query[0, 0, 0] = new.query[1, 0, 1] = 1.0
    keys[0, 30, :, 0] = keys[0, 5, :, 1] = 22.0 / layer.scale  # a probability of 1 in fp32
    keys[0, 20:26, :, :2] = 2.0 / layer.scale
    tokens = torch.arange(40) * 3
    tokens[6] = tokens[5] + 2
    write(log.grow(40), 1, keys, tokens)
    part, plain = log.part(0, 40), new.query * layer.scale
    path = path_of(layer, 2, 1)
    sinks = evidence.to_sinks(layer, new.query, sinks_of(path, layer, 0))
    with patch.object(evidence, "CANDIDATES", candidates):
        (slow,) = evidence.choose(layer, 1, part, plain, sinks, 2)
        fast = choose(path, part, 2, row_addresses(new), np.arange(2), np.zeros(2, int), PAGES, 0)
    assert slow.tolist() == fast[0][0].tolist() == [5, 6]


def test_any_head_of_a_set_may_select() -> None:
    found = torch.rand(2, 3, 5)
    (shared,) = evidence.over_heads(layer_of(2, 8), found)
    rows = [found[head, i] for head in range(2) for i in range(3)]
    assert (shared == torch.stack(rows).max(0).values).all()
    each = evidence.over_heads(layer_of(2, 8, num_sets=2), found)
    for head in range(2):
        assert (each[head] == found[head].max(0).values).all()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_the_most_asked_units(values: list[int], data: st.DataObject) -> None:
    """Of equal ones those that were stored first."""
    num = data.draw(st.integers(1, len(values)))
    chosen = evidence.most_asked(np.asarray(values, dtype=np.float32), num)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert sorted(chosen.tolist()) == sorted(order[:num])


@pytest.mark.parametrize(
    ("num_tokens", "most", "expected"),
    [(3, 4, [0, 1, 2]), (8, 4, [1, 3, 5, 7]), (5, 2, [1, 4]), (256, 1, [255])],
)
def test_who_asks(num_tokens: int, most: int, expected: list[int]) -> None:
    assert evidence.asking(num_tokens, most).tolist() == expected


def test_a_zero_key_is_no_key() -> None:
    codes, scale = evidence.encode(torch.zeros(2, 4))
    assert not codes.any() and not scale.any()


# --- logs and stores ------------------------------------------------------------------------------


def numbers(log: Log) -> list[int]:
    """What ``mark`` wrote."""
    part = log.part(log.begin, log.end)
    return [int(n) for chunk, which, _ in part.pieces() for n in chunk.token[0, 0, which]]


def mark(log: Log, values: list[int]) -> None:
    for chunk, to, place in log.grow(len(values)).pieces():
        chunk.token[:, :, to] = torch.tensor(values[place], dtype=torch.int32)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=12),
    st.integers(1, 30),
)
def test_logs_that_fork_and_overflow(steps: list[tuple[int, int, bool]], most: int) -> None:
    """Any user of a log sees what lists would hold."""
    logs, lists = [Log(shape_of(most=most))], [[]]
    value = 0
    for which, num, forks in steps:
        which %= len(logs)
        if forks:
            logs.append(logs[which].fork())
            lists.append(list(lists[which]))
        values = list(range(value, value + num))
        value += num
        mark(logs[which], values)
        lists[which] += values
    for log, expected in zip(logs, lists, strict=True):
        assert numbers(log) == expected[-most:] and log.end == len(expected)
        assert len(log.chunks) <= -(-len(expected[-most:]) // CHUNK_UNITS) + 1


@pytest.mark.parametrize(
    "changed",
    [
        {"num_kv_heads": 3, "head_size": 64},
        {"row_scales": 2, "num_sets": 2},
        {"num_kv_heads": 3, "head_size": 64, "in_8_bits": True},
    ],
)
def test_bytes_of_a_chunk(changed: dict[str, int]) -> None:
    """Tensors are aligned, and the mapping is a whole number of pages."""
    shape = shape_of(unit=16, **changed)
    log = Log(shape)
    log.grow(CHUNK_UNITS)
    (chunk,) = log.chunks
    sizes = [tensor.nbytes for tensor in chunk.tensors]
    assert shape.chunk_bytes == -(-sum(-(-size // 64) * 64 for size in sizes) // 4096) * 4096
    starts = [tensor.data_ptr() for tensor in chunk.tensors]
    assert all(start % 64 == 0 for start in starts)
    assert starts[-1] + sizes[-1] <= starts[0] + shape.chunk_bytes
    layers, heads, size = 2, shape.num_kv_heads, shape.head_size
    keys = layers * heads * CHUNK_UNITS * 16
    centres = layers * heads * CHUNK_UNITS * (size + 8)
    words = layers * shape.num_sets * CHUNK_UNITS * 2
    row = 2 * size * 4 + size + 4 + 4 * shape.row_scales
    if shape.in_8_bits:
        row = 2 * size + 8
    assert sum(sizes) == keys * row + centres + words * 4


def output(**changed: object) -> SimpleNamespace:
    """What the scheduler sends, as far as stores look at it."""
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
    )
    base = {
        "finished_req_ids": set(),
        "preempted_req_ids": None,
        "kv_cache_block_copies": None,
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": cached,
    }
    return SimpleNamespace(**{**base, **changed})


def new(name: str, page: int, num_computed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, block_ids=([page, 99],), num_computed_tokens=num_computed)


def copy(source: int, target: int) -> SimpleNamespace:
    return SimpleNamespace(src_block_id=source, dst_block_id=target)


def test_stores_follow_the_scheduler() -> None:
    stores = Stores(shape_of())
    stores.note(output(scheduled_new_reqs=[new("a", 1)]))
    mark(stores.logs[1], [10, 11])
    # A snapshot in page 5, from which b starts; both go on.
    stores.note(output(kv_cache_block_copies=[copy(1, 5), copy(99, 98)]))
    mark(stores.logs[1], [12])
    stores.note(output(scheduled_new_reqs=[new("b", 7, 64)], kv_cache_block_copies=[copy(5, 7)]))
    mark(stores.logs[7], [20])
    assert {page: numbers(log) for page, log in stores.logs.items()} == {
        1: [10, 11, 12],
        5: [10, 11],
        7: [10, 11, 20],
    }
    # Memory goes with its last user.
    assert stores.num_bytes == 3 * stores.shape.chunk_bytes
    stores.note(output(finished_req_ids={"a"}, preempted_req_ids={"b"}))
    assert list(stores.logs) == [5]
    # The snapshot's own pages become c's, which is no loss; then they are given up.
    adopted = output(scheduled_new_reqs=[new("c", 5, 64)], dropped_snapshots=(5,))
    stores.note(adopted)
    assert numbers(stores.logs[5]) == [10, 11]
    stores.note(output(finished_req_ids={"c"}))
    assert not stores.logs and stores.num_bytes == 0
    # A snapshot that is given up, and a page that begins anew.
    stores.note(output(scheduled_new_reqs=[new("d", 1)], dropped_snapshots=(8,)))
    mark(stores.logs[1], [1])
    stores.note(output(kv_cache_block_copies=[copy(1, 8), copy(1, 9)]))
    stores.note(output(dropped_snapshots=(8, 9), scheduled_new_reqs=[new("e", 8)]))
    assert set(stores.logs) == {1, 8} and stores.logs[8].end == 0 and stores.num_units == 1


def test_a_resumed_request_begins_anew() -> None:
    stores = Stores(shape_of())
    stores.note(output(scheduled_new_reqs=[new("a", 1)]))
    mark(stores.logs[1], [1, 2])
    stores.note(output(preempted_req_ids={"a"}))
    cached = SimpleNamespace(
        req_ids=["a"], resumed_req_ids={"a"}, new_block_ids=[([4],)], num_computed_tokens=[0]
    )
    stores.note(output(scheduled_cached_reqs=cached))
    assert list(stores.logs) == [4] and len(stores.logs[4]) == 0


def test_a_snapshot_on_the_page_of_one_that_is_given_up() -> None:
    """A small pool hands the least recently used snapshot's pages to the next one, in one step."""
    stores = Stores(shape_of())
    stores.note(output(scheduled_new_reqs=[new("a", 1)]))
    mark(stores.logs[1], [10])
    stores.note(output(kv_cache_block_copies=[copy(1, 5)]))
    mark(stores.logs[1], [11])
    stores.note(output(kv_cache_block_copies=[copy(1, 5)], dropped_snapshots=(5,)))
    assert numbers(stores.logs[5]) == [10, 11]
    # A request starts from it in the step that gives it up.
    stores.note(
        output(
            kv_cache_block_copies=[copy(5, 7)],
            scheduled_new_reqs=[new("b", 7, 64)],
            dropped_snapshots=(5,),
        )
    )
    assert numbers(stores.logs[7]) == [10, 11] and set(stores.logs) == {1, 7}
