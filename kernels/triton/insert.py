# SPDX-License-Identifier: Apache-2.0
"""Inserts one new token per request: evicts by the request's rules, then writes the token.

A step carries a short list of rules. Each rule applies to the ranks that the previous one left; the
new token has the highest rank. Within the ranks ``[lo, hi)`` a rule deletes one of:

- nothing (the cache grows),
- everything,
- the token with the lowest score,
- all but one token of every cell of ``cell`` ranks.

A fixed victim is a range of one rank. A contest of two neighbours is a range of two. Heavy hitters
use the range between sinks and window, and a beehive two rules of cells. A batch of deferred
insertions has the rules of each token.

The new token takes the first free slot and the highest rank. No other row moves.
Source: Algorithm 1 of Cascading KV Cache (https://arxiv.org/abs/2406.17808) on slots with ranks;
cells: BUZZ (https://arxiv.org/abs/2410.23079).
"""

from functools import partial

import triton
import triton.language as tl

from .cached import CachedLayer
from .drafts import Saved, check_saved, heads_at_once, save_slot, slot_arguments
from .launch import Launcher
from .singles import Singles
from .stored import apart, scale_place, write_codes
from .strides import Tokens
from .tiles import (
    CACHED,
    CELL,
    EVICTS,
    HI,
    LO,
    MORE,
    NEVER,
    NEW_SLOTS,
    NEWEST_STAYS,
    NUM_MORE,
    OLD_SLOTS,
    PER_AGE,
    RULE,
    START,
    STEP,
    STREAM,
    copy_rows,
    first_part,
    load_rows,
    slot_tile,
    store_rows,
    victim_key,
    victim_rank,
)

AHEAD = 4096
"""Most numbers of new rows that are loaded before their place is known: registers are scarce."""


@triton.constexpr_function
def loads_ahead(code, numbers):
    """Whether a program loads its new rows, of so many numbers, before it knows their place."""
    return code is None and numbers <= AHEAD


@triton.jit
def _compared(score, token, word, candidate, now, per_age):
    """The candidates' sort keys: scores, divided by the number of queries if ``per_age``."""
    value = tl.load(score + word, mask=candidate, other=0.0)
    if token is not None:
        if per_age != 0:
            born_at = tl.load(token + word, mask=candidate, other=0)
            value = value / tl.maximum(now - born_at, 1).to(tl.float32)
    return value


@triton.jit
def _best_of_cells(place, inside, values, lo, hi, cell, newest_stays):
    """New ranks of the ranks ``place`` in ``[lo, hi)``; -1 for evicted ones.

    ``values`` holds the compared scores by rank. Pairwise contests within a cell leave the highest
    ``victim_key``, so one maximum per cell gives the survivor.
    """
    size = tl.abs(cell)
    index = (place - lo) // size
    first = lo + index * size
    stays = first
    if cell > 0:
        top = tl.full(place.shape, -0x8000000000000000, tl.int64)
        for i in range(size):
            real = inside & (first + i < hi)
            value = tl.load(values + first + i, mask=real, other=0.0)
            key = victim_key(value, first + i, newest_stays)
            top = tl.maximum(top, tl.where(real, key, -0x8000000000000000))
        stays = victim_rank(top, newest_stays)
    return tl.where(place == stays, lo + index, -1)


@triton.jit
def _thin_cells(
    rank,
    score,
    token,
    values,
    table,
    slots,
    head_set,
    word_stride,
    lo,
    hi,
    cell,
    now,
    per_age,
    newest_stays,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Delete all but one token of every cell of ``[lo, hi)``; higher ranks keep their values.

    It uses its own, smaller tile: cells are rare, and a large tile would cost every step registers.
    """
    if cell > 0:
        for first in range(0, slots, TILE):
            _, inside, _, word = slot_tile(table, first, slots, head_set, word_stride, PAGE, TILE)
            place = tl.load(rank + word, mask=inside, other=-1)
            candidate = (place >= lo) & (place < hi)
            theirs = _compared(score, token, word, candidate, now, per_age)
            tl.store(values + place, theirs, mask=candidate)
        tl.debug_barrier()  # every slot reads its whole cell
    for first in range(0, slots, TILE):
        _, inside, _, word = slot_tile(table, first, slots, head_set, word_stride, PAGE, TILE)
        place = tl.load(rank + word, mask=inside, other=-1)
        candidate = (place >= lo) & (place < hi)
        left = _best_of_cells(place, candidate, values, lo, hi, cell, newest_stays)
        tl.store(rank + word, left, mask=candidate)
    tl.debug_barrier()


@triton.jit
def _unit_of(
    rank,
    table,
    slots,
    new_slots,
    head_set,
    word_stride,
    opens,
    filling,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first free unit if the token ``opens`` one, else the unit of rank ``filling``.

    All numbers count units.
    """
    found = tl.full([], NEVER, tl.int32)
    for first in range(0, new_slots, TILE):
        unit, inside, _, word = slot_tile(
            table, first, new_slots, head_set, word_stride, PAGE, TILE
        )
        place = tl.load(rank + word, mask=unit < slots, other=-1)
        tl.store(rank + word, place, mask=inside & (unit >= slots))  # fresh units are empty
        wanted = inside & tl.where(opens, place < 0, place == filling)
        found = tl.minimum(found, tl.min(tl.where(wanted, unit, NEVER), axis=0))
    tl.debug_barrier()  # a new unit's rank is written after this
    return found


@triton.jit
def _insert(
    key,
    value,
    new_score,
    kv,
    rank,
    born,
    score,
    token,
    scales,
    table,
    steps,
    rules,
    values,
    positions,
    saves,
    scale,
    saved_rows,
    saved_words,
    saved_scale,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    values_stride,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CELL_TILE: tl.constexpr,
    UNIT: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    step = steps + row * STEP
    stream = tl.load(step + STREAM)
    if stream < 0:
        return
    cached = tl.load(step + CACHED)
    slots = tl.load(step + OLD_SLOTS)  # with valid metadata
    new_slots = tl.load(step + NEW_SLOTS)
    per_age = tl.load(step + PER_AGE)
    newest_stays = tl.load(step + NEWEST_STAYS)
    more = rules + tl.load(step + MORE) * RULE - RULE
    num_rules = 1 + tl.load(step + NUM_MORE)
    table += row * table_stride
    mine = tl.load(new_score + row * NUM_SETS + head_set)
    member = tl.arange(0, triton.next_power_of_2(HEADS))
    head = head_set * HEADS + member
    real = member < HEADS
    key_rows = key + row * key_stride + head * HEAD
    value_rows = value + row * value_stride + head * VALUE
    FIRST: tl.constexpr = first_part(HEAD, VALUE, ROW)
    EARLY: tl.constexpr = loads_ahead(CODE, HEADS * ROW)
    if EARLY:
        new_key = load_rows(key_rows, real, 0, FIRST)
        new_value = load_rows(value_rows, real, 0, VALUE)
    values += (row * NUM_SETS + head_set) * values_stride
    own = cached  # the new token's rank; -1 once a rule deletes it
    target = tl.full([], NEVER, tl.int32)
    if UNIT > 1:  # counts of units from here on, PAGE included; rules apply to complete units
        slots = slots // UNIT
        new_slots = new_slots // UNIT
        opens = stream % UNIT == 0
        own = tl.where(opens, cached // UNIT, -1)
        home = _unit_of(
            rank=rank,
            table=table,
            slots=slots,
            new_slots=new_slots,
            head_set=head_set,
            word_stride=word_stride,
            opens=opens,
            filling=cached // UNIT,
            PAGE=PAGE,
            TILE=TILE,
        )
        # Most tokens only join a unit. Then no rank and no older page changes.
        num_rules = tl.where(tl.load(step + EVICTS) > 0, num_rules, 0)

    for i in range(num_rules):
        rule = tl.where(i == 0, step + LO, more + i * RULE)
        lo = tl.load(rule)
        hi = tl.load(rule + (HI - LO))
        evicts = tl.load(rule + (EVICTS - LO))
        cell = tl.load(rule + (CELL - LO))
        if (cell == 0) & (evicts > 0) & (evicts < hi - lo):  # the lowest score of several
            best = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
            if (own >= lo) & (own < hi):
                best = victim_key(mine, own, newest_stays)
            for first in range(0, slots, TILE):
                _, inside, _, word = slot_tile(
                    table, first, slots, head_set, word_stride, PAGE, TILE
                )
                place = tl.load(rank + word, mask=inside, other=-1)
                candidate = (place >= lo) & (place < hi)
                theirs = _compared(score, token, word, candidate, stream + 1, per_age)
                keys = victim_key(theirs, place, newest_stays)
                keys = tl.where(candidate, keys, 0x7FFFFFFFFFFFFFFF)
                best = tl.minimum(best, tl.min(keys, axis=0))
            lo = victim_rank(best, newest_stays)
            hi = lo + 1
        hi = tl.where(evicts > 0, hi, lo)  # from here on the rule deletes all of [lo, hi)
        if HAS_CELLS:
            if cell != 0:
                _thin_cells(
                    rank=rank,
                    score=score,
                    token=token,
                    values=values,
                    table=table,
                    slots=slots,
                    head_set=head_set,
                    word_stride=word_stride,
                    lo=lo,
                    hi=hi,
                    cell=cell,
                    now=stream + 1,
                    per_age=per_age,
                    newest_stays=newest_stays,
                    PAGE=PAGE,
                    TILE=CELL_TILE,
                )
                lo = hi - evicts  # survivors now have the lowest of these ranks

        # Close the gaps in the ranks and find the first free slot.
        target = tl.full([], NEVER, tl.int32)
        for first in range(0, new_slots, TILE):
            slot, inside, _, word = slot_tile(
                table, first, new_slots, head_set, word_stride, PAGE, TILE
            )
            place = tl.load(rank + word, mask=slot < slots, other=-1)
            gone = (place >= lo) & (place < hi)
            left = tl.where(place >= hi, place - evicts, place)
            left = tl.where(gone | (place < 0), -1, left)
            tl.store(rank + word, left, mask=inside)
            free = tl.where(inside & (left < 0), slot, NEVER)
            target = tl.minimum(target, tl.min(free, axis=0))
        own = tl.where(own >= hi, own - evicts, tl.where(own >= lo, -1, own))
        tl.debug_barrier()  # the next rule reads what this one wrote

    fresh = None
    if UNIT > 1:
        target = home
        fresh = opens  # a joining token writes its K/V row only
        own = tl.maximum(own, 0)
    if saves is not None:
        place = tl.load(saves + row).to(tl.int64)
        if place >= 0:  # a draft
            slot = tl.where((own < 0) | (target == NEVER), -1, target * UNIT + stream % UNIT)
            save_slot(
                place=place,
                slot=slot,
                table=table,
                head_set=head_set,
                kv=kv,
                born=born,
                token=token,
                scale=scale,
                saved_rows=saved_rows,
                saved_words=saved_words,
                saved_scale=saved_scale,
                page_stride=page_stride,
                word_stride=word_stride,
                NUM_SETS=NUM_SETS,
                HEADS=HEADS,
                ROW=ROW,
                AT_ONCE=AT_ONCE,
                PAGE=PAGE,
                UNIT=UNIT,
            )
        tl.debug_barrier()  # what was saved is overwritten after this
    if (own < 0) | (target == NEVER):
        return  # a rule deleted the new token
    block = tl.load(table + target // PAGE).to(tl.int64)
    word = block * word_stride + head_set * PAGE + target % PAGE
    tl.store(rank + word, own, mask=fresh)
    written_at = cached
    if positions is not None:
        written_at = tl.load(positions + tl.load(step + START)).to(tl.int32)
    tl.store(born + word, written_at, mask=fresh)
    tl.store(score + word, mine, mask=fresh)
    if token is not None:
        tl.store(token + word, stream, mask=fresh)
    slot = target % PAGE
    if UNIT > 1:
        slot = slot * UNIT + stream % UNIT
    rows = kv + block * page_stride + (head * (PAGE * UNIT) + slot) * ROW
    if EARLY:
        store_rows(rows, new_key, real, 0, FIRST)
        store_rows(rows + FIRST, new_value, real, 0, VALUE)
    elif CODE is None:
        copy_rows(key_rows, value_rows, rows, real, HEAD, VALUE, ROW)
    else:
        write_codes(
            keys=key_rows,
            values=value_rows,
            slots=rows,
            place=scale_place(scales, block, head, slot, word_stride, PAGE * UNIT, OF_ROWS),
            inside=real,
            rotation=None,
            distance=None,
            HEAD=HEAD,
            VALUE=VALUE,
            ROW=ROW,
            HALF=0,
            INTERLEAVED=False,
            APART=apart(PAGE * UNIT, OF_ROWS),
            CODE=CODE,
            OF_ROWS=OF_ROWS,
        )


class Insertion:
    """Insertion of one token per request in one layer, evicting by the rules of ``Singles``.

    In pages of units, ranks number units. A token whose stream index is a multiple of ``unit``
    opens a unit in the first free place; any other token joins the unit of rank ``cached // unit``.
    Rules apply when a unit is complete.

    Args:
        layer: its ``token`` is None if not stored; keys are not rotated here.
        has_cells: whether any rule may have cells.
        saved: what drafts replace; written. None: there are no drafts.
    """

    def __init__(self, layer: CachedLayer, has_cells: bool, saved: Saved | None = None) -> None:
        self._heads, (self._num_sets, self._page) = layer.heads[1:], layer.rank.shape[1:]
        heads = self._heads[0] // self._num_sets
        self._has_cells = has_cells
        bound = partial(
            Launcher,
            _insert,
            **layer.pages,
            **layer.words,
            **layer.rows,
            HEADS=heads,
            HAS_CELLS=has_cells,
            PAGE=self._page,
            maxnreg=128,  # two blocks per multiprocessor; unbounded, ptxas may spill to fit more
        )
        self._launch = bound(AT_ONCE=1, **slot_arguments(None))
        self._launch_saving: Launcher | None = None
        if saved is not None:
            check_saved(saved, layer.kv, layer.rank)
            at_once = heads_at_once(heads, layer.rows["ROW"])
            self._launch_saving = bound(AT_ONCE=at_once, **slot_arguments(saved))

    def shapes(self, num_rows: int, num_pages: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its scratch memory, by attribute of ``Singles``."""
        places = num_pages * self._page
        return {"cells": (num_rows, self._num_sets, places) if self._has_cells else (1,)}

    def __call__(self, tokens: Tokens, singles: Singles) -> None:
        """Write the pages; padding rows write nothing. Rows with ``PER_AGE`` need ``token``."""
        assert tokens.heads[1:] == self._heads, (tokens.heads, self._heads)
        # A program per request and head set. Latency dominates: one tile for all slots if possible.
        num_places = singles.num_pages * self._page
        tile = min(4096, triton.next_power_of_2(num_places))
        launch = self._launch if singles.saves is None else self._launch_saving
        assert launch is not None, "saves comes with saved"
        launch(
            (singles.num_rows, self._num_sets, 1),
            (tokens.variant, singles.variant),
            key=tokens.key,
            value=tokens.value,
            new_score=singles.new_score,
            table=singles.table,
            steps=singles.steps,
            rules=singles.rules,
            values=singles.cells,
            positions=singles.positions,
            saves=singles.saves,
            key_stride=tokens.places[1],
            value_stride=tokens.places[2],
            table_stride=singles.table_place,
            values_stride=num_places,
            TILE=tile,
            CELL_TILE=min(tile, 512),
            # With fewer elements than threads all warps load a rank that one of them rewrites.
            num_warps=max(min(tile // 32, 8 if tile > 1024 else 4), 1),
        )
