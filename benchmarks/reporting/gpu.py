# SPDX-License-Identifier: Apache-2.0
"""A card's numbers as a kept result: tables of what benchmarks wrote on it.

    python -m benchmarks.reporting.gpu FOLDER --commit COMMIT --out benchmarks/results/NAME.json

FOLDER has files ``gpu_check*.json``, ``gpu_engine*.json``, or both, all of one card. The card's
machine may have no rich and no history, so it writes plain JSON, and the commit is named here.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import results
from benchmarks.reporting.tables import Table

Row = dict[str, Any]
WITHOUT_VLLM = {"vllm": "not installed"}


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
        "With scores, in a replayed graph. Heads of 128 in fp16. A copy moves "
        f"{copy_gbps:,.0f} GB/s. Dense attention is PyTorch's, over as many keys."
    )
    return table("Decode attention", columns, found, note)


def layers(rows: list[Row]) -> Table:
    names = ("attend", "and_merge", "and_insert")
    columns = ["heads", "cached", "requests", "scores", "attend, us", "and merge", "and insert"]
    found = [
        [row["heads"], f"{row['cached']:,}", str(row["batch"]), "yes" if row["scored"] else "no",
         *(f"{row[f'{name}_us']:.1f}" for name in names)]
        for row in rows if "attend_us" in row
    ]  # fmt: skip
    note = "In a replayed graph, heads of 128 in bf16. Every request evicts one token."
    return table("A layer of a decode step", columns, found, note)


def prompts(rows: list[Row]) -> Table:
    launches = ("gather", "stride_attention", "column_sums", "insertion")
    columns = [
        "stride", "prompt", "us a token and layer", "full attention, us",
        *("gather_strides, ms", "attend_strides, ms", "column_sums, ms", "insert_strides, ms"),
    ]  # fmt: skip
    found = [
        [f"{row['stride']:,}", f"{row['tokens']:,}", f"{row['us_per_token']:.2f}",
         f"{row['full_us_per_token']:.2f}", *(f"{row[f'{name}_ms']:.3f}" for name in launches)]
        for row in rows if "ms" in row
    ]  # fmt: skip
    note = "32 query and 8 KV heads of 128, fp16."
    return table("A prompt over 2,048 cached tokens", columns, found, note)


KINDS = {
    "identity": "tiny Llama",
    "windows": "two layers of the family",
    "latent": "two layers of the family",
    "recurrent": "two layers of the family",
    "drafts": "tiny Llama, with drafts",
    "8 bits": "tiny Llama, rows in 8 bits",
    "sessions": "tiny Llama, a chat in turns",
}
"""What ``gpu_engine`` compares with the oracle."""


def reason(row: Row) -> str:
    """Why an engine has no numbers: the first sentence of its error."""
    return row["error"].partition("; see ")[0].partition(". ")[0]


def engines(rows: list[Row]) -> Table:
    """Engines and the oracle: largest difference of a log-probability, or why there is none."""
    columns = ["policy or family", "model", "equal", "largest difference", "evicted", "reused"]
    found = []
    for row in rows:
        head = [row["policy"], KINDS[row["what"]]]
        if "error" in row:
            found.append([*head, "no", reason(row), "", ""])
            continue
        equal = "yes" if row["equal"] else "no"
        numbers = [f"{row['evicted']:,}", f"{row['reused']:,}"]
        found.append([*head, equal, f"{row['max_error']:.1e}", *numbers])
    note = (
        "Log-probabilities of 300 generated tokens a request, in fp32. evicted: tokens; reused: "
        "prompt tokens that a request took from another's snapshot, or from a session."
    )
    return table("Engines beside the oracle", columns, found, note)


def first_starts(rows: list[Row]) -> Table:
    columns = ["policy", "comparisons", "largest difference", "s"]
    found = [
        [row["policy"], "", reason(row), ""] if "error" in row else
        [row["policy"], str(row["comparisons"]), f"{row['largest_error']:.1e}",
         f"{row['check_s']:.0f}"]
        for row in rows
    ]  # fmt: skip
    note = "Layers of Llama 8B in bfloat16. Seconds include the compilation of kernels."
    return table("The check of the first start", columns, found, note)


def speed(rows: list[Row]) -> Table:
    columns = [
        "model", "policy", "prompt", "first token, s", "requests", "output tokens a second",
    ]  # fmt: skip
    found = [
        [f"Llama {row['model']}", row["policy"], "", reason(row), "", ""] if "error" in row else
        [f"Llama {row['model']}", row["policy"], f"{row['context']:,}",
         f"{row['first_token_s']:.2f}" if "first_token_s" in row else "",
         f"{row['requests']}" if "requests" in row else "",
         f"{row['output_tokens_per_s']:,.0f}" if "output_tokens_per_s" in row else ""]
        for row in rows
    ]  # fmt: skip
    note = "A first token is that of one request alone. Requests decode at once."
    return table("Speed of engines", columns, found, note)


def engine_tables(runs: list[Row]) -> list[Table]:
    """Tables of what runs of ``gpu_engine`` wrote."""
    rows = [row for run in runs for row in run["rows"]]
    compared = [row for row in rows if row["what"] in KINDS]
    timed = [row for row in rows if row["what"] == "speed"]
    checked = [row for row in rows if row["what"] == "check"]
    tables = [engines(compared)] if compared else []
    tables += [first_starts(checked)] if checked else []
    return tables + ([speed(timed)] if timed else [])


def check_tables(runs: list[Row]) -> list[Table]:
    """Tables of what runs of ``gpu_check`` wrote."""
    rows = {
        kind: [row for run in runs for row in run[kind]]
        for kind in ("checks", "attend", "layer", "prefill")
    }
    tables = [checks(rows["checks"])] if rows["checks"] else []
    tables += [decode(run["attend"], run["copy_gbps"]) for run in runs if run["attend"]]
    tables += [layers(rows["layer"])] if rows["layer"] else []
    return tables + ([prompts(rows["prefill"])] if rows["prefill"] else [])


def runs_in(folder: Path) -> dict[str, Row]:
    """What ``gpu_check`` and then ``gpu_engine`` wrote, by file.

    Raises:
        ValueError: none of them wrote anything, a run of toy sizes, or several cards.
    """
    patterns = ("gpu_check*.json", "gpu_engine*.json")
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    found = {file.name: json.loads(file.read_text("utf-8")) for file in files}
    if not found:
        raise ValueError(f"{folder}: no {' or '.join(patterns)} in it")
    for name, run in found.items():
        if run.get("tiny") or run.get("interpreted"):
            raise ValueError(f"{name}: toy sizes, which say nothing of a card; move it elsewhere")
    cards = {name: run["environment"]["gpu"] for name, run in found.items()}
    if len(set(cards.values())) > 1:
        said = "; ".join(f"{name}: {card}" for name, card in cards.items())
        raise ValueError(f"a folder for each card is needed: {said}")
    return found


def result(folder: Path, commit: str, command: str | None = None) -> Row:
    """The kept result of a folder: of ``gpu_check``, ``gpu_engine``, or both.

    Returns:
        As ``results.finish`` writes it; ``seconds`` is None if a run did not write its own.

    Raises:
        ValueError: as ``runs_in``.
    """
    found = runs_in(folder)
    check = [run for name, run in found.items() if name.startswith("gpu_check")]
    engine = [run for name, run in found.items() if name.startswith("gpu_engine")]
    parts = [
        ("gpu_check", check_tables(check) if check else []),
        ("gpu_engine", engine_tables(engine) if engine else []),
    ]
    known = [run["seconds"] for run in found.values() if "seconds" in run]  # of whole runs
    # The versions of the engines, if any ran: the kernels alone need no vLLM.
    environment = engine[0]["environment"] if engine else check[0]["environment"] | WITHOUT_VLLM
    ran = "; ".join(f"python -m benchmarks.{name}" for name, tables in parts if tables)
    return {
        "command": command or ran,
        "seconds": round(sum(known), 1) if len(known) == len(found) else None,
        "environment": environment | {"git_commit": commit, "git_dirty": False},
        "settings": {},
        "tables": [one.as_json() for _, tables in parts for one in tables],
        "data": {},
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", required=True, help="the commit that the card ran")
    parser.add_argument("--command", help="what ran on the card, with its options")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        found = result(args.folder, args.commit, args.command)
    except ValueError as error:
        raise SystemExit(f"benchmarks.reporting.gpu: {error}") from None
    args.out.write_text(results.as_text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
