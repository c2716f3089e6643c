# SPDX-License-Identifier: Apache-2.0
"""Weights of transformers' Llama under the names of models that differ from it in names only.

vLLM has modules of its own for these models, and transformers has none. The oracle runs Llama.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
REFERENCE = "llama"
"""The folder, inside a checkpoint's own, of transformers' model."""


def renamed(weights: Weights, names: dict[str, str]) -> Weights:
    """The same weights; ``names`` maps regular expressions to replacements."""
    made = {}
    for name, weight in weights.items():
        for pattern, other in names.items():
            name = re.sub(pattern, other, name)
        made[name] = weight
    return made


def exaone(weights: Weights) -> Weights:
    return renamed(
        weights,
        {
            r"model\.layers": "transformer.h",
            r"model\.embed_tokens": "transformer.wte",
            r"model\.norm": "transformer.ln_f",
            r"self_attn\.o_proj": "self_attn.out_proj",
            "self_attn": "attn.attention",
            "gate_proj": "c_fc_0",
            "up_proj": "c_fc_1",
            "down_proj": "c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
    )


def internlm2(weights: Weights) -> Weights:
    """Queries, keys and values of a KV head follow each other in one matrix."""
    made = renamed(
        weights,
        {
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            r"self_attn\.o_proj": "attention.wo",
            "self_attn": "attention",
            r"mlp\.gate_proj": "feed_forward.w1",
            r"mlp\.up_proj": "feed_forward.w3",
            r"mlp\.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    )
    for name in [name for name in made if name.endswith("q_proj.weight")]:
        parts = [made.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        heads = [part.unflatten(0, (2, -1)) for part in parts]  # two KV heads
        made[name.replace("q_proj", "wqkv")] = torch.cat(heads, dim=1).flatten(0, 1)
    return made


LAYOUTS: dict[str, Callable[[Weights], Weights]] = {
    "ExaoneForCausalLM": exaone,
    "InternLM2ForCausalLM": internlm2,
}
"""How a checkpoint of an architecture names what Llama has."""


def rewrite(path: Path, architecture: str) -> None:
    """Turn a checkpoint of transformers' Llama into one of another architecture, beside a copy."""
    if architecture not in LAYOUTS:
        return
    reference = path / REFERENCE
    reference.mkdir()
    weights = load_file(path / "model.safetensors")
    save_file(weights, reference / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (reference / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    made = {name: w.contiguous() for name, w in LAYOUTS[architecture](weights).items()}
    save_file(made, path / "model.safetensors", {"format": "pt"})


def reference_of(path: Path) -> Path:
    """The folder of the model that transformers can load."""
    return path / REFERENCE if (path / REFERENCE).exists() else path
