# SPDX-License-Identifier: Apache-2.0
"""One run through real engines: the control is found there, and what it prints is what it did."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import perplexity, token_time
from benchmarks.reporting import results
from benchmarks.running import engines
from benchmarks.running.scoring import REFERENCE


def test_perplexity_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ppl.json"
    perplexity.main(
        [
            *("--tokens", "500", "--capacity", "68", "--stride", "32", "--policies", "random"),
            *("--spike-tokens", "0", "--out", str(out)),
        ]
    )
    kept = results.load("ppl", tmp_path)
    data = kept["data"]
    assert list(data) == ["random", "sink", "full", REFERENCE]
    for name in ("random", "sink"):
        assert data[name]["counters"]["tokens"] >= 500
        # The warm-up reads the same 500 tokens, but is not counted.
        assert data[name]["counters"]["evicted_tokens"] == 500 - 68
        assert data[name]["policy"]["budget"] == 64
    assert data["full"]["counters"] == {}
    nll = {name: np.asarray([point["nll"] for point in data[name]["curve"]]) for name in data}
    # Nothing is evicted in the first 64 tokens; after that the control goes its own way.
    assert nll["random"][0] == pytest.approx(nll["full"][0], abs=1e-4)
    assert nll["sink"][0] == pytest.approx(nll["full"][0], abs=1e-4)
    assert abs(nll["random"][1:] - nll["sink"][1:]).min() > 1e-4
    assert abs(nll["sink"][1:] - nll[REFERENCE][1:]).min() > 1e-4
    assert nll["full"][-1] == pytest.approx(nll[REFERENCE][-1], abs=0.2)
    assert [row[1] for row in kept["tables"][0]["rows"]] == ["499"] * 4
    assert "random" in capsys.readouterr().out
    assert out.with_suffix(".png").stat().st_size > 10_000
    json.dumps(kept)


def test_children_keep_the_order() -> None:
    assert list(engines.in_children(abs, [-3, 2, -1], 2)) == [3, 2, 1]
    with pytest.raises(ValueError, match="at least 1"):
        list(engines.in_children(abs, [1], 0))


def test_token_times_end_to_end(tmp_path: Path) -> None:
    """Three engines of one process, stock among them, take their steps in turn."""
    out = tmp_path / "times.json"
    options = ["--contexts", "40", "300", "--anchor", "80", "--stock-longest", "40"]
    options += ["--model", "books-5m", "--budget", "64", "--output-len", "5", "--chunk", "128"]
    token_time.main([*options, "--block-size", "32", "--out", str(out)])
    kept = results.load("times", tmp_path)
    short, long = kept["data"]["points"]
    assert short["num_steps"] == {"stock": 8, "policy": 8, "anchor": 8}, "4 in each role"
    assert long["num_steps"] == {"policy": 8, "anchor": 8}, "stock ends at 40"
    assert long["ratio"]["stock / policy"] is None and short["ratio"]["stock / policy"] > 0
    for point in (short, long):
        once, again = point["short_prompts_ms_a_token"]
        assert min(once, again) > 0, "300 tokens were read beside each, once in each role"
        for name, (_, attention, _) in point["attention_ms_p10_p50_p90"].items():
            low, step, high = point["step_ms_p10_p50_p90"][name]
            assert low <= step <= high
            assert 0 < attention < step, "the clock is in the layers"
    assert [table["title"] for table in kept["tables"]][-1] == "Goals"
