# SPDX-License-Identifier: Apache-2.0
"""What puts tokens into pages of units, against literal lists: the whole pool, byte by byte."""

import torch

from tests.kernels.decode_calls import insert
from tests.kernels.insertion_checks import NUM_RULES, compared, lists_of_rules
from tests.kernels.random_pool import (
    Cache,
    Case,
    chronological,
    make_cache,
    new_tokens,
    on,
    real_rows,
    rows_of,
    same,
)
from tests.kernels.references import survivors_reference
from vllm_cascade.kernels import columns


def unit_rules_of(
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
    rules, more = unit_rules_of(case, steps, cache, variant)
    num_rows = len(case.lengths)
    _, key, value = new_tokens(case, num_rows)
    generator = torch.Generator().manual_seed(case.seed + 2)
    new_score = torch.rand(num_rows, case.num_sets, generator=generator)
    ours = cache.to(device)
    dsteps, dk, dv, dscore, dmore = on(device, steps, key, value, new_score, more)
    insert(
        key=dk,
        value=dv,
        new_score=dscore,
        **ours.views(),
        table=ours.table,
        steps=dsteps,
        rules=dmore,
        has_cells=True,
        latent=case.latent,
        stored=ours.codes,
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
            cache.put(row, head_set, slot, kv=rows_of(case, key[row], value[row]))
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
