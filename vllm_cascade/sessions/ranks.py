# SPDX-License-Identifier: Apache-2.0
"""Agreement of an engine's ranks: a session counts only where every rank has its part.

Ranks execute the same commands in the same order, so they number their copies, reads and writes
alike. The threads that execute them post outcomes to a store of ``torch.distributed``. One rank
collects them between steps; it never waits for another rank.
"""

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from torch.distributed import DistError, FileStore, HashStore, PrefixStore, Store, TCPStore

from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.files import SUFFIX
from vllm_cascade.sessions.folder import Folder

PATIENCE = timedelta(minutes=3)
"""How long a rank waits for others at start."""
APPEARS_SECONDS = 5
"""How long a rank looks for a file that another one has made."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended in one rank, or in all of them.

    Attributes:
        number: the command's, counted from 0 over all that save, write or read.
        op: what the command did.
        id, stamp: the session's.
        seconds: duration; of several ranks the longest.
        problem: reason under which a failure is counted; empty: it worked.
    """

    number: int
    op: Literal["write", "read", "save"]
    id: str
    seconds: float = 0.0
    problem: str = ""
    stamp: str = ""


def outcome_store(store: Store, rank: int, collects: bool, host: str) -> Store:
    """A store for outcomes that does not grow; all ranks of an engine call this.

    A ``FileStore`` is a log, where each outcome and its deletion would stay. vLLM uses one where
    all ranks run on one machine, so there the collecting rank serves a store on the loopback
    interface.

    Args:
        store: shared by the ranks.
        host: loopback address, of IPv4 or IPv6.

    Returns:
        A new store in place of a ``FileStore``, else ``store``.

    Raises:
        KVPolicyError: the collecting rank has stopped.
    """
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if not isinstance(base, FileStore):
        return store
    turn = store.add(f"stores of {rank}", 1)  # a process may run several engines
    if collects:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        own = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        store.set(f"port {turn}", str(port))
        return own
    try:
        store.wait([f"port {turn}"], PATIENCE)
        return TCPStore(host, int(store.get(f"port {turn}")), wait_for_workers=False)
    except RuntimeError as error:  # a FileStore's timeout is no DistError
        raise KVPolicyError(
            "--kv-sessions: another rank of this engine has stopped (its log says why)"
        ) from error


class Ranks:
    """A rank's place among those of its engine, and what all of them finished.

    Args:
        store: shared by the ranks; None: there is only one.
        collects: whether this rank reports to the scheduler.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, store: Store | None = None, collects: bool = True
    ) -> None:
        assert store is not None or world == 1
        self.rank, self.world, self.collects = rank, world, collects
        self._store = HashStore() if store is None else store
        self._taken = 0  # outcomes
        self._partial: dict[int, list[Outcome]] = {}

    @property
    def name(self) -> str:
        return f"{self.rank}of{self.world}"

    def check_folder(self, folder: Path) -> None:
        """Make sure that every rank sees the folder of the first one; all ranks call this.

        The first rank makes a file there, for which the others look.

        Raises:
            KVPolicyError: a rank sees another folder.
        """
        mark = folder / f".{secrets.token_hex(8)}{SUFFIX}"  # a start removes such files
        turn = self._store.add(f"folders of {self.rank}", 1)  # a process may run several engines
        seen = [f"folder {turn} of {rank}" for rank in range(self.world)]
        if self.rank == 0:
            shown = ""
            with suppress(OSError):  # the scheduler refuses such a folder
                Folder(folder).make()
                mark.touch(0o600)
                shown = mark.name
            self._store.set(seen[0], shown)
        try:
            self._store.wait(seen[:1], PATIENCE)
            name = self._store.get(seen[0]).decode()
            if self.rank:
                self._store.set(seen[self.rank], str(not name or _appears(folder / name)))
            self._store.wait(seen, PATIENCE)
            others = [r for r, key in enumerate(seen) if self._store.get(key) == b"False"]
        except DistError as error:
            raise KVPolicyError(
                "--kv-sessions-dir: another rank of this engine has stopped (its log says why)"
            ) from error
        finally:
            if self.rank == 0:
                with suppress(OSError):
                    mark.unlink(missing_ok=True)
        if others:
            raise KVPolicyError(
                f"--kv-sessions-dir {folder}: rank {others[0]} does not see the folder of rank 0; "
                "give all machines of an engine one folder on a file system that they share"
            )

    def post(self, outcome: Outcome) -> None:
        """Tell the rank that collects. Any thread may call this."""
        number = self._store.add("posted", 1)
        self._store.set(f"outcome/{number}", json.dumps(asdict(outcome)))

    def collect(self) -> list[Outcome]:
        """What all ranks have finished since the last call."""
        finished = []
        while self._store.check([key := f"outcome/{self._taken + 1}"]):
            outcome = Outcome(**json.loads(self._store.get(key)))
            self._store.delete_key(key)
            self._taken += 1
            parts = self._partial.setdefault(outcome.number, [])
            parts.append(outcome)
            if len(parts) == self.world:
                finished.append(_combined(self._partial.pop(outcome.number)))
        return finished


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes soon: a network file system may show it late."""
    deadline = time.monotonic() + APPEARS_SECONDS
    while not (found := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _combined(parts: list[Outcome]) -> Outcome:
    """One outcome of all ranks: a success only if each of them succeeded."""
    problems = sorted(part.problem for part in parts if part.problem)
    longest = max(part.seconds for part in parts)
    return replace(parts[0], seconds=longest, problem=problems[0] if problems else "")
