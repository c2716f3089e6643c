# SPDX-License-Identifier: Apache-2.0
"""Tables of runs in which an arm has failed, or has read less than the others."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import perplexity
from benchmarks.reporting import results
from benchmarks.running.scoring import REFERENCE, Scored


def run(label: str, *nll: list[float]) -> Scored:
    return Scored(label, [np.asarray(one) for one in nll], 2.0, {}, 1)


def test_a_failed_arm_is_a_row_that_says_why() -> None:
    scored = {"sink": run("sink", [1.0, 1.0, 1.0])}
    table = perplexity.overall(scored, {}, "sink", 64, {"h2o": "ValueError: no memory"})
    assert table.rows[0][:3] == ("sink", "3", "2.72") and table.rows[0][-1] == "2", (
        "4 tokens in 2 s"
    )
    assert table.rows[1][:2] == ("h2o", "failed: ValueError: no memory")
    assert len(table.rows[1]) == len(table.columns)


def test_differences_are_over_what_both_have_scored() -> None:
    """``full`` ended after two of three tokens, and one of them does not count."""
    scored = {
        "sink": run("sink", [np.nan, 2.0, 7.0], [1.0]),
        "full": run("full", [np.nan, 1.0], [0.5]),
    }
    table = perplexity.overall(scored, {}, "sink", 64, {})
    _, full = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert full["tokens"] == "2"
    assert full["nats a token more than sink (95 % interval)"].startswith("-0.75")


def test_perplexity_of_the_tokens_that_all_have_scored() -> None:
    scored = {
        "sink": run("sink", [np.nan, 2.0, 7.0], [1.0]),
        "full": run("full", [np.nan, 1.0], [0.5]),
    }
    table = perplexity.overall(scored, {}, "sink", 64, {})
    at = table.columns.index("perplexity, common tokens")
    assert [row[at] for row in table.rows] == ["4.48", "2.12"], "e ** 1.5 and e ** 0.75"
    assert "of the 2 tokens that all arms have scored" in table.note
    assert "`full` ends where the model's positions do" in table.note
    alike = perplexity.overall({"sink": scored["sink"]}, {}, "sink", 64, {})
    assert "perplexity, common tokens" not in alike.columns and "`full` ends" not in alike.note


def test_the_note_speaks_of_the_reference_only_where_it_ran() -> None:
    scored = {"sink": run("sink", [1.0]), REFERENCE: run(REFERENCE, [1.0])}
    assert REFERENCE in perplexity.overall(scored, {}, "sink", 64, {}).note
    assert REFERENCE not in perplexity.overall({"sink": scored["sink"]}, {}, "sink", 64, {}).note


def test_positions_are_compared_over_what_both_have_scored() -> None:
    """``full`` ends two tokens before a bin does, ``short`` in its first quarter."""
    long = [1.0] * 30 + [3.0] * 97 + [2.0] * 128  # tokens 1 to 255
    scored = {
        "sink": run("sink", long, [np.nan, 1.0]),
        "full": run("full", [0.5] * 125, [0.5, 0.5]),
        "short": run("short", [0.5] * 80, [0.5]),
    }
    table = perplexity.positions(scored, "sink")
    assert [row[0] for row in table.rows] == ["0 - 64", "64 - 128", "128 - 256"]
    first, second, third = table.rows
    assert first[1] == f"{np.exp((31 * 1.0 + 33 * 3.0) / 64):.2f}"
    assert first[2] == f"{np.expm1(0.5 - (31 * 1.0 + 33 * 3.0) / 64):+.2%}"
    assert second[1:] == (f"{np.exp(3.0):.2f}", f"{np.expm1(-2.5):+.2%}", "-")
    assert third[1:] == (f"{np.exp(2.0):.2f}", "-", "-")


def test_without_the_base_there_are_no_differences() -> None:
    table = perplexity.overall({"full": run("full", [1.0])}, {}, "sink", 64, {"sink": "x"})
    assert table.rows[0][4] == "-"
    none = perplexity.overall({}, {}, "sink", 64, {"sink": "x"})
    assert none.rows == (("sink", "failed: x"),)


def test_a_run_with_failures_ends_with_status_1(tmp_path: Path) -> None:
    """After everything is written, with the reasons."""
    args, failed = Namespace(out=tmp_path / "a.json"), {"h2o": "ValueError: no memory"}
    with pytest.raises(SystemExit, match=r"h2o: ValueError: no memory\n.*runs them again"):
        results.finish(args, [], [], {"sink": 1}, failed)
    assert results.load("a", tmp_path)["data"] == {"sink": 1, "h2o": {"failed": failed["h2o"]}}
    results.finish(args, [], [])
    assert results.load("a", tmp_path)["data"] == {}
