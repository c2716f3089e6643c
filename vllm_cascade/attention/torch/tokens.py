# SPDX-License-Identifier: Apache-2.0
"""One new token of many requests in plain PyTorch: attend, update scores, insert.

Shapes: ``B`` requests, ``H`` KV heads, ``G`` query heads per KV head, ``S`` head sets (1 or H),
``U`` units of slots, ``N`` slots, ``D`` channels. Scores, logits and softmax statistics are fp32.
"""

from dataclasses import dataclass

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.torch.drafts import NO_SLOT, Journal
from vllm_cascade.attention.torch.rules import apply_rules
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.columns import (
    CACHED,
    DECAY,
    NEW_SLOTS,
    OLD_SLOTS,
    PER_AGE,
    STREAM,
    WEIGHT,
)
from vllm_cascade.models.rotary import rotate, signed_rotation
from vllm_cascade.step.inputs import Singles

KEYS = 256
"""Keys whose values one product sums. The order of a longer one depends on the number of keys, and
so on the request with most."""


@dataclass(frozen=True)
class _Words:
    """The pages of a batch of requests, and access to their per-unit fields.

    Attributes:
        pages: int64 ``[B, P]``, block numbers, padded with the null block 0.
        used: bool ``[B, P]``, False for padding.
        unit: slots per unit.
        offset: int64 ``[B, 1, 1]``, the new token's index in its unit.
        cached: int64 ``[B, 1, 1]``, tokens cached before the new one.
    """

    pages: torch.Tensor
    used: torch.Tensor
    unit: int
    offset: torch.Tensor
    cached: torch.Tensor

    @classmethod
    def of(cls, singles: Singles, pages: Pages) -> "_Words":
        first_slot = torch.arange(singles.table.shape[1]) * pages.block_size
        used = first_slot < singles.column(NEW_SLOTS).squeeze(1)
        table = singles.table.long().masked_fill(~used, 0)
        offset = singles.column(STREAM) % pages.unit
        return cls(table, used, pages.unit, offset, singles.column(CACHED))

    @property
    def filling(self) -> torch.Tensor:
        """int64 ``[B, 1, 1]``: the rank of the new token's unit."""
        return self.cached // self.unit

    def tokens(self, rank: torch.Tensor) -> torch.Tensor:
        """Token ranks from unit ranks, int64 ``[B, S, N]``; -1 in empty slots."""
        ranks = rank.long().unsqueeze(-1) * self.unit + torch.arange(self.unit)
        to_come = ranks >= self.cached.unsqueeze(-1)  # unfilled slots of the last unit
        return ranks.masked_fill((rank < 0).unsqueeze(-1) | to_come, -1).flatten(2)

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        """One per-unit field of all pages, ``[B, S, U]``."""
        return words[self.pages].transpose(1, 2).flatten(2)

    def scatter(self, words: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``[B, S, U]`` back, except to the padding null block."""
        paged = values.unflatten(2, (self.pages.shape[1], -1)).transpose(1, 2)  # [B, P, S, units]
        words[self.pages[self.used]] = paged[self.used]


def attend_and_insert(
    layer: LayerConfig,
    pages: Pages,
    singles: Singles,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    journal: Journal | None = None,
) -> torch.Tensor:
    """Attend from one token per request and update the pages.

    Args:
        query: ``[B, H * G, D]``, rotated at ``singles.positions``.
        key: ``[B, H, D]``, rotated likewise.
        value: ``[B, H, value_size]``.
        journal: saves what draft tokens change.

    Returns:
        The attention output, fp32 ``[B, H * G, value_size]``.
    """
    words = _Words.of(singles, pages)
    rank = words.gather(pages.rank)
    first_slot = torch.arange(rank.shape[-1]) * words.unit
    rank = rank.masked_fill(first_slot >= singles.column(OLD_SLOTS), -1)
    probs, output = _attend(layer, pages, singles, words, rank, query, key, value)
    if layer.part == "attend":
        return output
    score = _new_scores(layer, pages, singles, words, rank, probs)
    _insert(pages, singles, words, rank, score, layer.row(key, value), journal)
    return output


def _attend(
    layer: LayerConfig,
    pages: Pages,
    singles: Singles,
    words: _Words,
    rank: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities ``[B, H, G, N + 1]`` (the new token last) and the output."""
    cache = pages.rows(words.pages).transpose(1, 2).flatten(2, 3)  # [B, H, N, row_size]
    keys, values = layer.split(cache)
    keys = keys.float()
    token_rank = words.tokens(rank)
    empty = token_rank < 0
    if singles.moved and layer.rotation is not None:
        behind = singles.column(CACHED) - singles.positions  # ranks minus positions
        distance = words.gather(pages.born) - rank * words.unit + behind
        distance = distance.masked_fill(rank < 0, 0)
        distance = distance.repeat_interleave(words.unit, -1)
        keys = rotate(keys, signed_rotation(layer.rotation, distance), layer.is_neox)
    queries = query.float().unflatten(1, (layer.num_kv_heads, -1))  # [B, H, G, D]
    logits = torch.matmul(queries, keys.transpose(2, 3)) * layer.scale
    # Not by matmul, which sums in another order for one request than for several.
    own = (queries * key.float().unsqueeze(2)).sum(-1, keepdim=True) * layer.scale  # [B, H, G, 1]
    logits = torch.cat([logits, own], dim=-1)
    if singles.logit_scale is not None:
        logits *= singles.logit_scale.view(-1, 1, 1, 1)
    logits = layer.soft_cap(logits)
    if layer.slopes is not None:
        distance = (token_rank - singles.column(CACHED)).unsqueeze(2)  # [B, S, 1, N]
        logits[..., :-1] += layer.slopes[:, :, None] * distance
    logits[..., :-1].masked_fill_(empty.unsqueeze(2), -torch.inf)
    probs = layer.softmax(logits.unsqueeze(-2)).squeeze(-2)
    # An empty slot has probability 0, but its memory may hold NaN.
    values = values.float().masked_fill(empty.unsqueeze(-1), 0.0)
    output = queries.new_zeros(*queries.shape[:3], layer.value_size)
    for some, theirs in zip(
        probs[..., :-1].split(KEYS, dim=-1), values.split(KEYS, dim=2), strict=True
    ):
        output += torch.matmul(some, theirs)
    output += probs[..., -1:] * value.float().unsqueeze(2)
    return probs, output.flatten(1, 2)


def _new_scores(
    layer: LayerConfig,
    pages: Pages,
    singles: Singles,
    words: _Words,
    rank: torch.Tensor,
    probs: torch.Tensor,
) -> torch.Tensor:
    """Scores of units after the query: fp32 ``[B, S, U + 1]``; 0 for empty units.

    The last entry is for a unit that the new token opens. A token that joins a unit adds to that
    unit's score.
    """
    old = words.gather(pages.score).masked_fill(rank < 0, 0.0)
    score = torch.nn.functional.pad(old, (0, 1))
    if singles.given is not None:
        assert singles.scored is not None, "it comes with given"
        given = layer.own_scores(singles.given.view(-1, 1, 1), words.unit)
        score[..., :-1] += torch.where(rank == singles.scored.view(-1, 1, 1), given, 0.0)
    elif layer.uses_attention:
        units = probs[..., :-1].unflatten(-1, (-1, words.unit)).sum(-1)
        units = torch.nn.functional.pad(units, (0, 1))
        joined = _entry(words, rank).unsqueeze(2)  # [B, S, 1, 1]
        joined = joined.expand(-1, probs.shape[1], probs.shape[2], -1)
        mass = layer.reduce_heads(units.scatter_add(-1, joined, probs[..., -1:]))
        decay, weight = (singles.column(c).int().view(torch.float32) for c in (DECAY, WEIGHT))
        score = decay * score + weight * mass
    return score


def _entry(words: _Words, rank: torch.Tensor) -> torch.Tensor:
    """int64 ``[B, S, 1]``: index of the unit that the new token joins; U if it opens one."""
    joins = (rank == words.filling) & (words.offset > 0)
    return torch.where(joins.any(-1), joins.int().argmax(-1), rank.shape[-1]).unsqueeze(-1)


def _insert(
    pages: Pages,
    singles: Singles,
    words: _Words,
    rank: torch.Tensor,
    score: torch.Tensor,
    new_kv: torch.Tensor,
    journal: Journal | None,
) -> None:
    """Apply the rules, then write the new token to its unit or to the first free one."""
    stream = singles.column(STREAM)
    opens, joined = words.offset == 0, _entry(words, rank)
    own = torch.where(opens, words.filling, -1)
    line = torch.cat([rank.long(), own.expand(-1, rank.shape[1], -1)], dim=-1)
    line = apply_rules(line, _compared(pages, singles, words, score), singles)
    rank, own = line.split([rank.shape[-1], 1], dim=-1)
    index = torch.arange(rank.shape[-1])
    free = (rank < 0) & (index * words.unit < singles.column(NEW_SLOTS))
    target = torch.where(opens, free.int().argmax(-1, keepdim=True), joined)  # [B, S, 1]
    stored = ~opens | ((own >= 0) & free.any(-1, keepdim=True))
    slot = target * words.unit + words.offset
    if journal is not None and singles.saves is not None:
        _save(journal, singles.saves, words, torch.where(stored, slot, NO_SLOT).squeeze(-1))
    place = (index == target) & stored & opens
    words.scatter(pages.rank, torch.where(place, own, rank).int())
    born = torch.where(place, singles.positions, words.gather(pages.born))
    words.scatter(pages.born, born.int())
    words.scatter(pages.score, torch.where(place, score[..., -1:], score[..., :-1]))
    if pages.token is not None:
        words.scatter(pages.token, torch.where(place, stream, words.gather(pages.token)).int())
    _write_kv(pages, words, slot.squeeze(-1), stored.squeeze(-1), new_kv)


def _save(journal: Journal, saves: torch.Tensor, words: _Words, slots: torch.Tensor) -> None:
    """Save what draft tokens are about to change; ``slots`` is int64 ``[B, S]``."""
    for row, place in enumerate(saves.tolist()):
        if place >= 0:
            blocks = words.pages[row][words.used[row]]
            journal.save_words(place, blocks)
            journal.save_slots(place, blocks, slots[row])


def _compared(pages: Pages, singles: Singles, words: _Words, score: torch.Tensor) -> torch.Tensor:
    """Values that rules compare: scores, or scores per query since the unit's first token."""
    per_age = singles.column(PER_AGE) != 0
    if not per_age.any():
        return score
    assert pages.token is not None, "ages need units' indices"
    age = singles.column(STREAM) + 1 - words.gather(pages.token)
    age = torch.nn.functional.pad(age.clamp_min(1), (0, 1), value=1)
    return torch.where(per_age, score / age, score)


def _write_kv(
    pages: Pages, words: _Words, target: torch.Tensor, stored: torch.Tensor, new_kv: torch.Tensor
) -> None:
    """Write each head set's row to its slot; ``target`` and ``stored`` are ``[B, S]``."""
    num_heads = new_kv.shape[1]
    target, stored = target.expand(-1, num_heads), stored.expand(-1, num_heads)
    block = words.pages.gather(1, target // pages.block_size)
    head = torch.arange(num_heads).expand_as(target)
    parts = (block, head, target % pages.block_size, new_kv)
    block, head, offset, new_kv = (part[stored] for part in parts)
    pages.write_rows((block, head, offset), new_kv)
