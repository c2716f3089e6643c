# SPDX-License-Identifier: Apache-2.0
"""Host memory of recall as the scheduler counts it: against plain counts and a worker's logs."""

import mmap
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.test_paged import PagedLayer, Shape
from tests.attention.test_recall import shape_of
from tests.conftest import ROOT
from vllm_cascade.engine import recall_memory
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.chain import CHUNK_UNITS
from vllm_cascade.recall.log import Chunk, Log, UnitShape
from vllm_cascade.recall.mapped import block_bytes, new_block, view
from vllm_cascade.recall.memory import CountedLog, RecallMemory, check_one_fits
from vllm_cascade.recall.rings import RingMemory, chunk_bytes, ring_bytes
from vllm_cascade.step.recall import unit_shape

UNIT = 4
MOST_TOKENS = 64
POLICIES = {
    "sink": {"name": "sink", "budget": 16},
    "cascade": {"name": "cascade", "budget": 32, "num_subcaches": 2},
    "lazy": {"name": "sink", "budget": 16, "overflow": 40},
    "beehive": {"name": "beehive", "budget": 48},
}


def schedule_of(name: str, store: int = 200) -> Schedule:
    more = {"unit": UNIT, "recall": 2, "recall_store": store, "prefill_stride": 16}
    return compiled(resolve({**POLICIES[name], **more}))


class Machine:
    """A scheduler's count beside a worker's logs; as many of both as events ask for."""

    def __init__(self, schedule: Schedule, chunks: int) -> None:
        self.schedule, self.chunks = schedule, chunks
        self.memory = RecallMemory(schedule, 10 * chunks + 9, 10, MOST_TOKENS)
        self.shape = shape_of(UNIT, schedule.policy.recall_store // UNIT)
        self.live: WeakSet[Chunk] = WeakSet()
        self.running: dict[str, tuple[int, int, Log]] = {}  # limit, tokens so far
        self.snapshots: OrderedDict[int, tuple[CountedLog, Log]] = OrderedDict()  # by tokens
        self.number = self.dropped = 0

    def drop_oldest(self, frees: Callable[[CountedLog | None], bool]) -> bool:
        found = next((tokens for tokens, (log, _) in self.snapshots.items() if frees(log)), None)
        self.dropped += found is not None
        return found is not None and bool(self.snapshots.pop(found))

    def admit(self, a: int, b: int) -> None:
        limit, (name, self.number) = 20 + 3 * a, (f"r{self.number}", self.number + 1)
        need, promised = self.memory.need(self.schedule, limit), self.memory.reserved.values()
        assert self.memory.fits(need) == (need + sum(promised) <= self.chunks)
        if not self.memory.fits(need):
            return
        tokens, log = 0, Log(self.shape, self.live)
        starts = [num for num in self.snapshots if num < limit]
        if starts and b % 2:
            tokens = starts[b % len(starts)]
            counted, theirs = self.snapshots[tokens]
            self.snapshots.move_to_end(tokens)
            self.memory.adopt(name, counted)
            log = theirs.fork()
        self.memory.admit(name, need)
        self.running[name] = limit, tokens, log

    def snapshot(self, a: int, b: int) -> None:
        if not self.running:
            return
        name = sorted(self.running)[a % len(self.running)]
        _, tokens, log = self.running[name]
        if tokens not in self.snapshots and name in self.memory.logs:
            self.snapshots[tokens] = self.memory.fork(name, log.end), log.fork()

    def step(self, a: int, b: int) -> None:
        left = MOST_TOKENS
        for i, (name, (limit, tokens, log)) in enumerate(self.running.items()):
            num = min(1 + (a + 7 * i) % 50, left, limit - tokens)
            left -= num
            self.running[name] = limit, tokens + num, log
        rows = [(name, self.schedule, tokens) for name, (_, tokens, _) in self.running.items()]
        self.memory.grow(rows, self)
        read = []
        for _, tokens, log in self.running.values():
            read.append((log.part(log.begin, log.end), log.grow(self.evicted(tokens) - log.end)))
        assert len(self.live) <= self.chunks, "during a step"

    def end(self, a: int, b: int) -> None:
        if self.running:
            name = sorted(self.running)[a % len(self.running)]
            self.memory.release(name)
            del self.running[name]

    def evicted(self, tokens: int) -> int:
        return int(self.schedule.evicted(np.asarray(tokens)))

    def check(self) -> None:
        logs = {name: log for name, (_, _, log) in self.running.items()}
        every = [*logs.values(), *(log for _, log in self.snapshots.values())]
        plain = {id(chunk) for log in every for chunk in log.chunks}
        assert self.memory.used_bytes == 10 * len(plain) == 10 * len(self.live)
        assert len(plain) <= self.chunks and self.memory.limit_bytes == 10 * self.chunks
        assert self.memory.reserved_bytes == 10 * sum(self.memory.reserved.values())
        assert self.memory.reserved_bytes <= self.memory.limit_bytes
        assert self.memory.reserved.keys() == self.running.keys()
        for name, log in logs.items():
            assert len(log.chunks) <= self.memory.reserved[name]


@pytest.mark.parametrize("name", POLICIES)
def test_most_at_once(name: str) -> None:
    """No step evicts more than it adds and this; some step evicts as much."""
    schedule = schedule_of(name)
    evicted = schedule.evicted(np.arange(4000))
    units = np.arange(4000) // UNIT
    over = [
        (evicted[n:] - evicted[: len(evicted) - n] - (units[n:] - units[: len(units) - n])).max()
        for n in (1, 3, 4, 16, 64, 200)
    ]
    assert 0 <= max(over) <= schedule.most_at_once


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(2, 30),
    st.sampled_from([8, 40, 200]),
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "step", "step", "step", "snapshot", "end"]),
            st.integers(0, 400),
            st.integers(0, 400),
        ),
        max_size=60,
    ),
)
def test_any_sequence(
    name: str, chunks: int, store: int, events: list[tuple[str, int, int]]
) -> None:
    """The sum stays within the bound, and is what a worker's logs hold, chunk by chunk."""
    machine = Machine(schedule_of(name, store), chunks)
    for what, a, b in events:
        getattr(machine, what)(a, b)
        machine.check()
    while machine.running:
        machine.end(0, 0)
    machine.check()
    machine.snapshots.clear()
    machine.check()
    assert machine.memory.used_bytes == machine.memory.reserved_bytes == 0


def test_snapshots_have_what_is_left() -> None:
    """A chunk that both share counts once; the least recently used snapshot goes first."""
    machine = Machine(schedule_of("sink"), 12)
    memory = machine.memory
    machine.admit(93, 0)  # 299 tokens evict 70 units: 5 chunks, and one of a copy
    assert memory.reserved_bytes == 60
    for _ in range(6):
        machine.step(48, 0)
        machine.snapshot(0, 0)
    assert list(machine.snapshots) == [49, 98, 147, 196, 245, 294]
    # Units 0 to 7, 20, 32, 44, 56 and 69, each in chunks of 16 whose last was copied on growth.
    machine.check()
    assert memory.used_bytes == 10 * len(machine.live) and machine.dropped == 0
    before = memory.used_bytes
    machine.end(0, 0)
    assert memory.used_bytes == before, "the last snapshot has all of its chunks"
    machine.admit(93, 0)
    for _ in range(7):
        machine.step(48, 0)
        machine.check()
    assert machine.dropped and next(iter(machine.snapshots)) != 49


def test_who_recalls_nothing_needs_nothing() -> None:
    schedule = schedule_of("sink")
    memory = RecallMemory(schedule, 20, 10, MOST_TOKENS)
    plain = compiled(schedule.policy.model_copy(update={"recall": 0}))
    assert memory.need(plain, 100_000) == 0 and memory.need(schedule, 16) == 0
    memory.admit("plain", 0)
    memory.grow([("plain", plain, 5000)], None)
    assert memory.used_bytes == 0 and memory.fork("plain", 9) is None


def test_the_longest_request_must_fit() -> None:
    policy = resolve(
        {**POLICIES["sink"], "unit": UNIT, "recall": 2, "recall_store": 4096, "prefill_stride": 16}
    ).model_copy(update={"recall_memory": 0.5})
    room = 1 << 29
    memory = RecallMemory(compiled(policy), room, 10 << 20, MOST_TOKENS)
    with pytest.raises(KVPolicyError, match="recall_store 4096 tokens takes") as error:
        check_one_fits(memory, policy, 10**6)
    most, least = re.findall(
        r"at most (\d+), or recall_memory to at least ([\d.]+)", str(error.value)
    )[0]
    fits = policy.model_copy(update={"recall_store": int(most)})
    check_one_fits(RecallMemory(compiled(fits), room, 10 << 20, MOST_TOKENS), fits, 10**6)
    more = int(float(least) * (1 << 30))
    check_one_fits(RecallMemory(compiled(policy), more, 10 << 20, MOST_TOKENS), policy, 10**6)
    with pytest.raises(KVPolicyError, match="recall_store 4096 tokens takes") as error:
        check_one_fits(memory, policy, 4096)  # a stream as long as the store
    assert re.findall(r"at most (\d+), or recall_memory", str(error.value)) == [most]
    check_one_fits(RecallMemory(compiled(fits), room, 10 << 20, MOST_TOKENS), fits, 4096)
    check_one_fits(memory, policy, 1000)  # no stream evicts that many
    small = RecallMemory(compiled(policy), 10 << 20, 10 << 20, MOST_TOKENS)
    with pytest.raises(KVPolicyError, match=r"0\.5; set recall_memory to at least"):
        check_one_fits(small, policy, 10**6)  # a store of less than 2 units is invalid


@pytest.mark.parametrize("name", POLICIES)
def test_no_request_needs_more_than_the_longest(name: str) -> None:
    """A request's own policy may evict more than the engine's, and more at a time."""
    engine = schedule_of("lazy" if name == "sink" else name)
    memory = RecallMemory(engine, 10**6, 10, MOST_TOKENS)
    for num_tokens in (10, 100, 200, 400, 3000):
        for budget in (8, 16, 32, 48):
            if budget % (4 if name != "cascade" else 16) or budget > engine.policy.budget:
                continue
            own = {**POLICIES[name], "budget": budget, "unit": UNIT, "recall": 2}
            schedule = compiled(resolve({**own, "recall_store": 200, "prefill_stride": 16}))
            assert memory.need(schedule, num_tokens) <= memory.most_need(num_tokens)


def test_quantised_caches_keep_their_codes() -> None:
    """Their rows have one byte a number already."""
    settings = {**POLICIES["sink"], "unit": UNIT, "recall": 2, "recall_rows": "int8"}
    spec = PagedLayer(Shape(), settings, 2).spec
    assert unit_shape(spec, 3).in_8_bits
    assert not unit_shape(replace(spec, dtype=torch.uint8), 3).in_8_bits


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that ends the engine says what to set."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(MemoryError, match=r"Cannot allocate memory.*lower recall_memory"):
        new_block((((4, 4), torch.float32),))


@given(room=st.integers(1, 2_000_000), most=st.integers(1, 9))
def test_snapshots_have_half_as_much_as_rings(room: int, most: int) -> None:
    """With no chunks, no prompt that evicts would leave a snapshot: prefix caching would be off."""
    schedule, shape = schedule_of("sink"), shape_of(UNIT, 50)
    ring = ring_bytes(shape)[1]
    alone = RingMemory(schedule, shape, room, most)
    memory = RingMemory(schedule, shape, room, most, keeps_snapshots=True)
    assert memory.limit_bytes <= room
    assert min(alone.capacity, 1) <= memory.capacity <= alone.capacity
    if memory.capacity > 1:
        kept = memory.limit_bytes - memory.bytes_of(memory.capacity)
        assert kept >= memory.bytes_of(memory.capacity) // 2
    if memory.capacity < alone.capacity:  # no more rings would leave as much
        more = memory.bytes_of(memory.bytes_of(memory.capacity) // ring + 1)
        assert room - more < more // 2


def test_rings_take_at_most_their_share_of_the_device() -> None:
    schedule, shape = schedule_of("sink"), shape_of(UNIT, 50)
    device, ring = ring_bytes(shape)
    memory = RingMemory(schedule, shape, 300_000, 8)
    for room, rings in ((0, 0), (device, 32_768), (5 * device, 131_072), (6 * device, 262_144)):
        assert memory.bytes_on_device(room) == rings
        assert rings // ring * device <= room
    both = RingMemory(schedule, shape, 300_000, 8, keeps_snapshots=True)
    assert both.bytes_on_device(6 * device) == 2 * 262_144


def test_rings_are_counted_as_a_whole() -> None:
    """Pinned memory is taken in powers of two; each request that recalls has one ring."""
    schedule, shape = schedule_of("sink"), shape_of(UNIT, 50)
    ring = ring_bytes(shape)[1]
    assert ring == 2 * 2 * 50 * UNIT * 2 * 8 * 4 == 51_200
    memory = RingMemory(schedule, shape, 300_000, 8)
    assert memory.capacity == 262_144 // ring == 5
    assert memory.used_bytes == memory.limit_bytes == 262_144
    for i in range(5):
        assert memory.fits(memory.need(schedule, 1))
        memory.admit(f"r{i}", 1)
    assert not memory.fits(1) and memory.fits(0)
    memory.release("r3")
    assert memory.fits(1)
    assert RingMemory(schedule, shape, 300_000, 2).capacity == 2


def test_snapshots_have_chunks_beside_rings() -> None:
    """In what ``recall_memory`` leaves; the least recently used make room."""
    schedule, shape = schedule_of("sink"), shape_of(UNIT, 50)
    rings, chunk = 262_144, chunk_bytes(shape)
    assert chunk == sum(ring_bytes(shape)) // 50 * CHUNK_UNITS
    assert RingMemory(schedule, shape, rings + 8 * chunk, 5).num_chunks == 0, "no prefix caching"
    memory = RingMemory(schedule, shape, rings + 131_072, 5, keeps_snapshots=True)
    assert (memory.capacity, memory.num_chunks) == (5, 131_072 // chunk)
    assert memory.used_bytes == rings + 131_072
    assert memory.most_bytes(9, 5) == 2 * RingMemory(schedule, shape, rings, 5).most_bytes(9, 5)
    snapshots: list[Any] = []

    class Oldest:
        dropped = 0

        def drop_oldest(self, frees: Callable[[Any], bool]) -> bool:
            assert not frees(None) and all(map(frees, snapshots))
            Oldest.dropped += bool(snapshots)
            return bool(snapshots and snapshots.pop(0) is not None)

    memory.admit("a", 1)
    memory.admit("plain", 0)
    assert memory.fork("a", 0) is None and memory.fork("plain", 9) is None
    sizes = [(1, 1), (16, 1), (17, 2), (500, 4)]
    for units, chunks in sizes:
        before = len(memory._kept)
        snapshots.append(memory.fork("a", units))
        memory.grow([], Oldest())
        assert Oldest.dropped or len(memory._kept) - before == chunks
    assert memory.num_chunks == 6 and Oldest.dropped == 2 and len(memory._kept) == 2 + 4
    memory.adopt("b", snapshots[0])
    snapshots.clear()
    assert not memory._kept, "a request has a ring, no chunks"


def test_tensors_of_a_block_are_aligned() -> None:
    layout = [((3, 5), torch.int8), ((7,), torch.float32), ((2, 0), torch.float32)]
    layout += [((9,), torch.bfloat16)]
    memory = new_block(layout)
    tensors = [view(memory, layout, i) for i in range(len(layout))]
    assert [(tuple(one.shape), one.dtype) for one in tensors] == layout
    assert all(one.data_ptr() % 64 == 0 for one in tensors)
    for i, one in enumerate(tensors):
        one.fill_(i)
    assert all((one == i).all() for i, one in enumerate(tensors)), "they overlap"
    assert memory.nbytes == block_bytes(layout) == 4096


HOLES = """
import sys
sys.modules["vllm"] = None  # a log needs none
from pathlib import Path
from weakref import WeakSet

import torch

from vllm_cascade.recall.log import Log, UnitShape


def heap():
    lines = Path("/proc/self/smaps").read_text("utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.endswith("[heap]"))
    return next(int(line.split()[1]) for line in lines[begin:] if line.startswith("Rss:"))


shape = UnitShape(4, 2, 1, 16, 64, torch.bfloat16, most_units=10**6, most_recalled=8)
log = Log(shape, WeakSet())
torch.empty(8 << 20, dtype=torch.uint8).fill_(1)  # malloc maps only what is larger from here on
sizes = torch.randint(1 << 17, 1 << 20, (2400,), generator=torch.Generator().manual_seed(0))
for i in range(300):
    held = [torch.empty(n, dtype=torch.uint8).fill_(1) for n in sizes[8 * i :][:8].tolist()]
    log.grow(16)
    del held
    if i == 99:
        before = heap()
print(heap() - before)
"""


def test_chunks_leave_no_holes_in_the_heap() -> None:
    """Small allocations that stay between temporary tensors would fragment the heap."""
    command = [sys.executable, "-c", HOLES]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # 1,000 to 6,300 KiB, depending on where the system maps memory; 37,000 if tensors are kept.
    assert int(found.stdout) < 15_000, f"the heap grew by {found.stdout} KiB"


def test_memory_returns_to_the_system() -> None:
    """Resident memory grows by a log's chunks and shrinks by them, whatever order they go in."""
    shape = UnitShape(
        num_layers=4,
        num_kv_heads=2,
        num_sets=1,
        unit=16,
        head_size=64,
        dtype=torch.bfloat16,
        most_units=10**6,
        most_recalled=8,
    )
    process, logs, live = psutil.Process(), [], WeakSet()
    Log(shape, live).grow(1)
    before = process.memory_info().rss
    for i in range(40):
        log = Log(shape, live)
        part = log.grow(CHUNK_UNITS * (1 + i % 5))
        for chunk in part.chunks:
            for tensor in chunk.tensors:
                tensor.fill_(i)
        logs.append(log)
    part = log = None
    expected = len(live) * shape.chunk_bytes
    grown = process.memory_info().rss - before
    print(f"{expected / 2**20:.1f} MiB of chunks, resident +{grown / 2**20:.1f} MiB")
    assert grown == pytest.approx(expected, rel=0.05)
    del chunk, tensor, logs[::2]
    assert process.memory_info().rss - before == pytest.approx(
        len(live) * shape.chunk_bytes, abs=0.05 * expected
    )
    logs.clear()
    assert not live and process.memory_info().rss - before < 0.05 * expected


# --- what the host has ----------------------------------------------------------------------------

VERSION_1 = {
    "limit": "memory/memory.limit_in_bytes",
    "used": "memory/memory.usage_in_bytes",
    "stat": ("memory/memory.stat", "total_inactive_file"),
}
VERSION_2 = {
    "limit": "memory.max",
    "used": "memory.current",
    "stat": ("memory.stat", "inactive_file"),
}


@pytest.mark.parametrize("version", [VERSION_1, VERSION_2], ids=["v1", "v2"])
def test_memory_of_a_container(
    version: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 GiB, of which a process has 1 and files' pages 10, which the kernel gives up on demand."""
    (tmp_path / "memory").mkdir()
    gib = 2**30
    monkeypatch.setattr(recall_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(recall_memory, "MEMBERSHIP", tmp_path / "none")
    host = SimpleNamespace(available=64 * gib)
    monkeypatch.setattr(recall_memory.psutil, "virtual_memory", lambda: host)
    (tmp_path / version["limit"]).write_text(f"{12 * gib}\n")
    (tmp_path / version["used"]).write_text(f"{11 * gib}\n")
    file, name = version["stat"]
    (tmp_path / file).write_text(f"anon {gib}\n{name} {10 * gib}\n")
    assert recall_memory.available_bytes() == 11 * gib
    host.available = 3 * gib
    assert recall_memory.available_bytes() == 3 * gib
    for without in ("max\n", f"{2**63 - 4096}\n"):  # as the two versions say it
        (tmp_path / version["limit"]).write_text(without)
        assert recall_memory.available_bytes() == 3 * gib


@pytest.mark.parametrize(
    ("root", "line", "names"),
    [
        ("memory", "9:cpu,memory:{}", VERSION_1),
        ("", "0::{}", VERSION_2),
    ],
    ids=["v1", "v2"],
)
def test_memory_of_a_group_within_groups(
    root: str,
    line: str,
    names: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unit has 8 GiB and uses 1; the groups above it have 6 left, and no limit."""
    gib = 2**30
    monkeypatch.setattr(recall_memory, "CGROUP", tmp_path / "groups")
    monkeypatch.setattr(recall_memory, "MEMBERSHIP", tmp_path / "membership")
    host = SimpleNamespace(available=256 * gib)
    monkeypatch.setattr(recall_memory.psutil, "virtual_memory", lambda: host)
    limit, used = (Path(names[key]).name for key in ("limit", "used"))
    cache = names["stat"][1]
    folder = tmp_path / "groups" / root
    for name, most, taken in (
        ("", None, 0),
        ("system.slice", 20 * gib, 14 * gib),
        ("system.slice/vllm.service", 8 * gib, gib),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / limit).write_text("max" if most is None else f"{most}")
        (folder / name / used).write_text(f"{taken}")
        (folder / name / "memory.stat").write_text(f"{cache} 0\n")
    for path, free in (
        ("/system.slice/vllm.service", 6),
        ("/system.slice", 6),
        ("/", 256),
        ("/of/another/namespace", 256),
    ):
        (tmp_path / "membership").write_text(f"1:cpuset:/\n{line.format(path)}\n")
        assert recall_memory.available_bytes() == free * gib
    (folder / "system.slice" / used).write_text(f"{2 * gib}")
    (tmp_path / "membership").write_text(line.format("/system.slice/vllm.service"))
    assert recall_memory.available_bytes() == 7 * gib
