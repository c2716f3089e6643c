# SPDX-License-Identifier: Apache-2.0
"""Sessions of several ranks: a session counts only where every rank has its part."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests.sessions.test_files import ENGINE, pools, wait
from vllm_cascade.sessions import files
from vllm_cascade.sessions import ranks as ranks_module
from vllm_cascade.sessions.copies import Copies
from vllm_cascade.sessions.files import file_name, read_header, write
from vllm_cascade.sessions.folder import DAMAGED, Folder
from vllm_cascade.sessions.index import SessionIndex
from vllm_cascade.sessions.ranks import Outcome, Ranks
from vllm_cascade.sessions.session import Command, Session
from vllm_cascade.sessions.tiers import NUM_READERS, WorkerSessions

WORLD = 2
TOKENS = [3, 1, 4]


def workers(folder: Path) -> list[WorkerSessions]:
    """Two ranks with different pages; the second one reports, as a last stage does."""
    store = HashStore()
    return [
        WorkerSessions(
            Copies(pools(seed)), folder, ranks=Ranks(seed, WORLD, store, collects=seed == 1)
        )
        for seed in range(WORLD)
    ]


def execute(ranks: list[WorkerSessions], commands: list[Command]) -> None:
    for rank in ranks:
        rank.execute(commands)


def close(ranks: list[WorkerSessions]) -> None:
    for rank in ranks:
        rank.close()


def kept(index: SessionIndex) -> Session:
    assert index.keep("c", TOKENS, 640, pages=(4, 9), now=0)
    session = index.find("c", [*TOKENS, 1], 3, 0)
    assert session is not None
    return session


def test_outcomes_are_those_of_all_ranks() -> None:
    """In any order, against counting; a rank that has not finished holds up its session only."""
    rng, store = random.Random(2), HashStore()
    ranks = [Ranks(rank, 3, store) for rank in range(3)]
    assert [one.name for one in ranks] == ["0of3", "1of3", "2of3"]
    posts = [
        (rank, Outcome(n, "read", f"s{n}", n + rank, "io" if (n, rank) == (4, 1) else ""))
        for n in range(20)
        for rank in range(3)
    ]
    rng.shuffle(posts)
    posted: dict[int, int] = {}
    for rank, outcome in posts:
        ranks[rank].post(outcome)
        posted[outcome.number] = posted.get(outcome.number, 0) + 1
        found = ranks[0].collect()
        assert [one.number for one in found] == [outcome.number] * (posted[outcome.number] == 3)
        for one in found:
            assert one.seconds == one.number + 2 and one.id == f"s{one.number}"
            assert one.problem == ("io" if one.number == 4 else "")


def test_each_rank_writes_and_reads_its_part(tmp_path: Path) -> None:
    Folder(tmp_path).open()
    ranks, index = workers(tmp_path), SessionIndex(10**6, 10**6, header=ENGINE)
    wanted = [pool[[4, 9]].clone() for rank in ranks for pool in rank._copies.pools]
    session = kept(index)
    execute(ranks, index.take_commands())
    index.note(wait(ranks[1]))
    assert session.on_disk and not ranks[0].take_report()
    close(ranks)
    headers = [read_header(tmp_path / file_name(session.id, n, WORLD)) for n in range(WORLD)]
    assert [header.pop("rank") for header in headers] == ["0of2", "1of2"]
    assert [header.pop("checksum") for header in headers] and headers[0] == headers[1]

    ranks = workers(tmp_path)
    (entry,), bad = Folder(tmp_path).entries()
    assert not bad and len(entry.files) == WORLD
    index = SessionIndex(10**6, 10**6, header=ENGINE)
    assert index.adopt(Session.of(entry.header, 0))
    found = index.find("c", [*TOKENS, 1], 3, 0)
    assert found is not None and not index.ready(found, "r")
    execute(ranks, index.take_commands())
    index.note(wait(ranks[1]))
    assert index.ready(found, "r")
    index.restore(found, "r", (1, 0), "disk", 0)
    execute(ranks, index.take_commands())
    pages = [pool[[1, 0]] for rank in ranks for pool in rank._copies.pools]
    assert all(map(torch.equal, pages, wanted))
    close(ranks)


@pytest.mark.parametrize("case", ["same", "another", "not there", "cannot be made"])
def test_every_rank_sees_the_same_folder(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines have folders of one path that are not shared; a start stops on all of them."""
    monkeypatch.setattr(ranks_module, "APPEARS_SECONDS", 0.2)
    first, second = tmp_path / "a" / "sessions", tmp_path / "b"
    if case == "another":
        second.mkdir()
    elif case == "cannot be made":
        (tmp_path / "a").write_text("a file")
    store = HashStore()
    folders = [first, first if case == "same" else second]
    with ThreadPoolExecutor() as pool:
        made = [Ranks(rank, 2, store) for rank in range(2)]
        for _ in range(2):
            done = [pool.submit(made[n].check_folder, folders[n]) for n in range(2)]
            errors = [str(one.exception(30)) for one in done]
            if case in ("same", "cannot be made"):  # the scheduler refuses the latter
                assert errors == ["None"] * 2
            else:
                assert all("rank 1 does not see the folder of rank 0" in e for e in errors)
    assert case == "cannot be made" or not list(first.iterdir())


@pytest.mark.parametrize("damage", ["gone", "altered", "swapped", "another write"])
def test_a_part_that_is_missing_or_wrong(damage: str, tmp_path: Path) -> None:
    """All ranks give the session up and delete their parts."""
    Folder(tmp_path).open()
    ranks, index = workers(tmp_path), SessionIndex(10**6, 10**6, header=ENGINE)
    session = kept(index)
    execute(ranks, index.take_commands())
    index.note(wait(ranks[1]))
    first, second = (tmp_path / file_name(session.id, n, WORLD) for n in range(WORLD))
    index._set_memory(session)  # as if others had needed the memory
    execute(ranks, [Command("drop", session.id)])
    if damage == "gone":
        first.unlink()
    elif damage == "altered":
        content = bytearray(second.read_bytes())
        content[-1] ^= 1
        second.write_bytes(content)
    elif damage == "swapped":
        first.rename(tmp_path / "x")
        second.rename(first)
        (tmp_path / "x").rename(second)
    else:  # equal tokens were kept again, and only one rank's file is of that time
        header, tensors = files.read(first)
        header.pop("checksum")
        write(first, {**header, "stamp": "another"}, tensors)
    assert not index.ready(session, "r")
    execute(ranks, index.take_commands())
    index.note(wait(ranks[1]))
    reason = "missing" if damage == "gone" else "damaged"
    assert index.counters.lost == {reason: 1} and len(index) == 0
    execute(ranks, index.take_commands())
    close(ranks)
    assert not ranks[0].states and not ranks[1].states
    assert not list(tmp_path.glob(f"*{files.SUFFIX}"))
    aside = {"gone": 0, "swapped": 2}.get(damage, 1)
    assert len(list((tmp_path / DAMAGED).iterdir())) == aside
    assert index.used == {"memory": 0, "disk": 0}


def test_a_part_that_cannot_be_written(tmp_path: Path) -> None:
    """The other rank's file is removed; the session stays in memory."""
    Folder(tmp_path).open()
    ranks, index = workers(tmp_path), SessionIndex(10**6, 10**6, header=ENGINE)
    session = kept(index)
    (tmp_path / file_name(session.id, 0, WORLD)).mkdir()  # cannot be replaced by a file
    execute(ranks, index.take_commands())
    index.note(wait(ranks[1]))
    assert index.counters.lost == {"unwritten": 1} and not session.on_disk
    assert index.ready(session, "r")
    (tmp_path / file_name(session.id, 0, WORLD)).rmdir()
    execute(ranks, index.take_commands())
    close(ranks)
    assert not list(tmp_path.glob(f"*{files.SUFFIX}"))


def test_parts_of_two_writes_are_not_taken_at_start(tmp_path: Path) -> None:
    for rank, stamp in enumerate(("a", "b")):
        one = Session("c", "tokens", 3, 100, stamp=stamp)
        header = {**ENGINE, **one.header, "rank": f"{rank}of2"}
        write(tmp_path / file_name(one.id, rank, 2), header, {"a": torch.zeros(3)})
    entries, bad = Folder(tmp_path).entries()
    assert not entries and {bad[1:] for bad in bad} == {
        ("the ranks' files are not of one write", "incomplete")
    }


def finished(ranks: list[WorkerSessions]) -> None:
    """Wait until all files have been written or read, or left alone."""
    deadline = time.monotonic() + 30
    while ranks[1]._num_reported < ranks[1]._num_begun and time.monotonic() < deadline:
        ranks[1].take_report()
        time.sleep(0.01)
    assert ranks[1]._num_reported == ranks[1]._num_begun


def test_a_late_read_leaves_a_new_file_alone(tmp_path: Path) -> None:
    """Equal tokens were kept again while it was in the queue; the file has another stamp now."""
    Folder(tmp_path).open()
    ranks, index = workers(tmp_path), SessionIndex(10**6, 10**6, header=ENGINE)
    session = kept(index)
    execute(ranks, index.take_commands())
    wait(ranks[1])
    held = threading.Event()
    for rank in ranks:
        for _ in range(NUM_READERS):
            rank._readers.submit(held.wait)
    read = Command("read", session.id, header={**ENGINE, "stamp": "of before"})
    execute(ranks, [Command("drop", session.id), read, Command("drop", session.id)])
    held.set()
    finished(ranks)
    assert not list((tmp_path / DAMAGED).iterdir())
    assert len(list(tmp_path.glob("*.session"))) == 2
    close(ranks)


def test_a_read_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    Folder(tmp_path).open()
    ranks, index = workers(tmp_path), SessionIndex(10**6, 10**6, header=ENGINE)
    session = kept(index)
    execute(ranks, index.take_commands())
    wait(ranks[1])
    read = Command("read", session.id, header=ENGINE)
    execute(ranks, [Command("drop", session.id), read, Command("drop", session.id)])
    finished(ranks)
    execute(ranks, [])
    assert all(not rank.states and not rank._arrived for rank in ranks)
    close(ranks)
