# SPDX-License-Identifier: Apache-2.0
"""What a new server takes of a folder: only states of an engine like itself; it says what else."""

import errno
import json
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, UniformTypeKVCacheSpecs

from tests.conftest import MODEL
from tests.oracle.random_models import write_llama
from tests.sessions.test_files import ENGINE, SHAPE, header_of, pin, pools, session, tensors
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine import session_header, sessions
from vllm_cascade.engine.session_header import (
    SAMPLE_BYTES,
    digest,
    engine_header,
    layout_of,
    policy_settings,
    weights_of,
)
from vllm_cascade.engine.sessions import SchedulerSessions
from vllm_cascade.policies.registry import resolve
from vllm_cascade.recall.stores import Stores
from vllm_cascade.sessions import files, names, threads
from vllm_cascade.sessions.copies import Copies
from vllm_cascade.sessions.files import FOREIGN, file_name, write
from vllm_cascade.sessions.folder import DAMAGED, Folder
from vllm_cascade.sessions.index import SessionIndex
from vllm_cascade.sessions.names import NamesWriter
from vllm_cascade.sessions.session import Report, Session
from vllm_cascade.sessions.tiers import WorkerSessions


def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **bounds: int
) -> tuple[SchedulerSessions, list[str]]:
    """The sessions of a server that starts on a folder, and what it warns of."""
    said: list[str] = []
    monkeypatch.setattr(sessions.logger, "warning", lambda text, *args: said.append(text % args))
    made: Any = SchedulerSessions.__new__(SchedulerSessions)
    settings = {"memory_bytes": 10**6, "disk_bytes": 10**6, **bounds}
    made.index = SessionIndex(**settings, header=ENGINE)
    made.folder, made._foreign = Folder(folder), {}
    made._keeper, made._listed = ThreadPoolExecutor(1), Counter()
    made._names = NamesWriter(made.index, made.folder)
    made.folder.open()
    made._scan(made.folder, made._names)
    made.folder.close()
    return made, said


def scanned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **bounds: int
) -> tuple[SessionIndex, list[str]]:
    made, said = started(folder, monkeypatch, **bounds)
    made._names.close()
    made._keeper.shutdown()
    return made.index, said


def put(folder: Path, num: int, used: float, **header: str) -> Session:
    """A file of a session of 100 bytes."""
    one = session(num)
    path = folder / file_name(one.id, 0, 1)
    write(path, header_of(one, rank="0of1", **header), tensors())
    os.utime(path, (used, used))
    return one


def left(folder: Path) -> set[str]:
    """Ids of the sessions whose files are there."""
    return {path.name.split(".")[0] for path in folder.glob("*.session")}


@pytest.mark.parametrize("key", FOREIGN)
def test_another_engines_sessions(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay where they are, are counted, and one line names the difference and the fix."""
    for n in range(3):
        one = session(n)
        header = header_of(one, rank="0of1", **({key: "another"} if n else {}))
        write(tmp_path / file_name(one.id, 0, 1), header, tensors())
    index, said = scanned(tmp_path, monkeypatch)
    assert index.held == {"memory": 0, "disk": 3} and index.counters.lost == {"foreign": 2}
    assert index.used["disk"] == 300 and sum(one.unusable for one in index._sessions.values()) == 2
    (line,) = said
    assert f"2 sessions in {tmp_path} belong to an engine with another {key}" in line
    assert "give each engine a --kv-sessions-dir of its own" in line
    assert len(list(tmp_path.glob("*.session"))) == 3


def test_names_come_from_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from sessions' files, which hold what was true when they were written."""
    first, second, third = (session(n) for n in range(3))
    for one in (first, second, third):
        write(tmp_path / file_name(one.id, 0, 1), header_of(one, rank="0of1"), tensors())
    pin(tmp_path, {"scope a": second.id, "scope b": "a session that is gone"})
    index, said = scanned(tmp_path, monkeypatch)
    assert sum(not one.names for one in index._sessions.values()) == 2 and not said
    pinned = index.named("scope a")
    assert pinned is not None and pinned.id == second.id and index.named("scope b") is None
    (tmp_path / "names.json").write_text("{half a fi")
    index, said = scanned(tmp_path, monkeypatch)
    assert len(index) == 3 and index.named("scope a") is None
    assert "names.json: " in said[0] and "no session is pinned" in said[0]


def test_a_start_bounds_what_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a smaller bound: the most recently used ones keep their names."""
    ids = [put(tmp_path, n, 10.0 + n).id for n in range(3)]
    pin(tmp_path, {f"scope {n}": id_ for n, id_ in enumerate(ids)})
    made, _ = started(tmp_path, monkeypatch, disk_bytes=400)
    assert sorted(made.index.names()) == ["scope 1", "scope 2"] and made.index.held["disk"] == 3
    made._keeper.shutdown()


def test_other_engines_sessions_count_and_leave_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's bound holds over upgrades; evicted units go with the last that lists them."""
    listed = [["aa.0of1.units", write(tmp_path / "aa.0of1.units", {}, tensors())]]
    old = [put(tmp_path, n, 10.0 + n, vllm="old", pieces=json.dumps(listed)) for n in range(3)]
    own = put(tmp_path, 9, 1.0)
    made, _ = started(tmp_path, monkeypatch, disk_bytes=350)
    index = made.index
    assert index.used["disk"] == 300 and left(tmp_path) == {own.id, old[1].id, old[2].id}
    for n, gone in ((1, {old[1].id}), (2, {old[1].id, old[2].id})):
        assert index.keep("c", [n], 100, pages=(1,), now=20)
        commands = made.take_commands()
        assert [c.op for c in commands] == ["save", "write"], "workers know their own files only"
        made._keeper.submit(lambda: None).result(30)
        assert left(tmp_path) == {own.id, *(one.id for one in old[1:])} - gone
        assert (tmp_path / "aa.0of1.units").exists() == (n == 1)
        index.note(Report(written=[commands[1].id]))
    assert index.used["disk"] == 300 and index.held["disk"] == 3
    assert index.counters.lost == {"foreign": 3, "evicted": 2}
    made._keeper.shutdown()


@pytest.mark.parametrize("other", ["own", "unreadable"])
def test_units_that_another_session_lists_stay(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them it would count as damaged. A file that cannot be read may list any."""
    listed = [["aa.0of1.units", write(tmp_path / "aa.0of1.units", {}, tensors())]]
    pieces = json.dumps(listed)
    put(tmp_path, 0, 10.0, vllm="old", pieces=pieces)
    kept = put(tmp_path, 1, 20.0, pieces=pieces)
    if other == "unreadable":
        plain = files.read_header

        def broken(path: Path) -> Any:
            if path.name.startswith(kept.id):
                raise files.Unusable("io", "Input/output error")
            return plain(path)

        monkeypatch.setattr(files, "read_header", broken)
    made, _ = started(tmp_path, monkeypatch, disk_bytes=250)
    made.index.keep("c", [1], 100, pages=(1,), now=30)
    made.index.keep("c", [2], 100, pages=(1,), now=30)
    made.take_commands()
    made._keeper.submit(lambda: None).result(30)
    assert not made._foreign and (tmp_path / "aa.0of1.units").exists()
    made._keeper.shutdown()


@pytest.mark.parametrize("row_scales", [True, False])
def test_sessions_with_other_drafts_are_foreign(row_scales: bool) -> None:
    """Where drafts' words move the scales of rows, within pages of the same size."""
    policy = resolve({"name": "sink", "budget": 128, "unit": 16}, block_size=16)
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if row_scales else KVQuantMode.NONE
    rows = {"dtype": torch.int8 if row_scales else torch.float16, "kv_quant_mode": mode}
    full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, **rows)
    specs = [KVPolicySpec.from_full(full, policy, drafts) for drafts in (0, 4)]
    assert specs[0].page_size_bytes == specs[1].page_size_bytes
    assert len({digest(layout_of(spec)) for spec in specs}) == 1 + row_scales
    together = [
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec}) for spec in specs
    ]
    assert len({digest(layout_of(spec)) for spec in together}) == 1 + row_scales


@pytest.mark.parametrize(
    ("owner", "work"), [(NamesWriter, "_write"), (SchedulerSessions, "_remove_foreign")]
)
def test_errors_of_its_thread_are_logged(
    owner: type, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 0, 10.0, vllm="old")
    made, _ = started(tmp_path, monkeypatch, disk_bytes=100)
    said: list[str] = []
    monkeypatch.setattr(threads.logger, "exception", lambda text, *_: said.append(text))
    monkeypatch.setattr(owner, work, lambda *_: [][0])
    made.index.keep("c", [1], 100, pages=(1,), now=20, name="n")
    made.take_commands()
    made._names.close()
    made._keeper.shutdown()
    assert set(said) == {"KV sessions: a thread failed"}


def test_names_are_written_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment: they change no more, and a later step tries again."""
    monkeypatch.setattr(names, "PAUSE_SECONDS", 0.0)
    made, said = started(tmp_path, monkeypatch)
    monkeypatch.setattr(names.logger, "warning", lambda text, *args: said.append(text % args))
    plain, fails = Folder.write_names, [2]

    def write_names(folder: Folder, content: Any) -> None:
        if fails[0]:
            fails[0] -= 1
            raise OSError(28, "No space left on device")
        plain(folder, content)

    monkeypatch.setattr(Folder, "write_names", write_names)
    made.index.keep("c", [1], 100, pages=(1,), now=20, name="n")
    for _ in range(3):
        made._names.keep()
        made._names._pool.submit(int).result(30)
    assert not fails[0] and len(said) == 1 and "No space left" in said[0]
    assert list(made.folder.names()) == ["n"]
    made._names.close()


def test_a_session_too_large_for_the_memory_leaves_others_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this engine's own: workers remove it, who know which sessions share its units."""
    shared, own = (
        [f"{name}.0of1.units", write(tmp_path / f"{name}.0of1.units", {}, tensors())]
        for name in ("aa", "bb")
    )
    now = time.time()
    fits = put(tmp_path, 1, now, pieces=json.dumps([shared]))
    large = put(tmp_path, 2, now - 400, pieces=json.dumps([shared, own]), num_bytes="150")
    made, _ = started(tmp_path, monkeypatch, memory_bytes=120, ttl=500)
    made.index.expire(now + 200)
    commands = made.take_commands()
    made._keeper.shutdown()
    assert [(c.op, c.id) for c in commands] == [("remove", large.id)]
    worker = WorkerSessions(Copies(pools()), tmp_path, Stores(SHAPE))
    worker.execute(commands)
    worker.close()
    assert left(tmp_path) == {fits.id}
    assert [path.name for path in tmp_path.glob("*.units")] == [shared[0]]


def test_a_smaller_bound_keeps_pinned_sessions_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what fits: a session that does not fit takes no room from others."""
    pinned, older, newer = (put(tmp_path, n, float(n)) for n in (1, 2, 3))
    large = put(tmp_path, 4, 4.0, num_bytes="250")
    pin(tmp_path, {"scope mine": pinned.id})
    index, _ = scanned(tmp_path, monkeypatch, disk_bytes=220)
    assert left(tmp_path) == {pinned.id, newer.id} and index.used["disk"] == 200
    assert older.id not in index._sessions and large.id not in index._sessions
    assert [one.names for one in index._sessions.values()] == [["scope mine"], []]


def test_a_bound_that_the_disk_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "room", lambda _: 3 << 30)
    for bound, warned in ((3 << 30, False), (4 << 30, True)):
        _, said = scanned(tmp_path, monkeypatch, disk_bytes=bound)
        assert bool(said) == warned
    assert "--kv-sessions-disk is 4.00 GiB, but" in said[0] and "room for 3.00 GiB" in said[0]


def test_expired_and_large_sessions_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One too large for the memory counts as long as it is there, and is never read."""
    now = time.time()
    put(tmp_path, 1, now - 1000, vllm="old")
    large, fits = put(tmp_path, 2, now, num_bytes="150"), put(tmp_path, 3, now)
    index, _ = scanned(tmp_path, monkeypatch, memory_bytes=120, ttl=500)
    assert left(tmp_path) == {large.id, fits.id} and index.used["disk"] == 250
    assert index.counters.lost["expired"] == 1
    assert index._sessions[large.id].unusable and not index._sessions[fits.id].unusable


def test_a_read_error_at_start_destroys_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file stays, and so do all evicted units: it may list them."""
    units = tmp_path / "aa.0of1.units"
    one = put(tmp_path, 1, 1.0, pieces=json.dumps([[units.name, write(units, {}, tensors())]]))

    def fail(file: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(files, "_description", fail)
        index, said = scanned(tmp_path, monkeypatch)
    assert left(tmp_path) == {one.id} and units.exists() and len(index) == 0
    assert index.counters.lost == {"io": 1} and "Input/output error" in said[0]
    assert "stays where it is" in said[0]
    index, said = scanned(tmp_path, monkeypatch)
    assert one.id in index._sessions and not said


def test_names_outlive_a_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's, which keeps its name; or their own file's, which is then not replaced."""
    one, other = put(tmp_path, 1, 1.0), put(tmp_path, 2, 2.0)
    pin(tmp_path, {"scope one": one.id, "scope two": other.id})
    for broken, begin in ("read_header", one.id), ("opened", "names"):
        real = getattr(files, broken)

        def fail(path: Path, begin: str = begin, real: Any = real) -> Any:
            if path.name.startswith(begin):
                raise files.Unusable("io", "Input/output error")
            return real(path)

        with monkeypatch.context() as failing:
            failing.setattr(files, broken, fail)
            made, said = started(tmp_path, monkeypatch)
        assert "Check the disk" in said[0]
        if broken == "read_header":
            made.index.release("scope two")
        else:
            made.index._pin(made.index._sessions[one.id], "scope three")
        made.take_commands()
        made._names.close()
        names = json.loads((tmp_path / "names.json").read_text())
        assert names == {"scope one": one.id}


def test_parts_of_a_set_that_a_crash_left_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no damage: the server ended between the files of two ranks."""
    one, two = session(1), session(2)
    write(tmp_path / file_name(one.id, 0, 2), header_of(one, rank="0of2"), tensors())
    for rank in range(2):
        header = header_of(two, rank=f"{rank}of2", stamp=str(rank))
        write(tmp_path / file_name(two.id, rank, 2), header, tensors())
    index, said = scanned(tmp_path, monkeypatch)
    assert not said and not left(tmp_path) and not list((tmp_path / DAMAGED).iterdir())
    assert index.counters.lost == {"incomplete": 3}


def test_damaged_files_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / file_name(put(tmp_path, 1, 1.0).id, 0, 1)
    path.write_bytes(path.read_bytes()[:-9])
    index, said = scanned(tmp_path, monkeypatch)
    assert len(index) == 0 and index.counters.lost == {"damaged": 1}
    (line,) = said
    assert line.startswith(f"KV sessions: {path.name} is damaged (")
    assert line.endswith("its chat is read again. Check the disk, then delete it")
    assert (tmp_path / DAMAGED / path.name).exists() and not path.exists()


def weights(name: Path | str, download_dir: str | None = None) -> list[Any]:
    return weights_of(SimpleNamespace(model=str(name), revision=None), download_dir)  # type: ignore[arg-type]


def test_weights_are_recognised(tmp_path: Path) -> None:
    """One altered byte of a shard that is sampled or not, a longer file and another name."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    (file,) = copy.glob("*.safetensors")
    found, content = [weights(copy)], bytearray(file.read_bytes())
    assert len(found[0]) == 1 and found[0][0][1] == len(content)
    for at in (len(content) // 2 + 7, len(content) // 2 + 7 + SAMPLE_BYTES):
        content[at] ^= 1
        file.write_bytes(content)
        os.utime(file, (1, len(found)))
        found.append(weights(copy))
    file.write_bytes(content + b"x")
    found.append(weights(copy))
    assert len({json.dumps(one) for one in found}) == 4


def test_weights_in_a_download_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM puts the configuration into its usual cache, and weights into ``--download-dir``."""
    said: list[str] = []
    monkeypatch.setattr(session_header.logger, "warning", lambda text, *args: said.append(text))
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--m" / "refs").mkdir()
    (tmp_path / "models--org--m" / "refs" / "main").write_text("a" * 40)
    shard, found = snapshot / "model.safetensors", []
    for content in (b"old", b"new"):
        shard.write_bytes(content)
        found.append(weights("org/m", str(tmp_path)))
    assert found[0] != found[1] and found[0][0][0] == shard.name and not said
    assert weights(shard) == found[1], "a file is a model, too"
    for unknown in ("org/m", "s3://bucket/m", "repo/name:Q4_K_M", tmp_path):
        assert weights(unknown) != weights(unknown), "sessions are found by this engine only"
    assert len(said) == 8 and "no weight files" in said[0]


def test_a_model_under_another_path(tmp_path: Path) -> None:
    """Only what states depend on counts: no path, and no version of transformers."""
    (tmp_path / "linked").symlink_to(MODEL)
    found = []
    for path in (MODEL, tmp_path / "linked"):
        made = EngineArgs(
            model=str(path), additional_config={"kv_policy": {"name": "sink", "budget": 64}}
        ).create_engine_config()
        made.model_config.hf_config.transformers_version = str(path)
        found.append(engine_header(made, SimpleNamespace(kv_cache_groups=[])))  # type: ignore[arg-type]
    assert [header.pop("model_name") for header in found] == [str(MODEL), str(tmp_path / "linked")]
    assert found[0] == found[1]


def test_longrope_has_two_tables(tmp_path: Path) -> None:
    """Which one rotates keys follows from the length that the engine is asked for, too."""
    write_llama(tmp_path, num_layers=1, vocab_size=4096, max_position_embeddings=1024)
    config = json.loads((tmp_path / "config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config["original_max_position_embeddings"] = 512
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {}
    for budget, length in ((640, 512), (640, 1024), (128, 512), (128, 1024)):
        made = EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            max_model_len=length,
            additional_config={"kv_policy": {"name": "sink", "budget": budget}},
        ).create_engine_config()
        caches: Any = SimpleNamespace(kv_cache_groups=[])
        found[budget, length] = engine_header(made, caches)["model"]
    short = found.pop((640, 512))
    assert short != found.pop((640, 1024)) and set(found.values()) == {short}


def test_policies_differ_by_every_setting_that_states_depend_on() -> None:
    base = {"name": "sink", "budget": 128, "prefill_stride": 64, "unit": 16, "recall": 4}

    def settings(**more: Any) -> dict[str, Any]:
        policy = resolve(
            {**base, **more}, max_position=None, max_num_batched_tokens=256, block_size=32
        )
        return policy_settings(policy)

    same = settings()
    assert settings(recall_memory=3.0) == same, "how much memory there is changes no state"
    for more in ({"budget": 96}, {"recall": 3}, {"recall_store": 512}, {"num_sinks": 32},
                 {"prefill_stride": 32}, {"recall_rows": "int8"}, {"name": "window"}):  # fmt: skip
        assert settings(**more) != same, more


def test_sessions_of_another_drafting_model_are_foreign(tmp_path: Path) -> None:
    """Its layers' states are on the same pages as the model's."""
    other = write_llama(
        tmp_path / "other", num_layers=1, vocab_size=4096, max_position_embeddings=1024
    )
    found = []
    for drafts in (None, MODEL, other):
        config = None
        if drafts is not None:
            config = {"method": "draft_model", "model": str(drafts), "num_speculative_tokens": 2}
        made = EngineArgs(
            model=str(MODEL),
            additional_config={"kv_policy": {"name": "sink", "budget": 64}},
            speculative_config=config,
        ).create_engine_config()
        caches: Any = SimpleNamespace(kv_cache_groups=[])
        header = engine_header(made, caches)
        assert header == engine_header(made, caches)
        found.append(header)
    assert len({header.pop("model") for header in found}) == 3
    assert found[0] == found[1] == found[2]
