# SPDX-License-Identifier: Apache-2.0
"""One new token for many requests at once: attend, update scores, insert. Plain PyTorch.

Shapes: ``B`` requests, ``H`` KV heads, ``G`` query heads a KV head, ``S`` head sets (1 or H),
``N`` slots, ``D`` channels. Scores, logits and softmax statistics are fp32.
"""

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.metadata import TokenBatch
from vllm_cascade.cache.layout import Pages
from vllm_cascade.cache.positions import rotate

NEVER = torch.iinfo(torch.int32).max


def attend_and_insert(
    layer: LayerConfig,
    pages: Pages,
    batch: TokenBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attention output of one token a request; the pages then hold the next state.

    Args:
        query: ``[B, H * G, D]``, rotated at the position ``batch.cached``.
        key: ``[B, H, D]``, rotated likewise.
        value: ``[B, H, D]``.

    Returns:
        fp32 ``[B, H * G, D]``.
    """
    rank = _gather_words(pages.rank, batch)
    slot = torch.arange(rank.shape[-1])
    rank = rank.masked_fill(slot >= batch.old_slots, -1)
    cache = pages.kv[batch.pages].transpose(1, 2).flatten(2, 3)  # [B, H, N, 2D]
    probs, output = _attend(layer, pages, batch, rank, cache, query, key, value)
    score = new_score = None
    if layer.policy.uses_scores:
        mass = layer.reduce_heads(probs)  # [B, S, N + 1]
        decay, weight = layer.policy.decay, layer.policy.weight
        score = decay * _gather_words(pages.score, batch) + weight * mass[..., :-1]
        new_score = weight * mass[..., -1:]
    elif batch.host_scores is not None:
        score = torch.where(
            rank == batch.scored, batch.host_scores, _gather_words(pages.score, batch)
        )
        new_score = torch.zeros(())
    _insert(layer, pages, batch, rank, score, new_score, torch.cat([key, value], dim=-1))
    return output


def _gather_words(words: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """``[B, S, N]`` of one of the per-slot numbers."""
    return words[batch.pages].transpose(1, 2).flatten(2)


def _scatter_words(words: torch.Tensor, batch: TokenBatch, values: torch.Tensor) -> None:
    """Write ``[B, S, N]`` back, except to the null block that pads short rows."""
    paged = values.unflatten(2, (batch.pages.shape[1], -1)).transpose(1, 2)  # [B, P, S, slots]
    if batch.used is None:
        words[batch.pages] = paged
    else:
        request, page = batch.used.unbind(1)
        words[batch.pages[request, page]] = paged[request, page]


def _attend(
    layer: LayerConfig,
    pages: Pages,
    batch: TokenBatch,
    rank: torch.Tensor,
    cache: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities ``[B, H, G, N + 1]`` (the new token last) and the output."""
    size = layer.head_size
    keys, values = cache[..., :size].float(), cache[..., size:]
    empty = rank < 0
    if batch.moved and layer.rotation is not None:
        distance = (_gather_words(pages.born, batch) - rank).masked_fill(empty, 0)
        keys = rotate(keys, layer.rotation[distance.long()], layer.is_neox)
    queries = query.float().unflatten(1, (layer.num_kv_heads, -1))  # [B, H, G, D]
    logits = torch.matmul(queries, keys.transpose(2, 3)) * layer.scale
    own = torch.matmul(queries, key.float().unsqueeze(-1)) * layer.scale  # [B, H, G, 1]
    logits = torch.cat([logits, own], dim=-1)
    if batch.logit_scale is not None:
        logits *= batch.logit_scale
    logits = layer.soft_cap(logits)
    if layer.slopes is not None:
        distance = (rank - batch.cached).unsqueeze(2)  # [B, S, 1, N]
        logits[..., :-1] += layer.slopes[:, :, None] * distance
    logits[..., :-1].masked_fill_(empty.unsqueeze(2), -torch.inf)
    probs = logits.softmax(dim=-1)
    # A slot that holds nothing has probability 0, but its bytes may be NaN in fresh memory.
    values = values.float().masked_fill(empty.unsqueeze(-1), 0.0)
    output = torch.matmul(probs[..., :-1], values)
    output += probs[..., -1:] * value.float().unsqueeze(2)
    return probs, output.flatten(1, 2)


def _insert(
    layer: LayerConfig,
    pages: Pages,
    batch: TokenBatch,
    rank: torch.Tensor,
    score: torch.Tensor | None,
    new_score: torch.Tensor | None,
    new_kv: torch.Tensor,
) -> None:
    """Delete the victim, close the gap in the ranks, put the new token into a free slot."""
    values, new_value = score, new_score
    if score is not None and layer.policy.needs_age:
        age = batch.stream.view(-1, 1, 1) + 1 - _gather_words(pages.token, batch)
        values = layer.policy.comparable(score, age)
        new_value = layer.policy.comparable(new_score, torch.ones_like(new_score))
    victim = _victim(layer, batch, rank, values, new_value)  # [B, S, 1]
    slot = torch.arange(rank.shape[-1])
    hit = rank == victim
    free = torch.where(victim < batch.cached, hit, (rank < 0) & (slot < batch.new_slots))
    target = free.int().argmax(-1, keepdim=True)  # first free slot, [B, S, 1]
    stored = (victim != batch.cached) & free.any(-1, keepdim=True)
    place = (slot == target) & stored
    new_rank = batch.cached - (victim < batch.cached).long()
    rank = torch.where(place, new_rank, torch.where(hit, -1, rank - (rank > victim).int()))
    _scatter_words(pages.rank, batch, rank.int())
    born = torch.where(place, batch.cached, _gather_words(pages.born, batch))
    _scatter_words(pages.born, batch, born.int())
    if score is not None:
        _scatter_words(pages.score, batch, torch.where(place, new_score, score))
    if pages.token is not None:
        token = torch.where(place, batch.stream.view(-1, 1, 1), _gather_words(pages.token, batch))
        _scatter_words(pages.token, batch, token.int())
    _write_kv(pages, batch, target.squeeze(-1), stored.squeeze(-1), new_kv)


def _victim(
    layer: LayerConfig,
    batch: TokenBatch,
    rank: torch.Tensor,
    score: torch.Tensor | None,
    new_score: torch.Tensor | None,
) -> torch.Tensor:
    """Rank of the token to delete, ``[B, S, 1]``; ``NEVER`` where the cache still grows."""
    first = torch.where(batch.lo < batch.hi, batch.lo, NEVER).expand(-1, rank.shape[1], -1)
    if score is None or bool((batch.hi - batch.lo <= 1).all()):
        return first
    inside = (rank >= batch.lo) & (rank < batch.hi)
    candidates = score.masked_fill(~inside, torch.inf)
    new_inside = (batch.cached >= batch.lo) & (batch.cached < batch.hi)
    new_candidate = torch.where(new_inside, new_score, torch.inf)
    lowest = torch.minimum(candidates.amin(-1, keepdim=True), new_candidate)
    tied = inside & (candidates == lowest)
    new_tied = new_inside & (new_candidate == lowest)
    if layer.policy.tie == "incoming":  # the later token stays: the earliest of the tied leaves
        old = rank.masked_fill(~tied, NEVER).amin(-1, keepdim=True).long()
        chosen = torch.minimum(old, torch.where(new_tied, batch.cached, NEVER))
    else:
        old = rank.masked_fill(~tied, -1).amax(-1, keepdim=True).long()
        chosen = torch.maximum(old, torch.where(new_tied, batch.cached, -1))
    return torch.where(batch.lo < batch.hi, chosen, NEVER)


def _write_kv(
    pages: Pages,
    batch: TokenBatch,
    target: torch.Tensor,
    stored: torch.Tensor,
    new_kv: torch.Tensor,
) -> None:
    """Write each head set's row to its slot; ``target`` and ``stored`` are ``[B, S]``."""
    num_heads = new_kv.shape[1]
    target, stored = target.expand(-1, num_heads), stored.expand(-1, num_heads)
    block = batch.pages.gather(1, target // pages.block_size)
    offset = target % pages.block_size
    head = torch.arange(num_heads).expand_as(target)
    if batch.may_drop_new:
        block, head, offset, new_kv = (x[stored] for x in (block, head, offset, new_kv))
    pages.kv[block, head, offset] = new_kv.to(pages.kv.dtype)
