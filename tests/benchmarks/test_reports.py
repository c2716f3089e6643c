# SPDX-License-Identifier: Apache-2.0
"""Tables, results and the document: nothing is shown that no run printed."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import models, quick, token_time
from benchmarks.reporting import results, speed_report, token_report
from benchmarks.reporting.goals import goals
from benchmarks.reporting.tables import Table, mean_std, number, spread
from benchmarks.running import token_points
from benchmarks.running.environment import ROOT
from benchmarks.throughput import (
    WARM_UP,
    arms,
    cells,
    parse_args,
    pool_bytes,
    rounds,
    runs,
    warm_up,
)


def test_quick_forms_do_not_replace_what_the_page_shows() -> None:
    for name in quick.PLAN:
        out = Path(quick.command(name)[-1])
        assert out.parent == ROOT / "results" and not out.is_relative_to(results.FOLDER)
    assert quick.command("perplexity", ROOT / "x")[-1] == str(ROOT / "x/perplexity.json")


def table() -> Table:
    return Table("A | B", ("policy", "ppl [x]"), (("sink", "1.5"), ("a|b", "-")), "A note.")


def test_markdown_and_json_round_trip() -> None:
    assert Table.from_json(json.loads(json.dumps(table().as_json()))) == table()
    assert table().markdown().splitlines() == [
        "**A | B**",
        "",
        "| policy | ppl [x] |",
        "| --- | ---: |",
        "| sink | 1.5 |",
        "| a\\|b | - |",
        "",
        "A note.",
    ]
    with pytest.raises(AssertionError, match="2 columns"):
        Table("", ("a", "b"), (("only one",),))


def test_cells() -> None:
    assert number(None) == "-" and number(1234.567, 1) == "1,234.6"
    assert spread([3.0, 1.0, 2.0, 10.0], 1) == "2.5 (1.0-10.0)"
    assert spread([7.0], 0) == "7" and spread([]) == "-"
    assert mean_std([1.0, 3.0], 2) == "2.00 ± 1.41" and mean_std([5.0], 0) == "5"


def test_a_result_says_what_was_kept_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for taken_up, said in ((0, " s.\n"), (3, " s, 3 of 8 items kept from before.\n")):
        monkeypatch.setattr(results, "ITEMS", Counter({"asked": 8, "taken up": taken_up}))
        results.save(tmp_path / "one.json", [table()], {}, {}, [])
        assert said in results.fill("<!-- result one -->\n<!-- end -->\n", tmp_path)


def test_save_and_fill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = f"/somewhere/{models.NAME}-0123abcd"
    argv = ["--tokens", "5", "--out", "x.json", "--data", str(ROOT / "README.md"), "--model", real]
    settings = {"tokens": 5, "out": tmp_path, "data": [str(ROOT / "README.md")], "model": real}
    results.save(tmp_path / "one.json", [table()], {"values": [1]}, settings, argv)
    printed = capsys.readouterr().out
    assert "ppl [x]" in printed and "A note." in printed
    kept = results.load("one", tmp_path)
    assert kept["data"] == {"values": [1]}
    assert kept["settings"] == {"tokens": 5, "data": ["README.md"], "model": models.NAME}
    assert kept["command"].endswith(f"--tokens 5 --data README.md --model {models.NAME}")
    assert {"cpu", "torch", "vllm", "git_commit", "driver", "gpu"} <= set(kept["environment"])
    text = "Before.\n<!-- result one -->\nold\n<!-- end -->\n<!-- result two -->\n<!-- end -->\n"
    filled = results.fill(text, tmp_path)
    assert results.names(filled) == ["one", "two"]
    assert "| sink | 1.5 |" in filled and "old" not in filled
    assert "Not measured yet" in filled
    assert results.fill(filled, tmp_path) == filled


def test_the_document_is_in_step_with_the_results() -> None:
    text = results.DOCUMENT.read_text(encoding="utf-8")
    assert results.fill(text) == text, "run: python -m benchmarks.reporting.results"
    kept = {path.stem for path in results.FOLDER.glob("*.json")}
    assert kept <= set(results.names(text))
    assert kept, "no result is kept"


def row_of(name: str, arm: str) -> tuple[str, ...]:
    """A row of a kept result's first table."""
    (row,) = [row for row in results.load(name)["tables"][0]["rows"] if row[0] == arm]
    return tuple(row[1:])


def test_the_readme_says_what_the_results_say() -> None:
    """A result that is measured anew takes the README's words about it along."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

    def keys_found(arm: str) -> int:
        whole = [cell.split(" / ")[1] for cell in row_of("recall-passkey", arm)[1:]]
        return sum(round(8 * float(share.rstrip("%")) / 100) for share in whole)

    def less(of: str, arm: str, column: int, base: str = "sink") -> float:
        return 100 - 100 * float(row_of(of, arm)[column]) / float(row_of(of, base)[column])

    assert f"sink found {keys_found('sink')} of 16 and cascade {keys_found('cascade')} " in text
    novels = less("perplexity-books-516", "cascade", 1)
    assert f"five whole novels have {novels:.1f} % less with 516 cached" in text
    again = less("units-1088-rewind", "cascade", 1)
    assert f"has {again:.0f} % less perplexity than with sink" in text
    order = ("sink", "sink, recall 8", "full")
    second = [float(row_of("study-recall-rewind", arm)[1]) for arm in order]
    said = "a perplexity of {:.1f} with sink, {:.1f} with recall and {:.1f} with the whole cache"
    assert said.format(*second) in text


def record(arm: str, context: int, speed: float, tpot: float = 10.0, trial: int = 0) -> dict:
    return {
        "arm": arm,
        "context": context,
        "output_len": 64,
        "concurrency": 1,
        "pool": 1 << 20,
        "trial": trial,
        "output_throughput": speed,
        "mean_tpot_ms": tpot,
        "median_tpot_ms": tpot,
        "p99_tpot_ms": tpot,
    }


def found(records: list[dict]) -> dict[str, tuple[str, str]]:
    return {row[0]: (row[2], row[3]) for made in goals(records, 1024) for row in made.rows}


def test_goals() -> None:
    trials = [
        *(record("full", 16384, speed, 70.5) for speed in (10.0, 11.0, 12.0)),
        *(record("full-no-prefix", 16384, speed, 80.0) for speed in (9.0, 9.0, 9.0)),
        *(record("cascade", 16384, speed, 20.0) for speed in (30.0, 34.0, 90.0)),
        *(record("cascade", context, 34.0, 21.0) for context in (2048, 4096, 32768)),
        record("full", 512, 100.0, 10.0),
        record("cascade", 512, 89.0, 11.1),
    ]
    measured = found(trials)
    assert measured["cascade: TPOT flat within 5% from 2k"] == ("20.00 to 21.00 ms (+5.0%)", "yes")
    # The median of ours over that of the better stock arm.
    assert measured["cascade: at least 3x stock's throughput at 16,384"] == ("3.09x", "yes")
    assert measured["cascade: TPOT at least 3.5x faster at 16,384"] == ("3.52x", "yes")
    short = "where nothing is evicted"
    assert measured[f"cascade: at least 0.9x stock's throughput {short}"] == ("0.89x", "no")
    assert measured[f"cascade: TPOT at most 1.1x stock's {short}"] == ("1.11x", "no")
    near = found([record("full", 512, 100.0, 10.0), record("cascade", 512, 95.0, 10.9)])
    assert near[f"cascade: TPOT at most 1.1x stock's {short}"] == ("1.09x", "yes")
    worse = [*trials, record("cascade", 8192, 34.0, 21.2)]
    assert found(worse)["cascade: TPOT flat within 5% from 2k"][1] == "no"
    # Only with one request in flight: others' prompts are in a token's time.
    busy = [{**record("cascade", c, 34.0, float(c)), "concurrency": 8} for c in (4096, 8192)]
    assert found([*trials, *busy])["cascade: TPOT flat within 5% from 2k"][1] == "yes"
    busy = [{**record(arm, 16384, 9.0, 30.0), "concurrency": 8} for arm in ("full", "cascade")]
    measured = found([*trials, *busy])
    assert measured["cascade: TPOT at least 3.5x faster at 16,384"] == ("3.52x", "yes")
    assert measured["cascade: at least 3x stock's throughput at 16,384"] == ("1.00x", "no")
    # Several at once and nothing else: their throughput alone is judged.
    assert list(found(busy)) == ["cascade: at least 3x stock's throughput at 16,384"]
    assert found([record("full", 16384, 10.0)]) == {}
    assert found([record("cascade", 2048, 10.0)]) == {}


def test_goals_of_prompts() -> None:
    """Times to the first token: against stock's at 16k, and a token's against another length's."""
    times = {4096: 4096 * 0.90, 16384: 16384 * 0.95, 32768: 32768 * 0.99}
    trials = [{**record("sink", c, 1.0), "median_ttft_ms": t} for c, t in times.items()]
    stock = {**record("full", 16384, 1.0), "median_ttft_ms": 16384 * 0.95 * 2.49}
    measured = found([*trials, stock])
    assert measured["sink: prompt at least 2.5x faster at 16,384"] == ("2.49x", "no")
    flat = "sink: prompt time a token flat within 10% from 4k"
    assert measured[flat] == ("0.900 to 0.990 ms (+10.0%)", "yes")
    trials[-1]["median_ttft_ms"] *= 1.01
    assert found(trials)[flat][1] == "no"


def test_a_refused_arm_has_a_row_and_a_line() -> None:
    refused = {**record("full", 4096, 0.0), "refused": "ValueError: too little\nKV cache"}
    for key in ("output_throughput", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms"):
        del refused[key]
    trials = [refused, record("sink", 4096, 5.0, trial=0), record("sink", 4096, 7.0, trial=1)]
    (made,) = speed_report.tables(trials)
    assert made.rows[0][:2] == ("4,096 full", "does not start")
    assert made.rows[1] == ("4,096 sink", "6.0 (5.0-7.0)", "10.0 / 10.0 / 10.0")
    assert speed_report.line(refused).endswith("refused: KV cache")


def test_picture(tmp_path: Path) -> None:
    trials = [record(arm, c, 5.0) for arm in ("full", "sink") for c in (1024, 2048)]
    speed_report.picture(trials, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_pools() -> None:
    assert pool_bytes("2x", 100) == 200 and pool_bytes("1.5X", 100) == 150
    assert pool_bytes("64M", 1) == 64 << 20 and pool_bytes("2G", 1) == 2 << 30
    assert pool_bytes("12345", 1) == 12345
    with pytest.raises(ValueError):
        pool_bytes("many", 1)


def test_sweep_and_arms() -> None:
    options = ["--contexts", "100", "300", "--concurrency", "1", "8", "--pools", "1x", "2x"]
    args = parse_args([*options, "--prompts", "3", "--output-len", "20"])
    sweep = cells(args, per_token=10, block_size=16)
    assert len(sweep) == 8 and len(set(sweep)) == 8
    assert {cell.num_prompts for cell in sweep if cell.concurrency == 8} == {8}
    # 320 tokens are 20 pages of 16, and two more.
    assert {cell.pool for cell in sweep} == {22 * 160, 44 * 160}
    made = arms(args)
    assert list(made) == ["full", "full-no-prefix", "sink", "cascade"]
    assert made["full"] == [] and made["full-no-prefix"] == ["--no-enable-prefix-caching"]
    flag, settings = made["cascade"]
    assert flag == "--additional-config"
    assert json.loads(settings) == {"kv_policy": {"name": "cascade", "budget": args.budget}}
    assert list(arms(parse_args([*options, "--stock"]))) == ["sink", "cascade"]


def test_no_two_loads_share_prompts() -> None:
    """A prefix cache must not know a cell's prompts from another's, or from the warm-up."""
    args = parse_args(["--contexts", "100", "300", "--concurrency", "1", "8"])
    sweep = [replace(cell, pool=0) for cell in cells(args, 10, 16)]
    seeds = [cell.load(trial).seed for cell in dict.fromkeys(sweep) for trial in (WARM_UP, 0, 1)]
    assert len(set(seeds)) == len(seeds) == 12


def test_stock_may_end_earlier() -> None:
    args = parse_args(["--contexts", "100", "300", "--stock-longest", "200"])
    short, long = cells(args, 10, 16)[:2]
    assert [runs(args, arm, short) for arm in ("full", "full-no-prefix", "sink")] == [True] * 3
    assert [runs(args, arm, long) for arm in ("full", "full-no-prefix", "sink")] == [0, 0, 1]
    assert all(runs(parse_args([]), "full", cell) for cell in (short, long))


def test_trials_go_through_all_contexts_and_back() -> None:
    options = ["--contexts", "100", "300", "--trials", "3", "--stock-longest", "200"]
    args = parse_args([*options, "--pools", "1x"])
    order = [
        (trial, cell.context, name)
        for trial, cell, name in rounds(args, cells(args, 10, 16), ["full", "sink"])
    ]
    there = [(100, "full"), (100, "sink"), (300, "sink")]
    assert order == [
        *((0, *run) for run in there),
        *((1, *run) for run in there[::-1]),
        *((2, *run) for run in there),
    ]


def test_a_warm_up_is_as_many_but_shorter() -> None:
    args = parse_args(["--contexts", "100", "9000", "--concurrency", "8", "--pools", "1x"])
    short, long = (warm_up(replace(cell, output_len=64)) for cell in cells(args, 10, 16))
    assert (short.context, long.context) == (100, 512)
    assert {(c.output_len, c.num_prompts, c.concurrency) for c in (short, long)} == {(32, 8, 8)}


@pytest.mark.parametrize("option", [["--trials", "0"], ["--shared-prefix", "128"]])
def test_refused_before_a_server_starts(option: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        parse_args(option)
    assert "must be" in capsys.readouterr().err


def steps(*times: tuple[float, float]) -> list[token_points.Step]:
    return [token_points.Step(total, attention) for total, attention in times]


def test_token_times_are_compared_pair_by_pair() -> None:
    """A machine that slows down between pairs must not show in their ratio."""
    point = token_points.Point(
        16384,
        {"stock": [4000.0, 4096.0], "policy": [1000.0, 1024.0], "anchor": [100.0, 100.0]},
        [1000.0 / 16384, 512.0 / 16384],
        {
            "stock": steps((40, 30), (400, 300), (80, 60), (80, 60)),
            "policy": steps((10, 1), (100, 10), (20, 2), (20, 2)),
            "anchor": steps((5, 1), (50, 8), (40, 2), (40, 2)),
        },
    )
    assert point.token("stock") == 80 and point.paired("stock", "policy") == pytest.approx(4.0)
    assert point.without_attention("stock") == 20
    # The engines change roles after half of the steps: twice as fast, then half as fast.
    assert point.paired("policy", "anchor") == pytest.approx(1.0)
    # So a prompt is once as fast as the short ones beside it, once half as fast.
    assert point.prompt_over_short == pytest.approx(2**0.5)
    alone = token_points.Point(
        65536, {"policy": [1.0]}, [1e-5], {"policy": steps((7, 1), (9, 1), (8, 1))}
    )
    assert alone.token("stock") is None and alone.paired("policy", "stock") is None

    args = token_time.parse_args(["--output-len", "4"])
    (row, last) = token_report.token_table([point, alone], args).rows
    assert row == ("16,384", "80.00", "20.00", "4.00x", "20.00", "4.00x", "+0.0%")
    assert last == ("65,536", "-", "8.00", "-", "-", "-", "-")
    assert token_report.prompt_table([point, alone], args).rows[0][1:] == (
        *("0.247", "0.062", "4.00x", "+41.4%"),
    )


def test_token_time_goals() -> None:
    def point(context: int, stock: float, ours: float, anchor: float) -> token_points.Point:
        times = {"stock": stock, "policy": ours, "anchor": anchor}
        made = {name: steps((time, 1.0), (time, 1.0)) for name, time in times.items()}
        prompts = {n: [t * context] for n, t in times.items()}
        return token_points.Point(context, prompts, [anchor], made)

    args = token_time.parse_args(["--output-len", "3"])
    short, middle, long = point(512, 10, 11, 11), point(4096, 10, 11, 11), point(16384, 30, 12, 11)
    rows = token_report.goal_table([short, middle, long], args).rows
    assert [row[1:] for row in rows] == [
        ("1.10x", "yes"),  # where nothing is evicted
        ("2.50x", "no"),  # a token, of 3.5
        ("2.50x", "yes"),  # a prompt, of 2.5
        ("1.091x at most", "no"),  # over the anchor, of 1.05
        ("1.091x at most", "yes"),  # a prompt token, of 1.1
    ]
    assert token_report.goal_table([point(2048, 1, 1, 1)], args).rows == ()


@pytest.mark.parametrize(
    "option",
    [["--output-len", "2"], ["--contexts", "0"], ["--contexts", "99", "--stock-longest=9"]],
)
def test_token_time_refuses_what_says_nothing(option: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        token_time.parse_args(option)
    assert "--" in capsys.readouterr().err.splitlines()[-1]


def test_the_policys_engines_exchange_roles() -> None:
    class Fake:
        def __init__(self, ms: float) -> None:
            self.ms, self.prompts, self.reading, self.short = ms, [], False, 0

        def add(self, prompt: list[int], output_len: int) -> None:
            self.prompts.append(len(prompt))
            self.reading = True

        def read(self, prompt: list[int]) -> Iterator[float]:
            self.short += 1
            yield self.step().total

        def step(self) -> token_points.Step:
            self.reading = False
            return token_points.Step(self.ms, 0.5)

        def finish(self) -> None:
            pass

    arms = {"stock": Fake(30), "policy": Fake(10), "anchor": Fake(11)}
    args = token_time.parse_args(["--anchor", "50", "--output-len", "4"])
    point = token_time.measure_twice(arms, 100, args)
    asked = {name: arm.prompts for name, arm in arms.items()}
    assert asked == {"stock": [100, 100], "policy": [100, 50], "anchor": [50, 100]}
    assert [step.total for step in point.steps["policy"]] == [10] * 3 + [11] * 3
    assert point.prompt == {"stock": [30, 30], "policy": [10, 11], "anchor": [11, 10]}
    assert [arm.short for arm in arms.values()] == [0, 1, 1]
    assert point.prompt_over_short == pytest.approx(4096 / 100), "both took a step for theirs"
    assert point.paired("policy", "anchor") == pytest.approx(1.0), "the engines' difference cancels"


def test_a_model_is_called_by_its_folder_without_the_digest() -> None:
    assert (
        results.name_of("/cache/models/SmolLM2-135M-Instruct-b1a4dec0") == "SmolLM2-135M-Instruct"
    )
    assert results.name_of("benchmarks/inputs/models/books-5m") == "books-5m"
    assert results.name_of("org/model-v2") == "model-v2"
