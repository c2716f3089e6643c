# SPDX-License-Identifier: Apache-2.0
"""The demo: its arithmetic, its refusals, its files, and one short stream through an engine."""

import json

import numpy as np
import pytest

from benchmarks import demo
from benchmarks.reporting import demo_pictures, demo_report
from benchmarks.running.stream import StreamResult
from vllm_cascade.policies import POLICIES

NATIVE_LEN = 1024


def fake_result(num_tokens: int, kept: dict[str, list[list[int]]]) -> StreamResult:
    return StreamResult(
        nll=np.linspace(1.0, 3.0, num_tokens - 1),
        seconds=2.0,
        block_size=32,
        pages_end=17,
        pages_peak=17,
        page_bytes=2048,
        full_page_bytes=1024,
        cached=516,
        kept=kept,
        counters={"evicted_tokens": num_tokens - 516},
        continuation="and [so] on",
        num_generated=3,
    )


@pytest.fixture
def results() -> dict[str, StreamResult]:
    kept = {"layer.0": [[0, 1, 2, 3, 9000, 9999]], "layer.1": [[0, 1, 2, 3, 9500, 9999]]}
    _, args = demo.parse_args([])
    *bounded, full = [job.label for job in demo.jobs(args, list(range(5000)), NATIVE_LEN)]
    return {
        **{label: fake_result(10_000, kept) for label in bounded},
        full: fake_result(1022, {}),
    }


def test_every_policy_has_a_row() -> None:
    _, args = demo.parse_args([])
    plan = demo.jobs(args, list(range(5000)), NATIVE_LEN)
    assert {job.policy["name"] for job in plan if job.policy} == set(POLICIES)


def test_result_arithmetic() -> None:
    result = fake_result(100, {})
    assert result.num_tokens == 100
    assert result.tokens_per_second == 50
    assert result.peak_bytes == 17 * 2048
    assert result.full_bytes == 4 * 1024  # 100 tokens are four pages of 32
    assert result.perplexity() == pytest.approx(np.exp(2.0))
    assert result.perplexity(end=2) == pytest.approx(np.exp(1.0))
    assert result.perplexity(start=99) == pytest.approx(np.exp(3.0))


def test_sliding_perplexity() -> None:
    at, values = demo_pictures.sliding_perplexity(np.log([2.0, 8.0, 2.0]), 2)
    assert at.tolist() == [2, 3]
    assert values == pytest.approx([4.0, 4.0])


def test_full_stops_inside_the_models_positions() -> None:
    _, args = demo.parse_args([])
    plan = demo.jobs(args, list(range(5000)), NATIVE_LEN)
    full = plan[-1]
    assert full.policy is None
    assert len(full.token_ids) + full.new_tokens == full.max_model_len == NATIVE_LEN
    assert all(len(job.token_ids) == 5000 for job in plan[:-1])
    demo.check(plan, NATIVE_LEN)


@pytest.mark.parametrize("option", [["--budget", "500"], ["--budget", "1024"], ["--tokens", "1"]])
def test_refused_before_an_engine_starts(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.main(option)
    assert "error:" in capsys.readouterr().err


def test_files_and_table(results: dict[str, StreamResult], tmp_path, capsys) -> None:
    demo_pictures.perplexity(results, NATIVE_LEN, tmp_path / "perplexity.png")
    demo_pictures.kept_tokens(results, tmp_path / "kept_tokens.png")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
    json.dumps(demo_report.numbers(results, 1022, NATIVE_LEN))
    demo_report.show(results, 1022, NATIVE_LEN, tmp_path, 1.0)
    printed = capsys.readouterr().out
    assert "cascade per KV head" in printed and "and [so] on" in printed


def test_one_stream_through_an_engine(book_tokens: list[int]) -> None:
    _, args = demo.parse_args(["--budget", "128", "--stride", "64"])
    tokens = book_tokens[:1500]
    (job,) = [j for j in demo.jobs(args, tokens, NATIVE_LEN) if j.label == "cascade"]
    result = demo.run_all([job])["cascade"]
    assert result.num_tokens == 1500 and np.isfinite(result.nll).all()
    assert 30 < result.perplexity() < 90
    assert result.cached == 132 and result.pages_end == result.pages_peak == 5
    assert result.counters["tokens"] == 1500
    assert result.counters["evicted_tokens"] == 1500 - 132
    assert len(result.kept) == 6
    for (kept,) in result.kept.values():
        assert kept[:4] == [0, 1, 2, 3] and kept[-1] == 1499 and kept == sorted(set(kept))
    assert result.num_generated == demo.CONTINUATION_TOKENS and result.continuation
