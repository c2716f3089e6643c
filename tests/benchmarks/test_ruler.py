# SPDX-License-Identifier: Apache-2.0
"""RULER: documents whose answers are known and stand in them, scores, resuming, the table."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.inputs import ruler
from benchmarks.reporting import stats
from benchmarks.running import answers, arms
from benchmarks.running.answers import Asking, Prompt, as_tokens
from benchmarks.running.client import Refused
from benchmarks.running.engines import EngineSettings, load_tokenizer
from benchmarks.running.parts import Parts
from benchmarks.running.serving import Server
from tests.conftest import BOOK, MODEL

LENGTH, COUNT = 2048, 3
GREEDY = {
    "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "top_p": 1, "top_k": 0, "min_p": 0,
}  # fmt: skip
"""Said with every request: what is left out a server takes from ``generation_config.json``."""
NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for ([\w-]+) is: ([\w-]+)\.")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


def make(
    tokenizer: Any, task: str, length: int = LENGTH, count: int = COUNT, seed: int = ruler.SEED
) -> list[Any]:
    """Documents without a chat template, and their text."""
    texts: dict[tuple[int, ...], str] = {}

    def to_prompt(text: str, answer: str) -> tuple[int, ...]:
        tokens = as_tokens(tokenizer, text, False, answer)
        texts[tokens] = f"{text} {answer}"
        return tokens

    novel = BOOK.read_text("utf-8")
    made = ruler.documents(task, length, count, tokenizer, to_prompt, novel, seed)
    return [(one, texts[one.prompt]) for one in made]


@pytest.mark.parametrize("task", ruler.ANSWER_TOKENS)
def test_documents(tokenizer: Any, task: str) -> None:
    made = make(tokenizer, task)
    assert len({one.prompt for one, _ in made}) == COUNT
    for one, text in made:
        assert (one.task, one.length, one.max_tokens) == (task, LENGTH, ruler.ANSWER_TOKENS[task])
        assert 0.85 * LENGTH < len(one.prompt) + one.max_tokens <= LENGTH
        assert all(answer in text for answer in one.answers)
        check_answers(task, text, one.answers)
    mean = sum(len(one.prompt) + one.max_tokens for one, _ in made) / COUNT
    assert mean > (0.94 if task in ruler.NEEDLES else 0.9) * LENGTH, "about as long as asked for"
    again = make(tokenizer, task, count=1)
    assert again[0] == made[0], "a document depends neither on chance nor on how many are made"
    other = make(tokenizer, task, seed=7)
    assert not {one.answers for one, _ in made} & {one.answers for one, _ in other}


def check_answers(task: str, text: str, answers: tuple[str, ...]) -> None:
    """What the text itself says, found without the generator."""
    if task == "fwe":
        words = Counter(text.split("coded words. ")[1].split("\nQuestion")[0].split())
        del words["..."]
        assert {word for word, _ in words.most_common(3)} == set(answers)
    elif task == "cwe":
        example, own = text.split("Below is a numbered list of words.")[1:]
        words = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", own.split("Question")[0]))
        assert {word for word, _ in words.most_common(10)} == set(answers)
        # One example before it, with its answer, as in NVIDIA's.
        words = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", example.split("Question")[0]))
        told = re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", example.split("are:")[1])
        assert {word for word, _ in words.most_common(10)} == set(told) and len(told) == 10
    elif task == "vt":
        value = re.findall(r"assigned the value (\d+)", text)[-1]
        own = text[: text.rindex("Question")].rsplit("Memorize and track", 1)[1]
        chain = re.findall(rf"VAR (\w+) = {value}\b", own)
        while following := re.findall(rf"VAR (\w+) = VAR {chain[-1]}\b", own):
            chain += following
        assert chain == list(answers) and len(chain) == 5
    else:
        needles = NEEDLE.findall(text)
        asked = text.rsplit("mentioned in the provided text", 1)[0].rsplit(" for ", 1)[1]
        keys = re.findall(r"[\w-]+", asked.replace(", and ", ", "))
        found = [value for key in keys for name, value in needles if name == key]
        assert sorted(found) == sorted(answers)
        expected = {"niah_multivalue": (1, 4), "niah_multiquery": (4, 4)}.get(task, (1, 1))
        assert (len(keys), len(answers)) == expected
        if task == "niah_multikey_1":
            assert len(needles) == 4
        elif task in ("niah_multikey_2", "niah_multikey_3"):
            assert len(needles) > 10, "other needles are the haystack"
        else:
            assert len(needles) == len(answers)


def test_haystacks_of_needles_fill_the_length(tokenizer: Any) -> None:
    ((one, _),) = make(tokenizer, "niah_multikey_3", length=4096, count=1)
    assert 0.95 * 4096 < len(one.prompt) + one.max_tokens <= 4096


def test_the_novel_is_the_haystack(tokenizer: Any) -> None:
    words = re.sub(r"\s+", " ", BOOK.read_text("utf-8")).split(" ")
    assert " ".join(words[100:140]) in make(tokenizer, "niah_single_2")[0][1]
    assert " ".join(words[100:140]) not in make(tokenizer, "niah_single_1")[0][1]


def test_lengths_that_cannot_be_made(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="at least 1,024 tokens, not 512"):
        make(tokenizer, "vt", 512)

    def far_too_long(text: str, answer: str) -> tuple[int, ...]:
        long.append(1)
        return tuple(range(450 * len(long)))

    long: list[int] = []
    with pytest.raises(ValueError, match="fwe: 1 of 3 documents fit 1,024 tokens"):
        ruler.documents("fwe", 1024, 3, tokenizer, far_too_long, "A novel.")


def test_sentences() -> None:
    text = 'He came. "Who?" She said: "I, 3.5 times!" He left.'
    assert ruler.sentences(text) == ["He came.", '"Who?"', 'She said: "I, 3.5 times!"', "He left."]
    assert " ".join(ruler.sentences(text)) == text


def test_scores_are_the_harnesss() -> None:
    from lm_eval.tasks.ruler.common_utils import process_results

    for answer, expected, share in [
        (" they are: ABC, def and\nGHI", ["abc", "DEF", "xyz", "ghi"], 0.75),
        ("123456", ["2345"], 1.0),
        ("", ["1"], 0.0),
    ]:
        assert ruler.score(answer, expected) == share
        doc = {"max_length": 4096, "outputs": expected}
        assert process_results(doc, [answer]) == {"4096": share}


def test_beginnings_of_answers(tokenizer: Any) -> None:
    plain = tokenizer("What? It is")["input_ids"]
    assert as_tokens(tokenizer, "What?", False, "It is") == tuple(plain)
    asking = load_tokenizer(str(MODEL))
    asking.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}:"
    assert as_tokens(asking, "What?", True, "It is") == tuple(
        tokenizer("[What?]:It is")["input_ids"]
    )
    assert as_tokens(asking, "What?", True) == tuple(tokenizer("[What?]:")["input_ids"])


# --- through a server ---------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Servers that answer with the number of the prompt's tokens, and refuse longer ones than 9."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, **body})
            size = len(body["prompt"])
            self.send_response(200 if size < 10 else 400)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            if size > 9:
                self.wfile.write(b'{"error": "too long"}')
                return
            chunk = {"choices": [{"index": 0, "text": f"{size}", "finish_reason": "length"}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    class Standing(Server):
        def start(self) -> None:
            self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
            threading.Thread(target=self.http.serve_forever, daemon=True).start()

        def wait(self) -> None:
            pass

        def stop(self) -> None:
            self.http.shutdown()
            self.http.server_close()

    monkeypatch.setattr(answers, "Server", Standing)
    yield asked


def job_of(*sizes: int) -> Asking:
    engine = EngineSettings(max_model_len=64, memory_bytes=1 << 20, max_num_seqs=2)
    prompts = tuple(Prompt(tuple(range(size)), size + 1) for size in sizes)
    return Asking("arm", engine, prompts, served=True)


def test_an_interrupted_run_goes_on(fake: list[dict[str, Any]], tmp_path: Path) -> None:
    job = job_of(3, 4, 12, 5)
    job = replace(job, arm=Parts(tmp_path).arm(job.label, job.determines()))
    with pytest.raises(Refused, match=r"HTTP 400.*too long"):
        answers.ask(job)
    kept = job.arm.read()
    assert set(kept.values()) <= {"3", "4", "5"} and kept, "answers are on the disk one by one"
    fake.clear()
    whole = replace(job, prompts=job_of(3, 4, 5, 6).prompts)
    assert answers.ask(whole) == ["3", "4", "5", "6"], "in the requests' order"
    assert sorted(len(body["prompt"]) for body in fake) == sorted(
        {3, 4, 5, 6} - {*map(int, kept.values())}
    )
    assert all(body["temperature"] == 0 for body in fake)
    for body in fake:
        assert {key: body.get(key) for key in GREEDY} == GREEDY
    assert all(body["max_tokens"] == len(body["prompt"]) + 1 for body in fake)
    assert {body["path"] for body in fake} == {"/v1/completions"}
    again = arms.run_all(answers.ask, [replace(whole, arm=None)], 1, Parts(tmp_path))
    assert again.done == {"arm": ["3", "4", "5", "6"]}, "no process was needed"


def test_flags_are_the_engines_arguments() -> None:
    policy = {"name": "sink", "budget": 64}
    engine = EngineSettings(
        policy=policy, max_model_len=99, memory_bytes=7, arguments={"enable_prefix_caching": False}
    )
    flags = engine.flags()
    at = flags.index("--additional-config") + 1
    assert json.loads(flags[at]) == {"kv_policy": {"recall": 0, **policy}}
    assert "--enforce-eager" in flags and "--no-enable-prefix-caching" in flags
    assert flags[flags.index("--max-model-len") + 1] == "99"
    assert flags[flags.index("--kv-cache-memory-bytes") + 1] == "7"
    assert "--additional-config" not in replace(engine, policy=None).flags()


# --- the suite ----------------------------------------------------------------------------------


def test_arms_attend_to_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_cascade.policies.registry import resolve

    words = ["--suite", "ruler", "--tasks", "fwe", "vt", "--lengths", "1024", "2048"]
    args = harness.parse_args([*words, "--limit", "1", "--recall", "4", "16", "--stride", "64"])
    args.dtype = "float32"
    plan = harness.shares(args)
    found = [(one.policy, one.length, one.attended) for one in plan]
    assert found[0] == ("full", 1024, 1024), "2,048 are more than the model's positions"
    assert ("full", 2048, 2048) not in found and ("sink, recall 4", 2048, 128) in found
    assert ("sink, recall 16", 1024, 256) not in found, "256 recalled tokens leave no window"
    assert "sink, recall 16 with 256 attended tokens is left out" in capsys.readouterr().out
    assert len(found) == len(set(found)) == 1 + 6 + 6 + 5 + 1
    for one in plan:
        assert len(one.job.prompts) == len(one.documents) == 2
        assert one.job.engine.max_model_len == one.length
        if policy := one.job.engine.policy:
            assert one.attended - 32 < resolve(policy).capacity <= one.attended
            assert policy.get("recall", 0) == (
                int(one.policy.split()[-1]) if "," in one.policy else 0
            )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "snk"], "sink"),
        (
            ["--policies", "cascade", "--policy-config", '{"cascade": {"subcaches": 2}}'],
            "subcaches",
        ),
    ],
)
def test_what_no_capacity_can_mend_is_refused(words: list[str], said: str) -> None:
    from vllm_cascade import KVPolicyError

    args = harness.parse_args(["--suite", "ruler", "--recall", "4", *words])
    with pytest.raises(KVPolicyError, match=said):
        harness.ruler_settings(args, 1024)


def test_an_arm_of_its_own_capacity_must_fit_it(tmp_path: Path) -> None:
    from vllm_cascade import KVPolicyError

    named = {"a": {"name": "sink", "capacity": 40, "unit": 16, "num_sinks": 16, "recall": 8}}
    (tmp_path / "arms.json").write_text(json.dumps(named))
    words = ["--suite", "ruler", "--tasks", "fwe", "--lengths", "1024", "--limit", "1"]
    args = harness.parse_args([*words, "--arms", str(tmp_path / "arms.json")])
    args.dtype = "float32"
    with pytest.raises(KVPolicyError, match="40"):
        harness.ruler_settings(args, 256)


def test_arms_have_the_cache_type_and_size_that_were_asked_for(tmp_path: Path) -> None:
    """``--kv-cache-dtype`` is of policies alone, and an arm may have its own, as its capacity."""
    from vllm_cascade.policies.registry import resolve

    named = {
        "a": {"name": "sink"},
        "b": {"name": "sink", "kv_cache_dtype": "int8_per_token_head"},
        "c": {"name": "sink", "capacity": 132, "kv_cache_dtype": "auto"},
    }
    (tmp_path / "arms.json").write_text(json.dumps(named))
    words = ["--suite", "ruler", "--tasks", "fwe", "--lengths", "1024", "--limit", "1"]
    words += ["--attended", "2", "4", "--stride", "64", "--kv-cache-dtype", "fp8"]
    args = harness.parse_args([*words, "--arms", str(tmp_path / "arms.json")])
    args.dtype = "float32"
    plan = harness.shares(args)
    found = {(one.policy, one.attended): one.job.engine for one in plan}
    assert len(found) == len(plan) and list(found) == [
        ("full", 1024), ("a", 512), ("b", 512), ("c", 132), ("a", 256), ("b", 256),
    ]  # fmt: skip
    for (label, attended), engine in found.items():
        stored = {"a": "fp8", "b": "int8_per_token_head"}.get(label)
        assert engine.arguments.get("kv_cache_dtype") == stored
        assert engine.arguments["enable_prefix_caching"] is False
        assert ("--kv-cache-dtype" in engine.flags()) == (stored is not None)
        if engine.policy:
            assert resolve(engine.policy).capacity == attended


def test_the_table() -> None:
    documents = tuple(
        ruler.Document(task, 1024, (0,) * size, answers, 9)
        for task, size, answers in [("vt", 8, ("a", "b")), ("vt", 9, ("c",)), ("fwe", 7, ("d",))]
    )
    shares = [
        harness.Share(name, 1024, attended, documents, Asking(name, EngineSettings(), ()))
        for name, attended in [("full", 1024), ("sink", 256)]
    ]
    said = {"full": ["a b", "c", "D"], "sink": ["a", "-", "d"]}
    found = [(share, share.scores(said[share.policy])) for share in shares]
    table, data = harness.ruler_table(found, {"cascade": "MemoryError"})
    assert table.columns[3:5] == ("vt", "fwe")
    full, sink, cascade = table.rows
    assert full[:5] == ("full", "1,024", "1,024", "100", "100") and full[-1] == "-"
    assert full[5] == "100.0 (100.0 to 100.0)"
    assert sink[3:5] == ("25", "100") and sink[5] == "62.5 (50.0 to 75.0)"
    assert sink[6] == "62.5 % (50.0 to 75.0)"
    assert cascade[:2] == ("cascade", "failed: MemoryError")
    assert data["sink"]["scores"] == {"vt": 25.0, "fwe": 100.0}
    assert data["sink"]["prompt_tokens"] == {"vt": 8.5, "fwe": 7.0}
    assert data["sink"]["share_of_full"] == [0.625, 0.5, 0.75]


def test_intervals_of_means_of_groups() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.normal(5, 2, 400), rng.normal(7, 1, 100)]
    value, low, high = stats.mean_of_groups(groups)
    assert value == pytest.approx((groups[0].mean() + groups[1].mean()) / 2)
    error = 0.5 * (groups[0].var() / 400 + groups[1].var() / 100) ** 0.5
    assert (value - low, high - value) == pytest.approx((1.96 * error,) * 2, rel=0.15)
    half = stats.mean_of_groups([group / 2 for group in groups], groups)
    assert half == pytest.approx((0.5, 0.5, 0.5)), "in pairs"
    assert np.isnan(stats.mean_of_groups([np.ones(1)])[1:]).all()
    assert np.isnan(stats.mean_of_groups([np.ones(2)], [np.zeros(2)])[1])
