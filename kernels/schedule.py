# SPDX-License-Identifier: Apache-2.0
"""Step rows of a decode batch from sequence lengths, on the device.

Every schedule is a transient followed by a period, so a table row is a function of the number of
tokens seen. The host never learns anything from the device, and a captured graph reads rows that
this kernel rewrote before the replay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .tiles import CACHED, EVICTS, HI, LO, NEW_SLOTS, OLD_SLOTS, STEP_COLUMNS, STREAM


@dataclass(frozen=True)
class Schedule:
    """A policy's step tables on a device.

    Attributes:
        table: int32 ``[transient + period, 5]``: lo, hi, evicts, and after the insertion the
            tokens cached and the most slots ever needed; ``i`` is the row of the insertion of
            token ``i`` (rows past the transient repeat).
        transient: rows that occur once.
    """

    table: torch.Tensor
    transient: int

    def __post_init__(self) -> None:
        assert self.table.dtype == torch.int32 and self.table.shape[1] == 5, self.table.shape
        assert self.table.is_contiguous() and 0 <= self.transient < len(self.table)

    @property
    def period(self) -> int:
        return len(self.table) - self.transient


@triton.jit
def _table_row(t, transient, period):
    return tl.where(t < transient, t, transient + (t - transient) % period)


@triton.jit
def _schedule(
    seq_lens,
    blocks,
    table,
    steps,
    positions,
    num_rows,
    blocks_stride,
    transient,
    period,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    seen = tl.load(seq_lens + row, mask=inside, other=0).to(tl.int32)
    # Warm-up and capture bring lengths, but block tables of nothing but the null block.
    first_block = tl.load(blocks + row.to(tl.int64) * blocks_stride, mask=inside, other=0)
    real = inside & (seen > 0) & (first_block != 0)
    stream = seen - 1
    now = table + _table_row(tl.maximum(stream, 0), transient, period) * 5
    before = table + _table_row(tl.maximum(stream - 1, 0), transient, period) * 5
    older = real & (stream > 0)
    cached = tl.load(before + 3, mask=older, other=0)
    out = steps + row * STEP
    tl.store(out + STREAM, tl.where(real, stream, -1), mask=inside)
    tl.store(out + CACHED, cached, mask=inside)
    tl.store(out + OLD_SLOTS, tl.load(before + 4, mask=older, other=0), mask=inside)
    tl.store(out + NEW_SLOTS, tl.load(now + 4, mask=real, other=0), mask=inside)
    tl.store(out + LO, tl.load(now, mask=real, other=0), mask=inside)
    tl.store(out + HI, tl.load(now + 1, mask=real, other=0), mask=inside)
    tl.store(out + EVICTS, tl.load(now + 2, mask=real, other=0), mask=inside)
    tl.store(positions + row, cached.to(tl.int64), mask=inside)


def schedule(
    seq_lens: torch.Tensor,
    blocks: torch.Tensor,
    tables: Schedule,
    steps: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write the step rows and cache positions of a batch of single tokens.

    Args:
        seq_lens: int32 or int64 ``[B]``, tokens of each request including the new one; 0: padding.
        blocks: int32 ``[>= B, P]`` block table; a row that starts with the null block 0 is padding.
        steps: int32 ``[>= B, 7]``, written.
        positions: int64 ``[>= B]``, written: the tokens cached before, 0 for padding.
    """
    num_rows = seq_lens.shape[0]
    assert blocks.dtype == torch.int32 and len(blocks) >= num_rows, blocks.shape
    assert steps.dtype == torch.int32 and steps.is_contiguous() and steps.shape[1] == STEP_COLUMNS
    assert positions.dtype == torch.int64 and min(len(positions), len(steps)) >= num_rows
    if num_rows == 0:
        return
    tile = min(128, triton.next_power_of_2(num_rows))
    _schedule[(triton.cdiv(num_rows, tile),)](
        *(seq_lens, blocks, tables.table, steps, positions, num_rows, blocks.stride(0)),
        *(tables.transient, tables.period),
        STEP=STEP_COLUMNS,
        TILE=tile,
        num_warps=1,
    )


def schedule_reference(
    seq_lens: list[int],
    first_blocks: list[int],
    rows: list[tuple[int, int, int, int, int]],
    transient: int,
) -> list[list[int]]:
    """The same, row by row; ``rows`` are those of ``Schedule.table``."""
    period = len(rows) - transient

    def at(t: int) -> tuple[int, int, int, int, int]:
        return rows[t if t < transient else transient + (t - transient) % period]

    result = []
    for length, block in zip(seq_lens, first_blocks, strict=True):
        if length == 0 or block == 0:
            result.append([-1, 0, 0, 0, 0, 0, 0])
            continue
        lo, hi, evicts, _, slots = at(length - 1)
        _, _, _, cached, old_slots = at(length - 2) if length > 1 else (0,) * 5
        result.append([length - 1, cached, old_slots, slots, lo, hi, evicts])
    return result
