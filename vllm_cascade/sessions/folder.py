# SPDX-License-Identifier: Apache-2.0
"""The folder of one server's sessions: which are there, under which names, and what is damaged.

Besides sessions' files and those of evicted units it has a file that is locked while a server uses
the folder, one that holds the names under which sessions are pinned, and a folder of damaged files.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions import files
from vllm_cascade.sessions.session import Session
from vllm_cascade.sessions.settings import ENGINE_FOLDER

DAMAGED, MOST_DAMAGED = "damaged", 1 << 30
"""Folder in the sessions' folder to which damaged files are moved, and bytes that stay there."""
LOCK, NAMES = "lock", "names.json"
SUFFIXES = (files.SUFFIX, files.PIECE_SUFFIX)


@dataclass(frozen=True)
class Entry:
    """A session in a folder.

    Attributes:
        id: the session's.
        header: of the first rank's file.
        num_bytes: of all files, with those that it shares.
        used: seconds since the epoch at which it was last written or read.
        files: names of its files, one a rank.
        pieces: names and checksums of the files that it may share with others.
    """

    id: str
    header: dict[str, str]
    num_bytes: int
    used: float
    files: tuple[str, ...]
    pieces: tuple[tuple[str, str], ...] = ()


class Bad(NamedTuple):
    """A file that no session can be read from.

    Attributes:
        reason: that of ``Unusable``, or ``incomplete``: a file of another rank is missing.
    """

    name: str
    problem: str
    reason: str


class Folder:
    """The sessions' folder of one server.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._taken: tuple[int, int] | None = None  # device and inode of the lock

    def check(self) -> None:
        """Make sure that the folder is still the one that was opened, or checked first.

        Raises:
            OSError: it was deleted; another server may have made the one that is there now.
        """
        found = (self.path / LOCK).stat()
        taken = found.st_dev, found.st_ino
        if self._taken not in (None, taken):
            raise OSError("the folder was deleted while in use, and another server has made it")
        self._taken = taken

    def make(self) -> None:
        """Create the folder for this user alone.

        Raises:
            OSError: it cannot be made.
        """
        if self.path.name.startswith(ENGINE_FOLDER):  # the first engine may come later
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self) -> None:
        """Create the folder and take it for this server, until ``close`` or the process' end.

        Raises:
            KVPolicyError: it cannot be written, belongs to another user, or another server has it.
        """
        try:
            self.make()
            found = self.path.stat()
            if found.st_uid != os.getuid():
                raise PermissionError("it belongs to another user")
            if found.st_mode & 0o077:
                raise PermissionError(
                    f"others have access; chmod 700 it, or name a new folder in it: {self.path}/own"
                )
            (self.path / DAMAGED).mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise KVPolicyError(
                f"--kv-sessions-dir {self.path}: cannot be used ({error}); choose a folder that "
                "this user can write to, or remove the flag"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            problem = (
                "another server uses this folder; give each server a folder of its own"
                if isinstance(error, BlockingIOError)
                else f"it cannot be locked ({error}); choose a folder whose file system has locks"
            )
            raise KVPolicyError(f"--kv-sessions-dir {self.path}: {problem}") from error
        self._lock = descriptor
        self._taken = None
        self.check()
        # What a process left that ended while writing.
        for suffix in (*SUFFIXES, NAMES):
            for leftover in self.path.glob(f".*{suffix}"):
                leftover.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def in_use(self) -> bool:
        """Whether a server has the folder. It changes nothing in it."""
        try:
            with open(self.path / LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def entries(self) -> tuple[list[Entry], list[Bad]]:
        """All sessions, least recently used first, and bad files.

        Reads headers only. A session with a missing rank or without its evicted units is bad. One
        that a running server removes meanwhile is left out.

        Raises:
            OSError: the folder cannot be listed, which ``Path.glob`` does not say.
        """
        sizes: dict[str, int] = {}
        found: dict[tuple[str, int], dict[int, str]] = {}
        entries: list[Entry] = []
        bad: list[Bad] = []
        for name in sorted(os.listdir(self.path)):
            if name.startswith(".") or not name.endswith(files.SUFFIX):
                continue
            try:
                session, rank, world = files.parts_of(name)
            except ValueError:
                bad.append(Bad(name, "not the name of a session's file", "damaged"))
                continue
            found.setdefault((session, world), {})[rank] = name
        for (session, world), parts in found.items():
            names = tuple(parts[rank] for rank in sorted(parts))
            try:
                if missing := sorted(set(range(world)) - set(parts)):
                    raise files.Unusable("incomplete", f"the file of rank {missing[0]} is missing")
                entries.append(self._entry(session, names, sizes))
            except (files.Unusable, OSError) as error:
                if not any(map(self._is_gone, names)):
                    reason = error.reason if isinstance(error, files.Unusable) else "io"
                    bad += [Bad(name, str(error), reason) for name in names]
        return sorted(entries, key=lambda entry: entry.used), bad

    def has(self, session: Session, world: int) -> bool:
        """Whether the files of all ranks of a session are complete."""
        names = [files.file_name(session.id, rank, world) for rank in range(world)]
        try:
            headers = [files.read_header(self.path / name) for name in names]
        except files.Unusable:
            return False
        return all(header.get("stamp") == session.stamp for header in headers)

    def _is_gone(self, name: str) -> bool:
        """Whether there is no such file. What cannot be looked up counts as there."""
        try:
            os.lstat(self.path / name)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def _entry(self, session: str, names: tuple[str, ...], sizes: dict[str, int]) -> Entry:
        """The session in its ranks' files.

        Args:
            sizes: of files of evicted units; those of this session are added.

        Raises:
            files.Unusable: it cannot be read.
            OSError: a file is not readable.
        """
        headers = [files.read_header(self.path / name) for name in names]
        pieces = tuple(piece for header in headers for piece in files.pieces_of(header))
        # A file is written before, and removed after, the session's that lists it.
        for name, _ in pieces:
            sizes[name] = sizes.get(name) or self.size(name)
            if not sizes[name]:
                raise files.Unusable("damaged", f"its evicted units {name} are missing")
        if any(files.session_of(header) != session for header in headers):
            raise files.Unusable("damaged", "the header is another session's")
        if len({header.get("stamp") for header in headers}) > 1:
            raise files.Unusable("incomplete", "the ranks' files are not of one write")
        stats = [(self.path / name).stat() for name in names]
        size = sum(s.st_size for s in stats) + sum(sizes[name] for name, _ in pieces)
        return Entry(session, headers[0], size, min(s.st_mtime for s in stats), names, pieces)

    def names(self) -> dict[str, str]:
        """Ids of pinned sessions by name; some may be gone.

        Raises:
            files.Unusable: the file that holds them cannot be read.
        """
        try:
            with files.opened(self.path / NAMES) as file:
                found = json.load(file)
                return {str(name): str(session) for name, session in found.items()}
        except files.Unusable as error:
            if error.reason == "missing":
                return {}
            raise

    def write_names(self, names: Mapping[str, str]) -> None:
        """Replace the names under which sessions are pinned.

        Raises:
            OSError: the file cannot be written.
        """
        self.check()
        with files.replacing(self.path / NAMES) as file:
            file.write(json.dumps(dict(names)).encode())

    def move_aside(self, name: str) -> None:
        """Move a damaged file to where no session is looked for, if the folder can be written.

        Of the files there the oldest are deleted, so that all but the newest stay within
        ``MOST_DAMAGED`` bytes.
        """
        with contextlib.suppress(OSError):
            (self.path / name).replace(self.path / DAMAGED / name)
            stats = [(path.stat(), path) for path in (self.path / DAMAGED).iterdir()]
            room = MOST_DAMAGED
            stats.sort(key=lambda one: one[0].st_ctime_ns, reverse=True)
            for found, path in stats[1:]:
                if found.st_size > room:
                    path.unlink(missing_ok=True)
                else:
                    room -= found.st_size

    def size(self, name: str) -> int:
        """Bytes of a file; 0 if it is gone.

        Raises:
            OSError: the file system does not say.
        """
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return 0

    def room(self) -> int:
        """Bytes that sessions can have on this disk: what is free, and what they have now."""
        own = [path.name for path in self.path.iterdir() if path.suffix in SUFFIXES]
        return shutil.disk_usage(self.path).free + sum(map(self.size, own))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_unused(self) -> None:
        """Remove evicted units that no session's file lists. No server may be writing.

        Nothing is removed if a file cannot be read now: it may list any of them.
        """
        used = set()
        for file in self.path.glob(f"[!.]*{files.SUFFIX}"):
            try:
                used |= {name for name, _ in files.pieces_of(files.read_header(file))}
            except files.Unusable as error:
                if error.reason == "io":
                    return
        units = self.path.glob(f"[!.]*{files.PIECE_SUFFIX}")
        self.remove([file.name for file in units if file.name not in used])
