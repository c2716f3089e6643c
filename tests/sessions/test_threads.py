# SPDX-License-Identifier: Apache-2.0
"""What threads raise while no caller waits for them: one line in the log, and they go on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sessions.test_pieces import Chat, names
from vllm_cascade.sessions import threads
from vllm_cascade.sessions.session import Command


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Exceptions that are logged."""
    found: list[str] = []
    monkeypatch.setattr(threads.logger, "exception", lambda text, *_: found.append(text))
    return found


def fail(*_: Any) -> None:
    raise ValueError("no OSError")


def test_an_error_is_logged_and_the_next_work_is_done(said: list[str]) -> None:
    done: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        threads.submit(pool, fail)
        threads.submit(pool, done.append, 3)
    assert said == ["KV sessions: a thread failed"] and done == [3]


def test_work_is_done_though_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that runs already does it."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, gate, done = threads.started(2, "x"), threading.Event(), list[int]()
    threads.submit(pool, gate.wait, 30)
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", fail)
        for n in range(3):
            threads.submit(pool, done.append, n)
    gate.set()
    pool.shutdown()
    assert done == [0, 1, 2]
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(pool, done.append, 3)


@pytest.mark.parametrize("work", ["_remove", "_touch", "_ranks.post"])
def test_a_worker_goes_on(
    work: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(tmp_path)
    first = chat.turn(3)
    *way, last = work.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(chat.worker, way[0]) if way else chat.worker, last, fail)
        op = {"_remove": "remove", "_touch": "touch"}.get(work, "read")
        chat.worker.execute([Command(op, first.id)])
        for pool in (chat.worker._writer, chat.worker._readers):
            pool.submit(lambda: None).result(30)
        chat.worker._readers.shutdown()
    assert len(said) == 1 and names(tmp_path)
    chat.remove(first)
    assert len(said) == 1 and not names(tmp_path)
    chat.worker.close()
