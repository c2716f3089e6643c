# SPDX-License-Identifier: Apache-2.0
"""Kernels on a GPU: correct, capturable in a CUDA graph, and how fast.

    python -m benchmarks.gpu_check --out results/

Needs torch, triton and the folders ``kernels/`` and ``tests/kernels/``; no vLLM. ``--interpret``
runs the same code on the CPU with tiny sizes in Triton's interpreter: it checks this script, its
times mean nothing.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels_alone import without_the_plugin

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=8.0, help="no new timing after this long")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 1) - 2),
        help="processes that compile and check kernels at once",
    )
    options = parser.parse_args(arguments)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    without_the_plugin()
    import torch

    if not options.interpret and not torch.cuda.is_available():
        print("gpu_check: no CUDA device; --interpret runs this script on the CPU", file=sys.stderr)
        return 2
    result = run(options.interpret, 60 * options.minutes, options.workers)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "gpu_check_interpreted.json" if options.interpret else "gpu_check.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0 if result["correct"] else 1


def run(interpret: bool, seconds: float, workers: int) -> Row:
    """Everything, as one JSON value."""
    import torch

    from benchmarks.gpu import caching, timings

    device = torch.device("cpu" if interpret else "cuda")
    sizes = timings.TINY if interpret else timings.Sizes()
    result: Row = {"interpreted": interpret, "environment": fingerprint()}
    result["checks"] = all_checks(interpret, workers)
    result["correct"] = all(row["error"] is None for row in result["checks"])
    bench = timings.Bench(device, time.monotonic() + seconds)
    result["copy_gbps"] = timings.copy_bandwidth(bench, sizes)
    result["caching"] = list(caching.caching_rows(bench, sizes))
    result["attend"] = list(timings.attend_rows(bench, sizes, result["copy_gbps"]))
    result["prefill"] = list(timings.prefill_rows(bench, sizes))
    result["split"] = list(timings.split_rows(bench, sizes))
    result["goals"] = [] if interpret else goals(result)
    return result


def fingerprint() -> Row:
    """GPU, driver, versions and commit."""
    import torch
    import triton

    from benchmarks.running.environment import _git

    result: Row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        result["gpu"] = properties.name
        result["gpu_memory"] = properties.total_memory
        result["capability"] = f"{properties.major}.{properties.minor}"
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=True)
            result["driver"] = done.stdout.splitlines()[0].strip()
        except (OSError, subprocess.CalledProcessError, IndexError):
            result["driver"] = None
    return result


LATENT: Row = {
    "num_heads": 1, "head_size": 576, "latent": 512, "rotary_dim": 64, "interleaved": True,
}  # fmt: skip
"""Rows of DeepSeek and Kimi, whose value is their key's end."""


def cases(interpret: bool) -> dict[str, Any]:
    """Shapes to check: every head size and type, group sizes, and all that changes logits."""
    import torch

    from tests.kernels.random_pool import Case

    if interpret:
        small = {"head_size": 16, "num_heads": 1, "lengths": (0, 17, None), "strides": (9,)}
        return {"fp32": Case(**small), "bf16": Case(**small, group=1, dtype=torch.bfloat16)}
    base = {"lengths": (0, 1, 15, 16, 17, None, 250, 611), "num_heads": 2, "splits": None}
    base["strides"] = (1, 7, 64, 33, 200)
    found = {}
    for size in (64, 80, 96, 128, 256):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            name = f"{size} {str(dtype).removeprefix('torch.')}"
            found[name] = Case(**base, head_size=size, dtype=dtype)
    found["long"] = Case(**base | {"lengths": (2052, 8197)}, head_size=128, dtype=torch.float16)
    options: dict[str, Row] = {
        "gqa 1": {"group": 1},
        "gqa 4": {"group": 4},
        "gqa 8": {"group": 8},
        "per head": {"per_head": True},
        "block 32": {"block_size": 32},
        "partial": {"rotary_dim": 32},
        "interleaved": {"interleaved": True},
        "alibi": {"alibi": True},
        "soft cap": {"softcap": 2.0},
        "logit scale": {"logit_scale": True},
        "max": {"reduction": "max"},
        "median": {"reduction": "median", "group": 8},
        "resident": {"newest_stays": False},
        "per query": {"per_age": True},
    }
    for name, option in options.items():
        found[name] = Case(**base, **option)
    for group, dtype in ((16, torch.bfloat16), (128, torch.bfloat16), (16, torch.float32)):
        name = f"latent, {group} heads {str(dtype).removeprefix('torch.')}"
        found[name] = Case(**base | LATENT, group=group, dtype=dtype)
    return found


def unit_cases(interpret: bool) -> dict[str, Any]:
    """Pages of units; strides begin where units do, so lengths are their multiples."""
    from tests.kernels.random_pool import Case

    found = {}
    for unit in (16,) if interpret else (8, 16, 32, 64):
        lengths = (unit,) if interpret else (0, unit, None, 5 * unit, 512)
        base = {"unit": unit, "block_size": max(unit, 16), "lengths": lengths, "strides": (9,)}
        if interpret:
            return {"units": Case(**base, head_size=16, num_heads=1)}
        base |= {"num_heads": 2, "splits": None, "strides": (1, 7, 64, 33, 200)}
        options = {}, {"group": 1}, {"group": 4, "per_head": True}, {"head_size": 128}, LATENT
        for option in options:
            found[f"units of {unit} {option}"] = Case(**base | option)
    return found


def split_cases(interpret: bool) -> dict[str, tuple[Any, Any]]:
    """Strides whose attention is split over keys, each with its parts: some end in each of them."""
    import torch

    from tests.kernels.random_pool import Case
    from vllm_cascade.kernels.triton.configs import Split

    if interpret:
        small = Case(head_size=16, num_heads=1, group=1, lengths=(0, 17, None), strides=(9,))
        return {"fp32": (small, Split(2, 16))}
    base = {"lengths": (0, 190, None, 250, 611, 2052), "num_heads": 2, "strides": (7, 64, 200)}
    options: dict[str, Row] = {
        f"{size} {str(dtype).removeprefix('torch.')}": {"head_size": size, "dtype": dtype}
        for size in (64, 128, 256)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    options["per head"] = {"per_head": True, "alibi": True}
    options["sinks"] = {"sinks": True, "softcap": 2.0, "logit_scale": True, "group": 4}
    options["units"] = {"unit": 16, "lengths": (0, 192, 608), "dtype": torch.bfloat16}
    found = {name: (Case(**base | option), Split(4, 192)) for name, option in options.items()}
    large = {"head_size": 128, "num_heads": 1, "group": 8, "dtype": torch.bfloat16}
    found["a rank of 8"] = Case(**large, lengths=(2052,), strides=(256,)), Split(8, 320)
    return found


def all_checks(interpret: bool, workers: int) -> list[Row]:
    """``correctness`` in several processes: most of its time compiles kernels on one core."""
    if workers == 1:
        return part_of_checks(interpret, 0, 1)
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

    return correctness(torch.device("cpu" if interpret else "cuda"), interpret, part, parts)


def correctness(device: Any, interpret: bool, part: int = 0, parts: int = 1) -> list[Row]:
    """Every kernel against its reference, and a captured step against an eager one.

    Only checks whose number is ``part`` modulo ``parts`` run.
    """
    from tests.kernels import checks, recall_checks

    rows: list[Row] = []
    numbers = itertools.count()

    def check(name: str, call: Any) -> None:
        number = next(numbers)
        if number % parts != part:
            return
        begin = time.monotonic()
        row: Row = {"check": name, "number": number, "error": None}
        try:
            row["largest"] = call()
        except Exception as error:  # a kernel may fail in any way; the others are still worth it
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        row["seconds"] = round(time.monotonic() - begin, 2)
        rows.append(row)

    def insert_strides(name: str, case: Any) -> None:
        check(f"chunks {name}", lambda: checks.check_chunks(case, device))
        check(f"insert strides {name}", lambda: checks.check_insert_strides(case, device))
        case = replace(case, scored=False)
        check(f"given scores {name}", lambda: checks.check_insert_strides(case, device))

    for name, case in cases(interpret).items():
        check(f"decode {name}", lambda c=case: checks.check_decode(c, device))
        check(f"prefill {name}", lambda c=case: checks.check_prefill(c, device))
        every_rule = interpret or name in ("128 float16", "per head", "resident", "per query")
        for variant in range(checks.NUM_RULES) if every_rule else (4,):
            check(
                f"insert {name}, rule {variant}",
                lambda c=case, v=variant: checks.check_insert(c, device, v),
            )
        check(f"assign {name}", lambda c=case: checks.check_assign(c, device))
        insert_strides(name, case)
    for name, case in unit_cases(interpret).items():
        check(f"decode {name}", lambda c=case: checks.check_decode(c, device))
        check(f"prefill {name}", lambda c=case: checks.check_prefill(c, device))
        check(f"insert {name}", lambda c=case: checks.check_insert_units(c, device))
        insert_strides(name, case)
    for name, (case, split) in split_cases(interpret).items():
        check(f"in parts {name}", lambda c=case, s=split: checks.check_split(c, device, s))
    for name, case in unit_cases(interpret).items():
        last = replace(case, lengths=tuple(n and max(n - 1, 0) for n in case.lengths))
        check(f"judge {name}", lambda c=case: recall_checks.check_judge(c, device))
        check(f"judge strides {name}", lambda c=case: recall_checks.check_judge(c, device, 40, 20))
        check(f"recall {name}", lambda c=case: recall_checks.check_recall(c, device))
        check(f"store {name}", lambda c=last: recall_checks.check_store_tokens(c, device))
        check(f"store strides {name}", lambda c=case: recall_checks.check_store_strides(c, device))
    check("schedule", lambda: checks.check_schedule(device))
    check("schedule, units", lambda: checks.check_schedule(device, unit=16))
    check("rotation table", lambda: checks.check_rotation_table(device))
    if not interpret:
        check("CUDA graph", lambda: graph_equals_eager(device))
    return rows


def two_policies(device: Any, cached: int) -> tuple[Any, Any]:
    """Tables of a full cascade, and of one that deletes four tokens in cells every fourth step.

    Returns:
        The schedule, and the second policy's further rules, int32 ``[1, 4]``.
    """
    import torch

    from benchmarks.gpu.caching import cascade_schedule
    from vllm_cascade.kernels.triton.schedule import ScheduleTables

    one = cascade_schedule(device, 4, 64, 4)
    grow = [[0, 0, 0, 0, 0, 0, cached + j, cached + 3] for j in (1, 2, 3)]
    comb = [100, 103, 2, 3, 0, 1, cached, cached + 3]
    other = torch.tensor([*grow, comb], dtype=torch.int32, device=device)
    head = one.heads.clone()
    head[0, :3] = torch.tensor([len(one.table), 0, 4])
    tables = torch.cat([one.table, other]), torch.cat([one.heads, head])
    rules = torch.tensor([[50, 54, 2, -2]], dtype=torch.int32, device=device)
    return ScheduleTables(*tables), rules


def graph_equals_eager(device: Any) -> float:
    """40 replays of a captured decode step leave the same bytes and outputs as 40 eager steps."""
    from dataclasses import replace

    import torch

    from benchmarks.gpu.timings import Layer
    from vllm_cascade.kernels.triton.attend import attend
    from vllm_cascade.kernels.triton.combine import merge
    from vllm_cascade.kernels.triton.schedule import schedule

    torch.manual_seed(0)
    batch, heads, cached = 5, 8, 4 + 4 * 64
    tables, rules = two_policies(device, cached)
    schedule_of = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32, device=device)
    twins = [Layer.make(device, batch, heads, 128, cached, torch.float16, spare=0)]
    first = twins[0]
    copies = {name: getattr(first, name).clone() for name in ("kv", "rank", "born", "score")}
    twins.append(replace(first, **copies, steps=first.steps.clone()))
    lengths = [torch.full((batch,), cached + 4, dtype=torch.int32, device=device) for _ in twins]
    for seq_lens in lengths:
        seq_lens[3] = 0  # a padded row
    positions = torch.zeros(batch, dtype=torch.int64, device=device)
    query = torch.randn(batch, 4 * heads, 128, dtype=torch.float16, device=device)
    key = torch.randn(batch, heads, 128, dtype=torch.float16, device=device)
    outputs = [torch.empty_like(query) for _ in twins]

    def step(i: int) -> None:
        layer = twins[i]
        lengths[i].add_((lengths[i] > 0).int())
        schedule(
            seq_lens=lengths[i],
            blocks=layer.table,
            tables=tables,
            schedule_of=schedule_of,
            steps=layer.steps,
            positions=positions,
        )
        parts, parts_lse, logits, own = attend(
            query=query,
            key=key,
            value=key,
            kv=layer.kv,
            rank=layer.rank,
            born=layer.born,
            table=layer.table,
            steps=layer.steps,
            rotation=layer.decode_rotation,
            slopes=None,
            logit_scale=None,
            scale=0.088,
            softcap=0.0,
            interleaved=False,
            splits=4,
            keep_logits=True,
        )
        lse = merge(parts, parts_lse, layer.steps, outputs[i])
        new = layer.update(logits, own, lse)
        layer.insert(key, key, new, rules=rules, has_cells=True)

    step(0)  # compiles; the twin makes the same first step eagerly
    step(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(1)
    for number in range(40):
        query.normal_()
        key.normal_()
        step(0)
        graph.replay()
        for name in copies:
            a, b = getattr(twins[0], name), getattr(twins[1], name)
            assert torch.equal(a, b), f"{name} differs after replay {number}"
        assert torch.equal(*outputs), f"outputs differ at replay {number}"
    return 0.0


def goals(result: Row) -> list[Row]:
    """The issue's goals, each with what was measured."""

    def measured(kind: str) -> list[Row]:
        return [row for row in result[kind] if "ms" in row]

    decode = [row for row in measured("attend") if row["batch"] >= 64 and row["cached"] == 2048]
    rows: list[Row] = []

    def goal(text: str, values: list[float], reached: bool) -> None:
        value = [round(v, 3) for v in values]
        rows.append({"goal": text, "measured": value, "reached": bool(values) and reached})

    shares = [row["of_copy"] for row in decode]
    goal("attend >= 0.75 of copy bandwidth", shares, all(v >= 0.75 for v in shares))
    costs = [row["over_plain"] for row in decode]
    goal("attend <= 1.15 x plain build", costs, all(v <= 1.15 for v in costs))
    speedups = [row["speedup"] for row in measured("caching") if row["score_update"]]
    goal("caching >= 20 x concatenation", speedups, all(v >= 20 for v in speedups))
    for stride in sorted({row["stride"] for row in measured("prefill")}):
        times = [
            row["us_per_token"]
            for row in measured("prefill")
            if row["stride"] == stride and row["tokens"] >= 8192
        ]
        flat = bool(times) and max(times) <= 1.05 * min(times)
        goal(f"prefill flat to 5 %, stride {stride} (us a token)", times, flat)
    return rows


def table(result: Row) -> str:
    """What was found, as text."""
    lines = []
    failed = [row for row in result["checks"] if row["error"] is not None]
    passed = len(result["checks"]) - len(failed)
    environment = result["environment"]
    lines.append(f"{environment.get('gpu', 'no GPU: interpreted, times mean nothing')}")
    lines.append(f"checks: {passed} passed, {len(failed)} failed")
    lines += [f"  FAILED {row['check']}: {row['error']}" for row in failed]
    lines.append(f"copy bandwidth: {result['copy_gbps']:.0f} GB/s")
    for kind in ("attend", "caching", "prefill", "split"):
        rows = result[kind]
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "what"))
        lines.append(f"\n{kind}")
        lines.append("  ".join(f"{column:>14}" for column in columns))
        for row in rows:
            cells = (row.get(column, "") for column in columns)
            text = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells)
            lines.append("  ".join(f"{cell:>14}" for cell in text))
    if result["goals"]:
        lines.append("\ngoals")
    for row in result["goals"]:
        lines.append(f"  {'yes' if row['reached'] else 'NO '}  {row['goal']}: {row['measured']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
