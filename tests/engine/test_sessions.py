# SPDX-License-Identifier: Apache-2.0
"""Sessions on the real engine: byte-equal to a stream that was never interrupted.

The uninterrupted stream is vLLM's own: a streaming-input request, which stays in the engine between
turns and keeps its pages. No session code runs for it.
"""

import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.chats import (
    ANSWER,
    NEW,
    ask,
    chat,
    flush,
    index_of,
    params,
    says,
    uninterrupted,
    wait_for_files,
)
from tests.engine.pool import EnginePool, generated, pool_usage
from tests.engine.test_families import random_tokens
from tests.engine.test_latent import V2, experts_in_one_group
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.recurrent import RECURRENT, write_recurrent
from tests.sessions.held import held_in
from vllm_cascade.sessions import files, tiers
from vllm_cascade.sessions.folder import Folder
from vllm_cascade.sessions.session import Command
from vllm_cascade.sessions.tiers import WorkerSessions

__all__ = ["experts_in_one_group"]  # a fixture
PARKED, REQUESTS, AT_ONCE = 1000, 208, 16
SESSION = 198_912
"""Bytes of a session of one page."""
NEXT = list(range(1, 40))
"""What a user says next, where it does not matter."""

CASES: dict[str, dict[str, Any]] = {
    "cascade": {"name": "cascade", "budget": 128, "prefill_stride": 64},
    "cascade-heads": {
        "name": "cascade",
        "budget": 96,
        "prefill_stride": 64,
        "num_subcaches": 2,
        "head_policy": "per_kv_head",
        "overflow": 5,
    },
    "sink": {"name": "sink", "budget": 96, "prefill_stride": 64},
    "recall": {
        "name": "sink",
        "budget": 96,
        "prefill_stride": 64,
        "unit": 16,
        "recall": 3,
        "recall_store": 256,
    },
    "recall-heads": {
        "name": "cascade",
        "budget": 128,
        "num_subcaches": 2,
        "prefill_stride": 64,
        "unit": 16,
        "recall": 4,
        "head_policy": "per_kv_head",
    },
    "window": {"name": "window", "budget": 96, "prefill_stride": 64},
    "beehive": {"name": "beehive", "budget": 100, "prefill_stride": 64},
    "lazy": {"name": "lazy", "budget": 96, "overflow": 24, "prefill_stride": 64},
    "h2o": {"name": "h2o", "budget": 100, "prefill_stride": 64, "normalise": True},
    "dgc": {"name": "dgc", "budget": 160, "prefill_stride": 64},
    "recall-8-bits": {
        "name": "sink",
        "budget": 96,
        "prefill_stride": 64,
        "unit": 16,
        "recall": 3,
        "recall_store": 256,
        "recall_rows": "int8",
    },
    "units": {"name": "cascade", "budget": 128, "prefill_stride": 64, "unit": 8},
    "random": {"name": "random", "budget": 96, "prefill_stride": 64},
    **{
        f"{name}-heads": {
            "name": name,
            "budget": 96,
            "prefill_stride": 64,
            "head_policy": "per_kv_head",
        }
        for name in ("random", "beehive", "lazy", "h2o", "dgc")
    },
    "dgc-cluster": {"name": "dgc", "budget": 96, "prefill_stride": 64, "importance": "cluster"},
    "recall-8-bits-heads": {
        "name": "h2o",
        "budget": 96,
        "prefill_stride": 64,
        "unit": 8,
        "recall": 3,
        "recall_rows": "int8",
        "head_policy": "per_kv_head",
    },
}
OFTEN = ("cascade-heads", "recall-heads", "h2o", "dgc", "recall-8-bits", "units")
"""Cases that are not slow tests. Tests of folders, ranks and drafts have others, too."""


def engine(
    pool: EnginePool, policy: dict[str, Any], folder: str | None = None, **kwargs: Any
) -> Any:
    """An engine that keeps sessions, also in ``folder``."""
    config: dict[str, Any] = {"kv_policy": {"recall": 0, **policy}, "kv_sessions": True}
    if folder is not None:
        config["kv_sessions_dir"] = folder
    for key in [key for key in kwargs if key.startswith("kv_sessions")]:
        config[key] = kwargs.pop(key)
    settings = {"max_model_len": 4096, "max_num_batched_tokens": 256, "additional_config": config}
    return pool.get(policy, **{**settings, **kwargs})


def check_chat(llm: Any, tokens: list[int], turns: int = 4) -> None:
    """A chat of separate requests is byte-equal to the uninterrupted one."""
    index = index_of(llm)
    truth = uninterrupted(llm, tokens, turns)
    assert len(index) == 0 and pool_usage(llm) == 0.0
    answers = chat(llm, tokens, turns)
    assert [answer[0] for answer in answers] == [answer[0] for answer in truth]
    assert [answer[1] for answer in answers] == [answer[1] for answer in truth]
    flush(llm)
    assert index.counters.hits == {"memory": turns - 1} and len(index) == turns
    assert index.counters.hit_tokens == sum(n * (NEW + ANSWER) - 1 for n in range(1, turns))
    held = llm.collective_rpc(held_in)
    assert min(held) > 0 and sum(held) <= index.used["memory"] and pool_usage(llm) == 0.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in CASES]
)
def test_a_resumed_chat_is_the_uninterrupted_one(
    name: str, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    check_chat(engine(engine_pool, CASES[name]), book_tokens)


@pytest.mark.parametrize(
    "cache_dtype", [pytest.param("fp8", marks=pytest.mark.slow), "int8_per_token_head"]
)
def test_quantised_rows(cache_dtype: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    llm = engine(engine_pool, CASES["recall"], kv_cache_dtype=cache_dtype)
    check_chat(llm, book_tokens, turns=4)


def of_family(family: str, folder: Path) -> dict[str, Any]:
    """Settings of an engine of a small random model."""
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 2048}
    if family == "deepseek-v2":
        path = write_family(folder, V2)
    elif family in FAMILIES:
        path = write_family(folder, FAMILIES[family])
    else:
        path, recurrent = write_recurrent(folder, family), RECURRENT[family]
        settings |= {"dtype": recurrent.dtype, **recurrent.engine}
    return {"model": path, **settings}


@pytest.mark.parametrize("family", ["gemma3", "granite4", "deepseek-v2"])
def test_window_layers_recurrent_states_and_latent_rows(
    family: str, engine_pool: EnginePool, tmp_path: Path
) -> None:
    policy = {"name": "cascade", "budget": 64, "prefill_stride": 32}
    settings = of_family(family, tmp_path)
    check_chat(engine(engine_pool, policy, **settings), random_tokens(5, 4000), 4)
    engine_pool.close()


def test_200_parked_sessions(
    engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path
) -> None:
    """Chats at random, most of them on disk: what is held stays within both bounds."""
    mib, rng = 2**20, random.Random(3)
    llm = engine(
        engine_pool,
        {"name": "sink", "budget": 28, "prefill_stride": 32},
        str(tmp_path),
        kv_sessions_memory=15 / 1024,
        kv_sessions_disk=30 / 1024,
        max_num_batched_tokens=512,
    )
    index = index_of(llm)

    def ask_all(prompts: list[list[int]]) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params(4), use_tqdm=False)
        (held,) = llm.collective_rpc(held_in)
        entries, _ = Folder(tmp_path).entries()
        files = sum(entry.num_bytes for entry in entries)
        assert held <= index.used["memory"] <= 15 * mib and index.used["disk"] <= 30 * mib
        assert files <= 30 * mib * 1.02, "headers of files are not counted"
        return outputs

    chats = [book_tokens[40 * n : 40 * n + 36] for n in range(200)]
    for n in range(0, 200, 20):
        for m, output in enumerate(ask_all(chats[n : n + 20]), n):
            chats[m] = chats[m] + list(output.outputs[0].token_ids)
    turns = [[len(chat) - 1] for chat in chats]
    for _ in range(12):
        chosen = rng.sample(range(200), 8)
        prompts = [chats[n] + book_tokens[rng.randrange(9000) :][:9] for n in chosen]
        hits = sum(index.counters.hits.values())
        for n, prompt, output in zip(chosen, prompts, ask_all(prompts), strict=True):
            # An earlier turn serves where a later one found no room or was not written in time; 32:
            # a snapshot of the prompt does.
            assert output.num_cached_tokens in (0, 32, *turns[n])
            hits += output.num_cached_tokens in turns[n]
            chats[n] = prompt + list(output.outputs[0].token_ids)
            turns[n].append(len(chats[n]) - 1)
        assert sum(index.counters.hits.values()) == hits
    print(index.counters, index.held, index.used)
    assert min(index.counters.hits[tier] for tier in ("memory", "disk")) > 0
    assert index.counters.lost["evicted"] > 0 and pool_usage(llm) == 0.0
    assert not llm.llm_engine.engine_core.engine_core.scheduler.sessions.origins


@pytest.mark.slow
def test_1000_parked_sessions(
    engine_pool: EnginePool,
    book_tokens: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """208 requests at random, 16 at once: each finds its session, and waits for no other's file.

    The folder holds every chat's last turn; memory holds a twentieth. Of each 16 one file's read
    does not return until the other 15 requests have ended.
    """
    mib, rng = 2**20, random.Random(4)
    memory, disk = PARKED // 20 * SESSION, (PARKED + 20) * SESSION
    llm = engine(
        engine_pool,
        {"name": "sink", "budget": 28, "prefill_stride": 32},
        str(tmp_path),
        kv_sessions_memory=memory / 2**30,
        kv_sessions_disk=disk / 2**30,
        max_num_batched_tokens=512,
        max_num_seqs=AT_ONCE,
    )
    index, core = index_of(llm), llm.llm_engine
    held, gate = [""], threading.Event()
    gate.set()
    read = WorkerSessions._read

    def slow(self: WorkerSessions, command: Command, number: int) -> str:
        if command.id == held[0]:
            assert gate.wait(120)
        return read(self, command, number)

    monkeypatch.setattr(WorkerSessions, "_read", slow)

    def check_bounds() -> None:
        (bytes_held,) = llm.collective_rpc(held_in)
        assert bytes_held <= index.used["memory"] <= memory and index.used["disk"] <= disk
        entries, bad = Folder(tmp_path).entries()
        assert not bad and sum(entry.num_bytes for entry in entries) <= disk * 1.05

    def settle() -> None:
        """Until the folder is as the index says."""
        flush(llm)
        sessions = index._sessions.values()
        wanted = {one.id for one in sessions if one.on_disk or one.writing}
        deadline = time.monotonic() + 60
        while {path.name[:32] for path in tmp_path.glob("[!.]*.session")} != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ask_all(chosen: list[int], prompts: list[list[int]], kept_back: int | None) -> None:
        for n, prompt in zip(chosen, prompts, strict=True):
            core.add_request(str(n), {"prompt_token_ids": prompt}, params(4))
        ended: dict[str, Any] = {}
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    ended[output.request_id] = output
            if kept_back is not None and len(ended) == len(chosen) - 1:
                assert str(kept_back) not in ended
                gate.set()
            assert gate.is_set() or len(ended) < len(chosen)
        for n, prompt in zip(chosen, prompts, strict=True):
            output = ended[str(n)]
            known = len(chats[n]) - 1 if chats[n] else 0
            assert output.num_cached_tokens == known, (n, known)
            chats[n] = prompt + list(output.outputs[0].token_ids)

    chats: list[list[int]] = [[] for _ in range(PARKED)]
    for begin in range(0, PARKED, 20):
        chosen = list(range(begin, begin + 20))
        ask_all(chosen, [book_tokens[40 * n : 40 * n + 30] for n in chosen], None)
        settle()
    check_bounds()
    assert len(index) == PARKED == index.counters.kept
    assert len(list(tmp_path.glob("[!.]*.session"))) == PARKED
    most_waited = 0
    for _ in range(REQUESTS // AT_ONCE):
        chosen = rng.sample(range(PARKED), AT_ONCE)
        prompts = [chats[n] + book_tokens[rng.randrange(9000) :][:9] for n in chosen]
        on_disk = [n for n in chosen if not last_session(index, chats[n]).in_memory]
        held[0] = last_session(index, chats[on_disk[0]]).id
        gate.clear()
        try:
            ask_all(chosen, prompts, on_disk[0])
        finally:
            gate.set()
        most_waited = max(most_waited, len(on_disk))
        settle()
        check_bounds()
    print(index.counters, index.held, {k: v / mib for k, v in index.used.items()})
    requests = REQUESTS // AT_ONCE * AT_ONCE
    assert sum(index.counters.hits.values()) == requests
    assert index.counters.hits["disk"] > requests // 2 and index.counters.hits["memory"] > 0
    assert index.counters.misses["no_session"] == PARKED and most_waited > 2
    assert not set(index.counters.lost) & {"damaged", "missing", "foreign", "io", "unwritten"}
    assert pool_usage(llm) == 0.0
    assert not core.engine_core.engine_core.scheduler.sessions.origins
    engine_pool.close()


def last_session(index: Any, chat: list[int]) -> Any:
    """The session of a chat's last turn."""
    (session,) = {
        found
        for context in index._lengths
        if (found := index.find(context, chat, len(chat) - 1, time.time()))
    }
    assert session.num_tokens == len(chat) - 1
    return session


def pinned_as(index: Any, name: str) -> Any:
    """The session that a request without salt and adapter pinned under a name."""
    found = [one for key, one in index._by_name.items() if key.endswith(f" {name}")]
    return found[0] if found else None


def test_a_name_and_a_prompt_that_does_not_begin_with_it(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool, CASES["cascade"])
    index, named = index_of(llm), {"extra_args": {"kv_session": "mine"}}
    first = book_tokens[30000:30100]
    _, (answer, _) = ask(llm, first, **named)
    session = pinned_as(index, "mine")
    assert session is not None and session.num_tokens == len(first) + ANSWER - 1
    other = book_tokens[31000:31200]
    cached, found = ask(llm, other, **named)
    assert cached == 0 and index.counters.lost["name_diverged"] == 1
    plain = {"prompt_token_ids": other, "cache_salt": "nothing is found"}
    (truth,) = llm.generate([plain], params(), use_tqdm=False)
    assert found == generated(truth)
    assert pinned_as(index, "mine") is not session
    cached, _ = ask(llm, [*first, *answer, *NEXT], **named)
    assert cached == session.num_tokens, "it is found by its tokens, not by its name"
    ask(llm, other[:50], extra_args={"kv_session": "mine", "kv_session_release": True})
    assert pinned_as(index, "mine") is None


@pytest.mark.parametrize(
    "name",
    [
        "cascade",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("recall", "recall-heads", "recall-8-bits", "h2o-heads", "dgc")
        ),
    ],
)
def test_a_new_engine_on_the_same_folder(
    name: str, engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path
) -> None:
    check_restart(engine_pool, CASES[name], book_tokens, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["fp8", "int8_per_token_head"])
def test_quantised_rows_on_a_new_engine(
    cache_dtype: str, engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path
) -> None:
    settings = {"kv_cache_dtype": cache_dtype}
    check_restart(engine_pool, CASES["recall"], book_tokens, tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "granite4", "deepseek-v2"])
def test_families_on_a_new_engine(family: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    policy = {"name": "cascade", "budget": 64, "prefill_stride": 32}
    settings = of_family(family, tmp_path)
    check_restart(engine_pool, policy, random_tokens(5, 4000), tmp_path / "kept", **settings)


def check_restart(
    pool: EnginePool, policy: dict[str, Any], tokens: list[int], folder: Path, **settings: Any
) -> None:
    """After a restart the file is read before the next turn's first step."""
    llm = engine(pool, policy, str(folder), **settings)
    truth = uninterrupted(llm, tokens, 5)
    answers = chat(llm, tokens, 4, between=lambda: time.sleep(0.2))
    flush(llm)
    wait_for_files(folder, 4)
    pool.close()
    llm = engine(pool, policy, str(folder), **settings)
    index = index_of(llm)
    assert index.held == {"memory": 0, "disk": 4}
    history = [token for n in range(4) for token in says(tokens, n) + answers[n][0]]
    cached, last = ask(llm, history + says(tokens, 4))
    assert cached == len(history) - 1 and index.counters.hits == {"disk": 1}
    assert [*answers, last] == truth and pool_usage(llm) == 0.0
    pool.close()


def test_the_flag_changes_no_first_turn(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Without it nothing of sessions is there; with it, what finds no session is byte-equal."""
    prompts = [book_tokens[900 * n : 900 * n + 150] for n in range(4)]
    found = []
    for keeps in (False, True):
        policy, settings = CASES["recall"], {"max_model_len": 4096, "max_num_batched_tokens": 256}
        llm = engine(engine_pool, policy) if keeps else engine_pool.get(policy, **settings)
        core = llm.llm_engine.engine_core.engine_core
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found.append([generated(one) for one in llm.generate(inputs, params(), use_tqdm=False)])
        assert (core.scheduler.sessions is not None) == keeps
        worker = core.model_executor.driver_worker.worker
        assert (worker._sessions is not None) == keeps
        engine_pool.close()
    assert found[0] == found[1]


def test_damaged_files_and_another_policy(
    engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path
) -> None:
    """An altered file and one that is cut short are read as if they were not there."""
    policy, settings = CASES["cascade"], str(tmp_path)
    llm = engine(engine_pool, policy, settings)
    chats = [book_tokens[700 * n : 700 * n + 150] for n in range(3)]
    for n, prompt in enumerate(chats):
        chats[n] = [*prompt, *ask(llm, prompt)[1][0], *NEXT]
        flush(llm)
        wait_for_files(tmp_path, n + 1)
    engine_pool.close()
    files = sorted(tmp_path.glob("[!.]*.session"), key=lambda path: path.stat().st_mtime)
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 4
    files[0].write_bytes(content)
    files[1].write_bytes(content[: len(content) // 2])

    llm = engine(engine_pool, policy, settings)
    index = index_of(llm)
    assert index.held["disk"] == 2 and index.counters.lost == {"damaged": 1}
    for n, prompt in enumerate(chats):
        cached, found = ask(llm, prompt)
        assert cached == (len(prompt) - len(NEXT) - 1 if n == 2 else 0)
        if n < 2:
            fresh = {"prompt_token_ids": prompt, "cache_salt": "nothing is found"}
            (truth,) = llm.generate([fresh], params(), use_tqdm=False)
            assert found == generated(truth)
    assert index.counters.lost["damaged"] == 2 and index.counters.hits == {"disk": 1}
    assert len(list((tmp_path / "damaged").iterdir())) == 2
    engine_pool.close()

    llm = engine(engine_pool, {**policy, "budget": 96}, settings)
    index = index_of(llm)
    assert index.counters.lost["foreign"] == len(index) >= 1
    assert ask(llm, chats[2])[0] == 0
    engine_pool.close()


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_folder_that_cannot_be_written(
    kind: str,
    engine_pool: EnginePool,
    book_tokens: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sessions stay in memory, one line names the fix, and files are written again afterwards."""
    llm = engine(engine_pool, CASES["cascade"], str(tmp_path))
    index, said = index_of(llm), []
    monkeypatch.setattr(tiers.logger, "warning", lambda text, *args: said.append(text % args))

    def fail(*args: Any) -> int:
        number = errno.ENOSPC if kind == "full" else errno.EROFS
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(files.os, "fsync" if kind == "full" else "open", fail)
        truth = uninterrupted(llm, book_tokens, 3)
        assert chat(llm, book_tokens, 3) == truth
        deadline = time.monotonic() + 20
        while index.counters.lost["unwritten"] < 3:
            assert time.monotonic() < deadline
            ask(llm, [5], max_tokens=1, extra_args={"kv_session": "x", "kv_session_release": True})
    assert index.counters.hits == {"memory": 2} and not list(tmp_path.glob("*.session"))
    assert index.used["disk"] == 0 and index.held["memory"] == 3
    (line,) = said
    assert "free disk space, lower --kv-sessions-disk, or make the folder writable" in line
    assert os.strerror(errno.ENOSPC if kind == "full" else errno.EROFS) in line
    ask(llm, book_tokens[9000:9100])
    flush(llm)
    wait_for_files(tmp_path, 1)
    engine_pool.close()


def test_another_salt_finds_nothing(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """A session is found under its own cache salt only."""
    llm = engine(engine_pool, CASES["sink"])

    def cached(prompt: list[int], **salt: str) -> int:
        (output,) = llm.generate([{"prompt_token_ids": prompt, **salt}], params(), use_tqdm=False)
        history[:] = prompt + list(output.outputs[0].token_ids)
        return output.num_cached_tokens

    history: list[int] = []
    assert cached(says(book_tokens, 0), cache_salt="ours") == 0
    longer = history + says(book_tokens, 1)
    assert cached(longer) == 0
    assert cached(longer, cache_salt="theirs") == 0
    assert cached(longer, cache_salt="ours") == len(longer) - NEW - 1


def test_an_answer_that_the_template_changes(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """The prompt's snapshot serves, and it is counted."""
    llm = engine(engine_pool, CASES["sink"])
    index, prompt = index_of(llm), book_tokens[60000:60150]
    before = index.counters.misses["diverged"]
    _, (answer, _) = ask(llm, prompt)
    cached, _ = ask(llm, [*prompt, *answer[5:], *NEXT])
    assert cached == 128 and index.counters.misses["diverged"] == before + 1
    cached, _ = ask(llm, [*prompt, *answer, *NEXT])
    assert cached == len(prompt) + ANSWER - 1
    assert index.counters.misses["diverged"] == before + 1


@pytest.mark.parametrize(
    "name", ["recall-heads", *(pytest.param(n, marks=pytest.mark.slow) for n in ("h2o", "cascade"))]
)
def test_a_chat_that_leaves_thoughts_out(
    name: str, engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path
) -> None:
    """Turns start from states before answers, also after a restart, and equal whole readings."""
    policy, settings = CASES[name], {"kv_sessions_prompts": True, "enable_prefix_caching": False}
    llm = engine(engine_pool, policy, str(tmp_path), **settings)
    history, known = book_tokens[70000:70300], 0
    for turn in range(4):
        if turn == 2:
            flush(llm)
            wait_for_files(tmp_path, 2 * turn)
            engine_pool.close()
            llm = engine(engine_pool, policy, str(tmp_path), **settings)
        cached, (answer, logprobs) = ask(llm, history, extra_args={"kv_session": "mine"})
        assert cached == known
        plain = {"prompt_token_ids": history, "cache_salt": f"nothing is found {turn}"}
        (truth,) = llm.generate([plain], params(), use_tqdm=False)
        assert (answer, logprobs) == generated(truth), turn
        known = (len(history) - 16) // 64 * 64
        history = [*history, *answer[25:], *book_tokens[71000 + turn * 200 :][:150]]
    index = index_of(llm)
    assert index.counters.hits == {"disk": 1, "memory": 1} and pool_usage(llm) == 0.0
    assert pinned_as(index, "mine").behind in index._sessions
    engine_pool.close()


def test_invalid_names_are_refused(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    llm = engine(engine_pool, CASES["sink"])
    invalid: list[str | int] = ["", 7, "a" * 257, "\ud800"]
    for arguments in (*({"kv_session": name} for name in invalid), {"kv_session_release": True}):
        with pytest.raises(VLLMValidationError, match="must be a name of 1 to 256 characters"):
            ask(llm, book_tokens[:20], extra_args=arguments)
    plain = engine_pool.get(CASES["sink"], max_model_len=4096)
    with pytest.raises(VLLMValidationError, match="keeps no sessions; start it with --kv-sessions"):
        ask(plain, book_tokens[:20], extra_args={"kv_session": "mine"})
