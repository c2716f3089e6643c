# SPDX-License-Identifier: Apache-2.0
"""A card's numbers as a kept result: tables from what ``gpu_check`` and ``gpu.tune`` wrote.

    python -m benchmarks.reporting.gpu FOLDER --commit COMMIT --out benchmarks/results/NAME.json

The card's machine has neither vLLM nor rich, and perhaps no history, so it writes plain JSON, and
the commit is named here.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.reporting import results
from benchmarks.reporting.tables import Table

Row = dict[str, Any]
SHOWN = 10
"""Configurations in the table of ``gpu.tune``."""


def table(title: str, columns: list[str], rows: list[list[str]], note: str = "") -> Table:
    return Table(title, tuple(columns), tuple(map(tuple, rows)), note)


def checks(rows: list[Row]) -> Table:
    """How many checks passed, and the errors of the others."""
    errors = [row["error"] for row in rows if row["error"] is not None]
    counted = {error: errors.count(error) for error in errors}
    found = [["passed", str(len(rows) - len(errors)), ""]]
    found += [["failed", str(count), error] for error, count in counted.items()]
    return table("Kernels against their references", ["", "checks", "error"], found)


def decode(rows: list[Row], copy_gbps: float) -> Table:
    columns = ["heads", "cached", "requests", "ms", "of a copy's bandwidth", "over dense attention"]
    found = [
        [row["heads"], f"{row['cached']:,}", str(row["batch"]), f"{row['ms']:.3f}",
         f"{100 * row['of_copy']:.0f} %", f"{row['over_sdpa']:.2f}x"]
        for row in rows if "ms" in row
    ]  # fmt: skip
    note = (
        "Heads of 128 in fp16. Launches from Python, not a replayed graph. A copy moves "
        f"{copy_gbps:,.0f} GB/s. Dense attention is PyTorch's, over as many keys."
    )
    return table("Decode attention", columns, found, note)


def insertion(rows: list[Row]) -> Table:
    columns = ["dtype", "sub-caches", "ms", "concatenation, ms", "times as fast"]
    found = [
        [row["dtype"], str(row["cascades"]), f"{row['ms']:.3f}", f"{row['concatenation_ms']:.3f}",
         f"{row['speedup']:.0f}"]
        for row in rows if "ms" in row
    ]  # fmt: skip
    return table("Insertion against concatenation", columns, found)


def prompts(rows: list[Row]) -> Table:
    columns = [
        "stride", "prompt", "us a token and layer", "full attention, us", "attend_strides, ms",
    ]  # fmt: skip
    found = [
        [f"{row['stride']:,}", f"{row['tokens']:,}", f"{row['us_per_token']:.2f}",
         f"{row['full_us_per_token']:.2f}", f"{row['stride_attention_ms']:.3f}"]
        for row in rows if "ms" in row
    ]  # fmt: skip
    note = "32 query and 8 KV heads of 128, fp16."
    return table("A prompt over 2,048 cached tokens", columns, found, note)


def tuned(rows: list[Row]) -> Table:
    names = ["queries", "tile", "warps", "stages"]
    timed = [row for row in rows if "ms" in row]
    found = [[*(str(row[name]) for name in names), f"{row['ms']:.3f}"] for row in timed[:SHOWN]]
    note = f"The fastest of {len(rows)}; {len(rows) - len(timed)} did not compile."
    return table("attend_strides by configuration", [*names, "ms"], found, note)


def result(folder: Path, commit: str) -> Row:
    """The kept result of a folder with ``gpu_check.json`` and perhaps ``tune.json``."""
    check = json.loads((folder / "gpu_check.json").read_text())
    tables = [
        checks(check["checks"]),
        decode(check["attend"], check["copy_gbps"]),
        insertion(check["caching"]),
        prompts(check["prefill"]),
    ]
    tune = folder / "tune.json"
    if tune.is_file():
        tables.append(tuned(json.loads(tune.read_text())))
    seconds = sum(row["seconds"] for row in check["checks"])
    return {
        "command": "python -m benchmarks.gpu_check",
        "seconds": round(seconds, 1),
        "environment": check["environment"]
        | {"vllm": "not installed", "git_commit": commit, "git_dirty": False},
        "settings": {},
        "tables": [one.as_json() for one in tables],
        "data": {"goals": check["goals"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", required=True, help="the commit that the card ran")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(results.as_text(result(args.folder, args.commit)), encoding="utf-8")


if __name__ == "__main__":
    main()
