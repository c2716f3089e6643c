# SPDX-License-Identifier: Apache-2.0
"""The demo: its sizes and refusals, what it says of made-up results, and short real runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from benchmarks import demo
from benchmarks.inputs.texts import passages
from benchmarks.models import Model
from benchmarks.reporting import demo_pictures, demo_report, readme, results
from benchmarks.reporting.demo_report import CASCADE, RECALL, STOCK
from benchmarks.running import novel
from benchmarks.running.client import Refused
from benchmarks.running.conversation import Turn
from benchmarks.running.engines import load_tokenizer
from benchmarks.running.environment import ROOT
from benchmarks.running.stream import Together
from tests.conftest import MODEL

POSITIONS = 1024
SMALL = Model(MODEL, MODEL.name, real=False, why_not="it is a test")
TINY = ["--model", str(MODEL), "--tokens", "1200", "--chat-tokens", "1100", "--passage", "96"]
TINY += ["--budget", "128"]


def settled(*options: str) -> Any:
    args = demo.parse_args(["--model", str(MODEL), *options])
    assert demo.settle(args)[1] == POSITIONS
    return args


# --- sizes and refusals ---------------------------------------------------------------------------


def test_sizes_follow_from_the_models_positions() -> None:
    args = settled()
    assert (args.budget, args.tokens, args.chat_tokens, args.passage) == (128, 1152, 1040, 204)
    assert args.dtype in ("float32", "bfloat16")
    assert settled("--budget", "256", "--passage", "70").passage == 70


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--tokens", "1024"], "--tokens 1024 does not go past the model's 1,024 positions"),
        (["--chat-tokens", "99"], "--chat-tokens 99 does not go past"),
        (["--budget", "1000"], "budget"),
        (["--stride", "0"], "prefill_stride"),
    ],
)
def test_refused_before_an_engine_starts(option: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        settled(*option)


def test_at_least_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args(["--engines", "0"])
    assert "--engines must be at least 1" in capsys.readouterr().err


def test_a_book_that_is_too_short(tmp_path: Path) -> None:
    book = tmp_path / "short.txt"
    book.write_text("It was short. " * 20)
    with pytest.raises(SystemExit, match=r"short.txt has \d+ tokens: too few to pass 1,024"):
        demo.read_novel(settled("--book", str(book)), SMALL, POSITIONS)


def test_without_the_real_model_the_small_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "best_model", lambda: SMALL)
    args = demo.parse_args([])
    assert demo.settle(args) == (SMALL, POSITIONS)
    assert args.budget == 128


def test_stock_reads_what_its_positions_hold() -> None:
    stock, *bounded = demo.arms(settled(), SMALL, POSITIONS, list(range(1536)), [7] * 32)
    assert [arm.label for arm in bounded] == ["window", "sink", CASCADE, RECALL]
    assert stock.stock and len(stock.readable) + stock.new_tokens == POSITIONS
    assert stock.engine.max_model_len == POSITIONS
    assert all(not arm.stock and len(arm.readable) == 1568 for arm in bounded)
    assert all(arm.readable[1535:1537] == [1535, 7] for arm in bounded)


def test_the_note_stands_behind_a_sentence_and_before_the_rest() -> None:
    args, tokenizer = settled(), load_tokenizer(str(MODEL))
    token_ids, ago = demo.with_note(args, tokenizer, POSITIONS)
    assert len(token_ids) == args.tokens
    before, after = tokenizer.decode(token_ids).split(demo.NOTE)
    book = demo.BOOK.read_text(encoding="utf-8")
    assert before[-1] in ".!?" and book.startswith(before + after)
    assert tokenizer.decode(token_ids[-ago:]) == after
    assert len(tokenizer(before)["input_ids"]) >= args.budget // 2, "not among the sinks"
    assert ago > 4 * args.budget, "nobody but recall still has it"


def test_both_servers_get_the_same_pool_and_only_ours_a_policy() -> None:
    both = demo.servers(settled("--dtype", "bfloat16"), SMALL, POSITIONS)
    stock, ours = (server._command for server in both.values())
    assert "--kv-policy" not in stock and ours[ours.index("--kv-policy") + 1] == CASCADE
    assert ours[ours.index("--max-model-len") + 1] == "1000000" and "--max-model-len" not in stock
    pools = [int(words[words.index("--kv-cache-memory-bytes") + 1]) for words in (stock, ours)]
    # Keys and values of 6 layers, 2 heads and 64 numbers of 2 bytes: what 1,024 positions need.
    needed = POSITIONS * 2 * 6 * 2 * 64 * 2
    assert pools[0] == pools[1] and needed < pools[0] < 1.5 * needed
    assert "--chat-template" in stock, "the small model has none"
    cores = sorted(os.sched_getaffinity(0))
    one, two = (
        [
            server._cores
            for server in demo.servers(settled("--engines", n), SMALL, POSITIONS).values()
        ]
        for n in ("1", "2")
    )
    assert one == [{cores[0]}] * 2 and two == [{cores[0]}, {cores[1 % len(cores)]}]
    words = demo.commands(settled("--stride", "64"))[CASCADE]
    assert json.loads(words[words.index("--kv-policy-config") + 1]) == {"prefill_stride": 64}


def test_passages_end_where_sentences_do() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = (ROOT / "benchmarks/inputs/books/persuasion.txt").read_text()[:20_000]
    parts = list(passages(text, tokenizer, 120))
    assert " ".join(parts) == " ".join(text.split())
    sizes = [len(tokenizer(part)["input_ids"]) for part in parts]
    ends = [part.rstrip("\"')")[-1] in ".!?" for part in parts]
    assert all(ends[:-1]) and len(parts) > 20
    # Only a sentence that is too long by itself makes a longer part.
    assert all(size <= 125 for size, part in zip(sizes, parts, strict=True) if part.count(". ") > 1)


# --- made-up results ------------------------------------------------------------------------------


def fake_read(
    num_tokens: int, mean: float, pages: int, refusal: str = "", asked: int = 0
) -> novel.Read:
    result = Together(
        nll=[np.append(np.full(num_tokens - 1, np.log(mean)), np.zeros(asked))],
        seconds=num_tokens / 500,
        pages_peak=pages,
        counters={},
        token_seconds=[0.03, 0.05, 0.04],
    )
    return novel.Read(result, 1 << 20, pages * 32, refusal, asked)


@pytest.fixture
def read() -> dict[str, Any]:
    arms = {
        STOCK: fake_read(976, 30.0, 31, "too long, says vLLM"),
        "window": fake_read(2048, 90.0, 4),
        "sink": fake_read(2048, 33.0, 5),
        CASCADE: fake_read(2048, 31.5, 5),
        RECALL: fake_read(2048, 31.0, 5, asked=32),
    }
    numbers = {label: demo_report.numbers(arm, 976) for label, arm in arms.items()}
    for label in ("window", "sink", CASCADE):
        numbers[label] |= {"answer": "Walter", "right": False}
    numbers[RECALL] |= {"answer": "Ann.", "right": True, "host_bytes": 3 << 20}
    return {
        "model": "a-model",
        "book": "the_book.txt",
        "positions": POSITIONS,
        "tokens": 2048,
        "head": 976,
        "new_tokens": 48,
        "budget": 128,
        "sinks": 4,
        "engines": 2,
        "recall": {"sinks": 16, "budget": 112, "units": 1, "unit": 16},
        "note": {"ago": 1900, "said": "I am Ann.", "asked": "Who? I am"},
        "arms": numbers,
    }


def fake_turn(context: int, pages: int, generated: int = 20, complete: bool = True) -> Turn:
    token_ms = 40.0 if generated > 1 else None
    return Turn("An answer", context - generated, 64, generated, 1.25, token_ms, pages, complete)


@pytest.fixture
def chat() -> dict[str, Any]:
    stock = [fake_turn(400, 13), fake_turn(1024, 32, generated=1, complete=False)]
    ours = [fake_turn(400, 5), fake_turn(1030, 5), fake_turn(1500, 5)]
    message = "This model's maximum context length is 1024 tokens."
    return {
        "model": "a-model",
        "positions": POSITIONS,
        "block_size": 32,
        "engines": 2,
        "arms": {
            STOCK: {
                "command": "vllm serve a-model",
                "page_bytes": 1 << 20,
                "turns": [demo_report.turn_numbers(turn) for turn in stock],
                "refused": {"status": 400, "message": message},
            },
            CASCADE: {
                "command": "vllm serve a-model --kv-policy cascade",
                "page_bytes": 1 << 20,
                "turns": [demo_report.turn_numbers(turn) for turn in ours],
                "refused": None,
            },
        },
    }


def test_what_is_kept_of_an_arm(read: dict[str, Any]) -> None:
    stock, ours = read["arms"][STOCK], read["arms"][CASCADE]
    assert stock["perplexity_head"] == pytest.approx(30) and stock["perplexity_beyond"] is None
    assert ours["perplexity_beyond"] == pytest.approx(31.5)
    assert ours["read_ms"] == pytest.approx(2) and ours["write_ms"] == pytest.approx(40)
    assert ours["peak_kv_bytes"] == 5 << 20 and ours["tokens_cached"] == 160
    json.dumps(read)


def test_the_question_does_not_count(read: dict[str, Any]) -> None:
    """Neither in the perplexity, nor in its picture."""
    asked, other = read["arms"][RECALL], read["arms"][CASCADE]
    assert asked["tokens"] == other["tokens"] == 2048
    assert asked["perplexity_beyond"] == pytest.approx(31.0)
    blocks = asked["mean_nll_per_block"]
    assert len(blocks) == len(other["mean_nll_per_block"])
    assert np.exp(blocks) == pytest.approx([31.0] * len(blocks), rel=1e-3)


def test_what_each_says_of_the_note(
    read: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_report.show_answers(read)
    printed = capsys.readouterr().out
    assert "1,900 tokens before" in printed and '"Who? I am ..."' in printed
    rows = [line.split() for line in printed.splitlines() if "..." in line][1:]
    assert rows == [
        ["window:", "wrong", "...", "Walter"],
        ["sink:", "wrong", "...", "Walter"],
        ["cascade:", "wrong", "...", "Walter"],
        ["sink,", "recall:", "right", "...", "Ann."],
    ]
    assert demo.first_line("\n\n Ann. \nAnd so on") == "Ann." and demo.first_line("\n") == ""


def test_as_many_attended_tokens_with_recall() -> None:
    arms = demo.policies(settled("--budget", "672"))
    assert arms[RECALL]["recall"] == 5 and arms[RECALL]["budget"] == 672 - 5 * 16
    assert demo.policies(settled("--budget", "64"))[RECALL]["budget"] == 48


def test_perplexity_is_split_where_stock_stops() -> None:
    kept = fake_read(2048, 10.0, 5)
    kept.result.nll[0][975:] = np.log(20.0)  # the first of these is of token 976
    numbers = demo_report.numbers(kept, 976)
    assert numbers["perplexity_head"] == pytest.approx(10)
    assert numbers["perplexity_beyond"] == pytest.approx(20)


def test_novel_table_and_what_it_says(read: dict[str, Any]) -> None:
    table = demo_report.novel_table(read)
    assert table.rows[0] == (
        *("stock vLLM", "all tokens", "976, stops", "30.00", "-", "31.0 MiB", "2.00", "40.0", "-"),
    )
    assert table.rows[3][:5] == (
        *("cascade", "the first 4, plus 128 that thin with age"),
        *("2,048", "31.50", "31.50"),
    )
    assert [row[-1] for row in table.rows] == ["-", "no", "no", "no", "yes"]


def test_chat_table_shows_where_stock_stops(chat: dict[str, Any]) -> None:
    table = demo_report.chat_table(chat)
    assert table.rows == (
        ("1", "400", "13", "1.2 s", "40 ms", "400", "5", "1.2 s", "40 ms"),
        ("2", "1,024", "32", "1.2 s", "-", "1,030", "5", "1.2 s", "40 ms"),
        ("3", "HTTP 400", "-", "-", "-", "1,500", "5", "1.2 s", "40 ms"),
    )
    assert "answers turn 3 with HTTP 400: \"This model's maximum context" in table.note
    live = demo_report.live_row(chat["arms"], 2)
    assert live == ("turn 3: stock vLLM HTTP 400 / - / - / -, cascade 1,500 / 5 / 1.2 s / 40 ms")
    chat["arms"][STOCK]["refused"] = None
    assert "not brought to its limit" in demo_report.stopped(chat)


def test_the_last_five_lines(read: dict[str, Any], chat: dict[str, Any]) -> None:
    lines = demo_report.shown(read, chat)
    assert [line[:2] for line in lines] == ["1.", "2.", "3.", "4.", "5."]
    assert "stops after 976 tokens" in lines[0] and "all 2,048" in lines[0]
    assert '("too long, says vLLM")' in lines[0]
    assert "5.0 MiB, 16 % of stock's 31.0 MiB" in lines[1]
    assert "5.0 % above stock's" in lines[2] and "200.0 % above" in lines[2]
    read["arms"][CASCADE]["perplexity_head"] = 27.0
    assert "10.0 % below stock's" in demo_report.shown(read, chat)[2]
    assert lines[3].endswith("1,900 tokens back is known to sink, recall.")
    assert "HTTP 400 in turn 3" in lines[4] and "in turn 3 after 1.2 s: An answer" in lines[4]
    assert chat["arms"][STOCK]["turns"][1]["answer"] == "An answer ...", "it was cut off"
    chat["arms"][STOCK]["refused"] = None
    assert "is not at its limit" in demo_report.shown(read, chat)[4]


def test_points_of_the_picture() -> None:
    nll = np.log(np.repeat([2.0, 8.0, 4.0], demo_pictures.BLOCK))
    blocks = demo_pictures.block_means(np.append(nll, 9.0))
    assert np.exp(blocks) == pytest.approx([2, 8, 4], rel=1e-3)
    many = list(np.random.default_rng(0).uniform(1, 4, 40))
    at, values = demo_pictures.curve(many)
    assert at[0] == 4 * 64 and at[-1] == 40 * 64 and set(np.diff(at)) == {64}
    assert values[0] == pytest.approx(np.exp(np.mean(many[:4])))
    assert values[-1] == pytest.approx(np.exp(np.mean(many[24:])))


def test_the_picture_carries_its_numbers_digest(read: dict[str, Any], tmp_path: Path) -> None:
    demo_pictures.draw(read, tmp_path / "demo.png")
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width >= 1000
        assert picture.text["Source"] == demo_pictures.digest(read)
    # A picture that shows something: more than background, axes and text.
    assert (tmp_path / "demo.png").stat().st_size > 30_000
    before = demo_pictures.digest(read)
    read["arms"]["sink"]["mean_nll_per_block"][0] += 0.1
    assert demo_pictures.digest(read) != before


# --- the README's block ---------------------------------------------------------------------------


@pytest.fixture
def result(read: dict[str, Any], chat: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": {"cores": 2, "cpu": "A CPU"},
        "settings": {"dtype": "bfloat16"},
        "data": {"novel": read, "chat": chat},
    }


def test_readme_block(result: dict[str, Any]) -> None:
    lines = readme.block(result).splitlines()
    assert lines[0].endswith("(docs/demo.png)")
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 5
    assert rows[6].startswith(
        "| `--kv-policy sink --kv-recall 1` | the first 16, the last 112, plus 1 recalled units "
    )
    assert " | yes | 5.0 MiB + 3.0 MiB in host memory | " in rows[6]
    assert "about a note 1,900 tokens back" in lines[-1]
    assert rows[2].startswith(
        "| stock vLLM | all tokens | 976, then stops | 30.0 | - | - | 31.0 MiB"
    )
    assert (
        rows[5].startswith("| `--kv-policy cascade --kv-recall 0` | the first 4,")
        and "| 2.0 / 40 |" in rows[5]
    )
    assert "*The Book*, in bfloat16 on 2 cores of A CPU" in lines[-1]
    assert "stock vLLM answers 400 after 1,024 tokens" in lines[-1]
    assert "1,500 tokens in 3 turns, with 5 pages since turn 1" in lines[-1]


def test_fill_replaces_what_is_between_the_markers(result: dict[str, Any]) -> None:
    text = "Before.\n<!-- demo -->\nold\n<!-- /demo -->\nAfter.\n"
    new = readme.fill(text, result)
    assert new == f"Before.\n<!-- demo -->\n{readme.block(result)}<!-- /demo -->\nAfter.\n"
    assert readme.fill(new, result) == new
    for wrong in ("no markers", text + text):
        with pytest.raises(ValueError, match="needs <!-- demo -->"):
            readme.fill(wrong, result)


def test_readme_and_picture_are_what_the_json_gives() -> None:
    kept = results.load("demo")
    assert kept is not None, "run: python -m benchmarks.demo --out benchmarks/results/demo.json"
    text = readme.README.read_text(encoding="utf-8")
    assert readme.fill(text, kept) == text, "run: python -m benchmarks.reporting.readme"
    with Image.open(readme.PICTURE) as picture:
        assert picture.text["Source"] == demo_pictures.digest(kept["data"]["novel"])


def test_what_the_kept_run_shows() -> None:
    """The picture's blow-up, and a chat past the positions in pages that no longer change."""
    data = results.load("demo")["data"]
    arms, positions = data["novel"]["arms"], data["novel"]["positions"]
    assert data["novel"]["tokens"] > positions == 8192
    assert arms["window"]["perplexity_head"] > 1.3 * arms[STOCK]["perplexity_head"]
    for label in ("sink", CASCADE):
        assert arms[label]["perplexity_head"] < 1.1 * arms[STOCK]["perplexity_head"]
        assert arms[label]["perplexity_beyond"] < arms["window"]["perplexity_beyond"] / 1.3
    right = {label: arm["right"] for label, arm in arms.items() if label != STOCK}
    assert data["novel"]["note"]["ago"] > positions and "right" not in arms[STOCK]
    assert right.pop(RECALL) and not any(right.values()), "only recall still has it"
    # What the document on recall says of the store: all evicted rows and 28 %, in whole chunks.
    rows = arms[STOCK]["peak_kv_bytes"] / positions
    evicted = data["novel"]["tokens"] - arms[RECALL]["tokens_cached"]
    assert 9 / 8 < arms[RECALL]["host_bytes"] / (evicted * rows) < 1.32
    assert all(arm["host_bytes"] == 0 for label, arm in arms.items() if label != RECALL)
    stock, ours = (data["chat"]["arms"][label] for label in (STOCK, CASCADE))
    assert stock["refused"]["status"] == 400 and stock["turns"][-1]["context"] <= positions
    assert ours["turns"][-1]["context"] > positions and ours["refused"] is None
    pages = [turn["pages"] for turn in ours["turns"] if turn["context"] > positions // 2]
    assert len(set(pages)) == 1 and all(a <= b for a, b in pairwise(pages))


# --- the chat, with made-up servers ---------------------------------------------------------------


class FakeChat:
    """Answers until a conversation would be too long for it."""

    def __init__(self, server: int, max_tokens: int) -> None:
        self.limit, self.context = server, 0

    def ask(self, question: str) -> Turn:
        if self.context + 100 > self.limit:
            raise Refused(400, "too long")
        self.context += 100
        return fake_turn(self.context, pages=7)


def converse(monkeypatch: pytest.MonkeyPatch, stock: int, ours: int, parts: int) -> dict[str, Any]:
    monkeypatch.setattr(demo, "Conversation", FakeChat)
    kept = {label: {"turns": [], "refused": None} for label in (STOCK, CASCADE)}
    passages_: Iterator[str] = iter(["a passage"] * parts)
    demo.converse({STOCK: stock, CASCADE: ours}, kept, passages_, 600, together=2)
    return kept


def test_ours_goes_on_where_stock_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = converse(monkeypatch, stock=350, ours=10_000, parts=99)
    assert [turn["context"] for turn in kept[STOCK]["turns"]] == [100, 200, 300]
    assert kept[STOCK]["refused"] == {"status": 400, "message": "too long"}
    assert kept[CASCADE]["turns"][-1]["context"] == 600 and len(kept[CASCADE]["turns"]) == 6
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and sum("HTTP 400" in line for line in lines) == 1


def test_ours_must_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="HTTP 400: too long"):
        converse(monkeypatch, stock=350, ours=450, parts=99)
    with pytest.raises(SystemExit, match="lower --chat-tokens"):
        converse(monkeypatch, stock=350, ours=10_000, parts=3)


# --- real runs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_novel_through_real_engines() -> None:
    """Stock vLLM refuses the whole text in its own words; ours reads it in constant pages."""
    args = settled(*TINY[2:], "--stride", "64")
    read = demo.read_novel(args, SMALL, POSITIONS)
    assert list(read["arms"]) == [STOCK, "window", "sink", CASCADE, RECALL]
    stock, ours = read["arms"][STOCK], read["arms"][CASCADE]
    assert "1024" in stock["refusal"] and "1200" in stock["refusal"]
    assert stock["tokens"] == POSITIONS - demo.NEW_TOKENS and stock["pages_peak"] == 32
    assert ours["tokens"] == 1200 and ours["refusal"] == ""
    assert (ours["pages_peak"], ours["tokens_cached"]) == (5, 132)
    assert 30 < ours["perplexity_head"] < 90 and 20 < ours["perplexity_beyond"] < 120
    # The first block is read before anything is evicted.
    first = [arm["mean_nll_per_block"][0] for arm in read["arms"].values()]
    assert first == pytest.approx([first[0]] * 5, abs=0.02)
    assert all(arm["read_ms"] > 0 and arm["write_ms"] > 0 for arm in read["arms"].values())


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real servers: stock vLLM's 400 is its own, and ours goes on in as many pages."""
    out = tmp_path / "demo.json"
    demo.main([*TINY, "--out", str(out)])
    kept = results.load("demo", tmp_path)
    chat = kept["data"]["chat"]["arms"]
    assert chat[STOCK]["refused"]["status"] == 400
    assert "maximum context length is 1024 tokens" in chat[STOCK]["refused"]["message"]
    ours = chat[CASCADE]["turns"]
    pages = {turn["pages"] for turn in ours[2:]}  # with 8 recalled units, the chat's default
    assert ours[-1]["context"] >= 1100 and pages == {9}
    assert ours[-1]["reused"] >= ours[-2]["prompt"] - 256, "prefix caching makes turns cheap"
    assert out.with_suffix(".png").stat().st_size > 30_000
    assert len(kept["tables"]) == 2 and "git_commit" in kept["environment"]
    printed = capsys.readouterr().out
    assert "HTTP 400" in printed and "It knows nothing of the others" in printed
    readme.block(kept)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("part", ["novel", "chat"])
def test_nothing_is_left_behind(part: str, number: int, tmp_path: Path) -> None:
    """However it is ended, while engines read or servers answer."""
    script = f"""
        from benchmarks import demo
        if {part!r} == "chat":
            demo.read_novel = lambda *_: {{}}
            demo.demo_report.novel_table = lambda *_: ""
            demo.show = demo.demo_report.show_answers = lambda *_: None
        demo.main({[*TINY, "--out", str(tmp_path / "demo.json")]!r})
    """
    lines = "\n".join(line.strip("\n")[8:] for line in script.splitlines())
    file = tmp_path / "main.py"
    file.write_text(f"if __name__ == '__main__':\n{_indented(lines)}\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(file)], cwd=ROOT, env=environment)
    marker = str(file) if part == "novel" else "vllm.entrypoints"  # engines are forked
    deadline = time.monotonic() + 300
    while not (found := _started(process.pid, marker)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    time.sleep(5)  # into the start of the engine
    found = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(60) != 0
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive


def _started(pid: int, marker: str) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if marker in " ".join(child.cmdline())]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
