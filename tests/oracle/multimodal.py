# SPDX-License-Identifier: Apache-2.0
"""The oracle for models that see images, given text only.

The rotary positions of some have several axes (M-RoPE), in sections of a head or interleaved. All
axes of text are the place in the cache, so the oracle rotates as if there were one. Others let the
tokens of an image see each other; text is causal in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .families import COMMON, FAMILIES
from .model import OracleResult
from .settings import oracle_settings
from .streamed import stream_family

TEXT = {**COMMON, "hidden_size": 128}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 128,
}
WINDOWED = {"gemma3": "gemma3", "gemma4": "gemma4"}
"""Models whose text is one of ``FAMILIES``, windows and all."""
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {**VISION, "fullatt_block_indexes": [0]},
        },
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "text_config": {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
            "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**COMMON, **FAMILIES["gemma3"].own},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "text_config": {**COMMON, **FAMILIES["gemma4"].own},
            "vision_config": {**SIGLIP, "num_key_value_heads": 2, "head_dim": 16},
        },
    ),
}


def write_multimodal(path: str | Path, name: str, seed: int = 0) -> Path:
    """Write a random fp32 model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, settings = MULTIMODAL[name]
    # Ids of images and videos are beyond those that tests draw.
    special = {"image_token_id": 510, "video_token_id": 511, "tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, **settings, **special)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for weight_name, weight in sorted(model.named_parameters()):
        draw = torch.randn(weight.shape, generator=generator)
        if weight_name.endswith("bias"):
            draw *= 0.05
        elif weight.dim() == 1:
            draw = (0.0 if name == "gemma3" else 1.0) + 0.1 * draw
            draw *= 0.3 if name == "gemma4" and "q_norm" in weight_name else 1.0
        elif "embed_tokens" in weight_name:
            draw *= 0.05 if name in WINDOWED else 0.3  # as ``write_family``
        else:
            draw *= 0.3 if "embed" in weight_name else 0.15
        weight.data.copy_(draw)
    model.save_pretrained(path)
    return Path(path)


class TextOnly:
    """A model that is called as one of text is."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoModelForImageTextToText

        load = AutoModelForImageTextToText.from_pretrained
        self.model = load(path, dtype=torch.float32).eval()
        self.config = self.model.config.get_text_config()

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if "mrope_section" in str(self.config.rope_parameters):
            position_ids = position_ids.expand(3, 1, -1)
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)


def run_text(
    path: str | Path, name: str, tokens: list[int], prompt_len: int, policy: dict[str, Any]
) -> OracleResult:
    """What the oracle says of ``tokens`` under a user's settings of a policy."""
    model = TextOnly(path)
    num = model.config.num_hidden_layers
    attention = {"windows": [None] * num, "rotated": [True] * num, "interleaved": False}
    if name in WINDOWED:
        attention = FAMILIES[WINDOWED[name]].attention
    return stream_family(
        model,
        tokens,
        **attention,
        prompt_len=prompt_len,
        **oracle_settings(policy),
    )
