# SPDX-License-Identifier: Apache-2.0
"""The scheduler's index of sessions: which exist, in which tier, and what workers must do next.

A session is the state of a finished request after all tokens that were computed. It is found by
exactly these tokens: a prompt that begins with them starts there. A prompt state is a session, too:
the state within a request's prompt, for chats whose next prompt has another text in the answer's
place. Tiers are host memory and a folder, each with a bound in bytes. The least recently used
session leaves a tier first.

The index holds no states. It issues commands, which workers execute (``tiers.py``), and learns
from their reports which files were written and read.
"""

import itertools
import secrets
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from vllm_cascade.log import logger
from vllm_cascade.sessions.session import (
    DIGEST_BYTES,
    Command,
    Prefixes,
    Report,
    Session,
    SessionCounters,
    token_digests,
)

TOUCH_SECONDS = 60
"""Least time between two touches of a file."""
REST_SECONDS = 30
"""Time until a file is read again that had a read error, or took too long."""
FULL_SECONDS = 600
"""Time after which a disk that was full is expected to have its room again."""
MOST_NAMES, MOST_NAMES_HELD = 16, 1 << 16
"""Names that one session and all sessions keep; clients choose how many they send."""
USELESS = ("damaged", "missing")
"""Problems of one rank's file after which those of other ranks are removed."""


def _uncount(counters: dict[str, Counter[Any]], context: str, key: Any) -> None:
    """Count one less; what is zero is not there."""
    counters[context][key] -= 1
    if not counters[context][key]:
        del counters[context][key]
    if not counters[context]:
        del counters[context]


def _scopes(session: Session) -> set[str]:
    """The salts and adapters of the requests that pinned a session: first words of its names."""
    return {name.partition(" ")[0] for name in session.names}


def _nearest_first(
    pinned: list[tuple[Session, Session]], newest: Session
) -> list[tuple[Session, Session]]:
    """Sessions, each with a part, that share a cache salt or adapter with ``newest``, then others.

    Sessions that just lost their names in another tier come first.
    """
    scopes = _scopes(newest)
    return sorted(
        pinned, key=lambda pair: bool(pair[0].names) and _scopes(pair[0]).isdisjoint(scopes)
    )


class SessionIndex:
    """Finds, keeps and drops sessions within the tiers' bounds.

    Args:
        memory_bytes: bound of host memory over all workers.
        disk_bytes: bound of the folder; 0: no folder. It shrinks for a while when the disk is full.
        ttl: seconds without use after which a session is dropped; 0: never.
        header: what every file says of this engine.
    """

    def __init__(
        self,
        memory_bytes: int,
        disk_bytes: int = 0,
        ttl: float = 0.0,
        header: Mapping[str, str] | None = None,
    ) -> None:
        self.header = dict(header or {})
        self.memory_bytes, self.disk_bytes, self.ttl = memory_bytes, disk_bytes, ttl
        self._most_disk = disk_bytes  # as the settings say
        self.counters = SessionCounters()
        self.version = 0  # changes whenever a search may give another result
        self.used = {"memory": 0, "disk": 0}  # bytes
        self.held = {"memory": 0, "disk": 0}  # sessions; one can be in both
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self.names_version = 0  # changes whenever ``names`` does
        self._by_name: dict[str, Session] = {}  # oldest first
        self._lengths: dict[str, Counter[int]] = {}  # by context
        self._prompts: dict[str, Counter[str]] = {}  # by context
        self._answers: dict[str, set[str]] = {}  # ids of the sessions behind a prompt state's id
        self._commands: list[Command] = []
        self._said = False  # that pins were lost
        self._was_full = -inf  # when a file could not be written for lack of room
        self._unfinished = 0  # copies to memory and files that workers have not reported
        self._moves = 0  # changes whenever more memory may be freed
        self._crowded = -1  # ``_moves`` when a waiting request found no room in memory

    def __len__(self) -> int:
        return len(self._sessions)

    def named(self, name: str) -> Session | None:
        """The session that is pinned under a name."""
        return self._by_name.get(name)

    def parts(self, session: Session) -> list[Session]:
        """A session and the prompt state before its answer, if there is one."""
        prompt = self._sessions.get(session.behind)
        return [session] if prompt is None else [session, prompt]

    def has(self, session: Session) -> bool:
        """Whether a session that was found earlier is still there."""
        return self._sessions.get(session.id) is session

    def usable(self, session: Session, now: float) -> bool:
        """Whether requests may start from a session."""
        return self.has(session) and not session.unusable and session.rests_until <= now

    def writing(self) -> list[Session]:
        """Sessions whose files workers have not reported as complete."""
        return [one for one in self._sessions.values() if one.writing]

    @property
    def unsettled(self) -> bool:
        """Whether a report of workers may change what ``names`` returns.

        Also one of a session without a name: a later turn may leave its name to that one's file.
        """
        return bool(self._by_name) and self._unfinished > 0

    def names(self) -> dict[str, str]:
        """Ids of the pinned sessions by name, as a restart shall find them.

        For a session without a complete file, that of the latest one which it continues and which
        has a file. A thread may ask while names change, so they are copied in one step.
        """
        pinned = self._by_name.copy()
        return {name: self._durable(session).id for name, session in pinned.items()}

    def _durable(self, session: Session) -> Session:
        return next((one for one in self._chain(session) if one.on_disk), session)

    # --- search ---------------------------------------------------------------------------------

    def find(
        self,
        context: str,
        tokens: Sequence[int] | Prefixes,
        max_tokens: int,
        now: float,
        beyond: int = 0,
    ) -> Session | None:
        """Find the session with the longest prefix of ``tokens``, of at most ``max_tokens``.

        Args:
            beyond: only longer prefixes are looked up.
        """
        self.expire(now)
        lengths = sorted(n for n in self._lengths.get(context, ()) if beyond < n <= max_tokens)
        if not lengths:
            return None
        prefixes = tokens if isinstance(tokens, Prefixes) else Prefixes(tokens)
        prefixes.digests(lengths)
        known = (self._sessions.get(prefixes.session_at(context, n)) for n in reversed(lengths))
        return next((one for one in known if one is not None and self.usable(one, now)), None)

    def diverges(self, context: str, tokens: Sequence[int] | Prefixes) -> bool:
        """Whether a prompt that no session serves goes on after the prompt of one, differently."""
        prompts = self._prompts.get(context, {})
        lengths = {int(prompt.split()[0]) for prompt in prompts}
        fits = sorted(length for length in lengths if length < len(tokens))
        if not fits:
            return False
        prefixes = tokens if isinstance(tokens, Prefixes) else Prefixes(tokens)
        digests = prefixes.digests(fits)
        return any(f"{length} {digests[length]}" in prompts for length in fits)

    def begins(self, session: Session, contexts: Container[str], tokens: Sequence[int]) -> bool:
        """Whether a prompt begins with a session's tokens, under one of these contexts."""
        num = session.num_tokens
        if session.context not in contexts or len(tokens) < num:
            return False
        digest = token_digests(np.asarray(tokens[:num], dtype=np.int32), [num])[num]
        return digest == session.tokens

    def ready(self, session: Session, request_id: str) -> bool:
        """Whether a request may start from a session now; if not, it waits for the file.

        Calls the session up from disk. While the request waits, its session is not dropped.

        When one request finds no room, none looks for it until a session can have left: a search
        takes all sessions, and small ones would overtake a large one.
        """
        session.waiting.add(request_id)
        if session.in_memory:
            return True
        if session.reading or session.saving or self._crowded == self._moves:
            return False
        if self._make_room(session.num_bytes, also_pinned=True):
            self._set_memory(session, reading=True)
            self._command("read", session, header={**self.header, "stamp": session.stamp})
        else:
            self._crowded = self._moves
        return False

    def leave(self, session: Session, request_id: str) -> None:
        """Note that a request does not wait for a session any more."""
        session.waiting.discard(request_id)
        self._moves += 1

    def restore(
        self, session: Session, request_id: str, pages: Sequence[int], tier: str, now: float
    ) -> None:
        """Start an admitted request from a session that is in memory.

        Args:
            pages: block ids of the request's new pages for this state.
            tier: where the session was when the request found it; counted.
        """
        self._command("restore", session, pages=tuple(pages))
        self.leave(session, request_id)
        self.go_on(session, now)
        self.counters.hits[tier] += 1
        self.counters.hit_tokens += session.num_tokens

    def go_on(self, session: Session, now: float) -> None:
        """Note that a request's prompt goes on from here. Other answers to it are not needed."""
        session.continued = False
        self._continue(session)
        for id_ in self._answers.get(session.id, ()):
            self._sessions[id_].continued = True
        self._use(session, now)

    def _use(self, session: Session, now: float) -> None:
        session.used = now
        self._sessions.move_to_end(session.id)
        if session.on_disk and now - session.touched >= TOUCH_SECONDS:
            session.touched = now
            self._command("touch", session)

    # --- keeping --------------------------------------------------------------------------------

    def keep(
        self,
        context: str,
        tokens: Sequence[int],
        num_bytes: int,
        pages: Sequence[int],
        now: float,
        name: str | None = None,
        before: str | None = None,
        num_prompt: int = 0,
        aborted: bool = False,
        behind: str = "",
    ) -> Session | None:
        """Keep the state after ``tokens``, which is in ``pages``.

        Args:
            before: id of the session that it continues.
            num_prompt: how many of the tokens are the request's prompt; 0: it is a prompt state.
            aborted: the client may never have got the answer, or gets none. What it continues then
                stays pinned and in its place, until a request starts from this state.
            behind: id of the prompt state before its answer, which stays as long as it is pinned.

        Returns:
            The session of these tokens, perhaps an earlier one; None: there is no room, which is
            counted.
        """
        self.expire(now)
        if now - self._was_full > FULL_SECONDS:
            self.disk_bytes = self._most_disk
        num = len(tokens)
        digests = token_digests(np.asarray(tokens, dtype=np.int32), sorted({num_prompt, num}))
        prompt = f"{num_prompt} {digests[num_prompt]}" if num_prompt else ""
        session = Session(context, digests[num], num, num_bytes, prompt, used=now, touched=now)
        session.stamp = secrets.token_hex(DIGEST_BYTES)
        if aborted:
            name = self._left_to(before, name)
        known, names = self._sessions.get(session.id), list[str]()
        replaced = known is not None and (known.unusable or known.rests_until > now)
        if known is not None and not replaced:
            self._keep_again(known, now, name, behind)
            return known
        if not self._make_room(num_bytes, spared=behind):
            self.counters.lost["memory_full"] += 1
            return None
        if known is not None:
            names = known.names.copy()
            self.forget(known)
        session.behind = behind
        if before in self._sessions:
            session.before = before
            if not aborted:
                self._continue(session)
        self._add(session)
        for one in (*names, name):
            self._pin(session, one)
        self._set_memory(session, saving=True)
        self._command("save", session, pages=tuple(pages), header={"stamp": session.stamp})
        self.counters.kept += 1
        if self.disk_bytes and self._make_disk_room(session):
            self._set_disk(session, writing=True)
            self._command("write", session, header={**self.header, **session.header})
        self._bound_pins(session)
        return session

    def _keep_again(self, known: Session, now: float, name: str | None, behind: str) -> None:
        """Keep a session of whose tokens another request has the state."""
        self._use(known, now)
        known.continued = False
        if known.behind not in self._sessions:
            self._put_behind(known, behind)
        self._pin(known, name)
        self._bound_pins(known)

    def _continue(self, session: Session) -> None:
        """Note that a chat goes on from what a session continues, also from aborted answers."""
        for before in itertools.islice(self._chain(session), 1, None):
            if before.continued:
                break
            before.continued = before.id != session.behind  # the next turn may go on from that

    def _left_to(self, before: str | None, name: str | None) -> str | None:
        """The name that an aborted answer's state gets: none if another session has, or gets, it.

        What the answer continues is complete, since a request started from it. It takes the name,
        but not from a later turn: the answer may be one turn's second.
        """
        if name is None:
            return None
        owner, complete = self._by_name.get(name), self._sessions.get(before or "")
        if owner is None and complete is None:
            return name
        turns = () if owner is None else self._chain(owner)
        earlier = {id_ for turn in turns for id_ in (turn.id, turn.behind)}
        if complete is not None and complete.id not in earlier:
            self._pin(complete, name)
            self._bound_pins(complete)
        return None

    def _chain(self, session: Session) -> Iterator[Session]:
        """A session and those that it continues, the latest first."""
        found: Session | None = session
        while found is not None:
            yield found
            found = self._sessions.get(found.before)

    def adopt(self, session: Session, names: Iterable[str] = ()) -> bool:
        """Take a session found in the folder at start; False if it does not fit the bounds."""
        full = self.used["disk"] + session.num_bytes > self.disk_bytes
        if full or session.id in self._sessions:
            return False
        session.unusable |= session.num_bytes > self.memory_bytes
        self._add(session)
        for name in names:
            self._pin(session, name)
        self._set_disk(session, on_disk=True)
        return True

    def bound_pins(self) -> None:
        """Bound what is pinned, once all sessions of the folder have been taken."""
        pinned = [one for one in self._sessions.values() if one.names and not one.unusable]
        if pinned:
            self._bound_pins(pinned[-1])

    def release(self, name: str) -> bool:
        """Drop a name, and with its last name the session; False if no session has it."""
        session = self._by_name.get(name)
        if session is None:
            return False
        self._unpin(session, name)
        if not session.names:
            for one in self.parts(session):
                if not self._is_pinned(one):
                    self.forget(one)
        return True

    def forget(self, session: Session) -> None:
        """Drop a session from all tiers."""
        if session.in_memory or session.reading or session.saving:
            self._command("drop", session)
        if session.on_disk or session.writing:
            self._command("remove", session)
        self._set_memory(session)
        self._set_disk(session)
        self._delete(session)

    def clear(self) -> None:
        """Drop all sessions."""
        for session in list(self._sessions.values()):
            self.forget(session)

    def expire(self, now: float) -> None:
        """Drop sessions that were not used for the time to live."""
        while self.ttl and self._sessions:
            oldest = next(iter(self._sessions.values()))
            if oldest.used + self.ttl >= now or oldest.waiting:
                return
            self.counters.lost["expired"] += 1
            self.forget(oldest)

    # --- workers --------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there are commands for workers."""
        return bool(self._commands)

    def take_commands(self) -> list[Command]:
        """Commands for workers since the last call, in order."""
        commands, self._commands = self._commands, []
        return commands

    def _command(self, op: Any, session: Session, **more: Any) -> None:
        self._commands.append(Command(op, session.id, **more))

    def note(self, report: Report, now: float = 0.0) -> None:
        """Learn what workers finished. Sessions that were dropped meanwhile are ignored."""
        for id_ in report.saved:
            if (session := self._reported(report, id_)) and session.saving:
                self._set_memory(session, in_memory=True)
        for id_ in report.unsaved:
            if session := self._reported(report, id_):
                self.counters.lost["memory_full"] += 1
                self._undo(session)
        for id_ in report.written:
            if (session := self._reported(report, id_)) and session.writing:
                self._set_disk(session, on_disk=True)
                # A later turn without a file leaves its name to this one, see ``_durable``.
                self.names_version += bool(session.names or session.continued)
        for id_ in report.unwritten:
            self.counters.lost["unwritten"] += 1
            if (session := self._reported(report, id_)) and session.writing:
                self._set_disk(session)
                self._command("remove", session)  # ranks that have written it
                if report.full:
                    self._shrink(now)
        for id_, seconds in report.read.items():
            self.counters.load_seconds.append(seconds)
            if (session := self._reported(report, id_)) and session.reading:
                self._set_memory(session, in_memory=True)
                self.version += session.rests_until > 0
                session.rests_until = 0.0
        for id_, reason in report.unreadable.items():
            self.counters.lost[reason] += 1
            if (session := self._reported(report, id_)) and session.reading:
                self._command("drop", session)  # ranks that have read it
                self._set_memory(session)
                if reason in USELESS:
                    self.forget(session)
                else:  # its file stays
                    session.unusable = reason != "io"
                    self.rest(session, now)

    def rest(self, session: Session, now: float) -> None:
        """Let no request find a session for a while, unless it is read meanwhile."""
        session.rests_until = now + REST_SECONDS
        self.version += 1

    def _undo(self, session: Session) -> None:
        """Forget a session that has no state; what it continues is the chat's end again."""
        names, before = tuple(session.names), self._sessions.get(session.before)
        self.forget(session)
        if before is not None:
            before.continued = False
            for name in names:
                self._pin(before, name)
            self._bound_pins(before)

    def _reported(self, report: Report, id_: str) -> Session | None:
        """The session that an outcome is about; None: it is gone, or equal tokens replaced it."""
        session = self._sessions.get(id_)
        if session is None or report.stamps.get(id_, session.stamp) != session.stamp:
            return None
        return session

    # --- bounds ---------------------------------------------------------------------------------

    def _add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self._lengths.setdefault(session.context, Counter())[session.num_tokens] += 1
        if session.prompt:
            self._prompts.setdefault(session.context, Counter())[session.prompt] += 1
        self._put_behind(session, session.behind)
        self.version += 1

    def _put_behind(self, session: Session, prompt: str) -> None:
        """Note the prompt state before a session's answer; empty: there is none."""
        if session.behind in self._answers:
            self._answers[session.behind].discard(session.id)
            if not self._answers[session.behind]:
                del self._answers[session.behind]
        session.behind = prompt
        if prompt:
            self._answers.setdefault(prompt, set()).add(session.id)

    def _delete(self, session: Session) -> None:
        del self._sessions[session.id]
        _uncount(self._lengths, session.context, session.num_tokens)
        if session.prompt:
            _uncount(self._prompts, session.context, session.prompt)
        self._put_behind(session, "")
        for name in tuple(session.names):
            self._unpin(session, name)
        self.version += 1

    def _pin(self, session: Session, name: str | None) -> None:
        """Pin a session under a name; the session that had the name before loses it.

        Beyond the bounds, the oldest name of the session or of all sessions leaves.
        """
        if name is None or self._by_name.get(name) is session:
            return
        if (before := self._by_name.pop(name, None)) is not None:
            before.names.remove(name)
        session.names.append(name)
        self._by_name[name] = session
        self.names_version += 1
        if len(session.names) > MOST_NAMES:
            self._unpin(session, session.names[0])
        if len(self._by_name) > MOST_NAMES_HELD:
            oldest, owner = next(iter(self._by_name.items()))
            self._unpin(owner, oldest)

    def _unpin(self, session: Session, name: str) -> None:
        session.names.remove(name)
        del self._by_name[name]
        self.names_version += 1

    def _is_pinned(self, session: Session) -> bool:
        """Whether a request pinned a session, or one whose prompt state it is."""
        answers = (self._sessions[id_] for id_ in self._answers.get(session.id, ()))
        return bool(session.names) or any(one.names for one in answers)

    def _bound_pins(self, newest: Session) -> None:
        """Let pinned sessions have at most half of a tier; others lose their pins, and stay.

        The least recently used one of the same cache salt and adapter loses its pin first, then
        that of any other. The newest pin holds, and is not counted if it takes more than half
        alone: all others would lose theirs for it.
        """
        if not newest.names:
            return
        pinned = [one for one in self._sessions.values() if one.names and not one.unusable]
        parts = [(one, part) for one in pinned for part in self.parts(one)]
        files = [(one, self._durable(part)) for one, part in parts]
        disk = [(one, file) for one, file in files if file.on_disk or file.writing]
        memory = [(one, part) for one, part in parts if not part.on_disk and not part.writing]
        for tier, bound in ((memory, self.memory_bytes), (disk, self._most_disk)):
            own = {file.id: file.num_bytes for one, file in tier if one is newest}
            alone = sum(own.values()) > bound // 2
            held = Counter(file.id for one, file in tier if not alone or one is not newest)
            excess = sum(self._sessions[id_].num_bytes for id_ in held) - bound // 2
            for one, file in _nearest_first(tier, newest) if excess > 0 else ():
                if excess > 0 and one is not newest:
                    held[file.id] -= 1
                    excess -= 0 if held[file.id] else file.num_bytes
                    self._lose_pin(one)

    def _lose_pin(self, session: Session) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "KV sessions: the sessions that requests pin with kv_session take more than half "
                "of --kv-sessions-memory or --kv-sessions-disk, so the least recently used ones "
                "lose their pins (said once); raise it, or release sessions"
            )
        for name in tuple(session.names):
            self._unpin(session, name)

    def _set_memory(
        self,
        session: Session,
        in_memory: bool = False,
        reading: bool = False,
        saving: bool = False,
    ) -> None:
        before = session.in_memory or session.reading or session.saving
        after = in_memory or reading or saving
        self.used["memory"] += (after - before) * session.num_bytes
        self.held["memory"] += in_memory - session.in_memory
        self._unfinished += saving - session.saving
        self._moves += 1
        session.in_memory, session.reading, session.saving = in_memory, reading, saving

    def _set_disk(self, session: Session, on_disk: bool = False, writing: bool = False) -> None:
        before, after = session.on_disk or session.writing, on_disk or writing
        self.used["disk"] += (after - before) * session.num_bytes
        self.held["disk"] += on_disk - session.on_disk
        self._unfinished += writing - session.writing
        self._moves += 1
        session.on_disk, session.writing = on_disk, writing

    def _leaving(self) -> list[Session]:
        """Sessions in the order in which they leave a tier.

        First those that no request can start from, then those that another session continues, then
        the oldest.
        """
        return sorted(
            self._sessions.values(), key=lambda one: (not one.unusable, not one.continued)
        )

    def _make_room(self, num_bytes: int, also_pinned: bool = False, spared: str = "") -> bool:
        """Free host memory in the order of ``_leaving``; False if not enough can be freed.

        A session that has no file is lost when it leaves the memory. Pinned ones without a file
        stay, unless ``also_pinned``: a request that waits for a file must not wait for ever. So
        does the one with the id ``spared``.
        """
        free = self.memory_bytes - self.used["memory"]
        chosen = []
        for session in self._leaving() if free < num_bytes else ():
            if free >= num_bytes:
                break
            if not session.in_memory or session.waiting or session.writing:
                continue
            if session.id == spared:
                continue
            if session.on_disk or not self._is_pinned(session) or also_pinned:
                chosen.append(session)
                free += session.num_bytes
        if free < num_bytes:
            return False
        for session in chosen:
            if session.on_disk:
                self._set_memory(session)
                self._command("drop", session)
            else:
                self.counters.lost["evicted"] += 1
                self.forget(session)
        return True

    def _shrink(self, now: float) -> None:
        """Take what is on disk as the folder's bound, since the disk has no room for more.

        The least recently used sessions make room for new ones then. After a while the bound of
        the settings is tried again.
        """
        self._was_full = now
        self.disk_bytes = max(min(self.disk_bytes, self.used["disk"]), 1)

    def _make_disk_room(self, written: Session) -> bool:
        """Free space in the folder in the order of ``_leaving``; pinned sessions stay.

        So does what a session continues until that session's own file is complete, and as long as
        a pinned one has no file: a crash must not find a chat without any.
        """
        num_bytes = written.num_bytes
        # A disk that was full may have room again: one session is tried.
        free = max(self.disk_bytes, min(num_bytes, self._most_disk)) - self.used["disk"]
        waiting = [
            one
            for one in self._sessions.values()
            if not one.on_disk and (one.writing or self._is_pinned(one) or one is written)
        ]
        needed = {self._durable(one).id for one in waiting}
        chosen = []
        for session in self._leaving() if free < num_bytes else ():
            if free >= num_bytes:
                break
            idle = session.on_disk and not session.waiting and not session.reading
            pinned = self._is_pinned(session) and not session.unusable
            if idle and not pinned and session.id not in needed:
                chosen.append(session)
                free += session.num_bytes
        if free < num_bytes:
            self.counters.lost["disk_full"] += 1
            return False
        for session in chosen:
            if session.in_memory:
                self._set_disk(session)
                self._command("remove", session)
            else:
                self.counters.lost["evicted"] += 1
                self.forget(session)
        return True
