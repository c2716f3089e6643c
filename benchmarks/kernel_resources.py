# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel and configuration ahead of time, and write what each needs.

    python -m benchmarks.kernel_resources            # docs/kernel_resources.md

No GPU is needed; sm_80, sm_90 and sm_100 are compiled with the ptxas that comes with Triton.
"""

import os
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

from benchmarks.gpu.kernels_alone import load

OUT = Path(__file__).resolve().parent.parent / "docs" / "kernel_resources.md"


def main() -> None:
    aot = load("testing.aot")
    shapes = (*aot.DEFAULT_SHAPES, *aot.OTHER_SHAPES, *aot.UNIT_SHAPES)
    found: dict[tuple[str, str, int], dict[int, object]] = {}
    for shape in shapes:
        for capability in aot.CAPABILITIES:
            for row in aot.resources_of(shape, capability):
                found.setdefault((row.kernel, row.label, row.warps), {})[capability] = row
    lines = [
        "# What the kernels need",
        "",
        "Registers a thread / bytes of shared memory a block / bytes spilled a thread, by compute",
        "capability, compiled ahead of time (`python -m benchmarks.kernel_resources`). No GPU ran",
        "these; `tests/kernels/test_compiled.py` bounds them.",
        "",
        "| kernel | shape | warps | " + " | ".join(f"sm_{c}" for c in aot.CAPABILITIES) + " |",
        "|---|---|---|" + "---|" * len(aot.CAPABILITIES),
    ]
    for (kernel, label, warps), rows in sorted(found.items()):
        cells = [
            f"{r.registers} / {r.shared} / {r.spilled}" for r in map(rows.get, aot.CAPABILITIES)
        ]
        lines.append(f"| {kernel} | {label} | {warps} | " + " | ".join(cells) + " |")
    OUT.write_text("\n".join(lines) + "\n")
    print(f"{len(found)} kernels and configurations in {OUT}")


if __name__ == "__main__":
    main()
