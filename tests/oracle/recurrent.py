# SPDX-License-Identifier: Apache-2.0
"""The oracle for models with recurrent layers, which need a stream in one piece.

What a layer of attention keeps depends on nothing but its own queries, keys and values, and a
recurrent layer never looks ahead. So transformers' model is called once, with the whole stream, and
the attention function goes through all strides of it. No state is ever stored and none restored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from .families import COMMON, EXPERTS, PLAIN, load_family
from .model import OracleResult, strides
from .settings import oracle_settings
from .streamed import OURS, Layer, Streamed, frequencies, result_of, stores_of


@dataclass
class InOnePiece:
    """What transformers calls in place of attention, with a whole stream.

    Attributes:
        kept: tokens that are left, by end of a stride, layer and head set.
    """

    strided: Streamed
    cuts: list[tuple[int, int]]
    kept: dict[int, dict[int, list[list[int]]]] = field(default_factory=dict)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """``query`` ``[1, heads, T, D]``, ``key`` and ``value`` ``[1, KV heads, T, D]``."""
        parts = []
        for start, end in self.cuts:
            self.strided.start, self.strided.end = start, end
            rows = (x[:, :, start:end] for x in (query, key, value))
            parts.append(self.strided(module, *rows, None, scaling)[0])
            lines = self.strided.layers[module.layer_idx].lines
            self.kept.setdefault(end, {})[module.layer_idx] = lines
        return torch.cat(parts, dim=1), None


@torch.inference_mode()
def run_recurrent(
    path: str | Path,
    name: str,
    tokens: list[int],
    prompt_len: int,
    policy: dict[str, Any],
    chosen: dict[int, list[list[list[int]]]] | None = None,
) -> OracleResult:
    """What the oracle says of ``tokens`` under a user's settings of a policy; ``chosen`` is what
    the engine kept, of layers that attend."""
    family, model, settings = RECURRENT[name], load_family(path), oracle_settings(policy)
    config = model.config
    num_kv = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_head = settings["head_policy"] == "per_kv_head"
    num_sets = num_kv if per_head else 1
    layers = {
        index: Layer(
            frequencies(config, "full_attention", index, head_dim) if family.rotated else None,
            False,
            None,
            [settings["make_sim"]() for _ in range(num_sets)],
            torch.zeros(num_kv, len(tokens), head_dim),
            torch.zeros(num_kv, len(tokens), head_dim),
            torch.zeros(num_sets, len(tokens)),
            stores_of(settings["recall"], num_sets),
        )
        for index in family.attention
    }
    strided = Streamed(
        layers,
        settings["decay"],
        settings["weight"],
        settings["head_reduction"],
        per_head,
        chosen=chosen,
    )
    whole = InOnePiece(strided, strides(len(tokens), prompt_len, settings["stride"]))
    AttentionInterface.register(OURS, whole)
    AttentionMaskInterface.register(OURS, lambda *args, **kwargs: None)
    model.set_attn_implementation(OURS)
    ids = torch.tensor(tokens)[None]
    logits = model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False).logits[0]
    logprobs = logits[:-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    kept = {end: [by[index] for index in sorted(by)] for end, by in whole.kept.items()}
    return result_of(list(layers.values()), logprobs.tolist(), logits[-1].float(), kept)


# --- tiny random models ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Recurrent:
    """One family: the configuration that makes it small.

    Attributes:
        model_type: of transformers' configuration.
        own: what differs from ``COMMON``.
        attention: indices of layers that attend.
        rotated: whether these have rotary positions.
        dtype: what an engine computes in.
        engine: what else it needs.
    """

    model_type: str
    own: dict[str, Any]
    attention: tuple[int, ...]
    rotated: bool = True
    dtype: str = "float32"
    engine: dict[str, Any] = field(default_factory=dict)


SIZES = {"hidden_size": 128, "head_dim": 32}  # some take heads of hidden_size / heads channels
MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
    "layer_types": MIXED,
}
GRANITE = {
    **SIZES,
    **MAMBA2,
    "mamba_n_groups": 1,  # vLLM would normalise by groups, transformers would not
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
    "rope_parameters": PLAIN,
}
DELTA_NET = {
    **SIZES,
    "head_dim": 64,
    "layer_types": MIXED,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
}
# Its text is read with positions of three axes, which are equal where there is nothing but text.
AXES = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
QWEN35 = {**DELTA_NET, "rope_parameters": {**DELTA_NET["rope_parameters"], **AXES}}
LFM2 = {
    **SIZES,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 128,  # vLLM asks for it, and for the next
    "block_dim": 128,
    "rope_parameters": PLAIN,
}
ROTATED_BY_TORCH = {"compilation_config": {"custom_ops": ["none"]}}
"""vLLM's own operator for rotations on a CPU, which is the default where nothing is compiled, takes
heads for tokens in LFM2's models, which give them an axis."""
RECURRENT: dict[str, Recurrent] = {
    "lfm2": Recurrent("lfm2", LFM2, (1,), engine=ROTATED_BY_TORCH),
    "lfm2-moe": Recurrent(
        "lfm2_moe",
        {**LFM2, "num_dense_layers": 1, "num_experts": 4, **EXPERTS},
        (1,),
        engine=ROTATED_BY_TORCH,
    ),
    "granite4": Recurrent("granitemoehybrid", GRANITE, (1, 3), rotated=False),
    "granite4-rope": Recurrent(
        "granitemoehybrid", {**GRANITE, "position_embedding_type": "rope"}, (1, 3)
    ),
    "falcon-h1": Recurrent(
        "falcon_h1",
        {
            **SIZES,
            **{key: value for key, value in MAMBA2.items() if key != "layer_types"},
            "num_hidden_layers": 3,
            "mamba_d_ssm": 128,
            "rope_parameters": PLAIN,
        },
        (0, 1, 2),
    ),
    "nemotron-h": Recurrent(
        "nemotron_h",
        {
            **SIZES,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 64,
        },
        (1,),
        rotated=False,
    ),
    # vLLM's kernels for the CPU compute in bfloat16.
    "qwen3-next": Recurrent(
        "qwen3_next",
        {
            **DELTA_NET,
            "num_experts": 4,
            "num_experts_per_tok": 4,  # or rounding would choose among experts
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0, 1, 2],
        },
        (1, 3),
        dtype="bfloat16",
    ),
    "qwen3.5": Recurrent("qwen3_5_text", QWEN35, (1, 3), dtype="bfloat16"),
    "qwen3.5-moe": Recurrent(
        "qwen3_5_moe_text",
        {
            **QWEN35,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        (1, 3),
        dtype="bfloat16",
    ),
}


def write_recurrent(path: str | Path, name: str) -> Path:
    """Write a random model of a family, whose states remember some hundred tokens."""
    from transformers import AutoModelForCausalLM

    family = RECURRENT[name]
    settings = {**COMMON, **family.own, "dtype": family.dtype}
    if "layers_block_type" in settings:
        del settings["num_hidden_layers"]
    config = AutoConfig.for_model(family.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight_name, weight in sorted(model.named_parameters()):
        draw = torch.randn(weight.shape, generator=generator)
        weight.data.copy_(_drawn(weight_name, draw))
    model.to(getattr(torch, family.dtype)).save_pretrained(path)
    return Path(path)


def _drawn(name: str, draw: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return draw * 0.3 - 3.5
    if name.endswith("dt_bias"):
        return draw * 0.3 - 1.0
    if name.endswith("bias"):
        return draw * 0.05
    if draw.dim() == 1:
        return draw * 0.1 + 1.0
    if "conv" in name and draw.dim() == 3:
        return draw * 0.5
    if "embed" in name:
        return draw * 0.3
    return draw * (0.2 if "q_proj" in name or "k_proj" in name else 0.1)
