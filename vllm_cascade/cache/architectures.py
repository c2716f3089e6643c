# SPDX-License-Identifier: Apache-2.0
"""What a model's layers do with positions, where its modules do not say.

Some architectures leave layers without rotary positions (NoPE), although these layers may own a
rotary module and just not call it; and models that vLLM runs through transformers have
transformers' rotary modules. Both are known by ``model_type``, never guessed.
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


UNROTATED: dict[str, Unrotated] = {
    "cohere2": _without_window,
    "exaone4": _beside_windows,
    "smollm3": _flagged("no_rope_layers"),
}
"""Models that leave layers without rotary positions, by ``model_type``."""

FLAGS = ("no_rope_layers", "no_rope_layer_interval", "use_rope_layers")
"""Keys with which a configuration may say that some layers have no rotary positions."""

IN_HALVES = ("smollm3", "olmo3")
"""Models that run through transformers and rotate the two halves of a head (``rotate_half``)."""


def may_be_unrotated(config: Any) -> bool:
    """Whether a configuration speaks of layers without rotary positions that are not known here."""
    if config.model_type in UNROTATED:
        return False
    flags = [getattr(config, key, None) for key in FLAGS]
    return any(not all(flag) if isinstance(flag, list) else bool(flag) for flag in flags)


def is_unrotated(config: Any, index: int, windowed: bool) -> bool:
    """Whether a layer has no rotary positions although others of its model have."""
    rule = UNROTATED.get(config.model_type)
    return rule is not None and rule(config, index, windowed)


def frequencies(model: nn.Module, config: Any, index: int) -> torch.Tensor | None:
    """fp32 ``[rotary_dim / 2]`` of a layer whose rotary module is transformers'; None: unknown."""
    if config.model_type not in IN_HALVES:
        return None
    kinds = getattr(config, "layer_types", None)
    names = [f"{kinds[index]}_inv_freq" if kinds else "", "inv_freq"]
    buffers = dict(model.named_buffers())
    for wanted in names:
        found = [b for name, b in buffers.items() if name.rpartition(".")[2] == wanted]
        if len(found) == 1:
            return found[0].detach().float().cpu()
    return None
