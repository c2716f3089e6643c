# SPDX-License-Identifier: Apache-2.0
"""Connects the scheduler to the index of sessions: which requests start from one and leave one."""

import copy
import hashlib
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.session_header import (
    Adapters,
    digest,
    engine_header,
    page_bytes,
    policy_settings,
)
from vllm_cascade.engine.session_metrics import SessionStats
from vllm_cascade.log import logger
from vllm_cascade.patches import weight_updates
from vllm_cascade.policies.schedule import History, Schedule
from vllm_cascade.recall.chain import CHUNK_UNITS
from vllm_cascade.sessions.files import FOREIGN, first_difference, parts_of
from vllm_cascade.sessions.folder import DAMAGED, Bad, Entry, Folder
from vllm_cascade.sessions.index import SessionIndex
from vllm_cascade.sessions.names import NamesWriter
from vllm_cascade.sessions.session import Command, Prefixes, Report, Session, SessionCounters
from vllm_cascade.sessions.settings import NAME, RELEASE, SessionSettings
from vllm_cascade.sessions.threads import started, submit

KEPT = {
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_REPETITION,
}
"""How a request may end whose state is kept; the front-end aborts requests at stop strings."""

LEAST_DECODED = 2
"""Tokens that a request without a name has to decode for its state to be kept.

vLLM's beam search sends a request for each beam and token, and ``/generative_scoring`` one for each
item. No chat continues them, and their states would evict those of chats.
"""

PROMPT_TAIL = 16
"""Tokens at a prompt's end that a prompt state leaves out.

They begin the answer, perhaps with thoughts (`<think>`), and are another text in the next prompt.
"""

MOST_WAITED, SLOWEST_READ = 30, 10_000_000
"""Seconds that a request waits for its session's file, and one more for so many bytes of it.

Then it reads its prompt, or starts from a shorter session in memory.
"""

MOST_SILENT = 300
"""Seconds without a report after which an idle engine no longer waits for sessions' files.

Writes that fail are reported; a disk may also hang.
"""


def _arguments(request: Request) -> dict[str, Any]:
    return (request.sampling_params and request.sampling_params.extra_args) or {}


@dataclass
class Origin:
    """What a running request's states continue.

    Attributes:
        session: it begins with these tokens; None: with no session's.
        starts: it started from this session; else from a snapshot of as many tokens or more.
        prompt: id of the prompt state before its answer; empty: none was kept.
    """

    session: Session | None = None
    starts: bool = False
    prompt: str = ""

    @classmethod
    def of(cls, session: Session, starts: bool) -> "Origin":
        return cls(session, starts, session.id if session.is_prompt else session.behind)


class SchedulerSessions:
    """A scheduler's sessions.

    Attributes:
        index: the sessions, by tier.

    Args:
        schedule_of: returns a request's schedule.
        spec: cache spec of the policy's layers.
        chunk_bytes: bytes of a chunk of evicted units in all ranks; 0 without recall.
    """

    def __init__(
        self,
        config: VllmConfig,
        caches: KVCacheConfig,
        settings: SessionSettings,
        schedule_of: Callable[[Request], Schedule],
        spec: KVPolicySpec,
        chunk_bytes: int,
    ) -> None:
        weight_updates.apply()
        self._tables: dict[str, str] = {}  # digests of tables of scores, which workers have read
        header = engine_header(config, caches, self._tables)
        self._schedule_of = schedule_of
        thinks = bool(config.structured_outputs_config.reasoning_parser)
        self._keeps_prompts = thinks if settings.prompts is None else settings.prompts
        self._stride = spec.engine_schedule.policy.prefill_stride
        self._chunk_bytes = chunk_bytes
        self._page_bytes = page_bytes(config, caches, spec)
        self.index = SessionIndex(settings.memory_bytes, settings.disk_bytes, settings.ttl, header)
        # Digests of the policies that a schedule's states depend on (``Schedule.history``).
        self._policies: WeakKeyDictionary[Schedule, dict[History, str]] = WeakKeyDictionary()
        self.adapters = Adapters()
        self._prompts: WeakKeyDictionary[Request, Prefixes] = WeakKeyDictionary()
        # Contexts at their admission, before anything is evicted.
        self._begun: WeakKeyDictionary[Request, str | None] = WeakKeyDictionary()
        self._found: dict[str, Session] = {}  # by request id, while the request waits
        self._covered: dict[str, Session] = {}  # found, but a snapshot has as many tokens
        self._reported = SessionCounters()
        self._searched: dict[str, int] = {}  # the index's version when they were looked for
        self._waited: dict[str, float] = {}  # by request id, the time at which it began to wait
        self._slow: set[str] = set()  # requests that have waited long enough
        self._tiers: dict[str, str] = {}  # where these sessions were
        self.origins: dict[str, Origin] = {}  # of running requests
        self._heard = 0.0  # when workers last got a command or reported, in monotonic seconds
        self._world = config.parallel_config.world_size
        path = settings.folder(config.parallel_config.data_parallel_index)
        self.folder = None if path is None else Folder(path)
        self._keeper = started(1, "kv-sessions-folder")
        self._foreign: dict[str, Entry] = {}  # other engines' sessions in the folder, by id
        self._listed: Counter[str] = (
            Counter()
        )  # earlier servers' sessions that list a file of units
        self._names: NamesWriter | None = None
        if self.folder is not None:
            self.folder.open()
            self._names = NamesWriter(self.index, self.folder)
            self._scan(self.folder, self._names)
        schedule, longest = spec.engine_schedule, config.model_config.max_model_len
        most = self._state_bytes(schedule, longest, spec.num_pages(longest, schedule))
        logger.info(
            "KV sessions: %.2f GiB of host memory, %s; a session takes up to %.1f MiB%s",
            settings.memory,
            "no folder"
            if self.folder is None
            else f"{settings.disk:g} GiB in {self.folder.path}, {len(self.index)} sessions there",
            most / 2**20,
            ", and each turn keeps also the state before its answer" * self._keeps_prompts,
        )
        if most > settings.memory_bytes:
            logger.warning(
                "KV sessions: a session takes up to %.2f GiB, and larger ones than "
                "--kv-sessions-memory %.2f are not kept; raise it",
                most / 2**30,
                settings.memory,
            )

    def _state_bytes(self, schedule: Schedule, num_tokens: int, num_pages: int) -> int:
        """Most bytes of a state after ``num_tokens`` tokens, its evicted units included."""
        pages = num_pages * self._page_bytes
        if not self._chunk_bytes or not schedule.policy.recall:
            return pages
        stored = schedule.policy.recall_store // schedule.unit
        units = min(int(schedule.evicted(np.asarray(num_tokens))), stored)
        # Chunks are whole; the first and the last may be partly used.
        return pages + (-(-units // CHUNK_UNITS) + 1) * self._chunk_bytes

    def _scan(self, folder: Folder, writer: NamesWriter) -> None:
        """Take the sessions that another run left in the folder, within its bound.

        Those of other engines count, too, and leave first. Pinned ones are taken first.
        """
        entries, bad = folder.entries()
        self._put_aside(folder, bad)
        names: dict[str, list[str]] = {}
        for name, id_ in writer.read().items():
            names.setdefault(id_, []).append(name)
        unread = {parts_of(name)[0] for name, _, reason in bad if reason == "io"}
        writer.unread = {name: id_ for id_ in names if id_ in unread for name in names[id_]}
        differs = {one.id: first_difference(one.header, self.index.header) for one in entries}
        room, oldest, taken = self.index.disk_bytes, time.time() - self.index.ttl, set()
        for entry in sorted(
            entries, key=lambda one: (differs[one.id] is not None, one.id not in names, -one.used)
        ):
            num_bytes = int(entry.header["num_bytes"])
            if self.index.ttl and entry.used < oldest:
                self.index.counters.lost["expired"] += 1
            elif num_bytes <= room:
                room -= num_bytes
                taken.add(entry.files)
        for entry in entries:
            session = Session.of(entry.header, entry.used)
            session.unusable = differs[entry.id] is not None
            own = names.get(entry.id, ())
            if entry.files not in taken or not self.index.adopt(session, own):
                folder.remove(entry.files)
                continue
            self._listed.update(name for name, _ in entry.pieces)
            if differs[entry.id] is not None:  # workers know the files of the others
                self._foreign[entry.id] = entry
        if unread:  # these may list any of them
            self._listed.update(list(self._listed))
        self.index.bound_pins()
        folder.remove_unused()
        self._say_foreign(folder, Counter(filter(None, differs.values())))
        self._say_small(folder)

    def _put_aside(self, folder: Folder, bad: Sequence[Bad]) -> None:
        """Remove, move aside or leave unreadable files, by their reasons."""
        for name, problem, reason in bad:
            self.index.counters.lost[reason] += 1
            if reason == "incomplete":  # a crash between two ranks' files: all that is left of one
                folder.remove([name])
            elif reason == "damaged":
                logger.warning(
                    "KV sessions: %s is damaged (%s) and is moved to %s; its chat is read again. "
                    "Check the disk, then delete it",
                    *(name, problem, folder.path / DAMAGED),
                )
                folder.move_aside(name)
            else:
                logger.warning(
                    "KV sessions: %s cannot be read (%s) and stays where it is; its chat is read "
                    "again. Check the disk, then start the server again",
                    *(name, problem),
                )

    def _say_foreign(self, folder: Folder, foreign: Mapping[str, int]) -> None:
        for what, number in foreign.items():
            self.index.counters.lost["foreign"] += number
            logger.warning(
                "KV sessions: %d sessions in %s belong to an engine with another %s and are not "
                "used; give each engine a --kv-sessions-dir of its own",
                *(number, folder.path, what),
            )

    def _say_small(self, folder: Folder) -> None:
        """Warn if the bound is more than the disk can hold."""
        with suppress(OSError):
            room = folder.room()
            if room < self.index.disk_bytes:
                logger.warning(
                    "KV sessions: --kv-sessions-disk is %.2f GiB, but the disk of %s has room for "
                    "%.2f GiB of sessions; once it is full, they make room for new ones. Free disk "
                    "space, or lower --kv-sessions-disk",
                    *(self.index.disk_bytes / 2**30, folder.path, room / 2**30),
                )

    def weights_changed(self) -> None:
        """Note that weights changed in memory, so that no weight file identifies them."""
        self.index.header["model"] = secrets.token_hex(16)
        self.index.version += 1

    @staticmethod
    def _is_text(request: Request) -> bool:
        """Whether a request is known by its tokens; images, audio and embeddings are not."""
        other = request.mm_features or request.prompt_embeds is not None or request.resumable
        return not other and request.sampling_params is not None

    def context(self, request: Request, num_tokens: int) -> str | None:
        """What a request's state depends on besides tokens; None: not known, so it is not kept.

        Before anything is evicted, it does not depend on ``keep_prompt``, which differs from turn
        to turn while prompts are shorter.
        """
        if not self._is_text(request):
            return None
        policy = self._policy(self._schedule_of(request), num_tokens)
        lora: Any = None
        if request.lora_request is not None:
            lora = self.adapters.of(request.lora_request)
            if lora is None:
                return None
        engine = [self.index.header[key] for key in FOREIGN]
        return digest([engine, policy, self._salted(request), lora])

    def _policy(self, schedule: Schedule, num_tokens: int) -> str:
        """Digest of the settings that the state after so many tokens depends on."""
        known, history = self._policies.setdefault(schedule, {}), schedule.history(num_tokens)
        if history not in known:
            settings = policy_settings(history.policy, self._tables)
            known[history] = digest([settings, history.is_whole])
        return known[history]

    def _contexts(self, request: Request) -> dict[str, int]:
        """The contexts of a prompt's states, each with the longest prefix that it holds for."""
        num = len(request.prompt_token_ids or ())
        schedule = self._schedule_of(request)
        lengths = range(num + 1)
        whole = bisect_left(lengths, True, key=lambda t: schedule.count_at(t) < t) - 1
        found = {self.context(request, most): most for most in (whole, num)}
        return {context: most for context, most in found.items() if context is not None}

    @staticmethod
    def _salted(request: Request) -> str | None:
        salt = request.cache_salt
        return None if salt is None else hashlib.sha256(salt.encode()).hexdigest()

    def _name_of(self, request: Request) -> str | None:
        """What a request pins its session under: the name given, of its salt and adapter only.

        So a client without the salt of a session can neither take its name nor release it.
        """
        if (name := _arguments(request).get(NAME)) is None:
            return None
        lora = request.lora_request
        return f"{digest([self._salted(request), lora and lora.lora_name])} {name}"

    # --- requests that start ----------------------------------------------------------------------

    def may_start(self, request: Request, known: int) -> bool:
        """Look for a request's session; False: its file is being read, and the request waits.

        Args:
            known: prefix tokens that a snapshot covers; only longer sessions are used.
        """
        name = request.request_id
        covered = self._covered.get(name)
        uncovered = covered is not None and known < covered.num_tokens  # the snapshot has left
        if uncovered or self._searched.get(name) != self.index.version:
            self._search(request, known)
        if name not in self._found:
            return True
        if self.index.ready(self._found[name], name):
            self._tiers.setdefault(name, "memory")
            return True
        self._tiers[name] = "memory" if self._found[name].saving else "disk"
        return self._is_slow(name) and self.may_start(request, known)

    def _search(self, request: Request, known: int) -> None:
        """Look for a request's session; if it is the one that it waits for, it goes on waiting."""
        name, session = request.request_id, self._find(request)
        covered = session is not None and session.num_tokens <= known
        may_wait = name not in self._slow or (session is not None and session.in_memory)
        found = session if may_wait and not covered else None
        if found is None or found is not self._found.get(name):
            self._leave(name)
        if session is not None and covered:
            self._covered[name] = session
        elif found is not None:
            self._found[name] = found
        self._searched[name] = self.index.version

    def _is_slow(self, request_id: str) -> bool:
        """Whether a request has waited too long for its session's file, which it then leaves.

        A thread may still be reading the file. The session is found again when it has, or after a
        while; until then no other request begins to wait for it.
        """
        now, session = time.time(), self._found[request_id]
        most = MOST_WAITED + session.num_bytes / SLOWEST_READ
        if now - self._waited.setdefault(request_id, now) < most:
            return False
        self.index.rest(session, now)
        self._leave(request_id)
        self._tiers.pop(request_id, None)
        self._slow.add(request_id)
        return True

    def _find(self, request: Request) -> Session | None:
        """The longest session of a prompt. After an earlier result, only longer ones are sought."""
        if request.skip_reading_prefix_cache:
            return None
        longest = min(request.num_prompt_tokens, request.num_tokens - 1)
        prompt, now, contexts = self._prompt_of(request), time.time(), self._contexts(request)
        best = self._found.get(request.request_id)
        if best is not None and (best.context not in contexts or not self.index.usable(best, now)):
            best = None
        for context, most in contexts.items():
            beyond = 0 if best is None else best.num_tokens
            best = self.index.find(context, prompt, min(most, longest), now, beyond) or best
        return best

    def _prompt_of(self, request: Request) -> Prefixes:
        """A waiting request's prompt, which is looked for whenever sessions come or go."""
        if request not in self._prompts:
            self._prompts[request] = Prefixes(request.prompt_token_ids or ())
        return self._prompts[request]

    def _leave(self, request_id: str) -> None:
        self._searched.pop(request_id, None)
        self._covered.pop(request_id, None)
        session = self._found.pop(request_id, None)
        if session is not None:
            self.index.leave(session, request_id)

    def _forget(self, request_id: str) -> None:
        """Forget a request that no longer waits."""
        self._leave(request_id)
        self._waited.pop(request_id, None)
        self._slow.discard(request_id)

    def tokens_of(self, request: Request) -> int:
        """Tokens of the session that a waiting request starts from; 0: none."""
        session = self._found.get(request.request_id)
        return 0 if session is None else session.num_tokens

    def continues(self, request: Request) -> bool:
        """Whether a request starts, or started, from a session."""
        origin = self.origins.get(request.request_id, Origin())
        return origin.starts or self.tokens_of(request) > 0

    def admitted(self, request: Request, pages: Callable[[int], Sequence[int]], hit: int) -> bool:
        """Note an admitted request; returns whether it starts from a session.

        Args:
            pages: returns block ids of the request's pages after so many tokens.
            hit: tokens that it does not compute.
        """
        name = request.request_id
        session, tier = self._found.get(name), self._tiers.pop(name, "memory")
        covered, now = self._covered.get(name), time.time()
        self._begun[request] = self.context(request, 0)
        self.origins.pop(name, None)
        started = session is not None and session.num_tokens == hit
        if session is not None and started:
            self.index.restore(session, name, pages(hit), tier, now)
            self.origins[name] = Origin.of(session, starts=True)
        elif covered is not None and covered.num_tokens <= hit and self.index.has(covered):
            self.index.go_on(covered, now)
            self.origins[name] = Origin.of(covered, starts=False)
        elif request.num_preemptions == 0:
            self.index.counters.misses[self._reason(request)] += 1
        self._prompts.pop(request, None)
        self._forget(name)
        return started

    def prompt_stop(self, request: Request) -> int:
        """Tokens of the prompt state before a request's answer; 0: none is kept.

        A prompt that continues an answer has its thoughts and keeps no prompt state of its own: a
        prompt without them starts from the state before that answer.
        """
        name, arguments = request.request_id, _arguments(request)
        if not self._keeps_prompts or request.max_tokens < LEAST_DECODED:
            return 0
        if not self._is_text(request) or arguments.get(RELEASE):
            return 0
        origin = self.origins.get(name, Origin())
        start = self._found.get(name) or (origin.session if origin.starts else None)
        if start is not None and not start.is_prompt:
            return 0
        return max(request.num_prompt_tokens - PROMPT_TAIL, 0) // self._stride * self._stride

    def keep_prompt(self, request: Request, pages: Callable[[int], Sequence[int]]) -> None:
        """Keep a request's prompt state; its pages hold it until the step that is scheduled."""
        num = self.prompt_stop(request)
        context = self.context(request, num)
        if context is None or self.context(request, 0) != self._begun.get(request):
            return  # counted when the request ends
        origin = self.origins.setdefault(request.request_id, Origin())
        blocks, before = pages(num), origin.session
        num_bytes = self._state_bytes(self._schedule_of(request), num, len(blocks))
        kept = self.index.keep(
            *(context, request.all_token_ids[:num], num_bytes, blocks, time.time()),
            before=before and before.id,
            aborted=True,
        )
        if kept is not None:
            origin.prompt = kept.id

    def _reason(self, request: Request) -> str:
        """Why no session serves a request."""
        if request.request_id in self._slow:
            return "slow"
        prompt = self._prompt_of(request)
        others = (self.index.diverges(context, prompt) for context in self._contexts(request))
        return "diverged" if any(others) else "no_session"

    # --- requests that end ------------------------------------------------------------------------

    def ended(self, request: Request, pages: Callable[[int], Sequence[int]]) -> None:
        """Keep the state of a finished request. Its pages are still those that it had."""
        name = request.request_id
        self._forget(name)
        self._tiers.pop(name, None)
        origin = self.origins.pop(name, Origin())
        arguments, pinned = _arguments(request), self._name_of(request)
        if pinned is not None and arguments.get(RELEASE):
            self.index.release(pinned)
            return
        if pinned is None and request.num_output_tokens < LEAST_DECODED:
            return
        num = request.num_computed_tokens
        # Beyond the prompt; and not beyond the tokens that are known.
        if request.status not in KEPT or not request.num_prompt_tokens <= num <= request.num_tokens:
            return
        context = self.context(request, num)
        if context is None or self.context(request, 0) != self._begun.get(request):
            reason = "changed" if self._is_text(request) else "not_text"
            self.index.counters.lost[reason] += 1
            return
        tokens, blocks = request.all_token_ids[:num], pages(num)
        named = None if pinned is None else self.index.named(pinned)
        contexts = {context, *self._contexts(request)}
        parts = () if named is None else self.index.parts(named)
        if parts and not any(self.index.begins(one, contexts, tokens) for one in parts):
            self.index.counters.lost["name_diverged"] += 1
        num_bytes = self._state_bytes(self._schedule_of(request), num, len(blocks))
        self.index.keep(
            *(context, tokens, num_bytes, blocks, time.time(), pinned),
            before=origin.session and origin.session.id,
            num_prompt=request.num_prompt_tokens,
            aborted=request.status == RequestStatus.FINISHED_ABORTED,
            behind=origin.prompt,
        )

    # --- workers ----------------------------------------------------------------------------------

    def pending(self, is_paused: bool) -> bool:
        """Whether the engine takes a step for sessions: with commands, or for workers' reports.

        An idle engine hears of no file, and the names in the folder would stay on earlier turns.

        Args:
            is_paused: whether a pause is asked for. It waits until the engine is idle, and then
                drops all sessions unless it keeps caches, so it does not wait for their files.
        """
        waits = self._names is not None and self.index.unsettled and not is_paused
        return self.index.pending or (waits and time.monotonic() - self._heard < MOST_SILENT)

    def take_commands(self) -> tuple[Command, ...]:
        if self._names is not None:
            self._names.keep()
        ours, others = [], []
        for command in self.index.take_commands():
            foreign = command.op == "remove" and command.id in self._foreign
            (others if foreign else ours).append(command)
        if others:
            submit(self._keeper, self._remove_foreign, [command.id for command in others])
        if ours:
            self._heard = time.monotonic()
        return tuple(ours)

    def _remove_foreign(self, ids: Sequence[str]) -> None:
        """Remove another engine's sessions, of whose files workers know nothing."""
        assert self.folder is not None
        for gone in map(self._foreign.pop, ids):
            units = [name for name, _ in gone.pieces]
            self._listed.subtract(units)
            unused = [name for name in units if not self._listed[name]]
            with suppress(OSError):  # the folder may have become read-only
                self.folder.remove([*gone.files, *unused])

    def note(self, report: Report | None) -> None:
        if report is None:
            return
        self._heard = time.monotonic()
        self.index.note(report, time.time())
        if self._names is not None:  # perhaps no step follows
            self._names.keep()

    def report(self) -> SessionStats:
        """Levels now, and what was counted since the last report."""
        index, before = self.index, self._reported
        counters = index.counters
        loads, counters.load_seconds = counters.load_seconds, []
        self._reported = copy.deepcopy(counters)
        return SessionStats(
            sessions=dict(index.held),
            bytes=dict(index.used),
            hits=dict(counters.hits - before.hits),
            misses=dict(counters.misses - before.misses),
            lost=dict(counters.lost - before.lost),
            hit_tokens=counters.hit_tokens - before.hit_tokens,
            kept=counters.kept - before.kept,
            load_seconds=loads,
        )

    def close(self) -> None:
        """Write the last names, and stop the threads. Workers have closed: they report no more."""
        folder = self.folder
        if self._names is not None and folder is not None:
            complete = [one.id for one in self.index.writing() if folder.has(one, self._world)]
            self.index.note(Report(written=complete))
            self._names.close()
        self._keeper.shutdown()
        if folder is not None:
            folder.close()
