# SPDX-License-Identifier: Apache-2.0
"""Sink and window caches against the oracle's simulation."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.policies import WindowSim
from tests.policies.literal import rules_of
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled


@settings(max_examples=100, deadline=None)
@given(
    sinks=st.integers(0, 5),
    budget=st.integers(1, 20),
    strides=st.lists(st.integers(1, 50), min_size=1, max_size=10),
)
def test_plans_and_rules(sinks: int, budget: int, strides: list[int]) -> None:
    name = "sink" if sinks else "window"
    schedule = compiled(resolve({"name": name, "num_sinks": sinks, "budget": budget}))
    sim = WindowSim(sinks, budget)
    kept: list[int] = []
    t = 0
    for length in strides:
        tokens = kept + list(range(t, t + length))
        mask = schedule.survivors(torch.zeros(1, len(tokens)), schedule.plan(t, length))
        kept = [token for token, keep in zip(tokens, mask[0].tolist(), strict=True) if keep]
        for token in range(t, t + length):
            before = sim.tokens()
            lost = sim.insert(token, lambda _: 0.0)
            ranges = [(rule.lo, rule.hi) for rule in rules_of(schedule, token)]
            rank = None if lost is None else before.index(lost)
            assert ranges == ([] if rank is None else [(rank, rank + 1)])
        t += length
        assert kept == sim.tokens()
        assert schedule.count_at(t) == len(kept) == schedule.peak_at(t)


def test_they_decide_without_scores() -> None:
    assert resolve({"name": "sink"}).scoring.source == "none"
    assert resolve({"name": "window"}).scoring.source == "none"
    assert not resolve({"name": "sink"}).uses_attention
    assert resolve({"name": "cascade"}).uses_attention
