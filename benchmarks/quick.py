# SPDX-License-Identifier: Apache-2.0
"""The quick form of every benchmark, one after the other: ``make bench``.

Each question is a command of its own, with small built-in inputs; a run that fails is named at the
end, and the others still run. Tables are printed, and kept as JSON in ``--folder``. What
docs/RESULTS.md shows is not touched: most of it comes from longer runs with another model.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.running import leash
from benchmarks.running.environment import ROOT

FOLDER = ROOT / "results"
"""For the JSON, unless ``--folder`` says otherwise; git ignores it."""
AT_A_TIME = str(min(2, os.cpu_count() or 1))
FEW = ["--policies", "sink", "cascade", "dgc", "--engines", AT_A_TIME]  # an engine starts in 15 s
SMALL_TABLES = ["--engines", AT_A_TIME, "--tokens", "4000", "--limit", "20", "--samples", "6"]

PLAN: dict[str, list[str]] = {
    "throughput": ["throughput", "--preset", "quick", "--server-args=--enforce-eager"],
    "cpu-attention": ["cpu_attention", "--seconds", "0.7"],
    "speculation": ["speculation", "--requests", "1", "--before", "1100", "--output-len", "48"],
    "perplexity": [
        *("perplexity", "--tokens", "16000", "--capacity", "516", "--stride", "128"),
        *("--engines", AT_A_TIME),
    ],
    "recall-associative": [
        *("recall", "associative", "--depths", "0.1", "0.9", "--samples", "5", *FEW)
    ],
    "recall-rewind": ["recall", "rewind", "--samples", "8", *FEW],
    "recall-passkey": ["recall", "passkey", "--samples", "2", *FEW],
    "harness": ["harness", "--suite", "book", "--limit", "10", *FEW],
    # A table or two of each paper: every row is an engine. `benchmarks.papers --list` has all.
    "papers-cascade": ["papers", "cascade-1", *SMALL_TABLES],
    "papers-buzz": ["papers", "buzz-3", *SMALL_TABLES],
    "papers-dgc": ["papers", "dgc-1", *SMALL_TABLES],
    "papers-lazy": [
        *("papers", "lazy-1", "--tokens", "2000", "--prompt", "600", "--new-tokens", "32")
    ],
}


def command(name: str, folder: Path = FOLDER) -> list[str]:
    """A question's command line."""
    module, *options = PLAN[name]
    out = str(folder / f"{name}.json")
    return [sys.executable, "-m", f"benchmarks.{module}", *options, "--out", out]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__)
    parser.add_argument("questions", nargs="*", help=f"default: all of {', '.join(PLAN)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the JSON files")
    args = parser.parse_args(argv)
    unknown = set(args.questions) - set(PLAN)
    if unknown:
        parser.error(f"choose from {', '.join(PLAN)}, not {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    args = parse_args(argv)
    failed, begin = [], time.perf_counter()
    for name in args.questions or PLAN:
        start = time.perf_counter()
        print(f"\n== {name}", flush=True)
        done = leash.run(command(name, args.folder), cwd=ROOT)
        print(f"== {name}: {time.perf_counter() - start:,.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    print(f"All in {time.perf_counter() - begin:,.0f} s.")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
