# SPDX-License-Identifier: Apache-2.0
"""Writes the names of pinned sessions to the folder, in a thread and at most once a second.

Clients choose how many names there are and how often they change, and every write is of all names.
"""

import time
from threading import Event

from vllm_cascade.log import logger
from vllm_cascade.sessions.files import Unusable
from vllm_cascade.sessions.folder import NAMES, Folder
from vllm_cascade.sessions.index import SessionIndex
from vllm_cascade.sessions.threads import started, submit

PAUSE_SECONDS, PAUSES = 1.0, 9
"""Least pause between writes: in seconds, and as a multiple of the last write's time."""


class NamesWriter:
    """Keeps a folder's file of names as the index has them.

    Attributes:
        unread: names and ids of sessions whose files had a read error at start; they keep them.
    """

    def __init__(self, index: SessionIndex, folder: Folder) -> None:
        self.unread: dict[str, str] = {}
        self._index, self._folder = index, folder
        self._pool = started(1, "kv-sessions-names")  # also waits between writes
        self._version = 0  # of the names in the folder
        self._waits = False  # a write has not begun yet
        self._due = 0.0
        self._closing = Event()
        self._writes, self._said = True, False

    def read(self) -> dict[str, str]:
        """Ids of sessions by name, as an earlier server left them."""
        try:
            return self._folder.names()
        except Unusable as error:
            self._writes = error.reason != "io"
            if self._writes:
                self._folder.move_aside(NAMES)
            logger.warning(
                "KV sessions: %s; no session is pinned%s",
                error,
                ""
                if self._writes
                else ", and no name of this server outlives it. Check the "
                "disk, then start the server again",
            )
            return {}

    def keep(self) -> None:
        """Let the thread write the names, if they have changed."""
        changed = self._version != self._index.names_version
        if changed and self._writes and not self._waits:
            self._waits = True
            submit(self._pool, self._write)

    def _write(self) -> None:
        self._closing.wait(max(self._due - time.monotonic(), 0))
        self._waits = False  # a later change asks for the next write
        version, begin = self._index.names_version, time.monotonic()
        if self._version == version:
            return
        try:
            self._folder.write_names({**self.unread, **self._index.names()})
            self._version = version
        except OSError as error:  # a later step tries again
            if not self._said:
                self._said = True
                logger.warning(
                    "KV sessions: names could not be written to %s (%s); after a restart other "
                    "sessions may be pinned (said once)",
                    *(self._folder.path, error),
                )
        end = time.monotonic()
        self._due = end + max(PAUSE_SECONDS, PAUSES * (end - begin))

    def close(self) -> None:
        """Write the last names without a pause, and stop the thread."""
        self._closing.set()
        self.keep()
        self._pool.shutdown()
