# SPDX-License-Identifier: Apache-2.0
"""A scheduler's sessions without an engine: names, adapters, changed weights, an idle server."""

import itertools
import json
import queue
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request, RequestStatus

from tests.cache.test_snapshots import HASHER
from tests.conftest import ROOT
from tests.engine.test_scheduler import finish_step, make_scheduler
from vllm_cascade.engine import sessions
from vllm_cascade.engine.admission import check_session
from vllm_cascade.engine.scheduler import KVPolicyScheduler
from vllm_cascade.engine.session_header import policy_settings
from vllm_cascade.engine.session_metrics import LOST, MISSES
from vllm_cascade.engine.sessions import SchedulerSessions
from vllm_cascade.patches import weight_updates
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.sessions import files, session
from vllm_cascade.sessions.folder import Folder
from vllm_cascade.sessions.session import Prefixes, Report

PROMPT = list(range(1, 21))


@pytest.fixture
def scheduler() -> Iterator[Any]:
    made = make_scheduler(KVPolicyScheduler, num_pages=40, kv_sessions=True)
    yield made
    made.shutdown()


def in_folder(folder: Path) -> Any:
    settings = {"kv_sessions": True, "kv_sessions_dir": str(folder)}
    return make_scheduler(KVPolicyScheduler, num_pages=40, **settings)


NUMBERS = itertools.count()


def add(
    scheduler: Any,
    prompt: list[int],
    lora: Any = None,
    salt: Any = None,
    max_tokens: int = 3,
    hasher: Any = None,
    **args: Any,
) -> Any:
    """Add a request; with ``hasher`` it has hashes, so that prefix caching works."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=args)
    params.update_from_generation_config({}, 0)
    name = f"r{next(NUMBERS)}"
    one = Request(
        name, prompt, params, None, lora_request=lora, cache_salt=salt, block_hasher=hasher
    )
    scheduler.add_request(one)
    return one


def finish(scheduler: Any, one: Any) -> None:
    """Run a request until it has ended, and a step in which workers copy its state."""
    while not one.is_finished():
        finish_step(scheduler, scheduler.schedule())
    if index_of(scheduler).pending:
        finish_step(scheduler, scheduler.schedule())


def ask(scheduler: Any, prompt: list[int], *args: Any, **more: Any) -> list[int]:
    """Run a request until it has ended; returns its tokens."""
    one = add(scheduler, prompt, *args, **more)
    finish(scheduler, one)
    return [*prompt, *one.output_token_ids]


def index_of(scheduler: Any) -> Any:
    return scheduler.sessions.index


def names_in(folder: Path) -> dict[str, str]:
    return json.loads((folder / "names.json").read_text())


def test_a_name_is_its_clients_own(scheduler: Any) -> None:
    """Another cache salt neither takes nor releases it."""
    index = index_of(scheduler)
    ask(scheduler, PROMPT, salt="ours", kv_session="chat")
    ask(scheduler, [5, 6], salt="theirs", kv_session="chat")
    assert len(index) == 2 and not index.counters.lost["name_diverged"]
    ask(scheduler, [7, 8], salt="theirs", kv_session="chat", kv_session_release=True)
    ask(scheduler, [7, 8], kv_session="chat", kv_session_release=True)
    (left,) = index._sessions.values()
    assert left.num_tokens == len(PROMPT) + 2 and left.names
    ask(scheduler, [7, 8], salt="ours", kv_session="chat", kv_session_release=True)
    assert len(index) == 0


def test_a_request_of_one_token_is_kept_under_a_name_only(scheduler: Any) -> None:
    """Beam search sends one for each beam and step."""
    index = index_of(scheduler)
    ask(scheduler, PROMPT, max_tokens=1)
    assert len(index) == 0 and not index.pending
    ask(scheduler, PROMPT, max_tokens=1, kv_session="chat")
    ask(scheduler, PROMPT, max_tokens=2)
    assert len(index) == 2 and index.counters.kept == 2


def test_a_client_that_disconnects(scheduler: Any) -> None:
    """The turn before keeps its name; what was decoded is kept, too."""
    index = index_of(scheduler)
    history = ask(scheduler, PROMPT, kv_session="chat")
    (first,) = index._sessions.values()
    one = add(scheduler, [*history, 7, 8], max_tokens=30, kv_session="chat")
    for _ in range(5):
        finish_step(scheduler, scheduler.schedule())
    scheduler.finish_requests([one.request_id], RequestStatus.FINISHED_ABORTED)
    assert len(index) == 2 and index.counters.hits == {"memory": 1}
    assert first.names and list(index._by_name.values()) == [first] and not first.continued


@pytest.mark.parametrize("reports", [True, False])
def test_durations_of_reads_do_not_pile_up_without_reports(
    reports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--disable-log-stats`` there is none; each read from disk adds a duration."""
    scheduler = in_folder(tmp_path)
    monkeypatch.setattr(scheduler, "log_stats", reports)
    durations = index_of(scheduler).counters.load_seconds
    durations += [0.5, 0.25]
    stats = scheduler.make_stats()
    assert not index_of(scheduler).counters.load_seconds
    assert (stats is not None and stats.kv_sessions.load_seconds == [0.5, 0.25]) is reports
    scheduler.shutdown()


def test_a_request_does_not_wait_for_ever_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads its prompt; when the file has been read, the next request starts from it.

    Large files have more time.
    """
    monkeypatch.setattr(sessions, "SLOWEST_READ", float("inf"))
    now = [time.time()]
    monkeypatch.setattr(sessions.time, "time", lambda: now[0])
    scheduler = in_folder(tmp_path)
    index = index_of(scheduler)
    history = ask(scheduler, PROMPT)
    (first,) = index._sessions.values()
    index.take_commands()
    index.note(Report(written=[first.id]))
    index._set_memory(first)
    one = add(scheduler, [*history, 7, 8], max_tokens=2)
    for seconds in (0, sessions.MOST_WAITED - 1):
        now[0] += seconds
        finish_step(scheduler, scheduler.schedule())
        assert first.waiting == {one.request_id} and not one.num_computed_tokens
    other = add(scheduler, [*history, 9], max_tokens=2)
    finish_step(scheduler, scheduler.schedule())
    now[0] += 1
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0 and not first.waiting
    assert {new.req_id for new in output.scheduled_new_reqs} == {one.request_id, other.request_id}
    assert index.counters.misses["slow"] == 1 and first.reading
    finish_step(scheduler, output)
    index.note(Report(read={first.id: 31.0}), now[0])
    third = add(scheduler, [*history, 10], max_tokens=2)
    assert scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == first.num_tokens
    assert index.counters.hits == {"memory": 1} and third.num_computed_tokens
    assert not scheduler.sessions._slow and not scheduler.sessions._waited
    scheduler.shutdown()


def test_a_request_that_waited_starts_from_an_earlier_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the last turn is large, and read too slowly; the turn before is in memory."""
    now = [time.time()]
    monkeypatch.setattr(sessions.time, "time", lambda: now[0])
    scheduler = in_folder(tmp_path)
    index = index_of(scheduler)
    history = ask(scheduler, [*ask(scheduler, PROMPT), 5])
    first, last = index._sessions.values()
    monkeypatch.setattr(sessions, "SLOWEST_READ", last.num_bytes / 40)
    index.take_commands()
    index.note(Report(written=[first.id, last.id]))
    index._set_memory(last)
    one = add(scheduler, [*history, 7, 8], max_tokens=2)
    for seconds in (0, sessions.MOST_WAITED + 39):
        now[0] += seconds
        finish_step(scheduler, scheduler.schedule())
        assert not one.num_computed_tokens
    now[0] += 2
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == first.num_tokens < last.num_tokens
    assert index.counters.hits == {"memory": 2}
    scheduler.shutdown()


@pytest.mark.parametrize("keep", [0, 128])
def test_turns_that_keep_more_of_their_prompts_continue(keep: int) -> None:
    """``keep_prompt`` keeps more of each turn's prompt; states differ once tokens are evicted."""
    settings = {"kv_sessions": True, "kv_policy": "sink", "kv_budget": 64, "kv_keep_prompt": keep}
    scheduler = make_scheduler(KVPolicyScheduler, num_pages=80, **settings)
    index = index_of(scheduler)

    def turn(history: list[int], max_tokens: int = 3) -> tuple[int, list[int]]:
        """Tokens that a turn does not read, and the history after it."""
        one = add(scheduler, [*history, *[900] * 18], max_tokens=max_tokens, kv_session="chat")
        output = scheduler.schedule()
        finish_step(scheduler, output)
        finish(scheduler, one)
        return output.scheduled_new_reqs[0].num_computed_tokens, list(one.all_token_ids)

    history, begins = [], []
    for _ in range(12):  # the prompts come to have more than ``keep`` tokens, and then evict some
        begin, history = turn(history)
        begins.append(begin)
    assert begins == [0, *(21 * turn - 1 for turn in range(1, 12))]
    assert index.counters.misses == {"no_session": 1}
    first, history = turn([5], max_tokens=90)  # the answer evicts, beside 19 kept tokens or none
    assert first == 0
    again, _ = turn(history)
    assert again == (0 if keep else len(history) - 1)
    scheduler.shutdown()


def test_a_turn_that_keeps_nothing_reads_a_whole_chat_again() -> None:
    """The session has all of its tokens; with ``kv_keep_prompt`` 0 some would be gone."""
    settings = {"kv_sessions": True, "kv_policy": "sink", "kv_budget": 64, "kv_keep_prompt": 128}
    scheduler = make_scheduler(KVPolicyScheduler, num_pages=80, **settings)
    history = ask(scheduler, [*range(1, 101)], kv_session="chat")
    begins = []
    for asked in ({"kv_keep_prompt": 0}, {}):
        one = add(scheduler, [*history, 5, 6], kv_session="chat", **asked)
        output = scheduler.schedule()
        begins.append(output.scheduled_new_reqs[0].num_computed_tokens)
        finish_step(scheduler, output)
        finish(scheduler, one)
    assert begins == [0, len(history) - 1]
    scheduler.shutdown()


def test_names_are_in_one_file(tmp_path: Path) -> None:
    """A name that is released does not come back; one that moved on is the newest turn's."""
    scheduler = in_folder(tmp_path)
    index = index_of(scheduler)
    ends = {}
    for chat in ("kept", "released"):
        history = ask(scheduler, [len(chat), *PROMPT], kv_session=chat)
        ends[chat] = ask(scheduler, [*history, 9], kv_session=chat)
    assert len(index) == 4
    ask(scheduler, [1], kv_session="released", kv_session_release=True)
    scheduler.shutdown()
    (key,) = names_in(tmp_path)
    assert key.endswith(" kept") and (tmp_path / "names.json").stat().st_mode & 0o077 == 0
    newest = names_in(tmp_path)[key]
    assert index._sessions[newest].num_tokens == len(ends["kept"]) - 1
    assert not list(tmp_path.glob(".*"))


def write_file(folder: Path, command: Any, rank: int, world: int, **other: str) -> None:
    """Write a rank's file, as a worker does."""
    path = folder / files.file_name(command.id, rank, world)
    header = {**command.header, "rank": f"{rank}of{world}", **other}
    files.write(path, header, {"pages.0000": torch.zeros(1)})


@pytest.mark.parametrize("files_of", ["all ranks", "one rank", "another write", "none"])
def test_a_stop_before_the_last_turns_file_is_reported(files_of: str, tmp_path: Path) -> None:
    """The name moves to the newest turn if all of its file is there, else it stays."""
    scheduler = in_folder(tmp_path)
    scheduler.sessions._world = world = 2
    index = index_of(scheduler)
    history = ask(scheduler, PROMPT, kv_session="chat")
    (first,) = index._sessions.values()
    scheduler.sessions.note(Report(written=[first.id]))
    one = add(scheduler, [*history, 7, 8], kv_session="chat")
    while not one.is_finished():
        finish_step(scheduler, scheduler.schedule())
    output = scheduler.schedule()
    (command,) = (command for command in output.sessions if command.op == "write")
    second = index._sessions[command.id]
    finish_step(scheduler, output)
    assert second.writing and not second.on_disk and first.on_disk
    for rank in range({"none": 0, "one rank": 1}.get(files_of, world)):
        other = {"stamp": "0"} if files_of == "another write" and rank else {}
        write_file(tmp_path, command, rank, world, **other)
    scheduler.shutdown()
    ((_, id_),) = names_in(tmp_path).items()
    assert id_ == (second.id if files_of == "all ranks" else first.id)


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_engine_hears_of_a_named_turns_file(fails: bool, tmp_path: Path) -> None:
    """It takes steps until the file is reported; then names are written without a further step."""
    scheduler = in_folder(tmp_path)
    index = index_of(scheduler)
    ask(scheduler, [5, 6])
    ask(scheduler, PROMPT)
    assert not scheduler.has_requests(), "no session has a name"
    unnamed = [one.id for one in index._sessions.values()]
    index.note(Report(written=unnamed))
    history = ask(scheduler, PROMPT[:9], kv_session="chat")
    first = next(iter(index._by_name.values()))
    finish_step(scheduler, scheduler.schedule())
    assert first.writing and scheduler.has_requests() and not scheduler.has_unfinished_requests()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not scheduler.has_requests(), "a pause waits for no file: it may remove all sessions"
    scheduler.set_pause_state(PauseState.UNPAUSED)
    scheduler.sessions.note(Report(written=[first.id]))
    assert not scheduler.has_requests()
    ask(scheduler, [*history, 7], kv_session="chat")
    second = next(iter(index._by_name.values()))
    for _ in range(3):
        assert scheduler.has_requests() and not index.pending
        finish_step(scheduler, scheduler.schedule())
    end = time.monotonic() + 30
    while scheduler.sessions._names._version != index.names_version:
        assert time.monotonic() < end
        time.sleep(0.01)
    done = [second.id]
    scheduler.sessions.note(Report(unwritten=done) if fails else Report(written=done))
    if fails:
        finish_step(scheduler, scheduler.schedule())  # workers remove what they have written
    assert not scheduler.has_requests()
    while [*names_in(tmp_path).values()] != [first.id if fails else second.id]:
        assert time.monotonic() < end
        time.sleep(0.01)
    scheduler.shutdown()


def test_an_idle_engine_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = in_folder(tmp_path)
    ask(scheduler, PROMPT, kv_session="chat")
    assert scheduler.has_requests()
    scheduler.sessions._heard -= sessions.MOST_SILENT
    assert not scheduler.has_requests()
    monkeypatch.setattr(scheduler.sessions, "note", lambda report: None)
    ask(scheduler, [5, 6])
    assert scheduler.has_requests(), "workers have got another file to write"
    scheduler.shutdown()


def test_names_are_not_written_with_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the last ones are: after a while without another step, and when the server stops."""
    real, written = Folder.write_names, []

    def write(folder: Folder, names: dict[str, str]) -> None:
        real(folder, names)
        written.append([key.partition(" ")[2] for key in names])

    monkeypatch.setattr(Folder, "write_names", write)
    scheduler, begin = in_folder(tmp_path), time.monotonic()
    for n in range(20):
        ask(scheduler, PROMPT, kv_session=f"idle {n}")
    while "idle 19" not in [*itertools.chain(*written)] and time.monotonic() < begin + 30:
        time.sleep(0.01)
    assert len(written) <= 2 + (time.monotonic() - begin)
    assert written[-1] == [f"idle {n}" for n in range(4, 20)]
    for n in range(20):
        ask(scheduler, PROMPT, kv_session=f"busy {n}")
    scheduler.shutdown()
    assert written[-1] == [f"busy {n}" for n in range(4, 20)] and len(names_in(tmp_path)) == 16
    assert len(written) <= 3 + (time.monotonic() - begin)


def test_the_hit_rate_counts_requests(scheduler: Any) -> None:
    """Each is a hit or a miss; what becomes of states is counted apart, and both are documented."""
    history = ask(scheduler, PROMPT)
    ask(scheduler, [*history, 5])
    one = add(scheduler, [7, 8, 9])
    finish_step(scheduler, scheduler.schedule())
    scheduler.sessions.weights_changed()
    finish(scheduler, one)
    ask(scheduler, [*PROMPT, 7], max_tokens=1)
    scheduler.sessions._reported = session.SessionCounters()  # steps have reported, too
    stats = scheduler.sessions.report()
    assert stats.hits == {"memory": 1} and sum(stats.misses.values()) == 3
    assert stats.misses.keys() <= MISSES.keys() and stats.lost.keys() <= LOST.keys()
    assert stats.lost == {"changed": 1} and not MISSES.keys() & LOST.keys()
    assert not scheduler.sessions.report().lost
    text = (ROOT / "docs/SESSIONS.md").read_text("utf-8").partition("## Metrics")[2]
    (misses,) = re.findall(r"^.*kv_session_misses_total` .*$", text, re.MULTILINE)
    assert all(f"`{reason}`" in misses for reason in MISSES)
    assert all(f"`{reason}`" in text.partition("| lost because |")[2] for reason in LOST)


@pytest.mark.parametrize("value", ["false", "true", 2, 0.5, [True]])
def test_a_release_is_yes_or_no(value: Any, scheduler: Any) -> None:
    for right in (True, False, 0, 1, None):
        args = {"kv_session": "mine", "kv_session_release": right}
        check_session(scheduler.vllm_config, SamplingParams(extra_args=args))
    params = SamplingParams(extra_args={"kv_session": "mine", "kv_session_release": value})
    with pytest.raises(VLLMValidationError, match="kv_session_release must be true or false"):
        check_session(scheduler.vllm_config, params)


@pytest.mark.parametrize(
    "call", ["reload_weights", "update_weights", "finish_weight_update", "reset_weights"]
)
def test_weights_that_change(call: str, tmp_path: Path) -> None:
    """Sessions of other weights are not found, nor kept of a request that saw both."""
    scheduler = in_folder(tmp_path)
    index, core = index_of(scheduler), EngineCore.__new__(EngineCore)
    core.scheduler = scheduler
    core.model_executor = SimpleNamespace(collective_rpc=lambda method, *_: [method])  # type: ignore[assignment]
    history = ask(scheduler, PROMPT)
    before = index.header["model"]
    assert core.collective_rpc("list_loras") == ["list_loras"] and index.header["model"] == before
    running = add(scheduler, [*history, 5])
    finish_step(scheduler, scheduler.schedule())
    assert index.counters.hits == {"memory": 1}
    assert core.collective_rpc(call) == [call]
    finish(scheduler, running)
    assert index.header["model"] != before and len(index) == 1
    assert index.counters.lost["changed"] == 1 and index.counters.kept == 1
    ask(scheduler, [*history, 5])
    assert index.counters.hits == {"memory": 1} and index.counters.kept == 2
    scheduler.shutdown()


def test_an_engine_calls_its_workers_before_it_has_a_scheduler() -> None:
    """A later engine of the process, which may keep no sessions, and fits its maximum length."""
    weight_updates.apply()
    core = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=lambda method, *_: [method])  # type: ignore[assignment]
    for call in ("update_max_model_len", "reload_weights"):
        assert core.collective_rpc(call, args=(64,)) == [call]


def test_a_reset_wakes_an_idle_engine(scheduler: Any) -> None:
    """vLLM resets at the end of a pause, just before it waits for messages without looking for
    work, and workers hear of dropped sessions in the next step."""
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler, core.input_queue = scheduler, queue.Queue()
    assert core.reset_prefix_cache() and core.input_queue.empty()
    ask(scheduler, PROMPT)
    finish_step(scheduler, scheduler.schedule())
    assert not scheduler.has_requests()
    assert core.reset_prefix_cache() and scheduler.has_requests()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    finish_step(scheduler, scheduler.schedule())
    assert not scheduler.has_requests() and len(index_of(scheduler)) == 0
    in_process = EngineCore.__new__(EngineCore)  # has no queue
    in_process.scheduler = scheduler
    assert in_process.reset_prefix_cache()


def test_an_adapter_that_changes_before_its_first_request(scheduler: Any, tmp_path: Path) -> None:
    """The worker has what was there when a client asked for it."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"old")
    lora = LoRARequest("a", 1, str(tmp_path))
    core = EngineCore.__new__(EngineCore)
    core.scheduler = scheduler
    core.model_executor = SimpleNamespace(add_lora=lambda _: True)  # type: ignore[assignment]
    assert core.add_lora(lora)
    file.write_bytes(b"newer")
    ask(scheduler, PROMPT, lora)
    assert index_of(scheduler).counters.kept == 0
    assert core.add_lora(lora)  # it is loaded already, so nothing is read again
    ask(scheduler, PROMPT, lora)
    assert index_of(scheduler).counters.kept == 0
    assert core.add_lora(LoRARequest("a", 1, str(tmp_path), load_inplace=True))
    ask(scheduler, PROMPT, lora)
    assert index_of(scheduler).counters.kept == 1


def test_a_table_of_scores_is_read_once(tmp_path: Path) -> None:
    """It may be gone when a request asks for a policy that is new."""
    table, tables = tmp_path / "idf.safetensors", dict[str, str]()
    table.write_bytes(b"table")
    raw = {"name": "dgc", "importance": "tfidf", "idf": str(table)}
    first = policy_settings(resolve({**raw, "budget": 64}), tables)
    table.unlink()
    second = policy_settings(resolve({**raw, "budget": 32}), tables)
    assert first["idf"] == second["idf"] and first["budget"] != second["budget"]
    with pytest.raises(FileNotFoundError):
        policy_settings(resolve({**raw, "budget": 32}))


def test_adapters(scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is overwritten while the old adapter is loaded: nothing is found or kept."""
    index, file = index_of(scheduler), tmp_path / "adapter_model.safetensors"
    lora = {"lora_name": "a", "lora_path": str(tmp_path)}
    file.write_bytes(b"old")
    history = ask(scheduler, PROMPT, LoRARequest(**lora, lora_int_id=1))
    history = ask(scheduler, [*history, 5], LoRARequest(**lora, lora_int_id=1))
    assert index.counters.hits == {"memory": 1} and index.counters.kept == 2
    file.write_bytes(b"newer")
    ask(scheduler, [*history, 5], LoRARequest(**lora, lora_int_id=1))
    assert index.counters.hits == {"memory": 1} and index.counters.lost["changed"] == 1
    for fresh in ({"lora_int_id": 1, "load_inplace": True}, {"lora_int_id": 2}):
        history = ask(scheduler, [*history, 5], LoRARequest(**lora, **fresh))  # type: ignore[arg-type]
    assert index.counters.kept == 4 and index.counters.hits == {"memory": 2}
    file.unlink()
    file.symlink_to("/nonexistent")
    ask(scheduler, PROMPT, LoRARequest(**lora, lora_int_id=3))
    ask(scheduler, PROMPT, LoRARequest("b", 4, "org/unknown"))
    assert index.counters.kept == 4 and index.counters.lost["changed"] == 3

    hub = tmp_path / "hub" / "models--org--b"
    (hub / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    (hub / "snapshots" / ("a" * 40) / file.name).write_bytes(b"b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    ask(scheduler, PROMPT, LoRARequest("b", 5, "org/b"))
    assert index.counters.kept == 5 and index.counters.lost["changed"] == 3


def test_an_idle_server_drops_what_was_reset(scheduler: Any) -> None:
    """Workers hear of it in a step without requests; then the engine is idle again."""
    ask(scheduler, PROMPT)
    while scheduler.has_requests():
        finish_step(scheduler, scheduler.schedule())
    (one,) = index_of(scheduler)._sessions.values()
    assert scheduler.reset_prefix_cache() and scheduler.has_requests()
    output = scheduler.schedule()
    assert [(c.op, c.id) for c in output.sessions] == [("drop", one.id)]
    finish_step(scheduler, output)
    assert not scheduler.has_requests() and index_of(scheduler).used["memory"] == 0


def test_a_waiting_request_is_hashed_once(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often sessions change while it waits; a new one costs one more digest."""
    hashed: list[int] = []
    plain = session.token_digests

    def counted(tokens: Any, lengths: list[int]) -> dict[int, str]:
        hashed.extend(lengths)
        return plain(tokens, lengths)

    index = index_of(scheduler)
    for n in range(5, 15):
        ask(scheduler, PROMPT[1:n])
    history = ask(scheduler, PROMPT)
    before = index.counters.misses["diverged"]
    monkeypatch.setattr(session, "token_digests", counted)
    waiting = add(scheduler, [*history[:-2], 9, 9, 9, 9, 9])
    for _ in range(5):
        assert scheduler.sessions.may_start(waiting, 0)
        index.version += 1
    assert sorted(hashed) == sorted({one.num_tokens for one in index._sessions.values()})
    finish(scheduler, waiting)
    assert len(hashed) == len(set(hashed)) and index.counters.misses["diverged"] == before + 1


def test_requests_that_wait_for_memory_look_for_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often other sessions come and go, and only longer sessions are looked up."""
    scheduler = in_folder(tmp_path)
    index = index_of(scheduler)
    chats = [ask(scheduler, [n, *PROMPT]) for n in range(4)]
    waiting = [add(scheduler, [*history, 7, 8]) for history in chats]
    found = list(index._sessions.values())
    index.note(Report(written=[one.id for one in found]))
    for one in found:
        index._set_memory(one)
    index.memory_bytes = found[0].num_bytes - 1
    calls = Counter[str]()
    leaving, digests = index._leaving, Prefixes.digests

    def looked_up(prefixes: Prefixes, lengths: list[int]) -> dict[int, str]:
        calls["lengths"] += len(lengths)
        return digests(prefixes, lengths)

    monkeypatch.setattr(index, "_leaving", lambda: calls.update(leaving=1) or leaving())
    monkeypatch.setattr(Prefixes, "digests", looked_up)
    assert not any(scheduler.sessions.may_start(one, 0) for one in waiting)
    assert calls == {"leaving": 1, "lengths": 4} and [len(one.waiting) for one in found] == [1] * 4
    for _ in range(3):
        index.version += 1
        assert not any(scheduler.sessions.may_start(one, 0) for one in waiting)
    assert calls == {"leaving": 1, "lengths": 4}
    index.memory_bytes += 1
    index.forget(found[0])
    assert scheduler.sessions.may_start(waiting[0], 0), "it has no session any more"
    assert not any(scheduler.sessions.may_start(one, 0) for one in waiting[1:])
    assert [one.reading for one in found[1:]] == [True, False, False]
    scheduler.shutdown()


def test_a_longer_session_that_comes_while_a_request_waits(tmp_path: Path) -> None:
    """The request leaves the shorter one, and takes it again when the longer one has gone."""
    scheduler = in_folder(tmp_path)
    index, ours = index_of(scheduler), scheduler.sessions
    history = ask(scheduler, PROMPT)
    (first,) = index._sessions.values()
    index.note(Report(written=[first.id]))
    index._set_memory(first)
    one = add(scheduler, [*history, 7, 8])
    assert not ours.may_start(one, 0) and first.reading and first.waiting == {one.request_id}
    context, tokens = ours.context(one, len(history) + 1), [*history, 7]
    longer = index.keep(context, tokens, 10, (1,), time.time())
    assert longer is not None and not ours.may_start(one, 0)
    assert longer.waiting == {one.request_id} and not first.waiting
    index.forget(longer)
    assert not ours.may_start(one, 0) and first.waiting == {one.request_id}
    index.note(Report(read={first.id: 0.1}))
    assert ours.may_start(one, 0) and ours.tokens_of(one) == first.num_tokens
    scheduler.shutdown()


# --- prompt states --------------------------------------------------------------------------------

LONG = list(range(1, 121))
STOP = 96
"""The end of the last stride of 16 tokens in ``LONG`` that leaves its last 16 tokens out."""


def thinking(prefix_caching: bool = True, **settings: Any) -> Any:
    return make_scheduler(
        KVPolicyScheduler,
        num_pages=80,
        enable_prefix_caching=prefix_caching,
        **{"kv_sessions": True, "kv_sessions_prompts": True, **settings},
    )


def states(scheduler: Any) -> list[tuple[int, bool]]:
    """Lengths of the states that are kept, and whether each is a prompt state."""
    return sorted((one.num_tokens, one.is_prompt) for one in index_of(scheduler)._sessions.values())


def sorted_states(index: Any) -> list[Any]:
    return sorted(index._sessions.values(), key=lambda one: one.num_tokens)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_chat_that_leaves_thoughts_out(prefix_caching: bool) -> None:
    """Each turn starts from the state before the answer of the one before, as far as that goes."""
    scheduler = thinking(prefix_caching)
    index, history, begins = index_of(scheduler), LONG, []
    for _ in range(3):
        one = add(scheduler, history, max_tokens=9, hasher=HASHER, kv_session="chat")
        output = scheduler.schedule()
        begins.append(output.scheduled_new_reqs[0].num_computed_tokens)
        finish_step(scheduler, output)
        finish(scheduler, one)
        history = [*history, *one.output_token_ids[-2:], *[900 + len(begins)] * 100]
    # A snapshot may leave out fewer tokens than the state before the answer.
    assert begins == ([0, 112, 208] if prefix_caching else [0, STOP, 192])
    kept = [(96, True), (128, False), (192, True), (230, False), (304, True), (332, False)]
    assert states(scheduler) == kept
    assert index.counters.misses == {"no_session": 1}
    prompts = [one for one in index._sessions.values() if one.is_prompt]
    prompts.sort(key=lambda one: one.num_tokens)
    assert [one.continued for one in prompts] == [True, True, False]
    answers = [one for one in sorted_states(index) if not one.is_prompt]
    assert [one.continued for one in answers] == [True, True, False]
    (last,) = index._by_name.values()
    assert index.parts(last) == [last, prompts[-1]]
    assert index.counters.hits == ({} if prefix_caching else {"memory": 2})
    scheduler.shutdown()


def test_a_turn_that_goes_on_from_an_answer_keeps_no_prompt_state() -> None:
    """Its prompt has the thoughts; what leaves them out goes on from the earlier prompt state."""
    scheduler = thinking(prefix_caching=False)
    index = index_of(scheduler)
    history = ask(scheduler, LONG, max_tokens=9)
    ask(scheduler, [*history, *[7] * 100], max_tokens=9)
    kept = states(scheduler)
    assert kept == [(96, True), (128, False), (237, False)]
    first, answer, last = sorted_states(index)
    assert answer.continued and not first.continued and not last.continued
    assert answer.behind == last.behind == first.id
    ask(scheduler, [*LONG, 5, *[8] * 100], max_tokens=9)
    assert index.counters.hits == {"memory": 2} and index.counters.hit_tokens == 128 + STOP
    assert answer.continued and last.continued, "other answers to the prompt"
    scheduler.shutdown()


@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        (LONG[:31], {}),
        (LONG, {"max_tokens": 1}),
        (LONG, {"kv_session": "chat", "kv_session_release": True}),
    ],
)
def test_requests_without_a_prompt_state(prompt: list[int], more: dict[str, Any]) -> None:
    """One is too short, no chat goes on from beam search, and one lets its name go."""
    scheduler = thinking()
    ask(scheduler, prompt, **more)
    assert not [one for one in states(scheduler) if one[1]]
    scheduler.shutdown()


def test_prompt_states_are_for_models_that_think() -> None:
    for settings, wanted in (
        ({}, False),
        ({"reasoning_parser": "qwen3"}, True),
        ({"reasoning_parser": "qwen3", "kv_sessions_prompts": False}, False),
    ):
        scheduler = make_scheduler(KVPolicyScheduler, 80, kv_sessions=True, **settings)
        ask(scheduler, LONG)
        assert ((STOP, True) in states(scheduler)) is wanted
        scheduler.shutdown()


def test_the_same_prompt_again_and_an_abort() -> None:
    """A second answer to a prompt starts from its prompt state, which both are behind."""
    scheduler = thinking(prefix_caching=False)
    index = index_of(scheduler)
    ask(scheduler, LONG, max_tokens=4)
    one = add(scheduler, LONG, max_tokens=30)
    for _ in range(6):
        finish_step(scheduler, scheduler.schedule())
    scheduler.finish_requests([one.request_id], RequestStatus.FINISHED_ABORTED)
    first, *answers = sorted_states(index)
    assert index.counters.hits == {"memory": 1} and first.is_prompt and len(answers) == 2
    assert {answer.behind for answer in answers} == {first.id} and not first.continued
    assert answers[0].continued
    ask(scheduler, LONG, max_tokens=4)
    assert not answers[0].continued, "it is an answer again"
    one = add(scheduler, [*LONG, *[900] * 100], max_tokens=30)
    while one.num_output_tokens < 3:
        finish_step(scheduler, scheduler.schedule())
    scheduler.finish_requests([one.request_id], RequestStatus.FINISHED_ABORTED)
    assert (192, True) in states(scheduler) and not first.continued
    assert not scheduler.sessions.origins
    scheduler.shutdown()


def test_a_name_after_a_prompt_that_was_read_anew(tmp_path: Path) -> None:
    """Its file took too long; the answer, which ends by a stop string, continues the named one."""
    scheduler = in_folder(tmp_path)
    index = index_of(scheduler)
    history = ask(scheduler, PROMPT, kv_session="chat")
    (first,) = index._sessions.values()
    index.rest(first, time.time())
    for _ in range(2):
        one = add(scheduler, [*history, 7, 8], max_tokens=30, kv_session="chat")
        while one.num_output_tokens < 4:
            finish_step(scheduler, scheduler.schedule())
        scheduler.finish_requests([one.request_id], RequestStatus.FINISHED_ABORTED)
        finish_step(scheduler, scheduler.schedule())
        history = [*one.all_token_ids]
        (named,) = index._by_name.values()
    assert index.counters.misses == {"no_session": 1, "diverged": 1}
    assert index.counters.hits == {"memory": 1}
    assert named.num_tokens == len(PROMPT) + 3 + 2 + 4 - 1, "the turn that the last one continues"
    scheduler.shutdown()


def test_a_next_turn_that_already_waits_starts_from_memory(scheduler: Any) -> None:
    """Its state is copied in the step that it waits for."""
    one = add(scheduler, PROMPT)
    while not one.is_finished():
        finish_step(scheduler, scheduler.schedule())
    finish(scheduler, add(scheduler, [*one.all_token_ids, 5]))
    assert index_of(scheduler).counters.hits == {"memory": 1}


def test_pages_that_a_step_fills_from_a_snapshot_are_not_kept() -> None:
    """The snapshot ends where the prompt state would; workers fill the pages after they save."""
    scheduler = thinking()
    for _ in range(2):
        finish(scheduler, add(scheduler, LONG[:112], hasher=HASHER))
        kept = states(scheduler)
        index_of(scheduler).clear()
    assert scheduler.snapshot_counters.hits == 1 and (STOP, True) not in kept
    scheduler.shutdown()


def test_a_session_that_a_lost_snapshot_covered_is_found_again() -> None:
    """A waiting request's snapshot may make room for another request."""
    scheduler = make_scheduler(
        KVPolicyScheduler, num_pages=80, enable_prefix_caching=True, kv_sessions=True
    )
    text = [*LONG[:30], 7, 7, 7]
    ask(scheduler, [*text[:32], *[9] * 8], max_tokens=1, hasher=HASHER)  # a snapshot, no session
    assert ask(scheduler, text[:30], hasher=HASHER) == text
    store, index = scheduler._snapshots, index_of(scheduler)
    assert states(scheduler) == [(32, False)]
    before = add(scheduler, [3] * 400, max_tokens=1)
    one = add(scheduler, [*text, *[5] * 20], hasher=HASHER)
    output = scheduler.schedule()  # 4 tokens of the budget are left, which is no stride
    assert list(output.num_scheduled_tokens) == [before.request_id]
    assert one.request_id in scheduler.sessions._covered
    finish_step(scheduler, output)
    store.clear()
    scheduler.finish_requests([before.request_id], RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {one.request_id: 53 - 32}
    assert [command.op for command in output.sessions] == ["restore"]
    assert index.counters.hits == {"memory": 1} and not scheduler.snapshot_counters.hits
    scheduler.shutdown()


def test_a_request_without_recall_has_no_evicted_units() -> None:
    """Its session is its pages, also in an engine whose other requests recall."""
    settings = {"name": "sink", "budget": 64, "unit": 16, "prefill_stride": 16, "recall": 2}
    engine = compiled(resolve({**settings, "recall_store": 640}, block_size=16))
    made: Any = SchedulerSessions.__new__(SchedulerSessions)
    made._page_bytes, made._chunk_bytes = 1000, 7
    with_recall = made._state_bytes(engine, 5000, 6)
    assert with_recall > 6000
    without = PerRequest(engine).schedule({"kv_recall": 0})
    assert without.evicted(np.asarray(5000)) > 300
    assert made._state_bytes(without, 5000, 6) == 6000
