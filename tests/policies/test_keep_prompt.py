# SPDX-License-Identifier: Apache-2.0
"""``keep_prompt``: the start of a prompt stays, and the policy applies to the stream behind it.

The reference is a literal simulation without sinks that never sees the kept tokens.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.oracle.settings import make_sim, score_rule
from tests.policies.cases import (
    LiteralScores,
    literal_scores,
    raw_settings,
    raw_unit_settings,
)
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.schedule import Schedule, compared, compiled
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.simulate import simulate

TOKENS = 110


def draw_kept(draw: Any, raw: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Settings with ``keep_prompt``, a prompt's length, and how many first tokens must stay."""
    unit = raw.get("unit", 1)
    most = unit * draw(st.integers(1, 40 // unit))
    prompt = draw(st.integers(1, 60))
    whole = -(-min(prompt, most) // unit) * unit
    return {**raw, "keep_prompt": most}, prompt, max(whole, raw["num_sinks"])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_token_by_token(name: str, data: st.DataObject) -> None:
    raw = data.draw(st.one_of(raw_settings(name), raw_unit_settings(name)))
    kept, prompt, first = draw_kept(data.draw, raw)
    engine = compiled(resolve(kept))
    own = PerRequest(engine).schedule(None, prompt)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    by_text = raw.get("importance") == "tfidf" or name == "random"
    probs = rng.random(TOKENS if by_text else (TOKENS, TOKENS)).astype(np.float32)
    sim = make_sim({**raw, "num_sinks": 0})
    scores = LiteralScores(sim, score_rule(raw), probs)
    peak = 0
    for t, step in enumerate(simulate(own.policy, TOKENS, probs)):
        scores.see(t)
        if t >= first:
            sim.insert(t, scores)
            sim.end_stride(scores)
        assume(sim.closest_contest > 1e-5)  # else fp32 may decide otherwise than fp64
        assert step.kept == [*range(min(t + 1, first)), *sim.tokens()]
        count = len(step.kept)
        peak = max(peak, count)
        assert own.count_at(t + 1) == own.counts(np.asarray(t + 1)) == count
        assert own.positions(np.asarray(t + 1)) == count == len(step.region)
        assert peak <= own.peak_at(t + 1) <= engine.peak_at(t + 1) <= engine.policy.capacity
        assert count < engine.policy.max_position
    assert own.peak_at(10**9) <= own.policy.capacity <= engine.policy.capacity


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_in_strides(name: str, data: st.DataObject) -> None:
    raw = data.draw(raw_settings(name))
    kept, prompt, first = draw_kept(data.draw, raw)
    own = PerRequest(compiled(resolve(kept))).schedule(None, prompt)
    strides = data.draw(st.lists(st.integers(1, 45), min_size=1, max_size=10))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = literal_scores(rng, sum(strides), data.draw(st.sampled_from([4, 1000])))
    sim, line, t = make_sim({**raw, "num_sinks": 0}), list[int](), 0
    for length in strides:
        end = t + length

        def worth(token: int, end: int = end) -> float:
            return scores[token] / (end - token if sim.normalise else 1)

        line = survivors(own, t, length, [*line, *range(t, end)], scores)
        for token in range(max(t, first), end):
            sim.insert(token, worth)
        t = end
        assert line == [*range(min(t, first)), *sim.tokens()]


def survivors(
    schedule: Schedule, t: int, length: int, line: list[int], scores: list[float]
) -> list[int]:
    tokens = torch.tensor(line)
    values = torch.tensor([[scores[i] for i in line]])
    age = (t + length - tokens)[None] if schedule.scoring.per_age else None
    mask = schedule.survivors(compared(schedule.scoring, values, age), schedule.plan(t, length))
    return tokens[mask[0]].tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_kept_by_default(name: str) -> None:
    """Prompts of any length share the engine's schedule, and its rules are those without it."""
    raw: dict[str, Any] = {"name": name, "budget": 64, "prefill_stride": 16}
    engine = compiled(resolve(raw))
    assert engine.policy.keep_prompt == 0 and engine.policy.in_units is engine.policy
    requests = PerRequest(engine)
    assert all(requests.schedule(None, prompt) is engine for prompt in (None, 0, 1, 9, 10**6))


SINK = {"name": "sink", "budget": 64, "prefill_stride": 16}


def test_schedules_are_shared() -> None:
    """By all prompts that are longer, and by all that fill the same units."""
    requests = PerRequest(compiled(resolve({**SINK, "keep_prompt": 40})))
    assert requests.schedule(None, 40) is requests.schedule(None, 4000) is requests.engine
    short = requests.schedule(None, 39)
    assert short is requests.schedule({}, 39) is not requests.engine
    assert short.policy.keep_prompt == 39 and short.units.num_sinks == 39
    assert requests.schedule(None, 2).units.num_sinks == 4, "the sinks stay, too"
    units = PerRequest(compiled(resolve({**SINK, "unit": 8, "keep_prompt": 40})))
    assert units.schedule(None, 17) is units.schedule(None, 24) is not units.schedule(None, 25)
    assert units.schedule(None, 33) is units.engine


def test_a_requests_own_value() -> None:
    requests = PerRequest(compiled(resolve({**SINK, "keep_prompt": 40})))

    def kept(prompt: int | None = None, **asked: Any) -> int:
        return requests.schedule(asked, prompt).units.num_sinks

    assert kept(kv_keep_prompt=40) == 40 and kept(kv_keep_prompt=10) == 10
    assert kept(7, kv_keep_prompt=10) == 7 and kept(7, kv_keep_prompt=0) == 4
    assert kept(20, kv_policy="window") == 20 and kept(20, kv_policy="lazy", kv_budget=20) == 20
    assert kept(20, kv_policy="window", kv_keep_prompt=0) == 0
    message = "kv_keep_prompt 41 is more than .* --kv-keep-prompt 40; set it to at most 40"
    with pytest.raises(KVPolicyError, match=message):
        kept(kv_keep_prompt=41)
    with pytest.raises(KVPolicyError, match="kv_keep_prompt = -1: Input should be greater"):
        kept(kv_keep_prompt=-1)
    requests = PerRequest(compiled(resolve({**SINK, "unit": 8, "keep_prompt": 40})))
    with pytest.raises(KVPolicyError, match=r"kv_keep_prompt 20 is not a whole .*16 or 24"):
        kept(kv_keep_prompt=20)


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(KVPolicyError, match=r"keep_prompt 20 is not a whole .*set it to 16 or 24"):
        resolve({**SINK, "unit": 8, "keep_prompt": 20})
    message = r"budget 64 is too large: keep_prompt 50 \+ budget 64 .* = 130 positions.*at most 54"
    with pytest.raises(KVPolicyError, match=message):
        resolve({**SINK, "keep_prompt": 50}, max_position=120)
    with pytest.raises(KVPolicyError, match="lower keep_prompt"):
        resolve({**SINK, "keep_prompt": 500}, max_position=120)
    default = resolve({"name": "sink", "keep_prompt": 50, "prefill_stride": 30}, max_position=120)
    assert default.budget == 40


def test_states_are_shared_until_one_of_two_evicts() -> None:
    """A snapshot of a prompt serves prompts of other lengths as long as all tokens are there."""
    requests = PerRequest(compiled(resolve({**SINK, "keep_prompt": 40})))
    longest, short = requests.engine, requests.schedule(None, 10)
    for t in (1, 10, 73, 74):
        assert longest.history(t) == short.history(t)
    assert longest.history(104) == short.history(74) != short.history(75)
    assert longest.history(105) != longest.history(104)
    assert len({longest.history(105), short.history(105), longest.history(1)}) == 3
    other = requests.schedule({"kv_budget": 32}, 10)
    assert other.history(1) != short.history(1)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_number_of_rules_is_that_of_any_length(name: str, data: st.DataObject) -> None:
    """Tables of a fixed size rely on it (``attention/cuda/rule_room.py``)."""
    raw = data.draw(st.one_of(raw_settings(name), raw_unit_settings(name)))
    recall = data.draw(st.integers(0, 9)) if "unit" in raw else 0
    kept, prompt, _ = draw_kept(data.draw, {**raw, "recall": recall})
    engine = compiled(resolve(kept))
    own = PerRequest(engine).schedule(None, prompt)
    assert len(own.further) == len(engine.further)
