# SPDX-License-Identifier: Apache-2.0
"""Which evicted units queries ask for: the judge, in plain PyTorch.

Keys are judged as if they all stood where a recalled unit will: in the middle of the recalled
ones. They are kept as they were before rotation, in 8 bits, and queries are turned back by that
position. If a query attended to the whole store, its keys would get probabilities: a unit is worth
the largest of its keys' and their mean, as a share of all units'. Of several queries the largest
share counts, and the mean over a set's query heads is what is compared. The largest alone would
often be exactly equal: in a first layer equal tokens have equal keys. Queries are taken in 15 bits,
so that products are of integers where that is fast. Docs: INTERNALS.md, "Recall"; what other judges
find: RESULTS.md.
"""

import numpy as np
import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.models.rotary import rotate
from vllm_cascade.recall.log import Part

LEVELS = 127
"""Steps of a key's largest channel."""
QUERY_LEVELS = 127 * 128
"""Steps of a query's."""


def encode(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in 8 bits, each with a scale of its own.

    Args:
        keys: fp32 ``[..., D]``, before rotation.

    Returns:
        int8 of the same shape, and fp32 ``[...]``.
    """
    scale = keys.abs().amax(-1) / LEVELS
    steps = keys / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps.round().to(torch.int8), scale


def by_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., unit, D]`` as a log has them, ``[..., D / 4, unit, 4]``."""
    return codes.unflatten(-1, (-1, 4)).transpose(-2, -3)


def rounded(queries: torch.Tensor) -> torch.Tensor:
    """Queries ``[..., D]`` in 15 bits, for products of integers; fp32 as they come."""
    step = queries.abs().amax(-1, keepdim=True) / QUERY_LEVELS
    return (queries / step.clamp_min(torch.finfo(torch.float32).tiny)).round() * step


def unrotated(layer: LayerConfig, vectors: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """fp32 ``[..., D]`` vectors as they were before they were rotated to ``[...]`` positions."""
    vectors = vectors.float()
    if layer.rotation is None:
        return vectors
    return rotate(vectors, layer.rotation[position.long()], layer.is_neox)


def asking(num_tokens: int, most: int) -> np.ndarray:
    """Which tokens of a stride choose: all, or ``most`` that are evenly spread, the last among
    them."""
    if num_tokens <= most:
        return np.arange(num_tokens)
    return (np.arange(1, most + 1) * num_tokens) // most - 1


def asked(layer: LayerConfig, index: int, units: Part, queries: torch.Tensor) -> torch.Tensor:
    """How much each query head asks for each unit, fp32 ``[H, G, len(units)]``.

    Args:
        index: of the layer.
        queries: fp32 ``[Q, H * G, D]``, rotated as far beyond the units, times the scale of logits.
    """
    logits = []
    grouped = queries.unflatten(1, (layer.num_kv_heads, -1)).permute(1, 2, 0, 3)
    flat = rounded(grouped.flatten(1, 2))  # [H, G * Q, D]
    for chunk, which, _ in units.pieces():
        codes = chunk.codes[index, :, which].float()  # [H, n, D / 4, unit, 4]
        keys = codes.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2)  # [H, D, n * unit]
        products = torch.matmul(flat, keys)
        logits.append(products * chunk.scale[index, :, which].flatten(1).unsqueeze(1))
    probs = torch.cat(logits, dim=-1).softmax(-1)  # [H, G * Q, n * unit]
    of_units = probs.unflatten(-1, (-1, units.chunks[0].codes.shape[4]))
    worth = of_units.amax(-1) + of_units.mean(-1)
    worth /= worth.sum(-1, keepdim=True)
    return worth.unflatten(1, grouped.shape[1:3]).amax(2)


def over_heads(layer: LayerConfig, found: torch.Tensor) -> torch.Tensor:
    """The mean over each set's query heads, of all ranks where they share a set: ``[sets, n]``."""
    if layer.gather_heads is not None:
        found = layer.gather_heads(found)
    if layer.num_sets == 1:
        return found.flatten(0, 1).mean(0, keepdim=True)
    return found.mean(1)


def most_asked(evidence: np.ndarray, num: int) -> np.ndarray:
    """int64 ``[num]``: the places of the largest values; of equal ones the first."""
    least = np.partition(evidence, len(evidence) - num)[len(evidence) - num]
    more = np.flatnonzero(evidence > least)
    equal = np.flatnonzero(evidence == least)[: num - len(more)]
    return np.concatenate([more, equal])
