# SPDX-License-Identifier: Apache-2.0
"""Every kernel against its fp64 reference on a random, poisoned page pool.

Used by ``tests/kernels`` (in Triton's interpreter) and by ``benchmarks.gpu_check`` (on a GPU), so
that both mean the same by "correct". A check raises ``AssertionError``, or returns its largest
error.
"""

import random
from typing import Any

import torch

from tests.kernels.chunk_checks import check_chunks
from tests.kernels.decode_calls import attend, merge, merge_scored
from tests.kernels.draft_checks import check_drafts
from tests.kernels.insertion_checks import NUM_RULES, check_assign, check_insert
from tests.kernels.prefill_checks import check_prefill, check_split
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
    places_of,
    real_rows,
    same,
    table_of,
)
from tests.kernels.references import (
    attend_strides_reference,
    gather_reference,
    in_units,
    rotate_reference,
    schedule_reference,
    update_reference,
)
from tests.kernels.stride_checks import check_insert_strides
from tests.kernels.unit_checks import check_insert_units
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import decode_dtype, rotation_table
from vllm_cascade.kernels.triton.configs import attend_splits
from vllm_cascade.kernels.triton.schedule import (
    HEAD_COLUMNS,
    TABLE_COLUMNS,
    ScheduleTables,
    schedule,
)
from vllm_cascade.kernels.triton.scores import HeadMasses, MassScores, update
from vllm_cascade.kernels.triton.singles import Singles

__all__ = [
    "NUM_RULES",
    "check_assign",
    "check_chunks",
    "check_drafts",
    "check_insert",
    "check_insert_strides",
    "check_insert_units",
    "check_prefill",
    "check_split",
]


def _expected(
    cache: Cache, row: int, step: list[int], new: tuple[torch.Tensor, ...], factors: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What ``gather_reference`` and, for the new tokens, ``attend_strides_reference`` return."""
    case = cache.case
    old = gather_reference(
        kv=cache.decoded,
        **cache.views("rank", "born", "score"),
        blocks=cache.table[row],
        step=step,
        inv_freq=case.inv_freq,
        interleaved=case.interleaved,
        shift=case.shifts[row],
        latent=case.latent,
    )
    query, key, value = new
    return old, attend_strides_reference(
        query=query,
        key=key,
        value=value,
        old_keys=old[0],
        old_values=old[1],
        scale=case.head_size**-0.5,
        slopes=case.slopes,
        logit_scale=factors,
        softcap=case.softcap,
        sinks=case.sink_logits,
    )


def check_decode(case: Case, device: torch.device | str) -> dict[str, float]:
    """``attend``, then ``merge`` and ``update``, or ``merge_scored``, of one token a request."""
    cache, steps = make_cache(case)
    num_rows = len(case.lengths)
    averages = [(0.9 - 0.1 * (row % 3), 0.1 + 0.2 * (row % 2)) for row in range(num_rows)]
    for row in real_rows(case):
        bits = [float_bits(value) for value in averages[row]]
        steps[row, columns.DECAY], steps[row, columns.WEIGHT] = bits[0], bits[1]
    padding = sorted(set(range(num_rows)) - set(real_rows(case)))
    for row in padding if real_rows(case) else ():  # where a request of the batch was before
        cache.table[row] = cache.table[real_rows(case)[-1]]
        steps[row, columns.OLD_SLOTS] = steps[real_rows(case)[-1], columns.OLD_SLOTS]
    steps, positions = places_of(case, steps)
    query, key, value = new_tokens(case, num_rows)
    factors = torch.rand(num_rows) + 0.5 if case.logit_scale else torch.ones(num_rows)
    scale = case.head_size**-0.5
    ours = cache.to(device)
    dsteps, dq, dk, dv, dpositions = on(device, steps, query, key, value, positions)
    slopes, sinks = on(device, case.slopes, case.sink_logits)
    (dfactors,) = on(device, factors if case.logit_scale else None)
    splits = case.splits
    if splits is None:
        slots = ours.table.shape[1] * case.block_size
        splits = attend_splits(ours.pool.device, num_rows, case.num_heads, slots)
    splits = 1 << (splits - 1).bit_length()
    before = ours.pool.clone()
    parts, parts_lse, logits, own = attend(
        query=dq,
        key=dk,
        value=dv,
        kv=ours.kv,
        rank=ours.rank,
        born=ours.born,
        table=ours.table,
        steps=dsteps,
        rotation=table_of(case, device, decode_dtype(case.dtype)),
        slopes=slopes,
        logit_scale=dfactors,
        scale=scale,
        softcap=case.softcap,
        interleaved=case.interleaved,
        splits=splits,
        keep_logits=True,
        positions=dpositions,
        latent=case.latent,
        stored=ours.codes,
    )
    output = torch.full_like(dq[..., : case.value_size], torch.nan).contiguous()
    found = {"partial": parts, "partial_lse": parts_lse, "steps": dsteps, "sinks": sinks}
    outputs = [torch.full_like(dq[..., : case.value_size], torch.nan).contiguous() for _ in "12"]
    lse = merge(**found, output=outputs[0])
    same("attend and merge write no page", ours.pool, before.cpu())
    left: dict[str, Any] = {"logits": logits, "own": own, "steps": dsteps, "unit": case.unit}
    left["reduction"] = case.reduction
    alone, joint = cache.to(device), ours
    made = [
        update(**left, lse=lse, **_scored(alone)),
        merge_scored(**found | left, **_scored(joint), output=outputs[1]),
    ]
    if case.reduction != "median" and not case.per_head and case.num_heads * case.group % 2 == 0:
        _check_ranks(alone, made[0], cache.to(device), (logits, own, lse), dsteps)
    tolerance = TOLERANCE[case.dtype]
    errors = {"output": 0.0, "lse": 0.0, "score": 0.0}
    for row in real_rows(case):
        step = steps[row].tolist()
        own = slice(row, row + 1)
        (_, _, old, places), (expected, norm, probs) = _expected(
            cache, row, step, (query[own], key[own], value[own]), factors[own]
        )
        mass = in_units(probs[:, 0], case.unit)
        scores = update_reference(mass, old, *averages[row], case.reduction)
        errors["lse"] = max(errors["lse"], close("lse", lse[own], norm, tolerance))
        for pages, output, new_score in zip((alone, joint), outputs, made, strict=True):
            actual = pages.to("cpu").words("score", row).gather(1, places)
            for name, one, wanted in (
                ("output", output[own], expected),
                ("score", actual, scores[:, : old.shape[1]]),
                # A token that joins a unit has no score of its own.
                ("score", new_score[row], scores[:, -1] if opens(case, step) else new_score[row]),
            ):
                errors[name] = max(errors[name], close(name, one, wanted, tolerance))
    for row in padding:
        for output in outputs:
            zeros = torch.zeros_like(query[row, :, : case.value_size])
            same("output of padding", output[row], zeros)
    for pages in (alone, joint):
        after = pages.to("cpu")
        empty = cache.rank < 0
        scores = (one.score[empty].view(torch.int32) for one in (after, cache))  # NaN is NaN
        same("scores of empty slots", *scores)
        after.score.copy_(cache.score)
        same("only scores are written", after.pool, cache.pool)
    return errors


def _scored(pages: Cache) -> dict[str, torch.Tensor]:
    """What kernels that update scores read and write."""
    return {"rank": pages.rank, "score": pages.score, "table": pages.table}


def _check_ranks(
    ours: Cache,
    new_score: torch.Tensor,
    again: Cache,
    made: tuple[torch.Tensor, ...],
    steps: torch.Tensor,
) -> None:
    """Two tensor-parallel ranks with half of the heads each come to the scores of one with all.

    Args:
        ours, again: pages after ``update``, and before it.
        made: logits, the new tokens' own, and log-sum-exps.
    """
    case, num = ours.case, made[0].shape[1] // 2
    where = {"steps": steps, "table": again.table}
    masses = torch.empty(len(steps), again.table.shape[1] * again.rank.shape[2] + 1)
    ranks = []
    for half in (slice(0, num), slice(num, None)):
        logits, own, lse = (x[:, half].contiguous() for x in made)
        own_masses = masses.to(lse.device, copy=True)
        one = Singles(**where, logits=logits, own=own, lse=lse, masses=own_masses)
        HeadMasses(again.rank, num, case.reduction, case.unit)(one)
        ranks.append(own_masses)
    both = torch.stack(ranks)
    masses = both.mean(0) if case.reduction == "mean" else both.amax(0)
    new = masses.new_empty(len(steps), 1)
    MassScores(again.rank, again.score, case.unit)(Singles(**where, masses=masses, new_score=new))
    for row in real_rows(case):
        places = chronological(again.to("cpu"), row, steps[row].tolist())[0]
        scores = [cache.to("cpu").words("score", row).gather(1, places) for cache in (again, ours)]
        close("scores of two ranks", scores[0], scores[1].double(), 1e-5)
        close("new scores of two ranks", new[row], new_score[row].cpu().double(), 1e-5)


def opens(case: Case, step: list[int]) -> bool:
    """Whether a row's token is the first of a unit."""
    return step[columns.STREAM] % case.unit == 0


def check_schedule(device: torch.device | str, seed: int = 0, unit: int = 1) -> float:
    """``schedule`` on random tables of three policies, with rows of length 0."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    heads = []
    for _ in range(3):
        transient, period = rng.randrange(0, 40), rng.randrange(1, 9)
        scores = [rng.randrange(10**9) for _ in range(HEAD_COLUMNS - 3)]
        heads.append([len(rows), transient, period, *scores])
        for _ in range(transient + period):
            rows.append([rng.randrange(0, 999) for _ in range(TABLE_COLUMNS)])
    lengths = [unit * rng.choice([0, 1, 2, 39, 40, 41, 777, 10**6]) for _ in range(300)]
    if unit > 1:
        lengths = [max(length - rng.randrange(unit), 0) for length in lengths]
    policy_of = [rng.randrange(3) for _ in lengths]
    int32 = {"dtype": torch.int32, "device": device}
    tables = ScheduleTables(torch.tensor(rows, **int32), torch.tensor(heads, **int32), unit)
    steps = torch.full((310, columns.STEP_COLUMNS), -99, **int32)
    positions = torch.full((310,), -99, dtype=torch.int64, device=device)
    blocks = [rng.choice([0, 7, 8, 9]) for _ in lengths]
    block_table = torch.tensor([[block, 5] for block in blocks], **int32)
    seq_lens, of = torch.tensor(lengths, **int32), torch.tensor(policy_of, **int32)
    schedule(seq_lens, block_table, tables, of, steps, positions)
    expected = schedule_reference(lengths, blocks, rows, heads, policy_of, unit)
    same("steps", steps[:300], torch.tensor(expected, dtype=torch.int32))
    same("positions", positions[:300], torch.tensor([row[1] for row in expected]))
    again = torch.full_like(steps, -99)
    schedule(seq_lens, block_table, tables, of, again, None)
    same("steps of those whose positions others say", again, steps.cpu())
    assert (steps[300:] == -99).all() and (positions[300:] == -99).all(), "wrote past the batch"
    _check_waves((block_table, tables, of), lengths, blocks, (rows, heads, policy_of, unit))
    return 0.0


def _check_waves(
    given: tuple[torch.Tensor, ScheduleTables, torch.Tensor],
    lengths: list[int],
    blocks: list[int],
    expecting: tuple[Any, ...],
) -> None:
    """Requests with three new tokens each: wave by wave as batches that are so much shorter."""
    (block_table, tables, of), num = given, len(lengths)
    int32 = {"dtype": torch.int32, "device": block_table.device}
    seq_lens = torch.tensor([n and n + 2 for n in lengths], **int32)
    steps = torch.full((3, num + 9, columns.STEP_COLUMNS), -99, **int32)
    positions = torch.full((3 * num + 5,), -99, dtype=torch.int64, device=block_table.device)
    schedule(seq_lens, block_table, tables, of, steps, positions)
    for wave in range(3):
        ends = [n and n + wave for n in lengths]
        told = torch.tensor(schedule_reference(ends, blocks, *expecting), dtype=torch.int32)
        real = told[:, columns.STREAM] >= 0
        told[real, columns.START] = (3 * torch.arange(num) + wave)[real].int()
        same("steps of a wave", steps[wave, :num], told)
        same("their positions", positions[wave : 3 * num : 3], told[:, columns.CACHED].long())
    assert (steps[:, num:] == -99).all() and (positions[3 * num :] == -99).all(), "wrote past it"


def check_rotation_table(device: torch.device | str) -> float:
    """The table turns an fp32 vector as fp64 trigonometry does, up to large distances."""
    case = Case()
    table = rotation_table(case.inv_freq, 40000, device).cpu()
    distance = torch.tensor([0, 1, 977, 40000])
    x = torch.randn(4, case.head_size, generator=torch.Generator().manual_seed(0))
    cos, sin = table[distance].unbind(1)
    first, second = x[:, : case.half], x[:, case.half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)
    return close("table", turned, rotate_reference(x, distance, case.inv_freq, False), 1e-6)
