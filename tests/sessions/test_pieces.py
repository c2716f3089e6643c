# SPDX-License-Identifier: Apache-2.0
"""Files of evicted units: written once, shared by sessions, gone with the last of them."""

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sessions.held import held_bytes
from tests.sessions.test_files import (
    ENGINE,
    SHAPE,
    header_of,
    often_killed,
    pools,
    same_logs,
    session,
    wait,
)
from vllm_cascade.cli import main
from vllm_cascade.recall.log import Log
from vllm_cascade.recall.stores import Stores
from vllm_cascade.sessions import command, files, pieces
from vllm_cascade.sessions.copies import Copies
from vllm_cascade.sessions.files import PIECE_SUFFIX, SUFFIX
from vllm_cascade.sessions.folder import DAMAGED, LOCK, Folder
from vllm_cascade.sessions.session import Command, Session
from vllm_cascade.sessions.tiers import WorkerSessions

FIRST = 4
"""First page of the request whose states are kept."""


class Chat:
    """A request's growing log in a worker, whose state is kept after each turn."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.stores, self.log = Stores(SHAPE), Log(SHAPE)
        (folder / DAMAGED).mkdir(exist_ok=True)
        (folder / LOCK).touch()
        self.worker = WorkerSessions(Copies(pools()), folder, self.stores)
        self.turns: list[tuple[Session, Log]] = []

    def turn(self, num_units: int) -> Session:
        """Evict units, keep the state and write it; returns its session."""
        part = self.log.grow(num_units)
        for chunk, units, place in part.pieces():
            for tensor in chunk.tensors:
                tensor[:, :, units] = place.start + len(self.turns) + 1
        self.stores.logs[FIRST] = self.log
        one = session(len(self.turns) + 1)
        save = Command("save", one.id, pages=(FIRST, 9))
        self.worker.execute([save, Command("write", one.id, header=header_of(one))])
        assert wait(self.worker).written == [one.id]
        self.turns.append((one, copied(self.log)))
        return one

    def remove(self, one: Session) -> None:
        self.worker.execute([Command("drop", one.id), Command("remove", one.id)])
        self.worker._writer.submit(lambda: None).result(30)


def copied(log: Log) -> Log:
    chunks = [log._copy_chunk(chunk) for chunk in log.chunks]
    return Log.of(SHAPE, {key: t.clone() for key, t in log.tensors().items()}, chunks)


def names(folder: Path, suffix: str = PIECE_SUFFIX) -> set[str]:
    return {path.name for path in folder.glob(f"*{suffix}")}


def read(worker: WorkerSessions, one: Session) -> str:
    """Read a session; returns the reason why it cannot be read."""
    worker.execute([Command("read", one.id, header=ENGINE)])
    report = wait(worker)
    worker.execute([])
    assert (one.id in worker.states) == (one.id in report.read)
    return report.unreadable.get(one.id, "")


def test_a_chats_units_are_written_once(tmp_path: Path) -> None:
    """Of 16 units a chunk: a turn writes the chunks that are new, and a copy of the last one."""
    chat, before = Chat(tmp_path), set[str]()
    new = []
    for num_units in (20, 5, 30, 1):
        chat.turn(num_units)
        new.append(len(names(tmp_path) - before))
        before = names(tmp_path)
    assert new == [2, 1, 3, 1], "20 in 2 chunks, 25 in 2, 55 (40 kept) in 4, 56 in 4"
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in tmp_path.glob(f"*{PIECE_SUFFIX}"))
    entries, bad = Folder(tmp_path).entries()
    assert not bad and len(entries) == 4
    chat.worker.close()

    other = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    for one, log in chat.turns:
        assert not read(other, one)
        assert same_logs(other.states[one.id].units, log)
    chunks = {id(chunk) for state in other.states.values() for chunk in state.units.chunks}
    assert len(chunks) == len(names(tmp_path)), "what files share, memory shares"
    pages = sum(tensor.nbytes for state in other.states.values() for tensor in state.pages)
    assert held_bytes(other) == pages + len(chunks) * SHAPE.chunk_bytes
    other.close()


@pytest.mark.parametrize("mapped", [0, 2, 99])
def test_files_are_mapped_up_to_a_number(
    mapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that goes on never writes to them, and they can be deleted meanwhile."""
    monkeypatch.setattr(pieces, "MOST_MAPPED", mapped)
    monkeypatch.setattr(pieces.os, "cpu_count", lambda: 1)
    chat = Chat(tmp_path)
    one = chat.turn(37)
    chat.worker.close()
    stores = Stores(SHAPE)
    other = WorkerSessions(Copies(pools()), tmp_path, stores)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    assert not read(other, one) and len(before) == 3
    maps = Path("/proc/self/maps").read_text("utf-8")
    assert sum(str(tmp_path / name) in maps for name in before) == min(mapped, 3)
    other.execute([Command("restore", one.id, pages=(FIRST, 9))])
    resumed = stores._resumed[FIRST]
    for chunk, units, _ in resumed.grow(9).pieces():
        for tensor in chunk.tensors:
            tensor[:, :, units] = 77
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    for name in before:
        (tmp_path / name).unlink()
    assert same_logs(other.states[one.id].units, chat.turns[0][1])
    other.close()


def test_a_mapped_file_holds_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have 1,024 of them; and a mapping that fails is no damage."""
    chat = Chat(tmp_path)
    one = chat.turn(40)
    chat.worker.close()
    other = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    with monkeypatch.context() as broken:
        broken.setattr(torch, "from_file", lambda *_, **__: torch.empty(-1))
        assert read(other, one) == "io" and not names(tmp_path / DAMAGED)
    before = len(os.listdir("/proc/self/fd"))
    assert not read(other, one) and len(names(tmp_path)) == 3
    assert len(os.listdir("/proc/self/fd")) <= before
    maps = Path("/proc/self/maps").read_text("utf-8")
    assert all(str(tmp_path / name) in maps for name in names(tmp_path))
    other.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_goes_with_its_last_session(restarted: bool, tmp_path: Path) -> None:
    chat = Chat(tmp_path)
    first, second = chat.turn(32), chat.turn(16)
    assert len(names(tmp_path)) == 3
    if restarted:
        chat.worker.close()
        chat.worker = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    chat.remove(first)
    assert len(names(tmp_path)) == 3 and not read(chat.worker, second)
    chat.remove(second)
    assert not names(tmp_path) and not names(tmp_path, SUFFIX)
    chat.worker.close()


def test_a_restarted_server_that_removes_first(tmp_path: Path) -> None:
    """What only the first removed session listed is gone, too: units 16 to 19 in a chunk."""
    chat = Chat(tmp_path)
    first, second = chat.turn(20), chat.turn(20)
    assert len(names(tmp_path)) == 4
    chat.worker.close()
    chat.worker = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    chat.remove(first)
    assert len(names(tmp_path)) == 3 and not read(chat.worker, second)
    chat.worker.close()


def test_units_stay_while_a_header_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may list what the session that is removed shares with it."""
    chat = Chat(tmp_path)
    first, second = chat.turn(32), chat.turn(16)
    chat.worker.close()
    chat.stores = Stores(SHAPE)
    chat.worker = WorkerSessions(Copies(pools()), tmp_path, chat.stores)
    read_header = files.read_header

    def fail(path: Path) -> dict[str, str]:
        if path.name.startswith(second.id):
            raise files.Unusable("io", "Input/output error")
        return read_header(path)

    with monkeypatch.context() as broken:
        broken.setattr(files, "read_header", fail)
        chat.remove(first)
        Folder(tmp_path).remove_unused()
        assert len(names(tmp_path)) == 3
        chat.log = Log(SHAPE)
        third = chat.turn(20)  # older sessions cannot list what is written now
        assert len(names(tmp_path)) == 5
        chat.remove(third)
    assert len(names(tmp_path)) == 3 and not read(chat.worker, second)
    chat.worker.close()


def test_units_stay_when_a_scan_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins anew: half a table would call files unused that other sessions list."""
    chat = Chat(tmp_path)
    first, second = chat.turn(32), chat.turn(16)
    chat.worker.close()
    chat.worker = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    assert chat.worker._pieces is not None
    read_header, count = files.read_header, iter(range(100))

    def fail(path: Path) -> dict[str, str]:
        if next(count) == 1:
            raise MemoryError
        return read_header(path)

    with monkeypatch.context() as broken:
        broken.setattr(files, "read_header", fail)
        with pytest.raises(MemoryError):
            chat.worker._pieces.load()
    for one in (first, second):
        listed = {name for name, _ in pieces_in(chat, one)}
        used = chat.worker._pieces._used()
        assert {name for name, users in used.items() if one.id in users} == listed
    chat.worker.close()


@pytest.mark.parametrize("damage", ["cut", "altered", "swapped", "gone"])
def test_damaged_units_give_no_session(damage: str, tmp_path: Path) -> None:
    """Neither of those that share them; one that does not is read."""
    chat = Chat(tmp_path)
    sharing = [chat.turn(20), chat.turn(20)]
    (shared, _), *_ = set(pieces_in(chat, sharing[0])) & set(pieces_in(chat, sharing[1]))
    others = sorted(names(tmp_path) - {shared})
    chat.log = Log(SHAPE)
    apart = chat.turn(9)
    chat.worker.close()
    path, content = tmp_path / shared, bytearray((tmp_path / shared).read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-3])
    elif damage == "altered":
        content[-3] ^= 16
        path.write_bytes(content)
    elif damage == "swapped":
        path.write_bytes((tmp_path / others[0]).read_bytes())
    else:
        path.unlink()
    other = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    reasons = [read(other, one) for one in sharing]
    assert reasons == {"gone": ["missing"] * 2}.get(damage, ["damaged", "missing"])
    assert not read(other, apart) and same_logs(other.states[apart.id].units, chat.turns[-1][1])
    aside = names(tmp_path / DAMAGED)
    assert aside == (set() if damage == "gone" else {shared})
    for one in sharing:
        other.execute([Command("remove", one.id)])
    other._writer.submit(lambda: None).result(30)
    left = {name for name, _ in pieces_in(chat, apart)}
    assert names(tmp_path) == left
    other.close()


@pytest.mark.parametrize("short", ["threads", "memory"])
def test_units_for_which_resources_are_short(
    short: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is damaged or foreign: the session is read once there are some."""
    chat = Chat(tmp_path)
    one = chat.turn(20)
    chat.worker.close()
    other = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))

    def fail(*_: object, **__: object) -> None:
        what = "start new thread" if short == "threads" else "allocate memory"
        raise RuntimeError(f"can't {what}")

    with monkeypatch.context() as broken:
        if short == "threads":
            broken.setattr(threading.Thread, "start", fail)
        else:
            broken.setattr(files, "_part_of_file", fail)
        assert read(other, one) == "io"
    assert not read(other, one) and not list((tmp_path / DAMAGED).iterdir())
    other.close()


def pieces_in(chat: Chat, one: Session) -> list[tuple[str, str]]:
    return files.pieces_of(files.read_header(chat.worker._path(one.id)))


def test_a_full_disk_leaves_no_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third file of a write does not fit: nothing of this write stays; the next one works."""
    chat = Chat(tmp_path)
    chat.turn(16)
    before, write, count = names(tmp_path), files.write, iter(range(100))

    def full(*args: object) -> str:
        if next(count) == 2:
            raise OSError(28, "No space left on device")
        return write(*args)  # type: ignore[arg-type]

    chat.stores.logs[FIRST] = chat.log
    chat.log.grow(33)
    one = session(99)
    with monkeypatch.context() as broken:
        broken.setattr(files, "write", full)
        save = Command("save", one.id, pages=(FIRST,))
        chat.worker.execute([save, Command("write", one.id, header=header_of(one))])
        assert wait(chat.worker).unwritten == [one.id]
    assert names(tmp_path) == before and len(names(tmp_path, SUFFIX)) == 1
    chat.worker.execute([Command("write", one.id, header=header_of(one))])
    assert wait(chat.worker).written == [one.id] and before < names(tmp_path)
    chat.worker.close()


def test_units_of_no_session_are_removed(tmp_path: Path) -> None:
    """A server that was killed between units and session, and a session removed by hand."""
    chat = Chat(tmp_path)
    first, second = chat.turn(32), chat.turn(17)
    chat.worker.close()
    chat.worker._path(second.id).unlink()
    kept = {name for name, _ in pieces_in(chat, first)}
    assert kept < names(tmp_path)
    Folder(tmp_path).remove_unused()
    assert names(tmp_path) == kept
    lost = next(iter(kept))
    (tmp_path / lost).unlink()
    entries, bad = Folder(tmp_path).entries()
    assert not entries and f"its evicted units {lost} are missing" in bad[0][1]


def test_the_command_knows_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(tmp_path)
    first, second = chat.turn(32), chat.turn(16)
    chat.worker.close()
    main(["sessions", str(tmp_path)])
    size = sum(path.stat().st_size for path in tmp_path.glob("*.*of*")) / 2**20
    assert f"2 sessions, {size:.1f} MiB; 0 unusable" in capsys.readouterr().out
    main(["sessions", str(tmp_path), "verify"])
    main(["sessions", str(tmp_path), "remove", second.id])
    assert names(tmp_path) == {name for name, _ in pieces_in(chat, first)}
    path = tmp_path / sorted(names(tmp_path))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["sessions", str(tmp_path), "verify"])
    assert f"damaged: {path.name}" in capsys.readouterr().out


@pytest.mark.parametrize("moment", ["size", "read_header", "pieces_of", "read"])
def test_a_server_goes_on_while_its_files_are_verified(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes a session or removes one, with units, and neither is damage."""
    chat = Chat(tmp_path)
    sessions = sorted([chat.turn(16), chat.turn(16), chat.turn(16)], key=lambda one: one.id)
    place, act = {  # the first time that this is called
        "size": (Folder, lambda: chat.turn(16)),
        "read_header": (files, lambda: chat.remove(sessions[-1])),  # before that header is read
        "pieces_of": (files, lambda: chat.remove(sessions[0])),  # of a header that was read
        "read": (command, lambda: chat.remove(sessions[-1])),
    }[moment]
    original = getattr(place, moment)

    def during(*arguments: Any) -> Any:
        monkeypatch.setattr(place, moment, original)
        act()
        return original(*arguments)

    monkeypatch.setattr(place, moment, during)
    main(["sessions", str(tmp_path), "verify"])
    chat.worker.close()
    assert len(names(tmp_path, SUFFIX)) == (4 if moment == "size" else 2), "nothing happened"
    number = 3 if moment == "size" else 2
    assert f"{number} sessions, all files are whole" in capsys.readouterr().out


def test_units_lost_while_they_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their session is still there: that is damage."""
    chat = Chat(tmp_path)
    chat.turn(32)
    chat.worker.close()
    lost, read = max(names(tmp_path)), command.read

    def during(*arguments: Any) -> Any:
        (tmp_path / lost).unlink(missing_ok=True)
        return read(*arguments)

    monkeypatch.setattr(command, "read", during)
    with pytest.raises(SystemExit):
        main(["sessions", str(tmp_path), "verify"])
    out, err = capsys.readouterr()
    assert f"its evicted units {lost} are missing" in out and "1 of the files" in err


KILLED = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.sessions.test_pieces import Chat
chat = Chat(Path(sys.argv[1]))
while True:
    if len(chat.turns) % 9 == 8:
        chat.log = type(chat.log)(chat.log.shape)
    one = chat.turn(1 + len(chat.turns) * 5 % 23)
    if len(chat.turns) > 4:
        chat.remove(chat.turns[-4][0])
"""


@pytest.mark.slow
def test_killed_while_writing_units(tmp_path: Path) -> None:
    """A hundred kills of a worker that keeps and removes sessions: all that is there is whole."""
    rng, whole, unused = random.Random(3), 0, 0
    moments = [rng.random() * 0.15 for _ in range(100)]
    for _ in often_killed(tmp_path, KILLED, "import torch, tests.sessions.test_pieces", moments):
        folder = Folder(tmp_path)
        folder.open()
        entries, bad = folder.entries()
        assert not bad
        before = names(tmp_path)
        folder.remove_unused()
        unused += len(before - names(tmp_path))
        worker = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
        for entry in entries:
            one = Session.of(entry.header, 0)
            assert not read(worker, one)
            chunks = worker.states[one.id].units.chunks
            assert all(torch.isfinite(chunk.scale).all() for chunk in chunks)
            whole += 1
        worker.close()
        folder.close()
    print(f"{whole} sessions read, {unused} files of units without a session removed")
    assert whole > 100 and unused > 0
