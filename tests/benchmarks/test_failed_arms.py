# SPDX-License-Identifier: Apache-2.0
"""Tables of runs in which an arm has failed, or has read less than the others."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import perplexity
from benchmarks.reporting import results
from benchmarks.running.scoring import Scored


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
    assert table.rows[1][1] == "2" and table.rows[1][4].startswith("-0.75")


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
