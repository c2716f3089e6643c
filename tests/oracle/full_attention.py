# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of families whose layers all attend to everything, or that vLLM runs through
transformers: for the oracle of ``streamed.py``, like those of ``families.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .families import EXPERTS, PLAIN, SLIDING, WINDOW, YARN, Family

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "rope_parameters": PLAIN}
"""Some take heads of hidden_size / heads channels: they are 32 either way."""
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MULTIPLIED = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GRANITE = {"attention_multiplier": 32**-0.5, "logits_scaling": 2.0}
"""Granite's multipliers where others divide logits, and scale attention as usual."""
SIGMOIDS = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
"""What a checkpoint's configuration has and transformers' own has not."""
ALPHA = {
    "max_position_embeddings": 1024,  # or the frequencies would change
    "rope_parameters": {**PLAIN, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
}
HIDDEN = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
DEEPSEEK_YARN = {**YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 0.7}


def partly(share: float) -> dict[str, Any]:
    """Rotary parameters where only the first channels of a head rotate."""
    return {"rope_parameters": {**PLAIN, "partial_rotary_factor": share}}


def full(
    model_type: str,
    interleaved: bool = False,
    seed: int = 0,
    architecture: str | None = None,
    **own: Any,
) -> Family:
    """A family all of whose layers attend to everything and rotate."""
    layers = (None, None), (True, True)
    return Family(model_type, {**SIZES, **own}, *layers, interleaved, seed, architecture)


def mixed(model_type: str, rotated: tuple[bool, bool] = (True, True), **own: Any) -> Family:
    """A family with a window in its first layer."""
    return Family(model_type, {**SIZES, **SLIDING, **HIDDEN, **own}, (WINDOW, None), rotated)


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "head_dim": 16,
}
LATENT_EXPERTS = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


SOFTMAX_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "attention_multiplier": 32**-0.5,
}
"""Experts as transformers' Granite has them, without its multipliers."""
SIGMOID_EXPERTS = {
    **LATENT_EXPERTS,
    "num_experts": 4,
    "num_shared_experts": 1,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
BAILING = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "embedding_dropout": 0.0,
}


def latent(model_type: str, interleaved: bool = False, **own: Any) -> Family:
    """A family of multi-head latent attention: a row of 48 channels and 16 that rotate."""
    made = full(model_type, interleaved, **{**LATENT, **LATENT_EXPERTS, **own})
    return replace(made, latent=True)


def learned(model_type: str, **own: Any) -> Family:
    """A family with learned positions, as many as the tests' longest stream has tokens."""
    sizes = {"num_key_value_heads": 4, "max_position_embeddings": 2048}
    made = full(model_type, **{**sizes, **own})
    return replace(made, rotated=(False, False), learned=True)


OWN_MODULES: dict[str, Family] = {
    "qwen2": full("qwen2"),
    "qwen3": full("qwen3", rope_parameters=YARN),
    "qwen2-moe": full(
        "qwen2_moe",
        num_experts=4,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        **EXPERTS,
    ),
    "qwen3-moe": full("qwen3_moe", num_experts=4, norm_topk_prob=True, **EXPERTS),
    "mixtral": full("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gemma": full("gemma", hidden_act="gelu_pytorch_tanh"),
    "glm4": full("glm4", interleaved=True, **partly(0.5)),
    "glm4-moe": full(
        "glm4_moe",
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        **EXPERTS,
        **partly(0.5),
    ),
    "granite": full("granite", **MULTIPLIED),
    "granite-moe": full("granitemoe", num_local_experts=4, num_experts_per_tok=2, **MULTIPLIED),
    "stablelm": full("stablelm", use_qkv_bias=True, **partly(0.25)),
    "cohere": full("cohere", interleaved=True, seed=2, logit_scale=0.25, use_qk_norm=True),
    "nemotron": full("nemotron", **partly(0.5)),
    "olmoe": full("olmoe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=False),
    "mistral-full": full("mistral", sliding_window=None),
    "ministral3": full(
        "ministral3",
        rope_parameters={
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "ernie4_5": full("ernie4_5", interleaved=True, tie_word_embeddings=False),
    "ernie4_5-moe": full(
        "ernie4_5_moe",
        interleaved=True,
        tie_word_embeddings=False,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=64,
    ),
    "apertus": full("apertus", rope_parameters=LLAMA3),
    "granite-moe-shared": full(
        "granitemoeshared",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        **MULTIPLIED,
    ),
    "granite-swa": mixed("granite_swa", (True, False), layer_rope_theta=[5000.0, 0], **MULTIPLIED),
    "granite-moe-swa": mixed(
        "granitemoe_swa", num_local_experts=4, num_experts_per_tok=2, **MULTIPLIED
    ),
    "hyperclovax": full("hyperclovax", **MULTIPLIED),
    "hy-v3": full(
        "hy_v3",
        num_experts=4,
        num_shared_experts=1,
        first_k_dense_replace=1,
        expert_hidden_dim=64,
        route_norm=True,
        qk_norm=True,
        **EXPERTS,
    ),
    "laguna": mixed(
        "laguna",
        mlp_layer_types=["dense", "dense"],
        rope_parameters={
            "sliding_attention": PLAIN,
            "full_attention": partly(0.5)["rope_parameters"],
        },
    ),
    "minimax-m2": full(
        "minimax_m2",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        scoring_func="sigmoid",
        use_routing_bias=True,
        rotary_dim=16,
        **partly(0.5),
    ),
    "afmoe": mixed(
        "afmoe",
        (True, False),
        num_dense_layers=1,
        num_experts=4,
        num_shared_experts=1,
        mup_enabled=True,
        **SIGMOIDS,
        **EXPERTS,
    ),
    # Its windows see one token more than the configuration says. Layers before the first experts
    # rotate without a window, too.
    "cohere2-moe": Family(
        "cohere2_moe",
        {
            "rope_parameters": PLAIN,
            "logit_scale": 0.25,
            "sliding_window": WINDOW - 1,
            "layer_types": ["full_attention", "full_attention", *HIDDEN["layer_types"]],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
        },
        windows=(None, None, WINDOW, None),
        rotated=(True, False, True, False),
        interleaved=True,
    ),
    "exaone-moe": mixed(
        "exaone_moe", (True, False), num_experts=4, n_group=1, topk_group=1, **EXPERTS
    ),
    # transformers puts the rotated neighbours of V3 into halves, and those of V2 not.
    "deepseek-v2": latent("deepseek_v2", interleaved=True, q_lora_rank=None),
    "deepseek-v3": latent(
        "deepseek_v3",
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters=DEEPSEEK_YARN,
    ),
    "glm4-moe-lite": latent(
        "glm4_moe_lite",
        rms_norm_eps=1e-6,
        mlp_layer_types=["dense", "sparse"],
        topk_method="noaux_tc",
    ),
    "axk1": latent("axk1", first_k_dense_replace=0, topk_method="noaux_tc", scoring_func="sigmoid"),
    "minicpm3": full("minicpm3", scale_emb=1.0, dim_model_base=64, **LATENT),
    "mimo": full("qwen2", architecture="MiMoForCausalLM"),
    "internlm3": full("llama", attention_bias=True, architecture="InternLM3ForCausalLM"),
    "minicpm": full(
        "granite",
        architecture="MiniCPMForCausalLM",
        scale_emb=2.0,
        embedding_multiplier=2.0,
        scale_depth=1.4,
        residual_multiplier=1.4 / 2**0.5,
        dim_model_base=64,
        **GRANITE,
    ),
    "teleflm": full(
        "granite",
        architecture="TeleFLMForCausalLM",
        use_mup=True,
        mup_scale_factor=2.0,
        output_mult=1.0,
        **GRANITE,
    ),
    "orion": full("stablelm", architecture="OrionForCausalLM", rms_norm_eps=1e-5, **partly(1.0)),
    "solar": full(
        "llama",
        architecture="SolarForCausalLM",
        bskcn_1=[],
        bskcn_2=[],
        bskcn_3=[],
        bskcn_4=[],
        bskcn_tv=[0.9, 0.8],
    ),
    "pangu-embedded": full("llama", architecture="PanguEmbeddedForCausalLM", attention_bias=True),
    "exaone": full(
        "llama",
        architecture="ExaoneForCausalLM",
        layer_norm_epsilon=1e-6,
        activation_function="silu",
    ),
    "internlm2": full("llama", architecture="InternLM2ForCausalLM", bias=False),
    "bailing-moe": full(
        "granitemoeshared",
        architecture="BailingMoeForCausalLM",
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=64,
        **SOFTMAX_EXPERTS,
        **BAILING,
    ),
    "deepseek": full(
        "granitemoeshared",
        architecture="DeepseekForCausalLM",
        qk_nope_head_dim=0,
        qk_rope_head_dim=0,
        **{
            **LATENT_EXPERTS,
            **SOFTMAX_EXPERTS,
            "moe_intermediate_size": 96,
            "shared_intermediate_size": 96,
        },
    ),
    "bailing-moe-2": full(
        "glm4_moe",
        architecture="BailingMoeV2ForCausalLM",
        **SIGMOID_EXPERTS,
        **BAILING,
        **partly(0.5),
    ),
    "sarvam-moe": full(
        "glm4_moe",
        architecture="SarvamMoEForCausalLM",
        **SIGMOID_EXPERTS,
        **BAILING,
        **partly(0.5),
    ),
    "sarvam-mla": latent(
        "deepseek_v3",
        architecture="SarvamMLAForCausalLM",
        rope_parameters=DEEPSEEK_YARN,
        q_lora_rank=None,
        num_experts=4,
        num_shared_experts=1,
    ),
    "mistral-large3": latent(
        "deepseek_v3",
        architecture="MistralLarge3ForCausalLM",
        scoring_func="sigmoid",
        rope_parameters={**YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "chatglm": full("glm", True, architecture="ChatGLMModel", attention_bias=True, **partly(0.5)),
    "gptj": full("phi", architecture="GPTJForCausalLM", num_key_value_heads=4, **partly(0.5)),
    "falcon": full(
        "phi",
        architecture="FalconForCausalLM",
        hidden_act="gelu",
        intermediate_size=512,
        **partly(1.0),
    ),
    "telechat2": full(
        "llama",
        architecture="TeleChat2ForCausalLM",
        num_key_value_heads=4,
        attention_bias=True,
        mlp_bias=True,
    ),
    "rnj1": full(
        "gemma3_text",
        architecture="Rnj1ForCausalLM",
        layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": YARN},
        query_pre_attn_scalar=20,
        final_logit_softcapping=20.0,
    ),
    "k2-horizon": full(
        "glm4_moe",
        architecture="K2HorizonForCausalLM",
        use_qk_norm=True,
        **LATENT_EXPERTS,
        **partly(0.5),
    ),
    "muse-glimmer": replace(
        mixed(
            "muse_glimmer_reference",
            (True, False),
            layer_rope_theta=[10000.0, 0],
            qk_scale_factor=1.5,
            output_multiplier=0.5,
        ),
        architecture="MuseGlimmerForCausalLM",
    ),
    "step3": full(
        "step3_reference",
        architecture="Step3TextForCausalLM",
        num_key_value_heads=1,
        share_q_dim=64,
        **SOFTMAX_EXPERTS,
    ),
    # Layers with a window have more heads, and its configuration names layers that do not rotate.
    "step3p5": replace(
        mixed(
            "step3p5_reference",
            (False, True),
            rope_parameters={
                "sliding_attention": PLAIN,
                "full_attention": {**PLAIN, "partial_rotary_factor": 0.5},
            },
            use_rope_layers=[False, True],
            num_sliding_attention_heads=8,
            mlp_layer_types=["dense", "sparse"],
            n_routed_experts=4,
            share_expert_dim=64,
            moe_router_scaling_factor=1.5,
            **EXPERTS,
        ),
        architecture="Step3p5ForCausalLM",
    ),
    "iquest-loop-coder": Family(
        "iquestloopcoder",
        {**SIZES, "loop_num": 2, "loop_window_size": WINDOW},
        windows=(None, None, WINDOW, WINDOW, None, None),
        rotated=(True,) * 6,
        architecture="IQuestLoopCoderForCausalLM",
        owners=((4, 0), (5, 1)),
    ),
    "plamo3": replace(
        mixed(
            "gemma3_text",
            rope_parameters={"sliding_attention": PLAIN, "full_attention": LINEAR},
            query_pre_attn_scalar=32,
            hidden_activation="silu",
            tie_word_embeddings=False,
            interleaved_sliding_window=[WINDOW, None],
        ),
        architecture="Plamo3ForCausalLM",
    ),
    "gpt2": learned("gpt2", n_inner=96),
    # Smaller embeddings than layers, and norms behind them, as in OPT-350m.
    "opt": learned("opt", ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=False),
    "phimoe": full(
        "phimoe",
        architecture="PhiMoEForCausalLM",
        attention_bias=True,  # and none of logits, which vLLM would leave out
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Families that vLLM has modules of its own for."""

IMAGES = ("muse-glimmer",)
"""Families that vLLM has a module for that sees images, too."""

OTHER_NAMES: dict[str, Family] = {
    "llama-1": full("llama", architecture="LLaMAForCausalLM"),
    "iquest-coder": full("llama", architecture="IQuestCoderForCausalLM"),
    "telechat3": full("llama", architecture="TeleChat3ForCausalLM"),
    "exaone-moe-e": replace(OWN_MODULES["exaone-moe"], architecture="ExaoneMoEForCausalLM"),
}
"""Architectures that run modules of other ones."""

BY_TRANSFORMERS: dict[str, Family] = {
    "olmo2": full("olmo2"),
    "olmo": full("olmo", clip_qkv=4.0),
    "phi": full("phi", **partly(0.5)),
    "gpt-neox": full("gpt_neox", num_key_value_heads=4, **partly(0.25)),
    "starcoder2": full("starcoder2", sliding_window=None, rope_parameters=LINEAR),
    "glm": full("glm", interleaved=True, **partly(0.5)),
    "arcee": full("arcee", rope_parameters=YARN),
    "cwm": mixed("cwm", rope_parameters=LLAMA3),
    "seed-oss": full("seed_oss"),
    "flex-olmo": full("flex_olmo", num_experts=4, num_experts_per_tok=2),
    "vaultgemma": mixed(
        "vaultgemma",
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "jais2": full("jais2"),
    "nanbeige": full("llama", architecture="NanbeigeForCausalLM"),
    "mellum": mixed(
        "mellum",
        rope_parameters={"sliding_attention": PLAIN, "full_attention": LINEAR},
        num_experts=4,
        mlp_layer_types=["sparse", "sparse"],
        **EXPERTS,
    ),
    "gpt-bigcode": learned("gpt_bigcode", num_key_value_heads=1, n_inner=96),
    "hunyuan": full("hunyuan_v1_dense", **ALPHA),
    "hunyuan-moe": full("hunyuan_v1_moe", num_experts=4, moe_topk=2, **ALPHA),
}
"""Families that vLLM runs through transformers' modules."""

NOT_LOADED = {
    "dbrx": full(
        "dbrx",
        d_model=128,
        n_heads=4,
        n_layers=2,
        max_seq_len=512,
        attn_config={"kv_n_heads": 2, "clip_qkv": 4.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    )
}
"""Families whose experts vLLM 0.32 itself cannot load."""

NORMALISED_AFTERWARDS = ("hunyuan", "hunyuan-moe")
"""Families with a norm, and weights by channel, after the rotation."""
