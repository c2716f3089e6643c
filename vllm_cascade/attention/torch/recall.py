# SPDX-License-Identifier: Apache-2.0
"""Scores evicted units by the queries' attention to them, in plain PyTorch.

1. Keys are stored unrotated in 8 bits. Queries are rotated back by one common position, the middle
   of the recalled units. All keys are scored as if they were at that position.
2. A query attends to the whole store and to the sinks. It gives a unit the probability of the
   unit's keys together. A head that looks for nothing attends to the sinks: without them its
   attention would count as much as that of a head that looks something up.
3. A query head asks for the sum of these probabilities' squares over its queries: several queries
   that look a unit up count more than one, and one that does counts more than many that attend to
   it a little. The last query counts ``LAST`` times: at the end of a prompt the next token depends
   on what it finds. The worth is the most that any query head of a set asks for. Most heads attend
   to nothing in particular; the one that looks something up must not be averaged away.
4. If the text goes on in the next unit, that is worth at least ``NEXT`` of it. A model that copies
   text attends to one token after the other, and the next ones may be on the other side of a unit's
   end before units are selected again.
5. Of more than ``CANDIDATES`` units, a few queries first select candidates by the mean of each
   unit's keys and by their variance. Only candidates are scored by all of their keys, so the cost
   hardly grows with the store. Of each query head, the last query and those with the largest norms
   select and score candidates. The last one may ask for an answer; the larger a query, the more its
   attention differs between units.
6. A query that is not finite asks for nothing. If all are like that, the first units are selected.

Queries are rounded to 8 bits, as keys are, so products are integers on every device.
See docs/INTERNALS.md, "Recall".
"""

import numpy as np
import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.models.rotary import rotate, signed_rotation
from vllm_cascade.recall.log import Chunk, Part

LEVELS = 127
"""Quantisation steps of a key's or query's largest channel."""

CANDIDATES = 512
"""Most units that are scored by all of their keys, unless more are selected."""

FILTERING, JUDGING = 5, 16
"""Most queries of a query head that select candidates, and that score them."""

SPREAD = 0.7
"""Weight of the keys' variance when candidates are selected (``candidates``)."""

LAST = 8.0
"""How many times the last query of a query head counts."""

NEXT = 0.125
"""What of a unit's worth the next unit is worth, at least, if the text goes on in it."""


def encode(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys to 8 bits with one scale per key.

    Args:
        keys: fp32 ``[..., D]``, before rotation.

    Returns:
        int8 codes of the same shape, and fp32 scales ``[...]``.
    """
    scale = keys.abs().amax(-1) / LEVELS
    steps = keys / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps.round().to(torch.int8), scale


def by_words(codes: torch.Tensor) -> torch.Tensor:
    """Reorder codes ``[..., unit, D]`` to the log's layout ``[..., D / 4, unit, 4]``."""
    return codes.unflatten(-1, (-1, 4)).transpose(-2, -3)


def by_keys(words: torch.Tensor) -> torch.Tensor:
    """Undo ``by_words``: ``[..., D / 4, unit, 4]`` to ``[..., unit, D]``."""
    return words.transpose(-2, -3).flatten(-2)


def write_keys(
    chunk: Chunk, index: int, to: slice, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Write the keys of units to a chunk, and their means and variances.

    Args:
        codes: int8 ``[H, n, unit, D]``.
        scale: fp32 ``[H, n, unit]``.
    """
    chunk.codes[index, :, to], chunk.scale[index, :, to] = by_words(codes), scale
    # In fp64, so that the order of the sums does not matter.
    keys = codes.double() * scale.double().unsqueeze(-1)
    mean = keys.mean(-2)
    centre, of_centre = encode(mean.float())
    chunk.centre[index, :, :, to] = centre.unflatten(-1, (-1, 4)).transpose(1, 2)
    chunk.centre_scale[index, :, to] = of_centre
    spread = keys.square().mean((-1, -2)) - mean.square().mean(-1)
    chunk.spread[index, :, to] = spread.clamp_min(0).float()


def unrotated(layer: LayerConfig, vectors: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of ``[..., D]`` vectors to ``[...]`` positions; fp32."""
    vectors = vectors.float()
    if layer.rotation is None:
        return vectors
    return rotate(vectors, layer.rotation[position.long()], layer.is_neox)


def rotated(layer: LayerConfig, vectors: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate fp32 ``[..., D]`` vectors to ``[...]`` positions; undoes ``unrotated``."""
    if layer.rotation is None:
        return vectors
    return rotate(vectors, signed_rotation(layer.rotation, -position), layer.is_neox)


def asking(num_tokens: int, most: int) -> np.ndarray:
    """Tokens of a stride whose queries select units: at most ``most``, evenly spaced, with the last
    token included."""
    if num_tokens <= most:
        return np.arange(num_tokens)
    return (np.arange(1, most + 1) * num_tokens) // most - 1


def largest(queries: torch.Tensor, most: int) -> torch.Tensor:
    """The last query of each head and those with the largest norms in 8 bits, ``most`` at most.

    Args:
        queries: fp32 ``[Q, H * G, D]``.

    Returns:
        int64 ``[most, H * G]``, indices in their order; of equal norms the first ones.
    """
    codes, step = encode(queries)
    norm = (codes.float().square().sum(-1) * step * step).nan_to_num(0, posinf=torch.inf)
    norm[-1] = torch.inf
    return norm.sort(dim=0, descending=True, stable=True).indices[:most].sort(0).values


def taken(queries: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Some of each head's queries ``[Q, H * G, D]``, by ``largest``."""
    return queries.gather(0, which.unsqueeze(-1).expand(-1, -1, queries.shape[-1]))


def to_sinks(layer: LayerConfig, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logarithms of the sums of exponentials over the sinks, fp32 ``[Q, H * G]``; -inf without any.

    Args:
        queries: ``[Q, H * G, D]``, rotated at cache positions.
        keys: ``[H, n, D]``, as in pages: sinks stand where they were written.
    """
    rows = _by_heads(layer, queries.float())
    logits = (rows @ keys.float().transpose(1, 2)) * layer.scale  # [H, G * Q, n]
    return logits.logsumexp(-1).unflatten(1, (-1, len(queries))).flatten(0, 1).T


def choose(
    layer: LayerConfig,
    index: int,
    units: Part,
    queries: torch.Tensor,
    sinks: torch.Tensor,
    num: int,
    most: int | None = None,
) -> list[np.ndarray]:
    """Select the ``num`` units with the highest worth for each set; int64, ascending.

    Args:
        index: the layer's index in the log.
        queries, sinks: as for ``asked``.
        most: units that are scored by all of their keys; of more, candidates are selected first.
            None: ``most_scored``.
    """
    listed = candidates(layer, index, units, queries, most or most_scored(num))
    if listed is not None:
        which = largest(queries, JUDGING)
        queries, sinks = taken(queries, which), sinks.gather(0, which)
    found = over_heads(layer, asked(layer, index, units, queries, sinks, listed))
    worth = np.full((layer.num_sets, len(units)), -1, dtype=np.float32)  # -1: not listed
    for head_set, row in enumerate(found.numpy()):
        worth[head_set, slice(None) if listed is None else listed[head_set].numpy()] = row
    return [np.sort(most_asked(row, num)) for row in with_next(index, units, worth)]


def most_scored(num: int) -> int:
    """Units that are scored by all of their keys where ``num`` are selected."""
    return max(CANDIDATES, num)


def with_next(index: int, units: Part, worth: np.ndarray) -> np.ndarray:
    """The worth of units, at least ``NEXT`` of the one stored before if tokens follow that one's.

    Args:
        index: the layer's index in the log.
        worth: fp32 ``[sets, n]``.
    """
    tokens = torch.cat([chunk.token[index, :, at] for chunk, at, _ in units.pieces()], dim=1)
    follows = np.diff(tokens.numpy()) == units.chunks[0].shape.unit
    handed_on = np.where(follows, np.float32(NEXT) * worth[:, :-1], -1)
    return np.concatenate([worth[:, :1], np.maximum(worth[:, 1:], handed_on)], axis=1)


def candidates(
    layer: LayerConfig, index: int, units: Part, queries: torch.Tensor, most: int
) -> torch.Tensor | None:
    """The ``most`` units that are scored by all of their keys, int64 ``[sets, most]``, ascending.

    A unit's probability is estimated as if the logits of its keys were normally distributed: the
    mean of their exponentials is then the exponential of their mean plus half of their variance.
    Their variance is the query's squared norm times the keys' variance, if that is the same in all
    directions. On text, a weight above one half selects better (``SPREAD``).

    Returns:
        None if these are all units.
    """
    if len(units) <= most:
        return None
    few = taken(queries, largest(queries, FILTERING))
    flat, steps = _rounded(_by_heads(layer, few))
    pieces = units.pieces()
    centre = torch.cat([chunk.centre[index, :, :, at] for chunk, at, _ in pieces], dim=2)
    scale = torch.cat([chunk.centre_scale[index, :, at] for chunk, at, _ in pieces], dim=1)
    spread = torch.cat([chunk.spread[index, :, at] for chunk, at, _ in pieces], dim=1)
    products = flat @ centre.transpose(2, 3).flatten(1, 2).float()  # [H, G * Q, n]
    norms = flat.square().sum(-1, keepdim=True) * steps * steps
    logits = products * scale.unsqueeze(1) * steps + SPREAD * norms * spread.unsqueeze(1)
    worth = logits.softmax(-1).nan_to_num(0).unflatten(1, (-1, len(few))).amax(2)
    rows = over_heads(layer, worth).numpy()
    return torch.from_numpy(np.stack([np.sort(most_asked(row, most)) for row in rows]))


def asked(
    layer: LayerConfig,
    index: int,
    units: Part,
    queries: torch.Tensor,
    sinks: torch.Tensor,
    listed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each query head's worth of each unit, fp32 ``[H, G, n]``.

    Args:
        index: the layer's index in the log.
        queries: fp32 ``[Q, H * G, D]``, rotated back by the units' common position and multiplied
            by the logits' scale.
        sinks: fp32 ``[Q, H * G]``, ``to_sinks`` of the same queries.
        listed: int64 ``[sets, n]``, the units that are scored; None: all of them.
    """
    flat, steps = _rounded(_by_heads(layer, queries))
    pieces = [(c.codes[index, :, at], c.scale[index, :, at]) for c, at, _ in units.pieces()]
    codes, scale = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    if listed is not None:
        head = torch.arange(layer.num_kv_heads).unsqueeze(1)
        codes, scale = codes[head, listed], scale[head, listed]
    keys = codes.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2).float()  # [H, D, n * unit]
    logits = (flat @ keys) * scale.flatten(1).unsqueeze(1) * steps
    nothing = sinks.T.unflatten(0, (layer.num_kv_heads, -1)).flatten(1, 2).unsqueeze(-1)
    probability = torch.cat([logits, nothing], dim=-1).softmax(-1)[..., :-1]
    share = probability.unflatten(-1, scale.shape[1:]).sum(-1).nan_to_num(0)  # [H, G * Q, n]
    times = torch.ones(len(queries))
    times[-1] = LAST
    return (share.square().unflatten(1, (-1, len(queries))) * times.unsqueeze(-1)).sum(2)


def _by_heads(layer: LayerConfig, queries: torch.Tensor) -> torch.Tensor:
    """``[Q, H * G, D]`` to ``[H, G * Q, D]``."""
    return queries.unflatten(1, (layer.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _rounded(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise fp32 queries ``[..., D]``: whole numbers in fp32, and their scales ``[..., 1]``."""
    codes, step = encode(queries)
    return codes.float(), step.unsqueeze(-1)


def over_heads(layer: LayerConfig, found: torch.Tensor) -> torch.Tensor:
    """Largest of each set's query heads, and of ranks that share the set: ``[sets, n]``."""
    if layer.gather_heads is not None:
        found = layer.gather_heads(found)
    if layer.num_sets == 1:
        return found.flatten(0, 1).amax(0, keepdim=True)
    return found.amax(1)


def most_asked(evidence: np.ndarray, num: int) -> np.ndarray:
    """int64 ``[num]``: indices of the largest values; ties go to the first."""
    least = np.partition(evidence, len(evidence) - num)[len(evidence) - num]
    more = np.flatnonzero(evidence > least)
    equal = np.flatnonzero(evidence == least)[: num - len(more)]
    return np.concatenate([more, equal])
