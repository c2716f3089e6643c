# SPDX-License-Identifier: Apache-2.0
"""Draft tokens against their reference: what is saved, and that undoing one leaves no trace."""

from collections.abc import Iterator

import torch

from tests.kernels.decode_calls import insert
from tests.kernels.insertion_checks import rules_of
from tests.kernels.random_pool import (
    POISON,
    Cache,
    Case,
    make_cache,
    new_tokens,
    on,
    real_rows,
    same,
)
from tests.kernels.unit_checks import unit_rules_of
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton.drafts import DraftUndo, Saved, VersionSaver

MOST = 3
"""Drafts of a request."""


class Pool:
    """A cache whose pages also have versions, and memory for slots by place."""

    def __init__(self, cache: Cache, device: torch.device | str) -> None:
        case, (blocks, size) = cache.case, cache.pool.shape
        versions = MOST * 2 * case.num_sets * case.units
        scales = 2 * case.num_heads * case.block_size
        self.pool = torch.full((blocks, size + 4 * (versions + scales)), POISON, dtype=torch.uint8)
        self.pool[:, :size] = cache.pool
        generator = torch.Generator().manual_seed(case.seed)
        values = torch.rand(blocks, scales, generator=generator)
        self.pool[:, size + 4 * versions :] = values.view(torch.uint8)
        self.pool = self.pool.to(device)
        self.cache = Cache(case, self.pool[:, :size], cache.table.to(device), cache.slots)
        words = self.pool[:, size:].view(torch.int32)
        self.versions = words[:, :versions].unflatten(1, (MOST, 2, case.num_sets, case.units))
        scale = words[:, versions:].view(torch.float32)
        scale = scale.unflatten(1, (case.num_heads, 2, case.block_size)).transpose(2, 3)
        places = MOST * len(case.lengths)
        rows = torch.empty(places, case.num_heads, case.row_size, dtype=case.stored_dtype)
        rows.view(torch.uint8).fill_(POISON)
        words = torch.full((places, 3, case.num_sets), -99, dtype=torch.int32)
        self.saved = Saved(rows.to(device), words.to(device))
        if case.quantiser is not None:
            scale = self.cache.scale
        if case.row_scales or (case.quantiser is None and case.seed % 2 == 0):
            own = torch.full((places, case.num_heads, 2), torch.nan, device=device)
            self.saved = self.saved._replace(scale=own, page_scale=scale)


def check_drafts(case: Case, device: torch.device | str, variant: int = 0) -> float:
    """``VersionSaver``, ``insert`` and ``DraftUndo`` of a batch in which some tokens are drafts."""
    cache, steps = make_cache(case)
    if case.unit > 1:
        _, more = unit_rules_of(case, steps, cache, variant)
    else:
        more = rules_of(case, steps, cache, variant)
    num_rows = len(case.lengths)
    _, key, value = new_tokens(case, num_rows)
    new_score = torch.rand(num_rows, case.num_sets, generator=torch.Generator().manual_seed(9))
    drafts = [row for row in real_rows(case) if row % 3 != 1]
    saves = torch.full((num_rows,), -1, dtype=torch.int32)
    for row in drafts:
        saves[row] = row * MOST + (row + variant) % MOST
    saves[[row for row in range(num_rows) if row not in real_rows(case)]] = 0  # any number

    plain, ours = Pool(cache, device), Pool(cache, device)
    dsteps, dk, dv, dscore, dmore, dsaves = on(device, steps, key, value, new_score, more, saves)
    where = {"table": ours.cache.table, "steps": dsteps}
    saver = VersionSaver(
        **ours.cache.views("rank", "score"), versions=ours.versions, unit=case.unit
    )
    saver(saves=dsaves, **where)
    _check_versions(ours, cache, steps, saves)
    told = {"key": dk, "value": dv, "new_score": dscore, **where, "rules": dmore}
    rows = {"latent": case.latent, "has_cells": True}
    scales = None if ours.saved.page_scale is None else ours.saved.page_scale.cpu().clone()
    insert(**told, **rows, **plain.cache.views(), stored=plain.cache.codes)
    drafting = {"saves": dsaves, "saved": ours.saved, "stored": ours.cache.codes}
    insert(**told, **rows, **ours.cache.views(), **drafting)
    same("pages after a draft", ours.cache.pool, plain.cache.pool.cpu())
    _check_saved(ours, cache, steps, saves)
    for row in drafts:
        _write_scales(ours, scales, row, int(saves[row]))

    undone = torch.zeros(len(drafts) + 1, 4, dtype=torch.int32)  # the last row undoes nothing
    undone[:-1, 0] = saves[drafts]
    undone[:-1, 1] = torch.tensor([_replace_again(ours, row, int(saves[row])) for row in drafts])
    undone[:-1, 2] = steps[drafts, columns.OLD_SLOTS]
    table = torch.cat([cache.table[drafts], torch.zeros_like(cache.table[:1])])
    dundone, dtable = on(device, undone, table)
    undo = DraftUndo(**ours.cache.views(), versions=ours.versions, saved=ours.saved)
    undo(dundone, dtable)
    for row in range(num_rows):
        expected = cache if row in drafts else plain.cache
        _check_row(case, ours.cache, expected, row, int(steps[row, columns.OLD_SLOTS]))
    same("null block", ours.cache.pool[0], cache.pool[0])
    if scales is not None and case.quantiser is None:
        same("scales of rows", ours.saved.page_scale, scales)
    return 0.0


def _slots(ours: Pool, row: int, place: int) -> Iterator[tuple[int, int, int, slice]]:
    """Of a draft that is written: head sets, blocks, places in these, and heads of the set."""
    case = ours.cache.case
    for head_set, slot in enumerate(ours.saved.words[place, 0].tolist()):
        if slot >= 0:
            block = int(ours.cache.table[row, slot // case.block_size])
            heads = slice(head_set, head_set + 1) if case.per_head else slice(None)
            yield head_set, block, slot % case.block_size, heads


def _write_scales(ours: Pool, before: torch.Tensor | None, row: int, place: int) -> None:
    """Scales of the draft's own row, as an insertion into quantised pages writes them."""
    saved = ours.saved
    if saved.scale is None or saved.page_scale is None or before is None:
        return
    for _, block, offset, heads in _slots(ours, row, place):
        same("saved scales", _bits(saved.scale[place, heads]), _bits(before[block, heads, offset]))
        saved.page_scale[block, heads, offset] = 7.0


def _replace_again(ours: Pool, row: int, place: int) -> int:
    """Let the next draft, if there may be one, have replaced the same slots; returns their number.

    What it would have saved is what the first one has written.
    """
    if (place + 1) % MOST == 0:
        return 1
    unit, cache, saved = ours.cache.case.unit, ours.cache, ours.saved
    saved.words[place + 1, 0] = saved.words[place, 0]
    for head_set, block, offset, heads in _slots(ours, row, place):
        saved.rows[place + 1, heads] = cache.kv[block, heads, offset]
        for number, word in enumerate((cache.born, cache.token)):
            saved.words[place + 1, 1 + number, head_set] = word[block, head_set, offset // unit]
        if saved.scale is not None and saved.page_scale is not None:
            saved.scale[place + 1, heads] = saved.page_scale[block, heads, offset]
    return 2


def _check_versions(ours: Pool, cache: Cache, steps: torch.Tensor, saves: torch.Tensor) -> None:
    """Ranks and scores of drafts' requests are in their version, and nothing else is written."""
    case = cache.case
    expected = Pool(cache, "cpu")
    for row in real_rows(case):
        place, units = int(saves[row]), int(steps[row, columns.OLD_SLOTS]) // case.unit
        for number in range(units if place >= 0 else 0):
            block, unit = cache.table[row, number // case.units], number % case.units
            version = expected.versions[block, place % MOST, :, :, unit]
            version[0] = cache.rank[block, :, unit]
            version[1] = cache.score[block, :, unit].view(torch.int32)
    same("versions", ours.pool, expected.pool)


def _check_saved(ours: Pool, cache: Cache, steps: torch.Tensor, saves: torch.Tensor) -> None:
    """The slot of each draft, and what was in it."""
    case, after = cache.case, ours.cache.to("cpu")
    rows, words = ours.saved.rows.cpu(), ours.saved.words.cpu()
    taken = [int(saves[row]) for row in real_rows(case) if saves[row] >= 0]
    others = torch.tensor([place not in taken for place in range(len(rows))])
    assert (rows[others].view(torch.uint8) == POISON).all() and (words[others] == -99).all(), (
        "another place is written"
    )
    for row in real_rows(case):
        place = int(saves[row])
        for head_set in range(case.num_sets if place >= 0 else 0):
            slot, *saved = words[place, :, head_set].tolist()
            heads = slice(head_set, head_set + 1) if case.per_head else slice(None)
            blocks = cache.table[row].long()
            kv_before, kv_after = (
                one.kv[blocks].transpose(0, 1).flatten(1, 2)[heads] for one in (cache, after)
            )
            moved = kv_before.view(torch.uint8) != kv_after.view(torch.uint8)
            changed = moved.any(2).any(0).nonzero().flatten().tolist()
            assert changed == ([] if slot < 0 else [slot]), (row, head_set, slot, changed)
            if slot >= 0:
                own = [cache.words(w, row)[head_set, slot // case.unit] for w in ("born", "token")]
                assert saved == [int(word) for word in own]
                before = kv_before[:, slot].view(torch.uint8)
                same("saved row", rows[place, heads].view(torch.uint8), before)


def _check_row(case: Case, ours: Cache, expected: Cache, row: int, slots: int) -> None:
    """A request's pages, but for ranks and scores of slots that are not in use."""
    ours, expected = ours.to("cpu"), expected.to("cpu")
    blocks = ours.table[row].long()
    same("rows", ours.kv[blocks].view(torch.uint8), expected.kv[blocks].view(torch.uint8))
    same("scales", _bits(ours.scale[blocks]), _bits(expected.scale[blocks]))
    used = None if row not in real_rows(case) else slots // case.unit
    for word in ("rank", "born", "score", "token"):
        many = used if word in ("rank", "score") else None
        mine, other = (one.words(word, row)[:, :many] for one in (ours, expected))
        same(word, mine.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def _bits(scales: torch.Tensor) -> torch.Tensor:
    """Unused ones are NaN, which equals nothing."""
    return scales.cpu().contiguous().view(torch.int32)
