# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models that transformers has no module for, or none that takes our attention.

vLLM has modules of its own for these models. The oracle runs a model of transformers' that computes
the same: its weights are written under the names, and in the layouts, of the other one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]
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
    return renamed(
        joined(weights, QKV, "wqkv", groups=2),  # KV heads
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


def joined(weights: Weights, parts: tuple[str, ...], into: str, groups: int = 1) -> Weights:
    """Weights with each layer's ``parts`` in one tensor, after each other in each of ``groups``."""
    made, first = dict(weights), parts[0]
    for name in [name for name in made if f".{first}." in name]:
        found = [made.pop(name.replace(f".{first}.", f".{part}.")) for part in parts]
        split = [part.unflatten(0, (groups, -1)) for part in found]
        made[name.replace(f".{first}.", f".{into}.")] = torch.cat(split, dim=1).flatten(0, 1)
    return made


QKV = ("q_proj", "k_proj", "v_proj")


def separate_experts(weights: Weights) -> Weights:
    """Granite's experts, which are one tensor, under the names of DeepSeek's."""
    made = renamed(
        weights,
        {
            r"block_sparse_moe\.router\.layer": "mlp.gate",
            "shared_mlp": "mlp.shared_experts",
            r"block_sparse_moe\.(input|output)_linear": r"mlp.experts.\1_linear",
        },
    )
    for name in [name for name in made if "put_linear" in name]:
        weight = made.pop(name)
        for expert, rows in enumerate(weight if weight.dim() == 3 else weight[None]):
            at = f"experts.{expert}" if weight.dim() == 3 else "experts"
            gate, up = rows.chunk(2)
            parts = {"down": rows} if "output" in name else {"gate": gate, "up": up}
            for part, own in parts.items():
                new = re.sub(r"experts\.(in|out)put_linear", f"{at}.{part}_proj", name)
                made[new] = own.clone()
    return made


def bailing(weights: Weights) -> Weights:
    return renamed(
        joined(separate_experts(weights), QKV, "query_key_value"),
        {
            "embed_tokens": "word_embeddings",
            r"self_attn\.o_proj": "attention.dense",
            r"self_attn\.q_norm": "attention.query_layernorm",
            r"self_attn\.k_norm": "attention.key_layernorm",
            "self_attn": "attention",
            r"gate\.e_score_correction_bias": "gate.expert_bias",
        },
    )


def chatglm(weights: Weights) -> Weights:
    return renamed(
        joined(weights, QKV, "query_key_value"),
        {
            r"model\.embed_tokens": "transformer.embedding.word_embeddings",
            r"model\.norm": "transformer.encoder.final_layernorm",
            r"model\.layers": "transformer.encoder.layers",
            "lm_head": "transformer.output_layer",
            r"self_attn\.o_proj": "self_attention.dense",
            "self_attn": "self_attention",
            "gate_up_proj": "dense_h_to_4h",
            r"mlp\.down_proj": "mlp.dense_4h_to_h",
        },
    )


def falcon(weights: Weights) -> Weights:
    return renamed(
        joined(weights, QKV, "query_key_value", groups=2),  # KV heads
        {
            r"model\.embed_tokens": "transformer.word_embeddings",
            r"model\.final_layernorm": "transformer.ln_f",
            r"model\.layers": "transformer.h",
            "self_attn": "self_attention",
            "fc1": "dense_h_to_4h",
            "fc2": "dense_4h_to_h",
        },
    )


def gptj(weights: Weights) -> Weights:
    """Neighbours are paired; Phi's pairs are the halves of a head's first 16 channels."""
    made = renamed(
        weights,
        {
            r"model\.embed_tokens": "transformer.wte",
            r"model\.final_layernorm": "transformer.ln_f",
            r"model\.layers": "transformer.h",
            r"self_attn\.dense": "attn.out_proj",
            "self_attn": "attn",
            "input_layernorm": "ln_1",
            "fc1": "fc_in",
            "fc2": "fc_out",
        },
    )
    for name in made:
        if "q_proj" in name or "k_proj" in name:
            heads = made[name].unflatten(0, (4, -1)).clone()
            heads[:, :16] = heads[:, :16].unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2)
            made[name] = heads.flatten(0, 1)
    return made


def k2_horizon(weights: Weights) -> Weights:
    """The channels of 16 that rotate are the first 8 of each half of a head's 32."""
    order = torch.cat([torch.arange(i, i + 8) for i in (0, 16, 8, 24)])
    made = renamed(weights, {r"gate\.e_score_correction_bias": "gate.bias"})
    for name, weight in made.items():
        if re.search("[qk]_norm", name):  # of each head
            weight = weight.repeat(4 if "q_norm" in name else 2)
        if re.search("[qk]_(norm|proj)", name):
            heads = weight.unflatten(0, (-1, 32))
            made[name] = heads[:, order.argsort()].flatten(0, 1)
    return made


def mistral_large(weights: Weights) -> Weights:
    made = renamed(
        weights,
        {
            r"model\.embed_tokens": "tok_embeddings",
            r"^model\.": "",
            "lm_head": "output",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            r"self_attn\.(q|kv)_a_layernorm": r"attention.\1_a_norm",
            r"self_attn\.o_proj": "attention.wo",
            r"self_attn\.(\w+)_proj": r"attention.w\1",
            r"mlp\.(experts|shared_experts|gate\.)": r"\1",
            "mlp": "feed_forward",
            "gate_proj": "w1",
            "down_proj": "w2",
            "up_proj": "w3",
        },
    )
    return {name: weight for name, weight in made.items() if "correction_bias" not in name}


def muse_glimmer(weights: Weights) -> Weights:
    return renamed(weights, {r"^model\.": "model.language_model."})


def plamo3(weights: Weights) -> Weights:
    """Gemma adds 1 to all its norms' weights, and scales embeddings."""
    made = joined(weights, QKV, "qkv_proj")
    made = renamed(
        joined(made, ("gate_proj", "up_proj"), "gate_up_proj"),
        {
            "post_attention_layernorm": "post_mixer_norm",
            "pre_feedforward_layernorm": "pre_mlp_norm",
            "post_feedforward_layernorm": "post_mlp_norm",
            "input_layernorm": "pre_mixer_norm",
            r"model\.layers": "model.layers.layers",
            "self_attn": "mixer",
        },
    )
    for name in made:
        if "post_mixer_norm" in name:
            made[name] = made[name] + 1 - 1 / 5
        elif "post_mlp_norm" in name:
            made[name] = made[name] + 1 - 1 / 5**1.5
        elif "embed_tokens" in name:
            made[name] = made[name] * made[name].shape[1] ** 0.5
    return made


def step3(weights: Weights) -> Weights:
    """Gates and values of experts are a tensor each."""
    made = renamed(
        weights,
        {
            r"q_proj\.0": "q_proj",
            r"q_proj\.1": "inter_norm",
            r"q_proj\.2": "wq",
            r"block_sparse_moe\.router": "moe.gate",
            r"block_sparse_moe\.experts\.(\w+)": r"moe.\1.weight",
            r"shared_mlp\.input_linear": "share_expert.gate_up_proj",
            r"shared_mlp\.output_linear": "share_expert.down_proj",
        },
    )
    for name in [name for name in made if "gate_up_proj" in name]:
        gate, up = made.pop(name).chunk(2, dim=-2)
        for part, weight in (("gate", gate), ("up", up)):
            made[name.replace("gate_up_proj", f"{part}_proj")] = weight
    return made


def step3p5(weights: Weights) -> Weights:
    """Gates, values and outputs of experts are a tensor each."""
    made = renamed(
        weights,
        {
            r"mlp\.gate\.e_score_correction_bias": "moe.router_bias",
            r"mlp\.gate\.": "moe.gate.",
            r"mlp\.shared_experts": "share_expert",
            r"mlp\.experts\.down_proj": "moe.down_proj.weight",
            r"mlp\.experts": "moe",
        },
    )
    for name in [name for name in made if name.endswith("moe.gate_up_proj")]:
        gate, up = made.pop(name).chunk(2, dim=1)
        for part, weight in (("gate", gate), ("up", up)):
            made[name.replace("gate_up_proj", f"{part}_proj.weight")] = weight.contiguous()
    return made


def telechat2(weights: Weights) -> Weights:
    return renamed(
        joined(weights, ("k_proj", "v_proj"), "key_value", groups=4),  # heads
        {
            r"model\.embed_tokens": "transformer.word_embeddings",
            r"model\.norm": "transformer.ln_f",
            r"model\.layers": "transformer.h",
            r"self_attn\.q_proj": "self_attention.query",
            r"self_attn\.o_proj": "self_attention.dense",
            "self_attn": "self_attention",
        },
    )


def as_chatglm(config: Config) -> Config:
    return {
        "model_type": "chatglm",
        "num_layers": config["num_hidden_layers"],
        "padded_vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": config["head_dim"],
        "num_attention_heads": config["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "seq_length": config["max_position_embeddings"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "add_qkv_bias": True,
        "original_rope": True,
        "tie_word_embeddings": False,
    }


def as_falcon(config: Config) -> Config:
    """As Falcon 2 has it: one norm before attention and MLP, and several KV heads."""
    return {
        "model_type": "falcon",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "layer_norm_epsilon": config["layer_norm_eps"],
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "rope_parameters": config["rope_parameters"],
        "tie_word_embeddings": False,
    }


def as_gptj(config: Config) -> Config:
    return {
        "model_type": "gptj",
        "vocab_size": config["vocab_size"],
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_positions": config["max_position_embeddings"],
        "rotary_dim": 16,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config["layer_norm_eps"],
        "tie_word_embeddings": False,
    }


def as_k2_horizon(config: Config) -> Config:
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "hidden_act")
    same += ("max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok")
    same += ("bos_token_id", "eos_token_id", "norm_topk_prob", "attention_bias")
    rope = config["rope_parameters"]
    return {
        "model_type": "k2_horizon",
        **{key: config[key] for key in same},
        "rope_parameters": {key: rope[key] for key in ("rope_type", "rope_theta")},
        "rope_head_dim": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "query_key_norm": True,
        "attention_gate_func": None,
        "layernorm_num_groups": 1,
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "mova_num_experts": 0,
        "moe_gate_bias": True,
        "router_score_func": "sigmoid",
        "router_scaling_factor": config["routed_scaling_factor"],
        "tie_word_embeddings": False,
    }


def as_muse_glimmer(config: Config) -> Config:
    """As transformers writes it, with a base for each layer.

    vLLM 0.32 does not read bases. By its own default, too, the last layer does not rotate.
    """
    return {**config, "model_type": "muse_glimmer_text"}


def as_sarvam_mla(config: Config) -> Config:
    """The size of heads is that of cached rows, and rotary parameters are named as vLLM's."""
    rope = {key: value for key, value in config["rope_parameters"].items() if key != "truncate"}
    return {
        **config,
        "model_type": "sarvam_mla",
        "head_dim": config["kv_lora_rank"] + config["qk_rope_head_dim"],
        "rope_parameters": {**rope, "rope_type": "deepseek_yarn"},
    }


def as_step3(config: Config) -> Config:
    """As vLLM's own class of configurations takes it."""
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act")
    same += ("bos_token_id", "eos_token_id", "rope_parameters", "share_q_dim")
    return {
        "model_type": "step3_text",
        **{key: config[key] for key in same},
        "num_attention_groups": config["num_key_value_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "max_position_embedding": config["max_position_embeddings"],
        "moe_intermediate_size": config["intermediate_size"],
        "moe_num_experts": config["num_local_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_layers_enum": ",".join(map(str, range(config["num_hidden_layers"]))),
        "norm_expert_weight": True,
        "share_expert_dim": config["shared_intermediate_size"],
        "tie_word_embeddings": False,
    }


def as_step3p5(config: Config) -> Config:
    """As vLLM's own class of configurations takes it."""
    kinds, by_kind = config["layer_types"], config["rope_parameters"]
    ropes = [by_kind[kind] for kind in kinds]
    sparse = [i for i, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("head_dim", "vocab_size", "rms_norm_eps", "layer_types", "sliding_window")
    same += ("max_position_embeddings", "moe_intermediate_size", "share_expert_dim")
    same += ("bos_token_id", "eos_token_id", "use_rope_layers")
    return {
        "model_type": "step3p5",
        **{key: config[key] for key in same},
        "num_attention_groups": config["num_key_value_heads"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": config["num_sliding_attention_heads"],
            "num_attention_groups": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
        },
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_layers_enum": ",".join(map(str, sparse)),
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": config["moe_router_scaling_factor"],
        "use_head_wise_attn_gate": True,
        "rope_theta": [rope["rope_theta"] for rope in ropes],
        "partial_rotary_factors": [rope.get("partial_rotary_factor", 1.0) for rope in ropes],
        "tie_word_embeddings": False,
    }


def as_telechat2(config: Config) -> Config:
    """Without rotary parameters: they are vLLM's defaults."""
    same = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")
    same += ("max_position_embeddings",)
    return {
        "model_type": "telechat",
        **{key: config[key] for key in same},
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "tie_word_embeddings": False,
    }


@dataclass(frozen=True)
class Layout:
    """How a checkpoint of an architecture stores what a model of transformers' has.

    Attributes:
        weights: their names and shapes.
        config: its configuration, from transformers'.
        absent: weights that it has not, as a regular expression: they are 0 in the reference.
    """

    weights: Callable[[Weights], Weights]
    config: Callable[[Config], Config] = dict
    absent: str = "^$"


LAYOUTS: dict[str, Layout] = {
    "BailingMoeForCausalLM": Layout(bailing),
    "BailingMoeV2ForCausalLM": Layout(bailing),
    "ChatGLMModel": Layout(chatglm, as_chatglm),
    "DeepseekForCausalLM": Layout(separate_experts),
    "ExaoneForCausalLM": Layout(exaone),
    "FalconForCausalLM": Layout(falcon, as_falcon, r"(_proj|dense|fc\d|lm_head)\.bias"),
    "GPTJForCausalLM": Layout(gptj, as_gptj, r"(_proj|dense)\.bias"),
    "InternLM2ForCausalLM": Layout(internlm2),
    "K2HorizonForCausalLM": Layout(k2_horizon, as_k2_horizon),
    "MuseGlimmerForCausalLM": Layout(muse_glimmer, as_muse_glimmer),
    "MistralLarge3ForCausalLM": Layout(mistral_large),
    "Plamo3ForCausalLM": Layout(plamo3),
    "SarvamMLAForCausalLM": Layout(dict, as_sarvam_mla),
    "SarvamMoEForCausalLM": Layout(bailing),
    "Step3TextForCausalLM": Layout(step3, as_step3),
    "Step3p5ForCausalLM": Layout(step3p5, as_step3p5),
    "TeleChat2ForCausalLM": Layout(telechat2, as_telechat2, r"(q|k|v|gate|up)_proj\.bias"),
}


def rewrite(path: Path, architecture: str) -> None:
    """Turn a checkpoint of transformers' into one of another architecture, beside a copy."""
    if architecture not in LAYOUTS:
        return
    layout, reference = LAYOUTS[architecture], path / REFERENCE
    reference.mkdir()
    weights = load_file(path / "model.safetensors")
    absent = [name for name in weights if re.search(layout.absent, name)]
    for name in absent:
        weights[name].zero_()
    save_file(weights, reference / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (reference / "config.json").write_text(json.dumps({**config, "architectures": []}))
    found = {**layout.config(config), "architectures": [architecture], "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(found))
    there = {name: weight for name, weight in weights.items() if name not in absent}
    made = {name: w.contiguous() for name, w in layout.weights(there).items()}
    save_file(made, path / "model.safetensors", {"format": "pt"})


def reference_of(path: Path) -> Path:
    """The folder of the model that transformers can load."""
    return path / REFERENCE if (path / REFERENCE).exists() else path
