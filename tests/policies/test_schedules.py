# SPDX-License-Identifier: Apache-2.0
"""Every policy, with and without ``overflow``, against its simulation: kept tokens and counts."""

import copy
import pickle
import re
import subprocess
import sys
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.conftest import ROOT
from tests.oracle.dgc import ClusterSim, DGCSim
from tests.oracle.policies import BeehiveSim, CascadeSim, H2OSim, LazySim, OverflowSim, WindowSim
from tests.oracle.settings import PerToken, make_sim
from tests.oracle.test_oracle_policies import LAZY as LAZY_PERIODS
from tests.oracle.units import UnitSim
from tests.policies.cases import literal_scores, raw_settings, raw_unit_settings
from tests.policies.literal import rules_of
from vllm_cascade.policies import schedule as schedules
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.rules import Scoring
from vllm_cascade.policies.schedule import Arithmetic, Schedule, compared, compiled


def regions_of(sim: Any) -> list[str]:
    """What part of the cache each of a simulation's tokens is in."""
    if isinstance(sim, PerToken):
        return regions_of(sim.inner)
    if isinstance(sim, UnitSim):
        whole = [name for name in regions_of(sim.inner) for _ in range(sim.unit)]
        return whole + ["filling"] * len(sim.filling)
    if isinstance(sim, OverflowSim):
        return regions_of(sim.inner) + ["waiting"] * len(sim.pending)
    waiting, parts = 0, {"sink": len(sim.sinks)}
    if isinstance(sim, CascadeSim):
        parts |= {f"sub{i}": len(part) for i, part in reversed([*enumerate(sim.subcaches)])}
    elif isinstance(sim, DGCSim | ClusterSim):
        middle = sim.centres if isinstance(sim, ClusterSim) else sim.global_part
        parts |= {"global": len(middle), "recent": len(sim.recent)}
    elif isinstance(sim, WindowSim | LazySim):
        parts["window"] = len(sim.tokens()) - len(sim.sinks)
    else:
        if isinstance(sim, H2OSim):  # which batches itself
            waiting = min((sim.seen - sim.num_sinks - sim.budget) % sim.overflow, len(sim.cached))
        rest = len(sim.cached) - waiting
        recent = min(sim.window, rest)
        if isinstance(sim, BeehiveSim):
            parts |= {"old": sim.num_old, "new": rest - recent - sim.num_old, "window": recent}
        else:
            parts |= {"older": rest - recent, "window": recent}
    return [name for name, num in (parts | {"waiting": waiting}).items() for _ in range(num)]


def check_regions(schedule: Schedule, t: int, sim: Any) -> None:
    inserted = int(schedule.inserted(np.asarray(t)))
    expected = regions_of(sim)
    if inserted < schedule.policy.num_sinks:  # to the simulation a sink never waits
        expected = ["sink"] * inserted + ["waiting"] * (t - inserted)
    assert schedule.regions(t) == expected
    assert expected.count("waiting") == t - inserted


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_strides_keep_what_the_simulation_keeps(name: str, data: st.DataObject) -> None:
    """By the plans of strides, single tokens among them; each head set has scores of its own."""
    raw = data.draw(raw_settings(name))
    schedule = compiled(resolve(raw))
    decode = st.integers(20, 120).map(lambda num: [1] * num)
    strides = data.draw(st.one_of(st.lists(st.integers(1, 45), min_size=1, max_size=12), decode))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    num_sets, different = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([4, 1000]))
    scores = [literal_scores(rng, sum(strides), different) for _ in range(num_sets)]
    sims = [make_sim(raw) for _ in range(num_sets)]
    kept: list[list[int]] = [[]] * num_sets
    t = 0
    for length in strides:
        end = t + length
        lines = [own + list(range(t, end)) for own in kept]
        kept = survivors(schedule, t, length, lines, scores)
        for sim, own in zip(sims, scores, strict=True):

            def compared(token: int, own: list[float] = own, end: int = end) -> float:
                return own[token] / (end - token if sims[0].normalise else 1)

            for token in range(t, end):
                sim.insert(token, compared)
        t = end
        assert kept == [sim.tokens() for sim in sims]
        assert {len(own) for own in kept} == {schedule.count_at(t)}
        check_regions(schedule, t, sims[0])


def survivors(
    schedule: Schedule, t: int, length: int, lines: list[list[int]], scores: list[list[float]]
) -> list[list[int]]:
    """As the engine decides."""
    values = torch.tensor([[own[i] for i in line] for line, own in zip(lines, scores, strict=True)])
    age = t + length - torch.tensor(lines)
    values = compared(schedule.scoring, values, age if schedule.scoring.per_age else None)
    mask = schedule.survivors(values, schedule.plan(t, length))
    tokens = torch.tensor(lines)
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_counts_for_ten_thousand_tokens(name: str, data: st.DataObject) -> None:
    """Far into the period: counts, peaks, regions, and how many each token's rules delete."""
    raw = data.draw(raw_settings(name))
    schedule, sim = compiled(resolve(raw)), make_sim(raw)
    counts = []
    for token in range(10_000):
        sim.insert(token, lambda token: float(token % 7))
        counts.append(len(sim.tokens()))
        if token % 499 == 0:
            check_regions(schedule, token + 1, sim)
    t = np.arange(1, 10_001)
    peaks = np.maximum.accumulate(counts)
    assert schedule.counts(t).tolist() == counts
    assert schedule.counts(t.reshape(-1, 10)).tolist() == np.reshape(counts, (-1, 10)).tolist()
    assert schedule.peaks(t).tolist() == peaks.tolist()
    for n in (0, *range(1, 10_001, 17)):
        assert schedule.peak_at(n) == schedule.peaks(np.asarray(n)) == (peaks[n - 1] if n else 0)
        assert schedule.count_at(n) == schedule.counts(np.asarray(n)) == (counts[n - 1] if n else 0)
    assert schedule.peak_at(10**9) == max(counts) <= schedule.policy.capacity
    deleted = 1 - np.diff(counts, prepend=0)
    rules = [sum(rule.evicts for rule in rules_of(schedule, int(u))) for u in t - 1]
    assert rules == deleted.tolist()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_tables(name: str, data: st.DataObject) -> None:
    """What devices copy: rows, rules and where each row's begin."""
    schedule = compiled(resolve(data.draw(raw_settings(name))))
    rows = schedule.transient + schedule.period
    assert len(schedule.count) == len(schedule.peak) == len(schedule.leading) == rows
    assert {schedule.count.dtype, schedule.peak.dtype, schedule.first.dtype} == {np.dtype("i4")}
    assert schedule.rules.dtype == schedule.leading.dtype == np.dtype("i4")
    assert schedule.first.shape == (rows + 1,) and schedule.rules.shape == (schedule.first[-1], 4)
    t = np.arange(rows + 3 * schedule.period)
    expected = [*range(rows), *list(range(schedule.transient, rows)) * 3]
    assert schedule.rows(t).tolist() == expected
    assert schedule.counts(t + 1).tolist() == schedule.count[expected].tolist()
    assert schedule.count_at(schedule.transient) == schedule.count_at(rows), "a period's two ends"
    for row in range(rows):
        rules = [list(rule.numbers) for rule in rules_of(schedule, row)]
        *leading, begin, more = schedule.leading[row].tolist()
        assert leading == (rules[0] if rules else [0, 0, 0, 0])
        assert schedule.further[begin : begin + more].tolist() == rules[1:]
    firsts = int((np.diff(schedule.first) > 0).sum())
    assert schedule.further.shape == (len(schedule.rules) - firsts, 4)
    assert schedule.further.dtype == np.dtype("i4")


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_peaks_do_not_rise_in_the_rows_that_repeat(name: str, data: st.DataObject) -> None:
    """Devices read one row for all tokens a period apart. A kept prompt only shifts the rows."""
    raw = data.draw(st.one_of(raw_settings(name), raw_unit_settings(name)))
    unit = raw.get("unit", 1)
    raw["recall"] = data.draw(st.integers(0, 12)) if unit > 1 else 0
    kept = unit * data.draw(st.integers(5, 40))
    schedule = compiled(resolve(raw))
    repeating = schedule.peak[schedule.transient :]
    assert len(repeating) == schedule.period and (repeating == schedule.count.max()).all()
    longer = compiled(resolve({**raw, "keep_prompt": kept}))
    assert len(longer.further) == len(schedule.further) and longer.period == schedule.period


# --------------------------------------------------------------------- units of several tokens


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_strides_keep_the_units_that_the_simulation_keeps(
    name: str, data: st.DataObject
) -> None:
    """By the plans of strides that begin and end inside units; sums of scores decide."""
    raw = data.draw(raw_unit_settings(name))
    schedule, unit, sim = compiled(resolve(raw)), raw["unit"], make_sim(raw)
    decode = st.integers(20, 160).map(lambda num: [1] * num)
    strides = data.draw(st.one_of(st.lists(st.integers(1, 45), min_size=1, max_size=12), decode))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = literal_scores(rng, sum(strides), data.draw(st.sampled_from([4, 1000])))
    kept: list[int] = []  # units
    t = 0
    for length in strides:
        end = t + length
        line = kept + list(range(t // unit, end // unit))
        if end // unit > t // unit:
            values = [sum(scores[u * unit : (u + 1) * unit]) for u in line]
            first = torch.tensor([line]) * unit
            value = compared(schedule.scoring, torch.tensor([values]), end - first)
            kept = [
                u
                for u, stays in zip(
                    line, schedule.survivors(value, schedule.plan(t, length))[0], strict=True
                )
                if stays
            ]

        def worth(token: int, end: int = end) -> Fraction:
            age = end - token // unit * unit if sim.normalise else 1
            return Fraction(int(scores[token]), age)

        for token in range(t, end):
            sim.insert(token, worth)
        sim.end_stride(worth)
        t = end
        filling = list(range(t // unit * unit, t))
        assert [u * unit + i for u in kept for i in range(unit)] + filling == sim.tokens()
        assert schedule.count_at(t) == len(sim.tokens())
        inserted = int(schedule.inserted(np.asarray(t)))
        if inserted >= schedule.policy.num_sinks:  # to the simulation a sink never waits
            assert schedule.regions(t) == regions_of(sim)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_counts_of_units_for_thousands_of_tokens(name: str, data: st.DataObject) -> None:
    """Counts are those of the policy over units; a unit takes its slots with its first token."""
    raw = data.draw(raw_unit_settings(name))
    schedule, unit, sim = compiled(resolve(raw)), raw["unit"], make_sim(raw)
    over_units = make_sim(raw).inner
    counts, slots, num_units = [0], [0], [0]
    for token in range(4000):
        held = {cached // unit for cached in sim.tokens()} | {token // unit}
        slots.append(len(held) * unit)
        sim.insert(token, lambda _: 0.0)
        sim.end_stride(lambda _: 0.0)
        if (token + 1) % unit == 0:
            over_units.insert(token // unit, lambda _: 0.0)
            over_units.end_stride(lambda _: 0.0)
            num_units.append(len(over_units.tokens()))
        counts.append(len(sim.tokens()))
        assert counts[-1] == unit * num_units[-1] + (token + 1) % unit
    t = np.arange(4001)
    peaks = np.maximum.accumulate(slots)
    assert schedule.counts(t).tolist() == counts
    assert schedule.peaks(t).tolist() == peaks.tolist()
    assert schedule.peak_at(10**9) == peaks[-1] <= schedule.policy.capacity
    deleted = 1 - np.diff(counts)
    for n in range(0, 4001, 7):
        assert schedule.count_at(n) == counts[n] and schedule.peak_at(n) == peaks[n]
        assert len(schedule.regions(n)) == counts[n]
        last = n < 4000 and bool(schedule.completes(np.asarray(n)))
        rules = rules_of(schedule, n // unit) if last else ()
        assert n == 4000 or sum(rule.evicts for rule in rules) * unit == deleted[n]
    assert schedule.rows(t).tolist() == compiled(schedule.policy.in_units).rows(t // unit).tolist()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_attended_tokens_are_bounded_as_documented(name: str, data: st.DataObject) -> None:
    """The sum of docs/RECALL.md, for a token that is decoded: all that is cached before it."""
    row = re.search(r"\| attended tokens \| at most `(.+?)`", (ROOT / "docs/RECALL.md").read_text())
    assert row is not None
    raw = data.draw(st.one_of(raw_settings(name), raw_unit_settings(name)))
    unit = raw.get("unit", 1)
    raw["keep_prompt"] = unit * data.draw(st.integers(0, 12))
    raw["recall"] = data.draw(st.integers(0, 12)) if unit > 1 else 0
    policy = resolve(raw)
    most = eval(row[1], {"__builtins__": {"max": max}}, policy.model_dump())
    attended = compiled(policy).positions(np.arange(6000))
    assert attended.max() <= most
    if name != "beehive":  # which keeps fewer than its budget with some thresholds
        assert attended.max() == most, "no less would do"


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_recalled_units_for_thousands_of_tokens(name: str, data: st.DataObject) -> None:
    """Evicted units come back as soon as there are any; rules are about what stands behind them."""
    raw = {**data.draw(raw_unit_settings(name)), "recall": data.draw(st.integers(1, 12))}
    policy = resolve(raw)
    schedule, unit, sim = compiled(policy), raw["unit"], make_sim(raw)
    if unit == 1:
        return
    plain = compiled(resolve({**raw, "recall": 0}))
    sinks, most, behind = policy.num_sinks // unit, 0, 0
    for token in range(3000):
        gone = token // unit - len(sim.tokens()) // unit
        back = min(gone, raw["recall"])
        cached = len(sim.tokens()) + back * unit
        held = {cached // unit for cached in sim.tokens()} | {token // unit}
        now = np.asarray(token)
        assert schedule.evicted(now) == gone and schedule.recalled(now) == back
        assert schedule.counts(now) == len(sim.tokens()) and schedule.positions(now) == cached
        assert schedule.moved(now) == (gone > 0)
        assert token - cached >= behind, "a key would have to move forward with time"
        behind = token - cached
        assert schedule.peak_at(token) == schedule.peaks(now) >= most
        # The unit that a token opens has its slots beside the recalled ones of its stride.
        most = max(most, (len(held) + back) * unit)
        assert schedule.peak_at(token + 1) >= most
        row = int(schedule.rows(now))
        theirs = [list(rule.numbers) for rule in rules_of(plain, token // unit)]
        moved = [[lo + back, hi + back, *rest] for lo, hi, *rest in theirs]
        *leading, begin, more = schedule.leading[row].tolist()
        if schedule.completes(now):
            found = [leading, *schedule.further[begin : begin + more].tolist()]
            assert found == (moved or [[0, 0, 0, 0]])
            assert all(lo >= sinks + back for lo, *_ in moved)
        sim.insert(token, lambda _: 0.0)
        sim.end_stride(lambda _: 0.0)
    assert schedule.peak_at(10**9) <= policy.capacity
    assert back == raw["recall"], "a stream that long evicts enough"


@pytest.mark.parametrize(
    ("raw", "ways", "average"),
    [
        ({"name": "sink"}, [0, 1], [1.0, 0.0]),
        ({"name": "cascade", "ema_gamma": 0.75}, [0, 1], [0.75, 0.25]),
        ({"name": "cascade", "ema_gamma": 0.75, "tie": "resident"}, [0, 0], [0.75, 0.25]),
        ({"name": "h2o"}, [0, 1], [1.0, 1.0]),
        ({"name": "h2o", "normalise": True}, [1, 1], [1.0, 1.0]),
        ({"name": "beehive"}, [0, 0], [1.0, 1.0]),
        ({"name": "dgc"}, [0, 1], [1.0, 0.0]),
        ({"name": "dgc", "importance": "attention"}, [1, 1], [1.0, 1.0]),
        ({"name": "dgc", "importance": "cluster"}, [0, 1], [1.0, 0.0]),
    ],
)
def test_how_scores_are_made(raw: dict[str, Any], ways: list[int], average: list[float]) -> None:
    """Per age, newest stays; decay and weight as fp32's bits. Without attention, nothing moves."""
    columns = compiled(resolve({"budget": 64, **raw})).score_columns
    assert columns.dtype == np.dtype("i4") and columns[:2].tolist() == ways
    assert columns[2:].view(np.float32).tolist() == average


def test_who_scales_logits() -> None:
    assert compiled(resolve({"name": "beehive", "budget": 64, "log_n": True})).scales_logits
    assert not any(compiled(resolve({"name": n, "budget": 64})).scales_logits for n in POLICIES)


def test_values_by_age() -> None:
    scores, age = torch.tensor([[6.0, 6.0, 0.5]]), torch.tensor([[3, 2, 0]])
    assert compared(Scoring("attention"), scores, None) is scores
    by_age = compared(Scoring("attention", per_age=True), scores, age)
    assert by_age.tolist() == [[2.0, 3.0, 0.5]]  # a token that nothing saw yet is one query old


@pytest.mark.parametrize("name", POLICIES)
def test_a_schedule_is_compiled_once(name: str) -> None:
    """Equal settings have the same one, also after a copy or pickle; no two share a number."""
    policy, other = resolve({"name": name, "budget": 64}), resolve({"name": name, "budget": 96})
    schedule = compiled(policy)
    assert compiled(resolve({"name": name, "budget": 64})) is schedule
    assert pickle.loads(pickle.dumps(schedule)) is schedule
    assert pickle.loads(pickle.dumps({"own": [schedule]}))["own"][0] is schedule
    assert copy.deepcopy(schedule) is schedule, "as vLLM copies what holds it"
    assert compiled(other).number != schedule.number
    assert schedule.policy == policy and schedule.scoring == policy.scoring


@pytest.mark.usefixtures("no_collections")
def test_a_schedule_that_is_forgotten_leaves_nothing() -> None:
    """Neither its settings nor its scoring stay, since clients choose both."""
    schedules._remembered.clear()
    before = len(schedules._arithmetics)
    made = compiled(resolve({"name": "cascade", "budget": 1536, "keep_prompt": 5}))
    assert len(schedules._arithmetics) == before + 1, "a decay of its own"
    gone = [weakref.ref(one) for one in (made, made.policy, made.history(1).policy)]
    assert made.plan(2000, 3) is made.plan(2000, 3) is not None, "plans are kept"
    del made
    schedules._remembered.clear()
    assert [one() for one in gone] == [None] * 3 and len(schedules._arithmetics) <= before


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("t", [1, 90])
def test_a_schedule_that_is_compiled_again_has_the_same_history(t: int) -> None:
    """So what is kept under it is found again."""
    policy = resolve({"name": "sink", "budget": 61, "keep_prompt": 10})
    first = weakref.ref(compiled(policy))
    kept = {compiled(policy).history(t): "pages"}
    schedules._remembered.clear()
    assert first() is None and kept[compiled(policy).history(t)] == "pages"
    other = resolve({"name": "lazy", "budget": 61, "keep_prompt": 10})
    assert compiled(other).history(t) not in kept


def test_a_schedule_travels_to_another_process() -> None:
    """As settings: a process that never saw them compiles them to the same tables."""
    schedule = compiled(resolve({"name": "cascade", "budget": 96, "num_subcaches": 3}))
    code = (
        "import pickle, sys; sys.modules['vllm'] = None; s = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(pickle.dumps((s.policy, s.rules, s.first, s.count)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(schedule), capture_output=True, check=True)
    policy, *arrays = pickle.loads(done.stdout)
    assert policy == schedule.policy
    for array, own in zip(arrays, (schedule.rules, schedule.first, schedule.count), strict=True):
        assert (array == own).all()


def test_the_same_arithmetic() -> None:
    """Equal where scores are made and compared alike, whatever is evicted."""

    def arithmetic(**raw: Any) -> Arithmetic:
        return compiled(resolve(raw)).arithmetic

    plain = {arithmetic(name=name, budget=64) for name in ("window", "sink", "lazy")}
    assert plain == {arithmetic(name="sink", budget=9, num_sinks=0, overflow=3)}
    cascade, longer = (arithmetic(name="cascade", budget=budget) for budget in (128, 256))
    assert cascade == arithmetic(name="cascade", budget=64, num_subcaches=2), "one gamma"
    h2o, old = (arithmetic(name="h2o", budget=64, normalise=on) for on in (False, True))
    assert old == arithmetic(name="dgc", budget=64, importance="attention")
    beehive, text = (arithmetic(name=name, budget=64) for name in ("beehive", "dgc"))
    assert beehive == arithmetic(name="h2o", budget=99, tie="resident")
    assert len({*plain, cascade, longer, h2o, old, beehive, text}) == 7


@pytest.mark.parametrize("sizes", LAZY_PERIODS)
def test_lazy_periods(sizes: tuple[int, int, int]) -> None:
    """docs/ALGORITHMS.md, "Lazy pruning", C = 2048: (R, slack, max_drop) -> (period, left)."""
    overflow, slack, drop = sizes
    policy = resolve(
        {"name": "lazy", "budget": 2044, "overflow": overflow, "slack": slack, "max_drop": drop}
    )
    schedule = compiled(policy)
    first = 2048 + overflow  # the token that fills the slack is the one that prunes
    period, after = LAZY_PERIODS[sizes]
    assert schedule.period == period
    assert schedule.count_at(first) == schedule.count_at(first + 10 * period) == after
    assert schedule.peak_at(10**6) == 2048 + overflow - 1 == policy.capacity


def test_lazy_staging_after_a_long_append() -> None:
    """Where slack and max_drop do act (docs/ALGORITHMS.md, "Lazy pruning"): 2090 -> 2058."""
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


def test_beehive_counts_by_hand() -> None:
    small = {"name": "beehive", "budget": 6, "window": 2, "threshold": 4, "stride": 3}
    schedule = compiled(resolve({**small, "num_sinks": 1}))
    counts = [schedule.count_at(t) for t in range(1, 15)]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
    sizes = {"budget": 560, "window": 160, "threshold": 400}
    schedule = compiled(resolve({"name": "beehive", **sizes}))
    evicts = [t for t in range(1, 2500) if schedule.count_at(t) <= schedule.count_at(t - 1)]
    assert evicts[:5] == [565, 885, 1195, 1503, 1811]
    assert [schedule.count_at(t) - 164 for t in evicts[:4]] == [81, 91, 93, 93]
    assert schedule.period == 308


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
            assert compiled(policy).peak_at(10**6) <= policy.base_capacity


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"name": "beehive", "stride": 2}, "would never thin old tokens"),
        ({"name": "beehive", "budget": 9, "window": 9}, "leaves nothing of the budget"),
        ({"name": "beehive", "budget": 1}, "budget 1 leaves no room for .* at least 2"),
        (
            {"name": "beehive", "budget": 20, "window": 9, "threshold": 12},
            "threshold 12 and window 9 are together more than the budget 20; .* at most 11",
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


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"name": "window", "budget": 8}, 0),
        ({"name": "sink", "budget": 8, "num_sinks": 3}, 3),
        ({"name": "sink", "budget": 8, "num_sinks": 3, "overflow": 4}, 3),
        ({"name": "lazy", "budget": 8, "num_sinks": 2}, 2),
        ({"name": "sink", "budget": 32, "num_sinks": 4, "unit": 4, "prefill_stride": 8}, 4),
        ({"name": "sink", "budget": 64, "num_sinks": 16, "unit": 16, "recall": 1}, None),
        ({"name": "cascade", "budget": 8, "num_subcaches": 2}, None),
        ({"name": "h2o", "budget": 8, "window": 8}, None),  # always the oldest, but it is scored
        ({"name": "dgc", "budget": 8}, None),
        ({"name": "beehive", "budget": 20}, None),
    ],
)
def test_who_keeps_the_newest(settings: dict[str, Any], first: int | None) -> None:
    """After any number of tokens the first ones are left, and behind them the newest."""
    schedule = compiled(resolve(settings))
    assert schedule.keeps_newest == first
    if first is None or schedule.unit > 1:
        return
    sim = make_sim(settings)
    for t in range(60):
        sim.insert(t, lambda _: 0.0)
        kept = sim.tokens()
        newest = len(kept) - min(first, t + 1)
        assert kept == [*range(min(first, t + 1)), *range(t + 1 - newest, t + 1)]


@pytest.mark.parametrize("every", [1, 5, 16])
def test_drafts_neither_select_nor_evict_units(every: int) -> None:
    """Literally: rows of drafts end before any token at which recall does something."""
    raw = {"name": "sink", "budget": 32, "unit": 8, "recall": 2, "recall_every": every}
    schedule = compiled(resolve({**raw, "prefill_stride": 8}))
    for begin in range(1, 200):
        end = schedule.quiet(begin, begin + 7)
        assert begin <= end <= begin + 7
        tokens = np.arange(begin, end)
        assert (schedule.evicted(tokens + 1) == schedule.evicted(tokens)).all()
        assert (schedule.recalled(tokens) == schedule.recalled(tokens - 1)).all()
        assert (tokens % every != 0).all()
        if end < begin + 7:
            assert end % 8 in (0, 7) or end % every == 0
    plain = compiled(resolve({"name": "sink", "budget": 32, "unit": 8, "prefill_stride": 8}))
    assert plain.quiet(3, 10) == 10
