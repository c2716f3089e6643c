# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel ahead of time; write what each needs, and what attention executes.

    python -m benchmarks.kernel_resources            # docs/kernel_resources.md

No GPU is needed; sm_80, sm_90 and sm_100 are compiled with the ptxas that comes with Triton.
"""

import itertools
import os
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from benchmarks.gpu.kernels_alone import without_the_plugin

without_the_plugin()

from tests.kernels import aot  # noqa: E402
from tests.kernels import machine_code as code  # noqa: E402

ABOUT_DECODE = """\
# What the kernels execute and need

Compiled ahead of time, and counted (`python -m benchmarks.kernel_resources`). No GPU was used.

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
ABOUT_PROMPTS = """

## Prompts

For 32 logits of a stride's queries with cached keys: warp instructions of a turn of the inner loop,
and of these some kinds, as above. Branches count as taken: only the last tile of cached keys, and
the stride's own, need masks. `attend_strides` is a stride's attention, `column_sums` what makes its
scores.

"""
ABOUT_JUDGE = """

## The judge of recall

For one stored key of one KV head, whenever a request chooses which evicted units come back: warp
instructions of the inner loop, and of these some kinds, as above; *integers* are products of 8-bit
numbers on tensor cores. *Bytes* are a key's, with its scale; what is written beside, 4 bytes for
each unit, query head and token that asks, is not in them. *Issue* is an **estimate** of how many
times an H100's memory bandwidth could be reached if only its issue slots limited it. One token
asks, or 32 of a prompt's stride.

"""
ABOUT_RESOURCES = """

Over the bus between host and device, by the shapes of what is copied, for all layers of a model
with 32 layers, 8 KV heads of 128 channels in 16 bits and units of 16: a request that decodes stores
a unit every 16 tokens, and with `recall: 8` reads at most 8 at a choice, every 4 tokens by
default; units that stay are not read again.

| what | KiB a unit, or a choice | KiB a decoded token |
|---|---|---|
| a unit stored | 2,048 | 128 |
| recalled, 1 of 8 exchanged | 2,048 | 512 |
| all 8 exchanged | 16,384 | 4,096 |

## All kernels

Registers a thread / bytes of shared memory a block / bytes spilled a thread, by compute
capability, for some shapes; `tests/kernels/test_compiled.py` compiles many more and bounds them.

"""
OUT = Path(__file__).resolve().parent.parent / "docs" / "kernel_resources.md"


HEADS = ["instructions", "FFMA", "HMMA", "MUFU", "shared loads", "global loads", "barriers"]
SHARES = ["issue", "L2", "latency"]


def resources() -> list[str]:
    """What every kernel needs, one line a kernel and shape."""
    found: dict[tuple[str, str, int], dict[int, Any]] = {}
    shapes = [(shape, aot.resources_of) for shape in aot.TABLED_SHAPES]
    shapes += [(shape, aot.recall_resources) for shape in aot.TABLED_RECALL]
    for shape, needs in shapes:
        for capability in aot.CAPABILITIES:
            for row in needs(shape, capability):
                rows = found.setdefault((row.kernel, row.label, row.warps), {})
                rows.setdefault(capability, row)  # a stride comes before a chunk
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
    lines = [
        "| for | kernel | shape | " + " | ".join(HEADS) + " | registers | shared memory | programs"
        " | bytes beyond K, V | buffers | " + " | ".join(SHARES) + " |",
        "|---|---|---|" + "---|" * (len(HEADS) + 5 + len(SHARES)),
    ]
    for capability in (90, 80):
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


def prompts() -> list[str]:
    """What a stride's kernels execute for 32 logits, one line a binary."""
    heads = [*HEADS, "registers", "shared memory", "programs"]
    lines = [
        "| for | kernel | shape | " + " | ".join(heads) + " |",
        "|---|---|---|" + "---|" * len(heads),
    ]
    for capability, shape in itertools.product((90, 80), code.PROMPT_SHAPES):
        for counts in code.prompt_counts(shape, capability):
            own = counts.resources
            numbers = (counts.instructions, counts.ffma, counts.hmma, counts.mufu)
            numbers += (counts.shared_loads, counts.global_loads, counts.barriers)
            cells = [f"sm_{capability}", own.kernel, own.label, *(f"{n:.1f}" for n in numbers)]
            cells += [str(own.registers), str(own.shared), str(counts.programs())]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def judge() -> list[str]:
    """What the judge of recall executes for a stored key, one line a binary."""
    kinds = ["instructions", "integers", "MUFU", "shared loads", "global loads", "barriers"]
    heads = [*kinds, "registers", "shared memory", "bytes", "buffers", "issue"]
    lines = ["| for | shape | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for capability in (90, 80):
        shapes = [shape for shape in aot.TABLED_RECALL if shape.latent is None]  # a page is short
        for shape, asking in itertools.product(shapes, (1, 32)):
            counts = code.judge_counts(shape, capability, asking)
            own = counts.resources
            numbers = (counts.instructions, counts.integers, counts.mufu)
            numbers += (counts.shared_loads, counts.global_loads, counts.barriers)
            cells = [f"sm_{capability}", own.label, *(f"{number:.1f}" for number in numbers)]
            cells += [str(own.registers), str(own.shared), str(counts.key_bytes)]
            cells += [str(counts.buffers), f"{counts.issue_share():.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parts = decode(), prompts(), judge(), resources()
    abouts = ABOUT_DECODE, ABOUT_PROMPTS, ABOUT_JUDGE, ABOUT_RESOURCES
    pairs = zip(abouts, parts, strict=True)
    OUT.write_text("".join(about + "\n".join(lines) for about, lines in pairs) + "\n")
    print(f"{sum(map(len, parts)) - 2 * len(parts)} lines in {OUT}")


if __name__ == "__main__":
    main()
