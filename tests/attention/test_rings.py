# SPDX-License-Identifier: Apache-2.0
"""Rings of evicted units on CUDA: what a step does with them, whose they are, and replays.

Kernels are interpreted. Plans and choices are compared with those of the CPU's logs, which engines
compare with the oracle (``tests/engine/test_recall.py``).
"""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from vllm.platforms import current_platform

from tests.attention.conftest import use_triton
from tests.attention.test_cuda import common
from tests.attention.test_paged import PagedLayer, Shape, oracle_for
from tests.attention.test_recall import new, output, shape_of
from tests.attention.test_replay import Graph
from vllm_cascade.attention.cpu.paths import SWITCH
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.warm_up import warm_up
from vllm_cascade.attention.recorder import kept_tokens
from vllm_cascade.cache.kinds import window_policy
from vllm_cascade.engine import gpu_worker, recall_memory
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton import recall_copy
from vllm_cascade.kernels.triton.recall import Judge
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall import rings as ring_stores
from vllm_cascade.recall.chain import CHUNK_UNITS
from vllm_cascade.recall.log import Log
from vllm_cascade.recall.rings import (
    RingMemory,
    Rings,
    check_memory,
    chunk_bytes,
    ring_bytes,
    round_up,
)
from vllm_cascade.recall.stores import Stores
from vllm_cascade.sessions.copies import Copies
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.recall import plan_logs, plan_rings, unit_shape
from vllm_cascade.step.requests import RunnerV1Requests, RunnerV2Requests
from vllm_cascade.step.rows import StrideRows

CPU = torch.device("cpu")
NOWHERE = np.zeros(2, dtype=np.int32), np.zeros(2, dtype=bool)
"""Positions of strides, and whether keys have moved: which recall does not read."""
CASCADE = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 4, "unit": 4}
RECALL = {**CASCADE, "recall": 2, "recall_store": 24, "recall_every": 3, "prefill_stride": 8}
POLICIES: dict[str, dict[str, Any]] = {
    "cascade": RECALL,
    "sink": {"name": "sink", "budget": 16, "unit": 4, "recall": 3, "recall_store": 12},
    "overflow": {**RECALL, "overflow": 8, "recall_every": 1},
    "window": {"name": "window", "budget": 8, "unit": 4, "recall": 6, "recall_store": 64},
}


# --- what a step does -----------------------------------------------------------------------------


LENGTHS = {
    "prompt": [8] * 6 + [5] + [1] * 60 + [3, 24] + [1] * 40,
    "decode": [3] + [1] * 120,  # recall begins, and grows, between multiples of recall_every
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", POLICIES)
def test_logs_and_rings_do_what_settings_say(name: str, lengths: list[int]) -> None:
    """Strides of several tokens and single tokens, beside plain counts.

    The reference keeps a list of the evicted units and the last stride's length, no more.
    """
    schedule = compiled(resolve({"prefill_stride": 8, **POLICIES[name]}))
    policy = schedule.policy
    most = policy.recall_store // policy.unit
    shape = shape_of(policy.unit, most)
    rings, log = Rings(shape, 3, CPU), Log(shape)
    rings.note(output(scheduled_new_reqs=[new("other", 3), new("a", 1)]))
    assert rings.take("other") == 0
    begin = shown = last = 0
    chosen: list[int] = []
    for length in lengths:
        evicted, after = schedule.evicted(np.asarray([begin, begin + length])).tolist()
        stored = list(range(evicted))[-most:]
        now = min(policy.recall, evicted)
        asks = length > 1 or last > 1 or begin % policy.recall_every == 0 or now != shown
        how = 0
        if now and asks:
            how = columns.TAKES_ALL if now == len(stored) else columns.JUDGED
        expected = {
            columns.HOW: how,
            columns.RING: most,  # the second ring
            columns.BEGIN: evicted - len(stored),
            columns.END: evicted,
            columns.BEFORE: shown,
            columns.NOW: now,
            columns.MORE_RECALLED: min(policy.recall, after) - now,
            columns.STORED: after - evicted,
            columns.SINKS: policy.num_sinks // policy.unit,
        }
        row = plan_rings(rings, ["a"], [schedule], np.asarray([begin]), np.asarray([length]))[0]
        if after == 0:  # it has no ring yet
            assert "a" not in rings.rings
            expected = dict.fromkeys(expected, 0)
        assert {column: row[column] for column in expected} == expected, begin

        steps = np.zeros((1, columns.STEP_COLUMNS), dtype=np.int32)
        steps[0, [columns.STREAM, columns.LENGTH]] = begin, length
        rows = StrideRows(steps, np.zeros(1, dtype=np.int64), [schedule], *NOWHERE)
        (planned,) = plan_logs([rows], torch.ones(1, 1), {1: log})
        (theirs,) = planned.values()
        assert (theirs.selects, theirs.before, theirs.now) == (how > 0, shown, now), begin
        assert (len(theirs.candidates), len(theirs.stored)) == (len(stored), after - evicted)
        assert theirs.middle == policy.num_sinks // policy.unit + now // 2
        chosen.append(how)
        begin, shown, last = begin + length, now, length
    expected_kinds = {0, columns.TAKES_ALL} | ({columns.JUDGED} if most > policy.recall else set())
    assert set(chosen) == expected_kinds
    assert rings.num_units == len(log) == min(most, after)


def test_a_wave_of_some_requests_is_planned_by_their_rows() -> None:
    """Request 0 has no stride in this wave; rows of the plan are those of the batch."""
    schedule = compiled(resolve(RECALL))
    builder = CUDABuilder.__new__(CUDABuilder)
    builder.stores = rings = Rings(shape_of(4, 6), 3, CPU)
    rings.note(output(scheduled_new_reqs=[new("a", 1), new("b", 2), new("c", 3)]))
    begin = 80
    assert [rings.take(name) for name in "abc"] == [0, 1, 2]
    rings.end[:] = int(schedule.evicted(np.asarray(begin)))
    steps = np.zeros((2, columns.STEP_COLUMNS), dtype=np.int32)
    steps[:, columns.STREAM], steps[:, columns.LENGTH] = begin, 8
    wave = StrideRows(steps, np.asarray([2, 1]), [schedule, schedule], *NOWHERE)
    plan = builder._plan_recall(wave, ["a", "b", "c"], 3)
    assert not plan[0].any()
    places = [rings.rings[name] * 6 for name in "bc"]
    assert plan[1:, columns.RING].tolist() == places and plan[1:, columns.HOW].all()


def test_logs_of_several_requests() -> None:
    """One wave under two schedules; a request has no log, and one's policy recalls nothing."""
    policies = {
        "a": RECALL,
        "b": {**RECALL, "recall": 1, "budget": 24},
        "c": {**RECALL, "recall": 0},
    }
    made = {name: compiled(resolve(settings)) for name, settings in policies.items()}
    requests = {4: ("a", 43, 1), 0: ("b", 0, 8), 2: ("c", 64, 8), 1: ("a", 63, 1), 3: ("a", 64, 1),
                5: ("b", 100, 6)}  # fmt: skip
    steps, logs = np.zeros((len(requests), columns.STEP_COLUMNS), dtype=np.int32), {}
    for step, (request, (name, begin, length)) in zip(steps, requests.items(), strict=True):
        step[[columns.STREAM, columns.LENGTH]] = begin, length
        if request != 3:
            log = logs[10 + request] = Log(shape_of(4, 40))
            log.grow(int(made[name].evicted(np.asarray(begin))))
            log.shown = int(made[name].recalled(np.asarray(begin)))
    schedules = [made[name] for name, *_ in requests.values()]
    wave = StrideRows(steps, np.asarray(list(requests)), schedules, *NOWHERE)
    (planned,) = plan_logs([wave], torch.arange(10, 16).view(6, 1), logs)
    assert set(planned) == {4, 0, 1, 5}
    for request, plan in planned.items():
        name, begin, length = requests[request]
        gone, after = made[name].evicted(np.asarray([begin, begin + length])).tolist()
        now = min(policies[name]["recall"], gone)
        assert plan.log is logs[10 + request]
        assert (plan.before, plan.now, plan.log.shown) == (now, now, now)
        assert plan.log.selected_by_many == (length > 1)
        assert plan.selects == (now > 0 and (length > 1 or begin % 3 == 0)), request
        assert (len(plan.candidates), len(plan.stored)) == (gone, after - gone)
        assert plan.log.end == after
    assert [planned[request].selects for request in (4, 0, 1, 5)] == [False, False, True, True]
    assert planned[5].now == 1 and len(planned[5].stored) > 0


def test_rows_without_a_ring_do_nothing() -> None:
    schedule, plain = compiled(resolve(RECALL)), compiled(resolve({**RECALL, "recall": 0}))
    rings = Rings(shape_of(4, 6), 3, CPU)
    rings.note(output(scheduled_new_reqs=[new("a", 1), new("b", 2)]))
    rings.end[:] = 99  # would not do for anybody
    names, one = ["a", None, "gone", "b"], np.ones(5, dtype=np.int64)
    stream = np.asarray([-1, 40, 40, 40, 40])  # padding, nobody's, one that is gone, no recall
    schedules = [schedule, schedule, schedule, plain, schedule]
    assert not plan_rings(rings, names, schedules, stream, one).any()


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_ring_of_latent_rows(in_8_bits: bool) -> None:
    """Host memory has a row once: its value is part of its key. Codes come with two scales."""
    shape = replace(shape_of(4, 6), latent=True)
    if in_8_bits:
        shape = replace(shape, dtype=torch.uint8, row_scales=2)
    rings = Rings(shape, 1, CPU)
    row = shape.head_size * shape.dtype.itemsize
    tokens = shape.num_layers * shape.num_kv_heads * shape.most_units * shape.unit
    on_device, on_host = ring_bytes(shape)
    assert rings.rows.nbytes == tokens * row
    if in_8_bits:
        assert rings.row_scales is not None and rings.row_scales.nbytes == tokens * 8
        begin = rings.rows.data_ptr() + rings.rows.nbytes
        assert rings.row_scales.data_ptr() == begin, "they share an allocation"
    assert on_host == tokens * (row + 8 * in_8_bits)
    codes = rings.codes.nbytes + rings.scales.nbytes + rings.born.nbytes + rings.token.nbytes
    assert on_device == codes


def test_rings_follow_the_scheduler() -> None:
    rings = Rings(shape_of(4, 6), 2, CPU)
    rings.note(output(scheduled_new_reqs=[new(name, i) for i, name in enumerate("abcd", 1)]))
    assert not rings.rings and rings.num_bytes == 0, "no request has evicted units"
    number, other = rings.take("a"), rings.take("b")
    assert rings.take("never seen") == rings.take(None) == -1
    rings.end[[number, other]] = 4, 90
    assert rings.num_units == 4 + 6 and rings.num_bytes == 2 * sum(ring_bytes(rings.shape))
    rings.note(output(finished_req_ids={"a"}, scheduled_new_reqs=[new("e", 1)]))
    assert rings.rings == {"b": other}
    assert (rings.take("c"), rings.end[number]) == (number, 0)
    rings.note(output(preempted_req_ids={"b"}))
    assert rings.rings == {"c": number}
    resumed = SimpleNamespace(
        req_ids=["b"], resumed_req_ids={"b"}, new_block_ids=[([4],)], num_computed_tokens=[0]
    )
    rings.note(output(scheduled_cached_reqs=resumed))
    assert "b" not in rings.rings, "it begins anew"
    assert rings.end[rings.take("b")] == 0
    rings.note(output(finished_req_ids={*"bcde", "never seen"}))
    assert not rings.rings and rings.num_bytes == rings.num_units == 0


@pytest.mark.parametrize("row_scales", [0, 2])
def test_rings_follow_snapshots(row_scales: int) -> None:
    """A snapshot keeps its request's units as they were, and others begin with them."""
    rings = Rings(replace(shape_of(4, 40), row_scales=row_scales), 3, CPU, num_chunks=5)
    tensors = [rings.rows, rings.codes, rings.scales, rings.born, rings.token]
    if rings.row_scales is not None:
        tensors.append(rings.row_scales)
    assert len(tensors) == 5 + (row_scales > 0)
    generator = torch.Generator().manual_seed(0)

    def fill(number: int, end: int) -> list[torch.Tensor]:
        """Random units in a ring; returns what it holds."""
        rings.end[number], rings.shown[number], rings.selected_by_many[number] = end, 2, True
        places = slice(40 * number, 40 * (number + 1))
        for tensor in tensors:
            part = tensor[:, :, places]
            part.copy_(torch.randint(-100, 100, part.shape, generator=generator))
        return held(number, end)

    def held(number: int, end: int) -> list[torch.Tensor]:
        places = slice(40 * number, 40 * number + min(end, 40))
        return [tensor[:, :, places].clone() for tensor in tensors]

    def copies(*pairs: tuple[int, int]) -> list[Any]:
        return [SimpleNamespace(src_block_id=a, dst_block_id=b) for a, b in pairs]

    def begins(name: str, page: int) -> Any:
        return SimpleNamespace(req_id=name, block_ids=([page],), num_computed_tokens=64)

    rings.note(output(scheduled_new_reqs=[new("a", 1), new("b", 2)]))
    first = fill(rings.take("a"), 17)
    # Pages that are not first ones are copied, too; b has evicted nothing yet.
    rings.note(output(kv_cache_block_copies=copies((1, 10), (5, 11), (2, 12))))
    assert {page: len(kept.chunks) for page, kept in rings.kept.items()} == {10: 2, 12: 0}
    assert rings.num_units == 17 + 0 + 17
    assert rings.num_bytes == sum(ring_bytes(rings.shape)) + 2 * chunk_bytes(rings.shape)
    rings.note(output(scheduled_new_reqs=[begins("g", 12)]))
    assert list(rings.rings) == ["a"], "the snapshot that g begins with has no units"
    fill(rings.rings["a"], 90)  # it goes on
    rings.note(output(scheduled_new_reqs=[begins("c", 3)], kv_cache_block_copies=copies((10, 3))))
    number = rings.rings["c"]
    assert (rings.end[number], rings.shown[number]) == (17, 2) and rings.selected_by_many[number]
    assert all(map(torch.equal, held(number, 17), first))
    # A snapshot whose pages a request takes over; another that is dropped for a third, of a full
    # ring, whose first page was its own.
    full = fill(rings.rings["a"], 90)
    rings.note(
        output(
            finished_req_ids={"b", "c"},
            scheduled_new_reqs=[begins("d", 10), begins("e", 4)],
            kv_cache_block_copies=copies((10, 4), (1, 12)),
            dropped_snapshots=(10, 12),
        )
    )
    for name in "de":
        assert rings.end[rings.rings[name]] == 17
        assert all(map(torch.equal, held(rings.rings[name], 17), first))
    assert list(rings.kept) == [12] and len(rings.kept[12].chunks) == 3
    fill(rings.rings["a"], 100)
    rings.note(
        output(
            finished_req_ids={"a", "d", "e"},
            scheduled_new_reqs=[begins("f", 6)],
            kv_cache_block_copies=copies((12, 6)),
        )
    )
    assert rings.end[rings.rings["f"]] == 90
    assert all(map(torch.equal, held(rings.rings["f"], 90), full))
    rings.note(output(dropped_snapshots=(12,), finished_req_ids={"f"}))
    assert not rings.kept and sorted(rings._free_chunks) == list(range(5))
    assert rings.num_bytes == rings.num_units == 0


def test_a_prompt_that_grows_keeps_its_ring() -> None:
    """Streaming input: the next part begins where the request is, on the same pages."""
    rings = Rings(shape_of(4, 40), 2, CPU)
    rings.note(output(scheduled_new_reqs=[new("a", 1)]))
    number = rings.take("a")
    rings.end[number], rings.shown[number] = 17, 2
    part = SimpleNamespace(req_id="a", block_ids=([1],), num_computed_tokens=80)
    rings.note(output(scheduled_new_reqs=[part]))
    assert rings.rings == {"a": number} and (rings.end[number], rings.shown[number]) == (17, 2)
    with pytest.raises(AssertionError, match="begins twice"):
        rings.note(output(scheduled_new_reqs=[new("a", 1)]))


class LateMove:
    """A part of a copy, which is made when its result is asked for."""

    def __init__(self, *tensors: tuple[torch.Tensor, ...]) -> None:
        self._left = list(zip(*tensors, strict=True))

    def exception(self) -> None:
        while self._left:
            filled, kept = self._left.pop()
            kept.copy_(filled)

    result = exception


@pytest.mark.parametrize("settle", [Copies([torch.zeros(1, 1)]).settle, LateMove])
@pytest.mark.parametrize("staged", [1, 1 << 20], ids=["by chunks", "at once"])
@pytest.mark.parametrize("end", [0, 5, 17, 90])
def test_sessions_keep_a_copy_of_a_ring(
    end: int, staged: int, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that has wrapped; another worker's ring begins with it, as named tensors. Memory
    for what is under way is two parts, however large a ring is."""
    monkeypatch.setattr(ring_stores, "STAGED", staged)
    shape, generator = shape_of(4, 40), torch.Generator().manual_seed(0)
    rings, other = Rings(shape, 2, CPU), Rings(shape, 3, CPU)
    rings.note(output(scheduled_new_reqs=[new("x", 7), new("a", 1)]))
    number, stored = rings.take("a") if end else 0, min(end, 40)
    tensors = (rings.rows, rings.codes, rings.scales, rings.born, rings.token)
    for tensor in tensors:
        tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
    if end:
        rings.end[number], rings.shown[number] = end, min(end, 2)
        rings.selected_by_many[number] = True

    def held(store: Rings, ring: int) -> list[torch.Tensor]:
        first = ring * shape.most_units
        own = (store.rows, store.codes, store.scales, store.born, store.token)
        return [tensor[:, :, first : first + stored].clone() for tensor in own]

    wanted = held(rings, number)
    saved = rings.save(1, settle)
    assert saved is not None and rings.save(5, settle) is None
    copied = sum(words.nbytes for words in saved.words)
    assert copied == -(-stored // CHUNK_UNITS) * chunk_bytes(shape)
    rings.note(output(finished_req_ids={"a"}))
    for tensor in tensors:
        tensor.zero_()  # the next request's
    named = {name: tensor.clone() for name, tensor in saved.tensors().items()}
    other.resume({3: other.units_of(named, ())})
    start = SimpleNamespace(req_id="b", block_ids=([3],), num_computed_tokens=200)
    other.note(output(scheduled_new_reqs=[new("y", 1), start]))
    assert list(other.rings) == ["b"] * (end > 0), "without units it needs no ring"
    if end:
        place = other.rings["b"]
        assert all(map(torch.equal, held(other, place), wanted))
        assert (other.end[place], other.shown[place]) == (end, min(end, 2))
        assert other.selected_by_many[place]
        part = max(staged // chunk_bytes(shape), 1) * chunk_bytes(shape)
        for store in (rings, other):
            sizes = [sum(words.nbytes for words in one.words) for one in store._staging]
            assert sizes == [part, part]
    with pytest.raises((KeyError, ValueError)):
        other.units_of({**named, "ring.0": named["ring.0"][:, :, :1]}, ())
    with pytest.raises(ValueError, match="no pieces"):
        other.piece_of(np.zeros(4096, dtype=np.uint8))


def test_as_many_rings_as_requests_that_evict() -> None:
    """Short requests and those without recall run beside them, however many there are."""
    schedule, plain = compiled(resolve(RECALL)), compiled(resolve({**RECALL, "recall": 0}))
    longest = int(np.flatnonzero(schedule.evicted(np.arange(200)) == 0)[-1])
    shape = shape_of(4, 6)
    memory = RingMemory(schedule, shape, round_up(ring_bytes(shape)[1]), 64)
    rings = Rings(shape, memory.capacity, CPU)
    assert memory.capacity == 1
    limits = {"long": 199, "short": longest, "plain": 199, "edge": longest + 1}
    schedules = [plain if name == "plain" else schedule for name in limits]
    needs = [memory.need(own, most) for own, most in zip(schedules, limits.values(), strict=True)]
    assert needs == [1, 0, 0, 1], "one token more evicts a unit"
    memory.admit("long", 1)
    assert memory.fits(0) and not memory.fits(1), "edge waits"
    running = ["short", "plain", "long"]
    rings.note(output(scheduled_new_reqs=[new(name, i) for i, name in enumerate(running)]))
    stream = np.asarray([0, 0, 0])
    length = np.asarray([longest, 199, longest + 1])
    rows = plan_rings(rings, running, [schedule, plain, schedule], stream, length)
    assert rings.rings == {"long": 0} and not rows[:2].any() and rows[2, columns.STORED] > 0


def test_memory() -> None:
    shape = shape_of(16, 64)
    on_device, on_host = ring_bytes(shape)
    keys = 2 * 2 * 64 * 16
    assert (on_device, on_host) == (keys * 12 + 2 * 64 * 8, keys * 2 * 8 * 4)
    rings = Rings(shape, 4, CPU)
    held = sum(t.nbytes for t in (rings.codes, rings.scales, rings.born, rings.token))
    assert (held, rings.rows.nbytes) == (4 * on_device, 4 * on_host)
    check_memory(shape, 4, CPU, (4 * on_device, 4 * on_host))
    message = (
        r"recall_store 1024 tokens for 4 requests .* GiB {} memory.* at most 1008, or "
        r"recall_memory to at most 0.00[12], or --max-num-seqs to at most 3, or"
    )
    with pytest.raises(KVPolicyError, match=message.format("of the device's")):
        check_memory(shape, 4, CPU, (4 * on_device - 1, 4 * on_host))
    with pytest.raises(KVPolicyError, match=message.format("of pinned host")):
        check_memory(shape, 4, CPU, (4 * on_device, 4 * on_host - 1))
    # A store that holds fewer units than are recalled at a time is invalid, so it is not offered.
    least = shape.most_recalled
    room = 4 * (on_host * least // 64)
    with pytest.raises(KVPolicyError, match=rf"set recall_store to at most {least * 16}, or --kv"):
        check_memory(shape, 4, CPU, (4 * on_device, room))
    with pytest.raises(KVPolicyError, match="can be had; set --kv-recall 0"):
        check_memory(shape, 4, CPU, (4 * on_device, room - 4))


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_copies_are_compiled_at_start(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions copy rings also where no memory is left for snapshots."""
    calls: list[tuple[bool, bool, int]] = []

    def note(ring: Any, kept: Any, chunks: Any, size: int, number: int, *rest: Any) -> None:
        calls.append((rest[-1], kept.data_ptr() % 16 == 0, number))

    monkeypatch.setattr(recall_copy, "copy_ring", note)
    rings = Rings(shape_of(4, 40), 3, CPU, num_chunks=num_chunks)
    each = len(rings._words)
    assert calls == [(False, True, 0)] * each + [(True, True, 0)] * each


def test_pinned_memory_is_taken_in_powers_of_two() -> None:
    """PyTorch rounds it up, so 3 requests of these need what 4 need, which is one."""
    shape, cuda = shape_of(16, 64), torch.device("cuda")
    on_device, on_host = ring_bytes(shape)
    assert round_up(3 * on_host) == round_up(4 * on_host) == 4 * on_host == 1 << 20
    check_memory(shape, 3, cuda, (3 * on_device, 4 * on_host))
    check_memory(shape, 4, cuda, (4 * on_device, 8 * on_host - 1))
    message = (
        r"0.0 GiB of pinned host memory.* can be had; .* 672, or rec.*, or --max-.* at most 2,"
    )
    with pytest.raises(KVPolicyError, match=message):
        check_memory(shape, 3, cuda, (3 * on_device, 4 * on_host - 1))
    kept = round_up(3 * chunk_bytes(shape))
    check_memory(shape, 3, cuda, (3 * on_device, 4 * on_host + kept), num_chunks=3)
    with pytest.raises(KVPolicyError, match=r"of pinned host memory"):
        check_memory(shape, 3, cuda, (3 * on_device, 4 * on_host + kept - 1), num_chunks=3)


def test_the_memory_that_a_message_offers_has_room_for_fewer_rings() -> None:
    """``recall_memory`` is of the host and of all ranks, whichever memory is short."""
    shape = shape_of(16, 1 << 16)
    on_device, on_host = ring_bytes(shape)
    with pytest.raises(KVPolicyError, match="of the device's memory") as found:
        check_memory(shape, 4, CPU, (3 * on_device, 4 * on_host), ranks=2)
    (offered,) = re.findall(r"recall_memory to at most ([0-9.]+)", str(found.value))
    assert float(offered) * 2**30 == pytest.approx(2 * 3 * on_host, rel=0.01)


@pytest.mark.parametrize("shared", [False, True])
def test_a_card_that_uses_the_hosts_memory(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its free memory is the host's: keys on the device leave less for rows."""
    shape = shape_of(16, 64)
    on_device, on_host = ring_bytes(shape)
    room = 4 * on_host + on_device
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room, room))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=room))
    monkeypatch.setattr(current_platform, "is_integrated_gpu", lambda _: shared)
    check_memory(shape, 1, torch.device("cuda"))
    if shared:
        with pytest.raises(KVPolicyError, match="of pinned host memory"):
            check_memory(shape, 4, torch.device("cuda"))
    else:
        check_memory(shape, 4, torch.device("cuda"))


def test_whose_rows() -> None:
    """Both of vLLM's runners say it; a warm-up's rows are nobody's."""
    schedule = compiled(resolve(RECALL))
    batch = SimpleNamespace(req_ids=["a", "b"])
    first = RunnerV1Requests(SimpleNamespace(input_batch=batch), schedule, None)
    assert first.names(SimpleNamespace()) == ["a", "b"]
    states = SimpleNamespace(index_to_req_id={3: "c", 1: "d"})
    second = RunnerV2Requests(SimpleNamespace(req_states=states), schedule, None)
    assert second.names(SimpleNamespace(req_idx=None)) == []
    assert second.names(SimpleNamespace(req_idx=np.asarray([3, 1, 9]))) == ["c", "d", None]


def test_a_gpu_worker_makes_rings_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM measures how much memory is left for pages; of all layers, for all requests."""
    order: list[str] = []
    monkeypatch.setattr(KVPolicyWorker, "load_model", lambda self: order.append("model"))
    policy = resolve({**RECALL, "trace": True})
    monkeypatch.setattr(gpu_worker, "policy_of", lambda config: policy)
    layer = PagedLayer(Shape(), {**RECALL, "recall_memory": 1.0}, 2)
    worker = gpu_worker.GPUKVPolicyWorker.__new__(gpu_worker.GPUKVPolicyWorker)
    monkeypatch.setattr(recall_memory, "this_device", lambda: worker.device_entry)
    worker.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(max_model_len=1000),
        speculative_config=None,
        additional_config={},
    )
    worker.device = CPU  # not that of the model's weights, which vLLM may have moved to the host
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1, device="meta"))
    window = replace(layer.spec, policy=window_policy(policy, 9), window=9)
    specs = {"a": layer.spec, "windowed": window, "b": layer.spec}
    monkeypatch.setattr(worker, "get_kv_cache_spec", lambda: order.append("specs") or specs)
    worker.load_model()
    assert order == ["model", "specs"] and isinstance(worker._stores, Rings)
    assert worker._stores.codes.shape == (2, 2, 5 * 6, 4, 16)
    assert len(worker._stores._free_chunks) > 100, "for snapshots, in a GiB"
    builder = SimpleNamespace(kv_cache_spec=layer.spec, layer_names=["b", "a"])
    asked: dict[str, Any] = {}
    layers = {
        name: SimpleNamespace(
            impl=SimpleNamespace(recall_from=lambda *args, name=name: asked.update({name: args}))
        )
        for name in "ab"
    }
    worker._open_stores(builder, layers)
    assert builder.stores is worker._stores
    assert asked == {"b": (worker._stores, 0, 32), "a": (worker._stores, 1, 32)}


# --- a layer --------------------------------------------------------------------------------------


def rings_of(layer: PagedLayer, num_requests: int) -> Rings:
    """Rings for a layer of the CUDA backend."""
    shape = unit_shape(layer.spec, num_layers=2)
    rings = Rings(shape, num_requests, CPU)
    layer.builder.stores = rings
    layer.impl.recall_from(rings, 1, layer.policy.recall_queries)
    return rings


def two_layers(
    shape: Shape, settings: dict[str, Any], pages: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[PagedLayer, PagedLayer, Stores]:
    """A layer of the CPU backend in PyTorch with its logs, and one of the CUDA backend."""
    monkeypatch.setenv(SWITCH, "pytorch")
    plain = PagedLayer(shape, settings, pages)
    use_triton(monkeypatch)
    layer = PagedLayer(shape, settings, pages)
    stores = Stores(rings_of(layer, 4).shape)
    plain.builder.stores = stores
    plain.impl.recall_from(stores, 1, plain.policy.recall_queries)
    return plain, layer, stores


@pytest.mark.parametrize(
    "head_policy", [pytest.param("homogeneous", marks=pytest.mark.slow), "per_kv_head"]
)
def test_a_recorded_step_recalls(head_policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of a step of padding, recorded as a graph would be, serve every later one."""
    shape, rows, pages = Shape(), 3, 5
    settings = {**RECALL, "budget": 16, "head_policy": head_policy}
    plain, layer, stores = two_layers(shape, settings, 1 + 2 * pages, monkeypatch)
    heads, size = shape.num_kv_heads, shape.head_size
    table = torch.zeros(rows, pages, dtype=torch.int32)
    seq_lens = torch.ones(rows, dtype=torch.int32)
    query = torch.randn(rows, heads * shape.group, size)
    key, value = torch.randn(2, rows, heads, size)
    output_, before = torch.empty_like(query), layer.pool.clone()
    builder, name = layer.builder, SimpleNamespace(layer_name="layer")
    captured = builder.build_for_cudagraph_capture(common([1] * rows, table))
    graph = Graph()
    with graph.capture(monkeypatch):
        layer.impl.forward(name, query, key, value, layer.pool, captured, output_)
    assert torch.equal(layer.pool, before), "capture writes nothing"
    assert len(graph) == 3 + 8  # attend, merge_scored, insert; and recall's
    monkeypatch.setattr(builder.requests, "names", lambda common: ["a", "b"], raising=False)
    builder.stores.note(output(scheduled_new_reqs=[new("a", 1), new("b", 2)]))
    table[:-1] = torch.arange(1, 1 + 2 * pages).view(2, -1).int()
    stores.logs.update({int(table[row, 0]): Log(stores.shape) for row in range(2)})
    turn = oracle_for(CASCADE, shape, layer).rotate
    for step in range(42):
        lengths = [step + 1, max(step - 6, 0), 0]
        seq_lens.copy_(torch.tensor(lengths))
        builder.build(0, common(lengths, table).replace(seq_lens=seq_lens))
        positions = builder.positions.buffer[:rows].tolist()
        fresh = torch.randn(query.shape), torch.randn(key.shape)
        for buffer, now in zip((query, key), fresh, strict=True):
            buffer.copy_(torch.stack([turn(x, p) for x, p in zip(now, positions, strict=True)]))
        value.normal_()
        output_.fill_(torch.nan)
        graph.replay()
        real = [row for row, length in enumerate(lengths) if length]
        expected = torch.empty(len(real), *query.shape[1:])
        firsts = [lengths[row] - 1 for row in real]
        metadata = plain.builder.build(
            0, step_of(firsts, [1] * len(real), [False] * len(real), table[real])
        )
        plain.impl.forward(
            name, query[real], key[real], value[real], plain.pool, metadata, expected
        )
        torch.testing.assert_close(output_[real], expected, atol=2e-5, rtol=2e-5)
        for row in real:
            slots = layer.spec.schedule.peak_at(lengths[row])
            where = table[row].long(), slots, lengths[row]
            assert kept_tokens(layer.pages, *where) == kept_tokens(plain.pages, *where), step
    assert layer.impl.recall.exchanged == plain.impl.recall.exchanged > 4


def test_strides_are_judged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more queries than memory is profiled for, and every stride's go with its own row."""
    shape, tokens = Shape(num_kv_heads=1), [72, 60, 72]
    settings = {**RECALL, "recall_queries": 2, "prefill_stride": 48}
    plain, layer, stores = two_layers(shape, settings, 16, monkeypatch)
    judged: list[int] = []

    parts_of = Judge.parts

    def noted(judge: Judge, *args: Any) -> list[Any]:
        made = parts_of(judge, *args)
        judged.extend(part.num_rows for part in made)
        return made

    monkeypatch.setattr(Judge, "parts", noted)
    table, names = torch.arange(1, 16).view(3, 5).int(), ["a", "b", "c"]
    monkeypatch.setattr(layer.builder.requests, "names", lambda common: names, raising=False)
    layer.builder.stores.note(
        output(scheduled_new_reqs=[new(name, 1 + i) for i, name in enumerate(names)])
    )
    stores.logs.update({int(pages[0]): Log(stores.shape) for pages in table})
    torch.manual_seed(4)
    query = torch.randn(sum(tokens), shape.group, shape.head_size)
    key, value = torch.randn(2, sum(tokens), 1, shape.head_size)
    turn = oracle_for(CASCADE, shape, layer).rotate
    step = tokens, [0] * 3, [True] * 3, table, query, key, value, turn
    many = 2**31 - 1  # after a day of a busy server
    layer.impl.recall._exchanged += many
    torch.testing.assert_close(layer.step(*step), plain.step(*step), atol=2e-5, rtol=2e-5)
    assert set(judged) == {1, 2}, "two of three at a time"
    for pages, num in zip(table.long(), tokens, strict=True):
        where = pages, layer.spec.schedule.peak_at(num), num
        assert kept_tokens(layer.pages, *where) == kept_tokens(plain.pages, *where)
    assert layer.impl.recall.exchanged - many == plain.impl.recall.exchanged == 6


def test_a_warm_up_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of recall's kernels run, and what pages and rings hold stays; requests go on as before.

    Here it comes between two steps of a request, though engines have none by then.
    """
    shape, tokens = Shape(num_kv_heads=1), 48
    plain, layer, stores = two_layers(shape, RECALL, 8, monkeypatch)
    rings, table = layer.builder.stores, torch.arange(1, 6).view(1, -1).int()
    monkeypatch.setattr(layer.builder.requests, "names", lambda common: ["a"], raising=False)
    rings.note(output(scheduled_new_reqs=[new("a", 1)]))
    stores.logs[1] = Log(stores.shape)
    torch.manual_seed(4)
    query = torch.randn(2 * tokens, shape.group, shape.head_size)
    key, value = torch.randn(2, 2 * tokens, 1, shape.head_size)
    turn = oracle_for(CASCADE, shape, layer).rotate

    def step(begin: int) -> None:
        rows = (x[begin : begin + tokens] for x in (query, key, value))
        args = [tokens], [begin], [True], table, *rows, turn
        torch.testing.assert_close(layer.step(*args), plain.step(*args), atol=2e-5, rtol=2e-5)

    def state() -> list[Any]:
        tensors = rings.rows, rings.codes, rings.scales, rings.born, rings.token, layer.pool
        numbers = rings.end, rings.shown, rings.selected_by_many
        counted = layer.impl.recall.exchanged, rings.num_units, vars(layer.builder.counters)
        words = [tensor.view(torch.uint8).tolist() for tensor in tensors]
        return [words, [number.tolist() for number in numbers], *map(str, counted)]

    step(0)
    before = state()
    warm_up(layer.builder, layer.impl, layer.pool, table.shape[1])
    assert state() == before and layer.impl.recall.exchanged > 0
    step(tokens)
    assert layer.impl.recall.exchanged == plain.impl.recall.exchanged
