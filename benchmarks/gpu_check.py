# SPDX-License-Identifier: Apache-2.0
"""Kernels on a GPU: correct, capturable in a CUDA graph, and how fast.

    python -m benchmarks.gpu_check --out results/

Needs torch, triton and the folders ``kernels/`` and ``tests/kernels/``; no vLLM. ``--interpret``
runs the same code on the CPU with tiny sizes in Triton's interpreter: it checks this script, its
times mean nothing.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels_alone import without_the_plugin
from benchmarks.reporting.tables import table_of_json
from benchmarks.running.environment import fingerprint

Row = dict[str, Any]
KINDS = ("checks", "attend", "layer", "prefill")
BYTES = 1 << 30
"""Memory of the card for a process that checks."""
MOST_WORKERS = 16


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=8.0, help="no new timing after this long")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--interpret", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--workers", type=int, help="processes that check at once")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options, begin = parse_args(argv), time.monotonic()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    without_the_plugin()
    import torch

    if not options.interpret and not torch.cuda.is_available():
        print("gpu_check: no CUDA device; --interpret runs this script on the CPU", file=sys.stderr)
        return 2
    workers = options.workers or default_workers(options.interpret)
    result = run(options.interpret, 60 * options.minutes, workers, options.only)
    result["seconds"] = round(time.monotonic() - begin, 1)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "gpu_check_interpreted.json" if options.interpret else "gpu_check.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0 if result["correct"] else 1


def default_workers(interpret: bool) -> int:
    """Processes that check at once. Each needs a core, and its CUDA context memory of the card."""
    import torch

    most = len(os.sched_getaffinity(0)) - 2
    if not interpret:
        most = min(most, torch.cuda.mem_get_info()[0] // BYTES)
    return max(1, min(most, MOST_WORKERS))


def run(interpret: bool, seconds: float, workers: int, kinds: Sequence[str] = KINDS) -> Row:
    """The checks and timings of ``kinds``, as one JSON value."""
    import torch

    from benchmarks.gpu import decode_layer, timings

    device = torch.device("cpu" if interpret else "cuda")
    sizes = timings.TINY if interpret else timings.Sizes()
    result: Row = {"interpreted": interpret, "environment": fingerprint()}
    result["checks"] = all_checks(interpret, workers) if "checks" in kinds else []
    result["correct"] = all(row["error"] is None for row in result["checks"])
    bench = timings.Bench(device, time.monotonic() + seconds)
    result["copy_gbps"] = timings.copy_bandwidth(bench, sizes)
    timed = {
        "attend": timings.attend_rows(bench, sizes, result["copy_gbps"]),
        "layer": decode_layer.layer_rows(bench, sizes),
        "prefill": timings.prefill_rows(bench, sizes),
    }
    for kind, rows in timed.items():  # generators: what is not wanted does not run
        result[kind] = list(rows) if kind in kinds else []
    return result


def all_checks(interpret: bool, workers: int) -> list[Row]:
    """All in several processes: most of the time compiles kernels on one core."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        parts = [pool.submit(part_of_checks, interpret, i, workers) for i in range(workers)]
        rows = [row for part in parts for row in part.result()]
    return sorted(rows, key=lambda row: row["number"])


def part_of_checks(interpret: bool, part: int, parts: int) -> list[Row]:
    """Every ``parts``-th check from number ``part`` on; the entry point of a worker."""
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    without_the_plugin()
    import torch

    from tests.kernels.card_checks import correctness

    torch.set_num_threads(1)  # of references on the CPU: processes must not compete for its cores
    return correctness(torch.device("cpu" if interpret else "cuda"), interpret, part, parts)


def table(result: Row) -> str:
    """What was found, as text."""
    failed = [row for row in result["checks"] if row["error"] is not None]
    passed = len(result["checks"]) - len(failed)
    lines = [
        result["environment"]["gpu"] or "no GPU: interpreted, times mean nothing",
        f"checks: {passed} passed, {len(failed)} failed",
        *(f"  FAILED {row['check']}: {row['error']}" for row in failed),
        f"copy bandwidth: {result['copy_gbps']:.0f} GB/s",
    ]
    for kind in KINDS[1:]:
        lines += ["", table_of_json(kind, result[kind]).markdown()] if result[kind] else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
