# SPDX-License-Identifier: Apache-2.0
"""A race detector on Triton's interpreter.

What a GPU does with a launch is promised by three things only: a program's barriers
(``tl.debug_barrier``), atomics, and the launch's end. Here every load, store and atomic of a launch
is recorded with its program and the barriers before it, and two accesses to a byte, one of which
writes, are looked at:

* of different programs: a conflict, unless atomics order them (vector clocks; an atomic releases
  what came before its program's last barrier, and acquires for what comes after it);
* of one program between two barriers: a hazard, because a program is many threads. Tensors'
  elements are threads' by layout, so the same element of the same shape is taken for one thread's,
  where there are no fewer elements than threads; where there are fewer, all warps load (replicas)
  and one stores;
* of one store: two elements to one address with different values.

Then the programs run again in other orders, and every byte of every tensor must come out the same.
"""

import ast
import random
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

LOAD, STORE, ATOMIC = "load", "store", "atomic"
HERE = __file__
KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "triton"


@dataclass
class Access:
    kind: str
    program: int
    epoch: int
    site: tuple[str, ...]
    size: int
    address: np.ndarray  # of the elements that are not masked
    lane: np.ndarray
    numel: int
    shape: tuple[int, ...]


@dataclass
class Launch:
    """One launch's findings."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    accesses: int = 0
    barriers: int = 0
    atomics: int = 0
    cross: Counter = field(default_factory=Counter)
    within: Counter = field(default_factory=Counter)
    duplicate: Counter = field(default_factory=Counter)
    orders_differ: list[str] = field(default_factory=list)
    example: dict[Any, str] = field(default_factory=dict)


def barriers() -> dict[str, str]:
    """Every ``tl.debug_barrier()`` of our kernels: its function and number in it, and its site."""
    found: dict[str, str] = {}
    for file in sorted(KERNELS.glob("*.py")):
        for function in ast.parse(file.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                lines = [call.lineno for call in calls if "debug_barrier" in ast.unparse(call.func)]
                for number, line in enumerate(sorted(lines)):
                    found[f"{function.name}:{number}"] = f"{file.name}:{function.name}:{line}"
    return found


class Detector:
    def __init__(
        self,
        folder: str = "kernels/triton",
        orders: int = 2,
        without: str = "",
    ) -> None:
        """``without``: a barrier of ``barriers`` that is left out, to see it missed."""
        self._folder, self._orders, self._rng = folder, orders, random.Random(0)
        self._without = barriers()[without] if without else ""
        self.launches: list[Launch] = []
        self._recording: _Record | None = None
        self._order: list[tuple[int, int, int]] | None = None

    # --- hooks ------------------------------------------------------------------------------------

    @contextmanager
    def __call__(self):
        builder, inner = interpreter.interpreter_builder, interpreter._interpreter
        call, detector = interpreter.GridExecutor.__call__, self
        set_grid_idx = builder.set_grid_idx

        class Watch:
            def __getattr__(self, name):
                return getattr(inner, name)

            def load(self, addresses, mask, other, dtype):
                if detector._recording is not None:
                    size = np.dtype(dtype).itemsize
                    detector._recording.access(LOAD, addresses, mask, size)
                return inner.load(addresses, mask, other, dtype)

            def store(self, addresses, values, mask):
                if detector._recording is not None:
                    detector._recording.access(
                        STORE, addresses, mask, np.asarray(values).itemsize, values
                    )
                return inner.store(addresses, values, mask)

            def atomic_rmw(self, op, addresses, values, mask, sem):
                if detector._recording is not None:
                    size = np.asarray(values).itemsize
                    detector._recording.atomic(addresses, mask, size)
                return inner.atomic_rmw(op, addresses, values, mask, sem)

            def atomic_cas(self, *args):
                raise NotImplementedError("atomic_cas")

        def barrier():
            if detector._recording is not None:
                detector._recording.barrier(detector._without)

        def begin(x, y, z):
            if detector._order is not None:
                _, ny, nz = builder.grid_dim
                x, y, z = detector._order[(x * ny + y) * nz + z]
            set_grid_idx(x, y, z)
            if detector._recording is not None:
                _, ny, nz = builder.grid_dim
                detector._recording.begin((x * ny + y) * nz + z, (x, y, z))

        def launch(executor, *args, **kwargs):
            detector._launch(call, executor, args, kwargs)

        interpreter._interpreter = Watch()
        builder.create_barrier, builder.set_grid_idx = barrier, begin
        interpreter.GridExecutor.__call__ = launch
        try:
            yield self
        finally:
            interpreter._interpreter = inner
            del builder.create_barrier, builder.set_grid_idx
            interpreter.GridExecutor.__call__ = call

    def _launch(self, call, executor, args, kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        storages.pop(0, None)
        views = [
            torch.empty(0, dtype=torch.uint8).set_(s, 0, (s.nbytes(),), (1,))
            for s in storages.values()
        ]
        before = [view.clone() for view in views]
        found = Launch(executor.fn.__name__, (), int(kwargs.get("num_warps", 4)))
        self._recording = _Record(found, self._folder, self._name_of(executor, args, kwargs))
        call(executor, *args, **kwargs)
        record, self._recording = self._recording, None
        found.grid = tuple(interpreter.interpreter_builder.grid_dim)
        record.report()
        after = [view.clone() for view in views]
        count = int(np.prod(found.grid))
        places = [
            (x, y, z)
            for x in range(found.grid[0])
            for y in range(found.grid[1])
            for z in range(found.grid[2])
        ]
        for number in range(self._orders if count > 1 else 0):
            for view, old in zip(views, before, strict=True):
                view.copy_(old)
            self._order = list(reversed(places)) if number == 0 else self._rng.sample(places, count)
            try:
                call(executor, *args, **kwargs)
            finally:
                self._order = None
            for view, wanted, name in zip(views, after, storages, strict=True):
                if not torch.equal(view, wanted):
                    where = (view != wanted).nonzero()[:, 0]
                    found.orders_differ.append(
                        f"order {number}: {len(where)} bytes of the storage of "
                        f"{record.names.get(name, '?')}, first at {int(where[0])}"
                    )
        for view, wanted in zip(views, after, strict=True):
            view.copy_(wanted)
        self.launches.append(found)

    @staticmethod
    def _name_of(executor, args, kwargs):
        named = list(zip(executor.arg_names, args, strict=False)) + list(kwargs.items())
        return {
            value.untyped_storage().data_ptr(): name
            for name, value in reversed(named)
            if isinstance(value, torch.Tensor)
        }, [
            (
                value.data_ptr(),
                value.data_ptr()
                + (sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1)
                * value.element_size(),
                name,
            )
            for name, value in named
            if isinstance(value, torch.Tensor) and value.numel()
        ]


class _Record:
    def __init__(self, found: Launch, folder: str, names) -> None:
        self.found, self._folder = found, folder
        self.names, self._ranges = names
        self._all: list[Access] = []
        self._program = self._epoch = 0
        self._grid_idx: dict[int, tuple[int, int, int]] = {}
        self._clock: dict[int, dict[int, int]] = defaultdict(dict)  # program -> program -> epochs
        self._released: dict[int, dict[int, int]] = defaultdict(dict)  # address -> clock
        self._segments: dict[tuple[int, int], dict[int, int]] = {}

    # --- while a launch runs ----------------------------------------------------------------------

    def begin(self, program: int, grid_idx: tuple[int, int, int]) -> None:
        self._program, self._epoch = program, 0
        self._grid_idx[program] = grid_idx
        self._segments[program, 0] = dict(self._clock[program])

    def _next_epoch(self):
        self._epoch += 1
        self._segments[self._program, self._epoch] = dict(self._clock[self._program])

    def barrier(self, without=""):
        if without and self._site()[:1] == (without,):
            return
        self.found.barriers += 1
        self._next_epoch()

    def _site(self):
        frame, site = sys._getframe(2), []
        while frame is not None:
            name = frame.f_code.co_filename
            if self._folder in name and name != HERE:
                site.append(f"{Path(name).name}:{frame.f_code.co_name}:{frame.f_lineno}")
            elif site and "interpreter" not in name:
                break
            frame = frame.f_back
        return tuple(site[:4])

    def access(self, kind, addresses, mask, size, values=None):
        addresses, mask = np.asarray(addresses), np.asarray(mask).astype(bool)
        if addresses.shape != mask.shape:
            addresses, mask = np.broadcast_arrays(addresses, mask)
        lane = np.flatnonzero(mask.ravel())
        if lane.size == 0:
            return
        address = addresses.ravel()[lane].astype(np.uint64)
        site = self._site()
        self.found.accesses += lane.size
        self._all.append(
            Access(kind, self._program, self._epoch, site, size, address, lane,
                   mask.size, mask.shape)
        )  # fmt: skip
        if kind == STORE:
            if len(np.unique(address)) < len(address):
                value = np.broadcast_to(np.asarray(values), mask.shape).ravel()[lane]
                order = np.argsort(address, kind="stable")
                a, v = address[order], value[order]
                same = a[1:] == a[:-1]
                if (v[1:][same].tobytes()) != (v[:-1][same].tobytes()):
                    self.found.duplicate[site] += 1
                    self.found.example.setdefault(
                        ("duplicate", site),
                        f"program {self._grid_idx[self._program]}, "
                        f"{self._where(int(a[1:][same][0]))}",
                    )

    def atomic(self, addresses, mask, size):
        self.found.atomics += 1
        self.access(ATOMIC, addresses, mask, size)
        clock = self._clock[self._program]
        there = np.asarray(mask).ravel().astype(bool)
        for address in np.asarray(addresses).ravel()[there].tolist():
            released = self._released[address]
            _join(clock, released)
            _join(released, clock)
            # The atomic itself is ordered, and plain accesses before its program's last barrier.
            released[self._program] = max(released.get(self._program, 0), self._epoch + 1)
        # The result comes to all threads by way of shared memory, with barriers, if it is used.
        self._next_epoch()

    # --- afterwards -------------------------------------------------------------------------------

    def _where(self, address):
        for begin, end, name in self._ranges:
            if begin <= address < end:
                return f"{name}+{address - begin} bytes"
        return hex(address)

    def report(self):
        if not self._all:
            return
        self._report_programs()
        self._report_threads()

    def _report_threads(self):
        """Accesses of one program between two barriers."""
        parts = defaultdict(list)
        for access in self._all:
            parts[access.program, access.epoch].append(access)
        for accesses in parts.values():
            stores = [a for a in accesses if a.kind == STORE]
            if not stores:
                continue
            grain = min(a.size for a in accesses)
            stored = np.unique(np.concatenate([_grains(a, grain) for a in stores]))
            rows = []
            for number, a in enumerate(accesses):
                if a.kind == ATOMIC:
                    continue
                grains, lanes = _grains(a, grain), np.repeat(a.lane, a.size // grain)
                there = np.isin(grains, stored)
                if there.any():
                    rows.append((grains[there], np.full(there.sum(), number), lanes[there]))
            grains, numbers, lanes = (np.concatenate(part) for part in zip(*rows, strict=True))
            order = np.lexsort((numbers, grains))
            grains, numbers, lanes = grains[order], numbers[order], lanes[order]
            edges = np.flatnonzero(np.diff(grains)) + 1
            begins, ends = np.r_[0, edges], np.r_[edges, len(grains)]
            several = ends - begins > 1
            seen = set()
            for begin, end in zip(begins[several].tolist(), ends[several].tolist(), strict=True):
                those = list(
                    zip(numbers[begin:end].tolist(), lanes[begin:end].tolist(), strict=True)
                )
                base = those[0][1]
                pattern = tuple((n, lane == base) for n, lane in those)
                if pattern in seen:
                    continue
                seen.add(pattern)
                self._pairs(accesses, those, int(grains[begin]) * grain)

    def _pairs(self, accesses, those, address):
        for i, (n, lane) in enumerate(those):
            for m, other in those[i + 1 :]:
                if n == m:
                    continue
                a, b = accesses[n], accesses[m]
                if STORE not in (a.kind, b.kind):
                    continue
                hazard = {(STORE, LOAD): "RAW", (LOAD, STORE): "WAR", (STORE, STORE): "WAW"}
                threads = 32 * self.found.warps
                if lane != other or a.shape != b.shape:
                    how = "other elements"
                elif a.numel < threads:
                    how = "same element, replicated"
                else:
                    how = "same element"
                if self.found.warps == 1:
                    how += " (one warp)"
                key = hazard[a.kind, b.kind], how, a.site, b.site
                self.found.within[key] += 1
                self.found.example.setdefault(
                    key,
                    f"program {self._grid_idx[a.program]}, {self._where(address)}, "
                    f"elements {lane} of {a.shape} and {other} of {b.shape}",
                )

    def _before(self, one, other):
        """Whether atomics order them; both (program, epoch, kind, site)."""
        known = self._segments[other[0], other[1]].get(one[0], 0)
        return known >= one[1] + (1 if one[2] == ATOMIC else 2)

    def _report_programs(self):
        grain = min(a.size for a in self._all)
        segments: dict[tuple[int, int, str, tuple[str, ...]], int] = {}
        rows = []
        for a in self._all:
            number = segments.setdefault((a.program, a.epoch, a.kind, a.site), len(segments))
            rows.append((_grains(a, grain), number))
        keys = list(segments)
        writers = np.array([k[2] != LOAD for k in keys])
        programs = np.array([k[0] for k in keys])
        grains = np.concatenate([g for g, _ in rows])
        numbers = np.concatenate([np.full(len(g), n) for g, n in rows])
        # Only what is written, and touched by more than one program.
        written = np.unique(grains[writers[numbers]])
        keep = np.isin(grains, written)
        grains, numbers = grains[keep], numbers[keep]
        if grains.size == 0:
            return
        order = np.lexsort((numbers, grains))
        grains, numbers = grains[order], numbers[order]
        fresh = np.r_[True, (np.diff(grains) != 0) | (np.diff(numbers) != 0)]
        grains, numbers = grains[fresh], numbers[fresh]
        edges = np.flatnonzero(np.diff(grains)) + 1
        begins, ends = np.r_[0, edges], np.r_[edges, len(grains)]
        seen = set()
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if end - begin < 2:
                continue
            pattern = numbers[begin:end].tobytes()
            if pattern in seen:
                continue
            seen.add(pattern)
            those = numbers[begin:end]
            if (programs[those] == programs[those[0]]).all():
                continue
            for i in range(len(those)):
                p, _, kind, site = keys[those[i]]
                for j in range(i + 1, len(those)):
                    q, _, other, there = keys[those[j]]
                    if p == q or (kind == LOAD and other == LOAD):
                        continue
                    if kind == ATOMIC and other == ATOMIC:
                        continue
                    if self._before(keys[those[i]], keys[those[j]]):
                        continue
                    if self._before(keys[those[j]], keys[those[i]]):
                        continue
                    key = tuple(sorted(((kind, site), (other, there))))
                    self.found.cross[key] += 1
                    self.found.example.setdefault(
                        key,
                        f"programs {self._grid_idx[p]} and {self._grid_idx[q]}, "
                        f"{self._where(int(grains[begin]) * grain)}",
                    )


def _grains(access: Access, grain: int) -> np.ndarray:
    first, each = access.address // np.uint64(grain), access.size // grain
    if each == 1:
        return first.astype(np.int64)
    return (first[:, None] + np.arange(each, dtype=np.uint64)).ravel().astype(np.int64)


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for program, epochs in other.items():
        if clock.get(program, 0) < epochs:
            clock[program] = epochs


def summary(launches: list[Launch]) -> str:
    """What was found, by kernel; equal findings once."""
    lines = []
    by_kernel = defaultdict(list)
    for launch in launches:
        by_kernel[launch.kernel].append(launch)
    for kernel, those in sorted(by_kernel.items()):
        programs = sum(int(np.prod(x.grid)) for x in those)
        lines.append(
            f"{kernel}: {len(those)} launches, {programs} programs, "
            f"{sum(x.accesses for x in those)} elements accessed, "
            f"{sum(x.barriers for x in those)} barriers, {sum(x.atomics for x in those)} atomics"
        )
        for title, name in (
            ("BETWEEN PROGRAMS", "cross"),
            ("BETWEEN THREADS", "within"),
            ("ONE STORE, DIFFERENT VALUES", "duplicate"),
        ):
            total, example = Counter(), {}
            for x in those:
                total.update(getattr(x, name))
                for key in getattr(x, name):
                    what = ("duplicate", key) if name == "duplicate" else key
                    example.setdefault(key, f"{x.warps} warps, {x.example.get(what)}")
            for key, number in sorted(total.items(), key=str):
                lines.append(f"    {title} x{number}: {_readable(key)}; e.g. {example[key]}")
        for x in those:
            for one in x.orders_differ[:2]:
                lines.append(f"    ANOTHER ORDER, ANOTHER RESULT: grid {x.grid}: {one}")
    return "\n".join(lines)


def _readable(key: Any) -> str:
    if isinstance(key, tuple):
        return " | ".join(map(_readable, key)) if not _is_site(key) else " < ".join(key)
    return str(key)


def _is_site(key: Any) -> bool:
    return bool(key) and all(isinstance(part, str) and ".py:" in part for part in key)
