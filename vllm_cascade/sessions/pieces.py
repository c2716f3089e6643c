# SPDX-License-Identifier: Apache-2.0
"""Files of evicted units, one for each chunk of a log, which sessions of one worker share.

A chat's evicted units only grow, and forks share what they have in common (``recall/chain.py``).
A chunk that a session holds never changes. So it is written once, is in memory once, and its file
goes with the last session that lists it.

A file is mapped, not copied: a session of 100,000 tokens can have 1 GiB of evicted units, of which
a turn reads a small part. The whole file is checked once, when it is mapped. After that it must
not be modified; it can be deleted.
"""

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from vllm_cascade.recall.stores import Piece
from vllm_cascade.sessions import files
from vllm_cascade.sessions.folder import Folder

Listed = tuple[str, str]
"""Name and checksum of a file."""
MOST_MAPPED = 16_384
"""Files mapped at a time; more are copied. Linux allows a process 65,530 mappings by default."""


class Pieces:
    """A worker's chunks that are in files.

    Args:
        folder: of the sessions.
        rank: ends the files' names, as ``0of1``.
    """

    def __init__(self, folder: Path, rank: str) -> None:
        self._folder, self._rank = folder, rank
        self._lock = threading.Lock()
        self._files: WeakKeyDictionary[Piece, Listed] = WeakKeyDictionary()
        self._pieces: WeakValueDictionary[str, Piece] = WeakValueDictionary()  # by file name
        self._users: dict[str, set[str]] | None = None  # sessions by file name
        self._own: set[str] = set()  # files that were written here, so no older session lists them
        self._complete = True  # no session's file was unreadable when these were learnt
        self._loading = threading.Lock()
        self._pool = ThreadPoolExecutor(os.cpu_count(), "kv-sessions-units")

    def write(self, session: str, pieces: Sequence[Piece]) -> list[Listed]:
        """Write the pieces that are in no file yet. Only the thread that writes calls this.

        Raises:
            OSError: one cannot be written.
        """
        listed = []
        for piece in pieces:
            with self._lock:
                known = self._files.get(piece)
            if known is None or known[0] not in self._used():
                name = f"{secrets.token_hex(16)}.{self._rank}{files.PIECE_SUFFIX}"
                header = {"format": files.FORMAT, "rank": self._rank}
                known = (
                    name,
                    files.write(
                        self._folder / name, header, {"units": torch.from_numpy(piece.memory)}
                    ),
                )
                self._note(piece, known)
                self._own.add(name)
            self._used().setdefault(known[0], set()).add(session)
            listed.append(known)
        return listed

    def load(self) -> None:
        """Learn what sessions list, before a file of one of them is moved aside or removed."""
        self._used()

    def read(self, listed: Sequence[Listed], of: Callable[[np.ndarray], Piece]) -> list[Piece]:
        """The pieces of these files; those that are in memory are not read.

        Args:
            of: makes a piece of its memory.

        Raises:
            Unusable: a file is not as it was written.
            ValueError: ``of`` takes no such memory.
        """
        return list(self._pool.map(lambda one: self._one(one, of), listed))

    def _one(self, listed: Listed, of: Callable[[np.ndarray], Piece]) -> Piece:
        name, checksum = listed
        with self._lock:
            piece = self._pieces.get(name)
            if piece is not None and self._files[piece] == listed:
                return piece
            mapped = len(self._pieces) < MOST_MAPPED
        expected = {"checksum": checksum, "rank": self._rank}
        try:
            _, tensors = files.read(self._folder / name, expected, mapped)
        except files.Unusable as error:
            if error.reason == "damaged":
                Folder(self._folder).move_aside(name)
            raise
        piece = of(tensors["units"].numpy())
        self._note(piece, listed)
        return piece

    def _note(self, piece: Piece, listed: Listed) -> None:
        with self._lock:
            self._files[piece], self._pieces[listed[0]] = listed, piece

    def release(self, session: str) -> None:
        """Remove what no other session lists. Only the thread that writes calls this."""
        for name, users in list(self._used().items()):
            users.discard(session)
            if not users:
                del self._used()[name]
                if self._complete or name in self._own:  # else a later start may remove it
                    self._own.discard(name)
                    with suppress(OSError):
                        (self._folder / name).unlink(missing_ok=True)

    def _used(self) -> dict[str, set[str]]:
        """The sessions that list each file, at first as an earlier server has left them.

        Only the thread that writes changes them.
        """
        with self._loading:
            if self._users is None:
                self._users = self._found()
        return self._users

    def _found(self) -> dict[str, set[str]]:
        """The sessions that list each file in the folder."""
        found: dict[str, set[str]] = {}
        for path in self._folder.glob(f"[!.]*.{self._rank}{files.SUFFIX}"):
            try:
                session, _, _ = files.parts_of(path.name)
                listed = files.pieces_of(files.read_header(path))
            except ValueError:
                continue
            except files.Unusable as error:
                self._complete &= error.reason != "io"
                continue
            for name, _ in listed:
                found.setdefault(name, set()).add(session)
        return found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
