# SPDX-License-Identifier: Apache-2.0
"""What puts tokens into pages, against its reference: the whole pool, byte by byte."""

import random

import torch

from tests.kernels.decode_calls import insert
from tests.kernels.random_pool import (
    Cache,
    Case,
    chronological,
    make_cache,
    new_tokens,
    on,
    places_of,
    real_rows,
    rows_of,
    same,
)
from tests.kernels.references import as_int32, assign_reference, salted, survivors_reference
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton.assign import Assignment


def _cells(lo: int, hi: int, size: int) -> tuple[int, int, int, int]:
    """A rule of cells, or none where the range is too short."""
    evicts = hi - lo - -(-(hi - lo) // abs(size)) if hi > lo else 0
    return (lo, hi, evicts, size) if evicts else (0, 0, 0, 0)


def lists_of_rules(n: int) -> list[list[tuple[int, int, int, int]]]:
    """Every family of rules on a line of ``n`` cached tokens and the incoming one."""
    lo = min(2, n)
    middle = max(lo + (n - lo) // 3, lo)
    several = [(min(lo, n - i), n + 1 - i, 1, 0) for i in range(min(3, n + 1))]
    return [
        [(0, 0, 0, 0)],  # grow
        [(lo, lo + 1, 1, 0)],  # the oldest after the sinks
        [(max(n - 1, 0), n + 1, 1, 0)],  # the newest or the incoming
        [(n // 2, min(n // 2 + 2, n + 1), 1, 0)],  # two neighbours
        [(lo, n + 1, 1, 0)],  # any but the sinks
        [(min(1, n), max(n - 2, min(1, n) + 1), 1, 0)],  # between sinks and window
        [(lo, max(n - 3, lo + 1), max(n - 3, lo + 1) - lo, 0)],  # all of a range
        [(n, n + 1, 1, 0)],  # the incoming itself
        [_cells(lo, n, 3)],  # the best of every three
        [_cells(middle, n, 5), _cells(lo, middle, -2)],  # a comb
        several,  # the lowest, three times: a batch
        [(n, n + 1, 1, 0), (0, min(n, 1), min(n, 1), 0), _cells(0, n - 1, 2)],
    ]


NUM_RULES = 12


def rules_of(case: Case, steps: torch.Tensor, cache: Cache, variant: int) -> torch.Tensor:
    """Give every row a list of rules; ``variant`` rotates through them. Returns further ones."""
    more = [[99, 99, 99, 99]]  # belongs to nobody
    for row in real_rows(case):
        n = int(steps[row, columns.CACHED])
        first, *others = lists_of_rules(n)[(row + variant) % NUM_RULES]
        steps[row, columns.LO : columns.CELL + 1] = torch.tensor(first)
        steps[row, columns.MORE], steps[row, columns.NUM_MORE] = len(more), len(others)
        more += others
        if first[2] == 0:
            steps[row, columns.NEW_SLOTS] = max(cache.slots[row], n + 1)
    steps[:, columns.PER_AGE] = int(case.per_age)
    steps[:, columns.NEWEST_STAYS] = int(case.newest_stays)
    return torch.tensor(more, dtype=torch.int32)


def check_insert(case: Case, device: torch.device | str, variant: int = 0) -> float:
    """``insert``: the whole pool, byte by byte, up to which free slot a token takes."""
    cache, steps = make_cache(case)
    more = rules_of(case, steps, cache, variant)
    num_rows = len(case.lengths)
    _, key, value = new_tokens(case, num_rows)
    generator = torch.Generator().manual_seed(case.seed + 2)
    new_score = torch.rand(num_rows, case.num_sets, generator=generator)
    new_score = (new_score * 8).round() / 8 - 0.5
    steps, positions = places_of(case, steps)
    ours = cache.to(device)
    parts = steps, key, value, new_score, more, positions
    dsteps, dk, dv, dscore, dmore, dpositions = on(device, *parts)
    insert(
        key=dk,
        value=dv,
        new_score=dscore,
        **ours.views(),
        table=ours.table,
        steps=dsteps,
        rules=dmore,
        has_cells=True,
        positions=dpositions,
        latent=case.latent,
        stored=ours.codes,
    )
    after = ours.to("cpu")
    for row in real_rows(case):
        step = steps[row].tolist()
        first, last = step[columns.MORE], step[columns.MORE] + step[columns.NUM_MORE]
        rules = [step[columns.LO : columns.CELL + 1], *more[first:last].tolist()]
        _, old, tokens = chronological(cache, row, step)
        scores = torch.cat([old, new_score[row][:, None]], dim=1)
        kept = survivors_reference(
            step[columns.CACHED], rules, compared(case, scores, tokens, step), case.newest_stays
        )
        own = slice(row, row + 1)
        for head_set in range(case.num_sets):
            new = key[own], value[own], scores[head_set]
            _apply(cache, after, row, head_set, step, kept[head_set], new)
    same("pool", after.pool, cache.pool)
    return 0.0


def check_assign(case: Case, device: torch.device | str) -> float:
    """``assign``: one score a request changes in every head set, and nothing else."""
    cache, steps = make_cache(case)
    num_rows = len(case.lengths)
    generator, unit = torch.Generator().manual_seed(case.seed + 4), case.unit
    given = torch.randint(0, 1 << 24, (num_rows,), generator=generator).float()
    salts = [random.Random(case.seed).getrandbits(32) for _ in range(case.num_sets)]
    # A row that only pads brings any number, here what the null block seems to hold.
    wanted = [3 if n is None else (n - 1 - row % 3) // unit for row, n in enumerate(case.lengths)]
    ranks = torch.tensor(wanted, dtype=torch.int32)
    ours = cache.to(device)
    dgiven, dranks, dsteps, dsalts = on(device, given, ranks, steps, as_int32(salts))
    told = dsalts if case.seed % 2 else None
    Assignment(ours.rank, ours.score, unit, told)(dgiven, dranks, ours.table, dsteps)
    for row in real_rows(case):
        valid = cache.words("rank", row)
        valid[:, cache.slots[row] // unit :] = -1  # stale: must not be taken for the token
        old = cache.words("score", row)
        own = salts if case.seed % 2 else [None] * case.num_sets
        shown = [salted(float(given[row]), salt, unit) for salt in own]
        value = assign_reference(shown, int(ranks[row]), valid, old, unit)
        cache.put_all("score", row, value)
    same("pool", ours.pool, cache.pool)
    return 0.0


def compared(
    case: Case, scores: torch.Tensor, tokens: torch.Tensor, step: list[int]
) -> torch.Tensor:
    """What rules compare, ``[S, n]``: of the cached ``tokens``, and of a new one after them."""
    if not case.per_age:
        return scores
    age = torch.cat([step[columns.STREAM] + 1 - tokens, torch.ones(len(tokens), 1)], dim=1)
    return scores / age[:, : scores.shape[1]].float()


def _apply(
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    step: list[int],
    kept: list[int],
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Do to the reference pool what an insertion must do; free slots are read from ours.

    Args:
        kept: which of the cached and new tokens stay, in order.
        new: keys and values ``[T, H, D]`` of the new tokens, and the scores of all ``[n + T]``.
    """
    n, num_slots = step[columns.CACHED], step[columns.NEW_SLOTS]
    key, value, scores = new
    slots = chronological(cache, row, step)[0][head_set].tolist()
    final = after.words("rank", row)[head_set, :num_slots].tolist()
    used = {slots[r] for r in kept if r < n}
    for slot in range(num_slots):
        cache.put(row, head_set, slot, rank=-1)
    for index, r in enumerate(kept):
        if r < n:
            slot = slots[r]
        else:
            slot = final.index(index)
            assert slot not in used and final.count(index) == 1, "a survivor needs one free slot"
            used.add(slot)
            token, kv = step[columns.STREAM] + r - n, rows_of(cache.case, key[r - n], value[r - n])
            born = r + cache.case.shifts[row]
            cache.put(row, head_set, slot, born=born, token=token, kv=kv)
        cache.put(row, head_set, slot, rank=index, score=float(scores[r]))
