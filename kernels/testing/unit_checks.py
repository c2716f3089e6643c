# SPDX-License-Identifier: Apache-2.0
"""What puts tokens into pages of units, against literal lists: the whole pool, byte by byte."""

import torch

from .. import columns
from ..triton.insert import insert, survivors_reference
from ..triton.insert_stride import insert_strides
from ..triton.rotate import rotate_reference, rotation_table
from .insertion_checks import NUM_RULES, compared, lists_of_rules
from .random_pool import (
    TOLERANCE,
    Cache,
    Case,
    chronological,
    close,
    make_cache,
    new_tokens,
    on,
    real_rows,
    same,
    stride_steps,
    table_of,
)


def _steps(
    case: Case, steps: torch.Tensor, cache: Cache, variant: int
) -> tuple[list[list[tuple[int, int, int, int]]], torch.Tensor]:
    """Rules for the rows whose token completes a unit; slots for those that open one."""
    more, rules = [[99, 99, 99, 99]], []
    for row, length in enumerate(case.lengths):
        rules.append([])
        if length is None:
            continue
        held = -(-length // case.unit)
        steps[row, columns.LO : columns.PER_AGE] = 0
        room = held + 2 if length % case.unit == 0 else held  # one more than is needed
        steps[row, columns.NEW_SLOTS] = max(cache.slots[row], room * case.unit)
        if (length + 1) % case.unit == 0:
            rules[row] = lists_of_rules(held - 1)[(row + variant) % NUM_RULES]
            first, *others = rules[row]
            steps[row, columns.LO : columns.CELL + 1] = torch.tensor(first)
            steps[row, columns.MORE], steps[row, columns.NUM_MORE] = len(more), len(others)
            more += others
    steps[:, columns.PER_AGE] = int(case.per_age)
    steps[:, columns.NEWEST_STAYS] = int(case.newest_stays)
    return rules, torch.tensor(more, dtype=torch.int32)


def check_insert_units(case: Case, device: torch.device | str, variant: int = 0) -> float:
    """``insert`` of tokens that open units, join them and complete them."""
    cache, steps = make_cache(case)
    rules, more = _steps(case, steps, cache, variant)
    num_rows = len(case.lengths)
    _, key, value = new_tokens(case, num_rows)
    generator = torch.Generator().manual_seed(case.seed + 2)
    new_score = torch.rand(num_rows, case.num_sets, generator=generator)
    ours = cache.to(device)
    dsteps, dk, dv, dscore, dmore = on(device, steps, key, value, new_score, more)
    insert(
        *(dk, dv, dscore, ours.kv, ours.rank, ours.born, ours.score, ours.token),
        *(ours.table, dsteps, dmore, True),
    )
    after = ours.to("cpu")
    for row in real_rows(case):
        step = steps[row].tolist()
        order, scores, tokens = chronological(cache, row, step)
        held = order.shape[1]
        judged = compared(case, scores, tokens, step)
        kept = [list(range(held))] * case.num_sets
        if rules[row]:
            kept = survivors_reference(held - 1, rules[row], judged, case.newest_stays)
        for head_set in range(case.num_sets):
            _insert(cache, after, row, head_set, step, order[head_set].tolist(), kept[head_set])
            slot = _slot_of(cache, row, head_set, step, order[head_set].tolist())
            cache.put(row, head_set, slot, kv=torch.cat([key[row], value[row]], dim=1))
            if step[columns.CACHED] % case.unit == 0:
                cache.put(row, head_set, slot, score=float(new_score[row, head_set]))
    same("pool", after.pool, cache.pool)
    return 0.0


def _insert(
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    step: list[int],
    order: list[int],
    kept: list[int],
) -> None:
    """Ranks, and what a unit that is opened begins with; its place is read from ours."""
    unit, n = cache.case.unit, step[columns.CACHED]
    for place in range(step[columns.OLD_SLOTS] // unit, step[columns.NEW_SLOTS] // unit):
        cache.put(row, head_set, place * unit, rank=-1)
    for place in order:
        cache.put(row, head_set, place * unit, rank=-1)
    for rank, r in enumerate(kept):
        cache.put(row, head_set, order[r] * unit, rank=rank)
    if n % unit == 0:
        ranks = after.words("rank", row)[head_set, : step[columns.NEW_SLOTS] // unit].tolist()
        assert ranks.count(len(order)) == 1 and ranks.index(len(order)) not in order
        order.append(ranks.index(len(order)))
        words = {"rank": len(order) - 1, "born": n, "token": step[columns.STREAM]}
        cache.put(row, head_set, order[-1] * unit, **words)


def _slot_of(cache: Cache, row: int, head_set: int, step: list[int], order: list[int]) -> int:
    """The new token's slot: in its unit, the newest, which may just have been deleted."""
    unit, n = cache.case.unit, step[columns.CACHED]
    if n % unit == 0:
        ranks = cache.words("rank", row)[head_set, : step[columns.NEW_SLOTS] // unit].tolist()
        return ranks.index(n // unit) * unit
    return order[-1] * unit + n % unit


def check_insert_stride_units(
    case: Case, device: torch.device | str, recalls: bool = False
) -> float:
    """``insert_strides`` with random keep-masks of units, the last maybe not complete.

    ``recalls``: more recalled units will stand before that one, so it may have to move forward.
    """
    cache, steps = make_cache(case)
    unit, num_tokens = case.unit, stride_steps(case, steps)
    _, key, value = new_tokens(case, num_tokens)
    generator = torch.Generator().manual_seed(case.seed + 3)
    width = max(n or 0 for n in case.lengths) // unit + -(-max(case.strides) // unit)
    keep = torch.zeros(len(case.lengths), case.num_sets, width, dtype=torch.bool)
    for row in real_rows(case):
        cached, length = (int(steps[row, c]) for c in (columns.CACHED, columns.LENGTH))
        whole, last = (cached + length) // unit, int(length % unit > 0)
        survivors = int(torch.randint(1 - last, whole + 1, (1,), generator=generator))
        for head_set in range(case.num_sets):
            keep[row, head_set, torch.randperm(whole, generator=generator)[:survivors]] = True
        keep[row, :, whole:] = True  # what is not complete stays; beyond it must be ignored
        steps[row, columns.NEW_SLOTS] = max(cache.slots[row], (survivors + last) * unit)
    scores = torch.rand(keep.shape, generator=generator)
    more = torch.randint(0, 4 if recalls else 1, (len(keep),), generator=generator)
    recall = torch.full((len(keep), columns.RECALL_COLUMNS), 77, dtype=torch.int32)
    recall[:, columns.MORE_RECALLED] = more
    turning = table_of(case, device)
    if case.inv_freq is not None and recalls:
        farthest = case.max_distance + 1
        turning = rotation_table(case.inv_freq, farthest, device, forward=3 * unit)
    ours = cache.to(device)
    dsteps, dk, dv, dkeep, dscores = on(device, steps, key, value, keep, scores)
    insert_strides(
        *(dk, dv, dkeep, dscores, ours.kv, ours.rank, ours.born, ours.score, ours.token),
        *(ours.table, dsteps, max(case.strides), turning, case.interleaved),
        *on(device, recall if recalls else None),
    )
    after = ours.to("cpu")
    for row in real_rows(case):
        step = steps[row].tolist()
        own = slice(step[columns.START], step[columns.START] + step[columns.LENGTH])
        new = torch.cat([key[own], value[own]], dim=2)
        for head_set in range(case.num_sets):
            kept = keep[row, head_set]
            _stride(cache, after, row, head_set, step, kept, new, scores, int(more[row]))
    same("pool", after.pool, cache.pool)
    return 0.0


def _stride(
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    step: list[int],
    keep: torch.Tensor,
    new: torch.Tensor,
    scores: torch.Tensor,
    more: int,
) -> None:
    """Do to the reference pool what a stride's insertion must do; places are read from ours."""
    unit, n, length = cache.case.unit, step[columns.CACHED], step[columns.LENGTH]
    num_places, total = step[columns.NEW_SLOTS] // unit, n // unit + -(-length // unit)
    order = chronological(cache, row, step)[0][head_set].tolist()
    final = after.words("rank", row)[head_set, :num_places].tolist()
    kept = keep[:total].nonzero()[:, 0].tolist()
    used = {order[r] for r in kept if r < n // unit}
    for place in range(num_places):
        cache.put(row, head_set, place * unit, rank=-1)
    for rank, r in enumerate(kept):
        if r < n // unit:
            place = order[r]
        else:
            place = final.index(rank)
            assert place not in used and final.count(rank) == 1, "a survivor needs one free place"
            used.add(place)
            first = r * unit - n
            part, born = new[first : first + unit], r * unit
            if len(part) < unit:
                born = (rank + more) * unit
                part = _turned(cache, after, row, head_set, place, part, r * unit - born)
            token = step[columns.STREAM] + first
            cache.put(row, head_set, place * unit, born=born, token=token)
            for i, kv in enumerate(part):
                cache.put(row, head_set, place * unit + i, kv=kv)
        cache.put(row, head_set, place * unit, rank=rank, score=float(scores[row, head_set, r]))


def _turned(
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    place: int,
    part: torch.Tensor,
    distance: int,
) -> torch.Tensor:
    """Rows ``[t, H, 2 * D]`` of a unit that is not complete, where its rank says it stands.

    They are ours, once they were found close to an fp64 rotation.
    """
    case, size = cache.case, cache.case.head_size
    if case.inv_freq is None or distance == 0:
        return part
    slots = place * case.unit + torch.arange(len(part))
    block, offset = cache.table[row].long()[slots // case.block_size], slots % case.block_size
    ours = after.kv[block, :, offset]  # [t, H, 2D]
    heads = slice(head_set, head_set + 1) if case.per_head else slice(None)
    away = torch.full(part.shape[:2], distance)
    turned = rotate_reference(part[..., :size], away, case.inv_freq, case.interleaved)
    close("turned keys", ours[:, heads, :size], turned[:, heads], TOLERANCE[case.dtype])
    return torch.cat([ours[..., :size], part[..., size:]], dim=2)
