# SPDX-License-Identifier: Apache-2.0
"""Recall: evicted units wait in a store, and the queries of a stride bring some of them back.

One store for each layer and head set. Everything is a list of unit numbers; a unit's keys are
looked up by token, and judged as if each stood in the middle of the shown units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NEAR = 1e-2
"""Relative difference of two units' worth that rounding to 8 bits can make or undo."""

CANDIDATES = 512
"""Units that are judged by all of their keys. Of more, these are selected by mean and variance."""

FILTERING, JUDGING = 5, 16
"""Queries of each head that select them and that judge them: the last, and the largest ones."""

SPREAD = 0.7
"""Weight of the variance of a unit's keys in that selection."""

LAST = 8
"""How often the last query's squares are added."""

NEXT = 0.125
"""What the unit that continues a unit's text is worth of it, at least, if it was stored next."""


@dataclass
class RecallSettings:
    """What a user writes, in tokens where it counts tokens."""

    units: int
    unit: int
    store: int
    every: int
    queries: int
    rows: str

    @classmethod
    def of(cls, settings: dict[str, Any]) -> RecallSettings | None:
        if not settings.get("recall"):
            return None
        return cls(
            settings["recall"],
            settings.get("unit", 16),
            settings.get("recall_store", 32768),
            settings.get("recall_every", 4),
            settings.get("recall_queries", 32),
            settings.get("recall_rows", "exact"),
        )


@dataclass
class RecallSim:
    """The store of one layer and head set."""

    settings: RecallSettings
    evicted: list[int] = field(default_factory=list)
    """All units that ever left, in order."""
    shown: list[int] = field(default_factory=list)
    """Those that are back, ascending."""
    many: bool = False
    """Whether the stride before had several tokens."""
    choices: int = 0
    """How often units were chosen among more than there is room for."""
    near: int = 0
    """How often `hint` was another choice that is as good but for rounding."""

    @property
    def stored(self) -> list[int]:
        return self.evicted[-(self.settings.store // self.settings.unit) :]

    def chooses(self, start: int, end: int) -> bool:
        """Whether the stride of tokens start .. end - 1 looks for other units."""
        many = end - start > 1
        due = many or self.many or start % self.settings.every == 0
        self.many = many
        grown = min(self.settings.units, len(self.evicted)) != len(self.shown)
        return bool(self.evicted) and (due or grown)

    @property
    def tokens_to_show(self) -> int:
        """Tokens of the units that will be back at the next stride."""
        return self.settings.unit * min(self.settings.units, len(self.evicted))

    def asking(self, num_tokens: int) -> list[int]:
        """The stride's tokens whose queries are asked: all, or evenly spread to the last one."""
        return spread(num_tokens, self.settings.queries)

    def positions(self, cached: int, asking: list[int]) -> Tensor:
        """Where these tokens will stand behind the policy's `cached` tokens and the shown ones."""
        return torch.tensor([cached + self.tokens_to_show + i for i in asking])

    def distances(self, cached: int, asking: list[int], num_sinks: int) -> Tensor:
        """How far before each of these tokens the middle of the shown units will stand."""
        number = min(self.settings.units, len(self.evicted))
        return self.positions(cached, asking) - num_sinks - number // 2 * self.settings.unit

    def choose(
        self,
        queries: Tensor,
        keys: Tensor,
        sinks: Tensor,
        hint: list[int] | None = None,
        scale: float | None = None,
    ) -> None:
        """Bring units back.

        `queries` are [asking, query heads, D], rotated by their `distances`, and `keys` [KV heads,
        tokens, D] of the whole stream, at position 0, of this set's heads. `sinks` are the logits
        [asking, query heads, sink tokens] of the sinks, where they stand. `scale` is the model's
        factor on products (default: 1 / sqrt(D)); soft caps and learned sinks are left out. `hint`
        is what another implementation chose: it is taken if all of its units are worth as much as
        the least of ours, within `NEAR`. A key that falls between two steps of its 8 bits may go
        either way.
        """
        number, every = min(self.settings.units, len(self.evicted)), self.stored
        if number == len(every):
            self.shown = sorted(every)
            return
        queries, scale = in_8_bits(queries), scale or keys.shape[2] ** -0.5
        stored = every
        most = max(CANDIDATES, number)
        if len(stored) > most:
            stored = self.candidates(stored, most, queries, keys, scale)
            which = largest(queries, JUDGING)
            queries, sinks = of_each_head(queries, which), of_each_head(sinks, which)
        unit, num_heads = self.settings.unit, len(keys)
        tokens = [token for u in stored for token in range(u * unit, (u + 1) * unit)]
        coarse = in_8_bits(keys[:, tokens])
        group = queries.shape[1] // num_heads
        worth = torch.zeros(len(stored))
        for head in range(queries.shape[1]):
            logits = queries[:, head] @ coarse[head // group].T * scale
            both = torch.cat((logits, sinks[:, head].to(logits.dtype)), dim=-1).softmax(-1)
            of_units = both[:, : len(tokens)].view(len(queries), len(stored), unit)
            squares = of_units.sum(-1).nan_to_num(0).square()  # NaN: the query is not finite
            worth = torch.maximum(worth, squares.sum(0) + (LAST - 1) * squares[-1])
        own = dict(zip(stored, worth.tolist(), strict=True))
        value, place = dict(own), {u: i for i, u in enumerate(every)}
        for before, u in pairwise(every):
            if u == before + 1 and before in own:
                value[u] = max(value.get(u, 0.0), NEXT * own[before])
        order = sorted(value, key=lambda u: (-value[u], place[u]))
        self.shown = sorted(order[:number])
        self.choices += 1
        if hint is None or hint == self.shown:
            return
        least = value[order[number - 1]]
        others = set(self.shown) - set(hint)
        good = [value.get(u, 0.0) >= least * (1 - NEAR) for u in hint]
        swapped = [value[u] <= least * (1 + NEAR) for u in others]
        if len(set(hint)) == number and all(good) and all(swapped):
            self.shown = hint
            self.near += 1

    def candidates(
        self, stored: list[int], number: int, queries: Tensor, keys: Tensor, scale: float
    ) -> list[int]:
        """The `number` units that a few of the queries, which have 8 bits, ask for most.

        As if a unit's keys were normally distributed, with the same variance in all directions,
        for which a weight of one half would be exact.
        """
        unit, group = self.settings.unit, queries.shape[1] // len(keys)
        few = of_each_head(queries, largest(queries, FILTERING))
        tokens = torch.tensor([range(u * unit, (u + 1) * unit) for u in stored])
        coarse = in_8_bits(keys[:, tokens])
        centres = in_8_bits(coarse.mean(2))
        variance = coarse.var(2, correction=0).mean(-1)
        most = torch.zeros(len(stored))
        for head in range(queries.shape[1]):
            mean, spread = centres[head // group], variance[head // group]
            for query in few[:, head] * scale:
                logits = mean @ query + SPREAD * spread * (query @ query)
                most = torch.maximum(most, logits.softmax(0).nan_to_num(0))
        order = sorted(range(len(stored)), key=lambda i: (-float(most[i]), i))
        return sorted(stored[i] for i in order[:number])

    def hint(self, kept: list[int], num_sinks: int) -> list[int]:
        """The units that another implementation shows, from all of its tokens."""
        number, unit = min(self.settings.units, len(self.evicted)), self.settings.unit
        return [t // unit for t in kept[num_sinks : num_sinks + number * unit : unit]]

    def line(self, cached: list[int], num_sinks: int) -> list[int]:
        """Tokens in the order of their positions: the shown ones stand after the sinks."""
        unit = self.settings.unit
        shown = [token for u in self.shown for token in range(u * unit, (u + 1) * unit)]
        return cached[:num_sinks] + shown + cached[num_sinks:]

    def note(self, before: list[int], after: list[int], *rows: Tensor) -> None:
        """Units that were in the policy's cache, or new, and are gone now.

        `rows` are the stream's keys without rotation, and values, [KV heads, tokens, D] of this
        set's heads. A unit comes back as it was stored: rounded, if rows are in 8 bits.
        """
        left = set(after)
        unit = self.settings.unit
        gone = [token // unit for token in before[::unit] if token not in left]
        self.evicted += gone
        if self.settings.rows == "int8":
            tokens = [token for u in gone for token in range(u * unit, (u + 1) * unit)]
            for of_head in rows:
                of_head[:, tokens] = in_8_bits(of_head[:, tokens])


def largest(queries: Tensor, most: int) -> list[list[int]]:
    """By head of [asking, heads, D]: places of the last query and the largest, at most so many."""
    last = len(queries) - 1
    norms = queries.double().pow(2).sum(-1).nan_to_num(0).tolist()
    heads = []
    for head in range(queries.shape[1]):
        order = sorted(range(len(queries)), key=lambda i: (i != last, -norms[i][head], i))
        heads.append(sorted(order[:most]))
    return heads


def of_each_head(rows: Tensor, which: list[list[int]]) -> Tensor:
    """Some rows of each head of [asking, heads, n]."""
    return torch.stack([rows[places, head] for head, places in enumerate(which)], 1)


def spread(number: int, most: int) -> list[int]:
    """All of ``number`` places, or ``most`` of them, evenly spread to the last one."""
    if number <= most:
        return list(range(number))
    return [(i + 1) * number // most - 1 for i in range(most)]


def may_round_either_way(vectors: Tensor) -> Tensor:
    """Vectors with a channel near the middle of two of its 127 steps, ``[...]`` of ``[..., D]``.

    Another order of fp32 operations may round it to the other step.
    """
    steps = vectors.double() / vectors.abs().amax(-1, keepdim=True).clamp_min(1e-30) * 127
    return ((steps - steps.floor() - 0.5).abs() < 2e-4).any(-1)


def in_8_bits(vectors: Tensor) -> Tensor:
    """Each vector in 127 steps of its largest channel, on both sides of 0; NaN if not finite."""
    step = vectors.abs().amax(-1, keepdim=True) / 127
    return torch.where(step == 0, 0.0, (vectors / step).round() * step)
