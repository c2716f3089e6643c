# SPDX-License-Identifier: Apache-2.0
"""Every kernel against its fp64 reference on a random, poisoned page pool.

Used by ``tests/kernels`` (in Triton's interpreter) and by ``benchmarks.gpu_check`` (on a GPU), so
that both mean the same by "correct". A check raises ``AssertionError``, or returns its largest
error. Whatever a kernel must not read is NaN or absurd; whatever it must not write is compared
byte by byte.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

import torch

from .assign import assign, assign_reference
from .attend import attend, attend_reference
from .column_sums import column_sums, column_sums_reference, stride_scores
from .combine import merge, update, update_reference
from .configs import attend_splits
from .insert import insert, survivors_reference
from .insert_stride import insert_strides
from .prefill import attend_strides, attend_strides_reference
from .rotate import gather, gather_reference, rotate_reference, rotation_table
from .schedule import HEAD_COLUMNS, TABLE_COLUMNS, Schedule, schedule, schedule_reference
from .tiles import (
    CACHED,
    CELL,
    DECAY,
    KEEP_LATER,
    LENGTH,
    LO,
    MORE,
    NEW_SLOTS,
    NUM_MORE,
    OLD_SLOTS,
    PER_QUERY,
    START,
    STEP_COLUMNS,
    STREAM,
    WEIGHT,
    float_bits,
)

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
POISON = 0xFF
"""Byte of fresh memory: NaN as fp16, bf16 and fp32, -1 as int32 (also a rank that means empty)."""


@dataclass(frozen=True)
class Case:
    """A layer's shape, a batch's cache lengths (None: a row that only pads), and options.

    ``holes``: empty slots among each request's; 0: a few, at random.
    """

    lengths: tuple[int | None, ...] = (0, 1, 17, 40, None)
    num_heads: int = 2
    group: int = 2
    head_size: int = 64
    block_size: int = 16
    per_head: bool = False
    dtype: torch.dtype = torch.float32
    rotary_dim: int | None = None
    interleaved: bool = False
    alibi: bool = False
    softcap: float = 0.0
    logit_scale: bool = False
    reduction: str = "mean"
    keep_later: bool = True
    per_query: bool = False
    splits: int | None = 3
    strides: tuple[int, ...] = (1, 7, 33, 16, 5)
    holes: int = 0
    max_distance: int = 300
    seed: int = 0

    @property
    def num_sets(self) -> int:
        return self.num_heads if self.per_head else 1

    @property
    def half(self) -> int:
        return (self.head_size if self.rotary_dim is None else self.rotary_dim) // 2

    @property
    def inv_freq(self) -> torch.Tensor | None:
        if self.alibi:
            return None
        return 100.0 ** -(torch.arange(self.half) / self.half)

    @property
    def slopes(self) -> torch.Tensor | None:
        count = self.num_heads * self.group
        return 2.0 ** -(torch.arange(count) % 8 + 1.0) if self.alibi else None


@dataclass
class Cache:
    """A page pool with its views, and the block tables of a batch, all on one device."""

    case: Case
    pool: torch.Tensor
    table: torch.Tensor
    slots: list[int]

    def __post_init__(self) -> None:
        case, words = self.case, 4
        page, heads, size = case.block_size, case.num_heads, case.head_size
        kv_bytes = heads * page * 2 * size * case.dtype.itemsize
        flat = self.pool.view(case.dtype)
        self.kv = (
            flat[:, : kv_bytes // case.dtype.itemsize]
            .view(flat.dtype)
            .as_strided(
                (len(flat), heads, page, 2 * size), (flat.stride(0), page * 2 * size, 2 * size, 1)
            )
        )
        tail = self.pool.view(torch.int32)
        first = kv_bytes // 4
        views = tail.as_strided(
            (len(tail), words, case.num_sets, page),
            (tail.stride(0), case.num_sets * page, page, 1),
            first,
        ).unbind(1)
        self.rank, self.born, score, self.token = views
        self.score = score.view(torch.float32)

    def to(self, device: torch.device | str) -> "Cache":
        """A copy, also on the same device."""
        pool = self.pool.to(device, copy=True)
        return Cache(self.case, pool, self.table.to(device), self.slots)

    def words(self, which: str, row: int) -> torch.Tensor:
        """A copy of one word of a request, ``[S, N]`` by slot."""
        blocks = self.table[row].long()
        return getattr(self, which)[blocks].transpose(0, 1).flatten(1)

    def put_all(self, which: str, row: int, values: torch.Tensor) -> None:
        """Write one word of a request, ``[S, N]`` by slot."""
        blocks = self.table[row].long()
        paged = values.unflatten(1, (-1, self.case.block_size)).transpose(0, 1)
        getattr(self, which)[blocks] = paged.to(getattr(self, which).dtype)

    def put(self, which: str, row: int, head_set: int, slot: int, value: float) -> None:
        block = int(self.table[row, slot // self.case.block_size])
        getattr(self, which)[block, head_set, slot % self.case.block_size] = value


def make_cache(case: Case) -> tuple[Cache, torch.Tensor]:
    """``_make_cache``, made once for the checks of one case."""
    cache, steps = _make_cache(case)
    return cache.to("cpu"), steps.clone()


@lru_cache(maxsize=1)
def _make_cache(case: Case) -> tuple[Cache, torch.Tensor]:
    """A pool on the CPU and the step rows of a batch (columns for both kinds filled by callers).

    Slots in use are a random subset in random order; the others, and slots that never held a
    token, hold NaN keys and values. Block 0 is the null block.
    """
    rng = random.Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    room = max(case.strides)
    per_row = max(n or 0 for n in case.lengths) + case.holes + 2 * room + 2 * case.block_size
    pages = -(-per_row // case.block_size)
    num_blocks = 1 + pages * len(case.lengths)
    kv_bytes = case.num_heads * case.block_size * 2 * case.head_size * case.dtype.itemsize
    page_bytes = kv_bytes + 4 * 4 * case.num_sets * case.block_size
    pool = torch.full((num_blocks, page_bytes), POISON, dtype=torch.uint8)
    order = torch.randperm(num_blocks - 1, generator=generator).int() + 1
    table = order.view(len(case.lengths), pages)
    slots = [
        0 if n is None else n + (case.holes or rng.choice([0, 0, 1, 5])) * (n > 0)
        for n in case.lengths
    ]
    cache = Cache(case, pool, table, slots)
    cache.rank[0] = 3  # the null block may hold anything, also what looks like tokens
    steps = torch.zeros(len(case.lengths), STEP_COLUMNS, dtype=torch.int32)
    for row, length in enumerate(case.lengths):
        if length is None:
            steps[row] = 50  # warm-up brings numbers without pages
            steps[row, STREAM.value] = -1
            cache.table[row] = 0  # vLLM pads block tables with the null block
            continue
        stream = length + (rng.randrange(1, 200) if length else 0)
        _fill(cache, row, length, stream, generator)
        steps[row, STREAM.value] = stream
        steps[row, CACHED.value] = length
        steps[row, OLD_SLOTS.value] = slots[row]
        steps[row, NEW_SLOTS.value] = slots[row]
    # Beyond a request's slots ranks look valid, as stale memory may.
    every = torch.arange(pages * case.block_size, dtype=torch.int32)
    for row, length in enumerate(case.lengths):
        if length is not None:
            ranks = cache.words("rank", row)
            ranks[:, slots[row] :] = every[slots[row] :] % 3
            cache.put_all("rank", row, ranks)
    return cache, steps


def _fill(cache: Cache, row: int, length: int, stream: int, generator: torch.Generator) -> None:
    case, blocks = cache.case, cache.table[row].long()
    page = case.block_size
    for head_set in range(case.num_sets):
        heads = [head_set] if case.per_head else range(case.num_heads)
        slots = torch.randperm(cache.slots[row], generator=generator)[:length]
        block, offset = blocks[slots // page], slots % page
        rank = torch.arange(length, dtype=torch.int32)
        moved = torch.randint(0, case.max_distance, (length,), generator=generator)
        cache.rank[blocks[: -(-cache.slots[row] // page)], head_set] = -1
        cache.rank[block, head_set, offset] = rank
        cache.born[block, head_set, offset] = rank + moved.int()
        score = torch.rand(length, generator=generator)
        cache.score[block, head_set, offset] = (
            score * 8
        ).round() / 8 - 0.5  # many ties, also below 0
        tokens = torch.randperm(max(stream, 1), generator=generator)[:length].sort().values
        cache.token[block, head_set, offset] = tokens.int()
        for head in heads:
            row_kv = torch.randn(length, 2 * case.head_size, generator=generator)
            cache.kv[block, head, offset] = row_kv.to(case.dtype)


def _tokens(case: Case, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of new tokens."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = num_tokens, case.num_heads, case.head_size
    query = torch.randn(
        num_tokens, case.num_heads * case.group, case.head_size, generator=generator
    )
    key, value = torch.randn(2, *shape, generator=generator)
    return query.to(case.dtype), key.to(case.dtype), value.to(case.dtype)


def _table_of(case: Case, device: torch.device | str) -> torch.Tensor | None:
    return (
        None
        if case.inv_freq is None
        else rotation_table(case.inv_freq, case.max_distance + 1, device)
    )


def _on(device: torch.device | str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def _close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Largest error relative to ``1 + |expected|``; NaN and anything too large raise."""
    actual = actual.detach().cpu().double()
    error = (
        ((actual - expected.double()).abs() / (1 + expected.double().abs())).max().item()
        if actual.numel()
        else 0.0
    )
    assert error <= tolerance, f"{name}: error {error:.2e} > {tolerance:.0e}"
    return error


def _same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    actual = actual.cpu()
    assert torch.equal(actual, expected), (
        f"{name}: {int((actual != expected).sum())} of {actual.numel()} entries differ"
    )


def _real(case: Case) -> list[int]:
    return [row for row, length in enumerate(case.lengths) if length is not None]


def check_decode(case: Case, device: torch.device | str) -> dict[str, float]:
    """``attend``, ``merge`` and ``update`` of one token a request."""
    cache, steps = make_cache(case)
    num_rows = len(case.lengths)
    averages = [(0.9 - 0.1 * (row % 3), 0.1 + 0.2 * (row % 2)) for row in range(num_rows)]
    for row in _real(case):
        bits = [float_bits(value) for value in averages[row]]
        steps[row, DECAY.value], steps[row, WEIGHT.value] = bits[0], bits[1]
    query, key, value = _tokens(case, num_rows)
    factors = torch.rand(num_rows) + 0.5 if case.logit_scale else None
    scale = case.head_size**-0.5
    ours = cache.to(device)
    dsteps, dq, dk, dv, slopes, dfactors = _on(
        device, steps, query, key, value, case.slopes, factors
    )
    splits = case.splits
    if splits is None:
        slots = ours.table.shape[1] * case.block_size
        splits = attend_splits(ours.pool.device, num_rows, case.num_heads, slots)
    splits = 1 << (splits - 1).bit_length()
    before = ours.pool.clone()
    parts, parts_lse, logits, own = attend(
        *(dq, dk, dv, ours.kv, ours.rank, ours.born, ours.table, dsteps),
        *(_table_of(case, device), slopes, dfactors, scale, case.softcap, case.interleaved),
        *(splits, True),
    )
    output = torch.full_like(dq, torch.nan)
    lse = merge(parts, parts_lse, dsteps, output)
    _same("attend writes no page", ours.pool, before.cpu())
    new_score = update(
        *(logits, own, lse, ours.rank, ours.score, ours.table, dsteps, case.reduction)
    )
    tolerance = TOLERANCE[case.dtype]
    errors = {"output": 0.0, "lse": 0.0, "score": 0.0}
    for row in _real(case):
        step = steps[row].tolist()
        blocks = cache.table[row]
        expected, norm, raw = attend_reference(
            *(query[row], key[row], value[row], cache.kv, cache.rank, cache.born, blocks, step),
            case.inv_freq,
            scale=scale,
            slopes=case.slopes,
            logit_scale=1.0 if factors is None else float(factors[row]),
            softcap=case.softcap,
            interleaved=case.interleaved,
        )
        errors["output"] = max(errors["output"], _close("output", output[row], expected, tolerance))
        errors["lse"] = max(errors["lse"], _close("lse", lse[row], norm, tolerance))
        _, _, old, slots = gather_reference(
            *(cache.kv, cache.rank, cache.born, cache.score, blocks, step, None, False)
        )
        scores = update_reference(raw, old, *averages[row], case.reduction)
        actual = ours.to("cpu").words("score", row).gather(1, slots)
        errors["score"] = max(
            errors["score"],
            _close("scores", actual, scores[:, :-1], tolerance),
            _close("new scores", new_score[row], scores[:, -1], tolerance),
        )
    for row in set(range(num_rows)) - set(_real(case)):
        _same("output of padding", output[row], torch.zeros_like(query[row]))
    after = ours.to("cpu")
    after.score.copy_(cache.score)
    _same("update writes scores only", after.pool, cache.pool)
    return errors


def _cells(lo: int, hi: int, size: int) -> tuple[int, int, int, int]:
    """A rule of cells, or none where the range is too short."""
    evicts = hi - lo - -(-(hi - lo) // abs(size)) if hi > lo else 0
    return (lo, hi, evicts, size) if evicts else (0, 0, 0, 0)


def _lists_of_rules(n: int) -> list[list[tuple[int, int, int, int]]]:
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


def _rules(case: Case, steps: torch.Tensor, cache: Cache, variant: int) -> torch.Tensor:
    """Give every row a list of rules; ``variant`` rotates through them. Returns further ones."""
    more = [[99, 99, 99, 99]]  # belongs to nobody
    for row in _real(case):
        n = int(steps[row, CACHED.value])
        first, *others = _lists_of_rules(n)[(row + variant) % NUM_RULES]
        steps[row, LO.value : CELL.value + 1] = torch.tensor(first)
        steps[row, MORE.value], steps[row, NUM_MORE.value] = len(more), len(others)
        more += others
        if first[2] == 0:
            steps[row, NEW_SLOTS.value] = max(cache.slots[row], n + 1)
    steps[:, PER_QUERY.value] = int(case.per_query)
    steps[:, KEEP_LATER.value] = int(case.keep_later)
    return torch.tensor(more, dtype=torch.int32)


def check_insert(case: Case, device: torch.device | str, variant: int = 0) -> float:
    """``insert``: the whole pool, byte by byte, up to which free slot a token takes."""
    cache, steps = make_cache(case)
    more = _rules(case, steps, cache, variant)
    num_rows = len(case.lengths)
    _, key, value = _tokens(case, num_rows)
    generator = torch.Generator().manual_seed(case.seed + 2)
    new_score = torch.rand(num_rows, case.num_sets, generator=generator)
    new_score = (new_score * 8).round() / 8 - 0.5
    ours = cache.to(device)
    dsteps, dk, dv, dscore, dmore = _on(device, steps, key, value, new_score, more)
    insert(
        *(dk, dv, dscore, ours.kv, ours.rank, ours.born, ours.score, ours.token),
        *(ours.table, dsteps, dmore, True),
    )
    after = ours.to("cpu")
    for row in _real(case):
        step = steps[row].tolist()
        first, last = step[MORE.value], step[MORE.value] + step[NUM_MORE.value]
        rules = [step[LO.value : CELL.value + 1], *more[first:last].tolist()]
        for head_set, kept in enumerate(_expected_ranks(case, cache, row, step, rules, new_score)):
            _apply_one(case, cache, after, row, head_set, step, kept, (key, value, new_score))
    _same("pool", after.pool, cache.pool)
    return 0.0


def check_assign(case: Case, device: torch.device | str) -> float:
    """``assign``: one score a request changes in every head set, and nothing else."""
    cache, steps = make_cache(case)
    num_rows = len(case.lengths)
    generator = torch.Generator().manual_seed(case.seed + 4)
    given = torch.rand(num_rows, generator=generator)
    # A row that only pads brings any number, here what the null block seems to hold.
    wanted = [3 if n is None else n - 1 - row % 3 for row, n in enumerate(case.lengths)]
    ranks = torch.tensor(wanted, dtype=torch.int32)
    ours = cache.to(device)
    dgiven, dranks, dsteps = _on(device, given, ranks, steps)
    assign(dgiven, dranks, ours.rank, ours.score, ours.table, dsteps)
    for row in _real(case):
        valid = cache.words("rank", row)
        valid[:, cache.slots[row] :] = -1  # stale: must not be taken for the token
        old = cache.words("score", row)
        value = assign_reference(float(given[row]), int(ranks[row]), valid, old)
        cache.put_all("score", row, value)
    _same("pool", ours.pool, cache.pool)
    return 0.0


def _chronological(cache: Cache, row: int, step: list[int]) -> tuple[torch.Tensor, ...]:
    """Slots, scores and tokens ``[S, n]``, oldest first."""
    ranks = cache.words("rank", row)[:, : step[OLD_SLOTS.value]]
    order = ranks.masked_fill(ranks < 0, 2**31 - 1).argsort(dim=1)[:, : step[CACHED.value]]
    return order, *(cache.words(w, row).gather(1, order) for w in ("score", "token"))


def _expected_ranks(
    case: Case,
    cache: Cache,
    row: int,
    step: list[int],
    rules: list[list[int]],
    new_score: torch.Tensor,
) -> list[list[int]]:
    _, scores, tokens = _chronological(cache, row, step)
    compared = torch.cat([scores, new_score[row][:, None]], dim=1)
    if case.per_query:
        now = step[STREAM.value] + 1
        age = torch.cat([now - tokens, torch.ones(len(tokens), 1)], dim=1)
        compared = compared / age.float()
    return survivors_reference(step[CACHED.value], rules, compared, case.keep_later)


def _apply_one(
    case: Case,
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    step: list[int],
    kept: list[int],
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Do to the reference pool what one insertion must do; the free slot is read from ours."""
    cached = step[CACHED.value]
    slots = _chronological(cache, row, step)[0][head_set].tolist()
    used = {slots[r] for r in kept if r < cached}
    ranks = cache.words("rank", row)
    ranks[head_set, : step[NEW_SLOTS.value]] = -1
    for index, r in enumerate(kept):
        if r < cached:
            ranks[head_set, slots[r]] = index
    cache.put_all("rank", row, ranks)
    if cached not in kept:
        return
    last = len(kept) - 1
    ranks = after.words("rank", row)[head_set, : step[NEW_SLOTS.value]]
    (found,) = (ranks == last).nonzero(as_tuple=True)
    assert len(found) == 1 and int(found) not in used, "the new token needs one free slot"
    slot = int(found)
    _put_token(case, cache, row, head_set, slot, last, cached, step[STREAM.value], new[2][row])
    _put_kv(case, cache, row, head_set, slot, new[0][row], new[1][row])


def _put_token(
    case: Case,
    cache: Cache,
    row: int,
    head_set: int,
    slot: int,
    rank: int,
    born: int,
    token: int,
    score: torch.Tensor,
) -> None:
    cache.put("rank", row, head_set, slot, rank)
    cache.put("born", row, head_set, slot, born)
    cache.put("token", row, head_set, slot, token)
    cache.put("score", row, head_set, slot, score[head_set].item())


def _put_kv(
    case: Case,
    cache: Cache,
    row: int,
    head_set: int,
    slot: int,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    block, offset = cache.table[row, slot // case.block_size], slot % case.block_size
    for head in [head_set] if case.per_head else range(case.num_heads):
        cache.kv[block, head, offset] = torch.cat([key[head], value[head]])


def _stride_steps(case: Case, steps: torch.Tensor) -> int:
    """Fill ``START`` and ``LENGTH``; tokens in the step."""
    place = 3  # the step's first tokens belong to others
    for row in _real(case):
        length = case.strides[row % len(case.strides)]
        steps[row, START.value], steps[row, LENGTH.value] = place, length
        place += length + 2
    return place


def check_prefill(case: Case, device: torch.device | str) -> dict[str, float]:
    """``gather``, ``attend_strides``, ``column_sums`` and ``stride_scores``."""
    cache, steps = make_cache(case)
    num_tokens = _stride_steps(case, steps)
    query, key, value = _tokens(case, num_tokens)
    factors = torch.rand(num_tokens) + 0.5 if case.logit_scale else None
    scale, decay, weight = case.head_size**-0.5, 0.97, 0.03
    ours = cache.to(device)
    longest = max(case.strides)
    decays = (weight * decay ** torch.arange(longest, dtype=torch.float64)).float()
    fades = (decay ** steps[:, LENGTH.value].double()).float()
    dsteps, dq, dk, dv, slopes, dfactors, ddecays, dfades = _on(
        device, steps, query, key, value, case.slopes, factors, decays, fades
    )
    max_cached = max(n or 0 for n in case.lengths)
    keys, values, scores, tokens = gather(
        *(ours.kv, ours.rank, ours.born, ours.score, ours.token, ours.table, dsteps),
        *(_table_of(case, device), case.interleaved, max_cached),
    )
    output = torch.full_like(dq, torch.nan)
    common = (slopes, dfactors)
    lse = attend_strides(
        *(dq, dk, dv, keys, values, dsteps, *common, output, scale, case.softcap, longest)
    )
    sums = column_sums(*(dq, dk, keys, lse, ddecays, dsteps, *common, scale, case.softcap, longest))
    new_scores = stride_scores(sums, scores, dfades, dsteps, case.reduction)
    _same("prefill attention writes no page", ours.pool, cache.pool)
    tolerance = TOLERANCE[case.dtype]
    errors = {"keys": 0.0, "output": 0.0, "lse": 0.0, "sums": 0.0, "scores": 0.0}
    written = torch.zeros(num_tokens, dtype=torch.bool)
    for row in _real(case):
        step = steps[row].tolist()
        n, length = step[CACHED.value], step[LENGTH.value]
        rows = slice(step[START.value], step[START.value] + length)
        written[rows] = True
        old = gather_reference(
            *(cache.kv, cache.rank, cache.born, cache.score, cache.table[row], step),
            *(case.inv_freq, case.interleaved),
        )
        expected, norm, probs = attend_strides_reference(
            *(query[rows], key[rows], value[rows], old[0], old[1]),
            scale=scale,
            slopes=case.slopes,
            logit_scale=None if factors is None else factors[rows],
            softcap=case.softcap,
        )
        mass = column_sums_reference(probs, decay, weight)
        final = mass.unflatten(0, (case.num_sets, -1))
        final = {"mean": final.mean(1), "max": final.amax(1), "median": final.median(1).values}[
            case.reduction
        ]
        final[:, :n] += decay**length * old[2]
        _same("values", values[row, :, :n].double(), old[1])
        _same("old scores", scores[row, :, :n].double(), old[2])
        _same("tokens", tokens[row, :, :n], _chronological(cache, row, step)[2])
        for name, actual, wanted in (
            ("keys", keys[row, :, :n], old[0]),
            ("output", output[rows], expected),
            ("lse", lse[rows], norm),
            ("sums", sums[row, :, : n + length], mass),
            ("scores", new_scores[row, :, : n + length], final),
        ):
            errors[name] = max(errors[name], _close(name, actual, wanted, tolerance))
    assert output[~written.to(output.device)].isnan().all(), "wrote rows of other requests"
    return errors


def check_insert_strides(case: Case, device: torch.device | str) -> float:
    """``insert_strides`` with random keep-masks: ranks, words, keys and values of survivors."""
    cache, steps = make_cache(case)
    num_tokens = _stride_steps(case, steps)
    _, key, value = _tokens(case, num_tokens)
    generator = torch.Generator().manual_seed(case.seed + 3)
    columns = max(n or 0 for n in case.lengths) + max(case.strides)
    keep = torch.zeros(len(case.lengths), case.num_sets, columns, dtype=torch.bool)
    for row in _real(case):
        total = int(steps[row, CACHED.value] + steps[row, LENGTH.value])
        survivors = int(torch.randint(1, total + 1, (1,), generator=generator))
        if row % 3 == 0:
            survivors = total  # nothing leaves
        for head_set in range(case.num_sets):
            keep[row, head_set, torch.randperm(total, generator=generator)[:survivors]] = True
        keep[row, :, total:] = True  # beyond the stride: must be ignored
        steps[row, NEW_SLOTS.value] = max(cache.slots[row], survivors)
    scores = torch.rand(keep.shape, generator=generator)
    ours = cache.to(device)
    dsteps, dk, dv, dkeep, dscores = _on(device, steps, key, value, keep, scores)
    insert_strides(
        *(dk, dv, dkeep, dscores, ours.kv, ours.rank, ours.born, ours.score, ours.token),
        *(ours.table, dsteps, max(case.strides)),
    )
    after = ours.to("cpu")
    for row in _real(case):
        step = steps[row].tolist()
        for head_set in range(case.num_sets):
            _apply_stride(case, cache, after, row, head_set, step, keep, scores, key, value)
    _same("pool", after.pool, cache.pool)
    return 0.0


def _apply_stride(
    case: Case,
    cache: Cache,
    after: Cache,
    row: int,
    head_set: int,
    step: list[int],
    keep: torch.Tensor,
    scores: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    n, length, start = step[CACHED.value], step[LENGTH.value], step[START.value]
    kept = keep[row, head_set, : n + length].nonzero()[:, 0].tolist()
    slots = _chronological(cache, row, step)[0][head_set].tolist()
    used = {slots[r] for r in kept if r < n}
    final = after.words("rank", row)[head_set, : step[NEW_SLOTS.value]]
    ranks, old_scores = cache.words("rank", row), cache.words("score", row)
    ranks[head_set, : step[NEW_SLOTS.value]] = -1
    for index, r in enumerate(kept):
        if r < n:
            ranks[head_set, slots[r]] = index
            old_scores[head_set, slots[r]] = scores[row, head_set, r]
    cache.put_all("rank", row, ranks)
    cache.put_all("score", row, old_scores)
    for index, r in enumerate(kept):
        if r < n:
            continue
        (found,) = (final == index).nonzero(as_tuple=True)
        assert len(found) == 1 and int(found) not in used, "a survivor needs one free slot"
        slot, i = int(found), r - n
        used.add(slot)
        _put_token(
            *(case, cache, row, head_set, slot, index, n + i, step[STREAM.value] + i),
            scores[row, :, r],
        )
        _put_kv(case, cache, row, head_set, slot, key[start + i], value[start + i])


def check_schedule(device: torch.device | str, seed: int = 0) -> float:
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
    lengths = [rng.choice([0, 1, 2, 39, 40, 41, 777, 10**6]) for _ in range(300)]
    policy_of = [rng.randrange(3) for _ in lengths]
    int32 = {"dtype": torch.int32, "device": device}
    tables = Schedule(torch.tensor(rows, **int32), torch.tensor(heads, **int32))
    steps = torch.full((310, STEP_COLUMNS), -99, **int32)
    positions = torch.full((310,), -99, dtype=torch.int64, device=device)
    blocks = [rng.choice([0, 7, 8, 9]) for _ in lengths]
    block_table = torch.tensor([[block, 5] for block in blocks], **int32)
    seq_lens, of = torch.tensor(lengths, **int32), torch.tensor(policy_of, **int32)
    schedule(seq_lens, block_table, tables, of, steps, positions)
    expected = schedule_reference(lengths, blocks, rows, heads, policy_of)
    _same("steps", steps[:300], torch.tensor(expected, dtype=torch.int32))
    _same("positions", positions[:300], torch.tensor([row[1] for row in expected]))
    assert (steps[300:] == -99).all() and (positions[300:] == -99).all(), "wrote past the batch"
    return 0.0


def check_rotation_table(device: torch.device | str) -> float:
    """The table turns an fp32 vector as fp64 trigonometry does, up to large distances."""
    case = Case()
    table = rotation_table(case.inv_freq, 40000, device).cpu()
    distance = torch.tensor([0, 1, 977, 40000])
    x = torch.randn(4, case.head_size, generator=torch.Generator().manual_seed(0))
    cos, sin = table[distance].unbind(1)
    first, second = x[:, : case.half], x[:, case.half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)
    return _close("table", turned, rotate_reference(x, distance, case.inv_freq, False), 1e-6)
