# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of vLLM's models: which layer uses which, and rotation by ``rank - born``."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import (
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index

from vllm_cascade.models.architectures import is_unrotated, skips_unknown
from vllm_cascade.policies.settings import KVPolicyError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


RotaryModule = RotaryEmbeddingBase | Phi3LongRoPEScaledRotaryEmbedding
"""What vLLM's models rotate with; the latter is a class of its own."""


@dataclass(frozen=True)
class Rotary:
    """How one layer's keys are rotated.

    Attributes:
        inv_freq: fp32 ``[rotary_dim / 2]``, radians per position.
        is_neox: pairs are (i, i + rotary_dim/2); otherwise (2i, 2i + 1).
    """

    inv_freq: torch.Tensor
    is_neox: bool

    def table(self, max_distance: int, forward: int = 0) -> torch.Tensor:
        """cos and sin of a rotation by ``-d`` for ``d`` in ``[-forward, max_distance]``.

        Returns:
            fp32 ``[forward + max_distance + 1, 2, rotary_dim / 2]``.
        """
        distance = torch.arange(-forward, max_distance + 1, dtype=torch.float64)
        angle = -distance[:, None] * self.inv_freq.double()
        return torch.stack([angle.cos(), angle.sin()], dim=1).float()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` channels of fp32 vectors; the others pass.

    Args:
        x: ``[..., head_size]``.
        cos_sin: ``[..., 2, rotary_dim / 2]``, broadcast against ``x``'s leading axes.
    """
    cos, sin = cos_sin.unbind(-2)
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if is_neox:
        first, second = rotary[..., :half], rotary[..., half:]
        parts = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)
    first, second = rotary[..., 0::2], rotary[..., 1::2]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = turned.flatten(-2)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def signed_rotation(table: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """cos and sin of rotations by ``-distance``, also forwards, from a table of ``Rotary.table``.

    Args:
        distance: int ``[...]``.

    Returns:
        fp32 ``[..., 2, rotary_dim / 2]``.
    """
    cos, sin = table[distance.abs().long()].unbind(-2)
    sign = torch.where(distance < 0, -1.0, 1.0)[..., None]
    return torch.stack([cos, sin * sign], dim=-2)


def rotary_of(module: RotaryModule) -> Rotary:
    """The frequencies of one of vLLM's rotary modules, checked against its own cos/sin cache.

    With several axes (M-RoPE) they are those of text, whose axes are all equal.

    Raises:
        KVPolicyError: a variant whose rotation is not ``position * inv_freq``.
    """
    kind = type(module)
    scale = 1.0
    if kind is Phi3LongRoPEScaledRotaryEmbedding:
        return _long_rotary(module)
    if kind in (RotaryEmbedding, Llama3RotaryEmbedding, Gemma4RotaryEmbedding):
        inv_freq = module._compute_inv_freq(module.base)
    elif kind is LinearScalingRotaryEmbedding and len(module.scaling_factors) == 1:
        inv_freq = module._compute_inv_freq(module.base) / module.scaling_factors[0]
    elif kind is YaRNScalingRotaryEmbedding:
        inv_freq, scale = module._compute_inv_freq(module.scaling_factor), module.mscale
    elif kind is MRotaryEmbedding:
        of = module.base if module.scaling_factor is None else module.scaling_factor
        inv_freq, scale = module._compute_inv_freq(of), module.mscale
    else:
        raise KVPolicyError(
            f"kv_policy: {kind.__name__} has no single frequency table, so cached keys cannot be "
            f"moved to new positions; supported rope types: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    inv_freq = inv_freq.float().cpu()
    last = min(module.cos_sin_cache.shape[0], module.max_position_embeddings) - 1
    _check_table(module, module.cos_sin_cache, inv_freq, scale, last)
    return Rotary(inv_freq, module.is_neox_style)


def _long_rotary(module: Phi3LongRoPEScaledRotaryEmbedding) -> Rotary:
    """LongRoPE's, of the table that the engine runs with; both lie in one cache."""
    first, factors, scale = 0, module.short_factor, module.short_mscale
    last = module.original_max_position_embeddings - 1
    if module.use_long_rope:
        first, factors, scale = last + 1, module.long_factor, module.long_mscale
        last = module.max_position_embeddings - 1
    inv_freq = module._compute_inv_freq(factors).float().cpu()
    cache = nn.Module.get_buffer(module, "long_short_cos_sin_cache")
    _check_table(module, cache[first:], inv_freq, scale, last)
    return Rotary(inv_freq, is_neox=True)


def choose_long_tables(model: nn.Module, max_position: int) -> None:
    """Have LongRoPE use one of its two tables, by the positions that a policy uses.

    vLLM decides by ``--max-model-len``, which says nothing of positions here: below those that the
    model was first trained with, the table for short streams is the better one however long a
    stream is.
    """
    for module in model.modules():
        if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
            module.use_long_rope = max_position > module.original_max_position_embeddings


def _check_table(
    module: nn.Module, table: torch.Tensor, inv_freq: torch.Tensor, scale: float, last: int
) -> None:
    """vLLM's cache must be what these frequencies give: a new release may change its meaning."""
    cache = table.detach().float().cpu()
    position = torch.tensor([1, 7, last])
    angle = position[:, None].float() * inv_freq
    expected = torch.cat([angle.cos(), angle.sin()], dim=-1) * scale
    tolerance = 1e-3 if table.dtype == torch.float32 else 2e-2
    if not torch.allclose(cache[position], expected, atol=tolerance * max(scale, 1.0)):
        raise KVPolicyError(
            f"kv_policy: {type(module).__name__}'s cos/sin cache is not that of its frequencies; "
            "this vLLM version computes rotary positions in a way the plugin does not know"
        )


def find_rotaries(
    model: nn.Module, layers: dict[str, Attention], config: Any = None
) -> dict[str, Rotary | None]:
    """The rotation of every attention layer; None where it uses ALiBi, or no positions at all.

    The rotary module is the one that belongs to the same attention block: the nearest enclosing
    module that has any, be it for this layer or for all of them. Another layer's is none of this
    one's. Models with modules of transformers' are asked instead (``probe.py``).

    Args:
        config: the text model's; None: all layers rotate.

    Raises:
        KVPolicyError: a layer with no rotary module and no ALiBi, or with two kinds of it.
    """
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items() if isinstance(module, Attention)}
    known: dict[RotaryModule, Rotary] = {}
    result: dict[str, Rotary | None] = {}
    for layer_name, layer in layers.items():
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            result[layer_name] = None
            continue
        if config is not None:
            index = extract_layer_index(layer_name)
            if is_unrotated(config, index, layer.sliding_window is not None):
                result[layer_name] = None
                continue
        module = _enclosing_rotary(modules, names.get(layer, ""), layer_name)
        if module not in known:
            known[module] = rotary_of(module)
        result[layer_name] = known[module]
    return result


def _enclosing_rotary(modules: dict[str, nn.Module], name: str, layer_name: str) -> RotaryModule:
    while name:
        name = name.rpartition(".")[0]
        if skips_unknown(modules[name]):
            raise KVPolicyError(
                f"kv_policy: {layer_name} may have no rotary positions although others have, or "
                f"other channels with them, and how {type(modules[name]).__name__} decides that is "
                "not known; use --kv-policy full for this model"
            )
        found = _own_rotaries(modules[name])
        if len(found) == 1:
            return found.pop()
        if found:
            raise KVPolicyError(f"kv_policy: {layer_name} has more than one rotary embedding")
    raise KVPolicyError(
        f"kv_policy: {layer_name} has neither rotary embeddings nor ALiBi, so cached keys cannot "
        "be moved to new positions; use --kv-policy full for this model"
    )


def _own_rotaries(block: nn.Module) -> set[RotaryModule]:
    """Rotary modules in a block of one attention layer; of several, only what they share."""
    several = sum(isinstance(module, Attention) for module in block.modules()) > 1
    candidates = block.children() if several else block.modules()
    return {module for module in candidates if isinstance(module, RotaryModule)}


def alibi_slopes(slopes: list[float] | torch.Tensor | None) -> torch.Tensor | None:
    """fp32 ``[num_heads]`` slopes of ALiBi, None where the model uses none."""
    if slopes is None:
        return None
    slopes = torch.as_tensor(slopes, dtype=torch.float32)
    assert all(math.isfinite(slope) for slope in slopes.tolist())
    return slopes
