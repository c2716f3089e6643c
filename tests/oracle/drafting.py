# SPDX-License-Identifier: Apache-2.0
"""Tiny random drafting layers on disk (EAGLE, EAGLE-3, MTP), and the oracle's form of them.

Such a layer sees at token ``i`` the embedding of token ``i + 1`` and a hidden state of token ``i``:
the target's, or its own behind the last token that the target has run. So the oracle streams
places instead of tokens, and ``embed`` looks up what the layer sees there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from .model import LlamaOracle, load_model, stream
from .random_models import _randomise, write_llama

AUX_LAYERS = (1, 2, 3)
"""EAGLE-3 sees what enters these layers of the target."""
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 128, 4, 2, 32, 256


def write_target(path: Path, method: str) -> Path:
    """A random target for drafting layers of this method; for ``mtp`` with the layer in it."""
    if method != "mtp":
        return write_llama(path, num_layers=4)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    _randomise(model, 0, 0.1, 0.15)
    model.save_pretrained(path)
    layer = _layer(HIDDEN, biases=True) | {
        "input_proj.weight": _normal(HIDDEN, 2 * HIDDEN, seed=11),
        **{f"{name}.weight": _gains(seed) for seed, name in enumerate(MTP_NORMS, 12)},
    }
    weights = load_file(path / "model.safetensors")
    save_file(
        weights | {f"model.mtp_layers.0.{name}": w for name, w in layer.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    read = json.loads((path / "config.json").read_text())
    read |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(read))
    return path


MTP_NORMS = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")


def write_drafting(path: Path, method: str) -> Path:
    """Random EAGLE or EAGLE-3 layers for ``write_target``'s model."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
    if method == "eagle":
        weights = {f"layers.0.{name}": w for name, w in _layer(HIDDEN).items()}
        weights["fc.weight"] = _normal(HIDDEN, 2 * HIDDEN, seed=11, std=0.04)
    else:
        layer = _layer(2 * HIDDEN) | {
            "hidden_norm.weight": _gains(12),
            "input_layernorm.weight": _gains(13),
        }
        weights = {f"midlayer.{name}": w for name, w in layer.items()}
        weights |= {
            "fc.weight": _normal(HIDDEN, len(AUX_LAYERS) * HIDDEN, seed=11, std=0.01),
            "norm.weight": _gains(14),
            "lm_head.weight": _normal(512, HIDDEN, seed=15),
        }
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 512,
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def _normal(*shape: int, seed: int, std: float = 0.1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def _gains(seed: int) -> Tensor:
    return 1 + _normal(HIDDEN, seed=seed)


def _layer(width: int, biases: bool = False) -> dict[str, Tensor]:
    """A decoder layer whose attention has inputs of ``width`` channels."""
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    weights = {
        f"self_attn.{name}_proj.weight": _normal(num, width, seed=i, std=0.06)
        for i, (name, num) in enumerate(rows.items())
    }
    if biases:
        weights |= {
            f"self_attn.{name}_proj.bias": _normal(num, seed=20 + i)
            for i, (name, num) in enumerate(rows.items())
        }
    return weights | {
        "self_attn.o_proj.weight": _normal(HIDDEN, HEADS * HEAD_DIM, seed=3),
        "mlp.gate_proj.weight": _normal(INNER, HIDDEN, seed=4),
        "mlp.up_proj.weight": _normal(INNER, HIDDEN, seed=5),
        "mlp.down_proj.weight": _normal(HIDDEN, INNER, seed=6),
        "post_attention_layernorm.weight": _gains(7),
    }


class WatchedTarget(LlamaOracle):
    """A target that notes what enters its layers and its last norm, token after token."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__(config, weights)
        self.seen: dict[int, list[Tensor]] = {i: [] for i in range(self.num_layers + 1)}

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.seen[layer].append(x)
        return super().qkv(layer, x)

    def unembed(self, x: Tensor) -> Tensor:
        self.seen[self.num_layers].append(x)
        return super().unembed(x)

    def hidden(self, method: str) -> Tensor:
        """What drafting layers are given, ``[tokens, width]``."""
        if method == "eagle3":
            return torch.cat([torch.cat(self.seen[layer]) for layer in AUX_LAYERS], dim=-1)
        last = torch.cat(self.seen[self.num_layers])
        return last if method == "mtp" else self.norm(last, "model.norm")


class DraftingLayer(LlamaOracle):
    """One drafting layer; ``places`` has what it sees: embeddings and hidden states."""

    def __init__(self, target: LlamaOracle, weights: dict[str, Tensor], method: str) -> None:
        prefix = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": "model.mtp_layers.0."}[method]
        named = {
            f"model.layers.0.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: w
            for name, w in weights.items()
        }
        super().__init__({**target.config, "num_hidden_layers": 1}, named)
        self.target, self.method = target, method
        self.places: list[tuple[Tensor, Tensor]] = []
        self.last = torch.empty(0)

    def own(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, f"model.layers.0.{name}")

    def see(self, token: int, hidden: Tensor) -> None:
        """Add a place with the embedding of a token and the hidden state before it."""
        self.places.append((self.target.embed(torch.tensor(token)), hidden))

    def embed(self, tokens: Tensor) -> Tensor:
        embeds, hidden = (torch.stack(part) for part in zip(*self.places, strict=True))
        embeds, hidden = embeds[tokens], hidden[tokens]
        if self.method == "eagle":
            return self.linear(torch.cat((embeds, hidden), -1), "fc")
        if self.method == "eagle3":
            self.now = self.own(embeds, "input_layernorm")
            return hidden
        masked = torch.where(tokens[:, None] == 0, 0, embeds)  # as MiMo's does
        parts = self.own(hidden, "hidden_layernorm"), self.own(masked, "token_layernorm")
        return self.linear(torch.cat(parts, -1), "model.layers.0.input_proj")

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.method == "mtp":
            return super().qkv(layer, x)
        if self.method == "eagle3":
            x = torch.cat((self.now, self.own(x, "hidden_norm")), -1)
        q, k, v = (
            self.linear(x, f"model.layers.0.self_attn.{p}_proj").unflatten(-1, (-1, HEAD_DIM))
            for p in "qkv"
        )
        return q, k, v

    def unembed(self, x: Tensor) -> Tensor:
        x = self.own(x, "final_layernorm") if self.method == "mtp" else x
        self.last = x[-1]  # what it sees next behind the target's tokens
        if self.method == "eagle3":
            return self.linear(self.norm(x, "norm"), "lm_head")
        return F.linear(x, self.target.weights["lm_head.weight"])


def draft_logits(
    method: str,
    target_path: Path,
    drafting_path: Path | None,
    text: list[int],
    drafts: list[int],
    **settings: Any,
) -> Tensor:
    """The drafting layers' logits ``[len(drafts), vocabulary]`` before each draft.

    Args:
        text: the target's tokens, with the one that it sampled last.
        settings: ``stream``'s.
    """
    read = load_model if method != "mtp" else None
    if read is not None:
        base = read(target_path)
        config, weights = base.config, base.weights
    else:
        config = json.loads((target_path / "config.json").read_text())
        weights = load_file(target_path / "model.safetensors")
    target = WatchedTarget(config, weights)
    stream(target, text[:-1], **settings)
    own = weights if drafting_path is None else load_file(drafting_path / "model.safetensors")
    layer = DraftingLayer(target, own, method)
    hidden = target.hidden(method)
    if method == "eagle3":
        hidden = layer.linear(hidden, "fc")
    for token, before in zip(text[1:], hidden, strict=True):
        layer.see(token, before)
    logits = []
    for draft in drafts:
        places = list(range(len(layer.places)))
        logits.append(stream(layer, places, **settings).logits_last)
        layer.see(draft, layer.last)
    return torch.stack(logits)
