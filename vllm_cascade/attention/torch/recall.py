# SPDX-License-Identifier: Apache-2.0
"""Scores evicted units by the queries' attention to them, in plain PyTorch.

1. Keys are stored unrotated in 8 bits. Queries are rotated back by one common position, the middle
   of the recalled units. All keys are scored as if they were at that position.
2. A query attends to the whole store. A unit's worth is the largest probability of its keys plus
   their mean, divided by the sum over all units. The largest probability alone often ties: in the
   first layer equal tokens have equal keys.
3. The worth is maximised over queries and averaged over the query heads of a set.

Queries are rounded to 8 bits, as keys are, so products are integers on every device.
See docs/INTERNALS.md, "Recall".
"""

import numpy as np
import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.models.rotary import rotate, signed_rotation
from vllm_cascade.recall.log import Part

LEVELS = 127
"""Quantisation steps of a key's or query's largest channel."""


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


def rounded(queries: torch.Tensor) -> torch.Tensor:
    """Round fp32 queries ``[..., D]`` to 8 bits; the result is fp32, scaled back."""
    step = queries.abs().amax(-1, keepdim=True) / LEVELS
    return (queries / step.clamp_min(torch.finfo(torch.float32).tiny)).round() * step


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


def asked(layer: LayerConfig, index: int, units: Part, queries: torch.Tensor) -> torch.Tensor:
    """Each query head's worth of each unit, fp32 ``[H, G, len(units)]``.

    Args:
        index: the layer's index in the log.
        queries: fp32 ``[Q, H * G, D]``, rotated back by the units' common position and multiplied
            by the logits' scale.
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
    """Mean over each set's query heads, and over ranks that share the set: ``[sets, n]``."""
    if layer.gather_heads is not None:
        found = layer.gather_heads(found)
    if layer.num_sets == 1:
        return found.flatten(0, 1).mean(0, keepdim=True)
    return found.mean(1)


def most_asked(evidence: np.ndarray, num: int) -> np.ndarray:
    """int64 ``[num]``: indices of the largest values; ties go to the first."""
    least = np.partition(evidence, len(evidence) - num)[len(evidence) - num]
    more = np.flatnonzero(evidence > least)
    equal = np.flatnonzero(evidence == least)[: num - len(more)]
    return np.concatenate([more, equal])
