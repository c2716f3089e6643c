# SPDX-License-Identifier: Apache-2.0
"""A worker's part of sessions: copies between pages, host memory and files.

Copies between pages and memory begin before a step, when nothing has read or written its pages yet
(``copies.py``). Files are written and read by threads, while steps go on.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_cascade.log import logger
from vllm_cascade.recall.stores import Piece, Units, UnitStores
from vllm_cascade.sessions import files
from vllm_cascade.sessions.copies import Copies, Tensors
from vllm_cascade.sessions.folder import Folder
from vllm_cascade.sessions.pieces import Listed, Pieces
from vllm_cascade.sessions.ranks import Outcome, Ranks
from vllm_cascade.sessions.session import Command, Report
from vllm_cascade.sessions.threads import started, submit

NUM_READERS = 16
"""Files read at a time. A file that takes long delays the others only when so many do."""
IDLE_SECONDS = 0.001
"""Pause of a step without tokens while threads have work."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
FULL, UNWRITTEN = "full", "unwritten"
"""Problems of a write: the disk has no room, or any other. Where ranks differ, the first counts."""
DROPPED = "dropped"
"""Problem of a write whose session was removed before its turn came; it is not counted."""


@dataclass(frozen=True)
class State:
    """A session's state in host memory.

    Attributes:
        copied: for each pool of pages, int8 or uint8 ``[num_pages, page bytes]``.
        units: evicted units that can be recalled; None without recall.
    """

    copied: Future[Tensors]
    units: Units | None = None

    @property
    def pages(self) -> Tensors:
        """What ``copied`` holds; waits until it is complete."""
        return self.copied.result()

    def error(self) -> BaseException | None:
        """Why the copy failed; waits until it is complete."""
        moved = () if self.units is None else self.units.moved
        return next(filter(None, (one.exception() for one in (*moved, self.copied))), None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All but the pieces of the units as named tensors, for a file."""
        found = {f"pages.{i:04}": pages for i, pages in enumerate(self.pages)}
        log = {} if self.units is None else self.units.tensors()
        return found | {f"log.{name}": tensor for name, tensor in log.items()}

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        pieces: Sequence[Piece],
        stores: UnitStores | None,
    ) -> "State":
        """The state of a file's tensors and of the pieces that it lists."""
        copied: Future[Tensors] = Future()
        copied.set_result(
            tuple(tensors[name] for name in sorted(tensors) if name.startswith("pages."))
        )
        log = {
            name.removeprefix("log."): tensor
            for name, tensor in tensors.items()
            if name.startswith("log.")
        }
        return cls(copied, stores.units_of(log, pieces) if log and stores is not None else None)


def _stamp(command: Command) -> str:
    return command.header.get("stamp", "")


class WorkerSessions:
    """Executes the commands of the scheduler's index in one worker.

    Args:
        copies: between pages and host memory.
        folder: where files are; None: no files.
        stores: evicted units of running requests; None without recall.
        ranks: this worker's place among those of its engine; None: it is the only one.
    """

    def __init__(
        self,
        copies: Copies,
        folder: Path | None,
        stores: UnitStores | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._copies, self._stores = copies, stores
        self.states: dict[str, State] = {}
        self._folder = None if folder is None else Folder(folder)
        self._ranks = ranks or Ranks()
        self._pieces = None if folder is None else Pieces(folder, self._ranks.name)
        self._num_begun = 0  # saves, writes and reads
        self._num_reported = 0  # of these
        self._later: list[Outcome] = []  # a report has one stamp of a session
        self._lock = threading.Lock()
        self._arrived: dict[str, State] = {}
        self._reading: dict[str, int] = {}  # the reads' numbers, by session
        # Writes whose turn has not come, by session. The writer's queue holds no states, so a
        # session that is removed meanwhile leaves the memory.
        self._unwritten: dict[str, tuple[int, State]] = {}
        self._closed = False
        self._said: set[str] = set()
        self._writer = started(1, "kv-sessions-writer")
        self._readers = started(NUM_READERS, "kv-sessions-reader")

    def execute(self, commands: Iterable[Command]) -> None:
        """Execute commands before a step."""
        with self._lock:
            for id_ in self._arrived:
                del self._reading[id_]
            self.states |= self._arrived
            self._arrived = {}
        resumed: dict[int, Units] = {}
        for command in commands:
            if command.op == "save":
                self._save(command)
            elif command.op == "restore":
                state = self.states[command.id]
                self._copies.restore(command.pages, state.pages)
                if state.units is not None:
                    resumed[command.pages[0]] = state.units
            elif command.op == "write":
                if command.id in self.states:  # else it could not be saved
                    with self._lock:
                        self._unwritten[command.id] = self._num_begun, self.states[command.id]
                self._begin(self._writer, command, self._write)
            elif command.op == "remove":
                with self._lock:
                    self._unwritten.pop(command.id, None)
                submit(self._writer, self._remove, command.id)
            elif command.op == "touch":
                submit(self._writer, self._touch, command.id)
            elif command.op == "read":
                with self._lock:
                    self._reading[command.id] = self._num_begun
                self._begin(self._readers, command, self._read)
            else:
                self.states.pop(command.id, None)
                with self._lock:
                    self._arrived.pop(command.id, None)
                    self._reading.pop(command.id, None)
        if self._stores is not None:
            self._stores.resume(resumed)

    def idle(self) -> None:
        """Let threads run in a step without tokens.

        While a request waits for a file, vLLM makes such steps one after another, and would leave
        threads no time in this process.
        """
        if self._num_reported < self._num_begun:
            time.sleep(IDLE_SECONDS)

    def _save(self, command: Command) -> None:
        """Begin to copy pages. Without memory for the copy, the session is dropped."""
        stores, copies, pages = self._stores, self._copies, command.pages
        number, self._num_begun = self._num_begun, self._num_begun + 1
        try:
            units = None if stores is None else stores.save(pages[0], copies.settle)
            copied = copies.save(pages)
        except (RuntimeError, MemoryError) as error:
            self._saved(command, number, error)
            return
        state = self.states[command.id] = State(copied, units)
        # The units' copies began earlier, in the same thread.
        copied.add_done_callback(lambda _: self._saved(command, number, state.error()))

    def _saved(self, command: Command, number: int, error: BaseException | None) -> None:
        """Post how a copy ended."""
        if error is not None:
            self._warn("save", f"a session could not be copied ({error}); it is not kept")
        problem = "" if error is None else "unsaved"
        self._post(Outcome(number, "save", command.id, 0.0, problem, _stamp(command)))

    def _post(self, outcome: Outcome) -> None:
        if not self._closed:
            self._ranks.post(outcome)

    def take_report(self) -> Report:
        """What the threads of all ranks finished since the last call; one rank reports it."""
        report = Report()
        if self._num_reported == self._num_begun or not self._ranks.collects:
            return report
        finished, self._later = [*self._later, *self._ranks.collect()], []
        for outcome in finished:
            if report.stamps.get(outcome.id, outcome.stamp) != outcome.stamp:
                self._later.append(outcome)
                continue
            self._num_reported += 1
            if outcome.problem == DROPPED:
                continue
            report.stamps[outcome.id] = outcome.stamp
            if outcome.op == "save":
                (report.unsaved if outcome.problem else report.saved).append(outcome.id)
            elif outcome.op == "write":
                (report.unwritten if outcome.problem else report.written).append(outcome.id)
                report.full |= outcome.problem == FULL
            elif outcome.problem:
                report.unreadable[outcome.id] = outcome.problem
            else:
                report.read[outcome.id] = outcome.seconds
        return report

    def close(self) -> None:
        """Finish all files and stop the threads."""
        self._closed = True
        self._copies.close()
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)
        if self._pieces is not None:
            self._pieces.close()

    # --- threads --------------------------------------------------------------------------------

    def _begin(
        self, pool: ThreadPoolExecutor, command: Command, work: Callable[[Command, int], str]
    ) -> None:
        submit(pool, self._run, command, self._num_begun, work)
        self._num_begun += 1

    def _run(self, command: Command, number: int, work: Callable[[Command, int], str]) -> None:
        """Write or read a file, and post how it ended."""
        assert command.op in ("write", "read"), command.op
        begin = time.monotonic()
        try:
            problem = work(command, number)
        except Exception:  # a request waits for the outcome
            logger.exception("KV sessions: a thread failed")
            problem = "io"
        seconds = time.monotonic() - begin
        self._post(Outcome(number, command.op, command.id, seconds, problem, _stamp(command)))

    def _path(self, id_: str) -> Path:
        assert self._folder is not None
        return self._folder.path / files.file_name(id_, self._ranks.rank, self._ranks.world)

    def _warn(self, kind: str, message: str) -> None:
        """Log one line for each kind of problem."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("KV sessions: %s (further ones are only counted)", message)

    def _next(self, id_: str, number: int) -> State | None:
        """The state of the write whose turn it is; None: the session was removed meanwhile."""
        with self._lock:
            found = self._unwritten.get(id_)
            if found is None or found[0] != number:  # another number: it was kept again
                return None
            return self._unwritten.pop(id_)[1]

    def _write(self, command: Command, number: int) -> str:
        assert self._pieces is not None and self._folder is not None
        state = self._next(command.id, number)
        if state is None:
            return DROPPED
        path, header = self._path(command.id), {**command.header, "rank": self._ranks.name}
        try:
            self._folder.check()
            pieces = () if state.units is None else state.units.pieces
            if listed := self._pieces.write(command.id, pieces):
                header["pieces"] = json.dumps(listed)
            files.write(path, header, state.tensors())
        except OSError as error:
            self._pieces.release(command.id)
            self._warn(
                "write",
                f"a session could not be written to {path.parent} ({error}); free disk space, "
                "lower --kv-sessions-disk, or make the folder writable",
            )
            return FULL if error.errno in NO_ROOM else UNWRITTEN
        return ""

    def _remove(self, id_: str) -> None:
        assert self._pieces is not None
        with suppress(OSError):  # then a later start removes its units
            self._pieces.load()
        try:
            self._path(id_).unlink(missing_ok=True)
            self._pieces.release(id_)
        except OSError as error:
            self._warn("remove", f"a session could not be removed ({error})")

    def _touch(self, id_: str) -> None:
        with suppress(OSError):  # the folder may have become read-only, or the file is gone
            os.utime(self._path(id_))

    def _read(self, command: Command, number: int) -> str:
        assert self._folder is not None and self._pieces is not None
        path = self._path(command.id)
        if self._is_dropped(command, number):
            return DROPPED
        self._pieces.load()
        known = (*files.FOREIGN, "stamp")  # the rest is for people
        expected = {key: value for key, value in command.header.items() if key in known}
        try:
            header, tensors = files.read(path, {**expected, "rank": self._ranks.name})
            state = self._checked(command.id, header, tensors, files.pieces_of(header))
        except files.Unusable as error:
            if self._is_dropped(command, number):  # and perhaps written again, with another stamp
                return DROPPED
            fix = "`vllm-cascade sessions DIR verify` lists all damaged files"
            self._warn(error.reason, f"a session could not be read: {error}; {fix}")
            if error.reason == "damaged":
                self._folder.move_aside(path.name)
            return error.reason
        with self._lock:
            if self._reading.get(command.id) == number:  # else it was dropped meanwhile
                self._arrived[command.id] = state
        return ""

    def _is_dropped(self, command: Command, number: int) -> bool:
        """Whether a session is not to be read any more."""
        with self._lock:
            return self._reading.get(command.id) != number

    def _checked(
        self,
        id_: str,
        header: Mapping[str, str],
        tensors: Mapping[str, torch.Tensor],
        listed: Sequence[Listed],
    ) -> State:
        """The state in a file, whose pages must fit the pools."""
        if files.session_of(header) != id_:
            raise files.Unusable("damaged", f"{id_}: the file is another session's")
        try:
            pieces: Sequence[Piece] = ()
            if listed and self._stores is not None and self._pieces is not None:
                pieces = self._pieces.read(listed, self._stores.piece_of)
            state = State.of(tensors, pieces, self._stores)
        except (KeyError, ValueError, RuntimeError, MemoryError) as error:
            if files.lacks_resources(error):
                raise files.Unusable("io", f"{id_}: {error}") from error
            raise files.Unusable("foreign", f"{id_}: evicted units of another shape") from error
        shapes = [(pages.dtype, pages.shape[1:]) for pages in state.pages]
        if shapes != [(pool.dtype, pool.shape[1:]) for pool in self._copies.pools]:
            raise files.Unusable("foreign", f"{id_}: pages of another size")
        if (state.units is None) != (self._stores is None):
            raise files.Unusable("foreign", f"{id_}: recall is on or off")
        return state
