# SPDX-License-Identifier: Apache-2.0
"""Every policy, with and without ``overflow``, against its simulation: kept tokens and counts."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.oracle.settings import make_sim
from tests.oracle.test_oracle_policies import LAZY as LAZY_PERIODS
from vllm_cascade.policies import POLICIES, Policy, resolve

sizes = st.integers(1, 12)


@st.composite
def raw_settings(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Random settings that are valid for a policy, every size written out."""
    raw: dict[str, Any] = {"name": name, "num_sinks": draw(st.integers(0, 4))}
    raw["overflow"] = draw(st.sampled_from([1, 1, 2, 3, 7, 20]))
    raw["budget"] = draw(st.integers(2, 40))
    if name == "window":
        raw["num_sinks"] = 0
    if name == "cascade":
        num, base = draw(st.integers(1, 3)), draw(st.integers(2, 3))
        raw |= {"num_subcaches": num, "cascade_base": base, "eager_fill": draw(st.booleans())}
        raw["budget"] = num * base ** (num - 1) * draw(st.integers(1, 4))
        raw["tie"] = draw(st.sampled_from(["incoming", "resident"]))
    if name == "lazy":
        raw |= {"slack": draw(st.integers(0, 25)), "max_drop": draw(st.integers(0, 25))}
    if name == "h2o":
        raw |= {"window": draw(st.integers(1, raw["budget"])), "normalise": draw(st.booleans())}
    if name == "dgc":
        raw |= {"importance": draw(st.sampled_from(["tfidf", "attention", "cluster"]))}
        raw |= {"global_size": draw(st.integers(1, raw["budget"] - 1))}
        raw |= {"tie": draw(st.sampled_from(["incoming", "resident"]))}
    if name == "beehive":
        raw |= {"window": draw(sizes), "stride": draw(st.integers(3, 8)), "threshold": draw(sizes)}
        raw["threshold_counts"] = draw(st.sampled_from(["middle", "new"]))
        raw["budget"] = 60
    return raw


def literal_scores(rng: np.random.Generator, num: int, values: int) -> list[float]:
    """Few different values make ties, many make every token a possible loser."""
    return rng.integers(0, values, num).astype(float).tolist()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_strides_keep_what_the_simulation_keeps(name: str, data: st.DataObject) -> None:
    raw = data.draw(raw_settings(name))
    policy = resolve(raw)
    decode = st.integers(20, 120).map(lambda num: [1] * num)
    strides = data.draw(st.one_of(st.lists(st.integers(1, 45), min_size=1, max_size=12), decode))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = literal_scores(rng, sum(strides), data.draw(st.sampled_from([4, 1000])))
    sim = make_sim(raw)
    kept: list[int] = []
    t = 0
    for length in strides:
        line = kept + list(range(t, t + length))
        end = t + length
        kept = survivors(policy, t, length, line, scores)

        def compared(token: int, end: int = end, sim: Any = sim) -> float:
            return scores[token] / (end - token if sim.normalise else 1)

        for token in range(t, end):
            sim.insert(token, compared)
        t = end
        assert kept == sim.tokens()
        assert len(kept) == policy.count(t) == len(policy.regions(t))
        inserted = int(policy.inserted(np.asarray(t)))
        assert policy.regions(t).count("waiting") == t - inserted
        sinks = [i for i, name in zip(kept, policy.regions(t), strict=True) if name == "sink"]
        assert sinks == list(range(min(inserted, policy.num_sinks)))


def survivors(
    policy: Policy, t: int, length: int, line: list[int], scores: list[float]
) -> list[int]:
    """As the engine decides: single tokens by ``victims`` where possible, else by ``keep``."""
    values = torch.tensor([[scores[token] for token in line]] * 2)
    if policy.needs_age:
        age = torch.tensor([[t + length - token for token in line]])
        values = policy.comparable(values, age)
    if length == 1 and not policy.batches(np.asarray(t)):
        lo, hi = (int(bound) for bound in policy.victims(np.asarray(t)))
        if lo < hi:
            part = values[0, lo:hi].tolist()
            tied = [i for i, value in enumerate(part) if value == min(part)]
            line = line.copy()
            del line[lo + tied[0 if policy.tie == "incoming" else -1]]
        return line
    mask = policy.keep(values, policy.plan(t, length))
    assert torch.equal(mask[0], mask[1])
    return [token for token, keep in zip(line, mask[0].tolist(), strict=True) if keep]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_counts_for_ten_thousand_tokens(name: str, data: st.DataObject) -> None:
    """Far into the period: counts, peaks, and when a single token needs a batch."""
    raw = data.draw(raw_settings(name))
    policy, sim = resolve(raw), make_sim(raw)
    counts = []
    for token in range(10_000):
        sim.insert(token, lambda token: float(token % 7))
        counts.append(len(sim.tokens()))
    t = np.arange(1, 10_001)
    assert policy.counts(t).tolist() == counts
    assert policy.peaks(t).tolist() == np.maximum.accumulate(counts).tolist()
    assert [policy.peak(n) for n in (0, *range(1, 10_001, 17))] == [
        0,
        *np.maximum.accumulate(counts)[::17].tolist(),
    ]
    assert policy.peak(10**9) == max(counts) <= policy.capacity
    dropped = 1 - np.diff(counts)
    assert (policy.batches(t[:-1]) | (dropped <= 1)).all()


@pytest.mark.parametrize("sizes", LAZY_PERIODS)
def test_lazy_periods(sizes: tuple[int, int, int]) -> None:
    """docs/INTERNALS.md, "Lazy pruning", C = 2048: (R, slack, max_drop) -> (period, left)."""
    overflow, slack, drop = sizes
    policy = resolve(
        {"name": "lazy", "budget": 2044, "overflow": overflow, "slack": slack, "max_drop": drop}
    )
    first = 2048 + overflow  # the token that fills the slack is the one that prunes
    period, after = LAZY_PERIODS[sizes]
    assert policy.tables().period == period
    assert policy.count(first) == policy.count(first + 10 * period) == after
    assert policy.peak(10**6) == 2048 + overflow - 1 == policy.capacity


def test_lazy_staging_after_a_long_append() -> None:
    """Where slack and max_drop do act (docs/INTERNALS.md, "Lazy pruning"): 2090 -> 2058."""
    policy = resolve({"name": "lazy", "budget": 2044, "overflow": 32, "slack": 16, "max_drop": 32})
    assert [policy.pruned(length) for length in (2079, 2080, 2090, 4096)] == [
        2079,
        2048,
        2058,
        2064,
    ]


def test_lazy_says_what_is_inert() -> None:
    def remarks(**sizes: int) -> str:
        return " ".join(resolve({"name": "lazy", "budget": 64, **sizes}).remarks())

    assert remarks(overflow=32, slack=24, max_drop=8) == ""
    assert remarks() == "", "the defaults must do something"
    assert "slack 16 and max_drop 32 have no effect" in remarks(slack=16, max_drop=32)
    assert "slack 16 has no effect without max_drop" in remarks(slack=16, max_drop=0)
    assert "max_drop 8 has no effect without slack" in remarks(slack=0, max_drop=8)
    assert "more than max_drop 8" in remarks(slack=16, max_drop=8)


def test_beehive_counts() -> None:
    small = {"name": "beehive", "budget": 6, "window": 2, "threshold": 4, "stride": 3}
    policy = resolve({**small, "num_sinks": 1})
    assert [policy.count(t) for t in range(1, 15)] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
    policy = resolve({"name": "beehive", "budget": 560, "window": 160, "threshold": 400})
    evicts = [t for t in range(1, 2500) if policy.count(t) <= policy.count(t - 1)]
    assert evicts[:5] == [565, 885, 1195, 1503, 1811]
    assert [policy.count(t) - 164 for t in evicts[:4]] == [81, 91, 93, 93]
    assert policy.tables().period == 308


def test_beehive_defaults_follow_the_theorem() -> None:
    """T / w = (s^2 + 1) / (s + 1) for odd s, s - 1 for even s."""
    assert resolve({"name": "beehive", "budget": 1600}).derived() == {
        "window": 300,
        "threshold": 1300,
    }
    even = resolve({"name": "beehive", "budget": 1000, "stride": 4})
    assert even.derived() == {"window": 250, "threshold": 750}
    for budget in range(6, 300):
        for counts in ("middle", "new"):
            policy = resolve({"name": "beehive", "budget": budget, "threshold_counts": counts})
            assert policy.peak(10**6) <= policy.base_capacity


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"name": "beehive", "stride": 2}, "would never thin old tokens"),
        ({"name": "beehive", "budget": 9, "window": 9}, "leaves nothing of the budget"),
        (
            {"name": "beehive", "budget": 20, "window": 9, "threshold": 12},
            "window 9 \\+ threshold 12 is more than the budget 20; .* at most 11",
        ),
        (
            {
                "name": "beehive",
                "budget": 20,
                "window": 8,
                "threshold": 12,
                "threshold_counts": "new",
            },
            "counting new tokens needs up to",
        ),
        ({"name": "h2o", "budget": 8, "window": 9}, "window 9 is larger than the budget 8"),
        ({"name": "lazy", "overflow": 0}, "overflow = 0"),
        ({"name": "lazy", "slack": -1}, "slack = -1"),
        ({"name": "sink", "overflow": 0}, "overflow = 0"),
    ],
)
def test_impossible_sizes(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve({"budget": 64, **raw})


def test_settings_are_checked_again_when_a_policy_travels() -> None:
    with pytest.raises(ValidationError):
        POLICIES["beehive"].model_validate({"budget": 10, "stride": 1})
