# SPDX-License-Identifier: Apache-2.0
"""Times ``attend_strides`` with every plausible configuration: what ``configs.py`` should choose.

    python -m benchmarks.gpu.tune --out results/

One stride of 512 tokens over 2,048 cached ones, 32 query and 8 KV heads of 128, in fp16. Processes
compile at once; one then times. ``--interpret`` runs the same code on the CPU with tiny sizes.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels_alone import without_the_plugin

Choice = tuple[int, int, int, int]
"""Queries and keys of a tile, warps, stages."""
STRIDE = 512


def choices(interpret: bool) -> list[Choice]:
    if interpret:
        return [(16, 16, 4, 1), (32, 16, 4, 1)]
    return list(itertools.product((64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)))


def prompt(choice: Choice, interpret: bool) -> Any:
    """A clock, and a stride that is read with this configuration."""
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    without_the_plugin()
    import torch

    from benchmarks.gpu import timings
    from vllm_cascade.kernels.triton import configs

    device = torch.device("cpu" if interpret else "cuda")
    sizes = timings.TINY if interpret else timings.Sizes()
    queries, tile, warps, stages = choice
    key = "strides", configs.capability(device), "float16", sizes.head_size
    configs.TUNED[key] = configs.Config(tile, warps, stages, queries)
    bench = timings.Bench(device, time.monotonic())
    stride = sizes.prefill_strides[0] if interpret else STRIDE
    return bench, timings._Prompt(bench, sizes, stride, *sizes.heads[0], torch.float16)


def compiled(choice: Choice, interpret: bool) -> str:
    """Compile it into Triton's cache. Returns why that failed, or nothing."""
    try:
        prompt(choice, interpret)[1].attend()
    except Exception as error:  # too much shared memory, or any other of the compiler's reasons
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return ""


def tune(interpret: bool, workers: int) -> list[dict[str, Any]]:
    """A row per configuration, the fastest first; those that failed come last."""
    wanted = choices(interpret)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failures = list(pool.map(compiled, wanted, [interpret] * len(wanted)))
    rows = []
    for choice, failure in zip(wanted, failures, strict=True):
        row: dict[str, Any] = dict(zip(("queries", "tile", "warps", "stages"), choice, strict=True))
        if failure:
            rows.append(row | {"error": failure})
        else:
            bench, stride = prompt(choice, interpret)
            rows.append(row | {"ms": bench.milliseconds(stride.attend)})
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for tune.json")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--interpret", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args(arguments)
    rows = tune(options.interpret, options.workers)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "tune_interpreted.json" if options.interpret else "tune.json"
        (options.out / name).write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
