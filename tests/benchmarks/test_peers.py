# SPDX-License-Identifier: Apache-2.0
"""Peers, without any installed: equal sizes, how a program is asked, what is kept and reported."""

import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import peers
from benchmarks.reporting.peers_report import Report
from benchmarks.running.environment import ROOT
from benchmarks.running.peers import answers, environment, process
from benchmarks.running.peers.environment import PeerUnavailable, python_of
from benchmarks.running.peers.process import Arm, Failed, Task
from benchmarks.running.peers.questions import (
    CHUNK,
    Cannot,
    Held,
    Reader,
    Stepwise,
    nats,
    removed_share,
)
from vllm_cascade.policies import resolve

WORDS, CACHED = 23, 7


# --- how a program is asked ---------------------------------------------------------------------


class Window(Reader):
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
    program = Stepwise(Window())
    for _ in range(2):  # the second time from an empty cache again
        assert program.stream(text(length)) == pytest.approx(expected(text(length)), abs=1e-4)


@pytest.mark.parametrize("following", (1, 2, 30))
def test_continuation(following: int) -> None:
    prompt, more = text(40), text(following, seed=2)
    found = Stepwise(Window()).continuation(prompt, more)
    assert found == pytest.approx(expected(prompt + more)[-following:], abs=1e-4)


def test_answer_is_greedy_and_ends() -> None:
    reader = Window()
    program, context = Stepwise(reader), text(20)
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
    timing = Stepwise(reader).speed(text(20), 4)
    assert reader.reads == [20, 1, 1, 1] and timing.read > 0 and timing.decode > 0


def test_nats_of_large_logits() -> None:
    logits = np.asarray([[1000.0, 1001.0, 0.0], [-2000.0, 0.0, 0.0]], dtype=np.float32)
    reference = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits).double(), torch.tensor([0, 2]), reduction="none"
    )
    assert nats(logits, [0, 2]) == pytest.approx(reference.numpy())


def test_questions_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child finds; a program whose positions end stops its stream there."""
    program = Stepwise(Window())
    program.positions = 10
    arm = Arm("a", "vLLM")

    def answer(question: str, items: list) -> dict:
        return process.answer(Task(arm, question, "", "", 1, items), program)

    (stream,) = answer("stream", [text(30)])["found"]
    assert stream == pytest.approx(expected(text(10)), abs=1e-4)
    item = {"prompt": text(30), "following": text(4, 1)}
    (nll,) = answer("continuation", [item])["found"]
    assert nll == pytest.approx(expected(text(30) + text(4, 1))[-4:], abs=1e-4)
    key = {"context": text(9), "question": [4], "most": 3, "key": "1", "depth": 0.5}
    assert answer("passkey", [key])["found"] == [program.answer(text(9), [4], 3)]
    found = answer("speed", [{"prompt": text(80), "new": 3}] * 2)
    assert len(found["found"]["times"]) == 2 and found["held"] == {"tokens": 7, "bytes": 14}
    assert found["found"]["resident_peak"] > 50 << 20, "Python and torch are in memory"
    monkeypatch.setattr(process, "forget_peak", lambda: False)
    assert answer("speed", [{"prompt": text(80), "new": 3}])["found"]["load_included"]


# --- equal sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "stride"), ((516, 64), (260, 32)))
def test_arms_hold_equally_much(kept: int, stride: int) -> None:
    args = peers.parse_args(["--kept", str(kept), "--stride", str(stride)])
    arms = peers.arms(args, positions=8192)
    assert len({arm.label for arm in arms}) == len(arms)
    assert [arm.label for arm in arms if not arm.bounded] == [
        "full, vLLM",
        "full, transformers",
        "full, llama.cpp",
    ]
    shifts = []
    for arm in arms:
        given = arm.settings
        if not arm.bounded:
            continue
        if arm.program == "vLLM":
            policy = resolve(given["policy"])
            assert (policy.capacity, policy.prefill_stride) == (kept, stride)
            assert given["cached"] == kept + stride and given["positions"] > args.tokens
        elif arm.program == "kvpress":
            assert (given["kept"], given["interval"]) == (kept, stride)
            assert given.get("decoding_options", {}).get("window_size", 1) < stride
        else:
            shifts.append((given["context"], given.get("discard"), given["keep"]))
    assert shifts == [(kept, None, 4), (kept + stride, stride, 4)]


def test_only_some_peers_and_policies() -> None:
    args = peers.parse_args(["--peers", "llama.cpp", "--policies", "beehive"])
    assert args.base == "beehive"
    assert {arm.program for arm in peers.arms(args, 8192)} == {"vLLM", "llama.cpp"}


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

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) for char in text]}

    def apply_chat_template(self, messages: list[dict], **_: bool) -> str:
        return f"<user>{messages[0]['content']}</user><answer>"


def test_items_are_of_the_asked_lengths(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("x" * 3000)
    words = ["--data", str(book), "--tokens", "900", "--kept", "260", "--prompt", "400"]
    words += ["--speed-prompt", "500", "--samples", "2", "--depths", "0", "1", "--trials", "2"]
    args = peers.parse_args(words)
    asked = peers.items(args, Letters(), positions=1024)
    assert [len(ids) for ids in asked["stream"]] == [900]
    assert {len(item["prompt"]) for item in asked["continuation"]} == {400}
    assert {len(item["following"]) for item in asked["continuation"]} == {args.stride}
    assert [len(item["prompt"]) for item in asked["speed"]] == [500, 500]
    for item in asked["passkey"]:
        context = "".join(map(chr, item["context"]))
        assert len(context) == 400 and context.count(item["key"]) == 2
        assert context.startswith("<user>") and "</user>" not in context
        assert context[-1] == ("x" if item["depth"] == 0 else "\n")
        assert "".join(map(chr, item["question"])).endswith("</user><answer>")
    args.prompt = 1000
    with pytest.raises(ValueError, match="--prompt 1000: more than --kept 260"):
        peers.items(args, Letters(), positions=1024)


def test_pass_keys_need_a_template_and_room() -> None:
    from benchmarks.inputs.pass_keys import digits_right, exact, pass_keys

    plain = Letters()
    plain.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        pass_keys(plain, [1], 100, [0.5], 1)
    with pytest.raises(ValueError, match="length 50: no room"):
        pass_keys(Letters(), [1] * 100, 50, [0.5], 1)
    assert exact("It is 12345.", "12345") and not exact("123456", "12345") and not exact("", "1")
    assert digits_right("1 2x9", "123") == pytest.approx(2 / 3)


# --- what is kept -------------------------------------------------------------------------------


def task(label: str, question: str, items: Sequence = (1,)) -> Task:
    return Task(Arm(label, "vLLM"), question, "model", "gguf", 1, list(items))


class Asking:
    """Counts what is asked; arms named ``bad`` fail, ``stop`` ends the run."""

    def __init__(self, stop: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self.stop = stop

    def __call__(self, one: Task) -> dict:
        if one.arm.label == self.stop:
            raise KeyboardInterrupt
        self.asked.append((one.arm.label, one.question))
        if one.arm.label == "bad":
            raise Failed("ended with status 9")
        if one.arm.label == "absent":
            raise PeerUnavailable("the peer x cannot be installed: no network")
        return {"found": one.items}


def test_a_run_goes_on_and_an_arm_fails_alone(tmp_path: Path) -> None:
    tasks = [task(name, "stream") for name in ("one", "bad", "absent", "two")]
    with pytest.raises(KeyboardInterrupt):
        answers.ask_all(tasks, tmp_path, Asking(stop="two"))
    asking = Asking()
    found = answers.ask_all(tasks, tmp_path, asking)
    assert [label for label, _ in asking.asked] == ["bad", "absent", "two"], "`one` was kept"
    assert found["one", "stream"]["found"] == found["two", "stream"]["found"] == [1]
    assert found["bad", "stream"]["failed"] == "ended with status 9"
    assert "no network" in found["absent", "stream"]["failed"]


def test_another_task_is_asked_again(tmp_path: Path) -> None:
    answers.ask_all([task("one", "stream")], tmp_path, Asking())
    changed = Asking()
    found = answers.ask_all([task("one", "stream", [2])], tmp_path, changed)
    assert len(changed.asked) == 1 and found["one", "stream"]["found"] == [2]


def test_times_are_of_one_run(tmp_path: Path) -> None:
    """One that is missing makes all be taken anew; other questions stay."""
    tasks = [task("one", "speed"), task("one", "stream"), task("two", "speed")]
    answers.ask_all(tasks[:2], tmp_path, Asking())
    second, third = Asking(), Asking()
    answers.ask_all(tasks, tmp_path, second)
    assert second.asked == [("one", "speed"), ("two", "speed")]
    answers.ask_all(tasks, tmp_path, third)
    assert third.asked == []


# --- processes ----------------------------------------------------------------------------------


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_ask_starts_the_peers_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that stands in for it says what it was given."""
    body = 'printf \'{"found": "%s %s"}\' "$2" "$OMP_NUM_THREADS" > "$4"; cp "$3" "$0.task"'
    fake = script(tmp_path / "python", body)
    monkeypatch.setattr(process, "python_of", lambda peer: fake)
    one = Task(Arm("SnapKV", "kvpress", {"kept": 5}), "stream", "m", "g", 2, [[1, 2]])
    assert process.ask(one) == {"found": "benchmarks.running.peers.process 2"}
    assert '"items": [[1, 2]]' in (tmp_path / "python.task").read_text()


def test_ask_says_how_a_process_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = script(tmp_path / "python", "echo first; echo 'out of memory' >&2; exit 3")
    monkeypatch.setattr(process, "python_of", lambda peer: fake)
    with pytest.raises(Failed, match="status 3:\nfirst\nout of memory"):
        process.ask(Task(Arm("x", "llama.cpp"), "stream", "m", "g", 1, []))


def test_what_a_program_cannot_do_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        @staticmethod
        def load(_: Task) -> None:
            raise Cannot("bounds the cache once")

    monkeypatch.setattr(process, "end_with_parent", lambda: None)
    monkeypatch.setattr(process, "import_module", lambda name: Module)
    asked, out = tmp_path / "task.json", tmp_path / "out.json"
    asked.write_text('{"arm": {"label": "x", "program": "kvpress"}, "question": "stream", '
                     '"model": "", "gguf": "", "threads": 1, "items": []}')  # fmt: skip
    process.main([str(asked), str(out)])
    assert out.read_text() == '{"cannot": "bounds the cache once"}'


def test_child_ends_with_its_parent() -> None:
    child = "import time; from benchmarks.running.peers.process import end_with_parent; "
    child += "end_with_parent(); print('up', flush=True); time.sleep(600)"
    parent = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        "p.stdout.readline(); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=ROOT) as one:
        assert one.stdout is not None
        pid = int(one.stdout.readline())
        one.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


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
    with pytest.raises(PeerUnavailable, match="the peer tiny cannot be installed: `nice") as error:
        python_of("tiny")
    assert "No matching distribution found for tiny==1.0" in str(error.value)
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
    arms = [
        Arm("full, vLLM", "vLLM", bounded=False),
        Arm("cascade", "vLLM"),
        Arm("kvpress A", "kvpress"),
        Arm("kvpress B", "kvpress"),
    ]
    noise = np.random.default_rng(0).standard_normal(5999) * 0.01
    early = np.arange(1, 6000) < POSITIONS
    ours = 2.0 + noise
    theirs = ours + np.where(early, 0.1, -0.1)
    keys = [{"key": "12345", "depth": d, "context": [0] * 300} for d in (0.1, 0.9) for _ in "ab"]
    speed = {"found": {"times": [{"read": 2.0, "decode": 0.5}, {"read": 4.0, "decode": 1.0}],
                       "resident_peak": 300 << 20, "load_included": False},
             "held": {"tokens": 580, "bytes": 3 << 20}}  # fmt: skip
    found = {
        ("full, vLLM", "stream"): {"found": [(ours[:999] - 0.5).tolist()]},
        ("cascade", "stream"): {"found": [ours.tolist()]},
        ("kvpress A", "stream"): {"found": [theirs.tolist()]},
        ("kvpress B", "stream"): {"cannot": "bounds the cache once"},
        ("cascade", "continuation"): {"found": [[1.0, 3.0]] * 12},
        ("kvpress A", "continuation"): {"found": [[1.0, 2.0]] * 6 + [[1.0, 4.0]] * 6},
        ("cascade", "passkey"): {"found": [[1], [1], [0], [0]]},
        ("kvpress A", "passkey"): {"found": [[1], [0], [0], [1]]},
        ("cascade", "speed"): speed,
        ("kvpress A", "speed"): {"failed": "ended with status 9:\nout of memory"},
    }
    asked = {
        "stream": [[0] * 6000],
        "continuation": [{"prompt": [0] * 300, "following": [0, 0]}] * 12,
        "passkey": keys,
        "speed": [{"prompt": [0] * 400, "new": 11}] * 2,
    }
    answered = {1: "It is 12345.", 0: "No: 12999"}
    return Report(arms, found, asked, POSITIONS, "cascade", lambda ids: answered[ids[0]])


def test_overall_table(report: Report) -> None:
    table = report.tables()[0]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["full, vLLM"][:2] == ("4.48", "-")  # e ** 1.5; there is nothing past its end
    assert rows["cascade"][:4] == ("7.39", "7.39", "7.39", "50%")
    assert rows["kvpress A"][:2] == ("8.17", "6.69")  # e ** 2.1, e ** 1.9
    assert rows["cascade"][4:] == ("150 (100-200)", "15.0 (10.0-20.0)", "300", "3.0")
    assert rows["kvpress B"] == ("-",) * 8
    assert "kvpress 0.5.5 on transformers 5.2.0" in table.note
    assert "llama-cpp-python 0.3.36" in table.note


def test_who_is_better(report: Report) -> None:
    table = next(t for t in report.tables() if t.title.startswith("Peers against"))
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert first["stream to 1,000"].startswith("+0.1000") and first["stream to 1,000"].endswith("worse")  # fmt: skip  # noqa: E501
    assert first["stream past that"].endswith(", better")
    assert first["after a prompt"].endswith(", undecided")
    assert first["pass keys"].startswith("+0.0000") and first["pass keys"].endswith("undecided")
    assert table.rows[1] == ("kvpress B", "-", "-", "-", "-")
    assert "Better than cascade: kvpress A (stream past that)." in table.note


def test_more_pass_keys_are_better(report: Report) -> None:
    found = dict(report.answers)
    found["kvpress A", "passkey"] = {"found": [[1]] * 4}
    found["cascade", "passkey"] = {"found": [[0]] * 4}
    changed = Report(report.arms, found, report.asked, POSITIONS, "cascade", report.decode)
    table = next(t for t in changed.tables() if t.title.startswith("Peers against"))
    assert table.rows[0][-1] == "+1.0000 (+1.0000 to +1.0000), better"


def test_depths_and_what_is_missing(report: Report) -> None:
    depths, missing = report.tables()[-2:]
    assert depths.columns == ("arm", "depth 0.1", "depth 0.9")
    assert depths.rows == (
        ("cascade", "100% (100%)", "0% (40%)"),
        ("kvpress A", "50% (70%)", "50% (70%)"),
    )
    assert missing.rows == (
        ("kvpress B", "stream", "cannot", "bounds the cache once"),
        ("kvpress A", "speed", "failed", "ended with status 9: out of memory"),
    )
    numbers = report.numbers()
    assert numbers["cascade"]["stream past that"]["count"] == 5000
    assert numbers["kvpress A"]["speed"]["failed"].startswith("ended with status 9")
    assert numbers["cascade"]["pass key answers"][0] == "It is 12345."
