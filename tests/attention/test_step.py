# SPDX-License-Identifier: Apache-2.0
"""What the host plans for a step of many requests, against a loop over their tokens."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.policies.cases import raw_settings, raw_unit_settings
from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.attention.cuda.mail import DeviceTables
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton.schedule import schedule as write_steps
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.policies.strides import cut_strides
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.plan import SPARE, RuleBook, describe
from vllm_cascade.step.rows import RequestTokens

SHARED = {"num_sinks": 4, "prefill_stride": 16}
POLICY = resolve({"name": "cascade", "budget": 64, **SHARED})
SCHEDULES = [
    compiled(POLICY),
    compiled(resolve({"name": "sink", "budget": 32, **SHARED})),
    compiled(resolve({"name": "sink", "budget": 32, "overflow": 8, **SHARED})),
    compiled(resolve({"name": "beehive", "budget": 40, **SHARED})),
    compiled(resolve({"name": "dgc", "budget": 40, "importance": "cluster", **SHARED})),
]
ROW = st.tuples(st.sampled_from(SCHEDULES), st.integers(0, 300), st.integers(0, 70), st.booleans())


def builder() -> CPUBuilder:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    limits = SimpleNamespace(max_num_batched_tokens=1024, max_num_seqs=8)
    config = SimpleNamespace(scheduler_config=limits)
    spec = KVPolicySpec.from_full(full, POLICY)
    return CPUBuilder(spec, ["layer"], config, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6))
def test_a_step_of_many_requests(rows: list[tuple[Schedule, int, int, bool]]) -> None:
    """(schedule, tokens before, tokens now, in its prompt) for each request."""
    lengths = [length for _, _, length, _ in rows]
    table = torch.arange(1, 1 + len(rows) * 32, dtype=torch.int32).view(len(rows), 32)
    firsts, prefilling = [row[1] for row in rows], [row[3] for row in rows]
    common = step_of(firsts, lengths, prefilling, table)
    offsets = common.query_start_loc
    made = builder()
    made.requests.schedules = lambda _: [schedule for schedule, *_ in rows]
    metadata = made.build(0, common)

    positions, planned = [], set()
    for index, (schedule, first, length, prompt) in enumerate(rows):
        bounds = cut_strides(first, first + length, POLICY.prefill_stride, prompt)
        for depth, (begin, end) in enumerate(pairwise(bounds) if length else ()):
            cached = schedule.count_at(begin)
            positions += [cached + token - begin for token in range(begin, end)]
            place = int(offsets[index]) + begin - first
            single = end - begin == 1 and not schedule.moves_tokens
            slots = schedule.peak_at(begin), schedule.peak_at(end)
            row = (begin, cached, *slots, place, end - begin)
            planned.add((depth, index, row, literal_rules(schedule, begin) if single else None))
    assert made.positions.buffer[: sum(lengths)].tolist() == positions

    found = set()
    for depth, wave in enumerate(metadata.waves):
        if wave.singles is not None:
            rules = wave.singles.rules.tolist()
            for step, pages in zip(
                wave.singles.steps.tolist(), wave.singles.table.tolist(), strict=True
            ):
                first, more = step[columns.LO : columns.MORE], step[columns.MORE :]
                own = [first, *rules[more[0] : more[0] + more[1]]] if first[2] else []
                request = (pages[0] - 1) // 32
                todo = tuple(tuple(rule) for rule in own)
                found.add((depth, request, tuple(step[: columns.LENGTH + 1]), todo))
        for stride in wave.strides:
            step = tuple(stride.step[: columns.LENGTH + 1].tolist())
            request = (int(stride.pages[0]) - 1) // 32
            assert stride.schedule is rows[request][0]
            found.add((depth, request, step, None))
    assert found == planned
    assert made.counters.tokens == sum(lengths) and made.counters.strides == len(planned)
    ends = [(schedule, first, first + length) for schedule, first, length, _ in rows]
    kept = sum(s.count_at(end) - s.count_at(first) for s, first, end in ends)
    assert made.counters.evicted_tokens == sum(lengths) - kept


def literal_rules(schedule: Schedule, t: int) -> tuple[tuple[int, int, int, int], ...]:
    """The rules of token ``t``, from the policy's own list, batch by batch."""
    insertions = schedule.policy.insertions()
    begin, end = schedule.inserted(np.asarray([t, t + 1])).tolist()
    found = []
    for token in range(begin, end):
        transient = len(insertions.rules) - insertions.period
        late = transient + (token - transient) % insertions.period
        found += insertions.rules[token if token < transient else late]
    return tuple(rule.numbers for rule in found)


def test_no_tokens_no_waves() -> None:
    made = builder()
    common = step_of([5, 0], [0, 0], [False, False], torch.zeros(2, 1, dtype=torch.int32))
    assert made.build(0, common.replace(max_query_len=0)).waves == []
    assert not made.positions.buffer.any()


def test_rules_of_schedules_that_are_no_longer_in_use_are_forgotten() -> None:
    """Between steps only: rows of the same step already point into the table."""
    book = RuleBook(max_requests=2)
    combs = SCHEDULES[3]
    other = compiled(resolve({"name": "beehive", "budget": 44, **SHARED}))
    assert book.begin(combs) == 0 == book.begin(combs)
    book.MOST = len(book.rules)
    assert book.begin(other) == len(combs.further), "the step's other rows are still right"
    assert (book.rules[: len(combs.further)] == combs.further).all()
    assert (book.rules[book.begin(other) :] == other.further).all()
    book.prune()
    assert book.begin(other) == 0 and len(book.rules) == len(other.further)
    book.prune()
    assert book.begin(other) == 0 and len(book.rules) == len(other.further), "within the bound"


def test_schedules_with_one_rule_a_token_are_not_kept() -> None:
    """No row points to further rules of theirs, however many budgets clients choose."""
    book = RuleBook(max_requests=2)
    plain = [schedule for schedule in SCHEDULES if not len(schedule.further)]
    assert {book.begin(schedule) for schedule in plain} == {0}
    assert not book._begins and not len(book.rules)


def test_only_so_many_schedules_are_kept() -> None:
    """A new policy in every step, beside one that goes on; rows of each step stay right."""
    book, lasting = RuleBook(max_requests=2), SCHEDULES[3]
    for budget in range(1, 2 * SPARE):
        new = compiled(resolve({"name": "beehive", "budget": 8 * budget, **SHARED}))
        book.prune()
        begins = [book.begin(schedule) for schedule in (lasting, new)]
        for begin, schedule in zip(begins, (lasting, new), strict=True):
            rules = book.rules[begin : begin + len(schedule.further)]
            assert np.array_equal(rules, schedule.further), budget
        assert len(book._begins) <= 2 + SPARE + 2
    assert budget > 2 + SPARE + 2


def test_a_step_prunes_its_rules_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made, order = builder(), []
    monkeypatch.setattr(made._rules, "prune", lambda: order.append("prune"))
    monkeypatch.setattr(made._rules, "begin", lambda schedule: order.append("begin") or 0)
    made.build(0, step_of([5], [3], [True], torch.ones(1, 4, dtype=torch.int32)))
    assert order[0] == "prune" and order.count("prune") == 1 and "begin" in order


# --- positions: one formula on the host, and a compiled copy in a kernel --------------------------


@pytest.mark.parametrize("units", [False, True], ids=["tokens", "units"])
@pytest.mark.parametrize("name", ("cascade", "sink", "lazy", "h2o", "beehive"))
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_the_kernels_positions_are_the_hosts(name: str, units: bool, data: st.DataObject) -> None:
    """Of random schedules of one engine side by side, with recall, at random times."""
    made = raw_unit_settings(name) if units else raw_settings(name)
    raw = data.draw(made)
    recalls = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)) if units else [0]
    schedules = [compiled(resolve({**raw, "recall": recall})) for recall in recalls]
    tables = DeviceTables(schedules[0], torch.device("cpu"), len(schedules))
    count = 200
    which = data.draw(st.lists(st.sampled_from(schedules), min_size=count, max_size=count))
    late = st.integers(0, 3000)
    times = data.draw(st.lists(late, min_size=count, max_size=count))
    numbers = torch.from_numpy(tables.numbers(which))  # loads those that are missing
    rows = torch.full((count, columns.STEP_COLUMNS), -9, dtype=torch.int32)
    positions = torch.full((count,), -9)
    write_steps(
        seq_lens=torch.tensor(times, dtype=torch.int32) + 1,
        blocks=torch.ones(count, 1, dtype=torch.int32),
        tables=tables.schedules,
        schedule_of=numbers,
        steps=rows,
        positions=positions,
    )
    expected = [int(one.positions(np.asarray(t))) for one, t in zip(which, times, strict=True)]
    assert positions.tolist() == rows[:, columns.CACHED].tolist() == expected
    ones, at = np.ones(count, dtype=np.int64), np.arange(count)
    tokens = RequestTokens(which, np.asarray(times), ones, at, ones < 1)
    planned = describe(tokens, 16, lambda _: 0)
    assert planned.positions.tolist() == expected
    window = compiled(resolve({"name": "window", "budget": 5, "prefill_stride": 16}))
    (wave,) = describe(
        RequestTokens([window] * count, np.asarray(times), ones, at, ones < 1, frames=which),
        16,
        lambda _: 0,
    ).waves
    assert wave.position.tolist() == expected
    assert wave.shift.tolist() == [e - min(t, 5) for e, t in zip(expected, times, strict=True)]
