# SPDX-License-Identifier: Apache-2.0
"""What a model's layers do with positions, where its modules do not say.

Some architectures leave layers without rotary positions (NoPE), although these layers may own a
rotary module and just not call it. They are known by ``model_type``, never guessed; a model whose
layers may skip their rotary module by a rule that is not known here is refused. Models that vLLM
runs through transformers are asked (``probe.py``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Unrotated = Callable[[Any, int, bool], bool]
"""From a text model's configuration, a layer's index and whether it has a window."""


def _flagged(key: str) -> Unrotated:
    """A list in the configuration has 0 for layers without rotary positions."""
    return lambda config, index, windowed: not getattr(config, key)[index]


def _without_window(config: Any, index: int, windowed: bool) -> bool:
    return not windowed


def _beside_windows(config: Any, index: int, windowed: bool) -> bool:
    return not windowed and "sliding_attention" in config.layer_types


def _without_window_after_dense_layers(config: Any, index: int, windowed: bool) -> bool:
    """Without a window, unless it is one of the dense layers before the first experts."""
    if "sparse" not in config.mlp_layer_types[: index + 1]:
        return not windowed and config.prefix_dense_sliding_window_pattern != 1
    return not windowed


def _unless_asked(config: Any, index: int, windowed: bool) -> bool:
    return config.position_embedding_type != "rope"


def _always(config: Any, index: int, windowed: bool) -> bool:
    return True


UNROTATED: dict[str, Unrotated] = {
    "afmoe": _without_window,
    "cohere2": _without_window,
    "cohere2_moe": _without_window_after_dense_layers,
    "exaone4": _beside_windows,
    "exaone_moe": _beside_windows,
    "granite_swa": _flagged("layer_rope_theta"),
    "granitemoe_swa": _flagged("layer_rope_theta"),
    "granitemoehybrid": _unless_asked,
    "jamba": _always,
    "nemotron_h": _always,
    "smollm3": _flagged("no_rope_layers"),
}
"""Models that leave layers without rotary positions, by ``model_type``."""

ORDERED_BY_STATES = ("granitemoehybrid", "jamba", "nemotron_h")
"""Models in which all attention layers may be without positions."""

FLAGS = ("no_rope_layers", "no_rope_layer_interval", "use_rope_layers")
"""Keys with which a configuration may say that some layers have no rotary positions."""

SKIPPING = (
    "domyn_edge",
    "iquest_loopcoder",
    "muse_glimmer",
    "step3p5",
)
"""vLLM's modules whose layers skip their rotary module by rules that nobody has tested here."""

ELSEWHERE = ("k2_horizon", "minicpm3")
"""vLLM's modules that rotate other channels of a head than the first ones."""

HARMLESS = {
    "afmoe": "known above",
    "cohere2_moe": "known above",
    "commandr": "known above",
    "exaone4": "known above",
    "exaone_moe": "known above",
    "falcon": "layers that do not rotate have ALiBi",
    "gemma3n": "only layers that share another's cache, which are refused",
    "gemma4": "only layers that share another's cache, which are refused",
    "granite": "without a base there is no rotary module",
    "granitemoe": "without a base there is no rotary module",
    "granitemoehybrid": "known above",
    "hy_v3": "a fused kernel rotates instead",
    "llama4": "layers without rotary positions have no rotary module, and chunks are refused",
    "olmo_hybrid": "without a base there is no rotary module",
    "zamba2": "where it is not called there is no rotary module",
}
"""vLLM's modules that call a rotary module only sometimes, and why that does no harm."""


def _kind(config: Any) -> str:
    return getattr(config, "model_type", "")


def skips_unknown(block: nn.Module) -> bool:
    """Whether how a layer's attention block uses its rotary module is not known here."""
    return type(block).__module__.rpartition(".")[2] in (*SKIPPING, *ELSEWHERE)


def may_be_unrotated(config: Any) -> bool:
    """Whether a configuration speaks of layers without rotary positions that are not known here."""
    if _kind(config) in UNROTATED:
        return False
    flags = [getattr(config, key, None) for key in FLAGS]
    return any(not all(flag) if isinstance(flag, list) else bool(flag) for flag in flags)


def is_unrotated(config: Any, index: int, windowed: bool) -> bool:
    """Whether a layer has no rotary positions although others of its model have."""
    rule = UNROTATED.get(_kind(config))
    return rule is not None and rule(config, index, windowed)


def needs_no_positions(config: Any) -> bool:
    """Whether no layer of a model has positions: recurrent ones say what came before what."""
    return is_unrotated(config, 0, False) and _kind(config) in ORDERED_BY_STATES


def frequencies(model: nn.Module, config: Any, index: int) -> torch.Tensor | None:
    """fp32 ``[rotary_dim / 2]`` of a layer with transformers' rotary module; None: none."""
    kinds = getattr(config, "layer_types", None)
    names = [f"{kinds[index]}_inv_freq" if kinds else "", "inv_freq"]
    buffers = dict(model.named_buffers())
    for wanted in names:
        found = [b for name, b in buffers.items() if name.rpartition(".")[2] == wanted]
        if len(found) == 1:
            return found[0].detach().float().cpu()
    return None
