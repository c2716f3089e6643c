# SPDX-License-Identifier: Apache-2.0
"""Tables, results and the document: nothing is shown that no run printed."""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import quick, throughput, token_time
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, mean_std, number, spread
from benchmarks.running import stepping
from benchmarks.running.engines import EngineSettings
from benchmarks.running.environment import ROOT
from benchmarks.throughput import (
    WARM_UP,
    arms,
    cells,
    kv_bytes_per_token,
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
    for taken_up, commits, said in (
        (0, {}, " s.\n"),
        (3, {}, " s, 3 of 8 items kept from before.\n"),
        (3, {"0123456789ab": 1, "abcdefabcdef+": 2},
         " s, 3 of 8 items kept from before (0123456789, abcdefabcd+).\n"),
    ):  # fmt: skip
        monkeypatch.setattr(results.arms, "ITEMS", Counter({"asked": 8, "taken up": taken_up}))
        monkeypatch.setattr(results.arms, "COMMITS", Counter(commits))
        results.finish(Namespace(out=tmp_path / "one.json"), [], [table()])
        assert said in results.fill("<!-- result one -->\n<!-- end -->\n", tmp_path)


def test_save_and_fill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = "/somewhere/Some-Model-0123abcd"
    argv = ["--tokens", "5", "--out", "x.json", "--data", str(ROOT / "README.md"), "--model", real]
    settings = {"tokens": 5, "data": [str(ROOT / "README.md")], "model": real}
    args = Namespace(out=tmp_path / "one.json", **settings)
    results.finish(args, argv, [table()], {"values": [1]})
    printed = capsys.readouterr().out
    assert "ppl [x]" in printed and "A note." in printed
    kept = results.load("one", tmp_path)
    assert kept["data"] == {"values": [1]}
    assert kept["settings"] == {"tokens": 5, "data": ["README.md"], "model": "Some-Model"}
    assert kept["command"].endswith("--tokens 5 --data README.md --model Some-Model")
    assert {"cpu", "torch", "vllm", "git_commit", "driver", "gpu"} <= set(kept["environment"])
    text = "Before.\n<!-- result one -->\nold\n<!-- end -->\n<!-- result two -->\n<!-- end -->\n"
    filled = results.fill(text, tmp_path)
    assert results.shown(filled) == [("one", []), ("two", [])]
    assert "| sink | 1.5 |" in filled and "old" not in filled
    assert "Not measured yet" in filled
    assert results.fill(filled, tmp_path) == filled
    (tmp_path / "two.json").write_text(json.dumps({**kept, "tables": [table().as_json()] * 3}))
    some = results.fill("<!-- result two 1 3 -->\n<!-- end -->\n", tmp_path)
    assert some.count("| sink | 1.5 |") == 2 and results.shown(some) == [("two", [1, 3])]


@pytest.mark.parametrize("page", [results.PAGE, results.OLDER], ids=lambda page: page.stem)
def test_the_pages_are_in_step_with_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results.fill(text) == text, "run: make results"
    assert "Not measured yet" not in text


def test_every_table_is_on_one_page() -> None:
    found = Counter[tuple[str, int]]()
    for page in (results.PAGE, results.OLDER):
        for name, chosen in results.shown(page.read_text(encoding="utf-8")):
            tables = range(1, len(results.load(name)["tables"]) + 1)
            found.update((name, number) for number in chosen or tables)
    kept = {
        (path.stem, number)
        for path in results.FOLDER.glob("*.json")
        for number in range(1, len(results.load(path.stem)["tables"]) + 1)
    }
    assert set(found) == kept and set(found.values()) == {1}


def test_the_page_is_short() -> None:
    assert len(results.PAGE.read_text(encoding="utf-8").splitlines()) <= 300


def test_results_keep_no_raw_series() -> None:
    for path in results.FOLDER.glob("*.json"):
        content = results.load(path.stem)
        assert path.read_text(encoding="utf-8") == results.as_text(content), path
        limit = 1200 if path.stem.startswith("demo") else 60  # the demo's picture needs a series
        for series in lists_of(content["data"]):
            assert len(series) <= limit, path


def lists_of(value: Any) -> Iterator[list[Any]]:
    """All lists of numbers in a JSON value."""
    if isinstance(value, dict):
        for one in value.values():
            yield from lists_of(one)
    elif isinstance(value, list):
        if all(isinstance(one, int | float) for one in value):
            yield value
        else:
            for one in value:
                yield from lists_of(one)


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


def test_beside_stock() -> None:
    """Ratios of medians, over the better of the stock arms."""
    trials = [
        *(record("full", 16384, speed, 70.5) for speed in (10.0, 11.0, 12.0)),
        *(record("full-no-prefix", 16384, speed, 80.0) for speed in (9.0, 9.0, 9.0)),
        *(record("cascade", 16384, speed, 20.0) for speed in (30.0, 34.0, 90.0)),
        record("full", 512, 100.0, 10.0),
        {**record("cascade", 512, 89.0, 11.1), "median_ttft_ms": 5.0},
        record("sink", 32768, 5.0),
    ]
    (made,) = throughput.beside_stock(trials)
    assert made.rows == (
        ("cascade, 16,384 tokens, 1 at once, 1 MiB", "3.09x", "3.52x", "-"),
        ("cascade, 512 tokens, 1 at once, 1 MiB", "0.89x", "0.90x", "-"),
    )
    # With several requests in flight, others' prompts are in a token's time.
    busy = [{**one, "concurrency": 8, "median_ttft_ms": 10.0} for one in trials]
    assert throughput.beside_stock(busy)[0].rows[0][1:] == ("3.09x", "-", "-")
    times = [
        {**record(arm, 512, 1.0), "median_ttft_ms": t} for arm, t in (("full", 9), ("sink", 6))
    ]
    assert throughput.beside_stock(times)[0].rows[0][1:] == ("1.00x", "1.00x", "1.50x")
    assert throughput.beside_stock([record("full", 16384, 10.0)]) == []
    assert throughput.beside_stock([record("cascade", 2048, 10.0)]) == []


def test_a_refused_arm_has_a_row_and_a_line() -> None:
    refused = {**record("full", 4096, 0.0), "refused": "ValueError: too little\nKV cache"}
    for key in ("output_throughput", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms"):
        del refused[key]
    trials = [refused, record("sink", 4096, 5.0, trial=0), record("sink", 4096, 7.0, trial=1)]
    (made,) = throughput.tables(trials)
    assert made.rows[0][:2] == ("4,096 full", "does not start")
    assert made.rows[1] == ("4,096 sink", "6.0 (5.0-7.0)", "10.0 / 10.0 / 10.0")
    assert throughput.line(refused).endswith("refused: KV cache")


def test_a_table_of_arms_that_do_not_start() -> None:
    """The reasons must not be lost where nothing was measured."""
    cell = {"context": 128, "output_len": 8, "concurrency": 1, "num_prompts": 1, "pool": 1 << 20}
    refused = [{**cell, "arm": arm, "refused": "ValueError: bad"} for arm in ("full", "sink")]
    (made,) = throughput.tables(refused)
    assert made.columns == ("context, arm", "output tok/s")
    assert made.rows == (("128 full", "does not start"), ("128 sink", "does not start"))
    assert throughput.beside_stock(refused) == []


def test_server_arguments_may_be_quoted() -> None:
    words = ["--server-args", """--enforce-eager --hf-overrides '{"a": 1}'"""]
    args = throughput.parse_args([*words, "--contexts", "128"])
    flags = throughput.shared_flags(args, ["--load-format", "dummy"])
    assert flags == [
        "--load-format", "dummy", "--max-model-len", "160", "--block-size", "128",
        "--enforce-eager", "--hf-overrides", '{"a": 1}',
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        throughput.parse_args(["--server-args", "--hf-overrides '{"])


@pytest.mark.parametrize("name", ["Gemma3Config", "Llama4Config", "LlamaConfig"])
def test_keys_and_values_of_a_token_are_the_language_models(name: str, tmp_path: Path) -> None:
    """Models that also read images have these sizes one level deeper."""
    import transformers

    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64}
    config = getattr(transformers, name)
    (config(**sizes) if name == "LlamaConfig" else config(text_config=sizes)).save_pretrained(
        tmp_path
    )
    assert kv_bytes_per_token(str(tmp_path)) == 2 * 3 * 2 * 64 * 2, "bfloat16 unless said"
    assert kv_bytes_per_token(str(tmp_path), "float32") == 2 * 3 * 2 * 64 * 4


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
    made = arms(args, "folder")
    assert list(made) == ["full", "full-no-prefix", "sink", "cascade"]
    assert made["full"] == [] and made["full-no-prefix"] == ["--no-enable-prefix-caching"]
    flag, settings = made["cascade"]
    assert flag == "--additional-config"
    assert json.loads(settings) == {
        "kv_policy": {"name": "cascade", "recall": 0, "budget": args.budget}
    }
    with_sessions = parse_args([*options, "--stock", "--sessions"])
    made = arms(with_sessions, "folder")
    assert list(made) == ["sink", "cascade", "sink-sessions", "cascade-sessions"]
    settings = json.loads(made["sink-sessions"][1])
    assert settings.pop("kv_sessions_dir") == "folder/sink"
    assert settings.pop("kv_sessions") is True and settings.pop("kv_sessions_disk") == 4.0
    assert settings == json.loads(made["sink"][1])


def test_no_two_loads_share_prompts() -> None:
    """A prefix cache must not know a cell's prompts from another's, or from the warm-up."""
    args = parse_args(["--contexts", "100", "300", "--concurrency", "1", "8"])
    sweep = [replace(cell, pool=0) for cell in cells(args, 10, 16)]
    trials = (WARM_UP, 0, 1)
    seeds = [cell.arguments(trial)[3] for cell in dict.fromkeys(sweep) for trial in trials]
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


@pytest.mark.parametrize("option", [["--trials", "0"], ["--concurrency", "0"]])
def test_refused_before_a_server_starts(option: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        parse_args(option)
    assert "must be" in capsys.readouterr().err


def steps(*times: tuple[float, float]) -> list[stepping.Step]:
    return [stepping.Step(total, attention) for total, attention in times]


def test_token_times_are_compared_pair_by_pair() -> None:
    """A machine that slows down between pairs must not show in their ratio."""
    point = token_time.Point(
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
    alone = token_time.Point(
        65536, {"policy": [1.0]}, [1e-5], {"policy": steps((7, 1), (9, 1), (8, 1))}
    )
    assert alone.token("stock") is None and alone.paired("policy", "stock") is None

    args = token_time.parse_args(["--output-len", "4"])
    (row, last) = token_time.token_table([point, alone], args).rows
    assert row == ("16,384", "80.00", "20.00", "4.00x", "20.00", "4.00x", "+0.0%")
    assert last == ("65,536", "-", "8.00", "-", "-", "-", "-")
    assert token_time.prompt_table([point, alone], args).rows[0][1:] == (
        *("0.247", "0.062", "4.00x", "+41.4%"),
    )


def test_token_time_goals() -> None:
    def point(context: int, stock: float, ours: float, anchor: float) -> token_time.Point:
        times = {"stock": stock, "policy": ours, "anchor": anchor}
        made = {name: steps((time, 1.0), (time, 1.0)) for name, time in times.items()}
        prompts = {n: [t * context] for n, t in times.items()}
        return token_time.Point(context, prompts, [anchor], made)

    args = token_time.parse_args(["--output-len", "3"])
    short, middle, long = point(512, 10, 11, 11), point(4096, 10, 11, 11), point(16384, 30, 12, 11)
    rows = token_time.goal_table([short, middle, long], args).rows
    assert [row[1:] for row in rows] == [
        ("1.10x", "yes"),  # where nothing is evicted
        ("2.50x", "no"),  # a token, of 3.5
        ("2.50x", "yes"),  # a prompt, of 2.5
        ("1.091x at most", "no"),  # over the anchor, of 1.05
        ("1.091x at most", "yes"),  # a prompt token, of 1.1
    ]
    assert token_time.goal_table([point(2048, 1, 1, 1)], args).rows == ()


@pytest.mark.parametrize(
    "option",
    [["--output-len", "2"], ["--contexts", "0"], ["--contexts", "99", "--stock-longest=9"]],
)
def test_token_time_refuses_what_says_nothing(option: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        token_time.parse_args(option)
    assert "--" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("on_card", [False, True])
def test_a_step_ends_with_the_devices_work(on_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one process share a card, which must not do one's work in another's step."""
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: on_card)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("wait"))
    layer = SimpleNamespace(impl=SimpleNamespace(forward=lambda: done.append("attention")))

    def step() -> list[Any]:
        layer.impl.forward()
        done.append("rest")
        return []

    compilation = SimpleNamespace(static_forward_context={"layer": layer})
    config = SimpleNamespace(compilation_config=compilation)
    worker = SimpleNamespace(worker=SimpleNamespace(vllm_config=config))
    engine = SimpleNamespace(step=step, model_executor=SimpleNamespace(driver_worker=worker))
    given: list[Any] = []

    def start(settings: EngineSettings) -> Any:
        given.append(settings.arguments)
        return SimpleNamespace(llm_engine=engine)

    monkeypatch.setattr(EngineSettings, "start", start)
    found = stepping.Arm(EngineSettings(arguments={"seed": 1})).step()
    wait = ["wait"] * on_card
    assert done == [*wait, *wait, "attention", *wait, "rest", *wait]
    assert given == [{"async_scheduling": False, "seed": 1}]
    assert 0 < found.attention < found.total


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

        def step(self) -> stepping.Step:
            self.reading = False
            return stepping.Step(self.ms, 0.5)

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
