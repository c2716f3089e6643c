# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of other families, for the oracle of ``streamed.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from .checkpoints import reference_of, rewrite
from .headed import register
from .model import OracleResult
from .settings import oracle_settings
from .streamed import stream_family

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}
WINDOW = 48
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [4.0 + 0.5 * i for i in range(12)],
}
LINEAR = {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """One family: the configuration that makes it small, and its attention as the oracle needs it.

    Attributes:
        model_type: of transformers' configuration.
        own: what differs from ``COMMON``.
        windows, rotated: by layer, as ``stream_family`` takes them.
        seed: of its weights; another one where rounding would decide what is kept.
        architecture: as checkpoints name it, where transformers has another one's module for it.
        latent: whether all heads share one cached row.
        chunked: whether windows are sizes of chunks of the stream.
        owners: by layer that attends to another one's cache, that layer.
        learned: whether inputs have learned positions, those of the stream.
        long: whether LongRoPE's frequencies are those for long streams.
    """

    model_type: str
    own: dict[str, Any]
    windows: tuple[int | None, ...] = (WINDOW, None, WINDOW, None)
    rotated: tuple[bool, ...] = (True,) * 4
    interleaved: bool = False
    seed: int = 0
    architecture: str | None = None
    latent: bool = False
    owners: tuple[tuple[int, int], ...] = ()
    chunked: bool = False
    learned: bool = False
    long: bool = False

    @property
    def attention(self) -> dict[str, Any]:
        return {
            "windows": list(self.windows),
            "rotated": list(self.rotated),
            "interleaved": self.interleaved,
            "latent": self.latent,
            "owners": dict(self.owners),
            "chunked": self.chunked,
            "learned": self.learned,
            "long": self.long,
        }


SLIDING = {"layer_types": MIXED, "sliding_window": WINDOW}
BY_KIND = {"sliding_attention": PLAIN, "full_attention": LINEAR}
# Heads of full layers are fewer and larger, their values are their keys, and only the first pairs
# of the whole head rotate.
GEMMA4 = {
    **SLIDING,
    "rope_parameters": {
        "sliding_attention": PLAIN,
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
}
# The last four layers have no keys of their own; the last of each kind stands elsewhere.
SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 4,
    "layer_types": [*MIXED[:2], *MIXED[1::-1], *MIXED[:2]],
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
}
OWNERS = ((2, 1), (3, 0), (4, 0), (5, 1))
SHARED_WINDOWS = (WINDOW, None, None, WINDOW, WINDOW, None)
ONLY_WINDOWS_ROTATE = (True, False, True, False)
FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        "gemma2",
        {
            **SLIDING,
            "rope_parameters": PLAIN,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3": Family(
        "gemma3_text", {**SLIDING, "rope_parameters": BY_KIND, "query_pre_attn_scalar": 20}
    ),
    "gemma4": Family("gemma4_text", GEMMA4),
    "gemma4-moe": Family(
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    # As in E2B and E4B: values are not keys, and layers without keys have wider MLPs.
    "gemma4-shared": Family(
        "gemma4_text",
        {
            **GEMMA4,
            **SHARED,
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "use_double_wide_mlp": True,
        },
        windows=SHARED_WINDOWS,
        rotated=(True,) * 6,
        owners=OWNERS,
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **SLIDING,
            **SHARED,
            "rope_parameters": {**BY_KIND, "full_attention": {**PLAIN, "rope_theta": 1_000_000.0}},
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
        },
        windows=SHARED_WINDOWS,
        rotated=(True,) * 6,
        owners=OWNERS,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {
            **SLIDING,
            "rope_parameters": YARN,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "swiglu_limit": 7.0,
        },
    ),
    # Its windows see one token more than the configuration says.
    "cohere2": Family(
        "cohere2",
        {**SLIDING, "rope_parameters": PLAIN, "logit_scale": 0.25, "sliding_window": WINDOW - 1},
        rotated=ONLY_WINDOWS_ROTATE,
        interleaved=True,
    ),
    "exaone4": Family(
        "exaone4", {**SLIDING, "rope_parameters": PLAIN}, rotated=ONLY_WINDOWS_ROTATE
    ),
    "olmo3": Family(
        "olmo3",
        {
            **SLIDING,
            "rope_parameters": {
                "sliding_attention": PLAIN,
                "full_attention": {k: v for k, v in YARN.items() if k != "truncate"},
            },
        },
    ),
    "mistral": Family(
        "mistral", {"sliding_window": WINDOW, "rope_parameters": PLAIN}, windows=(WINDOW,) * 4
    ),
    "llama4": Family(
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
            "rope_parameters": PLAIN,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
        rotated=ONLY_WINDOWS_ROTATE,
        interleaved=True,
        chunked=True,
    ),
    # It is asked for 2,048 tokens, for which vLLM would take the factors for long streams.
    "phi3": Family(
        "phi3",
        {"hidden_size": 128, "original_max_position_embeddings": 128, "rope_parameters": LONG},
        windows=(None,) * 4,
    ),
    # What a policy keeps has more positions than the short range.
    "phi3-long": Family(
        "phi3",
        {
            "hidden_size": 128,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**LONG, "original_max_position_embeddings": 16},
        },
        windows=(None,) * 4,
        long=True,
    ),
    "smollm3": Family(
        "smollm3",
        {"rope_parameters": PLAIN, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": False},
        windows=(None,) * 4,
        rotated=(True, False, True, False),
    ),
}


def model_class(model_type: str) -> str:
    """The architecture of a family, as a model's configuration names it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    kind = type(AutoConfig.for_model(model_type))
    return MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__


def write_family(path: str | Path, family: Family) -> Path:
    """Write a random fp32 model of a family."""
    from transformers import AutoModelForCausalLM

    register()
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(family.seed)
    for weight_name, weight in sorted(model.named_parameters()):
        draw = torch.randn(weight.shape, generator=generator)
        if "sinks" in weight_name:
            draw = 1 + draw
        elif weight_name.endswith("bias"):
            draw *= 0.05
        elif weight.dim() == 1:
            centred = family.model_type in ("gemma", "gemma2", "gemma3_text", "step3p5_reference")
            draw = (0.0 if centred else 1.0) + 0.1 * draw
            # These models do not scale logits by the size of their heads.
            unscaled = family.model_type in ("gemma3n_text", "gemma4_text")
            draw *= 0.3 if unscaled and "q_norm" in weight_name else 1.0
        elif "embed" in weight_name:
            # Gemma multiplies embeddings by the root of their size, and its head is the same
            # matrix: with larger numbers a model repeats its last token, whatever it attends to.
            draw *= 0.05 if family.model_type.startswith("gemma") else 0.3
        elif any(part in weight_name for part in ("q_proj", "k_proj", "query_key_value")):
            draw *= 0.2
        else:
            draw *= 0.15
        weight.data.copy_(draw)
    model.save_pretrained(path)
    if family.architecture is not None:
        file = Path(path) / "config.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**found, "architectures": [family.architecture]}))
        rewrite(Path(path), family.architecture)
    return Path(path)


def shallow(family: Family) -> Family:
    """A family with its first two layers, which are one of each kind, where it has two kinds.

    One whose layers share caches keeps them all.
    """
    if family.owners:
        return family
    own = {key: some[:2] if isinstance(some, list) else some for key, some in family.own.items()}
    own["num_hidden_layers"] = 2
    return replace(family, own=own, windows=family.windows[:2], rotated=family.rotated[:2])


def run_family(
    path: str | Path,
    family: Family,
    tokens: list[int],
    prompt_len: int,
    policy: dict[str, Any],
    chosen: dict[int, list[list[list[int]]]] | None = None,
    **rows: Any,
) -> OracleResult:
    """What the oracle says of ``tokens`` under a user's settings of a policy; ``chosen`` and
    ``rows``, a quantiser and what is stored, as in ``stream_family``."""
    settings = {**oracle_settings(policy), "prompt_len": prompt_len, "chosen": chosen, **rows}
    return stream_family(load_family(path), tokens, **family.attention, **settings)


def load_family(path: str | Path) -> PreTrainedModel:
    """The model as transformers has it, in fp32.

    Parameters of activations (xIELU) stay in bf16: vLLM computes with them so, whatever the rest.
    vLLM's Gemma 3n without images leaves out the embeddings that each layer has of a token.
    """
    from transformers import AutoModelForCausalLM

    register()
    folder = reference_of(Path(path))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if model.config.model_type == "gemma3n_text":
        model.model.get_per_layer_inputs = lambda input_ids: None
    for name, weight in model.named_parameters():
        if "act_fn" in name:
            weight.data = weight.data.bfloat16()
    return model
