# SPDX-License-Identifier: Apache-2.0
"""Files of sessions: a damaged or foreign file never gives a state, whatever happened to it."""

import errno
import io
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Semaphore, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.sessions.held import held_bytes
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import Chunk, Log, UnitShape
from vllm_cascade.recall.stores import Stores
from vllm_cascade.sessions import files, tiers
from vllm_cascade.sessions import folder as folder_module
from vllm_cascade.sessions.copies import Copies
from vllm_cascade.sessions.files import FOREIGN, Unusable, file_name, read, write
from vllm_cascade.sessions.folder import DAMAGED, Folder
from vllm_cascade.sessions.index import SessionIndex
from vllm_cascade.sessions.session import Command, Report, Session
from vllm_cascade.sessions.settings import SessionSettings
from vllm_cascade.sessions.tiers import WorkerSessions

ENGINE = {key: f"this {key}" for key in FOREIGN}
SHAPE = UnitShape(
    num_layers=2,
    num_kv_heads=1,
    num_sets=1,
    unit=4,
    head_size=8,
    dtype=torch.bfloat16,
    most_units=40,
    most_recalled=3,
)


def session(num: int = 5) -> Session:
    return Session("context", f"tokens{num}", num, 100)


def pin(path: Path, names: dict[str, str]) -> None:
    """Pin sessions in a folder that no server uses."""
    folder = Folder(path)
    folder.open()
    folder.write_names(names)
    folder.close()


def header_of(one: Session, **more: str) -> dict[str, str]:
    return {**ENGINE, **one.header, **more}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, 7, generator=generator)
    return {
        "a": draw.to(torch.bfloat16),
        "b": torch.randint(-128, 127, (5, 64), dtype=torch.int8, generator=generator),
        "c": draw,
        "empty": torch.empty(2, 0),
        "d": torch.arange(4),
        "e": draw.to(torch.float8_e4m3fn),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == wanted[name].dtype
        and found[name].shape == wanted[name].shape
        and found[name].view(torch.uint8).equal(wanted[name].view(torch.uint8))
        for name in wanted
        if wanted[name].numel()
    )


def test_a_file_is_safetensors_and_comes_back_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.session"
    write(path, header_of(session()), tensors())
    header, found = read(path, ENGINE)
    assert same(found, tensors()) and same(load_file(path), tensors())
    assert {key: header[key] for key in header_of(session())} == header_of(session())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["x.session"]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_an_altered_bit_is_found(place: float, bit: int, tmp_path: Path) -> None:
    """Anywhere in the file; only blanks that pad the header may differ."""
    path = tmp_path / "x.session"
    write(path, header_of(session()), tensors())
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    length = int.from_bytes(content[:8], "little")
    padding = len(content[8 : 8 + length].rstrip(b" ")) + 8
    content[at] ^= 1 << bit
    path.write_bytes(content)
    try:
        _, found = read(path, {**ENGINE, **session().header})
    except Unusable as error:
        assert error.reason in ("damaged", "foreign")
    else:
        assert padding <= at < 8 + length
        assert same(found, tensors())


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1, -64])
def test_a_file_that_is_cut_short(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.session"
    write(path, header_of(session()), tensors())
    content = path.read_bytes()
    path.write_bytes(content[:length])
    with pytest.raises(Unusable) as found:
        read(path)
    assert found.value.reason == "damaged"
    path.write_bytes(content + b"x")
    with pytest.raises(Unusable, match="as many as its header says"):
        read(path)


class Failing(io.FileIO):
    """A file on a disk that has a bad sector behind its first page."""

    def readinto(self, buffer: Any) -> int:
        if self.tell() >= 4096:
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(memoryview(buffer)[:4096])


def test_a_file_is_checked_before_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mapping a read error is SIGBUS, which ends the process."""
    path, mapped, one = tmp_path / "x.units", [], {"a": torch.arange(5000)}
    write(path, header_of(session()), one)
    assert same(read(path, ENGINE, mapped=True)[1], one)
    monkeypatch.setattr(torch, "from_file", lambda *args, **_: mapped.append(args))
    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", lambda one, _: io.BufferedReader(Failing(one)))
        with pytest.raises(Unusable, match="Input/output error") as found:
            read(path, ENGINE, mapped=True)
    assert found.value.reason == "io"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Unusable, match="the checksum is wrong"):
        read(path, ENGINE, mapped=True)
    assert not mapped


@pytest.mark.parametrize("at", ["_description", "_checksum"])
def test_a_file_that_is_cut_short_while_it_is_read(at: str, tmp_path: Path) -> None:
    """In a process of its own, which SIGBUS would end."""
    path = tmp_path / "x.units"
    write(path, header_of(session()), {"a": torch.arange(5000)})
    code = f"""
import os, sys
sys.modules["vllm"] = None  # files need none
from pathlib import Path
from vllm_cascade.sessions import files
path, plain = Path({str(path)!r}), files.{at}
def cut(*args):
    found = plain(*args)
    os.truncate(path, 9000)
    return found
files.{at} = cut
try:
    files.read(path, mapped=True)
except files.Unusable as error:
    print(error.reason, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("damaged ")
    assert "cut short" in done.stdout


@pytest.mark.parametrize("key", FOREIGN)
def test_another_engines_file(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.session"
    write(path, header_of(session(), **{key: "another"}), tensors())
    with pytest.raises(Unusable, match=f"another {key}") as found:
        read(path, ENGINE)
    assert found.value.reason == "foreign"
    assert files.first_difference(files.read_header(path), ENGINE) == key
    assert files.first_difference(ENGINE, ENGINE) is None


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(Unusable) as found:
        read(tmp_path / "x.session")
    assert found.value.reason == "missing"


@pytest.mark.parametrize("after", [0, 100, 3000])
def test_a_full_disk_leaves_nothing(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fills up after so many bytes."""
    path = tmp_path / "x.session"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    big = {**tensors(), "big": torch.zeros(4096, dtype=torch.uint8)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
        with pytest.raises(OSError) as found:
            write(path, header_of(session()), big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert found.value.errno == errno.EFBIG and not list(tmp_path.iterdir())

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write(path, header_of(session()), big)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has its name already. It is removed, since the write is reported as failed."""

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "_sync_folder", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "x.session", header_of(session()), tensors())
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- the folder


def test_a_folder_is_one_servers(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new" / "sessions")
    folder.open()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / f".123-x{files.SUFFIX}").write_text("half a file")
    with pytest.raises(KVPolicyError, match="another server uses this folder; give each server"):
        Folder(folder.path).open()
    folder.close()
    second = Folder(folder.path)
    second.open()
    assert not list(folder.path.glob(".*"))
    second.close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_module.fcntl, "flock", fail)
    with pytest.raises(KVPolicyError, match=r"cannot be locked .*No locks .* whose file system"):
        Folder(tmp_path).open()


def test_the_first_of_several_engines_may_be_the_last_to_start(tmp_path: Path) -> None:
    """The folder of all of them is this user's alone, whichever engine makes it."""
    settings = SessionSettings(dir=str(tmp_path / "new"))
    before = os.umask(0o022)
    try:
        for engine in (1, 2, 0):
            path = settings.folder(engine)
            assert path is not None
            folder = Folder(path)
            folder.open()
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            folder.close()
    finally:
        os.umask(before)


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.os, "open", read_only)
    with pytest.raises(KVPolicyError, match=r"Read-only .* choose a folder that this user can"):
        Folder(tmp_path).open()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    with pytest.raises(KVPolicyError, match=f"others have access; .*: {shared}/own"):
        Folder(shared).open()
    own = Folder(shared / "own")  # as in a container's volume, which others may enter
    own.open()
    own.close()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(KVPolicyError, match=r"cannot be used .* choose a folder"):
        Folder(tmp_path / "file" / "sessions").open()
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(KVPolicyError, match="choose a folder that this user can write to"):
            Folder(tmp_path / "sessions").open()
        tmp_path.chmod(0o700)


def test_room_for_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free, and what sessions have; damaged files and others' count as used."""
    folder = Folder(tmp_path)
    folder.open()
    for name in ("a.session", "b.units", "c.txt", f"{DAMAGED}/d.session"):
        (tmp_path / name).write_bytes(bytes(10))
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda _: free)
    assert folder.room() == 1020
    folder.close()


def test_entries(tmp_path: Path) -> None:
    """Sessions of one and of two ranks; one without a rank, one renamed, one that is not ours."""
    folder = Folder(tmp_path)
    one, two, lost, renamed = (session(n) for n in range(1, 5))
    write(tmp_path / file_name(two.id, 0, 2), header_of(two), tensors())
    write(tmp_path / file_name(two.id, 1, 2), header_of(two), tensors())
    write(tmp_path / file_name(one.id, 0, 1), header_of(one), tensors())
    write(tmp_path / file_name(lost.id, 1, 2), header_of(lost), tensors())
    write(tmp_path / file_name(renamed.id, 0, 1), header_of(one), tensors())
    (tmp_path / f"notes{files.SUFFIX}").write_text("hello")
    (tmp_path / file_name("short", 0, 1)).write_text("hello")
    os.utime(tmp_path / file_name(one.id, 0, 1), (1, 1))
    entries, bad = folder.entries()
    assert [(entry.id, len(entry.files), entry.used == 1) for entry in entries] == [
        (one.id, 1, True),
        (two.id, 2, False),
    ]
    assert Session.of(entries[0].header, 1).id == one.id
    reasons = {name: reason for name, _, reason in bad}
    problems = {name: problem for name, problem, _ in bad}
    assert "rank 0 is missing" in problems.pop(file_name(lost.id, 1, 2))
    assert reasons.pop(file_name(lost.id, 1, 2)) == "incomplete"
    assert "another session's" in problems.pop(file_name(renamed.id, 0, 1))
    assert "cut short" in problems.pop(file_name("short", 0, 1))
    assert "not the name" in problems.pop(f"notes{files.SUFFIX}") and not problems
    assert set(reasons.values()) == {"damaged"}


def test_damaged_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were moved last stay, whatever their age."""
    monkeypatch.setattr(folder_module, "MOST_DAMAGED", 25)
    folder = Folder(tmp_path)
    folder.open()
    for n in range(4):
        (tmp_path / f"{n}").write_bytes(bytes(10))
        os.utime(tmp_path / f"{n}", (100 - n, 100 - n))
        folder.move_aside(f"{n}")
        time.sleep(0.02)
    assert sorted(path.name for path in (tmp_path / DAMAGED).iterdir()) == ["1", "2", "3"]
    (tmp_path / "large").write_bytes(bytes(99))
    folder.move_aside("large")  # the newest one is never deleted, and takes no room from others
    assert sorted(path.name for path in (tmp_path / DAMAGED).iterdir()) == ["2", "3", "large"]
    folder.close()


# ---------------------------------------------------------------------------------- the worker


def pools(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 127, (20, width), dtype=torch.int8, generator=generator)
        for width in (64, 64, 192)
    ]


def log(num_units: int) -> Log:
    made = Log(SHAPE)
    for count in (num_units // 3, num_units - num_units // 3):
        made.grow(count)
    for i, chunk in enumerate(made.chunks):
        for j, tensor in enumerate(chunk.tensors):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 100 + i + j)
    made.shown, made.selected_by_many = 2, True
    made.tokens += 7
    return made


def same_logs(a: Log, b: Log) -> bool:
    numbers = [(x.begin, x.end, x.shown, x.selected_by_many, x.first) for x in (a, b)]
    assert numbers[0] == numbers[1]
    assert a.tokens.equal(b.tokens) and len(a.chunks) == len(b.chunks)
    pairs = zip(a.chunks, b.chunks, strict=True)
    return all(x.equal(y) for c, d in pairs for x, y in zip(c.tensors, d.tensors, strict=True))


def wait(worker: WorkerSessions, wanted: int = 1) -> Report:
    """What threads report, once they have finished so many things."""
    total = Report()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        report = worker.take_report()
        total.written += report.written
        total.unwritten += report.unwritten
        total.full |= report.full
        total.stamps |= report.stamps
        total.read |= report.read
        total.unreadable |= report.unreadable
        total.saved += report.saved
        total.unsaved += report.unsaved
        outcomes = (total.written, total.unwritten, total.read, total.unreadable, total.unsaved)
        if sum(map(len, outcomes)) >= wanted:
            return total
        time.sleep(0.01)
    raise TimeoutError


@pytest.mark.parametrize("num_units", [None, 0, 5, 70])
def test_a_worker_saves_writes_reads_and_restores(num_units: int | None, tmp_path: Path) -> None:
    Folder(tmp_path).open()
    own = pools()
    stores, others = (None if num_units is None else Stores(SHAPE) for _ in range(2))
    worker = WorkerSessions(Copies(own), tmp_path, stores)
    if stores is not None and num_units is not None:
        stores.logs[4] = log(num_units)
    wanted = [pool[[4, 9, 2]].clone() for pool in own]
    one = session()
    save = Command("save", one.id, pages=(4, 9, 2))
    worker.execute([save, Command("write", one.id, header=header_of(one))])
    for pool in own:
        pool.zero_()
    assert wait(worker).written == [one.id] and held_bytes(worker) >= 3 * 320
    worker.execute([Command("drop", one.id)])
    assert held_bytes(worker) == 0

    other = WorkerSessions(Copies(own), tmp_path, others)  # as after a restart
    other.execute([Command("read", one.id, header=ENGINE)])
    assert list(wait(other).read) == [one.id]
    other.execute([Command("restore", one.id, pages=(1, 0, 7))])
    for pool, pages in zip(own, wanted, strict=True):
        assert pool[[1, 0, 7]].equal(pages) and not pool[[2, 3, 4, 9]].any()
    if others is not None and num_units is not None:
        resumed = others._resumed[1]
        assert same_logs(resumed, log(num_units))
        resumed.grow(1)  # its own: the session's log stays
        other.execute([Command("restore", one.id, pages=(5, 6, 7))])
        assert same_logs(others._resumed[5], log(num_units))
    other.execute([Command("remove", one.id)])
    other.close()
    worker.close()
    assert not list(tmp_path.glob(f"*{files.SUFFIX}"))


def test_a_log_of_another_shape_is_not_read() -> None:
    own = log(5)
    wrong = {**own.tensors(), "tokens": torch.zeros(1, 1, 9, dtype=torch.int32)}
    with pytest.raises(RuntimeError):
        Log.of(SHAPE, wrong, own.pieces)
    with pytest.raises(ValueError, match="another number of chunks"):
        Log.of(SHAPE, own.tensors(), [*own.pieces, Chunk(SHAPE)])
    with pytest.raises(ValueError, match=f"not a block of {SHAPE.chunk_bytes} bytes"):
        Chunk(SHAPE, own.pieces[0].memory[:-1])


@pytest.mark.parametrize("damage", ["cut", "altered", "renamed", "gone", "pages", "policy"])
def test_a_worker_reads_no_damaged_file(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Folder(tmp_path).open()
    own = pools()
    one, two = session(1), session(2)
    worker = WorkerSessions(Copies(own), tmp_path)
    save = Command("save", one.id, pages=(1,))
    worker.execute([save, Command("write", one.id, header=header_of(one))])
    wait(worker)
    path = tmp_path / file_name(one.id, 0, 1)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "altered":
        content[-5] ^= 1
        path.write_bytes(content)
    elif damage == "renamed":
        path.rename(tmp_path / file_name(two.id, 0, 1))
        one = two
    elif damage == "gone":
        path.unlink()
    elif damage == "pages":
        own = [pool[:, :32].clone() for pool in own]
    changed = {**ENGINE, "policy": "another"} if damage == "policy" else ENGINE
    other = WorkerSessions(Copies(own), tmp_path)
    other.execute([Command("read", one.id, header=changed)])
    reason = {"gone": "missing", "pages": "foreign", "policy": "foreign"}.get(damage, "damaged")
    assert wait(other).unreadable == {one.id: reason}
    other.execute([])
    assert not other.states
    aside = list((tmp_path / DAMAGED).iterdir())
    assert len(aside) == (reason == "damaged")
    worker.close()
    other.close()


def test_a_file_of_the_same_model_under_another_name(tmp_path: Path) -> None:
    """What a header says for people does not decide whether a file is read."""
    Folder(tmp_path).open()
    one, worker = session(), WorkerSessions(Copies(pools()), tmp_path)
    header = header_of(one, model_name="/models/a")
    worker.execute([Command("save", one.id, pages=(1,)), Command("write", one.id, header=header)])
    assert wait(worker).written == [one.id]
    expected = {**ENGINE, "stamp": one.stamp, "model_name": "./a"}
    worker.execute([Command("drop", one.id), Command("read", one.id, header=expected)])
    assert list(wait(worker).read) == [one.id]
    worker.execute([Command("drop", one.id)])
    worker.execute([Command("read", one.id, header={**expected, "stamp": "another"})])
    assert wait(worker).unreadable == {one.id: "damaged"}
    worker.close()


def test_a_worker_touches_a_file(tmp_path: Path) -> None:
    """So that its session does not expire; one whose file is gone stays without."""
    Folder(tmp_path).open()
    one, worker = session(), WorkerSessions(Copies(pools()), tmp_path)
    path = tmp_path / file_name(one.id, 0, 1)
    worker.execute([Command("touch", one.id)])
    worker.execute([Command("save", one.id, pages=(1,))])
    worker.execute([Command("write", one.id, header=header_of(one))])
    wait(worker)
    assert [entry.id for entry in Folder(tmp_path).entries()[0]] == [one.id]
    os.utime(path, (1, 1))
    worker.execute([Command("touch", one.id)])
    worker.close()
    assert path.stat().st_mtime > time.time() - 60


def test_outcomes_name_the_write(tmp_path: Path) -> None:
    Folder(tmp_path).open()
    one, worker = session(), WorkerSessions(Copies(pools()), tmp_path)
    one.stamp = "of this write"
    worker.execute([Command("save", one.id, pages=(1,))])
    worker.execute([Command("write", one.id, header=header_of(one))])
    report = wait(worker)
    assert report.written == [one.id] and report.stamps == {one.id: one.stamp}
    worker.execute([Command("drop", one.id), Command("read", one.id, header=header_of(one))])
    report = wait(worker)
    assert list(report.read) == [one.id] and report.stamps == {one.id: one.stamp}
    worker.close()


def test_a_folder_that_another_server_has_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Someone deleted it while a server ran, and started a second server on it."""
    first, one = Folder(tmp_path / "x"), session()
    first.open()
    worker = WorkerSessions(Copies(pools()), first.path)
    commands = [
        Command("save", one.id, pages=(1,)),
        Command("write", one.id, header=header_of(one)),
    ]
    worker.execute(commands)
    assert wait(worker).written == [one.id]
    shutil.rmtree(first.path)
    second = Folder(first.path)
    second.open()
    worker.execute(commands)
    assert wait(worker).unwritten == [one.id]
    with pytest.raises(OSError, match="another server"):
        first.write_names({"a": "b"})
    assert not list(first.path.glob("*.*"))
    second.write_names({"a": "b"})
    for folder in (first, second):
        folder.close()
    worker.close()


def test_a_worker_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder(tmp_path).open()
    worker = WorkerSessions(Copies(pools()), tmp_path)

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    one = session()
    save = Command("save", one.id, pages=(1,))
    worker.execute([save, Command("write", one.id, header=header_of(one))])
    report = wait(worker)
    assert report.unwritten == [one.id] and report.full
    worker.execute([Command("restore", one.id, pages=(2,))])
    worker.close()
    assert not list(tmp_path.glob(f"*{files.SUFFIX}"))


class NoMemory(Copies):
    """Copies for which there is no memory, at once or when a thread makes them."""

    later = False

    def save(self, blocks: Sequence[int]) -> Future[Any]:
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if not self.later:
            raise error
        future: Future[Any] = Future()
        Timer(0.05, future.set_exception, [error]).start()
        return future


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_state_that_cannot_be_copied(later: bool, has_folder: bool, tmp_path: Path) -> None:
    """Steps go on, and the scheduler learns that there is no state."""
    Folder(tmp_path).open()
    copies, index = NoMemory(pools()), SessionIndex(1000, 1000 * has_folder)
    copies.later = later
    worker = WorkerSessions(copies, tmp_path if has_folder else None)
    index.keep("c", [1], 100, pages=(1,), now=0, name="chat")
    worker.execute(index.take_commands())
    report = wait(worker)
    assert len(report.unsaved) == 1
    index.note(report)
    assert len(index) == 0 and index.counters.lost["memory_full"] == 1
    worker.execute(index.take_commands())
    worker.close()
    assert not worker.states and not list(tmp_path.glob(f"*{files.SUFFIX}"))


def test_outcomes_of_two_states_with_equal_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has been copied, and then the other one's file is complete: a report has one of them."""
    Folder(tmp_path).open()
    worker, index = WorkerSessions(Copies(pools()), tmp_path), SessionIndex(1000, 10**6, 0, ENGINE)
    begun, goes_on, plain = Semaphore(0), Semaphore(0), files.write

    def stall(*args: Any) -> str:
        begun.release()
        assert goes_on.acquire(timeout=30)
        return plain(*args)

    monkeypatch.setattr(files, "write", stall)
    index.keep("c", [1, 2], 400, pages=(0,), now=0)
    worker.execute(index.take_commands())
    assert begun.acquire(timeout=30)
    index.note(worker.take_report())
    index.clear()
    last = index.keep("c", [1, 2], 400, pages=(1,), now=1)
    worker.execute(index.take_commands())
    goes_on.release()
    assert last is not None and begun.acquire(timeout=30)  # the first file is complete
    for _ in range(2):
        index.note(worker.take_report())
    assert last.in_memory and not last.saving and not last.on_disk
    goes_on.release()
    worker._writer.submit(int).result(30)  # after all writes
    index.note(worker.take_report())
    assert last.on_disk and not index.counters.lost
    assert worker._num_reported == worker._num_begun == 4
    worker.close()


def test_steps_without_tokens_leave_threads_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they have work; a step with tokens never pauses."""
    paused: list[float] = []
    Folder(tmp_path).open()
    worker, index = WorkerSessions(Copies(pools()), tmp_path), SessionIndex(1000, 10**6, 0, ENGINE)
    monkeypatch.setattr(tiers.time, "sleep", paused.append)
    worker.idle()
    assert not paused
    index.keep("c", [1, 2], 400, pages=(0,), now=0)
    worker.execute(index.take_commands())
    worker.idle()
    assert paused == [tiers.IDLE_SECONDS]
    worker._writer.submit(int).result(30)
    assert worker.take_report().written
    worker.idle()
    assert len(paused) == 1
    worker.close()


def test_no_memory_to_read_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not damaged, and stays where it is."""
    path = tmp_path / "x.session"
    write(path, header_of(session()), tensors())

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 7 bytes")

    with monkeypatch.context() as broken:
        broken.setattr(torch, "empty", fail)
        with pytest.raises(Unusable, match="can't allocate") as found:
            read(path)
    assert found.value.reason == "io" and same(read(path)[1], tensors())


def test_what_is_dropped_before_it_is_written_leaves_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stalls, and clients that release their sessions, of which some are kept again."""
    Folder(tmp_path).open()
    worker = WorkerSessions(Copies(pools()), tmp_path)
    index, begun, goes_on = SessionIndex(1000, 10**6, 0, ENGINE), Event(), Event()
    made: list[weakref.ref[Any]] = []
    plain = files.write

    def stall(*args: Any) -> str:
        begun.set()
        assert goes_on.wait(30)
        return plain(*args)

    monkeypatch.setattr(files, "write", stall)
    for n in range(20):
        index.keep("c", [n % 4], 400, pages=(n,), now=n, name="chat")
        worker.execute(index.take_commands())
        made += [weakref.ref(state) for state in worker.states.values()]
        assert begun.wait(30)
        if n < 19:
            index.release("chat")
            worker.execute(index.take_commands())
    assert len(made) == 20
    assert [n for n, state in enumerate(made) if state() is not None] == [0, 19]
    goes_on.set()
    report = wait(worker, 2)
    index.note(report)
    last = index.named("chat")
    assert last is not None and last.on_disk and not index.counters.lost
    # A report has one stamp of a session: the last one may be reported before the first.
    assert len(report.written) == 2 and last.id in report.written
    deadline = time.monotonic() + 30
    while worker._num_reported < 40 and time.monotonic() < deadline:
        worker.take_report()
        time.sleep(0.01)
    worker.close()
    assert worker._num_reported == worker._num_begun == 40  # each was copied and then written
    (entry,) = Folder(tmp_path).entries()[0]
    assert entry.id == last.id and entry.header["stamp"] == last.stamp


def often_killed(folder: Path, code: str, setup: str, moments: list[float]) -> Iterator[None]:
    """After each kill of a process that runs ``code`` on ``folder``, that many seconds after it
    began; another one begins when the caller goes on.

    Args:
        setup: code that runs once, before the first process is forked.
    """
    fork = f"""
import os, signal, sys, time
{setup}
sys.argv = ["x", {str(folder)!r}]
for moment in {moments}:
    child = os.fork()
    if child == 0:
        exec({code!r})
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
    sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", fork],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in moments:
            assert process.stdout.readline() == "killed\n"
            yield
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0


KILLED = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from vllm_cascade.sessions.files import FOREIGN, file_name, write
from vllm_cascade.sessions.session import Session
folder = Path(sys.argv[1])
for n in range(10**6):
    one = Session("context", f"tokens{n % 7}", n % 7, 100)
    header = {**{key: f"this {key}" for key in FOREIGN}, **one.header}
    tensors = {"a": torch.full((1 << 18,), n % 7, dtype=torch.int64)}
    write(folder / file_name(one.id, 0, 1), header, tensors)
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    """A hundred kills of a process that writes 2 MiB files over and over: every file is whole."""
    folder, rng, whole, halves = Folder(tmp_path), random.Random(1), 0, 0
    moments = [rng.random() * 0.08 for _ in range(100)]
    setup = 'sys.modules["vllm"] = None\nimport torch, vllm_cascade.sessions.files'
    for _ in often_killed(tmp_path, KILLED, setup, moments):
        halves += len(list(tmp_path.glob(f".*{files.SUFFIX}")))
        folder.open()
        entries, bad = folder.entries()
        assert not bad and not list(tmp_path.glob(f".*{files.SUFFIX}"))
        for entry in entries:
            header, found = read(tmp_path / entry.files[0], ENGINE)
            assert (found["a"] == int(header["num_tokens"])).all()
            whole += 1
        folder.close()
    print(f"{whole} files read, {halves} half-written files removed")
    assert whole > 100 and halves > 0
