# SPDX-License-Identifier: Apache-2.0
"""Peers, without any installed: equal sizes, how a program is asked, what is kept and reported."""

import dataclasses
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import peers
from benchmarks.peers import Answers, Report
from benchmarks.running import arms, parts
from benchmarks.running.children import ChildError
from benchmarks.running.engines import EngineSettings
from benchmarks.running.peers import environment, process, questions, with_vllm
from benchmarks.running.peers.environment import PeerUnavailable, python_of
from benchmarks.running.peers.process import Asked, Entry, Task
from benchmarks.running.peers.questions import (
    CHUNK,
    Held,
    Program,
    nats,
    removed_share,
)
from tests.conftest import ROOT
from vllm_cascade.policies.registry import resolve

WORDS, CACHED = 23, 7


# --- how a program is asked ---------------------------------------------------------------------


class Window(Program):
    """A model whose logits are the sum of a row for each of the last ``CACHED`` tokens."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(1).standard_normal((WORDS, WORDS), dtype=np.float32)
        self.stops = frozenset({3})
        self.reads: list[int] = []
        self.begin()

    def begin(self) -> None:
        self.cache: list[int] = []

    def read(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        self.reads.append(len(token_ids))
        logits = []
        for token in token_ids:
            self.cache = [*self.cache, token][-CACHED:]
            logits.append(self.rows[self.cache].sum(axis=0))
        return np.asarray(logits if every else logits[-1:])

    def held(self) -> Held:
        return Held(len(self.cache), 2 * len(self.cache))


def expected(token_ids: Sequence[int]) -> list[float]:
    """Nats of tokens 1, 2, ... by PyTorch, a token at a time."""
    rows = torch.from_numpy(Window().rows)
    found = []
    for place in range(1, len(token_ids)):
        logits = rows[list(token_ids[max(place - CACHED, 0) : place])].sum(dim=0)
        found.append(-logits.double().log_softmax(-1)[token_ids[place]].item())
    return found


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, WORDS, length).tolist()


@pytest.mark.parametrize("length", (2, CHUNK, CHUNK + 1, 2 * CHUNK + 5))
def test_stream(length: int) -> None:
    """Also where the text is cut into chunks; every token but the first is predicted once."""
    program = Window()
    for _ in range(2):  # the second time from an empty cache again
        assert program.stream(text(length)) == pytest.approx(expected(text(length)), abs=1e-4)


@pytest.mark.parametrize("following", (1, 2, 30))
def test_continuation(following: int) -> None:
    prompt, more = text(40), text(following, seed=2)
    found = Window().continuation(prompt, more)
    assert found == pytest.approx(expected(prompt + more)[-following:], abs=1e-4)


def test_answer_is_greedy_and_ends() -> None:
    reader = Window()
    program, context = reader, text(20)
    made = program.answer(context, [5, 6], 50)
    seen = [*context, 5, 6]
    for token in [*made, 3]:
        assert reader.rows[seen[-CACHED:]].sum(axis=0).argmax() == token, made
        seen.append(token)
        if len(seen) == 22 + 50:
            break
    assert 0 < len(made) <= 50 and 3 not in made
    assert len(program.answer(context, [5, 6], 2)) == min(2, len(made))
    assert reader.reads[:2] == [20, 2], "the question was read with the context"


def test_speed_reads_the_prompt_once_then_single_tokens() -> None:
    reader = Window()
    timing = reader.speed(text(20), 4)
    assert reader.reads == [20, 1, 1, 1] and timing.read > 0 and timing.decode > 0


def test_a_prompt_of_vllm_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What warms up is not taken from the cache when it is timed."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(EngineSettings, "start", lambda self: asked.append(self.arguments))
    for policy in (None, {"name": "sink", "budget": 64}):
        with_vllm.Engine("model", policy, positions=512, compiled=True)
    assert [arguments["enable_prefix_caching"] for arguments in asked] == [False, False]


def test_nats_of_large_logits() -> None:
    logits = np.asarray([[1000.0, 1001.0, 0.0], [-2000.0, 0.0, 0.0]], dtype=np.float32)
    reference = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits).double(), torch.tensor([0, 2]), reduction="none"
    )
    assert nats(logits, [0, 2]) == pytest.approx(reference.numpy())


def test_answers_of_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """One an item; a program whose positions end stops its stream there."""
    program = Window()
    program.positions = 10

    def found(question: str, *items: object) -> list:
        return [
            questions.ask(program, question, item, place == 0)["found"]
            for place, item in enumerate(items)
        ]

    (stream,) = found("stream", text(30))
    assert stream == pytest.approx(expected(text(10)), abs=1e-4)
    (nll,) = found("continuation", {"prompt": text(30), "following": text(4, 1)})
    assert nll == pytest.approx(expected(text(30) + text(4, 1))[-4:], abs=1e-4)
    key = {"context": text(9), "question": [4], "most": 3, "key": "1", "depth": 0.5}
    assert found("passkey", key) == [program.answer(text(9), [4], 3)]
    item = {"prompt": text(80), "new": 3}
    reader = program
    reader.reads.clear()
    first, second = (questions.ask(program, "speed", item, at_first) for at_first in (True, False))
    assert reader.reads == [80, 1, 1, 1, 80, 1, 1, 80, 1, 1], "warmed up once, with four tokens"
    assert first["held"] == {"tokens": 7, "bytes": 14}
    assert first["found"]["read"] > 0 < second["found"]["decode"]
    assert first["found"]["resident_peak"] > 50 << 20, "Python and torch are in memory"
    monkeypatch.setattr(questions, "forget_peak", lambda: False)
    assert found("speed", item)[0]["load_included"]


PEAKS = """
import numpy as np
from benchmarks.running.peers import questions

if questions.forget_peak():
    before = questions.resident_peak()
    block = np.ones(64 << 20, dtype=np.uint8)
    with_block = questions.resident_peak()
    del block
    questions.forget_peak()
    print(before, with_block, questions.resident_peak())
"""


def test_memory_is_counted_anew() -> None:
    """What was freed before does not count; the kernel's own count, so it takes some megabytes.

    In a process of its own: this one may have freed as much, and get the same pages again.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, cwd=ROOT, check=True
    )
    if not done.stdout:
        pytest.skip("this kernel does not let a process forget its peak")
    before, with_block, after = map(int, done.stdout.split())
    assert with_block > before + (60 << 20) > after + (30 << 20)


# --- equal sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "stride"), ((516, 64), (260, 32)))
def test_entries_hold_equally_much(kept: int, stride: int) -> None:
    args = peers.parse_args(["--kept", str(kept), "--stride", str(stride)])
    entries = peers.entries(args, positions=8192)
    assert len({entry.label for entry in entries}) == len(entries)
    assert [entry.label for entry in entries if not entry.bounded] == [
        "full, vLLM",
        "full, transformers",
        "full, llama.cpp",
    ]
    shifts = []
    for entry in entries:
        given = entry.settings
        if not entry.bounded:
            continue
        if entry.program == "vLLM":
            policy = resolve(given["policy"])
            assert (policy.capacity, policy.prefill_stride) == (kept, stride)
            assert given["positions"] > args.tokens
        elif entry.program == "kvpress":
            assert (given["kept"], given["interval"]) == (kept, stride)
            assert given.get("decoding_options", {}).get("window_size", 1) < stride
        else:
            shifts.append((given["context"], given.get("discard"), given["keep"]))
    assert shifts == [(kept, None, 4), (kept + stride, stride, 4)]


def test_only_some_peers_and_policies() -> None:
    args = peers.parse_args(["--peers", "llama.cpp", "--policies", "beehive", "--base", "beehive"])
    assert {entry.program for entry in peers.entries(args, 8192)} == {"vLLM", "llama.cpp"}


def test_base_is_one_of_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse_args(["--policies", "sink"])
    assert "--base cascade is none of --policies sink" in capsys.readouterr().err


def test_removed_share_is_exact_for_every_length() -> None:
    """As ``kvpress.utils.compute_n_kept`` rounds."""
    for kept in (1, 260, 516):
        lengths = range(kept, 8193)
        assert {int(n * (1 - removed_share(n, kept))) for n in lengths} == {kept}
    assert removed_share(100, 516) == 0


# --- what is asked ------------------------------------------------------------------------------


def test_continuations_lie_evenly_over_documents() -> None:
    documents = [list(range(100)), [500, 501], list(range(1000, 1300))]
    found = peers.continuations(documents, length=40, following=10, count=12)
    for item in found:
        whole = item["prompt"] + item["following"]
        assert whole == list(range(whole[0], whole[0] + 50))
    starts = [item["prompt"][0] for item in found]
    assert len(set(starts)) == 12 and starts == sorted(starts)
    assert sum(start < 100 for start in starts) in (2, 3)  # 51 of 302 places
    with pytest.raises(ValueError, match="too short: 51 places for 60"):
        peers.continuations([list(range(100))], length=40, following=10, count=60)


class Letters:
    """A tokenizer: a token a character, and a chat template."""

    chat_template = "yes"
    name_or_path = "letters"

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) for char in text]}

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: list[dict], tokenize: bool, **_: bool) -> str:
        assert not tokenize
        return f"<user>{messages[0]['content']}</user><answer>"


def test_items_are_of_the_asked_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 3000)
    (tmp_path / "b.txt").write_text("y" * 700)
    words = ["--data", str(tmp_path), "--tokens", "900", "--kept", "260", "--prompt", "400"]
    words += ["--speed-prompt", "500", "--samples", "2", "--depths", "0", "1", "--trials", "2"]
    args = peers.parse_args(words)
    asked = peers.items(args, Letters(), positions=1024)
    assert [len(ids) for ids in asked["stream"]] == [900, 700]
    assert {len(item["prompt"]) for item in asked["continuation"]} == {400}
    assert {len(item["following"]) for item in asked["continuation"]} == {args.stride}
    assert [len(item["prompt"]) for item in asked["speed"]] == [500, 500]
    assert [item["depth"] for item in asked["passkey"]] == [0, 0, 1, 1]
    for item in asked["passkey"]:
        context, question = (Letters().decode(item[part]) for part in ("context", "question"))
        assert 300 < len(context + question) <= 400 and context.count(item["key"]) == 2
        assert question == "What is the pass key?</user><answer>", "the context ends before it"
    args.questions = ["stream"]
    assert peers.items(args, Letters(), positions=1024) == {"stream": asked["stream"]}
    args.prompt = 1000
    with pytest.raises(ValueError, match="--prompt 1000: more than --kept 260"):
        peers.items(args, Letters(), positions=1024)


def test_question_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="does not contain 'when'"):
        peers.begin_of(Letters(), [97, 98], "when")


# --- asking -------------------------------------------------------------------------------------


STAND_IN = """#!{python}
import json, os, sys

with open({tasks!r}, "a") as tasks:
    print(sys.stdin.read(), file=tasks)
answers = open(int(sys.argv[3]), "w")


def answer(found):
    print(json.dumps({{"found": [found], "held": None}}), file=answers, flush=True)


{body}
"""


def stand_in(path: Path, body: str) -> str:
    """A program in a peer's place. ``answer(N)`` writes a line for the next item of its task.

    It is called as ``python -m MODULE FD``. Not a shell's script: ``/bin/sh`` need not know file
    descriptors above 9, and a test run has many open.
    """
    tasks = str(path.with_suffix(".tasks"))
    path.write_text(STAND_IN.format(python=sys.executable, tasks=tasks, body=body))
    path.chmod(0o755)
    return str(path)


def asked(entry: Entry, items: Sequence[int], question: str = "stream", threads: int = 2) -> Asked:
    task = Task(entry.program, entry.settings, "model", "gguf", threads)
    return Asked(f"{entry.label}, {question}", entry, question, task, tuple(items))


SNAPKV = Entry("SnapKV", "kvpress", {"kept": 5})


def test_peer_runs_in_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its task, its threads and no network, and its answers come back in order."""
    body = "print('noise')\n" + "\n".join(
        f"answer(os.environ[{name!r}])" for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    )
    fake = stand_in(tmp_path / "python", body)
    monkeypatch.setattr(process, "python_of", lambda peer: {"kvpress": fake}[peer])
    found = process.ask(asked(SNAPKV, [7, 8]))
    assert [one["found"] for one in found] == [["2"], ["1"]]
    task = (tmp_path / "python.tasks").read_text()
    assert '"items": [7, 8]' in task and '"settings": {"kept": 5}' in task


def test_peer_that_dies_keeps_what_it_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason repeats its last words; the next run asks for the rest only."""
    kept = parts.Parts(tmp_path / "parts")
    job = asked(SNAPKV, [7, 8, 9])
    job = dataclasses.replace(job, arm=kept.arm(job.label, {}))
    fake = stand_in(
        tmp_path / "python", "answer(1)\nprint('out of memory', file=sys.stderr)\nsys.exit(3)"
    )
    monkeypatch.setattr(process, "python_of", lambda peer: fake)
    with pytest.raises(ChildError, match="status 3: out of memory"):
        process.ask(job)
    stand_in(tmp_path / "python", "answer(2)\nanswer(3)")
    assert [one["found"] for one in process.ask(job)] == [[1], [2], [3]]
    assert '"items": [8, 9]' in (tmp_path / "python.tasks").read_text().splitlines()[-1]


def test_peer_that_answers_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = stand_in(tmp_path / "python", "answer(1)")
    monkeypatch.setattr(process, "python_of", lambda peer: fake)
    with pytest.raises(ValueError, match="zip"):
        process.ask(asked(SNAPKV, [7, 8]))


def test_what_an_answer_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of a peer and its settings; neither labels nor threads."""
    same = asked(SNAPKV, [1]).determines()
    other = Entry("another", "kvpress", {"kept": 5})
    assert asked(other, [1], threads=1).determines() == same
    assert asked(Entry("SnapKV", "kvpress", {"kept": 6}), [1]).determines() != same
    (tmp_path / "kvpress.txt").write_text("kvpress==9\n")
    monkeypatch.setattr(process, "requirements", lambda peer: tmp_path / f"{peer}.txt")
    assert asked(SNAPKV, [1]).determines() != same
    assert asked(SNAPKV, [1, 2]).keys != asked(SNAPKV, [2, 1]).keys


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    return ["--peers", "kvpress", "--policies", "sink", "--base", "sink", "--questions", "stream",
            "--out", str(tmp_path / "peers.json")]  # fmt: skip


def test_peer_that_is_not_there_is_a_row(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are asked; what cannot be asked says so; nothing of the peer starts."""
    started: list[str] = []

    def run_all(work: object, jobs: Sequence[Asked], *_: object) -> object:
        started.extend(job.label for job in jobs)
        return arms.Outcome({job.label: ["answer"] for job in jobs}, {})

    def missing(peer: str) -> Path:
        raise PeerUnavailable(f"the peer {peer} cannot be installed: no network")

    monkeypatch.setattr(peers, "python_of", missing)
    monkeypatch.setattr(arms, "run_all", run_all)
    args = peers.parse_args(small)
    chosen = peers.entries(args, 8192)
    found = peers.ask_all(args, chosen, Task("", {}, "m", "g", 1), {"stream": [[1]]})
    assert started == ["full, vLLM, stream", "sink, stream"]
    assert found.found["sink", "stream"] == ["answer"]
    why = {key: why for key, why in found.failed.items() if key[1] == "stream"}
    assert set(why.values()) == {"the peer kvpress cannot be installed: no network"}
    assert ("kvpress SnapKV", "stream") in why
    assert "once, after a prompt" in found.cannot["kvpress StreamingLLM, re-rotated", "stream"]


def test_times_are_taken_one_at_a_time(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all threads and a compiled engine, and never taken up from another run."""
    ran: list[tuple[str, int, bool, int, object]] = []

    def run_all(
        work: object, jobs: Sequence[Asked], at_a_time: int = 1, kept_in: Any = None
    ) -> object:
        for job in jobs:
            task = job.task
            kept = kept_in is not None
            ran.append((job.label, at_a_time, kept, task.threads, task.settings.get("compiled")))
        return arms.Outcome({}, {job.label: "broken" for job in jobs})

    monkeypatch.setattr(peers, "python_of", lambda peer: Path("python"))
    monkeypatch.setattr(arms, "run_all", run_all)
    args = peers.parse_args([*small, "--questions", "speed", "stream", "--engines", "2"])
    args.threads = 4
    chosen = [one for one in peers.entries(args, 8192) if one.program == "vLLM"]
    asked_for = {"stream": [[1]], "speed": [{}]}
    found = peers.ask_all(args, chosen, Task("", {}, "m", "g", 1), asked_for)
    assert ran == [
        ("full, vLLM, stream", 2, True, 1, None),
        ("sink, stream", 2, True, 1, None),
        ("full, vLLM, speed", 1, False, 4, True),
        ("sink, speed", 1, False, 4, True),
    ]
    assert found.failed["sink", "speed"] == "broken"


# --- environments -------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer ``tiny`` whose one wheel lies in a folder that pip is told to look into, alone."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/tiny.txt").write_text("tiny==1.0\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(wheels / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "import numpy\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip  # noqa: E501
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "PEERS", {"tiny": "tiny"})
    monkeypatch.setenv(environment.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return wheels


def test_environment_lies_over_this_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the peer and sees what is installed here; it is made once."""
    python = python_of("tiny")
    command = [str(python), "-c", "import tiny, torch; print(tiny.__file__, torch.__version__)"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    place, version = out.split()
    assert place.startswith(str(python.parents[1])) and version == torch.__version__
    monkeypatch.setattr(environment, "_make", lambda *_: pytest.fail("made a second time"))
    assert python_of("tiny") == python


def test_new_pins_make_a_new_environment(tiny: Path) -> None:
    python = python_of("tiny")
    (tiny.parent / "requirements/tiny.txt").write_text("# Later.\ntiny==1.0\n")
    assert python_of("tiny") != python


def test_peer_that_cannot_be_installed(tiny: Path) -> None:
    """The message names the peer and repeats pip; the next call tries again."""
    (wheel,) = tiny.iterdir()
    content = wheel.read_bytes()
    wheel.unlink()
    with pytest.raises(PeerUnavailable, match="peer tiny cannot be installed: ERROR: No matching"):
        python_of("tiny")
    wheel.write_bytes(content)
    assert python_of("tiny").exists()


def test_llama_cpp_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.FOLDER, str(tmp_path))
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    with pytest.raises(PeerUnavailable, match=r"no C\+\+ compiler: install g\+\+"):
        python_of("llama-cpp")


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(environment.FOLDER, str(tmp_path / "file"))
    with pytest.raises(PeerUnavailable, match=f"{environment.FOLDER} names another folder"):
        python_of("kvpress")


# --- the report ---------------------------------------------------------------------------------


POSITIONS = 1000


@pytest.fixture
def report() -> Report:
    """A peer that is worse to the positions' end and better past it; one that cannot stream."""
    entries = [
        Entry("full, vLLM", "vLLM", bounded=False),
        Entry("cascade", "vLLM"),
        Entry("kvpress A", "kvpress"),
        Entry("kvpress B", "kvpress"),
    ]
    noise = np.where(np.arange(5999) % 2, 0.01, -0.01)  # none of it in the mean of a part
    early = np.arange(1, 6000) < POSITIONS - 2
    ours = 2.0 + noise
    theirs = ours + np.where(early, 0.1, -0.1)
    keys = [{"key": "12345", "depth": d, "context": [0] * 300} for d in (0.1, 0.9) for _ in "ab"]
    answers = Answers(
        found={
            ("full, vLLM", "stream"): found((ours[:997] - 0.5).tolist()),
            ("cascade", "stream"): found(ours.tolist()),
            ("kvpress A", "stream"): found(theirs.tolist()),
            ("cascade", "continuation"): found(*[[1.0, 3.0]] * 12),
            ("kvpress A", "continuation"): found(*[[1.0, 2.0]] * 6, *[[1.0, 4.0]] * 6),
            ("cascade", "passkey"): found([1], [1], [0], [0]),
            ("kvpress A", "passkey"): found([1], [0], [0], [1]),
            ("cascade", "speed"): found(timed(2.0, 0.5, 300), timed(4.0, 1.0, 290), held=3 << 20),
            ("kvpress B", "speed"): found(timed(1.0, 0.7, 310), timed(1.5, 0.7, 310), held=1 << 20),
        },
        cannot={("kvpress B", "stream"): "bounds the cache once"},
        failed={("kvpress A", "speed"): "ended with status 9"},
    )
    asked = {
        "stream": [[0] * 6000],
        "continuation": [{"prompt": [0] * 300, "following": [0, 0]}] * 12,
        "passkey": keys,
        "speed": [{"prompt": [0] * 400, "new": 11}] * 2,
    }
    answered = {1: "It is 12345.", 0: "No: 12999"}
    return Report(entries, answers, asked, POSITIONS, "cascade", lambda ids: answered[ids[0]])


def found(*values: object, held: int = 0) -> list[dict]:
    return [{"found": value, "held": {"tokens": 580, "bytes": held}} for value in values]


def timed(read: float, decode: float, mib: int) -> dict:
    return {
        "read": read,
        "decode": decode,
        "resident_peak": mib << 20,
        "load_included": False,
    }


def test_overall_table(report: Report) -> None:
    table = report.tables()[0]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["full, vLLM"][:2] == ("4.48", "-")  # e ** 1.5; there is nothing past its end
    assert rows["cascade"][:4] == ("7.39", "7.39", "7.39", "50%")
    assert rows["kvpress A"][:2] == ("8.17", "6.69")  # e ** 2.1, e ** 1.9
    assert rows["cascade"][4:] == ("150 (100-200)", "15.0 (10.0-20.0)", "300", "3.0")
    assert rows["kvpress B"][:4] == ("-",) * 4
    assert table.columns[1] == "perplexity to 998", "what stock vLLM, which writes two, can read"
    assert "kvpress 0.5.5 on transformers 5.2.0" in table.note
    assert "llama-cpp-python 0.3.36" in table.note


def test_a_report_speaks_of_what_was_asked(report: Report) -> None:
    """Of streams only: no column, sentence or verdict about prompts, pass keys or speed."""
    for key in [key for key in report.answers.found if key[1] != "stream"]:
        del report.answers.found[key]
    report.answers.failed.clear()
    only = dataclasses.replace(report, asked={"stream": report.asked["stream"]})
    overall, verdicts, missing = only.tables()
    assert overall.columns == ("entry", "perplexity to 998", "past that")
    assert overall.rows[1] == ("cascade", "7.39", "7.39")
    assert overall.note.startswith("Perplexity of 6,000 tokens that go through one cache a text. ")
    assert verdicts.columns == ("peer", "stream to 998", "stream past that")
    for word in ("pass key", "prompts", "peed", "memory"):
        assert word not in overall.note and word not in verdicts.note
    assert missing.title == "What is missing"
    del report.answers.found["kvpress A", "stream"]
    assert "No peer is better than cascade in any of these." in only.tables()[1].note


def test_who_is_better(report: Report) -> None:
    table = report.tables()[1]
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert first["stream to 998"].startswith("+0.1000 (")
    assert first["stream to 998"].endswith(", worse")
    assert first["stream past that"].endswith(", better")
    assert first["after a prompt"].endswith(", undecided")
    assert first["pass keys"].startswith("+0.0000") and first["pass keys"].endswith("undecided")
    assert table.rows[1] == ("kvpress B", "-", "-", "-", "-")
    assert "Better than cascade: kvpress A (stream past that)." in table.note


def test_more_pass_keys_are_better(report: Report) -> None:
    report.answers.found["kvpress A", "passkey"] = found(*[[1]] * 4)
    report.answers.found["cascade", "passkey"] = found(*[[0]] * 4)
    assert report.tables()[1].rows[0][-1] == "+1.0000 (+1.0000 to +1.0000), better"


def test_nobody_is_better(report: Report) -> None:
    for entry, question in list(report.answers.found):
        if entry.startswith("kvpress"):
            del report.answers.found[entry, question]
    assert "No peer is better than cascade" in report.tables()[1].note


def test_what_is_missing(report: Report) -> None:
    missing = report.tables()[-1]
    assert missing.rows == (
        ("kvpress B", "stream", "cannot", "bounds the cache once"),
        ("kvpress A", "speed", "failed", "ended with status 9"),
    )
    numbers = report.numbers()
    assert numbers["cascade"]["stream past that"]["count"] == 5002
    assert numbers["kvpress A"]["speed"] == {"failed": "ended with status 9"}
