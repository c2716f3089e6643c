# SPDX-License-Identifier: Apache-2.0
"""Tiny random models on disk, in the formats that vLLM and the oracle load.

Queries and keys have large weights, so attention is far from uniform and a wrong position
visibly changes the logits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _vocab(vocab_size: int, tokenizer_from: str | Path | None) -> int:
    if tokenizer_from is None:
        return vocab_size
    return json.loads((Path(tokenizer_from) / "config.json").read_text())["vocab_size"]


def _randomise(model: PreTrainedModel, seed: int, std: float, qk_std: float) -> None:
    """Normal weights by name; norms near one, biases small but not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        draw = torch.randn(weight.shape, generator=generator)
        if name.endswith(".bias"):
            draw *= 0.05
        elif weight.dim() == 1:
            draw = 1 + 0.1 * draw
        elif "embed" in name:
            draw *= 0.5 if not model.config.tie_word_embeddings else 0.2
        elif any(part in name for part in ("q_proj", "k_proj", "query_key_value")):
            draw *= qk_std
        else:
            draw *= std
        weight.data.copy_(draw)


def _save(model: PreTrainedModel, path: str | Path, tokenizer_from: str | Path | None) -> Path:
    path = Path(path)
    model.save_pretrained(path)
    for name in TOKENIZER_FILES if tokenizer_from is not None else ():
        source = Path(tokenizer_from or "") / name
        if source.exists():
            shutil.copyfile(source, path / name)
    return path


def write_llama(
    path: str | Path,
    *,
    rope_parameters: dict[str, Any] | None = None,
    partial_rotary_factor: float | None = None,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 256,
    vocab_size: int = 512,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = False,
    std: float = 0.1,
    qk_std: float = 0.15,
    seed: int = 0,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Write a random fp32 LlamaForCausalLM.

    `partial_rotary_factor` goes into `rope_parameters` and the top level of config.json: vLLM 0.32
    reads the former (`get_rope`). transformers' own Llama cannot run a partly rotated head.
    """
    rope = dict(rope_parameters or {"rope_type": "default"})
    rope.setdefault("rope_theta", 10000.0)
    extra: dict[str, Any] = {}
    if partial_rotary_factor is not None:
        rope["partial_rotary_factor"] = partial_rotary_factor
        extra["partial_rotary_factor"] = partial_rotary_factor
    config = LlamaConfig(
        vocab_size=_vocab(vocab_size, tokenizer_from),
        hidden_size=num_heads * head_dim,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
        **extra,
    )
    model = LlamaForCausalLM(config)
    _randomise(model, seed, std, qk_std)
    return _save(model, path, tokenizer_from)


def write_bloom(
    path: str | Path,
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    head_dim: int = 32,
    vocab_size: int = 512,
    seq_length: int = 512,
    std: float = 0.1,
    qk_std: float = 0.15,
    seed: int = 0,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Write a random fp32 BloomForCausalLM; `seq_length` is the context length vLLM reads."""
    config = BloomConfig(
        vocab_size=_vocab(vocab_size, tokenizer_from),
        hidden_size=num_heads * head_dim,
        n_layer=num_layers,
        n_head=num_heads,
        seq_length=seq_length,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    model = BloomForCausalLM(config)
    _randomise(model, seed, std, qk_std)
    return _save(model, path, tokenizer_from)
