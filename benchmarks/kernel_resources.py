# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel ahead of time; write what each needs, and what decode attention executes.

    python -m benchmarks.kernel_resources            # docs/kernel_resources.md

No GPU is needed; sm_80, sm_90 and sm_100 are compiled with the ptxas that comes with Triton.
"""

import os
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from benchmarks.gpu.kernels_alone import load

ABOUT_DECODE = """\
# What the kernels execute and need

Compiled ahead of time, and counted (`python -m benchmarks.kernel_resources`). **No GPU ran them.**

## Decode attention

For one cached key of one KV head: warp instructions of the inner loop, and of these some kinds,
from the disassembled binary. *Programs* are those that a multiprocessor of an H100 holds at a time.
*Bytes beyond K, V* are all other global bytes that a program asks for: block numbers, words,
rotations, what goes to the scores, and its queries and partial results, as a share of K and V.
*Buffers* are tiles of K and V in shared memory. The last columns are an **estimate** of how many
times an H100's memory bandwidth could be reached if only this limited it: its issue slots (4 a
cycle and multiprocessor, 1.755 GHz), its L2 cache (5.5 TB/s assumed), or the bytes on their way
(1 us assumed from a load to its data). Above 1, memory is the limit.
`tests/kernels/test_machine_code.py` holds bounds on these numbers.

"""
ABOUT_RESOURCES = """

## All kernels

Registers a thread / bytes of shared memory a block / bytes spilled a thread, by compute
capability, for some shapes; `tests/kernels/test_compiled.py` compiles many more and bounds them.

"""
OUT = Path(__file__).resolve().parent.parent / "docs" / "kernel_resources.md"


HEADS = ["instructions", "FFMA", "HMMA", "MUFU", "shared loads", "global loads", "barriers"]
SHARES = ["issue", "L2", "latency"]


def resources() -> list[str]:
    """What every kernel needs, one line a kernel and shape."""
    aot = load("testing.aot")
    found: dict[tuple[str, str, int], dict[int, Any]] = {}
    for shape in aot.TABLED_SHAPES:
        for capability in aot.CAPABILITIES:
            for row in aot.resources_of(shape, capability):
                found.setdefault((row.kernel, row.label, row.warps), {})[capability] = row
    lines = [
        "| kernel | shape | warps | " + " | ".join(f"sm_{c}" for c in aot.CAPABILITIES) + " |",
        "|---|---|---|" + "---|" * len(aot.CAPABILITIES),
    ]
    for (kernel, label, warps), rows in sorted(found.items()):
        cells = [
            f"{r.registers} / {r.shared} / {r.spilled}" for r in map(rows.get, aot.CAPABILITIES)
        ]
        lines.append(f"| {kernel} | {label} | {warps} | " + " | ".join(cells) + " |")
    return lines


def decode() -> list[str]:
    """What decode attention executes for a cached key and KV head, one line a binary."""
    code = load("testing.machine_code")
    lines = [
        "| for | kernel | shape | " + " | ".join(HEADS) + " | registers | shared memory | programs"
        " | bytes beyond K, V | buffers | " + " | ".join(SHARES) + " |",
        "|---|---|---|" + "---|" * (len(HEADS) + 5 + len(SHARES)),
    ]
    for capability in (90, 80, 100):
        for shape in code.DECODE_SHAPES:
            counts = code.decode_counts(shape, capability)
            own = counts.resources
            numbers = (counts.instructions, counts.ffma, counts.hmma, counts.mufu)
            loads = (counts.shared_loads, counts.global_loads, counts.barriers)
            shares = (counts.issue_share(), counts.l2_share(), counts.latency_share())
            cells = [f"sm_{capability}", own.kernel, own.label]
            cells += [f"{number:.1f}" for number in (*numbers, *loads)]
            cells += [str(own.registers), str(own.shared), str(counts.programs())]
            cells += [f"{counts.other_bytes / counts.kv_bytes:.1%}", str(counts.buffers)]
            lines.append("| " + " | ".join(cells + [f"{share:.2f}" for share in shares]) + " |")
    return lines


def main() -> None:
    counted, needed = decode(), resources()
    text = ABOUT_DECODE + "\n".join(counted) + ABOUT_RESOURCES + "\n".join(needed) + "\n"
    OUT.write_text(text)
    print(f"{len(counted) + len(needed) - 4} lines in {OUT}")


if __name__ == "__main__":
    main()
