# SPDX-License-Identifier: Apache-2.0
"""Policies without a model, driven by given probabilities, against the oracle's simulations."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.oracle.settings import make_sim, score_rule
from tests.policies.cases import LiteralScores, raw_settings, raw_unit_settings
from vllm_cascade.policies.beehive import Beehive
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.simulate import simulate

TOKENS = 90


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_with_probabilities_it_keeps_what_the_oracle_keeps(name: str, data: st.DataObject) -> None:
    """Scores added up in fp64, token by token, as the paper of each policy has them."""
    raw = data.draw(st.one_of(raw_settings(name), raw_unit_settings(name)))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    by_text = raw.get("importance") == "tfidf" or name == "random"
    probs = rng.random(TOKENS if by_text else (TOKENS, TOKENS)).astype(np.float32)
    sim = make_sim(raw)
    scores = LiteralScores(sim, score_rule(raw), probs)
    for t, step in enumerate(simulate(resolve(raw), TOKENS, probs)):
        scores.see(t)
        sim.insert(t, scores)
        sim.end_stride(scores)
        assume(sim.closest_contest > 1e-5)  # else fp32 may decide otherwise than fp64
        assert step.t == t + 1 and step.kept == sim.tokens()
        assert len(step.region) == len(step.kept)


def test_steps_between_are_left_out() -> None:
    policy = resolve({"name": "sink", "budget": 8})
    every = [step for step in simulate(policy, 100) if step.t % 7 == 0]
    assert [step.t for step in every] == list(range(7, 101, 7))
    assert list(simulate(policy, 100, every=7)) == every


def test_a_trace_looks_regions_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beehive's follow from a walk over thousands of tokens, which takes longer than a step."""
    walks: list[Beehive] = []
    walk = Beehive._walk
    monkeypatch.setattr(Beehive, "_walk", lambda policy: walks.append(policy) or walk(policy))
    policy = resolve({"name": "beehive", "budget": 77})
    assert {name for step in simulate(policy, 300) for name in step.region} >= {"old", "new"}
    assert 1 <= len(walks) <= 3, "settings are checked, compiled and looked up"


@pytest.mark.parametrize(
    ("raw", "shape", "right"),
    [
        ({"name": "cascade", "budget": 32}, (5, 5), True),
        ({"name": "cascade", "budget": 32}, (6, 7), True),
        ({"name": "cascade", "budget": 32}, (5,), False),
        ({"name": "cascade", "budget": 32}, (5, 4), False),
        ({"name": "cascade", "budget": 32}, (2, 5, 5), False),
        ({"name": "dgc", "budget": 32}, (5,), True),
        ({"name": "dgc", "budget": 32}, (4,), False),
        ({"name": "dgc", "budget": 32}, (5, 5), False),
        ({"name": "dgc", "budget": 32, "importance": "attention"}, (5, 5), True),
    ],
)
def test_shapes_of_scores(raw: dict[str, Any], shape: tuple[int, ...], right: bool) -> None:
    if right:
        assert len(list(simulate(resolve(raw), 5, np.zeros(shape)))) == 5
        return
    axes = "T" if raw["name"] == "dgc" else "T, T"
    with pytest.raises(ValueError, match=rf"an array \[{axes}\] with T >= 5 tokens, not \("):
        simulate(resolve(raw), 5, np.zeros(shape))


@pytest.mark.parametrize(
    ("tie", "kept"),
    [
        ("resident", [0, 13, 17, 21, 25, 29, 31, 33, 35, 37, 38, 39, 40]),
        ("incoming", [0, 16, 20, 24, 28, 30, 32, 34, 36, 37, 38, 39, 40]),
    ],
)
def test_equal_scores(tie: str, kept: list[int]) -> None:
    """The cascade of docs/ALGORITHMS.md, "Cascade", after token 40, derived by hand there."""
    raw = {"name": "cascade", "budget": 12, "num_sinks": 1, "num_subcaches": 3, "tie": tie}
    policy = resolve({**raw, "eager_fill": False, "prefill_stride": 1})
    *_, last = simulate(policy, 41)
    assert last.kept == kept
