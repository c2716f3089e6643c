# SPDX-License-Identifier: Apache-2.0
"""One attention layer with a literal cache, in fp64: what the paged implementations must equal.

Keys are kept as they came, unrotated, beside explicit token lists (tests/oracle); every read
rotates them at their rank. There are no pages, slots or ``born`` positions here.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from tests.oracle.dgc import nearest_centres
from tests.oracle.quantised import Quantiser, written_at


def of_units(mass: dict[int, float], unit: int) -> dict[int, float]:
    """A head's attention on tokens, with a unit's whole on its first token: heads judge units."""
    return {
        token: 0.0 if token % unit else sum(mass.get(token + i, 0.0) for i in range(unit))
        for token in mass
    }


def median(values: list[float]) -> float:
    """The lower of the middle two, as PyTorch's."""
    return sorted(values)[(len(values) - 1) // 2]


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "max": max,
    "median": median,
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

    def rotate(self, x: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        """fp64 rotation of the leading channels of ``[..., D]``, to one position or ``[...]``."""
        if self.inv_freq is None:
            return x.double()
        angle = torch.as_tensor(position)[..., None] * self.inv_freq.double()
        cos, sin = angle.cos(), angle.sin()
        x, half = x.double().clone(), angle.shape[-1]
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
        if self.logit_scale:
            scales = [self.logit_scale(first + t) for t in range(num_tokens)]
            query = torch.stack([row * scale for row, scale in zip(query, scales, strict=True)])
        output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
        mass: list[dict[int, float]] = []  # of each query head
        before = len(self.sims[0].tokens())
        age = torch.arange(num_tokens - 1, -1, -1, dtype=torch.float64)
        weight = self.weight * self.decay**age
        for kv_head in range(num_heads):
            cached = self.sims[kv_head % len(self.sims)].arranged()
            tokens = cached + list(range(first, first + num_tokens))
            keys = torch.stack([self.keys[token][kv_head].double() for token in tokens])
            values = torch.stack([self.values[token][kv_head].double() for token in tokens])
            keys = self.rotate(keys, torch.arange(len(tokens)))
            for head in range(kv_head * group, (kv_head + 1) * group):
                probs = self._probabilities(query[:, head], keys, head)
                output[:, head] = probs @ values
                mass.append(dict(zip(tokens, (weight @ probs).tolist(), strict=True)))
        self._update_and_insert(mass, first, num_tokens)
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

    def _probabilities(self, query: torch.Tensor, keys: torch.Tensor, head: int) -> torch.Tensor:
        """What each of ``query [T, D]`` sees of ``keys [n, D]``, whose last T are its own."""
        rank = torch.arange(len(keys))
        position = rank[-len(query) :]
        logits = self.rotate(query, position) @ keys.T * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        distance = rank - position[:, None]
        if self.slopes is not None:
            logits = logits + self.slopes[head] * distance
        logits = logits.masked_fill(distance > 0, -torch.inf)
        if self.sinks is not None:  # one more term, whose share no token gets
            sink = self.sinks[head].double().expand(len(query), 1)
            return torch.cat([logits, sink], 1).softmax(1)[:, :-1]
        return logits.softmax(1)

    def _update_and_insert(self, mass: list[dict[int, float]], first: int, num_tokens: int) -> None:
        per_set = len(mass) // len(self.sims)
        reduce = REDUCTIONS[self.reduction]
        for index, (sim, scores) in enumerate(zip(self.sims, self.scores, strict=True)):
            heads = [
                of_units(head, sim.unit) for head in mass[index * per_set : (index + 1) * per_set]
            ]
            for token in sim.tokens() + list(range(first, first + num_tokens)):
                old = scores.get(token, 0.0) * self.decay**num_tokens
                scores[token] = old + reduce([head[token] for head in heads])
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
                self.probs.append(self._reduced(heads))

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

    def _reduced(self, heads: list[dict[int, float]]) -> dict[int, float]:
        """Probabilities of one query, reduced over a set's heads."""
        return {token: fmean(head[token] for head in heads) / self.weight for token in heads[0]}
