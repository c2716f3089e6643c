# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of vLLM's models, and rotation of cached keys to new positions."""

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
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
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import (
    DynamicNTKAlphaRotaryEmbedding,
)
from vllm.model_executor.models.utils import extract_layer_index

from vllm_cascade.models.architectures import is_unrotated, skips_unknown
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.settings import KVPolicyError

SUPPORTED_ROPE_TYPES = (
    *("default", "linear", "llama3", "longrope", "proportional", "yarn"),
    *("deepseek_yarn", "dynamic with alpha"),
)


RotaryModule = RotaryEmbeddingBase | Phi3LongRoPEScaledRotaryEmbedding
"""vLLM's rotary modules. LongRoPE's class does not derive from the common base."""


@dataclass(frozen=True)
class Rotary:
    """Rotation of one layer's keys.

    Attributes:
        inv_freq: fp32 ``[rotary_dim / 2]``, radians per position.
        is_neox: Channel pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
        begin: A head's first rotary channel.
    """

    inv_freq: torch.Tensor
    is_neox: bool
    begin: int = 0


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` channels of fp32 vectors and pass the others through.

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
    """Look up cos and sin of rotations by ``-distance`` in a ``rotation_table``.

    Args:
        table: Its first entry is the rotation by 0.
        distance: int ``[...]``; negative values rotate forwards.

    Returns:
        fp32 ``[..., 2, rotary_dim / 2]``.
    """
    cos, sin = table[distance.abs().long()].unbind(-2)
    sign = torch.where(distance < 0, -1.0, 1.0)[..., None]
    return torch.stack([cos, sin * sign], dim=-2)


def rotary_of(module: Any) -> Rotary:
    """Read the frequencies of a vLLM rotary module and check them against its cos/sin cache.

    M-RoPE has several position axes. Text tokens have equal positions on all of them, so one set of
    frequencies applies.

    Raises:
        KVPolicyError: If the rotation angle is not ``position * inv_freq``.
    """
    kind = type(module)
    scale = 1.0
    if kind is Phi3LongRoPEScaledRotaryEmbedding:
        return _long_rotary(module)
    if kind in (RotaryEmbedding, Llama3RotaryEmbedding, Gemma4RotaryEmbedding):
        inv_freq = module._compute_inv_freq(module.base)
    elif kind is DynamicNTKAlphaRotaryEmbedding:
        power = module.rotary_dim / (module.rotary_dim - 2)
        inv_freq = module._compute_inv_freq(module.base * module.scaling_alpha**power)
    elif kind is LinearScalingRotaryEmbedding and len(module.scaling_factors) == 1:
        inv_freq = module._compute_inv_freq(module.base) / module.scaling_factors[0]
    elif kind in (YaRNScalingRotaryEmbedding, DeepseekScalingRotaryEmbedding):
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
    """Read LongRoPE's frequencies for the table in use; one cache stores both tables."""
    first, factors, scale = 0, module.short_factor, module.short_mscale
    last = module.original_max_position_embeddings - 1
    if module.use_long_rope:
        first, factors, scale = last + 1, module.long_factor, module.long_mscale
        last = module.max_position_embeddings - 1
    inv_freq = module._compute_inv_freq(factors).float().cpu()
    cache = nn.Module.get_buffer(module, "long_short_cos_sin_cache")
    _check_table(module, cache[first:], inv_freq, scale, last)
    return Rotary(inv_freq, is_neox=True)


def longest(policy: Policy, config: ModelConfig) -> int:
    """End (exclusive) of the positions that streams of this engine can reach."""
    return min(policy.max_position, config.max_model_len)


def choose_long_tables(model: nn.Module, max_position: int) -> None:
    """Select LongRoPE's short or long table by the end of the positions (``longest``).

    vLLM selects by ``--max-model-len``, but under a policy positions stay bounded. If they stay
    within the model's original length, the short table is better for streams of any length.
    """
    for module in model.modules():
        if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
            module.use_long_rope = max_position > module.original_max_position_embeddings


def rotate_latent_keys_natively(model: nn.Module) -> None:
    """Make layers of multi-head latent attention rotate with PyTorch's operators.

    They pass rows with an axis of heads. vLLM 0.32's operator for CPUs takes rows without one: it
    would rotate one head's channels only, and at wrong addresses.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadLatentAttentionWrapper) and module.rotary_emb is not None:
            rotary: Any = copy(module.rotary_emb)  # vLLM shares it with other models
            rotary.forward = rotary.forward_native
            module.rotary_emb = rotary


def _check_table(
    module: nn.Module, table: torch.Tensor, inv_freq: torch.Tensor, scale: float, last: int
) -> None:
    """Check vLLM's cos/sin cache against the frequencies, since a release may change its format."""
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
    model: nn.Module, layers: dict[str, Attention | MLAAttention], config: Any = None
) -> dict[str, Rotary | None]:
    """Find the rotation of every attention layer; None for layers with ALiBi or NoPE.

    A layer uses the rotary module of the nearest enclosing module that has one. This module may
    belong to the layer alone or be shared by all layers; rotary modules inside other layers do not
    count. A layer of multi-head latent attention uses the module that its wrapper calls, if any.
    Models from transformers are probed instead (``probe.py``).

    Args:
        config: The text model's configuration; None: all layers rotate.

    Raises:
        KVPolicyError: If a layer has neither a rotary module nor ALiBi, several rotary modules, or
            one that is made for other heads.
    """
    modules = dict(model.named_modules())
    kinds = Attention, MLAAttention
    names = {module: name for name, module in modules.items() if isinstance(module, kinds)}
    known: dict[RotaryModule, Rotary] = {}
    result: dict[str, Rotary | None] = {}
    for layer_name, layer in layers.items():
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            result[layer_name] = None
            continue
        if isinstance(layer, MLAAttention):
            module = _latent_rotary(modules, names.get(layer, ""), layer_name)
            result[layer_name] = None if module is None else rotary_of(module)
            continue
        if config is not None:
            index = extract_layer_index(layer_name)
            if is_unrotated(config, index, layer.sliding_window is not None):
                result[layer_name] = None
                continue
        module, begin = _enclosing_rotary(modules, names.get(layer, ""), layer_name)
        _check_head_size(module, layer.head_size - begin, layer_name)
        if module not in known:
            known[module] = replace(rotary_of(module), begin=begin)
        result[layer_name] = known[module]
    return result


def _check_head_size(module: RotaryModule, size: int, layer_name: str) -> None:
    """Check that a rotary module is made for as many channels as it is given of a layer's heads.

    It cuts a row into heads of its own size. If that is smaller, it rotates every piece of a head,
    and a policy would rotate a cached key's first piece only.
    """
    if module.head_size != size:
        raise KVPolicyError(
            f"kv_policy: the rotary embedding of {layer_name} is made for heads of "
            f"{module.head_size} channels and is given heads of {size}, so it rotates other "
            "channels than a policy would; use --kv-policy full for this model"
        )


def _latent_rotary(
    modules: dict[str, nn.Module], name: str, layer_name: str
) -> RotaryModule | None:
    """The rotary module of a layer of multi-head latent attention; None: it does not rotate."""
    wrapper = modules[name.rpartition(".")[0]]
    if type(wrapper) is not MultiHeadLatentAttentionWrapper:
        raise KVPolicyError(
            f"kv_policy: {layer_name} is called by {type(wrapper).__name__}, and how that rotates "
            "keys is not known; use --kv-policy full for this model"
        )
    rotary: Any = wrapper.rotary_emb
    return rotary


def _enclosing_rotary(
    modules: dict[str, nn.Module], name: str, layer_name: str
) -> tuple[RotaryModule, int]:
    """A layer's rotary module, and a head's first rotary channel."""
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
            # Latent attention with keys and values for every head (MiniCPM3, VLLM_MLA_DISABLE).
            return found.pop(), getattr(modules[name], "qk_nope_head_dim", 0)
        if found:
            raise KVPolicyError(f"kv_policy: {layer_name} has more than one rotary embedding")
    raise KVPolicyError(
        f"kv_policy: {layer_name} has neither rotary embeddings of vLLM's nor ALiBi, and no rule "
        "of the plugin says that it needs no positions, so how to move its cached keys is not "
        "known; use --kv-policy full for this model"
    )


def _own_rotaries(block: nn.Module) -> set[RotaryModule]:
    """Rotary modules of a block.

    A block with one attention layer is searched recursively. A block with several counts only its
    direct children, which the layers share.
    """
    several = sum(isinstance(module, Attention) for module in block.modules()) > 1
    candidates = block.children() if several else block.modules()
    return {module for module in candidates if isinstance(module, RotaryModule)}


def alibi_slopes(slopes: list[float] | torch.Tensor | None) -> torch.Tensor | None:
    """Convert ALiBi slopes to fp32 ``[num_heads]``; None if the model does not use ALiBi."""
    if slopes is None:
        return None
    slopes = torch.as_tensor(slopes, dtype=torch.float32)
    assert all(math.isfinite(slope) for slope in slopes.tolist())
    return slopes
