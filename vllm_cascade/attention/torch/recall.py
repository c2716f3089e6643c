# SPDX-License-Identifier: Apache-2.0
"""Scores evicted units by the queries' attention to them, in plain PyTorch.

If more than ``CANDIDATES`` units are stored, bounds select that many of them first, so that the
cost hardly grows with the store. Bounds are the largest and the least value of each channel. They
limit the logit of any key within them:

1. ``BLOCKS`` blocks are selected by the blocks' bounds, from all blocks.
2. ``CANDIDATES`` units are selected by the units' bounds, from all units of these blocks.

``FILTER_QUERIES`` of the queries select both. A query head's value of a unit or block is the
exponential of the limit relative to the query's largest one, maximised over its queries. The heads
of a set are averaged. Ties go to the units that were stored first. The candidates are then scored
key by key:

1. Keys are stored unrotated in 8 bits. Queries are rotated back by one common position, the middle
   of the recalled units. All keys are scored as if they were at that position.
2. A query attends to all candidates. A unit's worth is the largest probability of its keys plus
   their mean, divided by the sum over all units. The largest probability alone often ties: in the
   first layer equal tokens have equal keys.
3. The worth is maximised over queries and averaged over the query heads of a set.

Queries are rounded to 15 bits, so that a device may multiply integers where that is faster.
See INTERNALS.md, "Recall"; RESULTS.md compares other scores.
"""

import numpy as np
import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.models.rotary import rotate
from vllm_cascade.recall.log import BLOCK_UNITS, CANDIDATES, GROUP_BLOCKS, Part

LEVELS = 127
"""Quantisation steps of a key's largest channel."""
QUERY_LEVELS = 127 * 128
"""Quantisation steps of a query's largest channel."""
BLOCKS = 64
"""Blocks whose units may become candidates."""
FILTER_QUERIES = 8
"""Queries that select candidates, at most."""


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


def rounded(queries: torch.Tensor) -> torch.Tensor:
    """Round fp32 queries ``[..., D]`` to 15 bits; the result is fp32, scaled back."""
    step = queries.abs().amax(-1, keepdim=True) / QUERY_LEVELS
    return (queries / step.clamp_min(torch.finfo(torch.float32).tiny)).round() * step


def unrotated(layer: LayerConfig, vectors: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of ``[..., D]`` vectors to ``[...]`` positions; fp32."""
    vectors = vectors.float()
    if layer.rotation is None:
        return vectors
    return rotate(vectors, layer.rotation[position.long()], layer.is_neox)


def asking(num_tokens: int, most: int) -> np.ndarray:
    """Tokens of a stride whose queries select units: at most ``most``, evenly spaced, with the last
    token included."""
    if num_tokens <= most:
        return np.arange(num_tokens)
    return (np.arange(1, most + 1) * num_tokens) // most - 1


def store_bounds(part: Part, index: int, keys: torch.Tensor) -> None:
    """Store the bounds of units and of their blocks.

    Args:
        index: the layer's index in the log.
        keys: fp32 ``[H, len(part), unit, D]``, the units' keys as read from 8 bits.
    """
    if not part.groups:
        return
    codes, scale = _encode_bounds(keys.amax(2), keys.amin(2))
    for chunk, to, place in part.pieces():
        at = torch.arange(to.start, to.stop)
        words = codes[:, place].unflatten(-1, (-1, 4)).transpose(0, 1)  # [n, H, 2, D / 4, 4]
        chunk.bounds[index][:, at // BLOCK_UNITS, :, :, at % BLOCK_UNITS] = words
        chunk.bounds_scale[index, :, to] = scale[:, place]
    for block in part.blocks:
        first = block * BLOCK_UNITS - part.skipped
        numbers = np.arange(first, min(first + BLOCK_UNITS, part.end))
        codes, scale = _unit_bounds(part, index, numbers)
        largest, least = (codes * scale[..., None, None]).unbind(2)
        codes, scale = _encode_bounds(largest.amax(1), least.amin(1))
        group, at = part.groups[block // GROUP_BLOCKS], block % GROUP_BLOCKS
        group.bounds[index][:, :, :, at] = codes.unflatten(-1, (-1, 4))
        group.bounds_scale[index, :, at] = scale


def _encode_bounds(largest: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``[..., 2, D]`` and fp32 ``[...]`` from fp32 ``[..., D]``."""
    codes, scale = encode(torch.cat([largest, least], dim=-1))
    return codes.unflatten(-1, (2, -1)), scale


Bounds = tuple[torch.Tensor, torch.Tensor]
"""Integers in fp32 ``[H, n, 2, D]``, and their scales ``[H, n]``."""


def _unit_bounds(part: Part, index: int, numbers: np.ndarray) -> Bounds:
    """Bounds of units, which are counted from the first unit of ``chunks``."""
    codes, scales = [], []
    for chunk, at in part.picks(numbers - part.begin):
        places = torch.from_numpy(at)
        words = chunk.bounds[index][:, places // BLOCK_UNITS, :, :, places % BLOCK_UNITS]
        codes.append(words.transpose(0, 1).flatten(-2).float())
        scales.append(chunk.bounds_scale[index][:, places])
    return torch.cat(codes, dim=1), torch.cat(scales, dim=1)


def _block_bounds(part: Part, index: int) -> Bounds:
    codes = torch.cat([group.bounds[index] for group in part.groups], dim=3)
    scales = torch.cat([group.bounds_scale[index] for group in part.groups], dim=1)
    which = slice(part.blocks.start, part.blocks.stop)
    return codes[:, :, :, which].permute(0, 3, 1, 2, 4).flatten(-2).float(), scales[:, which]


def candidates(
    layer: LayerConfig, index: int, units: Part, queries: torch.Tensor
) -> list[np.ndarray]:
    """Units that are scored key by key: ascending int64 ``[n]`` for each head set.

    Args:
        queries: as for ``asked``.
    """
    if len(units) <= CANDIDATES:
        return [np.arange(len(units))] * layer.num_sets
    some = queries[torch.from_numpy(asking(len(queries), FILTER_QUERIES))]
    coarse = _in_8_bits(some.unflatten(1, (layer.num_kv_heads, -1)).permute(1, 2, 0, 3))
    found = []
    of_blocks = _limits(layer, coarse, _block_bounds(units, index)).numpy()
    for head_set, limits in enumerate(of_blocks):
        blocks = best(limits, min(BLOCKS, len(limits))) + units.blocks.start
        numbers = (blocks[:, None] * BLOCK_UNITS + np.arange(BLOCK_UNITS)).ravel() - units.skipped
        numbers = numbers[(numbers >= units.begin) & (numbers < units.end)]
        limits = _limits(layer, coarse, _unit_bounds(units, index, numbers))[head_set].numpy()
        found.append(numbers[best(limits, CANDIDATES)] - units.begin)
    return found


def _in_8_bits(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper 8 bits of queries in 15: integers in fp32, and their steps ``[..., 1]``."""
    step = queries.abs().amax(-1, keepdim=True) / QUERY_LEVELS
    levels = (queries / step.clamp_min(torch.finfo(torch.float32).tiny)).round()
    return ((levels + 64) / 128).floor(), step * 128


def _limits(
    layer: LayerConfig, queries: tuple[torch.Tensor, torch.Tensor], bounds: Bounds
) -> torch.Tensor:
    """Each head set's value of ``n`` units or blocks, fp32 ``[sets, n]``.

    Args:
        queries: ``[H, G, Q, D]`` and ``[H, G, Q, 1]``.
    """
    (query, step), (codes, scales) = queries, bounds
    largest, least = codes.unsqueeze(1).transpose(-1, -3).unbind(-2)  # [H, 1, D, n]
    products = query.clamp_min(0) @ largest + query.clamp_max(0) @ least  # of integers: exact
    logits = products * (scales[:, None, None] * step)
    relative = (logits - logits.amax(-1, keepdim=True)).amax(2)
    return over_heads(layer, relative.exp())


def asked(
    layer: LayerConfig, index: int, units: Part, queries: torch.Tensor, which: list[np.ndarray]
) -> torch.Tensor:
    """Each query head's worth of its set's candidates, fp32 ``[H, G, n]``.

    Args:
        index: the layer's index in the log.
        queries: fp32 ``[Q, H * G, D]``, rotated back by the units' common position and multiplied
            by the logits' scale.
        which: each set's candidates, ``n`` units of the part.
    """
    grouped = queries.unflatten(1, (layer.num_kv_heads, -1)).permute(1, 2, 0, 3)
    flat = rounded(grouped.flatten(1, 2))  # [H, G * Q, D]
    logits = []
    for head_set, of_set in enumerate(which):
        heads = slice(None) if layer.num_sets == 1 else slice(head_set, head_set + 1)
        parts = []
        for chunk, at in units.picks(of_set):
            places = torch.from_numpy(at)
            codes = chunk.codes[index, heads][:, places].float()  # [h, n, D / 4, unit, 4]
            keys = codes.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2)  # [h, D, n * unit]
            scale = chunk.scale[index, heads][:, places].flatten(1)
            parts.append(torch.matmul(flat[heads], keys) * scale.unsqueeze(1))
        logits.append(torch.cat(parts, dim=-1))
    probs = torch.cat(logits).softmax(-1)  # [H, G * Q, n * unit]
    of_units = probs.unflatten(-1, (-1, units.chunks[0].codes.shape[4]))
    worth = of_units.amax(-1) + of_units.mean(-1)
    worth /= worth.sum(-1, keepdim=True)
    return worth.unflatten(1, grouped.shape[1:3]).amax(2)


def over_heads(layer: LayerConfig, found: torch.Tensor) -> torch.Tensor:
    """Mean over each set's query heads, and over ranks that share the set: ``[sets, n]``."""
    if layer.gather_heads is not None:
        found = layer.gather_heads(found)
    if layer.num_sets == 1:
        return found.flatten(0, 1).mean(0, keepdim=True)
    return found.mean(1)


def best(values: np.ndarray, num: int) -> np.ndarray:
    """int64 ``[num]``: indices of the largest values, ascending; ties go to the first."""
    least = np.partition(values, len(values) - num)[len(values) - num]
    more = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: num - len(more)]
    return np.sort(np.concatenate([more, equal]))
