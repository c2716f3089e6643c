# SPDX-License-Identifier: Apache-2.0
"""Which evicted units queries ask for: the judge, in plain PyTorch.

Keys are judged as they were before rotation, so where they stood does not matter, and in 8 bits. A
query's evidence for a unit is the probability that its tokens would receive if the query attended
to the whole store; of several queries the largest counts, and the mean over a set's query heads is
what is compared. A sum over a unit's keys, because their maximum is often exactly equal: in a first
layer equal tokens have equal keys. Docs: INTERNALS.md, "Recall".
"""

import numpy as np
import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.cache.positions import rotate
from vllm_cascade.recall.log import Part

LEVELS = 127


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


def evidence(layer: LayerConfig, index: int, units: Part, queries: torch.Tensor) -> torch.Tensor:
    """How much each unit is asked for, fp32 ``[sets, len(units)]``.

    Args:
        index: of the layer.
        queries: fp32 ``[Q, H * G, D]``, before rotation.
    """
    logits = []
    grouped = (queries * layer.scale).unflatten(1, (layer.num_kv_heads, -1)).permute(1, 2, 0, 3)
    flat = grouped.flatten(1, 2)  # [H, G * Q, D]
    for chunk, which, _ in units.pieces():
        codes = chunk.codes[index, :, which].float().flatten(1, 2)
        products = torch.matmul(flat, codes.transpose(1, 2))
        logits.append(products * chunk.scale[index, :, which].flatten(1).unsqueeze(1))
    probs = torch.cat(logits, dim=-1).softmax(-1)  # [H, G * Q, n * unit]
    unit = units.chunks[0].codes.shape[3]
    asked = probs.unflatten(-1, (-1, unit)).sum(-1).unflatten(1, grouped.shape[1:3]).amax(2)
    if layer.gather_heads is not None:
        asked = layer.gather_heads(asked)
    if layer.num_sets == 1:
        return asked.flatten(0, 1).mean(0, keepdim=True)
    return asked.mean(1)


def choose(
    layer: LayerConfig, index: int, units: Part, queries: torch.Tensor, num: int
) -> torch.Tensor:
    """int64 ``[sets, num]``: the units with most evidence; of equal ones those stored first."""
    if num == len(units):  # all that there are
        return torch.arange(num).expand(layer.num_sets, -1)
    found = evidence(layer, index, units, queries)
    return found.argsort(dim=1, descending=True, stable=True)[:, :num]
