# SPDX-License-Identifier: Apache-2.0
"""Architecture rules for layers without rotary positions (NoPE).

A NoPE layer may own a rotary module and never call it, so modules alone do not tell. The rules are
looked up by ``model_type`` and never guessed. A model is refused if its layers may skip their
rotary module by an unknown rule. Models that vLLM runs through transformers are probed instead
(``probe.py``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Unrotated = Callable[[Any, int, bool], bool]
"""Rule for NoPE layers.

Takes the text model's configuration, the layer's index and whether the layer has a window.
"""


def _flagged(*keys: str) -> Unrotated:
    """A list in the configuration, one entry per layer, has 0 for NoPE layers.

    The first of ``keys`` that the configuration has names the list.
    """
    return lambda config, index, windowed: (
        not next(getattr(config, key) for key in keys if hasattr(config, key))[index]
    )


def _unless_listed(config: Any, index: int, windowed: bool) -> bool:
    """A list in the configuration, if there is one, has false for NoPE layers."""
    listed = getattr(config, "use_rope_layers", None)
    return bool(listed) and not listed[index]


def _without_window(config: Any, index: int, windowed: bool) -> bool:
    return not windowed


def _unless_local(config: Any, index: int, windowed: bool) -> bool:
    """Local layers rotate, without their windows (``--disable-sliding-window``), too."""
    return config.layer_types[index] != "sliding_attention"


def _without_parameters(config: Any, index: int, windowed: bool) -> bool:
    """The configuration has rotary parameters by types of layers, and none for some types."""
    return config.rope_parameters.get(config.layer_types[index]) is None


def _beside_windows(config: Any, index: int, windowed: bool) -> bool:
    return not windowed and "sliding_attention" in config.layer_types


def _without_window_after_dense_layers(config: Any, index: int, windowed: bool) -> bool:
    """Layers without a window are NoPE.

    The dense layers before the first experts are an exception if their window pattern is 1.
    """
    if "sparse" not in config.mlp_layer_types[: index + 1]:
        return not windowed and config.prefix_dense_sliding_window_pattern != 1
    return not windowed


def _unless_asked(config: Any, index: int, windowed: bool) -> bool:
    return config.position_embedding_type != "rope"


def _always(config: Any, index: int, windowed: bool) -> bool:
    return True


UNROTATED: dict[str, Unrotated] = {
    "afmoe": _unless_local,
    "cohere2": _without_window,
    "cohere2_moe": _without_window_after_dense_layers,
    "cohere_compass_text": _without_parameters,
    "exaone4": _beside_windows,
    "exaone_moe": _beside_windows,
    "granite_swa": _flagged("layer_rope_theta"),
    "granitemoe_swa": _flagged("layer_rope_theta"),
    "granitemoehybrid": _unless_asked,
    "jamba": _always,
    "llama4_text": _flagged("no_rope_layers"),
    "muse_glimmer_text": _flagged("no_rope_layers", "layer_rope_theta"),  # vLLM 0.32, vLLM 0.33
    "nemotron_h": _always,
    "nemotron_h_puzzle": _always,
    "smollm3": _flagged("no_rope_layers"),
    "step3p5": _unless_listed,
}
"""Rules of models with NoPE layers, by ``model_type``."""

ORDERED_BY_STATES = ("granitemoehybrid", "jamba", "nemotron_h", "nemotron_h_puzzle")
"""Models whose attention layers may all be NoPE, because recurrent layers encode the order."""

FLAGS = ("no_rope_layers", "no_rope_layer_interval", "use_rope_layers")
"""Configuration keys that may mark NoPE layers."""

SKIPPING = ("domyn_edge",)
"""vLLM model files whose layers skip their rotary module by rules that we have not tested."""

LEARNED = ("gpt2", "gpt_bigcode", "opt")
"""Models that add a learned vector for a token's position to its input, and rotate nothing."""

SCALED_BY_POSITION = ("moondream3_text",)
"""Models whose cached values have a factor that depends on the token's position."""

LATENT = ("sarvam_mla",)
"""Models with multi-head latent attention that vLLM's list of their types leaves out."""

BOTH_WAYS = ("hrm_text",)
"""Models whose prompts attend in both directions."""

OWN_ATTENTION = ("flint", "step5")
"""Models whose layers bring attention backends or kernels of their own, by ``model_type``."""

ELSEWHERE = ("k2_horizon",)
"""vLLM model files that may rotate other channels than the first ones of a head.

They do unless vLLM reorders the channels in the weights, which it does if these are not quantised.
"""


def _kind(config: Any) -> str:
    """The model's type.

    vLLM wraps the configuration of an EAGLE head, and copies its other values to the wrapper.
    """
    kind = getattr(config, "model_type", "")
    return _kind(config.model) if kind == "eagle" else kind


def learns_positions(config: Any) -> bool:
    """Whether inputs have learned positions.

    A key that was made with one cannot be moved, and need not be: its token keeps the position of
    its place in the stream, which therefore ends where the model's positions end.
    """
    return _kind(config) in LEARNED


def shares_caches(config: Any) -> bool:
    """Whether layers attend to the caches of earlier ones, or of an earlier run."""
    return bool(getattr(config, "num_kv_shared_layers", 0)) or loops(config)


def loops(config: Any) -> bool:
    """Whether layers run several times, and attend to what they cached the first time again."""
    return "IQuestLoopCoderForCausalLM" in (getattr(config, "architectures", None) or ())


def overwrites(config: Any) -> bool:
    """Whether layers run several times and cache their tokens each time in the same place."""
    mode, runs = "recurrent_kv_cache_mode", getattr(config, "n_recurrent_loops", 1)  # Dory's
    return getattr(config, mode, None) == "last_loop" and runs > 1


def looks_back(config: Any) -> bool:
    """Whether layers of chunks also attend to the chunk before (Rnj-1)."""
    chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return chunks and "Rnj1ForCausalLM" in (getattr(config, "architectures", None) or ())


def several_kv_heads(config: Any) -> bool:
    """Whether layers without windows have different numbers of KV heads (DeciLM)."""
    blocks: Any = getattr(config, "block_configs", None) or ()
    found = set()
    for block in blocks:
        part = _value(block, "attention") or block
        heads = _value(part, "n_heads_in_group"), _value(part, "num_key_value_heads")
        if any(heads) and not _value(part, "no_op"):
            found.add(heads)
    return len(found) > 1


def _value(config: Any, key: str) -> Any:
    """A value of a part of a configuration, which may be a dictionary."""
    return config.get(key) if isinstance(config, dict) else getattr(config, key, None)


def skips_unknown(block: nn.Module) -> bool:
    """Whether the attention block uses rotary modules in an unsupported way."""
    file = type(block).__module__.rpartition(".")[2]
    partly = getattr(block, "rope_head_dim", None) != getattr(block, "head_dim", None)
    elsewhere = file in ELSEWHERE and partly and not getattr(block, "fold_rope_weights", True)
    return file in SKIPPING or elsewhere


def may_be_unrotated(config: Any) -> bool:
    """Whether a configuration marks NoPE layers although its model has no rule here."""
    if _kind(config) in UNROTATED:
        return False
    flags = [getattr(config, key, None) for key in FLAGS]
    return any(not all(flag) if isinstance(flag, list) else bool(flag) for flag in flags)


def is_unrotated(config: Any, index: int, windowed: bool) -> bool:
    """Whether the model's rule makes this layer NoPE."""
    rule = UNROTATED.get(_kind(config))
    return rule is not None and rule(config, index, windowed)


def needs_no_positions(config: Any) -> bool:
    """Whether all attention layers are NoPE because recurrent layers encode the order."""
    return is_unrotated(config, 0, False) and _kind(config) in ORDERED_BY_STATES


def frequencies(model: nn.Module, config: Any, index: int) -> torch.Tensor | None:
    """Read a layer's frequencies, fp32 ``[rotary_dim / 2]``, from transformers' rotary module.

    Returns None if the model has no unique buffer of frequencies for the layer.
    """
    kinds = getattr(config, "layer_types", None)
    names = [f"{kinds[index]}_inv_freq" if kinds else "", "inv_freq"]
    buffers = dict(model.named_buffers())
    for wanted in names:
        found = [b for name, b in buffers.items() if name.rpartition(".")[2] == wanted]
        if len(found) == 1:
            return found[0].detach().float().cpu()
    return None
