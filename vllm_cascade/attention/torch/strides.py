# SPDX-License-Identifier: Apache-2.0
"""One request's stride in plain PyTorch: attend, update scores, insert the surviving units.

Shapes: ``T`` new tokens, ``n`` cached tokens, ``H`` KV heads, ``G`` query heads per KV head, ``S``
head sets (1 or H), ``N`` slots, ``D`` channels, ``u`` cached units, ``V`` new units, the last of
which may be incomplete. New tokens that do not survive are never written to a page.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.torch.merge import merge_deleted
from vllm_cascade.cache.layout import Pages
from vllm_cascade.models.rotary import rotate, signed_rotation
from vllm_cascade.policies.schedule import Schedule, compared
from vllm_cascade.step.inputs import Stride

QUERY_TILE_ELEMENTS = 1 << 23
"""Logits in memory at once: 32 MiB in fp32."""


def attend_and_insert(
    layer: LayerConfig,
    pages: Pages,
    stride: Stride,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    evicted: Evicted | None = None,
) -> torch.Tensor:
    """Attend from a stride's tokens and update the pages.

    Args:
        query: ``[T, H * G, D]``, rotated at the stride's positions.
        key: ``[T, H, D]``, rotated likewise.
        value: ``[T, H, value_size]``.
        evicted: receives the evicted units, if given.

    Returns:
        The attention output, fp32 ``[T, H * G, value_size]``.
    """
    assert stride.cached % pages.unit == 0, "a stride begins where a unit does"
    order = chronological_units(pages, stride)
    seen = _arrangement(pages, stride, order)
    keys, values = _kv_at_positions(layer, pages, stride, order if seen is None else seen.slots)
    output, mass = _attend(layer, stride, query, key, value, keys, values)
    if layer.part == "attend":
        return output
    scores = _new_scores(layer, pages, stride, order, mass, seen)
    schedule = stride.schedule
    keep = _survivors(schedule, stride, _compared(pages, stride, order, scores))
    new_kv = layer.row(key, value)
    if schedule.units.merge_into is not None:
        new_kv = merge_deleted(layer, pages, stride, order, keep, scores, new_kv)
    if evicted is not None:
        _take_evicted(pages, stride, order, keep, new_kv, evicted)
    _insert(layer, pages, stride, order, keep, scores, new_kv)
    return output


def chronological_units(pages: Pages, stride: Stride) -> torch.Tensor:
    """int64 ``[S, u]``: indices of the units that hold cached tokens, oldest first."""
    rank = _gather_words(pages.rank, stride)
    first_slot = torch.arange(rank.shape[-1]) * pages.unit
    empty = (rank < 0) | (first_slot >= stride.old_slots)  # sorted to the end and cut off
    order = rank.masked_fill(empty, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)
    return order[:, : stride.cached // pages.unit]


def _members(units: torch.Tensor, unit: int) -> torch.Tensor:
    """``[S, u * unit]``: the slots or tokens of units, in order."""
    return (units.unsqueeze(-1) * unit + torch.arange(unit)).flatten(1)


def _survivors(schedule: Schedule, stride: Stride, values: torch.Tensor) -> torch.Tensor:
    """bool ``[S, u + V]``: units to keep. Recalled units and an incomplete unit always stay."""
    filling = int(stride.num_tokens % schedule.unit > 0)
    plan = schedule.plan(stride.stream, stride.num_tokens)
    values = values[:, : values.shape[1] - filling]
    sinks = schedule.units.num_sinks if stride.recalled else 0
    own = torch.cat([values[:, :sinks], values[:, sinks + stride.recalled :]], dim=1)
    keep = schedule.survivors(own, plan)
    recalled = keep.new_ones(len(keep), stride.recalled)
    keep = torch.cat([keep[:, :sinks], recalled, keep[:, sinks:]], dim=1)
    return torch.nn.functional.pad(keep, (0, filling), value=True)


def _take_evicted(
    pages: Pages,
    stride: Stride,
    order: torch.Tensor,
    keep: torch.Tensor,
    new_kv: torch.Tensor,
    evicted: Evicted,
) -> None:
    """Copy the evicted units before their slots are overwritten."""
    assert pages.token is not None, "recall keeps units' indices"
    unit, cached = pages.unit, order.shape[1]
    whole = len(new_kv) // unit
    own = new_kv[: whole * unit].transpose(0, 1).unflatten(1, (whole, unit))
    parts = [  # [H, N / unit, unit, row_size or 2], in the pages' dtype
        (to, stored[stride.blocks].transpose(0, 1).flatten(1, 2).unflatten(1, (-1, unit)), fresh)
        for to, stored, fresh in zip(
            (evicted.rows, evicted.scale), (pages.kv, pages.scale), pages.stored(own), strict=True
        )
        if to is not None and stored is not None and fresh is not None
    ]
    born, token = (_gather_words(words, stride) for words in (pages.born, pages.token))
    for head_set, (line, stays) in enumerate(zip(order, keep, strict=True)):
        gone = (~stays).nonzero()[:, 0]
        old, new = line[gone[gone < cached]], gone[gone >= cached] - cached
        heads = slice(None) if len(order) == 1 else slice(head_set, head_set + 1)
        for to, kept, fresh in parts:
            to[heads] = torch.cat([kept[heads, old], fresh[heads, new]], dim=1)
        evicted.born[head_set] = torch.cat([born[head_set, old], stride.cached + new * unit])
        evicted.token[head_set] = torch.cat([token[head_set, old], stride.stream + new * unit])


@dataclass(frozen=True)
class _Arrangement:
    """Ranks and slots of the cached tokens by position, int64 ``[S, n]``."""

    ranks: torch.Tensor
    slots: torch.Tensor


def _arrangement(pages: Pages, stride: Stride, order: torch.Tensor) -> _Arrangement | None:
    """The policy's order of positions; None if positions follow chronological ranks."""
    schedule = stride.schedule
    if not schedule.policy.arranges:
        return None
    values, age = _gather_words(pages.score, stride).gather(1, order), None
    if schedule.scoring.per_age:
        assert pages.token is not None, "ages need units' indices"
        age = stride.stream - _gather_words(pages.token, stride).gather(1, order)
    inserted = int(schedule.inserted(np.asarray(stride.stream)))
    ranks = schedule.units.arrange(compared(schedule.scoring, values, age), inserted)
    return _Arrangement(ranks, order.gather(1, ranks))


def _new_scores(
    layer: LayerConfig,
    pages: Pages,
    stride: Stride,
    order: torch.Tensor,
    mass: torch.Tensor,
    seen: _Arrangement | None,
) -> torch.Tensor:
    """Scores of units after the stride's queries, chronological, fp32 ``[S, u + V]``."""
    cached, num_tokens, unit = order.shape[1], stride.num_tokens, pages.unit
    mass = torch.nn.functional.pad(mass, (0, -num_tokens % unit))
    mass = mass.unflatten(-1, (-1, unit)).sum(-1)
    scores = torch.zeros(layer.num_sets, mass.shape[-1])
    old = _gather_words(pages.score, stride).gather(1, order)
    scoring = stride.schedule.scoring
    if scoring.source == "attention":
        scores = layer.reduce_heads(mass)
        if seen is not None:
            scores[:, :cached] = torch.empty_like(old).scatter_(1, seen.ranks, scores[:, :cached])
        scores[:, :cached] += scoring.decay**num_tokens * old
    elif stride.given is not None:
        scores[:, :cached] = old
        skip = max(-stride.scored, 0)
        given = stride.given[skip:]
        places = (torch.arange(len(given)) + stride.scored + skip) // unit
        scores.index_add_(1, places, layer.own_scores(given[None], unit))
    elif stride.schedule.policy.merge_into is not None:
        scores[:, :cached] = old  # tokens merged into each centre
    return scores


def _compared(
    pages: Pages, stride: Stride, order: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Values that the rules compare: scores, or a function of scores and ages."""
    scoring, age = stride.schedule.scoring, None
    if scoring.per_age:
        assert pages.token is not None, "ages need units' indices"
        old = _gather_words(pages.token, stride).gather(1, order)
        new = torch.arange(stride.stream, stride.end, pages.unit).expand(len(old), -1)
        age = stride.end - torch.cat([old, new], dim=1)
    return compared(scoring, scores, age)


def _gather_words(words: torch.Tensor, stride: Stride) -> torch.Tensor:
    """One per-unit field of the stride's pages, ``[S, N / unit]``."""
    return words[stride.blocks].transpose(0, 1).flatten(1)


def _scatter_words(words: torch.Tensor, stride: Stride, values: torch.Tensor) -> None:
    words[stride.blocks] = values.unflatten(1, (len(stride.pages), -1)).transpose(0, 1)


def _kv_at_positions(
    layer: LayerConfig, pages: Pages, stride: Stride, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached keys, rotated at their current positions, and values.

    Args:
        order: int64 ``[S, u]``, units in order of position.

    Returns:
        Keys ``[H, n, D]`` and values ``[H, n, value_size]``, fp32, in order of position.
    """
    kv = pages.rows(stride.blocks).transpose(0, 1).flatten(1, 2)  # [H, N, row_size]
    slots = _members(order, pages.unit)
    index = slots.expand(layer.num_kv_heads, -1).unsqueeze(-1).expand(-1, -1, kv.shape[-1])
    keys, values = layer.split(kv.gather(1, index).float())
    if stride.moved and layer.rotation is not None:
        born = _gather_words(pages.born, stride).gather(1, order)
        position = torch.arange(0, stride.cached, pages.unit, dtype=torch.int32) + stride.shift
        distance = born - position
        distance = distance.repeat_interleave(pages.unit, dim=1)
        keys = rotate(keys, signed_rotation(layer.rotation, distance), layer.is_neox)
    return keys, values


def _attend(
    layer: LayerConfig,
    stride: Stride,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, H * G, value_size]`` and weighted attention mass ``[H, G, n + T]``.

    The mass of a key is ``weight * sum_q decay**(T - 1 - q) * p[q, key]``. T single-token updates
    with a frozen cache would add the same (docs/ALGORITHMS.md, "Scores").
    """
    keys = torch.cat([keys, key.float().transpose(0, 1)], dim=1)  # [H, n + T, D]
    values = torch.cat([values, value.float().transpose(0, 1)], dim=1)
    queries = query.float().unflatten(1, (layer.num_kv_heads, -1)).permute(1, 2, 0, 3)
    scoring = stride.schedule.scoring
    num_tokens, total = stride.num_tokens, keys.shape[1]
    tile = max(QUERY_TILE_ELEMENTS // (query.shape[1] * total), 1)
    output = queries.new_empty(*queries.shape[:3], layer.value_size)
    mass = torch.zeros(*queries.shape[:2], total)
    for begin in range(0, num_tokens, tile):
        end = min(begin + tile, num_tokens)
        visible = stride.cached + end  # later keys are masked for the whole tile
        rows = torch.arange(begin, end)
        logits = torch.matmul(queries[:, :, begin:end], keys[:, None, :visible].transpose(2, 3))
        logits.mul_(layer.scale)
        if stride.logit_scale is not None:
            logits.mul_(stride.logit_scale[begin:end, None])
        logits = layer.soft_cap(logits)
        position = stride.cached + rows[:, None]
        distance = torch.arange(visible) - position  # [tile, visible], 0 on the diagonal
        if layer.slopes is not None:
            logits += layer.slopes[:, :, None, None] * distance
        unseen = distance > 0
        if layer.chunked and layer.window is not None:
            unseen |= torch.arange(visible) < position - position % layer.window
        elif layer.window is not None:
            unseen |= distance <= -layer.window
        logits.masked_fill_(unseen, -torch.inf)
        probs = layer.softmax(logits)
        output[:, :, begin:end] = torch.matmul(probs, values[:, None, :visible])
        if scoring.source == "attention":
            decay = scoring.decay ** (num_tokens - 1 - rows).double()
            weight = scoring.weight * decay
            mass[..., :visible] += torch.matmul(weight.float(), probs)
    return output.permute(2, 0, 1, 3).flatten(1, 2), mass


def _insert(
    layer: LayerConfig,
    pages: Pages,
    stride: Stride,
    order: torch.Tensor,
    keep: torch.Tensor,
    scores: torch.Tensor,
    new_kv: torch.Tensor,
) -> None:
    """Renumber the surviving units and write the new ones into free slots."""
    num_sets, cached, unit = len(order), order.shape[1], pages.unit
    num_places = len(stride.pages) * pages.block_size // unit
    keep_old, keep_new = keep.split([cached, keep.shape[1] - cached], dim=1)
    ranks = keep.cumsum(1) - 1
    old_ranks, new_ranks = ranks.split([cached, keep_new.shape[1]], dim=1)
    place_rank = torch.full((num_sets, num_places), -1, dtype=torch.int64)
    place_rank.scatter_(1, order, torch.where(keep_old, old_ranks, -1))
    # The k-th surviving new unit takes the k-th free place.
    free = (place_rank >= 0).int().argsort(dim=1, stable=True)
    nth = (keep_new.cumsum(1) - 1).clamp_min(0)
    target = free.gather(1, nth.clamp_max(num_places - 1))  # [S, V]
    head_set, new = keep_new.nonzero(as_tuple=True)
    place = target[head_set, new]
    place_rank[head_set, place] = new_ranks[head_set, new]
    _scatter_words(pages.rank, stride, place_rank.int())

    written_at = stride.position + new * unit
    if stride.num_tokens % unit and unit > 1:
        settled = int(new_ranks[0, -1]) + stride.recalls_more
        new_kv, last = _settle(layer, stride, new_kv, unit, settled)
        written_at = torch.where(new == keep_new.shape[1] - 1, last, written_at)
    born = _gather_words(pages.born, stride)
    born[head_set, place] = written_at.int()
    _scatter_words(pages.born, stride, born)
    score = _gather_words(pages.score, stride)
    score.scatter_(1, order, scores[:, :cached])
    score[head_set, place] = scores[head_set, cached + new]
    _scatter_words(pages.score, stride, score)
    if pages.token is not None:
        index = _gather_words(pages.token, stride)
        index[head_set, place] = (stride.stream + new * unit).int()
        _scatter_words(pages.token, stride, index)
    _write_kv(pages, stride, head_set, new, place, new_kv, per_head=num_sets > 1)


def _settle(
    layer: LayerConfig, stride: Stride, new_kv: torch.Tensor, unit: int, rank: int
) -> tuple[torch.Tensor, int]:
    """Rotate the keys of an incomplete last unit to the position given by the unit's rank.

    The unit's remaining tokens arrive after the stride's evictions, at positions that continue from
    the unit's new rank. Moving the keys now lets one ``born`` value describe the whole unit.

    Args:
        rank: the unit's rank after the stride.

    Returns:
        ``[T, H, row_size]``, fp32 if keys were rotated, and the position of the unit's first token.
    """
    begin = stride.num_tokens - stride.num_tokens % unit
    distance = stride.cached + begin - rank * unit
    if layer.rotation is None or distance == 0:
        return new_kv, rank * unit
    new_kv = new_kv.to(torch.float32, copy=True)
    keys = new_kv[begin:, :, : layer.head_size]
    keys[:] = rotate(keys, layer.rotation[distance], layer.is_neox)
    return new_kv, rank * unit


def _write_kv(
    pages: Pages,
    stride: Stride,
    head_set: torch.Tensor,
    new: torch.Tensor,
    place: torch.Tensor,
    new_kv: torch.Tensor,
    per_head: bool,
) -> None:
    """Write the rows of surviving units. Unless ``per_head``, all heads share slots."""
    token, slot = (_members(units[None], pages.unit)[0] for units in (new, place))
    there = token < len(new_kv)
    token, slot = token[there], slot[there]
    head_set = head_set.repeat_interleave(pages.unit)[there]
    block, offset = stride.blocks[slot // pages.block_size], slot % pages.block_size
    if per_head:
        pages.write_rows((block, head_set, offset), new_kv[token, head_set])
    else:
        pages.write_rows((block, slice(None), offset), new_kv[token])
