# SPDX-License-Identifier: Apache-2.0
"""Who survives a prompt's strides, and where, against literal lists: the whole pool after.

Pages are compared byte by byte, up to which free slot a survivor takes.
"""

import random

import torch

from tests.kernels.random_pool import (
    TOLERANCE,
    Cache,
    Case,
    chronological,
    close,
    float_bits,
    make_cache,
    new_tokens,
    on,
    real_rows,
    rows_of,
    same,
    stride_steps,
    table_of,
)
from tests.kernels.references import as_int32, reduce_reference, rotate_reference, salted
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.kernels.triton import stride_columns
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.column_sums import num_sums
from vllm_cascade.kernels.triton.insert_stride import StrideInsertion
from vllm_cascade.kernels.triton.keep import StrideChoice
from vllm_cascade.kernels.triton.strides import (
    LINE_WORDS,
    NUMBER_ROWS,
    VALUE_ROWS,
    Strides,
    Tokens,
)

FADE = 0.5


def check_insert_strides(case: Case, device: torch.device | str, recalls: bool = False) -> float:
    """``StrideInsertion`` with random plans: the whole pool, byte by byte.

    Numbers are such that fp32 is exact, so that equal scores are equal. ``recalls``: lines have
    units behind their sinks of which plans know nothing, and more of them will come.
    """
    cache, steps = make_cache(case)
    unit, num_tokens = case.unit, stride_steps(case, steps)
    query, key, value = new_tokens(case, num_tokens)
    generator = torch.Generator().manual_seed(case.seed + 3)
    heads, parts = num_sums(query, case.num_heads, unit, case.reduction)
    lengths = steps[:, columns.CACHED] + steps[:, columns.LENGTH]
    width = int(max(n // unit + 1 for n in lengths[real_rows(case)].tolist() or [0]))
    shape = len(steps), heads, width * parts
    sums = (torch.rand(shape, generator=generator) * 4).round() if case.scored else None
    given = None if case.scored else torch.rand(num_tokens, generator=generator).round()
    told_salts = salts = [
        random.Random(case.seed + i).getrandbits(32) for i in range(case.num_sets)
    ]
    if case.scored or case.seed % 2:  # scores of attention, and scores that all sets share
        told_salts, salts = None, [None] * case.num_sets
    line = torch.full((len(steps), case.num_sets, LINE_WORDS, width), -9, dtype=torch.int32)
    plans, keeps, scores = [torch.tensor([0, 0, 0])], {}, {}
    recall = torch.zeros(len(steps), columns.RECALL_COLUMNS, dtype=torch.int32)
    if recalls:
        recall[:, columns.MORE_RECALLED] = torch.randint(0, 4, (len(steps),), generator=generator)
    for row in real_rows(case):
        step = steps[row].tolist()
        shown = random.Random(case.seed + row).randint(0, step[columns.CACHED] // unit)
        recall[row, columns.NOW] = shown = shown if recalls else 0
        slots, old, tokens = chronological(cache, row, step)
        told = torch.stack([slots.int(), old.view(torch.int32), tokens], dim=1)
        line[row, :, :, : told.shape[2]] = told
        lag = row % 3
        scores[row] = _final_scores(case, step, old, sums, given, salts, row, parts, lag)
        judged = scores[row]
        if case.per_age:
            judged = judged / _ages(case, step, tokens)
        own = list(step)
        own[columns.CACHED] -= shown * unit
        recall[row, columns.SINKS] = sinks = min(row % 3, own[columns.CACHED] // unit) * recalls
        without = torch.cat([judged[:, :sinks], judged[:, sinks + shown :]], dim=1)
        plan, kept, numbers = _random_plan(case, own, without, row, sinks)
        stay = torch.ones(case.num_sets, shown, dtype=torch.bool)
        keeps[row] = torch.cat([kept[:, :sinks], stay, kept[:, sinks:]], dim=1)
        steps[row, stride_columns.PLAN] = sum(map(len, plans))
        steps[row, stride_columns.GROUPED : stride_columns.STAY + 1] = torch.tensor(numbers)
        steps[row, stride_columns.LAG] = lag
        plans.append(plan)
        most = int(keeps[row].sum(1)[0]) * unit
        steps[row, columns.NEW_SLOTS] = max(cache.slots[row], most)
        width = max(width, int(steps[row, columns.NEW_SLOTS]) // unit)
    steps[:, columns.PER_AGE] = int(case.per_age)
    steps[:, columns.NEWEST_STAYS] = int(case.newest_stays)
    steps[:, stride_columns.FADE] = float_bits(FADE)
    ours = cache.to(device)
    dsteps, dk, dv, drecall = on(device, steps, key, value, recall)
    dsums, dgiven, dline, dplans = on(device, sums, given, line, torch.cat(plans).int())
    dsalts = None if told_salts is None else on(device, as_int32(told_salts))[0]
    notes = dsteps.new_full((len(steps), case.num_sets, 3, NUMBER_ROWS, width), -7)
    values = torch.full_like(notes[..., :VALUE_ROWS, :], 7, dtype=torch.float32).contiguous()
    turning = table_of(case, device)
    if case.inv_freq is not None and recalls:
        turning = rotation_table(case.inv_freq, case.max_distance + 1, device, forward=3 * unit)
    strides = Strides(
        steps=dsteps,
        table=ours.table,
        line=dline,
        sums=dsums,
        parts=parts,
        query_heads=case.num_heads * case.group // case.num_sets,
        given=dgiven,
        plans=dplans,
        notes=notes,
        values=values,
        recall=drecall if recalls else None,
    )
    if recalls:
        found = StrideChoice(ours.token, unit, case.reduction, dsalts)(strides).cpu()
        for row in real_rows(case):
            same("keep", found[row, :, : keeps[row].shape[1]] >= 0, keeps[row])
    layer = CachedLayer(
        **ours.views(),
        rotation=turning,
        interleaved=case.interleaved,
        latent=case.latent,
        stored=ours.codes,
        dtype=case.dtype,
    )
    StrideInsertion(layer, case.reduction, dsalts)(Tokens(query=None, key=dk, value=dv), strides)
    after = ours.to("cpu")
    for row in real_rows(case):
        step = steps[row].tolist()
        own = slice(step[columns.START], step[columns.START] + step[columns.LENGTH])
        new = rows_of(case, key[own], value[own])
        for head_set in range(case.num_sets):
            kept = keeps[row][head_set].nonzero()[:, 0].tolist()
            more = int(recall[row, columns.MORE_RECALLED])
            where = cache, after, row, head_set
            insert_literally(*where, step, kept, new, scores[row][head_set], more=more)
    same("pool", after.pool, cache.pool)
    return 0.0


def _final_scores(
    case: Case,
    step: list[int],
    old: torch.Tensor,
    sums: torch.Tensor | None,
    given: torch.Tensor | None,
    salts: list[int | None],
    row: int,
    parts: int,
    lag: int,
) -> torch.Tensor:
    """fp32 ``[S, units]`` of cached and new units after the stride."""
    unit, cached, length = case.unit, step[columns.CACHED], step[columns.LENGTH]
    units = -(-(cached + length) // unit)
    scores = torch.zeros(case.num_sets, units)
    scores[:, : old.shape[1]] = old
    if sums is None:
        assert given is not None
        for i, value in enumerate(given[step[columns.START] :][:length].tolist()):
            column = (cached - lag + i) // unit
            if column >= 0:
                own = torch.tensor([salted(value, salt, unit) for salt in salts])
                scores[:, column] = own + (scores[:, column] if unit > 1 else 0)
        return scores
    begun = torch.arange(units * parts) * (unit // parts) < cached + length
    mass = torch.where(begun, sums[row, :, : units * parts], 0.0)
    mass = mass.unflatten(1, (units, parts)).sum(2)
    query_heads = case.num_heads * case.group // case.num_sets
    if case.reduction == "mean":
        reduced_mass = mass.unflatten(0, (case.num_sets, -1)).sum(1) / query_heads
    else:
        reduced_mass = reduce_reference(mass, case.num_sets, case.reduction)
    return reduced_mass + FADE * scores


def _ages(case: Case, step: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """fp32 ``[S, units]``: queries that saw each unit's first token."""
    stream, length = step[columns.STREAM], step[columns.LENGTH]
    new = torch.arange(stream, stream + length, case.unit).expand(len(tokens), -1)
    return (stream + length - torch.cat([tokens, new], dim=1)).clamp_min(1).float()


def _random_plan(
    case: Case, step: list[int], judged: torch.Tensor, row: int, sinks: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """A plan's numbers, the units that it leaves as bool ``[S, units]``, and the row's columns.

    The first ``sinks`` units stay.
    """
    rng = random.Random(case.seed * 100 + row)
    whole = (step[columns.CACHED] + step[columns.LENGTH]) // case.unit
    keep = torch.ones(judged.shape, dtype=torch.bool)
    if row % 4 == 3 or whole <= sinks:
        return torch.tensor([0, 0, 0]), keep, (0, 0, 0)  # nothing is planned, all stays
    planned = whole - (rng.randrange(whole - sinks) if row % 2 else 0)

    def order(head_set: int, r: int) -> tuple[float, int]:
        return float(judged[head_set, r]), r if case.newest_stays else -r

    if row % 4 == 1:
        lo = rng.randrange(sinks, planned) if case.seed % 2 else sinks
        hi = rng.randrange(lo, planned) + 1
        excess = rng.randrange(hi - lo + 1)
        for head_set in range(case.num_sets):
            lowest = sorted(range(lo, hi), key=lambda r, s=head_set: order(s, r))
            keep[head_set, lowest[:excess]] = False
        return torch.tensor([lo, hi, excess]), keep, (0, planned, planned - excess)
    groups: list[list[int]] = [[]]
    for r in range(planned):  # contenders are in order; some leave at once
        if groups[-1] and (rng.random() < 0.6 or r <= sinks):
            groups.append([])
        if rng.random() < 0.9 or not groups[-1]:
            groups[-1].append(r)
    keep[:, :planned] = False
    for head_set in range(case.num_sets):
        for group in groups:
            keep[head_set, max(group, key=lambda r, s=head_set: order(s, r))] = True
    ends = torch.tensor([0, *map(len, groups)]).cumsum(0) + len(groups) + 1
    members = torch.tensor([r for group in groups for r in group])
    return torch.cat([ends, members]), keep, (1, planned, len(groups))


def insert_literally(
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    step: list[int],
    kept: list[int],
    new: torch.Tensor,
    scores: torch.Tensor,
    born_at: list[int] | None = None,
    more: int = 0,
) -> None:
    """Do to the reference pool what a stride's insertion must do; places are read from ours.

    Args:
        kept: which of the cached and new units stay, in order.
        new: keys and values ``[T, H, 2 * D]``.
        scores: of all units.
        born_at: where the keys of each of ``kept`` were rotated to; None: to their places behind
            all that was cached.
        more: units that will be recalled in addition, before the one that is not complete.
    """
    unit, n = cache.case.unit, step[columns.CACHED]
    order = chronological(cache, row, step)[0][head_set].tolist()
    num_places = step[columns.NEW_SLOTS] // unit
    final = after.words("rank", row)[head_set, :num_places].tolist()
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
            part, scales = new[first : first + unit], None
            born = r * unit if born_at is None else born_at[rank]
            if len(part) < unit:
                away, born = born - (rank + more) * unit, (rank + more) * unit
                part, scales = _turned(cache, after, row, head_set, place, part, away)
            token = step[columns.STREAM] + first
            cache.put(row, head_set, place * unit, born=born, token=token)
            for i, kv in enumerate(part):
                of_row = {} if scales is None else {"scale": scales[i]}
                cache.put(row, head_set, place * unit + i, kv=kv, **of_row)
        cache.put(row, head_set, place * unit, rank=rank, score=float(scores[r]))


def _turned(
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    place: int,
    part: torch.Tensor,
    distance: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows ``[t, H, 2 * D]`` of a unit that is not complete, where its rank says it stands.

    They are ours, once they were found close to an fp64 rotation. Those of codes come with scales.
    """
    case, size = cache.case, cache.case.head_size
    if case.inv_freq is None or distance == 0:
        return part, None
    slots = place * case.unit + torch.arange(len(part))
    block, offset = cache.table[row].long()[slots // case.block_size], slots % case.block_size
    ours, scale = after.decoded[block, :, offset], after.scale[block, :, offset]  # [t, H, 2D]
    heads = slice(head_set, head_set + 1) if case.per_head else slice(None)
    away = torch.full(part.shape[:2], distance)
    turned = rotate_reference(part[..., :size], away, case.inv_freq, case.interleaved)
    if case.quantiser is not None:
        rows = torch.cat([turned.float(), part[..., size:].float()], dim=2)
        _close_codes(case, ours[:, heads], scale[:, heads], rows[:, heads])
        return after.kv[block, :, offset], scale
    close("turned keys", ours[:, heads, :size], turned[:, heads], TOLERANCE[case.dtype])
    return torch.cat([ours[..., :size], part[..., size:]], dim=2), None


def _close_codes(case: Case, ours: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows as they are read, and their scales, are those of ``rows``, up to rounding."""
    doubt = 1e-5 * (1 + rows.abs())
    least, most = case.read(rows - doubt), case.read(rows + doubt)
    spread = torch.maximum(least, most) + doubt, torch.minimum(least, most) - doubt
    assert ((ours <= spread[0]) & (ours >= spread[1])).all(), "codes that are not their rows'"
    close("scales", scale, case.encode(rows)[1].double(), 1e-6)
