# SPDX-License-Identifier: Apache-2.0
"""Recall's kernels against literal lists and fp64: evidence, what is brought back, what is stored.

Rings hold junk wherever no unit is, and are compared as a whole, as pages are.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.random_pool import (
    Cache,
    Case,
    chronological,
    close,
    make_cache,
    new_tokens,
    on,
    real_rows,
    rows_of,
    same,
    stride_steps,
)
from tests.kernels.recall_calls import judge_units, ranks_before, recall_units, store_units
from tests.kernels.references import (
    asking_reference,
    chosen_reference,
    evidence_reference,
    rotate_reference,
)
from tests.oracle.recall import may_round_either_way
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.kernels.triton.cached import CachedLayer

JUNK = 0x7FC07FC0
"""NaN as fp32, and as bf16; a large number as int32."""

MANY = 2**31 - 1
"""Units that were brought back before: a sum of 32 bits would be negative after the next one."""


@dataclass
class Rings:
    """One layer's store for the requests of a case, each with a ring of ``capacity`` places."""

    case: Case
    capacity: int

    def __post_init__(self) -> None:
        case = self.case
        places = len(case.lengths) * self.capacity
        keys = case.num_heads, places, case.unit
        junk = -1 if case.stored_dtype == torch.int8 else 255
        fill = torch.nan if case.quantiser is None else junk
        self.rows = torch.full((*keys, case.row_size), fill, dtype=case.stored_dtype)
        self.row_scales = torch.full((*keys, case.row_scales), torch.nan)
        self.codes = torch.full((*keys, case.head_size), -128, dtype=torch.int8)
        self.scales = torch.full(keys, torch.nan)
        self.born = torch.full((case.num_sets, places), JUNK, dtype=torch.int32)
        self.token = torch.full((case.num_sets, places), JUNK, dtype=torch.int32)

    def place(self, row: int, number: int) -> int:
        return row * self.capacity + number % self.capacity

    def heads(self, head_set: int) -> slice:
        return slice(head_set, head_set + 1) if self.case.per_head else slice(None)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.row_scales, self.codes, self.scales, self.born, self.token

    def on(self, device: torch.device | str) -> list[torch.Tensor]:
        """``tensors`` as an engine has them: rows and their scales in the host's memory."""
        host, others = self.tensors[:2], self.tensors[2:]
        if torch.device(device).type == "cuda":
            host = tuple(tensor.pin_memory() for tensor in host)
        return [*host, *(tensor.to(device) for tensor in others)]

    @property
    def decoded(self) -> torch.Tensor:
        """``rows`` as they are read."""
        return self.case.decode(self.rows, self.row_scales)


def _columns(case: Case, **values: list[int]) -> torch.Tensor:
    """Rows of recall; those of rows that only pad are absurd, but nothing is to be done."""
    recall = torch.full((len(case.lengths), columns.RECALL_COLUMNS), 50, dtype=torch.int32)
    recall[:, columns.HOW] = recall[:, columns.STORED] = 0
    for row in real_rows(case):
        recall[row] = 0
        for name, numbers in values.items():
            recall[row, getattr(columns, name)] = numbers[row]
    return recall


def _turning(case: Case, device: torch.device | str) -> torch.Tensor | None:
    """Rotations by positions, which are larger than distances."""
    return None if case.inv_freq is None else rotation_table(case.inv_freq, 2000, device)


def _numbers(case: Case, low: int, high: int) -> list[int]:
    rng = random.Random(case.seed + 7)
    return [rng.randint(low, high) for _ in case.lengths]


def _some(rng: random.Random, among: int, number: int) -> list[int]:
    """So many different numbers below another, in order."""
    numbers = list(range(among))
    rng.shuffle(numbers)
    return sorted(numbers[:number])


def _sure_queries(
    case: Case, query: torch.Tensor, tokens: torch.Tensor, middle: int, generator: torch.Generator
) -> torch.Tensor:
    """Tokens' queries, rotated back by ``middle``; redrawn where rounding decides."""
    position = torch.full((len(tokens), query.shape[1]), middle)
    while True:
        plain = rotate_reference(query[tokens], position, case.inv_freq, case.interleaved)
        token, head = may_round_either_way(plain).nonzero(as_tuple=True)
        if not len(token):
            return plain
        fresh = torch.randn(len(token), query.shape[2], generator=generator)
        query[tokens[token], head] = fresh.to(query.dtype)


def _to_sinks(
    case: Case, cache: Cache, row: int, num_keys: int, queries: torch.Tensor
) -> torch.Tensor:
    """Products in fp64 of queries ``[asking, H * G, D]`` with a request's first keys."""
    keys = cache.decoded[cache.table[row].long(), ..., : case.head_size].double()
    keys = keys.transpose(0, 1).flatten(1, 2)[:, :num_keys].repeat_interleave(case.group, 0)
    return torch.einsum("qhd,hnd->qhn", queries.double(), keys)


def check_judge(
    case: Case, device: torch.device | str, capacity: int = 40, most_asking: int = 1
) -> float:
    """``judge_units`` of single tokens (one asks), or of strides; every third row does not choose.

    Rings are wrapped, some full, some of one unit. Sinks and recalled units differ by row, so that
    keys stand elsewhere in each.
    """
    cache, steps = make_cache(case)
    rings, size = Rings(case, capacity), case.head_size
    num_tokens = stride_steps(case, steps)
    if most_asking == 1:
        steps[:, columns.LENGTH] = 1
    stored, begin = _numbers(case, 1, capacity), _numbers(case, 0, 3 * capacity)
    stored[0] = capacity
    sinks = [(row + 1) % 3 for row in range(len(stored))]
    shown = [3 + row for row in range(len(stored))]
    recall = _columns(
        case,
        SINKS=sinks,
        NOW=shown,
        HOW=[columns.JUDGED if row % 3 != 1 else 0 for row in range(len(case.lengths))],
        RING=[row * capacity for row in range(len(case.lengths))],
        BEGIN=begin,
        END=[a + b for a, b in zip(begin, stored, strict=True)],
    )
    generator = torch.Generator().manual_seed(case.seed + 5)
    coarse = {}
    for row in real_rows(case):
        for slot in range(sinks[row] * case.unit):  # where a request's first tokens are
            first = torch.randn(case.num_heads, case.row_size, generator=generator) * 2
            for head_set in range(case.num_sets):
                cache.put(row, head_set, slot, kv=first.to(case.dtype))
        keys = torch.randn(case.num_heads, stored[row], case.unit, size, generator=generator)
        keys[:, :: max(stored[row] // 2, 1)] = 0.0  # equal units, also of nothing
        scales = keys.abs().amax(-1) / 127
        codes = (keys / scales.clamp_min(1e-30)[..., None]).round()
        coarse[row] = codes.double() * scales[..., None].double()
        places = [rings.place(row, begin[row] + u) for u in range(stored[row])]
        rings.codes[:, places], rings.scales[:, places] = codes.to(torch.int8), scales
    query = new_tokens(case, num_tokens)[0]
    scale, rotation = size**-0.5, _turning(case, device)
    plain = {}
    for row in real_rows(case):
        if recall[row, columns.HOW] != columns.JUDGED:
            continue
        start, length = (int(steps[row, column]) for column in (columns.START, columns.LENGTH))
        asking = start + torch.tensor(asking_reference(length, most_asking))
        middle = (["sink"] * sinks[row] + ["shown"] * (shown[row] // 2)) * case.unit
        plain[row] = _sure_queries(case, query, asking, len(middle), generator)
    dquery, codes, scales, dsteps, drecall = on(
        device, query, rings.codes, rings.scales, steps, recall
    )
    ours = cache.to(device)
    found = judge_units(
        query=dquery,
        steps=dsteps,
        table=ours.table,
        recall=drecall,
        codes=codes,
        scales=scales,
        layer=CachedLayer(
            **ours.views("kv", "rank", "born"),
            rotation=rotation,
            interleaved=case.interleaved,
            scale=scale,
            latent=case.latent,
            stored=ours.codes,
            dtype=case.dtype,
        ),
        capacity=capacity,
        most_asking=most_asking,
    )
    worst = 0.0
    for row in plain:
        start, length = (int(steps[row, column]) for column in (columns.START, columns.LENGTH))
        asking = start + torch.tensor(asking_reference(length, most_asking))
        others = _to_sinks(case, cache, row, sinks[row] * case.unit, query[asking]) * scale
        expected = evidence_reference(plain[row] * scale, coarse[row], others, case.num_sets)
        mine = found[row, :, : stored[row]].cpu().double()
        worst = max(worst, close("evidence", mine / expected, torch.ones_like(expected), 1e-3))
        worst = max(worst, close("evidence", mine, expected, 2e-5))
        for head_set in range(case.num_sets):
            equal = {}
            for unit, value in enumerate(mine[head_set].tolist()):
                equal.setdefault(coarse[row][rings.heads(head_set), unit].sum().item(), []).append(
                    value
                )
            assert len(set(equal.get(0.0, []))) <= 1, "equal units differ"
    return worst


def check_recall(
    case: Case,
    device: torch.device | str,
    capacity: int = 24,
    most: int = 5,
    sinks: int = 1,
    only: int | None = None,
) -> float:
    """``recall_units``: the pages as a whole, from lists; evidence has many ties.

    Args:
        only: the one unit of full rings that has evidence; the text goes on behind it.
    """
    cache, steps = make_cache(case)
    rings, rng = Rings(case, capacity), random.Random(case.seed + 11)
    generator = torch.Generator().manual_seed(case.seed + 6)
    num_rows = len(case.lengths)
    before, now, number, begin, how = ([0] * num_rows for _ in range(5))
    for row in real_rows(case):
        held = -(-case.lengths[row] // case.unit)
        before[row] = rng.randint(0, max(min(most, held - sinks), 0))
        free = cache.slots[row] // case.unit - held
        now[row] = rng.randint(before[row], min(before[row] + free, most))
        number[row] = rng.randint(max(now[row], before[row]), capacity)
        number[row] = capacity if only is not None else number[row]
        begin[row] = rng.randint(0, 3 * capacity)
        how[row] = columns.TAKES_ALL if now[row] == number[row] else columns.JUDGED
        how[row] *= now[row] > 0 and row % 4 != 3
    recall = _columns(
        case,
        HOW=how,
        RING=[row * capacity for row in range(num_rows)],
        BEFORE=before,
        NOW=now,
        BEGIN=begin,
        END=[a + b for a, b in zip(begin, number, strict=True)],
        SINKS=[sinks] * num_rows,
    )
    evidence = torch.full((num_rows, case.num_sets, capacity), torch.nan)
    for row in real_rows(case):
        places = [rings.place(row, begin[row] + u) for u in range(number[row])]
        rows = torch.randn(
            case.num_heads, number[row], case.unit, case.row_size, generator=generator
        ).to(case.dtype)
        rings.rows[:, places], rings.row_scales[:, places] = case.encode(rows)
        for head_set in range(case.num_sets):
            _, _, tokens = chronological(cache, row, steps[row].tolist())
            shown = tokens[head_set, sinks : sinks + before[row]].tolist()
            others = [t for t in range(10**6, 10**6 + 2 * capacity) if t not in shown]
            others += [t for t in range(400) if t not in tokens[head_set].tolist()]
            rng.shuffle(others)
            mine = shown + others[: number[row] - len(shown)]
            rng.shuffle(mine)
            cached = tokens[head_set].tolist()
            for nth in range(1, len(mine)):  # the text goes on in some units
                follows = mine[nth - 1] + case.unit
                goes_on = rng.random() < 0.5 or nth - 1 in (only, (only or 0) + 1)
                if goes_on and mine[nth] not in shown and follows not in mine + cached:
                    mine[nth] = follows
            rings.token[head_set, places] = torch.tensor(mine, dtype=torch.int32)
            values = torch.randint(0, 6, (number[row],), generator=generator) / 8
            values /= 8 ** torch.randint(0, 2, (number[row],), generator=generator)
            if only is not None:
                values = torch.arange(capacity).eq(only).float()
            evidence[row, head_set, : number[row]] = values
            rings.born[head_set, places] = torch.randint(
                0, 200, (number[row],), generator=generator
            ).int()
    ours, exchanged = cache.to(device), torch.full((1,), MANY, device=device)
    rows, row_scales, _, _, born, token = rings.on(device)
    devidence, dsteps, drecall = on(device, evidence.clone(), steps, recall)
    chosen = recall_units(
        evidence=devidence,
        rows=rows,
        stored_born=born,
        stored_token=token,
        layer=CachedLayer(**ours.views(), latent=case.latent, stored=ours.codes),
        table=ours.table,
        steps=dsteps,
        recall=drecall,
        exchanged=exchanged,
        most=most,
        row_scales=row_scales if case.row_scales else None,
    ).cpu()
    came = 0
    for row in real_rows(case):
        for head_set in range(case.num_sets) if how[row] else ():
            values = evidence[row, head_set, : number[row]].tolist()
            places = [rings.place(row, begin[row] + u) for u in range(number[row])]
            first = rings.token[head_set, places].tolist()
            best = chosen_reference(values, first, case.unit, now[row])
            units = [begin[row] + u for u in best]
            units.sort(key=lambda n, row=row, s=head_set: int(rings.token[s, rings.place(row, n)]))
            assert chosen[row, head_set, : now[row]].tolist() == units, (row, head_set)
            came += _place(cache, rings, row, head_set, steps, units, before[row], sinks)
    same("pool", ours.pool, cache.pool)
    assert int(exchanged) == MANY + came
    return 0.0


def _place(
    cache: Cache,
    rings: Rings,
    row: int,
    head_set: int,
    steps: torch.Tensor,
    units: list[int],
    before: int,
    sinks: int,
) -> int:
    """Do to the reference pool what bringing units back must do; returns how many came."""
    unit = cache.case.unit
    places = int(steps[row, columns.OLD_SLOTS]) // unit
    ranks = cache.words("rank", row)[head_set, :places].tolist()
    tokens = cache.words("token", row)[head_set, :places].tolist()
    of = {int(rings.token[head_set, rings.place(row, n)]): j for j, n in enumerate(units)}
    stays = set()
    for place, rank in enumerate(ranks):
        if sinks <= rank < sinks + before:
            j = of.get(tokens[place], -1)
            stays.add(j)
            ranks[place] = sinks + j if j >= 0 else -1
        elif rank >= sinks + before:
            ranks[place] = rank + len(units) - before
    coming = [j for j in range(len(units)) if j not in stays]
    free = [place for place, rank in enumerate(ranks) if rank < 0]
    for place, rank in enumerate(ranks):
        cache.put(row, head_set, place * unit, rank=rank)
    for j, place in zip(coming, free, strict=False):
        source = rings.place(row, units[j])
        words = {"born": rings.born[head_set, source], "token": rings.token[head_set, source]}
        cache.put(row, head_set, place * unit, rank=sinks + j, score=0.0, **words)
        for i in range(unit):
            stored = {"kv": rings.rows[:, source, i], "scale": rings.row_scales[:, source, i]}
            cache.put(row, head_set, place * unit + i, **stored)
    assert len(free) >= len(coming), "the case has no room"
    return len(coming)


def check_store_tokens(case: Case, device: torch.device | str, capacity: int = 3) -> float:
    """``ranks_before`` and ``store_units`` around an eviction by single tokens.

    Lengths are one less than whole units, or nothing is evicted; also the unit that is completed
    may leave.
    """
    cache, steps = make_cache(case)
    rings, rng = Rings(case, capacity), random.Random(case.seed + 13)
    stored, end = [0] * len(case.lengths), _numbers(case, 0, 3 * capacity)
    for row in real_rows(case):
        held = -(-case.lengths[row] // case.unit)
        if (case.lengths[row] + 1) % case.unit == 0 and row % 4 != 3:
            stored[row] = rng.randint(1, min(held, capacity + 2))
            steps[row, columns.LENGTH] = 1
    recall = _columns(
        case, RING=[row * capacity for row in range(len(end))], END=end, STORED=stored
    )
    unused = Rings(case, capacity).on(device)
    ranks = ranks_before(**_store_of(cache.to(device), capacity, unused, device, steps, recall))
    new = torch.randn(len(case.lengths), case.num_heads, case.row_size).to(case.dtype)
    gone: dict[tuple[int, int], list[int]] = {}
    for row in real_rows(case):
        order = chronological(cache, row, steps[row].tolist())[0]
        for head_set in range(case.num_sets) if stored[row] else ():
            line = order[head_set].tolist()
            last = line[-1] * case.unit + case.unit - 1
            cache.put(row, head_set, last, kv=new[row])  # what completed the last unit
            which = _some(rng, len(line), stored[row])
            gone[row, head_set] = [line[r] for r in which]
            kept = [place for r, place in enumerate(line) if r not in which]
            for place in line:
                cache.put(row, head_set, place * case.unit, rank=-1)
            for rank, place in enumerate(kept):
                cache.put(row, head_set, place * case.unit, rank=rank)
    ours, theirs = cache.to(device), Rings(case, capacity)
    tensors = _store(ours, theirs, device, steps, recall, ranks=ranks)
    same("pool", ours.pool, cache.pool)
    for (row, head_set), places in gone.items():
        for i, place in enumerate(places):
            _note(cache, rings, row, head_set, end[row] + i, place)
    return _same_rings(rings, tensors)


def _store(
    cache: Cache,
    rings: Rings,
    device: torch.device | str,
    steps: torch.Tensor,
    recall: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    ranks: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Launch ``store_units``; returns the tensors of ``rings`` on the device."""
    tensors = rings.on(device)
    store = _store_of(cache, rings.capacity, tensors, device, steps, recall)
    store_units(keep=keep, ranks=ranks, key=key, value=value, **store)
    return tensors


def _store_of(
    cache: Cache,
    capacity: int,
    rings: list[torch.Tensor],
    device: torch.device | str,
    steps: torch.Tensor,
    recall: torch.Tensor,
) -> dict[str, Any]:
    """Arguments of ``ranks_before`` and ``store_units``; ``cache`` and ``rings`` on the device."""
    rows, row_scales, codes, scales, born, token = rings
    dsteps, drecall = on(device, steps, recall)
    layer = CachedLayer(
        **cache.views(),
        rotation=_turning(cache.case, device),
        interleaved=cache.case.interleaved,
        latent=cache.case.latent,
        stored=cache.codes,
    )
    return {
        "table": cache.table,
        "steps": dsteps,
        "recall": drecall,
        "layer": layer,
        "rows": rows,
        "codes": codes,
        "scales": scales,
        "stored_born": born,
        "stored_token": token,
        "capacity": capacity,
        "row_scales": row_scales if cache.case.row_scales else None,
    }


def _note(cache: Cache, rings: Rings, row: int, head_set: int, number: int, place: int) -> None:
    """A unit of the pages into the reference's ring."""
    unit, page = cache.case.unit, cache.case.block_size
    at, heads = rings.place(row, number), rings.heads(head_set)
    block, offset = cache.table[row, place * unit // page], place * unit % page
    rings.rows[heads, at] = cache.kv[block, heads, offset : offset + unit]
    rings.row_scales[heads, at] = cache.scale[block, heads, offset : offset + unit]
    rings.born[head_set, at] = cache.words("born", row)[head_set, place]
    rings.token[head_set, at] = cache.words("token", row)[head_set, place]


def check_store_strides(case: Case, device: torch.device | str, capacity: int = 3) -> float:
    """``store_units`` before strides are inserted, with random masks of what stays."""
    cache, steps = make_cache(case)
    num_tokens = stride_steps(case, steps)
    rings, rng = Rings(case, capacity), random.Random(case.seed + 17)
    _, key, value = new_tokens(case, num_tokens)
    width = max(n or 0 for n in case.lengths) // case.unit + -(-max(case.strides) // case.unit)
    keep = torch.rand(len(case.lengths), case.num_sets, width) < 0.5  # what is behind is junk
    stored, end = [0] * len(case.lengths), _numbers(case, 0, 3 * capacity)
    gone: dict[tuple[int, int], list[int]] = {}
    for row in real_rows(case):
        cached, length = (int(steps[row, c]) for c in (columns.CACHED, columns.LENGTH))
        whole = (cached + length) // case.unit
        stored[row] = rng.randint(0 if row else whole, whole) * (row % 4 != 3)
        for head_set in range(case.num_sets):
            gone[row, head_set] = _some(rng, whole, stored[row])
            keep[row, head_set, :whole] = True
            keep[row, head_set, gone[row, head_set]] = False
    recall = _columns(
        case, RING=[row * capacity for row in range(len(end))], END=end, STORED=stored
    )
    ours, theirs = cache.to(device), Rings(case, capacity)
    dkeep, dkey, dvalue = on(device, torch.where(keep, 0, -1).int(), key, value)
    tensors = _store(ours, theirs, device, steps, recall, keep=dkeep, key=dkey, value=dvalue)
    same("pool", ours.pool, cache.pool)
    for (row, head_set), units in gone.items():
        step = steps[row].tolist()
        line = chronological(cache, row, step)[0][head_set].tolist()
        for i, u in enumerate(units):
            if u < len(line):
                _note(cache, rings, row, head_set, end[row] + i, line[u])
                continue
            first = (u - len(line)) * case.unit
            own = slice(step[columns.START] + first, step[columns.START] + first + case.unit)
            at, heads = rings.place(row, end[row] + i), rings.heads(head_set)
            rows = rows_of(case, key[own], value[own]).transpose(0, 1)
            rings.rows[heads, at], rings.row_scales[heads, at] = case.encode(rows[heads])
            rings.born[head_set, at] = step[columns.CACHED] + first
            rings.token[head_set, at] = step[columns.STREAM] + first
    return _same_rings(rings, tensors)


def _same_rings(rings: Rings, tensors: list[torch.Tensor]) -> float:
    """Rows and words to the byte; codes within half a step of the keys before rotation."""
    case, size = rings.case, rings.case.head_size
    rows, row_scales, codes, scales, born, token = (tensor.cpu() for tensor in tensors)
    same("rows", rows.view(torch.uint8), rings.rows.view(torch.uint8))
    same("their scales", row_scales.view(torch.int32), rings.row_scales.view(torch.int32))
    same("born", born, rings.born)
    same("token", token, rings.token)
    written = rings.born != JUNK
    written = written if case.per_head else written.expand(case.num_heads, -1)
    births = rings.born if case.per_head else rings.born.expand(case.num_heads, -1)
    assert (codes[~written] == -128).all() and scales[~written].isnan().all(), "wrote elsewhere"
    position = births[written][:, None] + torch.arange(case.unit)
    plain = rotate_reference(
        rings.decoded[..., :size][written], position, case.inv_freq, case.interleaved
    )
    worst = close("scales", scales[written] * 127, plain.abs().amax(-1), 3e-5)
    step = scales[written].double()[..., None]
    away = (codes[written].double() * step - plain).abs() - 0.5 * step
    assert away.numel() == 0 or away.max() < 2e-5 * (1 + plain.abs().max()), away.max()
    return worst
