# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers say of sessions to each other: sessions, commands and reports."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

DIGEST_BYTES = 16


def token_digests(tokens: np.ndarray, lengths: Iterable[int]) -> dict[int, str]:
    """Digests of the prefixes of a token sequence.

    Args:
        tokens: int32 ``[T]``.
        lengths: ascending, each at most ``T``.
    """
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found, begin = {}, 0
    for length in lengths:
        running.update(tokens[begin:length].tobytes())
        found[length], begin = running.copy().hexdigest(), length
    return found


def session_id(context: str, tokens: str, num_tokens: int) -> str:
    """Identifier of a session, also the name of its file."""
    text = f"{context} {tokens} {num_tokens}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


class Prefixes:
    """A prompt whose prefixes are hashed once, however often sessions are looked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._digests: dict[int, str] = {}
        self._ids: dict[tuple[str, int], str] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def digests(self, lengths: Iterable[int]) -> dict[int, str]:
        """Digests of prefixes by length, of at least these lengths, which are ascending."""
        new = [length for length in lengths if length not in self._digests]
        if new:
            tokens = np.asarray(self._tokens[: new[-1]], dtype=np.int32)
            self._digests |= token_digests(tokens, new)
        return self._digests

    def session_at(self, context: str, length: int) -> str:
        """Identifier of the session that ends with a prefix of a length given to ``digests``."""
        key = context, length
        if key not in self._ids:
            self._ids[key] = session_id(context, self._digests[length], length)
        return self._ids[key]


@dataclass(eq=False)
class Session:
    """One session.

    Attributes:
        context: digest of everything besides tokens that the state depends on: the request's
            policy, its cache salt and its LoRA adapter.
        tokens: digest of the tokens.
        num_bytes: bytes that its state takes, in memory and on disk.
        prompt: length and digest of the prompt that its last tokens answer; empty: they answer
            none, so this is a prompt state.
        names: what requests pinned it under, the oldest first; none: it is not pinned. Names are in
            a file of their own (``Folder.names``), because they move on without a session's file
            being written again.
        used: seconds since the epoch at which it was last kept or used.
        touched: the same as its file says, which a new server goes by.
        stamp: random text that the files of all ranks share. Equal tokens can be kept twice in
            states that differ, and parts of two such states must not meet.
        in_memory: all workers hold its state.
        saving: workers are copying its state to memory.
        on_disk: all workers have written its file.
        writing, reading: workers are writing or reading its file.
        waiting: ids of requests that wait to start from it; it is not dropped meanwhile.
        continued: a later session began with it; it leaves a tier before those that end a chat.
        before: id of the session that it continues.
        behind: id of the prompt state before its answer; empty: none was kept.
        rests_until: seconds since the epoch before which no request finds it, because its file
            had a read error or takes long to read.
        unusable: this engine cannot read its file, which is another engine's, or too large for the
            memory. The session counts until it leaves the folder.
    """

    context: str
    tokens: str
    num_tokens: int
    num_bytes: int
    prompt: str = ""
    names: list[str] = field(default_factory=list)
    used: float = 0.0
    touched: float = 0.0
    stamp: str = ""
    in_memory: bool = False
    saving: bool = False
    on_disk: bool = False
    writing: bool = False
    reading: bool = False
    waiting: set[str] = field(default_factory=set)
    continued: bool = False
    before: str = ""
    behind: str = ""
    rests_until: float = 0.0
    unusable: bool = False
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = session_id(self.context, self.tokens, self.num_tokens)

    @property
    def is_prompt(self) -> bool:
        """Whether it is a prompt state."""
        return not self.prompt

    @property
    def header(self) -> dict[str, str]:
        """What a file says of the session."""
        return {
            "context": self.context,
            "tokens": self.tokens,
            "num_tokens": str(self.num_tokens),
            "num_bytes": str(self.num_bytes),
            "prompt": self.prompt,
            "before": self.before,
            "behind": self.behind,
            "stamp": self.stamp,
        }

    @classmethod
    def of(cls, header: Mapping[str, Any], used: float) -> Self:
        """The session that a file's header describes.

        Raises:
            KeyError, ValueError: the header is not a session's.
        """
        numbers = int(header["num_tokens"]), int(header["num_bytes"])
        known = header["context"], header["tokens"], *numbers
        session = cls(*known, used=used, touched=used, stamp=header["stamp"])
        session.prompt = header.get("prompt", "")
        session.before, session.behind = header.get("before", ""), header.get("behind", "")
        return session


@dataclass(frozen=True)
class Command:
    """One thing that workers do before a step. They execute commands in order.

    Attributes:
        op: ``save`` copies pages to memory, ``restore`` copies memory to pages, ``write`` writes
            memory to a file, ``read`` reads a file into memory, ``drop`` frees memory, ``remove``
            deletes a file, ``touch`` says that it was used. Threads of a worker execute those that
            concern files.
        id: the session's.
        pages: for ``save`` and ``restore``: block ids of the state's pages, in order.
        header: for ``write``: what the file says of engine and session; for ``read``: of the
            engine, with the session's stamp; for ``save``: the stamp.
    """

    op: Literal["save", "restore", "write", "read", "drop", "remove", "touch"]
    id: str
    pages: tuple[int, ...] = ()
    header: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """What workers' threads finished since the last report.

    Attributes:
        saved: sessions whose state all workers have copied to memory.
        unsaved: sessions of which a worker could not copy the state.
        written: sessions whose files are complete.
        unwritten: sessions whose files could not be written.
        read: sessions that are in memory again, with the seconds that it took.
        unreadable: sessions whose files could not be read, each with the reason.
        stamps: of these sessions. Equal tokens may have been kept again since.
        full: a file could not be written because the disk has no room.
    """

    saved: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    read: dict[str, float] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    full: bool = False

    def __bool__(self) -> bool:
        files = self.written or self.unwritten or self.read or self.unreadable
        return bool(files or self.saved or self.unsaved)


@dataclass
class SessionCounters:
    """Session statistics since the engine started.

    Attributes:
        hits: requests that started from a session, by the tier that held it.
        hit_tokens: tokens that these requests did not compute.
        misses: requests that started from no session, nor from a snapshot of as many tokens, by
            reason.
        lost: states that were not kept, and sessions that are gone or cannot be used, by reason.
        kept: sessions kept.
        load_seconds: durations of reads from disk; the reader empties the list.
    """

    hits: Counter[str] = field(default_factory=Counter)
    hit_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    load_seconds: list[float] = field(default_factory=list)
