# SPDX-License-Identifier: Apache-2.0
"""A small page pool, and the tokens in it as literal lists: what the C++ library must equal.

A head set's cache is a list of ``Token``, oldest to newest. Inserting appends to the list and
applies each rule to it; attention is fp64. Whatever may not be read is NaN or looks valid.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.policies import literal
from vllm_cascade.policies import rules as policies

POISON = 0xFF
"""Every byte of fresh memory: NaN, or a rank of -1."""
MAX_DISTANCE = 40
WORDS = ("rank", "born", "score", "token")
Rule = tuple[int, int, int, int]


@dataclass(frozen=True)
class Shape:
    """A layer; ``uses_scores``: whether anybody's scores are kept."""

    num_heads: int = 2
    group: int = 2
    head_size: int = 20
    block_size: int = 8
    per_head: bool = False
    dtype: torch.dtype = torch.float32
    rotary: bool = True
    is_neox: bool = True
    alibi: bool = False
    softcap: float = 0.0
    reduction: str = "mean"
    uses_scores: bool = True
    scale: float = 0.3

    @property
    def num_sets(self) -> int:
        return self.num_heads if self.per_head else 1

    @property
    def frequencies(self) -> torch.Tensor:
        half = self.head_size // 2
        return 0.3 ** torch.arange(half, dtype=torch.float64)

    @property
    def slopes(self) -> torch.Tensor | None:
        return 0.1 / (1 + torch.arange(self.num_heads * self.group)) if self.alibi else None

    def heads(self, head_set: int) -> list[int]:
        return [head_set] if self.per_head else list(range(self.num_heads))


@dataclass
class Token:
    """A cached token of one head set: ``row`` is ``[heads, 2 * D]``, as stored."""

    stream: int
    born: int
    score: float
    slot: int
    row: torch.Tensor


@dataclass(frozen=True)
class Scoring:
    """How a request's scores are made and compared, as in a step row."""

    newest_stays: bool = True
    per_age: bool = False
    decay: float = 1.0
    weight: float = 0.0


@dataclass
class Request:
    """One request's stride: what is cached before it, and what it brings."""

    lines: list[list[Token]]
    old_slots: int
    new_slots: int
    stream: int
    rules: list[list[Rule]]  # of each of its tokens
    scoring: Scoring = Scoring()
    start: int = 0
    scored: int = -1  # rank of the first token that gets one of `given`
    given: list[float] = field(default_factory=list)
    logit_scale: list[float] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return len(self.lines[0])

    @property
    def num_tokens(self) -> int:
        return len(self.rules)


class Pool:
    """Pages of poison; block 0 is nobody's and looks full of tokens."""

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        kv_bytes = shape.num_heads * shape.block_size * 2 * shape.head_size * shape.dtype.itemsize
        word_bytes = 4 * shape.num_sets * shape.block_size
        page_bytes = kv_bytes + len(WORDS) * word_bytes + 64
        self.shape = shape
        self.bytes = torch.full((num_blocks, page_bytes), POISON, dtype=torch.uint8)
        rows = shape.num_heads, shape.block_size, 2 * shape.head_size
        self.kv = self.bytes[:, :kv_bytes].view(shape.dtype).unflatten(1, rows)
        self.words = {}
        for i, word in enumerate(WORDS):
            at = kv_bytes + i * word_bytes
            dtype = torch.float32 if word == "score" else torch.int32
            view = self.bytes[:, at : at + word_bytes].view(dtype)
            self.words[word] = view.unflatten(1, (shape.num_sets, shape.block_size))
        self.words["rank"][:] = torch.arange(shape.block_size) % 3

    def copy(self) -> "Pool":
        other = Pool(self.shape, len(self.bytes))
        other.bytes.copy_(self.bytes)
        return other

    def place(self, pages: Sequence[int], head_set: int, slot: int) -> tuple[int, int, int]:
        return pages[slot // self.shape.block_size], head_set, slot % self.shape.block_size

    def write(self, pages: Sequence[int], head_set: int, line: list[Token], slots: int) -> None:
        """All words and rows of a head set, but scores of empty slots."""
        for slot in range(slots):
            self.words["rank"][self.place(pages, head_set, slot)] = -1
        for rank, token in enumerate(line):
            block, _, offset = at = self.place(pages, head_set, token.slot)
            self.words["rank"][at] = rank
            self.words["born"][at] = token.born
            self.words["token"][at] = token.stream
            if self.shape.uses_scores:
                self.words["score"][at] = token.score
            for head, row in zip(self.shape.heads(head_set), token.row, strict=True):
                self.kv[block, head, offset] = row


def random_lines(shape: Shape, rng: random.Random, cached: int, slots: int) -> list[list[Token]]:
    """Cached tokens in random slots, with many equal scores; stream indices below 3 * cached."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    lines = []
    for _ in range(shape.num_sets):
        order = rng.sample(range(slots), cached)
        streams = sorted(rng.sample(range(3 * cached), cached))
        rows = torch.randn(
            cached, shape.num_heads // shape.num_sets, 2 * shape.head_size, generator=generator
        ).to(shape.dtype)
        born = [rank + rng.randrange(MAX_DISTANCE) for rank in range(cached)]
        scores = [rng.randrange(-4, 8) / 8 for _ in range(cached)]
        parts = zip(streams, born, scores, order, rows, strict=True)
        lines.append([Token(*part) for part in parts])
    return lines


def rotate_back(shape: Shape, key: torch.Tensor, distance: int) -> torch.Tensor:
    """fp64 ``[..., D]``, turned back by so many positions."""
    key = key.double()
    if not shape.rotary:
        return key
    pairs = key.unflatten(-1, (2, -1) if shape.is_neox else (-1, 2))
    x, y = pairs.unbind(-2 if shape.is_neox else -1)
    turned = torch.complex(x, y) * torch.exp(-1j * distance * shape.frequencies)
    return torch.stack([turned.real, turned.imag], dim=-2 if shape.is_neox else -1).flatten(-2)


def attend(
    shape: Shape, request: Request, query: torch.Tensor, new: torch.Tensor, rounded: bool = False
) -> tuple[torch.Tensor, list[list[float]]]:
    """Outputs fp64 ``[T, H * G, D]`` and what is added to the scores of each set's tokens.

    Args:
        query: ``[T, H * G, D]``.
        new: ``[T, H, 2 * D]``, keys and values.
        rounded: keys are rounded to bf16 where they are now.
    """
    cached, num_tokens, size = request.cached, request.num_tokens, shape.head_size
    output = torch.zeros(query.shape, dtype=torch.float64)
    mass = torch.zeros(len(query[0]), cached + num_tokens, dtype=torch.float64)
    slopes = shape.slopes
    for head_set, line in enumerate(request.lines):
        for i, head in enumerate(shape.heads(head_set)):
            rows = [
                torch.cat([rotate_back(shape, token.row[i, :size], token.born - rank),
                           token.row[i, size:].double()])
                for rank, token in enumerate(line)
            ]  # fmt: skip
            keys, values = torch.stack([*rows, *new[:, head].double()]).split(size, dim=-1)
            keys = keys.bfloat16().double() if rounded else keys
            for q in range(head * shape.group, (head + 1) * shape.group):
                for t in range(num_tokens):
                    seen = cached + t + 1
                    factor = request.logit_scale[t] if request.logit_scale else 1.0
                    logits = keys[:seen] @ query[t, q].double() * shape.scale * factor
                    if shape.softcap:
                        logits = shape.softcap * torch.tanh(logits / shape.softcap)
                    if slopes is not None:
                        logits = logits + float(slopes[q]) * (torch.arange(seen) - seen + 1)
                    probs = logits.softmax(0)
                    output[t, q] = probs @ values[:seen]
                    scoring = request.scoring
                    weight = scoring.weight * scoring.decay ** (num_tokens - 1 - t)
                    mass[q, :seen] += weight * probs
    per_set = mass.view(shape.num_sets, -1, mass.shape[1])
    reduced = {"mean": per_set.mean, "max": per_set.amax, "median": per_set.median}
    added = reduced[shape.reduction](1)
    return output, (added.values if shape.reduction == "median" else added).tolist()


def insert(
    shape: Shape, request: Request, head_set: int, new: torch.Tensor, added: list[float]
) -> list[Token]:
    """A set's tokens after the stride, in their slots."""
    line, num_tokens = request.lines[head_set], request.num_tokens
    scoring = request.scoring
    heads = shape.heads(head_set)
    fresh = [
        Token(request.stream + t, request.cached + t, 0.0, -1, new[t, heads])
        for t in range(num_tokens)
    ]
    every = line + fresh
    for token, more in zip(every, added, strict=True):
        token.score = token.score * scoring.decay**num_tokens + more
    for t, score in enumerate(request.given):
        if request.scored + t >= 0:
            every[request.scored + t].score += score
    seen = request.stream + num_tokens
    value = {t.stream: t.score / (seen - t.stream if scoring.per_age else 1) for t in every}
    left = [token.stream for token in line]
    for token, rules in zip(fresh, request.rules, strict=True):
        left.append(token.stream)
        for rule in rules:
            if rule[2]:
                left = literal.apply(policies.Rule(*rule), left, value, scoring.newest_stays)
    line = [token for token in every if token.stream in left]
    taken = {token.slot for token in line}
    free = (slot for slot in range(request.new_slots) if slot not in taken)
    for token in line:
        if token.slot < 0:
            token.slot = next(free)
    return line


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """NaN is close to nothing."""
    error = (actual.double() - expected.double()).abs() / (1 + expected.double().abs())
    return bool((error <= tolerance).all())


def rotation_table(shape: Shape) -> torch.Tensor | None:
    """fp32 ``[distance, 2, half]``, cos and sin of a rotation back."""
    if not shape.rotary:
        return None
    angle = -torch.arange(MAX_DISTANCE + 1).double()[:, None] * shape.frequencies
    return torch.stack([angle.cos(), angle.sin()], dim=1).float().contiguous()


def pages_for(slots: int, shape: Shape) -> int:
    return math.ceil(slots / shape.block_size)
