# SPDX-License-Identifier: Apache-2.0
"""A random, poisoned page pool and new tokens for it: what every check of a kernel starts from.

Whatever a kernel must not read is NaN or absurd; whatever it must not write is compared byte by
byte.
"""

import random
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tests.oracle.quantised import INT8, Quantiser
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.kernels.triton.stored import Codes

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
POISON = 0xFF
"""Byte of fresh memory: NaN as fp16, bf16 and fp32, -1 as int32 (also a rank that means empty)."""
SCALES = (0.011, 0.006)
"""A layer's scales of 8-bit keys and values; some random numbers are too large for them."""


@dataclass(frozen=True)
class Case:
    """A layer's shape, a batch's cache lengths (None: a row that only pads), and options.

    ``holes``: empty units of slots among each request's; 0: a few, at random. ``scored``: whether
    attention makes the scores of strides, or the host. ``window``: tokens that a query sees; other
    layers say positions then (``shifts``). ``chunked``: a query sees its own chunk of as many.
    ``latent``: channels of a latent row's value.
    ``cache_dtype``: of rows in pages, as vLLM calls it.
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
    newest_stays: bool = True
    per_age: bool = False
    splits: int | None = 3
    strides: tuple[int, ...] = (1, 7, 33, 16, 5)
    holes: int = 0
    max_distance: int = 300
    seed: int = 0
    unit: int = 1
    scored: bool = True
    sinks: bool = False
    window: int | None = None
    chunked: bool = False
    latent: int | None = None
    cache_dtype: str = "auto"

    @property
    def quantiser(self) -> Quantiser | None:
        """Of rows in 8 bits."""
        return Quantiser.of(self.cache_dtype, SCALES)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of rows in pages."""
        if self.quantiser is None:
            return self.dtype
        return torch.int8 if self.quantiser.grid is INT8 else torch.uint8

    @property
    def row_scales(self) -> int:
        """Scales of a row in pages: two, or none."""
        return 2 * self.cache_dtype.endswith("per_token_head")

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of rows ``[..., row_size]``, and scales ``[..., 2]``; rows as they are, and none.

        Products and quotients are those of ``cache/quantised.py``, or some codes would differ.
        """
        quantiser = self.quantiser
        if quantiser is None:
            return rows.to(self.dtype), torch.empty(*rows.shape[:-1], 0)
        codes, scales = [], []
        for part, numbers in enumerate(rows.float().split(self.parts, -1)):
            scale = quantiser.scale(numbers, part)
            most = quantiser.grid[-1]
            steps = (numbers * (1 / scale)).clamp(-most, most)
            code = torch.searchsorted(quantiser.grid, quantiser.nearest(steps).abs())
            if quantiser.grid is INT8:
                code = torch.where(steps < 0, -code, code)
            else:
                code = code + 128 * steps.signbit()
            codes.append(code.to(self.stored_dtype))
            scales.append(scale.expand(*rows.shape[:-1], 1))
        return torch.cat(codes, -1), torch.cat(scales, -1)[..., : self.row_scales]

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """fp32 rows; ``scales``: ``[..., 2]`` of rows that have their own."""
        quantiser = self.quantiser
        if quantiser is None:
            return codes
        if quantiser.scales is not None:
            scales = torch.tensor(quantiser.scales).expand(*codes.shape[:-1], 2)
        if quantiser.grid is not INT8:  # junk may be no number
            nan = torch.full((128 - len(quantiser.grid),), torch.nan)
            quantiser = replace(quantiser, grid=torch.cat([quantiser.grid, nan]))
        parts = zip(codes.split(self.parts, -1), scales.unbind(-1), strict=True)
        read = [quantiser.numbers(code.contiguous()) * scale[..., None] for code, scale in parts]
        return torch.cat(read, -1)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """What new rows are read as once they are in pages."""
        return self.decode(*self.encode(rows))

    @property
    def parts(self) -> list[int]:
        """Channels of a row before its value, and of its value."""
        return [self.row_size - self.value_size, self.value_size]

    @property
    def row_size(self) -> int:
        """Channels of a stored row: a key and a value, or a latent row."""
        return 2 * self.head_size if self.latent is None else self.head_size

    @property
    def value_size(self) -> int:
        return self.latent or self.head_size

    @property
    def num_sets(self) -> int:
        return self.num_heads if self.per_head else 1

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a page; four words a unit of slots and head set follow."""
        return self.num_heads * self.block_size * self.row_size * self.stored_dtype.itemsize

    @property
    def units(self) -> int:
        """Units of a page."""
        return self.block_size // self.unit

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

    @property
    def sink_logits(self) -> torch.Tensor | None:
        """Learned logits of nothing, some far above others."""
        count = self.num_heads * self.group
        return torch.linspace(-3.0, 6.0, count) if self.sinks else None

    @property
    def shifts(self) -> list[int]:
        """By how much each row's positions are beyond ranks, also below them."""
        rng = random.Random(self.seed + 7)
        return [rng.randrange(-9, 60) if self.window else 0 for _ in self.lengths]


@dataclass
class Cache:
    """A page pool with its views, and the block tables of a batch, all on one device."""

    case: Case
    pool: torch.Tensor
    table: torch.Tensor
    slots: list[int]

    def __post_init__(self) -> None:
        case, page = self.case, self.case.block_size
        rows = self.pool[:, : case.kv_bytes].view(case.stored_dtype)
        self.kv = rows.unflatten(1, (case.num_heads, page, case.row_size))
        tail = self.pool[:, case.kv_bytes :].view(torch.int32)
        words, scales = tail.tensor_split([4 * case.num_sets * case.units], dim=1)
        views = words.unflatten(1, (4, case.num_sets, case.units)).unbind(1)
        of_rows = scales.view(torch.float32).unflatten(1, (case.num_heads, case.row_scales, page))
        self.scale = of_rows.transpose(2, 3)
        self.rank, self.born, score, self.token = views
        self.score = score.view(torch.float32)

    def to(self, device: torch.device | str) -> "Cache":
        """A copy, also on the same device."""
        pool = self.pool.to(device, copy=True)
        return Cache(self.case, pool, self.table.to(device), self.slots)

    @property
    def codes(self) -> Codes | None:
        """How kernels find codes and scales."""
        quantiser = self.case.quantiser
        if quantiser is None:
            return None
        scales, kinds = self.scale, {127: torch.int8, 448: torch.float8_e4m3fn}
        if quantiser.scales is not None:
            scales = torch.tensor(quantiser.scales, device=self.pool.device)
        return Codes(kinds.get(int(quantiser.grid[-1]), torch.float8_e5m2), scales)

    @property
    def decoded(self) -> torch.Tensor:
        """``kv`` as it is read."""
        return self.case.decode(self.kv, self.scale)

    def views(self, *names: str) -> dict[str, torch.Tensor]:
        """Views of the pool as arguments of a kernel; all five without names."""
        every = "kv", "rank", "born", "score", "token"
        return {name: getattr(self, name) for name in names or every}

    def words(self, which: str, row: int) -> torch.Tensor:
        """A copy of one word of a request, ``[S, N]`` by slot, or by unit of slots."""
        blocks = self.table[row].long()
        return getattr(self, which)[blocks].transpose(0, 1).flatten(1)

    def put_all(self, which: str, row: int, values: torch.Tensor) -> None:
        """Write one word of a request, ``[S, N]`` by slot, or by unit of slots."""
        blocks = self.table[row].long()
        paged = values.unflatten(1, (-1, self.case.units)).transpose(0, 1)
        getattr(self, which)[blocks] = paged.to(getattr(self, which).dtype)

    def put(self, row: int, head_set: int, slot: int, **words: float | torch.Tensor) -> None:
        """Write words of one slot by name; ``kv`` is ``[H, 2 * D]``, of which the set's heads.

        ``kv`` is encoded, or are codes if ``scale`` comes with it.
        """
        block, offset = self.table[row, slot // self.case.block_size], slot % self.case.block_size
        unit = offset // self.case.unit
        heads = slice(head_set, head_set + 1) if self.case.per_head else slice(None)
        for which, value in words.items():
            if which == "kv":
                codes, scale = value[heads], words.get("scale")
                codes, scale = self.case.encode(codes) if scale is None else (codes, scale[heads])
                self.kv[block, heads, offset] = codes
                self.scale[block, heads, offset] = scale
            elif which == "scale":
                continue
            else:
                getattr(self, which)[block, head_set, unit] = value


def at_units(case: Case) -> Case:
    """Strides begin where units do."""
    return replace(case, lengths=tuple(n and n // case.unit * case.unit for n in case.lengths))


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
    longest = max(n or 0 for n in case.lengths) + case.holes * case.unit
    per_row = longest + 2 * room + (2 if case.unit == 1 else 7) * case.block_size
    pages = -(-per_row // case.block_size)
    num_blocks = 1 + pages * len(case.lengths)
    page_bytes = case.kv_bytes + 4 * 4 * case.num_sets * case.units
    page_bytes += 4 * case.row_scales * case.num_heads * case.block_size
    pool = torch.full((num_blocks, page_bytes), POISON, dtype=torch.uint8)
    order = torch.randperm(num_blocks - 1, generator=generator).int() + 1
    table = order.view(len(case.lengths), pages)
    slots = [
        0
        if n is None
        else (-(-n // case.unit) + (case.holes or rng.choice([0, 0, 1, 5])) * (n > 0)) * case.unit
        for n in case.lengths
    ]
    cache = Cache(case, pool, table, slots)
    cache.rank[0] = 3  # the null block may hold anything, also what looks like tokens
    steps = torch.zeros(len(case.lengths), columns.STEP_COLUMNS, dtype=torch.int32)
    for row, length in enumerate(case.lengths):
        if length is None:
            steps[row] = 50  # warm-up brings numbers without pages
            steps[row, columns.STREAM] = -1
            cache.table[row] = 0  # vLLM pads block tables with the null block
            continue
        stream = length + (rng.randrange(1, 200) * case.unit if length else 0)
        _fill(cache, row, length, stream, generator)
        steps[row, columns.STREAM] = stream
        steps[row, columns.CACHED] = length
        steps[row, columns.OLD_SLOTS] = slots[row]
        steps[row, columns.NEW_SLOTS] = slots[row]
    # Beyond a request's slots ranks look valid, as stale memory may.
    every = torch.arange(pages * case.units, dtype=torch.int32)
    for row, length in enumerate(case.lengths):
        if length is not None:
            ranks = cache.words("rank", row)
            used = slots[row] // case.unit
            ranks[:, used:] = every[used:] % 3
            cache.put_all("rank", row, ranks)
    return cache, steps


def _fill(cache: Cache, row: int, length: int, stream: int, generator: torch.Generator) -> None:
    case, blocks = cache.case, cache.table[row].long()
    page, count = case.block_size, -(-length // case.unit)
    for head_set in range(case.num_sets):
        heads = [head_set] if case.per_head else range(case.num_heads)
        held = torch.randperm(cache.slots[row] // case.unit, generator=generator)[:count]
        block, offset = blocks[held // case.units], held % case.units
        rank = torch.arange(count, dtype=torch.int32)
        moved = torch.randint(0, case.max_distance, (count,), generator=generator)
        cache.rank[blocks[: -(-cache.slots[row] // page)], head_set] = -1
        cache.rank[block, head_set, offset] = rank
        cache.born[block, head_set, offset] = rank * case.unit + moved.int() + case.shifts[row]
        score = (torch.rand(count, generator=generator) * 8).round() / 8 - 0.5
        cache.score[block, head_set, offset] = score  # many ties, also below 0
        tokens = torch.randperm(max(stream, 1), generator=generator)[:count].sort().values
        cache.token[block, head_set, offset] = tokens.int()
        slots = members(held, case.unit)[:length]
        block, offset = blocks[slots // page], slots % page
        for head in heads:
            row_kv = torch.randn(length, case.row_size, generator=generator)
            cache.kv[block, head, offset], scale = case.encode(row_kv.to(case.dtype))
            cache.scale[block, head, offset] = scale


def members(units: torch.Tensor, unit: int) -> torch.Tensor:
    """``[..., n * unit]``: the slots, or tokens, of units ``[..., n]`` in order."""
    return (units.unsqueeze(-1) * unit + torch.arange(unit)).flatten(-2)


def rows_of(case: Case, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., row_size]`` as pages have them."""
    return torch.cat([key, value], dim=-1) if case.latent is None else key


def new_tokens(case: Case, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of new tokens."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    tokens, heads, size = num_tokens, case.num_heads, case.head_size
    query = torch.randn(tokens, heads * case.group, size, generator=generator)
    key, value = torch.randn(2, tokens, heads, size, generator=generator).to(case.dtype)
    if case.latent is not None:
        value = key[..., -case.latent :]
    return query.to(case.dtype), key, value


def table_of(
    case: Case, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    if case.inv_freq is None:
        return None
    return rotation_table(case.inv_freq, case.max_distance + 1, device, dtype)


def on(device: torch.device | str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Largest error relative to ``1 + |expected|``; NaN and anything too large raise."""
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.detach().cpu().double(), expected.double()
    error = ((actual - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= tolerance, f"{name}: error {error:.2e} > {tolerance:.0e}"
    return error


def same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    actual = actual.cpu()
    assert torch.equal(actual, expected), (
        f"{name}: {int((actual != expected).sum())} of {actual.numel()} entries differ"
    )


def real_rows(case: Case) -> list[int]:
    return [row for row, length in enumerate(case.lengths) if length is not None]


def places_of(case: Case, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Step rows of single tokens with their places in a step, and all positions of the step.

    None without a window: they are what is cached.
    """
    if case.window is None:
        return steps, None
    place = torch.randperm(len(steps), generator=torch.Generator().manual_seed(case.seed)) + 2
    positions = torch.full((len(steps) + 4,), 999999)
    positions[place] = steps[:, columns.CACHED].long() + torch.tensor(case.shifts)
    steps = steps.clone()
    real = real_rows(case)
    steps[real, columns.START] = place[real].int()
    return steps, positions


def stride_steps(case: Case, steps: torch.Tensor) -> int:
    """Fill ``START`` and ``LENGTH``; tokens in the step."""
    place = 3  # the step's first tokens belong to others
    for row in real_rows(case):
        length = case.strides[row % len(case.strides)]
        steps[row, columns.START], steps[row, columns.LENGTH] = place, length
        place += length + 2
    return place


def chronological(cache: Cache, row: int, step: list[int]) -> tuple[torch.Tensor, ...]:
    """Slots, scores and tokens ``[S, n]``, oldest first; or of units, those of slots first."""
    unit = cache.case.unit
    ranks = cache.words("rank", row)[:, : step[columns.OLD_SLOTS] // unit]
    count = -(-step[columns.CACHED] // unit)
    order = ranks.masked_fill(ranks < 0, 2**31 - 1).argsort(dim=1)[:, :count]
    return order, *(cache.words(w, row).gather(1, order) for w in ("score", "token"))


def float_bits(value: float) -> int:
    """The int32 that holds the same bits as an fp32, for a step row."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
