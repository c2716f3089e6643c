# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes of their own, which end when whoever started them does.

A child leads a process group. Its parent kills that group when it is done with it, on an error and
on Ctrl-C. Where the parent has no time for that (SIGKILL, SIGTERM), the child sees that the parent
is gone and kills its group itself, with whatever the group has started.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

PATIENCE = 30.0
"""Seconds that a child has, after its result, to end by itself."""
WORDS = 300
"""Most characters of an error's message that a table shows."""


class ChildError(RuntimeError):
    """A job that failed in its process; the message says why."""


@dataclass(frozen=True)
class Failure:
    """Why a job has no result: an error's name and message, or what ended its process."""

    reason: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        words = " ".join(lines)
        words = words if len(words) <= WORDS else words[:WORDS] + " ..."
        return cls(f"{type(error).__name__}: {words}" if words else type(error).__name__)


def outcomes(
    work: Callable[[Job], Result], jobs: Sequence[Job], at_a_time: int = 1, method: str = "spawn"
) -> Iterator[tuple[int, Result | Failure]]:
    """``work(job)`` for every job in a fresh process each: ``(job's place, outcome)`` as they end.

    One that fails or is killed does not touch the others.

    Raises:
        ValueError: fewer than one process at a time.
    """
    if at_a_time < 1:
        raise ValueError(f"at_a_time must be at least 1, not {at_a_time}")
    left = list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, _Child[Any, Any]]] = {}
    try:
        while left or running:
            while left and len(running) < at_a_time:
                place, job = left.pop()
                child = _Child(work, job, method)
                running[child.results] = place, child
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                place, child = running[ready]
                outcome = child.outcome()
                del running[ready]
                yield place, outcome
    finally:
        for _, child in running.values():
            child.kill()


def in_children(
    work: Callable[[Job], Result], jobs: Sequence[Job], at_a_time: int = 1, method: str = "spawn"
) -> Iterator[Result]:
    """``work(job)`` for every job in a fresh process each; results in the jobs' order.

    Args:
        method: ``fork`` shares what this process has imported, and is for one that runs no engine
            and no other thread.

    Raises:
        ChildError: the first failure; jobs that run are ended.
        ValueError: fewer than one process at a time.
    """
    done: dict[int, Result] = {}
    with contextlib.closing(outcomes(work, jobs, at_a_time, method)) as ended:
        for place, outcome in ended:
            if isinstance(outcome, Failure):
                raise ChildError(outcome.reason)
            done[place] = outcome
    yield from (done[place] for place in range(len(jobs)))


class _Child(Generic[Job, Result]):
    """One process, from its start to its end.

    Attributes:
        results: readable when there is an outcome, or when the process has ended without one.
    """

    def __init__(self, work: Callable[[Job], Result], job: Job, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self.results, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(work, job, theirs))
        self._process.start()
        theirs.close()  # the child's alone now, so that its death ends the pipe

    def outcome(self) -> Result | Failure:
        """What came of it; waits for the process to end."""
        try:
            outcome = self.results.recv()
        except EOFError:
            outcome = None
        wait([self._process.sentinel], PATIENCE)  # not joined: its group keeps its number
        self.kill()
        code = self._process.exitcode
        if outcome is not None:
            return outcome[0]
        if code is None or code >= 0:
            return Failure(f"its process ended with status {code} and without a result")
        name = signal.Signals(-code).name
        why = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
        return Failure(f"its process was ended by {name}{why}")

    def kill(self) -> None:
        """End the process, and what it has started; nothing if they have ended."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # in case that it has not come to lead a group
        self._process.join()
        self.results.close()


def _run(work: Callable[[Any], Any], job: Any, results: Connection) -> None:
    """In the child."""
    end_with_parent()
    try:
        outcome = work(job)
    except BaseException as error:
        traceback.print_exc()
        outcome = Failure.of(error)
    try:
        results.send((outcome,))
    except Exception as error:
        results.send((Failure.of(error),))
    results.close()
    sys.stdout.flush()


def end_with_parent() -> None:
    """Lead a process group that is killed as soon as this process's parent has ended.

    Only for a process of ``multiprocessing``: it holds one end of a pipe, and its parent the other.
    A forked child also holds those of the children before it, which end after it.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child of multiprocessing"

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
