# SPDX-License-Identifier: Apache-2.0
"""What is kept of arms: taken up again where nothing that matters has changed, and only there."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reporting import results
from benchmarks.running import arms, children, environment, parts
from benchmarks.running.engines import EngineSettings
from benchmarks.running.parts import Parts
from tests.conftest import MODEL


@dataclass(frozen=True)
class Squares(arms.Job):
    """A job that squares numbers, writes down which, and fails at one of them."""

    numbers: tuple[int, ...]
    log: str
    fails_at: int | None = None

    @property
    def keys(self) -> list[str]:
        return [str(number) for number in self.numbers]

    def determines(self) -> dict[str, Any]:
        return {"label": self.label}


def squares(job: Squares) -> list[int]:
    """In a child."""

    def work(places: list[int]) -> Iterator[dict[int, int]]:
        for place in places:
            number = job.numbers[place]
            with Path(job.log).open("a") as file:
                file.write(f"{job.label} {number}\n")
            if number == job.fails_at:
                raise MemoryError("the pool is too small")
            yield {place: number**2}

    return arms.fill(job, work)


def ran(log: Path) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_a_failed_arm_is_taken_up_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "ITEMS", Counter())
    log, kept = tmp_path / "log", Parts(tmp_path / "parts")
    jobs = [Squares("a", (1, 2, 3), str(log), fails_at=3), Squares("b", (4,), str(log))]
    found = arms.run_all(squares, jobs, 1, kept)
    assert found.done == {"b": [16]}
    assert found.failed == {"a": "MemoryError: the pool is too small"}
    assert ran(log) == ["a 1", "a 2", "a 3", "b 4"]
    assert arms.ITEMS == {"asked": 4, "taken up": 0}
    whole = [replace(job, fails_at=None) for job in jobs]
    found = arms.run_all(squares, whole, 1, kept)
    assert found.done == {"a": [1, 4, 9], "b": [16]} and not found.failed
    assert ran(log) == ["a 3"], "only what was missing"
    assert arms.ITEMS == {"asked": 8, "taken up": 3}
    more = [replace(whole[0], numbers=(3, 5, 1)), whole[1]]
    assert arms.run_all(squares, more, 1, kept).done == {"a": [9, 25, 1], "b": [16]}
    assert ran(log) == ["a 5"]


def test_no_process_where_all_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Parts(tmp_path)
    job = Squares("a", (2,), str(tmp_path / "log"))
    squares(replace(job, arm=kept.arm(job.label, job.determines())))
    monkeypatch.setattr(children, "_Child", None)
    assert arms.run_all(squares, [job], 1, kept).done == {"a": [4]}


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    arm = Parts(tmp_path).arm("a b/c", {"x": 1})
    arm.add({"one": 1.5, "two": [2]})
    assert arm.read() == {"one": 1.5, "two": [2]}
    content = arm.own.read_bytes()
    arm.own.write_bytes(content[:-4])
    assert arm.read() == {"one": 1.5}
    arm.add({"two": [3]})
    assert arm.read() == {"one": 1.5, "two": [3]}
    first = json.loads(arm.own.read_text().splitlines()[0])
    assert first["arm"] == {"x": 1} and "vllm" in first["versions"]
    assert arm.own.name.startswith("a-b-c-"), "a file that people can find"


def test_other_code_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Parts(tmp_path).arm("a", {}).add({"k": 1})
    monkeypatch.setattr(parts, "code", lambda: "deadbeef")
    assert Parts(tmp_path).arm("a", {}).read() == {}
    mixed = Parts(tmp_path, any_code=True).arm("a", {})
    assert mixed.read() == {"k": 1}
    mixed.add({"k": 2})
    assert mixed.read() == {"k": 2}, "the own code's goes first"


def test_of_other_code_the_newest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, digits in enumerate(["11111111", "99999999", "55555555"]):
        monkeypatch.setattr(parts, "code", lambda digits=digits: digits)
        monkeypatch.setattr(parts, "commit", lambda digits=digits: f"commit {digits}")
        arm = Parts(tmp_path).arm("a", {})
        arm.add({"k": digits})
        os.utime(arm.own, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(parts, "code", lambda: "deadbeef")
    found = Parts(tmp_path, any_code=True).arm("a", {})
    assert found.read_with_commits() == {"k": ("11111111", "commit 11111111")}


def test_a_run_says_which_commits_kept_items_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "COMMITS", Counter())
    kept, job = Parts(tmp_path), Squares("a", (2, 3), "")
    monkeypatch.setattr(parts, "commit", lambda: "c0ffee")
    kept.arm("a", job.determines()).add({"2": 4, "3": 9})
    monkeypatch.setattr(parts, "commit", lambda: "another")
    assert arms.run_all(squares, [job], 1, kept).done == {"a": [4, 9]}
    assert arms.COMMITS == {"c0ffee": 2}
    assert json.loads(next(tmp_path.iterdir()).read_text().splitlines()[0])["cpu"]


def test_what_was_checked_out_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit made while a command measures is not the one that measured."""
    environment.start.cache_clear()
    monkeypatch.setattr(environment, "_git", lambda *words: "before" if "HEAD" in words else "")
    results.parser_of("throughput", None)
    monkeypatch.setattr(environment, "_git", lambda *_: "after")
    assert environment.commit() == "before"
    found = environment.fingerprint()
    assert (found["git_commit"], found["git_dirty"]) == ("before", False)
    assert found["time"] == environment.start()["time"]
    environment.start.cache_clear()


def test_another_processor_measures_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in ("one", "another"):
        monkeypatch.setattr(parts, "cpu_name", lambda name=name: name)
        parts.code.cache_clear()
        found.add(parts.code())
    parts.code.cache_clear()
    assert len(found) == 2


def test_code_is_what_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    found = []
    for name, text in [
        ("vllm_cascade/a.py", "1"),
        ("vllm_cascade/a.py", "2"),
        ("kernels/cpp/b.cpp", "3"),
        ("benchmarks/running/peers/with_llama_cpp.py", "6"),
        ("benchmarks/running/stream.py", "7"),
        ("benchmarks/inputs/tasks/book.py", "8"),
        ("benchmarks/inputs/tasks/book_cloze.yaml", "9"),
        ("docs/c.py", "4"),
        ("vllm_cascade/notes.md", "5"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        parts.code.cache_clear()
        found.append(parts.code())
    parts.code.cache_clear()
    assert len(set(found[:7])) == 7, "what drives a peer or defines a task measures, too"
    assert found[6] == found[7] == found[8], "documents do not measure"


def test_what_determines_a_result() -> None:
    """Everything that can change a log-probability, and nothing about room or time."""
    policy = {"name": "cascade", "budget": 64}
    settings = EngineSettings(policy=policy, max_model_len=100)
    same = parts.digest(settings.determines())
    room = {"memory_bytes": 1 << 20, "max_num_seqs": 4, "max_model_len": 999}
    spelled = {"policy": {**policy, "num_sinks": 4}}
    for change in (room, spelled):
        assert parts.digest(replace(settings, **change).determines()) == same, change
    for change in (
        {"policy": {**policy, "prefill_stride": 128}},
        {"policy": None},
        {"dtype": "bfloat16"},
        {"max_num_batched_tokens": 512},
        {"block_size": 16},
        {"seed": 8},
        {"arguments": {"enforce_eager": False}},
    ):
        assert parts.digest(replace(settings, **change).determines()) != same, change


def test_a_model_is_its_weights(tmp_path: Path) -> None:
    found = []
    for config, weights in [("{}", b"a" * 99), ("{}", b"a" * 98 + b"b"), ('{"x": 1}', b"a" * 99)]:
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(weights)
        parts.model.cache_clear()
        found.append(parts.digest(parts.model(str(tmp_path))))
    parts.model.cache_clear()
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    found.append(parts.digest(parts.model(str(tmp_path))))
    parts.model.cache_clear()
    assert len(set(found)) == 4, "where an answer ends is part of it"
    assert parts.model(str(MODEL)) != parts.model("some/name") == {"name": "some/name"}
    assert parts.digest_of_tokens([1, 2]) != parts.digest_of_tokens([1, 3])


def test_a_page_holds_whole_units() -> None:
    """An arm of larger units than pages would be refused: its pages grow."""
    sink = {"name": "sink", "budget": 256, "num_sinks": 64}
    assert EngineSettings(policy={**sink, "unit": 64}).block_size == 64
    assert EngineSettings(policy={**sink, "unit": 64}, block_size=128).block_size == 128
    for other in (None, sink, {**sink, "unit": 16}, {**sink, "unit": "page"}):
        assert EngineSettings(policy=other).block_size == EngineSettings().block_size == 32
