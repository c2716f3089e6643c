# SPDX-License-Identifier: Apache-2.0
"""Builds the step rows of a decode batch on the device, from sequence lengths.

Every schedule is a transient followed by a period, so a table row is a function of the number of
tokens seen. The host reads nothing back. A captured graph reads the rows that this kernel has
written before the replay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .tiles import CACHED, LENGTH, LO, NEW_SLOTS, OLD_SLOTS, PER_AGE, START, STEP, STREAM

TABLE_COLUMNS, HEAD_COLUMNS = 8, 8
COUNT, SLOTS, TABLE, HEAD = (tl.constexpr(n) for n in (6, 7, TABLE_COLUMNS, HEAD_COLUMNS))


@dataclass(frozen=True)
class ScheduleTables:
    """One or more schedules on a device.

    Attributes:
        table: int32 ``[rows, 8]``, the concatenated rows of all schedules. A row describes the
            insertion of one token. Columns: ``LO .. NUM_MORE`` of its rules, tokens cached after
            it, and most slots in use up to then.
        heads: int32 ``[schedules, 8]``. Columns: a schedule's first row, the number of rows that
            occur once, the number of rows that repeat after them, ``PER_AGE .. WEIGHT``, and the
            most recalled units, which ``table`` does not count.
        unit: tokens per unit. ``table`` counts units.
    """

    table: torch.Tensor
    heads: torch.Tensor
    unit: int = 1

    def __post_init__(self) -> None:
        assert self.table.dtype == self.heads.dtype == torch.int32
        assert self.table.shape[1] == TABLE_COLUMNS and self.heads.shape[1] == HEAD_COLUMNS
        assert self.table.is_contiguous() and self.heads.is_contiguous()


@triton.jit
def _table_row(t, first, transient, period):
    row = tl.where(t < transient, t, transient + (t - transient) % period)
    return (first + row).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def _schedule(
    seq_lens,
    blocks,
    table,
    heads,
    schedule_of,
    steps,
    positions,
    num_rows,
    blocks_stride,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    WAVES: tl.constexpr,
    WAVE_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    request = row
    line = row
    if WAVES > 1:  # a request's tokens follow each other; a wave has one of every request
        request = row // WAVES
        line = row % WAVES * WAVE_ROWS + request
    seen = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int32)
    if WAVES > 1:
        seen -= WAVES - 1 - row % WAVES
    # In warm-up and capture, rows have lengths, but their block tables hold only the null block.
    first_block = tl.load(blocks + request.to(tl.int64) * blocks_stride, mask=inside, other=0)
    real = inside & (seen > 0) & (first_block != 0)
    stream = seen - 1
    head = heads + tl.load(schedule_of + request, mask=inside, other=0) * HEAD
    first = tl.load(head, mask=inside, other=0)
    transient = tl.load(head + 1, mask=inside, other=0)
    period = tl.load(head + 2, mask=inside, other=1)
    done = stream // UNIT  # whole units before the token's
    now = table + _table_row(tl.maximum(done, 0), first, transient, period) * TABLE
    before = table + _table_row(tl.maximum(done - 1, 0), first, transient, period) * TABLE
    older = real & (done > 0)
    cached = tl.load(before + COUNT, mask=older, other=0)
    ruled = real
    if UNIT > 1:
        most = tl.load(head + (HEAD - 1), mask=real, other=0)
        recalled = tl.where(older, tl.minimum(done - cached, most), 0)
        cached = tl.where(real, (cached + recalled) * UNIT + stream % UNIT, 0)
        ruled = real & (stream % UNIT == UNIT - 1)  # rules apply with a unit's last token
    out = steps + line * STEP
    tl.store(out + STREAM, tl.where(real, stream, -1), mask=inside)
    tl.store(out + CACHED, cached, mask=inside)
    if UNIT == 1:
        tl.store(out + OLD_SLOTS, tl.load(before + SLOTS, mask=older, other=0), mask=inside)
        tl.store(out + NEW_SLOTS, tl.load(now + SLOTS, mask=real, other=0), mask=inside)
    else:  # a unit has all its slots from its first token on
        earlier = (stream - 1) // UNIT
        then = _table_row(tl.maximum(earlier - 1, 0), first, transient, period) * TABLE
        peak = tl.load(table + then + SLOTS, mask=real & (earlier > 0), other=0)
        old_slots = tl.where(real & (stream > 0), (peak + recalled + 1) * UNIT, 0)
        tl.store(out + OLD_SLOTS, old_slots, mask=inside)
        peak = tl.load(before + SLOTS, mask=older, other=0)
        left = tl.load(now + COUNT, mask=ruled, other=0)
        soon = tl.where(ruled, tl.minimum(done + 1 - left, most), recalled)
        tl.store(out + NEW_SLOTS, tl.where(real, (peak + soon + 1) * UNIT, 0), mask=inside)
    for column in tl.static_range(COUNT):  # the rules
        tl.store(out + LO + column, tl.load(now + column, mask=ruled, other=0), mask=inside)
    for column in tl.static_range(HEAD - 4):  # PER_AGE .. WEIGHT
        value = tl.load(head + 3 + column, mask=real, other=0)
        tl.store(out + PER_AGE + column, value, mask=inside)
    tl.store(out + START, tl.where(real, row, 0), mask=inside)
    tl.store(out + LENGTH, tl.where(real, 1, 0), mask=inside)
    if positions is not None:
        tl.store(positions + row, cached.to(tl.int64), mask=inside)


def schedule(
    seq_lens: torch.Tensor,
    blocks: torch.Tensor,
    tables: ScheduleTables,
    schedule_of: torch.Tensor,
    steps: torch.Tensor,
    positions: torch.Tensor | None,
) -> None:
    """Write the step rows and cache positions of a batch of single tokens.

    Args:
        seq_lens: int32 or int64 ``[B]``, tokens of each request including new ones; 0: padding.
        blocks: int32 ``[>= B, P]`` block table; a row that starts with the null block 0 is padding.
        schedule_of: int32 ``[>= B]``, each request's row of ``tables.heads``.
        steps: int32 ``[>= B, STEP_COLUMNS]``, written; ``[W, >= B, STEP_COLUMNS]``: every request
            has ``W`` new tokens, and wave ``w`` has the ``w``-th of each.
        positions: int64 ``[>= W * B]``, written: the tokens cached before, 0 for padding, request
            by request. None: other layers write positions.
    """
    waves, wave_rows, columns = steps.shape if steps.dim() == 3 else (1, *steps.shape)
    num_requests = seq_lens.shape[0]
    num_rows = waves * num_requests
    assert blocks.dtype == torch.int32 and len(blocks) >= num_requests, blocks.shape
    assert steps.dtype == torch.int32 and steps.is_contiguous() and columns == STEP.value
    assert wave_rows >= num_requests, steps.shape
    assert positions is None or (positions.dtype == torch.int64 and len(positions) >= num_rows)
    assert schedule_of.dtype == torch.int32 and len(schedule_of) >= num_requests, schedule_of.shape
    if num_rows == 0:
        return
    tile = 128  # for every batch size
    _schedule[(triton.cdiv(num_rows, tile),)](
        seq_lens=seq_lens,
        blocks=blocks,
        table=tables.table,
        heads=tables.heads,
        schedule_of=schedule_of,
        steps=steps,
        positions=positions,
        num_rows=num_rows,
        blocks_stride=blocks.stride(0),
        TILE=tile,
        UNIT=tables.unit,
        WAVES=waves,
        WAVE_ROWS=wave_rows if waves > 1 else 0,
        num_warps=1,
    )
