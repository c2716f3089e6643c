# SPDX-License-Identifier: Apache-2.0
"""The drawn numbers: as defined, uniform, independent between layers and head sets."""

import numpy as np
import pytest

from tests.oracle.draws import draw, scrambled
from vllm_cascade.policies.random import BITS, drawn, mixed, salts_of
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.simulate import simulate

TOKENS = 20_000


def numbers(seed: int, layer: str, head_set: int) -> np.ndarray:
    """The numbers of the first tokens in one layer and head set, from the two parts."""
    salt = salts_of(layer, head_set, 1).view(np.uint32)
    return mixed(drawn(seed, 0, TOKENS).astype(np.uint32) ^ salt) >> np.uint32(16)


def test_numbers_are_those_of_the_definition() -> None:
    for seed, layer, head_set in ((0, "a", 0), (7, "model.layers.3.self_attn.attn", 5)):
        expected = [draw(seed, layer, head_set, token) for token in range(50)]
        assert numbers(seed, layer, head_set)[:50].tolist() == expected
    assert mixed(np.arange(9)).tolist() == [scrambled(x) for x in range(9)]


def test_a_part_of_a_stream_has_the_same_numbers() -> None:
    """Whatever steps a stream is read in; tokens before its start have none."""
    whole = drawn(3, 0, 100)
    assert np.array_equal(drawn(3, 40, 60), whole[40:60])
    assert drawn(3, -5, 2).tolist() == [0.0] * 5 + whole[:2].tolist()
    assert whole.max() < 1 << BITS and len(set(whole.tolist())) == 100


@pytest.mark.parametrize(
    ("seed", "layer", "head_set"),
    [(0, "b", 0), (0, "a", 1), (1, "a", 0)],
    ids=["layer", "set", "seed"],
)
def test_another_layer_set_or_seed_has_independent_numbers(
    seed: int, layer: str, head_set: int
) -> None:
    mine, theirs = numbers(0, "a", 0), numbers(seed, layer, head_set)
    assert abs(np.corrcoef(mine, theirs)[0, 1]) < 4 / TOKENS**0.5
    for values in (mine, theirs):
        counts = np.histogram(values, bins=16, range=(0, 1 << 16))[0]
        assert ((counts - TOKENS / 16) ** 2 / (TOKENS / 16)).sum() < 45  # chi-square, p = 1e-4


def test_it_keeps_a_uniform_sample_of_what_left_the_window() -> None:
    """Over many seeds every old token is kept equally often."""
    seen, budget, window, sinks, seeds = 220, 40, 10, 2, 400
    kept = np.zeros(seen)
    for seed in range(seeds):
        raw = {"name": "random", "budget": budget, "window": window, "num_sinks": sinks}
        *_, last = simulate(resolve({**raw, "seed": seed}), seen, every=seen)
        kept[last.kept] += 1
    assert kept[:sinks].tolist() == [seeds] * sinks
    assert kept[-window:].tolist() == [seeds] * window
    share = (budget - window) / (seen - window - sinks)
    old, spread = kept[sinks:-window] / seeds, (share * (1 - share) / seeds) ** 0.5
    assert abs(old.mean() - share) < 1e-9 and np.abs(old - share).max() < 4.5 * spread


@pytest.mark.parametrize("num", [1, 4, 5, 13])
def test_a_sample_of_units_is_a_reservoir(num: int) -> None:
    """Half of the budget is the window, rounded down to units; all numbers of a unit count."""
    unit, seen, sinks = 8, 150, 1
    window = max(num // 2, 1)
    for seed in range(5):
        raw = {"name": "random", "budget": num * unit, "unit": unit, "seed": seed}
        *_, last = simulate(resolve(raw), seen * unit, every=seen * unit)
        worth = drawn(seed, 0, seen * unit).reshape(seen, unit).sum(1)
        older = np.arange(sinks, seen - window)
        sample = older[np.argsort(worth[older])[::-1][: num - window]]
        units = [*range(sinks), *sorted(sample.tolist()), *range(seen - window, seen)]
        assert last.kept == [u * unit + i for u in units for i in range(unit)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"seed": -1}, "seed"), ({"seed": 1 << 32}, "seed"), ({"window": 33}, "at most 32")],
)
def test_settings_that_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        resolve({"name": "random", "budget": 32, **settings})
