# SPDX-License-Identifier: Apache-2.0
"""The drawn numbers: as defined, uniform, independent between layers and head sets."""

import numpy as np
import pytest
import torch

from tests.oracle.draws import bits_of, draw, scrambled
from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.policies.random import BITS, drawn, mixed, salts_of
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.simulate import simulate

TOKENS = 20_000


def numbers(
    seed: int, layer: str, head_set: int, unit: int = 1, num_tokens: int = TOKENS
) -> np.ndarray:
    """fp32 ``[num_tokens]``: the first tokens' numbers in one layer and head set."""
    config = LayerConfig(
        num_kv_heads=1,
        head_size=1,
        num_sets=1,
        scale=1.0,
        softcap=0.0,
        slopes=None,
        rotation=None,
        is_neox=True,
        uses_attention=False,
        reduction="mean",
        salts=torch.from_numpy(salts_of(layer, head_set, 1)),
    )
    given = torch.from_numpy(drawn(seed, 0, num_tokens))
    return config.own_scores(given[None], unit)[0].numpy()


@pytest.mark.parametrize("unit", [1, 2, 3, 4, 16, 48, 128])
def test_numbers_are_those_of_the_definition(unit: int) -> None:
    for seed, layer, head_set in ((0, "a", 0), (7, "model.layers.3.self_attn.attn", 5)):
        expected = [draw(seed, layer, head_set, token, unit) for token in range(50)]
        assert numbers(seed, layer, head_set, unit)[:50].tolist() == expected
    assert mixed(np.arange(9)).tolist() == [scrambled(x) for x in range(9)]


@pytest.mark.parametrize(("unit", "bits"), [(1, 24), (2, 23), (3, 22), (16, 20), (128, 17)])
def test_sums_of_units_are_exact(unit: int, bits: int) -> None:
    """With as many bits as allow it: the sum of the largest numbers needs one more than 23."""
    assert bits_of(unit) == bits and 1 << 23 < unit * ((1 << bits) - 1) < 1 << 24
    own = numbers(3, "a", 0, unit)
    assert (1 << bits) * 0.99 < own.max() < 1 << bits
    units = own[: TOKENS // unit * unit].reshape(-1, unit)
    total = np.zeros(len(units), np.float32)
    for column in units.T:  # one token after the other, as layers add them
        total += column
    assert total.tolist() == units.astype(np.int64).sum(1).tolist()


def test_a_long_stream_is_sampled_evenly() -> None:
    """If too many tokens had the largest number, ties would keep the newest ones only."""
    seen, size, salts = 4_000_000, 32, 20
    newer = 0
    for head_set in range(salts):
        own = torch.from_numpy(numbers(0, "a", head_set, num_tokens=seen))
        # Of equal numbers the newer token stays, as with ``tie: incoming``.
        best = (own.long() * seen + torch.arange(seen)).topk(size).values % seen
        newer += int((best >= seen // 2).sum())
    share = newer / (salts * size)
    assert abs(share - 0.5) < 4 * (0.25 / (salts * size)) ** 0.5


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
        counts = np.histogram(values, bins=16, range=(0, 1 << 24))[0]
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
