# SPDX-License-Identifier: Apache-2.0
"""Sink and window caches against the oracle's simulation."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.policies import WindowSim
from vllm_cascade.policies import resolve


@settings(max_examples=100, deadline=None)
@given(
    sinks=st.integers(0, 5),
    budget=st.integers(1, 20),
    strides=st.lists(st.integers(1, 50), min_size=1, max_size=10),
)
def test_keep_and_victims(sinks: int, budget: int, strides: list[int]) -> None:
    name = "sink" if sinks else "window"
    policy = resolve({"name": name, "num_sinks": sinks, "budget": budget})
    sim = WindowSim(sinks, budget)
    kept: list[int] = []
    t = 0
    for length in strides:
        tokens = kept + list(range(t, t + length))
        mask = policy.keep(torch.zeros(1, len(tokens)), policy.plan(t, length))
        kept = [token for token, keep in zip(tokens, mask[0].tolist(), strict=True) if keep]
        for token in range(t, t + length):
            before = sim.tokens()
            lo, hi = (int(v[0]) for v in policy.victims(np.asarray([token])))
            lost = sim.insert(token, lambda _: 0.0)
            expected = (
                range(0) if lost is None else range(before.index(lost), before.index(lost) + 1)
            )
            assert list(range(lo, hi)) == list(expected)
        t += length
        assert kept == sim.tokens()
        assert policy.count(t) == len(kept) == policy.peak(t)


def test_they_decide_without_scores() -> None:
    assert not resolve({"name": "sink"}).uses_scores
    assert not resolve({"name": "window"}).uses_scores
    assert resolve({"name": "cascade"}).uses_scores
