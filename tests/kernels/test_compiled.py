# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled ahead of time for real GPUs: registers, shared memory, no spills.

Compiling needs Triton without its interpreter, hence a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.kernels.aot import MAX_SHARED, SMALL_BLOCKS

COMPILE = """
import json, sys
from dataclasses import asdict
from benchmarks.gpu.kernels_alone import without_the_plugin
without_the_plugin()
from tests.kernels import aot
shapes = eval(sys.argv[1], vars(aot))
rows = []
if not shapes:
    rows = [asdict(row) for name in sys.argv[2:] for row in aot.copy_resources(int(name))]
for shape in shapes:
    for capability in map(int, sys.argv[2:]):
        resources = aot.recall_resources if shape.recall else aot.resources_of
        resources = aot.draft_resources if shape.drafts else resources
        rows += map(asdict, resources(shape, capability))
print(json.dumps(rows))
"""
KERNELS = {
    "schedule", "attend", "merge", "merge_scored", "update", "assign", "insert", "gather_strides",
    "attend_strides", "gather_chunks", "write_chunks", "column_sums", "insert_strides",
}  # fmt: skip


RECALL = {
    "ask", "judge", "weigh", "choose", "bring", "remember", "list_gone", "store_units",
    "keep_of_strides", "insert_strides",
}  # fmt: skip
SCORED = {"column_sums", "merge_scored", "update"}
IN_UNITS = KERNELS - {"attend"} | {"attend_units"}


def printed(code: str, *arguments: str | int) -> list[str]:
    """The lines that a process without the interpreter prints."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def compiled(shapes: str, *capabilities: int) -> list[dict[str, Any]]:
    return json.loads(printed(COMPILE, shapes, *capabilities)[-1])


SPILLED = {
    ("attend", ""): 8,
    ("attend", " x 256"): 96,
    ("attend", " x 512"): 96,
    ("attend", " x 576"): 64,
    ("attend", "stored as"): 72,
    ("attend", " x 256, bfloat16, stored as"): 264,
    ("ask", "units of 4"): 8,
    ("ask", " x 576"): 8,
    ("judge", "units of 4"): 8,
    ("choose", "units of 4"): 16,
    ("attend_units", "stored as"): 40,
    ("attend_units", " x 512"): 112,
    ("attend_units", " x 512, float16, stored as"): 152,
    ("attend_units", " x 512, bfloat16, stored as"): 152,
    ("write_chunks", "stored as"): 8,
    ("insert_strides", " x 576, latents of 512"): 72,
    ("insert_strides", " x 512, float16, stored as int8"): 56,
}
"""Bytes a thread that a kernel may spill, by words of its label. Decode is two registers short of
what it needs, and more of them in long heads and in rows in 8 bits; long heads that are shared out
over warps spill nothing, but take more than three times the instructions. The rest spills nothing,
except latents in fp32, a type that served models do not have."""


def may_spill(kernel: str, label: str) -> int:
    """The bound of a kernel; ``kernel`` may begin a row of a table."""
    found = (n for (name, words), n in SPILLED.items() if kernel.endswith(name) and words in label)
    return max(found, default=0)


def check(rows: list[dict[str, Any]], kernels: set[str] = KERNELS, judge: int = 0) -> None:
    """``judge``: bytes a thread that recall's kernel of this name may spill."""
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:
        most = may_spill(row["kernel"], row["label"])
        most += judge * (row["kernel"] == "judge")
        if row["capability"] in SMALL_BLOCKS and row["kernel"] == "column_sums":
            most = 8  # with soft caps
        if {"latents of 512", "float32"} <= set(row["label"].split(", ")):
            most = 112
        assert row["spilled"] <= most, row
        assert row["registers"] <= 255 and row["shared"] <= MAX_SHARED[row["capability"]], row
        # a block's registers must fit a multiprocessor at least once
        assert row["registers"] * 32 * row["warps"] <= 65536, row


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (80, 100))]
)
def test_default_configuration_on_every_gpu(capability: int) -> None:
    check(compiled("[Shape()]", capability))


def test_decode_where_a_block_has_99_kb() -> None:
    """32 query heads and 8 KV heads of 128, in bf16: as Llama 3 8B on an L4."""
    check(compiled('[Shape(dtype=torch.bfloat16, only="attend")]', 89), {"attend"})


@pytest.mark.slow
@pytest.mark.parametrize("capability", SMALL_BLOCKS)
def test_every_kernel_where_a_block_has_99_kb(capability: int) -> None:
    check(compiled("DEFAULT_SHAPES", capability))
    check(compiled("UNIT_SHAPES", capability), IN_UNITS)
    other = "[shape for shape in OTHER_SHAPES if {}shape.keep_logits and not shape.window]"
    check(compiled(other.format(""), capability))
    check(compiled(other.format("not "), capability), UNSCORED)
    check(compiled(WITH_WINDOWS, capability), UNSCORED)
    check(compiled("SPLIT_SHAPES", capability), {"attend_strides"})


@pytest.mark.slow
@pytest.mark.parametrize("capability", SMALL_BLOCKS)
def test_recall_where_a_block_has_99_kb(capability: int) -> None:
    check(compiled("RECALL_SHAPES", capability), RECALL, judge=16)


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.slow) for n in (64, 80, 96, 256)]
)
def test_head_sizes(size: int) -> None:
    check(compiled(f"[Shape(head_size={size}, dtype=torch.bfloat16)]", 90))


@pytest.mark.parametrize("unit", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kernel", ["insert_strides", pytest.param("assign", marks=pytest.mark.slow)]
)
def test_drawn_scores(kernel: str, unit: int) -> None:
    shape = f'[Shape(salted=True, keep_logits=False, unit={unit}, only="{kernel}")]'
    check(compiled(shape, 90), {kernel})


def test_units() -> None:
    check(compiled("[Shape(unit=16)]", 90), IN_UNITS)


@pytest.mark.slow
def test_latent_rows() -> None:
    """DeepSeek V3's on a rank of eight, also where a block has 99 KB of shared memory."""
    check(compiled("LATENT_SHAPES[:1]", 90, 89))


@pytest.mark.slow
def test_latent_rows_on_every_gpu() -> None:
    scored = "[shape for shape in LATENT_SHAPES if shape.keep_logits]"
    check(compiled(scored, 80, 86, 89, 90, 100, 120))
    unscored = "[shape for shape in LATENT_SHAPES if not shape.keep_logits]"
    check(compiled(unscored, 80, 86, 89, 90, 100, 120), UNSCORED)
    check(compiled("[LATENT_SPLIT]", 80, 89, 90), {"attend_strides"})


@pytest.mark.slow
def test_latent_rows_in_8_bits() -> None:
    check(compiled("STORED_SHAPES[:1]", 90, 89))


@pytest.mark.slow
def test_latent_rows_in_8_bits_on_every_gpu() -> None:
    scored = "[shape for shape in STORED_SHAPES if shape.keep_logits]"
    check(compiled(scored, 80, 86, 89, 90, 100, 120))
    unscored = "[shape for shape in STORED_SHAPES if not shape.keep_logits]"
    check(compiled(unscored, 80, 86, 89, 90, 100, 120), UNSCORED)
    split = "[replace(LATENT_SPLIT, code=code) for code in (_E4M3, torch.int8)]"
    check(compiled(split, 80, 89, 90), {"attend_strides"})


def test_long_heads() -> None:
    """Decode of heads of 512, which takes most, where a block has 99 KB of shared memory."""
    shape = '[replace(LONG, unit=16, only="attend_units")]'
    check(compiled(shape, 89), {"attend_units"})


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_long_heads_on_every_gpu(capability: int) -> None:
    check(compiled("LONG_SHAPES", capability))
    check(compiled("LONG_UNITS", capability), IN_UNITS)
    check(compiled("LONG_UNSCORED", capability), UNSCORED)
    check(compiled("[LONG_UNITS_UNSCORED]", capability), IN_UNITS - SCORED)
    check(compiled("[LONG_SPLIT]", capability), {"attend_strides"})


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_recall_of_long_heads_on_every_gpu(capability: int) -> None:
    check(compiled("LONG_RECALL", capability), RECALL)


@pytest.mark.slow
def test_rows_in_8_bits() -> None:
    check(compiled("CODED_SHAPES[:1]", 90))


@pytest.mark.slow
def test_units_of_rows_in_8_bits() -> None:
    check(compiled("CODED_UNITS[:1]", 90), IN_UNITS)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_rows_in_8_bits_on_every_gpu(capability: int) -> None:
    check(compiled("CODED_SHAPES", capability))
    check(compiled("CODED_UNITS", capability), IN_UNITS | {"attend"})  # of small units
    check(compiled("CODED_UNSCORED", capability), UNSCORED)
    check(compiled("CODED_UNITS_UNSCORED", capability), IN_UNITS - SCORED | {"attend"})
    check(compiled("[replace(SPLIT_SHAPE, code=_E4M3)]", capability), {"attend_strides"})


def test_strides_in_parts() -> None:
    check(compiled("SPLIT_SHAPES[:1]", 90), {"attend_strides"})


@pytest.mark.slow
def test_strides_in_parts_in_every_configuration() -> None:
    check(compiled("SPLIT_SHAPES", 80, 90, 100), {"attend_strides"})


UNSCORED = KERNELS - SCORED
WITH_WINDOWS = "[shape for shape in OTHER_SHAPES if shape.window]"


@pytest.mark.slow
def test_windows() -> None:
    check(compiled(WITH_WINDOWS + "[:1]", 90), UNSCORED)


@pytest.mark.slow
def test_windows_on_every_gpu() -> None:
    check(compiled(WITH_WINDOWS, 80, 90, 100), UNSCORED)


DRAFTS = {"schedule", "save_versions", "insert", "undo"}


def test_drafts() -> None:
    check(compiled("DRAFT_SHAPES[:1]", 90), DRAFTS)


@pytest.mark.slow
def test_drafts_in_every_configuration() -> None:
    check(compiled("DRAFT_SHAPES", 80, 86, 89, 90, 100, 120), DRAFTS)


def test_snapshots_of_rings() -> None:
    check(compiled("()", 80, 86, 89, 90, 100, 120), {"copy_ring"})


@pytest.mark.slow
def test_recall() -> None:
    check(compiled("RECALL_SHAPES[:1]", 80, 90, 100), RECALL)


@pytest.mark.slow
def test_recall_in_every_configuration() -> None:
    check(compiled("RECALL_SHAPES", 80, 90, 100), RECALL)


@pytest.mark.slow
def test_every_configuration_on_every_gpu() -> None:
    check(compiled("DEFAULT_SHAPES", 80, 90, 100))
    check(compiled("UNIT_SHAPES", 80, 90, 100), IN_UNITS)  # of most the one that differs
    other = "[shape for shape in OTHER_SHAPES if {}shape.keep_logits and not shape.window]"
    check(compiled(other.format(""), 80, 90, 100))
    check(compiled(other.format("not "), 80, 90, 100), UNSCORED)


def test_the_table_in_the_docs() -> None:
    """The table that is shown covers every kernel and stays within the same bounds."""
    table = (ROOT / "docs" / "kernel_resources.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if re.match(r"\| [a-z_]+ \| \d", line)]
    assert {row[0].removeprefix("| ") for row in rows} == KERNELS | IN_UNITS | RECALL
    for row in rows:
        for cell in row[3:]:
            registers, _, spilled = map(int, cell.rstrip(" |").split(" / "))
            assert registers <= 255 and spilled <= may_spill(row[0], row[1]), row
