# SPDX-License-Identifier: Apache-2.0
"""The oracle's simulations beyond cascade and window: test vectors, counts, re-derivations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.model import log_n
from tests.oracle.policies import (
    BeehiveSim,
    CascadeSim,
    H2OSim,
    LazySim,
    OverflowSim,
    Score,
    Sim,
    WindowSim,
)

Scores = Callable[[int], Score]


def zero(token: int) -> float:
    return 0.0


def zeros(stride: int) -> Score:
    return zero


def coarse(seed: int) -> Scores:
    """Three values only, so that there are ties; frozen in a stride, new in the next."""

    def of_stride(stride: int) -> Score:
        random = Random(f"{seed} {stride}")
        values = [random.choice([0.0, 0.5, 1.0]) for _ in range(1000)]
        return values.__getitem__

    return of_stride


def insert(sim: Sim, first: int, length: int, score: Score = zero) -> None:
    """One stride."""
    for token in range(first, first + length):
        sim.insert(token, score)
    sim.end_stride(score)


def kept(sim: Sim, strides: list[int], scores: Scores = zeros) -> list[list[int]]:
    """What is cached at the end of each stride."""
    result, t = [], 0
    for i, length in enumerate(strides):
        insert(sim, t, length, scores(i))
        result.append(sim.tokens())
        t += length
    return result


def counts(sim: Sim, strides: list[int], scores: Scores = zeros) -> list[int]:
    """Tokens cached at the end of each stride."""
    return [len(tokens) for tokens in kept(sim, strides, scores)]


def drops(lengths: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """(t, length after) for every stride that did not simply append."""
    result, t = [], 0
    for before, after, length in zip([0, *lengths[:-1]], lengths, strides, strict=True):
        t += length
        if after != before + length:
            result.append((t, after))
    return result


# ------------------------------------------------- the cases of docs/ALGORITHMS.md, "Beehive"


def test_beehive_small() -> None:
    expected = [1, 2, 3, 4, 5, 6, 7] + [5, 6, 7] * 20
    assert counts(BeehiveSim(1, 2, 3, 4), [1] * 67) == expected


def test_beehive_defaults() -> None:
    strides = [1] * 2600
    lengths = counts(BeehiveSim(4, 160, 5, 400), strides)
    events = drops(lengths, strides)
    assert events[:3] == [(565, 164 + 81), (885, 164 + 91), (1195, 164 + 93)]
    assert events[3:] == [(t, 164 + 93) for t in range(1195 + 308, 2601, 308)]
    steady = lengths[1194 : 1194 + 308]
    assert (min(steady), max(steady)) == (257, 564)
    assert sum(steady) / len(steady) == 410.5


def test_beehive_defaults_threshold_of_new_tokens() -> None:
    """Reading B: an eviction every T + 1 tokens, with ceil(n / 3) + 81 survivors."""
    strides = [1] * (565 + 6 * 401)
    events = drops(counts(BeehiveSim(4, 160, 5, 400, "new"), strides), strides)
    middles = [81, 108, 117, 120, 121, 122, 122]
    assert events == [(565 + 401 * i, 164 + n) for i, n in enumerate(middles)]


def test_beehive_prompt_is_evicted_until_it_fits() -> None:
    """The authors' code evicts once a call: 932 after 4000, and 421 one step later.

    Here the stride ends with a second one, of the 768 survivors alone: 256 stay, so 420 after
    4000. The step after it only appends, so that both are 421 at 4001, and the same from then on
    (279 at 4145, 261 at 4431) although token 4000 is new here and old there.
    """
    strides = [4000] + [1] * 500
    lengths = counts(BeehiveSim(4, 160, 5, 400), strides)
    assert lengths[:2] == [420, 421]
    assert drops(lengths, strides) == [(4000, 420), (4145, 279), (4431, 261)]
    assert counts(BeehiveSim(4, 160, 5, 400, "new"), [4000, 1]) == [932, 933]


def test_beehive_segments_and_ties() -> None:
    """Middle 1-8 (5 is the best of its segment, elsewhere ties), window 9-10; the last is short."""
    sim = BeehiveSim(1, 2, 3, 7)
    score = [0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 4.0, 4.0, 9.0, 9.0].__getitem__
    insert(sim, 0, 11, score)
    assert sim.tokens() == [0, 1, 5, 7, 9, 10] and sim.num_old == 3
    assert sim.closest_contest == 0.0
    # Eight in the middle again: old 1 5 7 -> 1 7 whatever their scores, new 9-11 | 12-13.
    insert(sim, 11, 5, lambda token: float(token if token < 12 else -token))
    assert sim.tokens() == [0, 1, 7, 11, 12, 14, 15] and sim.num_old == 4


def test_beehive_repeated_eviction_sees_only_old_tokens() -> None:
    """28 in the middle, maxima of threes: the last of each, and 10 > 4 stay; then every second."""
    sim = BeehiveSim(0, 2, 3, 4)
    insert(sim, 0, 30, float)
    assert sim.tokens() == [2, 14, 26, 28, 29]


@pytest.mark.parametrize("stride", [1, 2])
def test_beehive_refuses_strides_that_never_thin_out(stride: int) -> None:
    with pytest.raises(ValueError, match="grow"):
        BeehiveSim(1, 2, stride, 4)


lengths_of_strides = st.lists(
    st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=60
).filter(lambda strides: sum(strides) < 1000)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(3, 7),
    st.integers(1, 12),
    st.booleans(),
    lengths_of_strides,
)
def test_beehive_recurrence(
    k: int, w: int, s: int, threshold: int, new_only: bool, strides: list[int]
) -> None:
    """The count recurrence of docs/ALGORITHMS.md, "Beehive", with the loop."""
    length, n, expected = 0, 0, []
    for appended in strides:
        length += appended
        while length - k - w - (n if new_only else 0) > threshold:
            n = -(-n // ((s + 1) // 2)) + -(-(length - k - w - n) // s)
            length = k + w + n
        expected.append(length)
    sim = BeehiveSim(k, w, s, threshold, "new" if new_only else "middle")
    assert counts(sim, strides) == expected
    if not new_only:
        assert max(expected) <= k + w + threshold


# -------------------------------------------- the cases of docs/ALGORITHMS.md, "Lazy pruning"

SINKS, WINDOW = 4, 2044
LAZY = {
    (32, 16, 32): (32, 2048),
    (32, 0, 32): (32, 2048),
    (32, 16, 0): (32, 2048),
    (32, 16, 8): (16, 2064),
    (32, 24, 8): (8, 2072),
    (32, 64, 8): (8, 2072),
    (64, 16, 32): (48, 2064),
    (32, 31, 1): (1, 2079),
    (1, 16, 8): (1, 2048),
}


@pytest.mark.parametrize(("setting", "expected"), LAZY.items(), ids=str)
def test_lazy_period(setting: tuple[int, int, int], expected: tuple[int, int]) -> None:
    period, after = expected
    strides = [1] * 2400
    lengths = counts(LazySim(SINKS, WINDOW, *setting), strides)
    first = 2048 + setting[0]
    assert lengths[: first - 1] == list(range(1, first))
    assert drops(lengths, strides) == [(t, after) for t in range(first, 2401, period)]


def test_lazy_never() -> None:
    assert counts(LazySim(1, 3, 0, 5, 5), [1] * 50) == list(range(1, 51))


def test_lazy_seed_example() -> None:
    """C = 2048, R = 32, slack 16, max_drop 32."""
    strides = [2090] + [1] * 100
    lengths = counts(LazySim(SINKS, WINDOW, 32, 16, 32), strides)
    events = [(2090, 2058), (2112, 2048), (2144, 2048), (2176, 2048)]
    assert drops(lengths, strides) == events
    assert lengths[:23] == [*range(2058, 2080), 2048]


def test_lazy_after_a_long_prompt() -> None:
    strides = [4096] + [1] * 100
    events = drops(counts(LazySim(SINKS, WINDOW, 32, 16, 32), strides), strides)
    assert events == [(4096, 2064), (4112, 2048), (4144, 2048), (4176, 2048)]
    lengths = counts(LazySim(SINKS, WINDOW, 32, 64, 8), strides)
    assert lengths[:6] == [2112, 2105, 2098, 2091, 2084, 2077]
    events = drops(lengths, strides)[6:]
    assert events == [(t, 2072) for t in range(events[0][0], 4197, 8)]
    assert lengths[:9][-3:] == [2078, 2079, 2072]


def test_lazy_keeps_sinks_and_the_most_recent() -> None:
    steps = kept(LazySim(2, 6, 4, 1, 2), [1] * 40)
    # Length 12 = C + R triggers; max_drop 2 would leave 10, the hard cap C + 1 leaves 9.
    assert [len(step) for step in steps[10:16]] == [11, 9, 10, 11, 9, 10]
    for t, step in enumerate(steps[1:], 2):
        assert step == [0, 1, *range(t - len(step) + 2, t)]


# ------------------------------------------------------------------------------- heavy hitters


h2o_sizes = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 12), st.integers(1, 9))


@settings(max_examples=80, deadline=None)
@given(h2o_sizes, lengths_of_strides, st.integers(0, 10**6))
def test_h2o_brute_force(size: tuple[int, int, int, int], strides: list[int], seed: int) -> None:
    """Literally: rank everything older than the window, drop the excess, as often as asked."""
    sinks, budget, window, overflow = size
    scores = coarse(seed)
    sim = H2OSim(sinks, budget, window, overflow=overflow)
    cache: list[int] = []
    t = 0
    for i, length in enumerate(strides):
        score = scores(i)
        insert(sim, t, length, score)
        for _ in range(length):
            cache.append(t)
            t += 1
            excess = len(cache) - sinks - budget
            if excess > 0 and (t - sinks - budget) % overflow == 0:
                older = cache[sinks : len(cache) - min(window, budget)]
                lost = sorted((score(token), token) for token in older)[:excess]
                cache = [token for token in cache if (score(token), token) not in lost]
        assert sim.tokens() == cache
        over = (t - sinks - budget) % overflow
        assert len(cache) == min(t, sinks + budget + (over if t >= sinks + budget else 0))


@settings(max_examples=60, deadline=None)
@given(h2o_sizes, lengths_of_strides, st.integers(0, 10**6))
def test_h2o_batch_equals_one_by_one(
    size: tuple[int, int, int, int], strides: list[int], seed: int
) -> None:
    """Dropping a batch's lowest is inserting its tokens one by one, with the same scores."""
    sinks, budget, window, overflow = size
    batch = H2OSim(sinks, budget, window, overflow=overflow)
    single = OverflowSim(H2OSim(sinks, budget, window), overflow)
    assert kept(batch, strides, coarse(seed)) == kept(single, strides, coarse(seed))


def test_h2o_example() -> None:
    """Sink 0, budget 4, window 2; scores of 1.. are 5 1 1 7 2 9 9: ties lose the older one."""
    score = [9.0, 5.0, 1.0, 1.0, 7.0, 2.0, 9.0, 9.0].__getitem__
    steps = kept(H2OSim(1, 4, 2), [1] * 8, lambda stride: score)
    assert steps[4] == [0, 1, 2, 3, 4]
    assert steps[5] == [0, 1, 3, 4, 5]
    assert steps[6] == [0, 1, 4, 5, 6]
    assert steps[7] == [0, 1, 4, 6, 7]


def test_h2o_contest() -> None:
    """What matters is the best that left against the worst that stayed, at the stride's end."""
    sim = H2OSim(0, 3, 1)
    insert(sim, 0, 6, [1.0, 1.0, 2.0, 8.0, 10.0, 0.0].__getitem__)
    assert sim.tokens() == [3, 4, 5]
    assert sim.closest_contest == pytest.approx(0.75)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(1, 9),
    lengths_of_strides,
    st.integers(0, 10**6),
)
def test_h2o_with_a_full_window_is_a_window(
    sinks: int, budget: int, more: int, overflow: int, strides: list[int], seed: int
) -> None:
    h2o = H2OSim(sinks, budget, budget + more, overflow=overflow)
    window = OverflowSim(WindowSim(sinks, budget), overflow)
    assert kept(h2o, strides, coarse(seed)) == kept(window, strides)


# ------------------------------------------------------------------------------------ overflow

cascades = st.builds(
    lambda *args: lambda: CascadeSim(*args),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["incoming", "resident"]),
)
windows = st.builds(lambda *args: lambda: WindowSim(*args), st.integers(0, 3), st.integers(1, 12))


@settings(max_examples=60, deadline=None)
@given(st.one_of(cascades, windows), lengths_of_strides, st.integers(0, 10**6))
def test_overflow_of_one_changes_nothing(
    make: Callable[[], CascadeSim | WindowSim], strides: list[int], seed: int
) -> None:
    plain, wrapped = make(), OverflowSim(make(), 1)
    assert kept(plain, strides, coarse(seed)) == kept(wrapped, strides, coarse(seed))
    assert plain.closest_contest == wrapped.closest_contest
    assert plain.sinks == wrapped.sinks


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 12), st.integers(1, 15))
def test_overflowing_sink_cache_is_lazy_pruning(sinks: int, window: int, overflow: int) -> None:
    """Token by token, without slack and max_drop. (In longer strides lazy pruning looks once.)"""
    strides = [1] * 100
    lazy = kept(LazySim(sinks, window, overflow), strides)
    assert kept(OverflowSim(WindowSim(sinks, window), overflow), strides) == lazy


@settings(max_examples=60, deadline=None)
@given(cascades, st.integers(1, 9), lengths_of_strides, st.integers(0, 10**6))
def test_overflow_shows_the_cache_of_the_last_check_and_what_came_since(
    make: Callable[[], CascadeSim], overflow: int, strides: list[int], seed: int
) -> None:
    """With scores that never change it is the inner simulation, late by t - capacity mod R."""
    score = coarse(seed)(0)
    inner, sim = make(), OverflowSim(make(), overflow)
    capacity = sim.num_sinks + sim.budget
    caches = [[], *kept(inner, [1] * sum(strides), lambda stride: score)]
    steps = kept(sim, strides, lambda stride: score)
    for t, cache in zip(accumulate(strides), steps, strict=True):
        late = max(t - (t - capacity) % overflow, min(t, sim.num_sinks))
        assert cache == caches[late] + list(range(late, t))


def test_sinks_never_wait() -> None:
    sim = OverflowSim(WindowSim(3, 5), 4)  # checks at t = 4, 8
    insert(sim, 0, 2)
    assert sim.sinks == [0, 1] and not sim.pending


def test_overflow_sees_the_scores_of_its_moment() -> None:
    """Capacity 5, R = 3: checks at t = 2, 5, 8. Tokens 5 and 6 wait for the scores of token 7."""
    early = {t: float(-t) for t in range(20)}
    late = {t: float(t) for t in range(20)}

    def end(last: dict[int, float]) -> list[int]:
        sim = OverflowSim(CascadeSim(1, 2, 2, eager_fill=False), 3)
        for t in range(7):
            insert(sim, t, 1, early.__getitem__)
        assert sim.tokens()[-2:] == [5, 6]  # pending
        insert(sim, 7, 1, last.__getitem__)
        assert not sim.pending
        return sim.tokens()

    for last in (early, late):
        inner = CascadeSim(1, 2, 2, eager_fill=False)
        for t in range(8):
            inner.insert(t, (early if t < 5 else last).__getitem__)
        assert end(last) == inner.tokens()
    assert end(early) != end(late)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("overflow", [1, 3, 4, 7, 12])
def test_overflow_counts(overflow: int, eager: bool) -> None:
    """Capacity is reached again every R tokens, with a sawtooth of R - 1 on top."""
    sim = OverflowSim(CascadeSim(2, 3, 4, eager_fill=eager), overflow)
    lengths = counts(sim, [1] * 200)
    full = 2 + 7 * 4 + overflow  # where also the gated fill is complete
    over = [(t - 14) % overflow for t in range(1, 201)]
    assert lengths[full:] == [14 + extra for extra in over[full:]]
    if eager:
        assert lengths[:14] == list(range(1, 15))
    assert max(lengths) == 14 + overflow - 1


# ---------------------------------------------------------------------------------- all of them

bees = st.builds(
    lambda *args: lambda: BeehiveSim(*args),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(3, 6),
    st.integers(1, 12),
    st.sampled_from(["middle", "new"]),
)
lazies = st.builds(
    lambda *args: lambda: LazySim(*args),
    st.integers(0, 3),
    st.integers(1, 10),
    *[st.integers(0, 9)] * 3,
)
hitters = st.builds(
    lambda *args: lambda: H2OSim(*args[:3], overflow=args[3]),
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(1, 9),
)
overflows = st.builds(
    lambda make, overflow: lambda: OverflowSim(make(), overflow),
    st.one_of(cascades, windows),
    st.integers(1, 9),
)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(cascades, windows, bees, lazies, hitters, overflows),
    lengths_of_strides,
    st.integers(0, 10**6),
)
def test_invariants(make: Callable[[], Sim], strides: list[int], seed: int) -> None:
    """Counts do not depend on scores, order is chronological, nothing returns, sinks stay."""
    sim = make()
    caches = kept(sim, strides, coarse(seed))
    assert [len(cache) for cache in caches] == counts(make(), strides)
    ends = list(accumulate(strides))
    for cache, t in zip(caches, ends, strict=True):
        assert cache == sorted(set(cache)) and cache[-1] < t
        assert cache[: sim.num_sinks] == list(range(min(t, sim.num_sinks)))
    for (before, after), t in zip(pairwise(caches), ends[:-1], strict=True):
        assert {token for token in after if token < t} <= set(before)


def test_log_n() -> None:
    """1 at 512 tokens seen, below it before, 0 for the first token, which sees only itself."""
    factor = log_n()
    assert factor(511) == 1.0 and factor(0) == 0.0
    assert factor(512**2 - 1) == pytest.approx(2.0)
    assert log_n(8)(1) == pytest.approx(1 / 3)
