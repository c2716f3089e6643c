# SPDX-License-Identifier: Apache-2.0
"""Draft tokens (speculative decoding): saves what inserting one changes, and undoes rejected ones.

A request's drafts have consecutive places, ``most`` of them at most. Version ``place % most`` on
the request's pages has all ranks and scores before the draft (``VersionSaver``). The one slot that
a draft is written to is saved by place: its row in each head, and the words of its unit
(``save_slot``, which ``insert`` calls). ``kernels/cpp/drafts.h`` does the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launcher, variant_of
from .tiles import (
    OLD_SLOTS,
    STEP,
    STREAM,
    check_steps,
    grid_of_places,
    load_rows,
    padded,
    slot_tile,
    store_rows,
)

UNDONE_COLUMNS = 4
UNDONE = tl.constexpr(UNDONE_COLUMNS)
SLOT_WORDS = tl.constexpr(3)
"""Words of a saved slot: its number or -1, and its unit's ``born`` and ``token``."""
AT_ONCE = 4096
"""Numbers of a row's heads that a program copies at once."""


class Saved(NamedTuple):
    """What drafts replaced, by place.

    Attributes:
        rows: ``[places, H, row_size]``, as in the pages.
        words: int32 ``[places, 3, S]``.
        scale: fp32 ``[places, H, 2]``, and ``page_scale``: the ``Pages`` view that it is from; None
            if rows have no scales of their own.
    """

    rows: torch.Tensor
    words: torch.Tensor
    scale: torch.Tensor | None = None
    page_scale: torch.Tensor | None = None


def slot_arguments(saved: Saved | None) -> dict[str, torch.Tensor | None]:
    """By name, as kernels take them; scales as they are, whatever their bits mean."""
    if saved is None:
        return dict.fromkeys(("saved_rows", "saved_words", "saved_scale", "scale"))
    scales = saved.scale, saved.page_scale
    own, page = (None if x is None else x.view(torch.int32) for x in scales)
    names = {"saved_rows": saved.rows, "saved_words": saved.words}
    return {**names, "saved_scale": own, "scale": page}


def heads_at_once(heads: int, row_size: int) -> int:
    """Heads of a row that are copied at once: a power of two."""
    return min(triton.next_power_of_2(heads), max(AT_ONCE // padded(row_size), 1))


@triton.jit
def _copy_heads(
    source,
    source_stride,
    target,
    target_stride,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Copy a row of each head, ``ROW`` numbers."""
    for first in tl.static_range(0, HEADS, AT_ONCE):
        head = first + tl.arange(0, AT_ONCE)
        rows = load_rows(source + head * source_stride, head < HEADS, 0, ROW)
        store_rows(target + head * target_stride, rows, head < HEADS, 0, ROW)


@triton.jit
def _copy_scales(
    source,
    target,
    place,
    head_set,
    at,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    SAVES: tl.constexpr,
):
    """Copy the two scales of a row in each head of a set, to a draft's place or from it.

    Args:
        place: of the draft, int64.
        at: offset of the slot's first scale in the first head's.
    """
    head = head_set * HEADS + tl.arange(0, triton.next_power_of_2(HEADS))
    inside = head < (head_set + 1) * HEADS
    own = (place * (NUM_SETS * HEADS) + head) * 2
    for which in tl.static_range(2):
        page = at + head * (2 * SLOTS) + which * SLOTS
        if SAVES:
            bits = tl.load(source + page, mask=inside)
            tl.store(target + own + which, bits, mask=inside)
        else:
            bits = tl.load(source + own + which, mask=inside)
            tl.store(target + page, bits, mask=inside)


@triton.jit
def _where(
    slot,
    table,
    head_set,
    page_stride,
    word_stride,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A slot's offsets in the pages: its unit's words, its row in the set's first head, and its
    first scale in the layer's first head."""
    block = tl.load(table + slot // (PAGE * UNIT)).to(tl.int64)
    within = slot % (PAGE * UNIT)
    word = block * word_stride + head_set * PAGE + within // UNIT
    row = block * page_stride + (head_set * (HEADS * PAGE * UNIT) + within) * ROW
    return word, row, block * word_stride + within


@triton.jit
def save_slot(
    place,
    slot,
    table,
    head_set,
    kv,
    born,
    token,
    scale,
    saved_rows,
    saved_words,
    saved_scale,
    page_stride,
    word_stride,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Save what is in a slot that a draft replaces.

    Args:
        place: of the draft, int64.
        slot: the slot's number; -1: the draft is written nowhere.
        table: the request's block numbers.
    """
    note = saved_words + place * (SLOT_WORDS * NUM_SETS) + head_set
    tl.store(note, slot)
    if slot >= 0:
        word, row, first_scale = _where(
            slot, table, head_set, page_stride, word_stride, HEADS, ROW, PAGE, UNIT
        )
        tl.store(note + NUM_SETS, tl.load(born + word))
        if token is not None:
            tl.store(note + 2 * NUM_SETS, tl.load(token + word))
        own = saved_rows + (place * NUM_SETS + head_set) * (HEADS * ROW)
        _copy_heads(kv + row, PAGE * UNIT * ROW, own, ROW, HEADS, ROW, AT_ONCE)
        if scale is not None:
            slots: tl.constexpr = PAGE * UNIT
            _copy_scales(
                scale, saved_scale, place, head_set, first_scale, NUM_SETS, HEADS, slots, True
            )


@triton.jit
def _save_versions(
    saves,
    rank,
    score,
    versions,
    table,
    steps,
    word_stride,
    table_stride,
    MOST: tl.constexpr,
    NUM_SETS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    first = tl.program_id(2) * TILE
    place = tl.load(saves + row)
    step = steps + row * STEP
    slots = tl.load(step + OLD_SLOTS) // UNIT
    if (place < 0) | (tl.load(step + STREAM) < 0) | (first >= slots):
        return
    table += row * table_stride
    _, inside, _, word = slot_tile(table, first, slots, head_set, word_stride, PAGE, TILE)
    version = versions + place % MOST * (2 * NUM_SETS * PAGE) + word
    tl.store(version, tl.load(rank + word, mask=inside), mask=inside)
    tl.store(version + NUM_SETS * PAGE, tl.load(score + word, mask=inside), mask=inside)


class VersionSaver:
    """Saves the ranks and scores of requests whose next token is a draft.

    Args:
        rank, score: ``Pages`` views.
        versions: ``Pages`` view, written.
        unit: slots that share one rank and score.
    """

    def __init__(
        self, rank: torch.Tensor, score: torch.Tensor, versions: torch.Tensor, unit: int = 1
    ) -> None:
        self._num_sets, self._page = rank.shape[1:]
        self._launch = Launcher(
            _save_versions,
            rank=rank,
            score=score.view(torch.int32),  # as they are, whatever their bits mean
            versions=versions,
            word_stride=rank.stride(0),
            MOST=_check_versions(versions, rank),
            NUM_SETS=self._num_sets,
            PAGE=self._page,
            UNIT=unit,
            num_warps=4,
        )

    def __call__(self, saves: torch.Tensor, table: torch.Tensor, steps: torch.Tensor) -> None:
        """Launch.

        Args:
            saves: int32 ``[>= B]``, places of drafts; -1: not a draft.
            table: int32 ``[>= B, P]``.
            steps: int32 ``[B, STEP_COLUMNS]``; rows with ``STREAM`` -1 are left out.
        """
        check_steps(steps, table)
        num_rows, table_stride = len(steps), table.stride(0)
        assert saves.dtype == torch.int32 and saves.is_contiguous() and len(saves) >= num_rows
        grid, tile = grid_of_places(num_rows, self._num_sets, table.shape[1] * self._page)
        self._launch(
            grid,
            variant_of(saves, table, steps, table_stride, tile),
            saves=saves,
            table=table,
            steps=steps,
            table_stride=table_stride,
            TILE=tile,
        )


def _check_versions(versions: torch.Tensor, rank: torch.Tensor) -> int:
    """Check the layout of ``Pages.versions``; returns the most drafts of a request."""
    num_blocks, (num_sets, page) = len(rank), rank.shape[1:]
    assert versions.dtype == torch.int32 and versions.stride(0) == rank.stride(0)
    assert versions.shape == (num_blocks, versions.shape[1], 2, num_sets, page), versions.shape
    strides = (2 * num_sets * page, num_sets * page, page, 1)
    assert versions.stride()[1:] == strides, versions.stride()
    return versions.shape[1]


@triton.jit(do_not_specialize=["table_stride"])  # as wide as the longest of the requests needs
def _undo(
    undone,
    table,
    kv,
    rank,
    born,
    score,
    token,
    scale,
    versions,
    saved_rows,
    saved_words,
    saved_scale,
    page_stride,
    word_stride,
    table_stride,
    MOST: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    place = tl.load(undone + row * UNDONE).to(tl.int64)
    num = tl.load(undone + row * UNDONE + 1)
    slots = tl.load(undone + row * UNDONE + 2) // UNIT
    table += row * table_stride
    for i in range(num):  # the last one first: drafts may have replaced each other
        at = place + (num - 1 - i)
        note = saved_words + at * (SLOT_WORDS * NUM_SETS) + head_set
        slot = tl.load(note)
        if slot >= 0:
            word, target, first_scale = _where(
                slot, table, head_set, page_stride, word_stride, HEADS, ROW, PAGE, UNIT
            )
            tl.store(born + word, tl.load(note + NUM_SETS))
            if token is not None:
                tl.store(token + word, tl.load(note + 2 * NUM_SETS))
            rows = saved_rows + (at * NUM_SETS + head_set) * (HEADS * ROW)
            _copy_heads(rows, ROW, kv + target, PAGE * UNIT * ROW, HEADS, ROW, AT_ONCE)
            if scale is not None:
                page: tl.constexpr = PAGE * UNIT
                _copy_scales(
                    saved_scale, scale, at, head_set, first_scale, NUM_SETS, HEADS, page, False
                )
        tl.debug_barrier()  # the next one may restore the same slot
    version = versions + place % MOST * (2 * NUM_SETS * PAGE)
    for first in range(0, slots, TILE):
        _, inside, _, word = slot_tile(table, first, slots, head_set, word_stride, PAGE, TILE)
        tl.store(rank + word, tl.load(version + word, mask=inside), mask=inside)
        old = tl.load(version + NUM_SETS * PAGE + word, mask=inside)
        tl.store(score + word, old, mask=inside)


class DraftUndo:
    """Restores requests as they were before their first rejected drafts.

    Args:
        kv, rank, born, score, token: ``Pages`` views, written; ``token`` None if not stored.
        versions: ``Pages`` view.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        rank: torch.Tensor,
        born: torch.Tensor,
        score: torch.Tensor,
        token: torch.Tensor | None,
        versions: torch.Tensor,
        saved: Saved,
    ) -> None:
        (self._num_sets, page), heads, row_size = rank.shape[1:], kv.shape[1], kv.shape[3]
        check_saved(saved, kv, rank)
        self._launch = Launcher(
            _undo,
            kv=kv,
            rank=rank,
            born=born,
            score=score.view(torch.int32),
            token=token,
            versions=versions,
            **slot_arguments(saved),
            page_stride=kv.stride(0),
            word_stride=rank.stride(0),
            MOST=_check_versions(versions, rank),
            NUM_SETS=self._num_sets,
            HEADS=heads // self._num_sets,
            ROW=row_size,
            AT_ONCE=heads_at_once(heads // self._num_sets, row_size),
            PAGE=page,
            TILE=1024,
            UNIT=kv.shape[2] // page,
            num_warps=4,
        )

    def __call__(self, undone: torch.Tensor, table: torch.Tensor) -> None:
        """Launch.

        Args:
            undone: int32 ``[R, 4]``: a request's first rejected place, the number of rejected
                drafts, the slots in use before the first, and a number that is not read.
            table: int32 ``[R, P]``.
        """
        num_rows = len(undone)
        assert undone.dtype == table.dtype == torch.int32 and undone.is_contiguous()
        assert undone.shape[1] == UNDONE_COLUMNS and len(table) >= num_rows and table.stride(1) == 1
        self._launch(
            (num_rows, self._num_sets, 1),
            variant_of(undone, table),
            undone=undone,
            table=table,
            table_stride=table.stride(0),
        )


def check_saved(saved: Saved, kv: torch.Tensor, rank: torch.Tensor) -> None:
    """Check the memory for slots that drafts replace in pages."""
    rows, words, scale, page_scale = saved
    blocks, heads, slots, row_size = kv.shape
    assert rows.shape[1:] == (heads, row_size) and rows.dtype == kv.dtype, rows.shape
    assert words.shape == (len(rows), SLOT_WORDS.value, rank.shape[1])
    assert words.dtype == torch.int32 and rows.is_contiguous() and words.is_contiguous()
    assert (scale is None) == (page_scale is None)
    if scale is not None and page_scale is not None:
        assert scale.shape == (len(rows), heads, 2) and scale.is_contiguous(), scale.shape
        assert page_scale.shape == (blocks, heads, slots, 2), page_scale.shape
        assert page_scale.stride() == (rank.stride(0), 2 * slots, 1, slots), page_scale.stride()
        assert scale.dtype == page_scale.dtype == torch.float32
