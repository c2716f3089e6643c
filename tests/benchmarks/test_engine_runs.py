# SPDX-License-Identifier: Apache-2.0
"""One run through real engines: the control is found there, and what it prints is what it did."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import perplexity, token_time
from benchmarks.reporting import results
from benchmarks.running.scoring import REFERENCE, Job


@pytest.mark.slow
def test_perplexity_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once with an arm that fails, whose row says why; then again, which runs only that one."""
    out, jobs = tmp_path / "ppl.json", perplexity.jobs
    options = ["--tokens", "500", "--capacity", "68", "--stride", "32", "--policies", "random"]
    options += ["--dtype", "float32", "--out", str(out)]

    def too_small(args: Any, streams: Any) -> list[Job]:
        return [
            replace(job, engine=replace(job.engine, memory_bytes=1 << 10))
            if job.label == "random"
            else job
            for job in jobs(args, streams)
        ]

    monkeypatch.setattr(perplexity, "jobs", too_small)
    with pytest.raises(SystemExit, match=r"1 of the arms failed:\n  random: \w+Error"):
        perplexity.main(options)
    before = results.load("ppl", tmp_path)
    row = before["tables"][0]["rows"][-1]
    assert row[0] == "random" and "Error" in row[1], row
    assert row[1].removeprefix("failed: ") == before["data"]["random"]["failed"]
    monkeypatch.undo()
    perplexity.main(options)
    kept = results.load("ppl", tmp_path)
    data = kept["data"]
    for name in ("sink", "full", REFERENCE):
        assert data[name] == before["data"][name], "not run again: not even the time differs"
    assert list(data) == ["random", "sink", "full", REFERENCE]
    for name in ("random", "sink"):
        assert data[name]["counters"]["tokens"] >= 500
        # The warm-up reads the same 500 tokens, but is not counted.
        assert data[name]["counters"]["evicted_tokens"] == 500 - 68
        assert data[name]["policy"]["budget"] == 64
    assert data["full"]["counters"] == {}
    # Nothing is evicted in the first 64 tokens; after that the control goes its own way.
    columns = kept["tables"][1]["columns"]
    first, *later = [dict(zip(columns, row, strict=True)) for row in kept["tables"][1]["rows"]]
    assert {first["random"], first["full"]} <= {"+0.00%", "-0.00%"}
    for row in later:
        assert not {row["random"], row["full"], row[REFERENCE]} & {"+0.00%", "-0.00%"}
    logs = {name: np.log(data[name]["perplexity"]) for name in ("full", REFERENCE)}
    assert logs["full"] == pytest.approx(logs[REFERENCE], abs=0.2)
    assert [row[1] for row in kept["tables"][0]["rows"]] == ["499"] * 4
    assert all(float(row[-1].replace(",", "")) > 0 for row in kept["tables"][0]["rows"]), "tokens/s"
    assert "random" in capsys.readouterr().out
    json.dumps(kept)


@pytest.mark.slow
def test_token_times_end_to_end(tmp_path: Path) -> None:
    """Three engines of one process, stock among them, take their steps in turn."""
    out = tmp_path / "times.json"
    options = ["--contexts", "40", "300", "--anchor", "80", "--stock-longest", "40"]
    options += ["--model", "books-5m", "--budget", "64", "--output-len", "5", "--chunk", "128"]
    token_time.main([*options, "--block-size", "32", "--out", str(out)])
    kept = results.load("times", tmp_path)
    token, prompt, goals = kept["tables"]
    (short, long), (short_prompt, _) = token["rows"], prompt["rows"]
    assert long[1] == long[3] == "-", "stock ends at 40"
    stock, ours, free = (float(short[column]) for column in (1, 2, 4))
    assert 0 < free < stock and ours > 0, "the clock is in the layers"
    assert float(short[3].rstrip("x")) > 0 and all(float(cell) > 0 for cell in short_prompt[1:3])
    assert goals["title"] == "Goals"
