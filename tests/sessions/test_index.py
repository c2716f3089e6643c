# SPDX-License-Identifier: Apache-2.0
"""The index of sessions: what it finds, and its bounds, against plain bookkeeping."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_cascade.sessions import index as index_module
from vllm_cascade.sessions import session as session_module
from vllm_cascade.sessions.index import REST_SECONDS, SessionIndex
from vllm_cascade.sessions.session import Command, Prefixes, Report, Session, token_digests

TEXT = list(range(100, 140))


def keep(
    index: SessionIndex, tokens: list[int], size: int = 10, now: float = 0, **more: Any
) -> str:
    """Keep a session and return its id."""
    index.keep("c", tokens, size, pages=(1, 2), now=now, **more)
    found = index.find("c", [*tokens, 1], len(tokens), now)
    assert found is not None and found.num_tokens == len(tokens)
    index.note(Report(saved=[found.id]))
    return found.id


def written(index: SessionIndex) -> list[Command]:
    """Let workers write what they were told to; returns all commands."""
    commands = index.take_commands()
    done = {op: [c.id for c in commands if c.op == op] for op in ("save", "write")}
    index.note(Report(saved=done["save"], written=done["write"]))
    return commands


def ops(index: SessionIndex) -> list[str]:
    return [command.op for command in index.take_commands()]


@settings(max_examples=60, deadline=None)
@given(
    kept=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=12),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=9),
    shorter=st.integers(0, 3),
)
def test_the_longest_prefix_is_found(
    kept: list[list[int]], prompt: list[int], shorter: int
) -> None:
    index = SessionIndex(10**9)
    for tokens in kept:
        index.keep("c", tokens, 1, pages=(0,), now=0)
    longest = len(prompt) - shorter
    fits = [len(tokens) for tokens in kept if len(tokens) <= longest]
    fits = [n for n in fits if prompt[:n] in kept]
    found = index.find("c", prompt, longest, 0)
    assert (found.num_tokens if found else 0) == max(fits, default=0)
    assert index.find("other", prompt, longest, 0) is None


def test_a_prompt_that_goes_on_differently() -> None:
    """It is known as long as a session has its prompt, also after a restart."""
    index = SessionIndex(10**9, 10**9)
    index.keep("c", [1, 2, 3, 7, 8], 1, pages=(0,), now=0, num_prompt=3)
    index.keep("c", [1, 2, 3, 9], 1, pages=(0,), now=0, num_prompt=3)
    assert index.diverges("c", [1, 2, 3, 7, 5]) and index.diverges("c", [1, 2, 3, 4])
    for other in ([1, 2, 3], [1, 2], [1, 2, 4, 7, 8]):
        assert not index.diverges("c", other), "the same prompt again, and another one"
    assert not index.diverges("d", [1, 2, 3, 4])
    first, second = index._sessions.values()
    index.forget(first)
    assert index.diverges("c", [1, 2, 3, 4])
    again = SessionIndex(10**9, 10**9)
    assert again.adopt(Session.of(second.header, used=0)) and again.diverges("c", [1, 2, 3, 4])
    index.forget(second)
    assert not index.diverges("c", [1, 2, 3, 4]) and not index._prompts and not index._lengths


def test_digests_of_prefixes_are_those_of_whole_sequences() -> None:
    import numpy as np

    tokens = np.arange(50, dtype=np.int32)
    all_at_once = token_digests(tokens, [1, 7, 50])
    for length, digest in all_at_once.items():
        assert token_digests(tokens[:length].copy(), [length])[length] == digest


def test_without_a_folder_the_least_recently_used_is_lost() -> None:
    index = SessionIndex(memory_bytes=30)
    a, b, c = (keep(index, [n, n + 1]) for n in (1, 2, 3))
    assert ops(index) == ["save"] * 3
    session = index.find("c", [1, 2, 9], 2, 5)
    assert session is not None and index.ready(session, "r")
    index.restore(session, "r", (7, 8), "memory", 5)
    keep(index, [4, 5])
    commands = index.take_commands()
    assert [(x.op, x.id) for x in commands[:2]] == [("restore", a), ("drop", b)]
    assert commands[0].pages == (7, 8) and [x.op for x in commands[2:]] == ["save"]
    assert index.find("c", [2, 3, 9], 2, 5) is None
    assert index.counters.lost["evicted"] == 1 and index.counters.hits["memory"] == 1
    assert index.used == {"memory": 30, "disk": 0} and c


def test_a_continued_session_leaves_before_the_end_of_a_chat() -> None:
    index = SessionIndex(memory_bytes=30)
    old, turn = keep(index, [1]), keep(index, [2])
    keep(index, [2, 3], before=turn)
    keep(index, [4])
    assert index.find("c", [2, 9], 1, 0) is None, "turn 1 of a chat that has a turn 2"
    assert index.find("c", [1, 9], 1, 0) is not None and old
    keep(index, [5])
    assert index.find("c", [1, 9], 1, 0) is None and index.find("c", [2, 3, 9], 2, 0) is not None


def test_a_waiting_requests_session_stays() -> None:
    index = SessionIndex(memory_bytes=20)
    keep(index, [1])
    session = index.find("c", [1, 2], 1, 0)
    assert session is not None and index.ready(session, "r")
    keep(index, [2])
    keep(index, [3])  # drops [2], which is newer
    assert index.find("c", [2, 9], 1, 0) is None and index.find("c", [1, 9], 1, 0) is session
    assert not index.keep("c", [4], 15, pages=(0,), now=0)
    assert index.counters.lost["memory_full"] == 1
    session.waiting.discard("r")
    assert index.keep("c", [4], 15, pages=(0,), now=0)


def test_with_a_folder_sessions_go_down_and_come_back() -> None:
    index = SessionIndex(memory_bytes=20, disk_bytes=40)
    a, b = keep(index, [1]), keep(index, [2])
    assert not index.keep("c", [3], 10, pages=(0,), now=0)  # both are being written
    assert [c.op for c in written(index)] == ["save", "write"] * 2
    keep(index, [3])
    commands = written(index)
    assert [(x.op, x.id) for x in commands[:1]] == [("drop", a)]
    assert index.held == {"memory": 2, "disk": 3}
    session = index.find("c", [1, 9], 1, 0)
    assert session is not None and session.id == a
    assert not index.ready(session, "r") and not index.ready(session, "s")
    assert [(x.op, x.id) for x in index.take_commands()] == [("drop", b), ("read", a)]
    index.note(Report(read={a: 0.5}))
    assert index.ready(session, "r") and index.counters.load_seconds == [0.5]
    index.restore(session, "r", (3,), "disk", 1)
    assert ops(index) == ["restore"] and index.counters.hits == {"disk": 1}


def test_the_folder_loses_its_least_recently_used() -> None:
    index = SessionIndex(memory_bytes=20, disk_bytes=30)
    first = keep(index, [1])
    for n in range(2, 6):
        written(index)
        keep(index, [n])
    commands = written(index)
    assert index.used["disk"] <= 30 and index.used["memory"] <= 20
    assert index.find("c", [1, 9], 1, 0) is None
    assert first not in {c.id for c in commands} and index.counters.lost["evicted"] == 2


@pytest.mark.parametrize("reason", ["damaged", "missing"])
def test_an_unreadable_session_is_a_miss(reason: str) -> None:
    index = SessionIndex(20, 100)
    assert index.adopt(Session("c", token_digests_of([1]), 1, 10))
    session = index.find("c", [1, 2], 1, 0)
    assert session is not None and not index.ready(session, "r")
    index.note(Report(unreadable={session.id: reason}))
    assert index.find("c", [1, 2], 1, 0) is None and index.counters.lost[reason] == 1
    assert index.used == {"memory": 0, "disk": 0} and len(index) == 0


def test_a_session_with_a_read_error_is_tried_again() -> None:
    """After a while; until then it stays pinned, and equal tokens replace it under its name."""
    index = SessionIndex(20, 40)
    for n in range(2):
        assert index.adopt(Session("c", token_digests_of([n]), 1, 10), {f"s {n}"})
        session = index.find("c", [n, 2], 1, 0)
        assert session is not None and not index.ready(session, "r")
        version = index.version
        index.note(Report(unreadable={session.id: "io"}), now=100)
        session.waiting.discard("r")
        assert index.find("c", [n, 2], 1, 100 + REST_SECONDS - 1) is None
        assert index.version > version and index.names()[f"s {n}"] == session.id
    index.take_commands()
    assert not index.keep("c", [0], 30, pages=(1,), now=101) and "s 0" in index.names()
    assert index.keep("c", [0], 10, pages=(1,), now=101)
    assert ops(index) == ["remove", "save", "write"] and "s 0" in index.names()
    later = 100 + REST_SECONDS
    session = index.find("c", [1, 2], 1, later)
    assert session is not None and not index.ready(session, "r")
    index.note(Report(read={session.id: 1.0}), now=later)
    assert index.find("c", [1, 2], 1, later) is session and index.ready(session, "r")


def test_a_state_without_memory_for_its_copy() -> None:
    """The turn before is the chat's end again, and has the name."""
    index = SessionIndex(1000, 1000)
    first = keep(index, [1], name="chat")
    written(index)
    second = keep(index, [1, 2], name="chat", before=first)
    stamp = session_of(index, [1, 2]).stamp
    commands = index.take_commands()
    assert [c.header["stamp"] for c in commands if c.op == "save"] == [stamp]
    index.note(Report(unsaved=[second, second], stamps={second: stamp}))
    turn = session_of(index, [1])
    assert len(index) == 1 and index.named("chat") is turn and not turn.continued
    assert index.counters.lost == {"memory_full": 1} and ops(index) == ["drop", "remove"]
    assert index.used == {"memory": 10, "disk": 10}


def test_a_file_that_stays_unread_still_counts() -> None:
    """No request finds it; equal tokens replace it, and it leaves first, whatever its name."""
    index = SessionIndex(20, 20)
    for n in range(2):
        assert index.adopt(Session("c", token_digests_of([n]), 1, 10), {f"s {n}"})
        session = index.find("c", [n, 2], 1, 0)
        assert session is not None and not index.ready(session, "r")
        version = index.version
        index.note(Report(unreadable={session.id: "foreign"}))
        session.waiting.discard("r")
        assert index.find("c", [n, 2], 1, 0) is None and index.version > version
    assert index.counters.lost == {"foreign": 2} and index.used == {"memory": 0, "disk": 20}
    index.take_commands()
    assert index.keep("c", [0], 10, pages=(1,), now=0)
    assert ops(index) == ["remove", "save", "write"] and index.named("s 0") is not None
    assert index.keep("c", [7], 10, pages=(1,), now=0)
    assert ops(index) == ["save", "remove", "write"] and index.used["disk"] == 20


def token_digests_of(tokens: list[int]) -> str:
    import numpy as np

    return token_digests(np.asarray(tokens, dtype=np.int32), [len(tokens)])[len(tokens)]


def test_an_unwritten_session_is_still_in_memory() -> None:
    index = SessionIndex(20, 100)
    a = keep(index, [1])
    index.note(Report(unwritten=[a]))
    session = index.find("c", [1, 2], 1, 0)
    assert session is not None and index.ready(session, "r")
    assert index.used == {"memory": 10, "disk": 0} and index.counters.lost["unwritten"] == 1


def test_a_disk_that_is_smaller_than_the_bound() -> None:
    """What is there when it is full becomes the bound, and the oldest makes room from then on."""
    index = SessionIndex(1000, disk_bytes=10**9)
    first, second = keep(index, [1]), keep(index, [2])
    written(index)
    third = keep(index, [3])
    index.take_commands()
    index.note(Report(unwritten=[third], full=True))
    assert index.disk_bytes == 20 and index.counters.lost == {"unwritten": 1}
    index.take_commands()
    fourth = keep(index, [4])
    commands = [(c.op, c.id) for c in written(index)]
    assert commands == [("save", fourth), ("remove", first), ("write", fourth)] and second
    assert index.used["disk"] == 20
    empty = SessionIndex(1000, disk_bytes=10**9)  # others have filled the disk
    keep(empty, [1])
    empty.take_commands()
    empty.note(Report(unwritten=[first], full=True))
    keep(empty, [2], size=15)
    assert "write" in ops(empty) and empty.used["disk"] == 15, "it may have room again"


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_pins_hold_half_of_a_tier(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the same salt and adapter loses its pin first, and stays."""
    said: list[str] = []
    monkeypatch.setattr(index_module.logger, "warning", lambda text, *_: said.append(text))
    index = SessionIndex(60 if tier == "memory" else 1000, 60 if tier == "disk" else 0)
    for n, name in enumerate(("x one", "y two", "y three")):
        keep(index, [n], name=name)
        written(index)
    assert not said and len(index.names()) == 3
    version = index.names_version
    keep(index, [5], name="y four")
    written(index)
    assert list(index.names()) == ["x one", "y three", "y four"] and len(index) == 4
    assert index.names_version > version
    keep(index, [6], name="z five")  # no other of its own
    written(index)
    assert list(index.names()) == ["y three", "y four", "z five"] and len(said) == 1
    keep(index, [7], size=30, name="z five")
    written(index)
    assert list(index.names()) == ["z five"], "the newest one holds"


def test_a_pin_of_more_than_half_takes_those_of_others_only_if_they_have_half() -> None:
    index = SessionIndex(100)
    for n in range(4):
        keep(index, [n], name=f"x{n} chat")
    keep(index, [5], size=51, name="y large")
    assert len(index.names()) == 5
    keep(index, [6], size=9, name="y large")
    keep(index, [7], size=20, name="z new")
    assert len(index.names()) == 4, "nine, twenty, and two of ten bytes"


def test_a_start_bounds_pins_once() -> None:
    """The least recently used one loses its pin; the order of files is that of use."""
    index = SessionIndex(1000, 60)
    for n in range(5):
        assert index.adopt(Session("c", token_digests_of([n]), 1, 10, used=n), [f"x {n}"])
    index.bound_pins()
    assert list(index.names()) == ["x 2", "x 3", "x 4"] and len(index) == 5
    SessionIndex(10).bound_pins()


def test_an_aborted_answer_leaves_the_turn_before_as_it_is() -> None:
    """It stays pinned and does not leave first, until a request starts from the answer."""
    index = SessionIndex(50)
    first = keep(index, [1], name="chat")
    half = keep(index, [1, 2], name="chat", before=first, aborted=True)
    turn, answer = session_of(index, [1]), session_of(index, [1, 2])
    assert index.named("chat") is turn and not turn.continued and not answer.names
    again = keep(index, [1, 3], name="chat", before=first)  # the client asks again
    assert index.named("chat") is session_of(index, [1, 3]) and turn.continued and again
    third = keep(index, [1, 2, 3], name="chat", before=half, aborted=True)
    assert index.named("chat") is answer, "the client goes on from it"
    assert not answer.continued
    keep(index, [1, 2, 3, 4], name="chat", before=third)
    assert answer.continued and session_of(index, [1, 2, 3]).continued
    assert index.named("chat") is session_of(index, [1, 2, 3, 4])
    keep(index, [7], name="new", aborted=True)
    assert index.named("new") is session_of(index, [7]), "there is no turn before"
    keep(index, [8], name="new", aborted=True)
    assert index.named("new") is session_of(index, [7]), "another prompt was aborted"


def test_a_chat_of_answers_that_end_by_stop_strings() -> None:
    """The name follows one turn later, and earlier turns leave first."""
    index, before = SessionIndex(100), None
    for n in range(1, 6):
        tokens = list(range(n))
        if before is not None:
            turn = session_of(index, tokens[:-1])
            index.restore(turn, "request", (1, 2), "memory", 0)
        before = keep(index, tokens, name="chat", before=before, aborted=True)
        assert index.named("chat") is session_of(index, tokens[: max(n - 1, 1)])
    turns = [session_of(index, list(range(n))) for n in range(1, 6)]
    assert [turn.continued for turn in turns] == [True, True, True, False, False]


def test_an_aborted_second_answer_leaves_the_newest_turn_its_name() -> None:
    index = SessionIndex(100)
    first = keep(index, [1], name="chat")
    keep(index, [1, 2], name="chat", before=first)
    keep(index, [1, 3], name="chat", before=first, aborted=True)
    assert index.named("chat") is session_of(index, [1, 2])
    other = keep(index, [5])
    keep(index, [5, 6], name="chat", before=other, aborted=True)
    assert index.named("chat") is session_of(index, [5]), "the name's next chat"


def test_a_name_follows_answers_that_end_by_stop_strings_after_a_restart() -> None:
    """What a session continues is in its file."""
    index = SessionIndex(100, 100)
    first = keep(index, [1], name="chat")
    keep(index, [1, 2], name="chat", before=first, aborted=True)
    headers = [one.header for one in index._sessions.values()]
    again = SessionIndex(100, 100)
    for header in headers:
        names = ["chat"] if Session.of(header, 0).id == first else []
        assert again.adopt(Session.of(header, used=0), names)
    keep(again, [1, 2, 3], name="chat", before=headers_id(headers[1]), aborted=True)
    assert again.named("chat") is session_of(again, [1, 2])
    keep(again, [1, 4], name="chat", before=first, aborted=True)
    assert again.named("chat") is session_of(again, [1, 2]), "a later turn than the first"


def headers_id(header: dict[str, str]) -> str:
    return Session.of(header, used=0).id


def test_a_prompt_state_and_the_answers_behind_it() -> None:
    """It stays as long as one of them is pinned; the next turn lets the others leave first."""
    index = SessionIndex(memory_bytes=80)
    prompt = keep(index, [1, 2], num_prompt=0, aborted=True)
    answer = keep(index, [1, 2, 3, 9], num_prompt=3, behind=prompt, name="chat")
    first, last = session_of(index, [1, 2]), session_of(index, [1, 2, 3, 9])
    assert first.is_prompt and not last.is_prompt and index.parts(last) == [last, first]
    assert not first.continued and not last.continued
    for n in range(20, 27):
        keep(index, [n])
    assert {first.id, last.id} <= set(index._sessions), "both are pinned by one name"
    index.restore(first, "r", (1, 2), "memory", 1)
    assert last.continued and not first.continued
    following = keep(index, [1, 2, 4], before=prompt, aborted=True)
    assert not first.continued, "the next answer has not begun"
    keep(index, [1, 2, 4, 5, 8], num_prompt=4, before=prompt, behind=following, name="chat")
    assert first.continued and not last.names and answer
    keep(index, [30])
    keep(index, [31])
    assert first.id not in index._sessions and last.id not in index._sessions
    assert following in index._sessions
    assert index.release("chat") and following not in index._sessions
    for one in list(index._sessions.values()):
        index.forget(one)
    assert not index._answers


def test_a_prompt_state_with_a_second_name_behind_it() -> None:
    index = SessionIndex(1000)
    prompt = keep(index, [1, 2], aborted=True)
    for n in range(2):
        keep(index, [1, 2, 3, n], num_prompt=3, behind=prompt, name=f"x {n}")
    index.release("x 0")
    assert prompt in index._sessions and len(index) == 2
    index.release("x 1")
    assert len(index) == 0


def test_a_second_answer_that_is_aborted_leaves_the_first_its_name() -> None:
    """Its request started from the prompt state that both answers are behind."""
    index = SessionIndex(1000)
    prompt = keep(index, [1, 2], aborted=True)
    more: dict[str, Any] = {"num_prompt": 3, "behind": prompt, "name": "chat"}
    keep(index, [1, 2, 3, 4], **more)
    index.restore(session_of(index, [1, 2]), "r", (1, 2), "memory", 0)
    keep(index, [1, 2, 3, 5], before=prompt, aborted=True, **more)
    assert index.named("chat") is session_of(index, [1, 2, 3, 4])


def test_a_second_answer_leaves_its_prompt_state_in_its_place() -> None:
    index = SessionIndex(1000)
    earlier = keep(index, [1], aborted=True)
    prompt = keep(index, [1, 2], before=earlier, aborted=True)
    for last in (4, 5):
        index.restore(session_of(index, [1, 2]), "r", (1, 2), "memory", 0)
        keep(index, [1, 2, 3, last], num_prompt=3, before=prompt, behind=prompt)
    assert session_of(index, [1]).continued and not session_of(index, [1, 2]).continued


def test_an_answer_spares_its_prompt_state() -> None:
    """No name pins it before the answer is kept."""
    index = SessionIndex(memory_bytes=20)
    prompt = keep(index, [1, 2], aborted=True)
    keep(index, [7])
    keep(index, [1, 2, 3, 4], num_prompt=3, behind=prompt, name="chat")
    assert prompt in index._sessions and len(index) == 2


def test_an_answer_that_is_known_learns_its_prompt_state() -> None:
    index = SessionIndex(1000)
    keep(index, [1, 2, 3, 4], num_prompt=3, name="chat")
    prompt = keep(index, [1, 2], aborted=True)
    keep(index, [1, 2, 3, 4], num_prompt=3, behind=prompt, name="chat")
    assert [one.id for one in index.parts(session_of(index, [1, 2, 3, 4]))][1:] == [prompt]
    index.release("chat")
    assert len(index) == 0 and not index._answers


def test_prompt_states_count_among_what_is_pinned() -> None:
    index = SessionIndex(memory_bytes=80)
    for n in range(2):
        prompt = keep(index, [n], aborted=True)
        keep(index, [n, 1, 1], num_prompt=2, behind=prompt, name=f"x {n}")
    assert list(index.names()) == ["x 0", "x 1"]
    keep(index, [7], name="x 2")
    assert list(index.names()) == ["x 1", "x 2"], "four of ten bytes each are half"


def test_a_state_that_is_being_copied() -> None:
    """A request waits for it, other sessions do not make it leave, and it may fail."""
    index = SessionIndex(memory_bytes=20)
    for fails in (False, True):
        one = index.keep("c", [1, 2], 10, pages=(1,), now=0)
        assert one is not None and one.saving and index.used["memory"] == 10
        assert index.find("c", [1, 2, 3], 2, 0) is one and not index.ready(one, "r")
        assert index.keep("c", [8], 15, pages=(1,), now=0) is None
        assert ops(index) == ["save"] and index.held["memory"] == 0
        stamp = {one.id: one.stamp}
        index.note(Report(saved=[one.id], stamps={one.id: "an earlier one"}))
        assert one.saving
        if fails:
            index.note(Report(unsaved=[one.id], stamps=stamp))
            assert len(index) == 0 and index.used["memory"] == 0 and ops(index) == ["drop"]
        else:
            index.note(Report(saved=[one.id], stamps=stamp))
            assert index.ready(one, "r") and index.held["memory"] == 1
            one.waiting.clear()
            index.forget(one)
            assert ops(index) == ["drop"]


def test_names_of_aborted_answers_hold_half_of_a_tier() -> None:
    """Turns without a name, each continued by an aborted answer with one."""
    index = SessionIndex(200)
    for n in range(30):
        first = keep(index, [n])
        index.keep("c", [n, 1], 10, (1, 2), 0, name=f"x {n}", before=first, aborted=True)
        written(index)
    pinned = sum(one.num_bytes for one in index._sessions.values() if one.names)
    assert pinned == 100 and not index.counters.lost["memory_full"]
    keep(index, [77])
    keep(index, [78], name="x last")


def test_two_pinned_turns_with_one_file_count_once() -> None:
    """The later one could not be written, so the file of the turn before is kept for it."""
    index = SessionIndex(10**6, disk_bytes=80)
    first = keep(index, [1], name="x a")
    written(index)
    second = keep(index, [1, 2], name="x b", before=first)
    index.take_commands()
    index.note(Report(unwritten=[second]))
    for n in range(3, 6):
        keep(index, [n], name=f"x {n}")
        written(index)
    assert list(index.names()) == ["x a", "x b", "x 3", "x 4", "x 5"]
    keep(index, [6], name="x 6")
    assert list(index.names()) == ["x 3", "x 4", "x 5", "x 6"], "one alone would free nothing"


def test_a_disk_that_was_full_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named sessions keep their names, and after ten minutes the bound is what it was."""
    said: list[str] = []
    monkeypatch.setattr(index_module.logger, "warning", lambda text, *_: said.append(text))
    index = SessionIndex(10**6, disk_bytes=1000)
    for n in range(10):
        keep(index, [n], name=f"x {n}")
        written(index)
    failed = keep(index, [20])
    index.take_commands()
    index.note(Report(unwritten=[failed], full=True), 5)
    assert index.disk_bytes == 100
    keep(index, [21], now=6, name="x new")
    written(index)
    assert len(index.names()) == 11 and not said
    keep(index, [22], now=5 + index_module.FULL_SECONDS)
    assert index.disk_bytes == 100
    keep(index, [23], now=6 + index_module.FULL_SECONDS)
    assert index.disk_bytes == 1000 and "write" in ops(index)


def test_time_to_live() -> None:
    index = SessionIndex(100, ttl=60)
    keep(index, [1], now=0)
    keep(index, [2], now=50)
    assert index.find("c", [1, 9], 1, 61) is None and index.find("c", [2, 9], 1, 61) is not None
    assert index.counters.lost["expired"] == 1
    assert index.find("c", [2, 9], 1, 111) is None and index.used["memory"] == 0


def test_a_name_pins_a_session_until_it_is_released() -> None:
    index = SessionIndex(memory_bytes=20)
    keep(index, [1], name="mine")
    for n in range(2, 6):
        keep(index, [n])
    session = index.named("mine")
    assert session is not None and index.find("c", [1, 9], 1, 0) is session
    assert index.begins(session, {"c"}, [1, 2]) and not index.begins(session, {"c"}, [2, 1])
    assert not index.begins(session, {"other"}, [1, 2])
    keep(index, [1, 2], name="mine")  # the next turn: the name moves on
    assert index.named("mine") is not session and not session.names
    assert index.release("mine") and not index.release("mine")
    assert index.named("mine") is None and index.find("c", [1, 2, 3], 2, 0) is session


def test_only_pinned_sessions_do_not_stop_a_request_that_waits() -> None:
    index = SessionIndex(memory_bytes=10, disk_bytes=100)
    index.adopt(Session("c", token_digests_of([9]), 1, 10))
    a = keep(index, [1], name="mine")
    index.note(Report(unwritten=[a]))
    session = index.find("c", [9, 9], 1, 0)
    assert session is not None and not index.ready(session, "r") and session.reading


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_bounds_hold_and_workers_can_execute_all_commands(script: list[tuple]) -> None:
    """Random use; beside it workers that hold memory and files as told."""
    index = SessionIndex(memory_bytes=20, disk_bytes=25, ttl=15)
    memory, disk, reading = set(), set(), set()
    for now, (action, which, size) in enumerate(script):
        tokens = [which, which + 1, 5]
        if action <= 1:
            index.keep("c", tokens, size, pages=(0,), now=now, name="n" if which == 0 else None)
        elif action == 2 and (found := index.find("c", [*tokens, 1], 3, now)):
            if index.ready(found, f"r{which}"):
                index.restore(found, f"r{which}", (1,), "memory", now)
            elif not found.reading:
                wait = [one for one in index._sessions.values() if one.waiting]
                room = 20 - sum(one.num_bytes for one in wait if one.in_memory)
                assert max(one.num_bytes for one in wait if not one.in_memory) > room
        elif action == 3:
            for one in index._sessions.values():
                index.leave(one, f"r{which}")
        elif action == 4:
            index.release("n")
        report = Report()
        for command in index.take_commands():
            id_ = command.id
            if command.op == "save":
                memory.add(id_)
                report.saved.append(id_)
            elif command.op == "restore":
                assert id_ in memory
            elif command.op == "write":
                assert id_ in memory
                (report.written if action < 6 else report.unwritten).append(id_)
                if action < 6:
                    disk.add(id_)
            elif command.op == "read":
                assert id_ in disk
                reading.add(id_)
                if size > 3:
                    memory.add(id_)
                    report.read[id_] = 0.1
                else:
                    disk.discard(id_)
                    report.unreadable[id_] = "damaged"
            elif command.op == "drop":
                memory.discard(id_)
            else:
                disk.discard(id_)
        index.note(report)
        held = {s.id: s for s in index._sessions.values()}
        assert {i for i, s in held.items() if s.in_memory} == memory
        assert {i for i, s in held.items() if s.on_disk} == disk
        assert index.used["memory"] == sum(held[i].num_bytes for i in memory) <= 20
        assert index.used["disk"] == sum(held[i].num_bytes for i in disk) <= 25
        assert index.held == {"memory": len(memory), "disk": len(disk)}
        assert not {i for i, s in held.items() if s.reading or s.writing}
        assert not index.unsettled and not index._unfinished
        lengths = [n for counter in index._lengths.values() for n in counter.elements()]
        assert sorted(lengths) == sorted(s.num_tokens for s in held.values())
        assert all(s.names == ["n"] for s in index._by_name.values())


CROWD = 50


def crowded(monkeypatch: pytest.MonkeyPatch) -> tuple[SessionIndex, list[Session], Counter[str]]:
    """An index of 1,000 sessions whose memory is full of those of waiting requests.

    Returns:
        The index, the sessions in memory before those on disk, and how often room was looked for.
    """
    index, calls = SessionIndex(memory_bytes=1000, disk_bytes=10**6), Counter[str]()
    inside = [keep(index, [n]) for n in range(100)]
    written(index)
    for n in range(100, 1000):
        assert index.adopt(Session("c", token_digests_of([n]), 1, 10))
    found = list(index._sessions.values())
    assert [one.id for one in found[:100]] == inside and index.used["memory"] == 1000
    assert all(index.ready(one, "started") for one in found[:100])
    leaving = index._leaving
    monkeypatch.setattr(index, "_leaving", lambda: calls.update(looked=1) or leaving())
    return index, found, calls


def test_requests_that_wait_look_for_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search takes all sessions, and finds nothing new as long as nothing has changed."""
    index, found, calls = crowded(monkeypatch)
    for _ in range(2):
        assert not any(index.ready(found[100 + n], f"r{n}") for n in range(CROWD))
    assert calls["looked"] == 1 and not any(one.reading for one in found)


@pytest.mark.parametrize("change", ["left", "started", "forgotten", "written", "read"])
def test_what_makes_room_lets_a_request_look_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, found, calls = crowded(monkeypatch)
    first, waits = found[0], found[100]
    if change == "written":
        index._set_disk(first, writing=True)
        index.leave(first, "started")
    elif change == "read":
        index._set_memory(first, reading=True)
        index.leave(first, "started")
    assert not index.ready(waits, "r") and not index.ready(found[101], "s")
    assert calls["looked"] == 1
    if change == "left":
        index.leave(first, "started")
    elif change == "started":
        index.restore(first, "started", (1,), "memory", 0)
    elif change == "forgotten":
        index.forget(first)
    elif change == "written":
        index.note(Report(written=[first.id]))
    else:
        index.note(Report(read={first.id: 0.1}))
    assert not index.ready(waits, "r") and waits.reading and not first.in_memory
    assert index.used["memory"] == 1000
    assert not index.ready(found[101], "s") and not found[101].reading


def test_a_large_session_goes_before_small_ones() -> None:
    """Until its request has left, small ones do not take the room that comes free."""
    index = SessionIndex(memory_bytes=100, disk_bytes=10**6)
    inside = [keep(index, [n]) for n in range(9)]
    sessions = [session_of(index, [n]) for n in range(9)]
    assert inside and all(index.ready(one, "started") for one in sessions)
    large, small = (Session("c", token_digests_of([n]), 1, n) for n in (30, 10))
    assert index.adopt(large) and index.adopt(small)
    assert not index.ready(large, "l") and not index.ready(small, "s")
    assert not large.reading and not small.reading
    index.leave(large, "l")
    assert not index.ready(small, "s") and small.reading


def test_names_that_a_file_must_hold() -> None:
    """The version changes with the names, and not with turns that have none."""
    index = SessionIndex(10**9, 10**9)
    first = keep(index, [1], name="mine")
    assert index.names() == {"mine": first} and index.names_version == 1
    keep(index, [2])
    keep(index, [1], name="mine")
    assert index.names_version == 1
    second = keep(index, [1, 2], name="mine")
    assert index.names() == {"mine": second} and index.names_version == 2
    index.release("mine")
    assert index.names() == {} and index.names_version == 3
    session = Session("c", token_digests_of([7]), 1, 10)
    assert index.adopt(session, {"other"}) and index.names() == {"other": session.id}


def test_a_turns_file_stays_until_the_next_one_is_written() -> None:
    """A full folder loses the other session; then the continued turn leaves first."""
    index = SessionIndex(10**9, disk_bytes=30)
    other, turn = keep(index, [9]), keep(index, [1])
    keep(index, [8])
    written(index)
    index.find("c", [9, 9], 1, 0).used = 1
    index._sessions.move_to_end(other)  # the turn is the least recently used
    index._sessions.move_to_end(index.find("c", [8, 9], 1, 0).id)
    following = keep(index, [1, 2], before=turn)
    commands = index.take_commands()
    assert [(c.op, c.id) for c in commands] == [
        ("save", following),
        ("remove", other),
        ("write", following),
    ]
    later = keep(index, [7])  # while the next turn is being written
    assert turn not in {c.id for c in index.take_commands() if c.op == "remove"} and later
    index.note(Report(written=[following]))
    keep(index, [6])
    assert turn in {c.id for c in index.take_commands() if c.op == "remove"}
    assert not index.counters.lost


def test_a_pinned_chat_keeps_its_last_file() -> None:
    """Its next turn finds no room in the folder, or could not be written yet."""
    index = SessionIndex(1000, disk_bytes=100)
    first = keep(index, [1, 2], 60, name="chat")
    written(index)
    second = keep(index, [1, 2, 3], 60, name="chat", before=first)
    assert index.counters.lost == {"disk_full": 1} and index.names() == {"chat": first}
    keep(index, [9], 60)
    assert "remove" not in ops(index) and index.counters.lost == {"disk_full": 2}
    index.release("chat")
    assert set(ops(index)) == {"drop"} and index.names() == {} and second
    keep(index, [8], 60)
    assert ("remove", first) in [(c.op, c.id) for c in index.take_commands()]


def test_a_name_follows_the_file() -> None:
    """In the folder it stays with the turn before until the new turn's file is complete."""
    index = SessionIndex(1000, disk_bytes=1000)
    first = keep(index, [1, 2], name="chat")
    written(index)
    second = keep(index, [1, 2, 3], name="chat", before=first)
    version = index.names_version
    assert index.names() == {"chat": first}
    written(index)
    assert index.names() == {"chat": second} and index.names_version > version


def test_a_name_of_a_turn_without_a_file_is_the_turns_before() -> None:
    """Its file is complete later than the name has moved on; the next turn has no room on disk."""
    index = SessionIndex(1000, disk_bytes=15)
    first = keep(index, [1, 2], name="chat")
    second = keep(index, [1, 2, 3], name="chat", before=first)
    version = index.names_version
    assert index.names() == {"chat": second} and index.unsettled
    index.note(Report(written=[first]))
    assert index.names() == {"chat": first} and index.names_version > version
    assert not index.unsettled
    third = index.keep("c", [1, 2, 3, 4], 10, (1,), 0, name="chat", before=second)
    assert third is not None and not third.writing and index.unsettled, "its copy may fail"
    index.note(Report(unsaved=[third.id]))
    assert index.names() == {"chat": first} and not index.unsettled


@pytest.mark.parametrize("end", ["written", "unwritten", "unsaved", "dropped", "replaced"])
def test_reports_that_names_wait_for(end: str) -> None:
    """All of them come, also of sessions that are gone: a wait would never end."""
    index = SessionIndex(1000, disk_bytes=1000)
    assert not index.unsettled
    kept = index.keep("c", [1, 2], 10, pages=(1,), now=0, name="chat")
    assert kept is not None and index.unsettled
    if end == "replaced":
        kept.unusable = True
        again = index.keep("c", [1, 2], 10, pages=(1,), now=0)
        assert again is not None and again is not kept and again.id == kept.id
        index.note(Report(saved=[kept.id], stamps={kept.id: kept.stamp}))
        assert index.unsettled, "that was the first one's"
        kept, end = again, "written"
    if end == "dropped":
        index.forget(kept)
        keep(index, [3], name="other")
        written(index)
    elif end == "unsaved":
        index.note(Report(unsaved=[kept.id]))
    else:
        index.note(Report(saved=[kept.id]))
        assert index.unsettled
        done = [kept.id]
        index.note(Report(written=done) if end == "written" else Report(unwritten=done))
    assert not index.unsettled and index._unfinished == 0


def test_a_file_is_under_several_names() -> None:
    """Until turns that have taken a name over have files of their own."""
    index = SessionIndex(1000, disk_bytes=1000)
    first = keep(index, [1, 2], name="b")
    written(index)
    second = keep(index, [1, 2, 3], name="a", before=first)
    third = keep(index, [1, 2, 4], name="c", before=first)
    assert index.names() == {"a": first, "b": first, "c": first}
    fourth = keep(index, [1, 2, 5], name="b", before=first)
    assert set(index.names().values()) == {first}
    written(index)
    assert index.names() == {"a": second, "b": fourth, "c": third}


def test_two_names_of_equal_tokens() -> None:
    """The session stays pinned until both are released, also after a restart."""
    index = SessionIndex(1000, disk_bytes=1000)
    one = keep(index, [1, 2], name="a")
    assert keep(index, [1, 2], name="b") == one
    written(index)
    session, names = index.named("a"), index.names()
    assert session is not None and index.named("b") is session
    assert names == {"a": one, "b": one}
    assert index.release("a") and not index.release("a")
    assert index.named("b") is session and index.names() == {"b": one} and not ops(index)
    assert index.release("b") and len(index) == 0 and ops(index) == ["drop", "remove"]
    again = SessionIndex(1000, disk_bytes=1000)
    assert again.adopt(Session.of(session.header, used=0), names) and again.names() == names


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send a new one with each request; the latest ones stay."""
    monkeypatch.setattr(index_module, "MOST_NAMES_HELD", 20)
    index = SessionIndex(10**9, 10**9)
    for n in range(50):
        one = keep(index, [1], name=f"s {n}")
    assert list(index.names()) == [f"s {n}" for n in range(34, 50)]
    again = SessionIndex(10**9, 10**9)
    session = index._sessions[one]
    assert again.adopt(Session.of(session.header, used=0), [f"s {n}" for n in range(50)])
    assert again.names() == index.names()
    other = keep(index, [1, 2], name="s 34")
    for n in range(5):
        keep(index, [1, 2], name=f"t {n}")
    assert list(index.names()) == [
        *(f"s {n}" for n in range(36, 50)),
        "s 34",
        *map("t {}".format, range(5)),
    ]
    assert index.named("s 35") is None and not index.release("s 35")
    assert session.names == list(index.names())[:14] and index.named("s 34").id == other


def test_a_name_costs_little_beside_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Salts and adapters are compared only where names have to leave."""
    asked: list[Session] = []
    scopes = index_module._scopes
    monkeypatch.setattr(index_module, "_scopes", lambda one: asked.append(one) or scopes(one))
    index = SessionIndex(1000, 1000)
    for n in range(50):
        keep(index, [n], name=f"s {n}")
    assert len(index.names()) == 50 and not asked
    keep(index, [99], name="s 99")
    assert len(index.names()) == 50 and len(asked) > 50


def test_a_session_used_from_memory_does_not_expire_after_a_restart() -> None:
    """Its file is touched, at most once a minute, also when equal tokens are kept again."""
    index = SessionIndex(10**9, 10**9, ttl=100)
    a = keep(index, [1])
    written(index)
    session = index.find("c", [1, 9], 1, 0)
    assert session is not None
    found = {}
    for now in (30, 60, 90, 119, 120):
        assert index.ready(session, "r")
        index.restore(session, "r", (1,), "memory", now)
        found[now] = ops(index)
    assert found == {now: ["restore"] + ["touch"] * (now in (60, 120)) for now in found}
    index.keep("c", [1], 10, pages=(1,), now=200)
    (command,) = index.take_commands()
    assert (command.op, command.id) == ("touch", a)


def test_an_outcome_of_an_earlier_session_of_the_same_tokens() -> None:
    """It says nothing of the file that is being written now."""
    index = SessionIndex(15, 100)
    a = keep(index, [1], name="mine")
    first = session_of(index, [1]).stamp
    index.release("mine")
    assert keep(index, [1]) == a
    index.note(Report(written=[a], stamps={a: first}))
    second = session_of(index, [1])
    assert second.writing and not second.on_disk and second.stamp != first
    index.note(Report(unwritten=[a], stamps={a: first}))
    assert second.writing and index.counters.lost == {"unwritten": 1}
    index.note(Report(written=[a], stamps={a: second.stamp}))
    assert second.on_disk and not second.writing


def session_of(index: SessionIndex, tokens: list[int]) -> Session:
    session = index.find("c", [*tokens, 1], len(tokens), 0)
    assert session is not None
    return session


def test_a_prompt_is_hashed_once_for_all_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    index, calls = SessionIndex(10**9), Counter[str]()
    for name in ("token_digests", "session_id"):
        plain = getattr(session_module, name)

        def counted(*args: Any, name: str = name, plain: Any = plain) -> Any:
            calls[name] += len(args[1]) if name == "token_digests" else 1
            return plain(*args)

        monkeypatch.setattr(session_module, name, counted)
    for n in range(1, 50):
        index._add(Session("c", token_digests_of(list(range(n))), n, 1))
    index._add(Session("c", "other tokens", 80, 1))
    prompt = Prefixes(list(range(100)))
    calls.clear()
    for _ in range(3):
        found = index.find("c", prompt, 99, 0)
        assert found is not None and found.num_tokens == 49
    assert calls == {"token_digests": 50, "session_id": 2}, "of 49 and 80 tokens"
    added = Session("c", token_digests_of(list(range(60))), 60, 1)
    index._add(added)
    assert index.find("c", prompt, 99, 0) is added
    assert calls["token_digests"] == 51 and index.find("d", prompt, 99, 0) is None
