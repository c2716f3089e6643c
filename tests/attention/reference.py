# SPDX-License-Identifier: Apache-2.0
"""One attention layer with a literal cache, in fp64: what the paged implementations must equal.

Keys are kept as they came, unrotated, beside explicit token lists (tests/oracle); every read
rotates them at their rank. There are no pages, slots or ``born`` positions here.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.dgc import nearest_centres
from tests.oracle.quantised import Quantiser, written_at


def of_units(mass: dict[int, torch.Tensor], unit: int) -> dict[int, torch.Tensor]:
    """A head's attention on tokens, with a unit's whole on its first token: heads judge units."""
    return {
        token: sum(mass.get(token + i, torch.zeros(())) for i in range(unit)).clone()
        if token % unit == 0
        else torch.zeros((), dtype=torch.float64)
        for token in mass
    }


class LiteralCache:
    """One request's cache in one layer."""

    def __init__(
        self,
        make_sim: Callable[[], Any],
        *,
        num_sets: int,
        decay: float,
        weight: float,
        reduction: str,
        scale: float,
        inv_freq: torch.Tensor | None,
        is_neox: bool = True,
        slopes: torch.Tensor | None = None,
        softcap: float = 0.0,
        logit_scale: Callable[[int], float] | None = None,
        token_scores: Callable[[int], list[float]] | None = None,
        sinks: torch.Tensor | None = None,
        quantiser: Quantiser | None = None,
        latent: bool = False,
    ) -> None:
        self.sims = [make_sim() for _ in range(num_sets)]
        self.decay, self.weight, self.reduction, self.scale = decay, weight, reduction, scale
        self.logit_scale, self.token_scores = logit_scale, token_scores
        self.quantiser, self.latent = quantiser, latent
        self.members: list[dict[int, int]] = [{} for _ in range(num_sets)]
        self.probs: list[dict[int, float]] = []  # of each query, reduced over the first set's heads
        self.inv_freq, self.is_neox = inv_freq, is_neox
        self.slopes, self.softcap, self.sinks = slopes, softcap, sinks
        self.keys: list[torch.Tensor] = []  # per token [H, D], unrotated
        self.values: list[torch.Tensor] = []
        self.scores: list[dict[int, float]] = [{} for _ in range(num_sets)]
        self._rotated: dict[tuple[int, int, int], torch.Tensor] = {}

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """fp64 rotation of the leading channels of ``[..., D]``."""
        if self.inv_freq is None:
            return x.double()
        angle = position * self.inv_freq.double()
        cos, sin = angle.cos(), angle.sin()
        x, half = x.double().clone(), len(angle)
        if self.is_neox:
            first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
            x[..., :half] = first * cos - second * sin
            x[..., half : 2 * half] = second * cos + first * sin
        else:
            first, second = x[..., 0 : 2 * half : 2].clone(), x[..., 1 : 2 * half : 2].clone()
            x[..., 0 : 2 * half : 2] = first * cos - second * sin
            x[..., 1 : 2 * half : 2] = second * cos + first * sin
        return x

    def positions(self, num_tokens: int) -> range:
        cached = len(self.sims[0].tokens())
        return range(cached, cached + num_tokens)

    def step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One stride of unrotated ``query [T, Hq, D]``, ``key``/``value [T, H, D]``; its output."""
        num_tokens, num_heads = len(key), key.shape[1]
        group = query.shape[1] // num_heads
        first = len(self.keys)
        self.keys.extend(key)
        self.values.extend(value)
        output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
        mass = [dict[int, torch.Tensor]() for _ in range(query.shape[1])]
        before = len(self.sims[0].tokens())
        for head in range(query.shape[1]):
            kv_head = head // group
            cached = self.sims[kv_head % len(self.sims)].arranged()
            for t in range(num_tokens):
                tokens = cached + list(range(first, first + t + 1))
                factor = self.logit_scale(first + t) if self.logit_scale else 1.0
                probs = self._probabilities(
                    query[t, head] * factor, tokens, kv_head, head, len(cached) + t
                )
                rows = torch.stack([self.values[token][kv_head].double() for token in tokens])
                output[t, head] = probs @ rows
                weight = self.weight * self.decay ** (num_tokens - 1 - t)
                for token, p in zip(tokens, probs, strict=True):
                    mass[head][token] = mass[head].get(token, torch.zeros(())) + weight * p
        self._update_and_insert(mass, first, num_tokens, group)
        if self.quantiser is not None:
            sim = self.sims[0]
            filling = len(self.keys) % sim.unit
            self._quantise(first, written_at(before, len(sim.tokens()), num_tokens, filling))
        return output

    def _quantise(self, first: int, positions: torch.Tensor) -> None:
        """The newest tokens' rows as they are read from now on: in fp32 when they are written."""
        for token, at in enumerate(positions.tolist(), start=first):
            key, value = self.rotate(self.keys[token], at).float(), self.values[token].float()
            if self.latent:  # a row is the key, whose end is the value
                key = key[..., : -value.shape[-1]]
            key, value = self.quantiser.read(key, 0), self.quantiser.read(value, 1)
            self.values[token] = value
            self.keys[token] = self.rotate(torch.cat([key, value], -1) if self.latent else key, -at)
        self._rotated = {place: row for place, row in self._rotated.items() if place[0] < first}

    def _probabilities(
        self, query: torch.Tensor, tokens: list[int], kv_head: int, head: int, position: int
    ) -> torch.Tensor:
        keys = [self._key_at(token, rank, kv_head) for rank, token in enumerate(tokens)]
        logits = torch.stack(keys) @ self.rotate(query, position) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.slopes is not None:
            logits = logits + self.slopes[head] * (torch.arange(len(tokens)) - position)
        if self.sinks is not None:  # one more term, whose share no token gets
            return torch.cat([logits, self.sinks[head : head + 1].double()]).softmax(0)[:-1]
        return logits.softmax(0)

    def _key_at(self, token: int, rank: int, kv_head: int) -> torch.Tensor:
        place = token, rank, kv_head
        if place not in self._rotated:
            self._rotated[place] = self.rotate(self.keys[token][kv_head], rank)
        return self._rotated[place]

    def _update_and_insert(
        self, mass: list[dict[int, torch.Tensor]], first: int, num_tokens: int, group: int
    ) -> None:
        per_set = len(mass) // len(self.sims)
        for index, (sim, scores) in enumerate(zip(self.sims, self.scores, strict=True)):
            heads = [
                of_units(head, sim.unit) for head in mass[index * per_set : (index + 1) * per_set]
            ]
            for token in sim.tokens() + list(range(first, first + num_tokens)):
                values = torch.stack([head[token] for head in heads])
                reduced = {
                    "mean": values.mean,
                    "max": values.amax,
                    "median": values.median,
                }[self.reduction]()
                old = scores.get(token, 0.0) * self.decay**num_tokens
                scores[token] = old + float(reduced)
            seen = first + num_tokens

            def compared(
                token: int,
                scores: dict = scores,
                sim: Any = sim,
                index: int = index,
                seen: int = seen,
            ) -> float:
                if self.token_scores is not None:
                    return self.token_scores(index)[token]
                return scores[token] / (len(self.keys) - token if sim.normalise else 1)

            for token in range(first, seen):
                sim.insert(token, compared)
            self._merge(index)
            if index == 0 and num_tokens == 1:
                self.probs.append({t: float(p) for t, p in self._reduced(heads).items()})

    def _merge(self, index: int) -> None:
        """Average tokens that join others into them, unrotated."""
        centres, joining = self.sims[index].take_merged()
        if not joining:
            return
        heads = [index] if len(self.sims) > 1 else range(self.keys[0].shape[0])
        features = torch.stack(self.keys).double()[:, heads].flatten(1).numpy()
        nearest, _ = nearest_centres(features, centres, joining)
        for token, centre in zip(joining, nearest, strict=True):
            count = self.members[index].get(centre, 1)
            for rows in (self.keys, self.values):
                mean = rows[centre].double().clone()
                mean[heads] = (count * mean[heads] + rows[token].double()[heads]) / (count + 1)
                rows[centre] = mean
            self.members[index][centre] = count + 1
        self._rotated = {}

    def _reduced(self, heads: list[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Probabilities of one query, reduced over a set's heads."""
        return {
            token: torch.stack([head[token] for head in heads]).mean() / self.weight
            for token in heads[0]
        }
