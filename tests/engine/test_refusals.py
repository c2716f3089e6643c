# SPDX-License-Identifier: Apache-2.0
"""Every refused engine setting and model: one clear error, before a model is loaded.

The real ``create_engine_config`` runs, on models that are a ``config.json`` and no weights: an
error after it would need weights to be read.
"""

import importlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm import envs
from vllm.config import (
    AttentionConfig,
    KVEventsConfig,
    ParallelConfig,
    VllmConfig,
    WatermarkConfig,
)
from vllm.config import replace as config_replace
from vllm.config import vllm as vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils

from tests.conftest import MODEL
from tests.oracle.drafting import write_target
from vllm_cascade.attention.cuda.backend import CUDAKVPolicyBackend, CUDALatentBackend
from vllm_cascade.attention.cuda.mail import DeviceTables
from vllm_cascade.attention.cuda.rule_room import MOST_BYTES
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.engine import configure as engine
from vllm_cascade.engine import devices
from vllm_cascade.engine.devices import CPU, CUDA, DEVICES, WITHOUT_CPU_KERNEL, current_platform
from vllm_cascade.engine.refusals import Refusal, check
from vllm_cascade.policies.registry import policy_of, resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import KVPolicyError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


LATENT = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
}


GEMMA4 = {
    **LLAMA,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
"""Layers with windows and without, which may differ in their heads."""


def rope(**parameters: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_theta": 10000.0, **parameters}}


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
DRAFTS = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "drafts over stages": (
        {"speculative_config": NGRAM, "pipeline_parallel_size": 2},
        "--speculative-config cannot be combined with --pipeline-parallel-size .*only the last one",
    ),
    "KV connector": (
        {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
            }
        },
        "--kv-transfer-config",
    ),
    "KV offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    "vLLM's own prefix caching": (
        {"prefix_cache_retention_interval": 256},
        "--prefix-cache-retention-interval",
    ),
    "quantised KV cache": (
        {"kv_cache_dtype": "int4_per_token_head"},
        "--kv-cache-dtype .*fp8, .*fp8_per_token_head, int8_per_token_head",
    ),
    "layers that are not quantised": (
        {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
        "--kv-cache-dtype-skip-layers",
    ),
    "block events": (
        {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)},
        """--grpc.*add --kv-events-config '{"enable_kv_cache_events": false}'""",
    ),
    "scheduler": ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
    "worker": ({"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}, "--worker-cls"),
    "prefill threshold": ({"long_prefill_token_threshold": 8}, "--long-prefill-token-threshold"),
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "rope type": (rope(rope_type="dynamic", factor=2.0), "dynamic NTK"),
    "recurrent layers without a kernel": (
        {
            "architectures": ["JambaForCausalLM"],
            "model_type": "jamba",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 8,
            "vocab_size": 128,
        },
        "no kernel for this model's recurrent layers",
    ),
    "dual-chunk attention": (
        {
            **LLAMA,
            "dual_chunk_attention_config": {"chunk_size": 256, "local_size": 64},
        },
        "dual-chunk",
    ),
    "chunks with the one before": (
        {
            **LLAMA,
            "architectures": ["Rnj1ForCausalLM"],
            "model_type": "gemma3_text",
            "layer_types": ["chunked_attention", "full_attention"],
            "num_hidden_layers": 2,
            "sliding_window": 64,
            "query_pre_attn_scalar": 16,
        },
        "layers that attend to their chunk and the one before",
    ),
    "layers without rotary positions": (
        {**LLAMA, "no_rope_layers": [1, 0], "num_hidden_layers": 2},
        "this model's layers without rotary positions",
    ),
    "encoder-decoder": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "vocab_size": 128,
            "is_encoder_decoder": True,
        },
        "encoder-decoder",
    ),
    "sparse attention": (
        {
            **LATENT,
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "q_lora_rank": 16,
            "index_topk": 64,
            "index_head_dim": 16,
            "index_n_heads": 2,
        },
        "choose the tokens that they attend to",
    ),
    "state-space layers": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "hidden_size": 64,
            "state_size": 8,
            "num_hidden_layers": 1,
            "vocab_size": 128,
        },
        "all layers of the model are recurrent",
    ),
}
FAKED: dict[str, tuple[Any, str]] = {
    "absolute positions": (
        SimpleNamespace(
            model_config=SimpleNamespace(
                uses_alibi=False,
                hf_text_config=SimpleNamespace(model_type="xglm", rope_parameters=None),
            )
        ),
        "whose learned positions are supported (gpt2, gpt_bigcode, opt)",
    ),
    "learned positions of a drafting model": (
        SimpleNamespace(
            speculative_config=SimpleNamespace(
                method="draft_model",
                draft_model_config=SimpleNamespace(
                    hf_text_config=SimpleNamespace(model_type="opt")
                ),
            )
        ),
        "use another one, or method ngram or suffix",
    ),
    "more than two runs": (
        SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(
                    architectures=["IQuestLoopCoderForCausalLM"], loop_num=3
                )
            )
        ),
        "loop_num of IQuest Loop Coder",
    ),
    "runs that overwrite a cache": (
        SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(
                    recurrent_kv_cache_mode="last_loop", n_recurrent_loops=2
                )
            )
        ),
        "recurrent_kv_cache_mode last_loop of Dory",
    ),
    "attention of its own": (
        SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="flint"))
        ),
        "use --kv-policy full",
    ),
    "recall of several shapes": (
        SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(
                    block_configs=[
                        {"attention": {"n_heads_in_group": size, "no_op": size is None}}
                        for size in (4, None, 2)
                    ]
                )
            )
        ),
        "set --kv-recall 0",
    ),
    "tensor parallelism": (
        SimpleNamespace(
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
            parallel_config=SimpleNamespace(tensor_parallel_size=4),
        ),
        "--tensor-parallel-size must divide",
    ),
    "recalled latents in 8 bits": (
        SimpleNamespace(model_config=SimpleNamespace(use_mla=True)),
        "set recall_rows to exact",
    ),
    "MLA by transformers": (
        SimpleNamespace(
            model_config=SimpleNamespace(use_mla=True, using_transformers_backend=lambda: True)
        ),
        "--model-impl vllm",
    ),
    # No such machine or configuration can be built here, so the check alone is called.
    "context parallelism": (
        SimpleNamespace(
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=2, prefill_context_parallel_size=1
            )
        ),
        "--decode-context-parallel-size",
    ),
    "clusters over ranks": (
        SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2)),
        'set head_policy to "per_kv_head"',
    ),
    "micro-batches": (
        SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=True)),
        "--enable-dbo",
    ),
    "elastic engines": (
        SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True)),
        "--enable-elastic-ep is not tested",
    ),
    "fault tolerance": (
        SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=True)),
        "--enable-fault-tolerance",
    ),
    "quantised means": (
        SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="fp8_per_token_head")),
        "set --kv-cache-dtype to auto",
    ),
    "other drafters": (
        SimpleNamespace(speculative_config=SimpleNamespace(method="medusa")),
        "set its method to one of ngram, suffix, custom_class, draft_model, eagle, eagle3, mtp",
    ),
    "drafters of their own kind": (
        SimpleNamespace(
            speculative_config=SimpleNamespace(
                method="mtp",
                use_gemma4_mtp=lambda: False,
                use_step3p5_mtp=lambda: False,
                draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(n_predict=2)),
            )
        ),
        "set its method to draft_model, ngram or suffix",
    ),
    "MTP by transformers": (
        SimpleNamespace(
            speculative_config=SimpleNamespace(
                method="mtp",
                draft_model_config=SimpleNamespace(architectures=["TransformersMoEForMTP"]),
            )
        ),
        "set --model-impl vllm",
    ),
    "parallel drafts": (
        SimpleNamespace(speculative_config=SimpleNamespace(parallel_drafting=True)),
        "set it to false",
    ),
    "drafts of another vocabulary": (
        SimpleNamespace(speculative_config=SimpleNamespace(use_heterogeneous_vocab=True)),
        "use a draft model with the model's own vocabulary",
    ),
    "adaptive verification": (
        SimpleNamespace(speculative_config=SimpleNamespace(enable_adaptive_verification=True)),
        "set it to false",
    ),
    "drafts cached in another type": (
        SimpleNamespace(speculative_config=SimpleNamespace(kv_cache_dtype="fp8")),
        "remove it, and the drafting model's cache has the type of --kv-cache-dtype",
    ),
    "drafts that quantise their cache": (
        SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="auto"),
            speculative_config=SimpleNamespace(
                method="eagle3",
                draft_model_config=SimpleNamespace(
                    hf_config=SimpleNamespace(quantization_config={"kv_cache_scheme": {"a": 8}})
                ),
            ),
        ),
        "set --kv-cache-dtype to fp8, or to the model's dtype",
    ),
    "drafts of scores by text": (
        SimpleNamespace(speculative_config=SimpleNamespace(method="ngram")),
        'set importance to "attention"',
    ),
    "drafts of moved tokens": (
        SimpleNamespace(speculative_config=SimpleNamespace(method="ngram")),
        'set importance to "attention" and order to "chronological"',
    ),
    "drafts of recurrent layers": (
        SimpleNamespace(
            speculative_config=SimpleNamespace(method="ngram"),
            model_config=SimpleNamespace(is_hybrid=True),
        ),
        "a model with recurrent layers",
    ),
    "drafts of shared caches": (
        SimpleNamespace(
            speculative_config=SimpleNamespace(method="ngram"),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_kv_shared_layers=2)),
        ),
        "cannot be combined with models whose layers share caches",
    ),
    "prompts in both directions": (
        SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="hrm_text"))
        ),
        "use --kv-policy full",
    ),
    "values scaled by position": (
        SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(model_type="moondream3_text")
            )
        ),
        "use --kv-policy full",
    ),
    "returned experts": (
        SimpleNamespace(aux_output_config=SimpleNamespace(enabled=True)),
        "--enable-return-routed-experts",
    ),
    "diffusion": (SimpleNamespace(diffusion_config=SimpleNamespace()), "use --kv-policy full"),
    "random windows": (
        SimpleNamespace(model_config=SimpleNamespace(rswa_window=128)),
        "random windows",
    ),
    "scores by text over stages": (
        SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2)),
        'set importance to "attention"',
    ),
    "recurrent layers over stages": (
        SimpleNamespace(
            model_config=SimpleNamespace(is_hybrid=True),
            parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        ),
        "not tested with --pipeline-parallel-size",
    ),
    "shared caches over stages": (
        SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_kv_shared_layers=2)),
            parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        ),
        "--pipeline-parallel-size must be 1",
    ),
    "whole images beside shared caches": (
        SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_kv_shared_layers=2)),
            scheduler_config=SimpleNamespace(disable_chunked_mm_input=True),
        ),
        "--disable-chunked-mm-input cannot",
    ),
    "fast prefill": (
        SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=True)),
        "--kv-sharing-fast-prefill",
    ),
    "type of delta nets": (
        SimpleNamespace(
            model_config=SimpleNamespace(
                dtype="float32", hf_text_config=SimpleNamespace(model_type="qwen3_next")
            )
        ),
        "set --dtype bfloat16",
    ),
    "watermarks on the CPU": (
        SimpleNamespace(watermark_config=SimpleNamespace()),
        "--watermark-config cannot be combined with --kv-policy on the CPU",
    ),
    "replayed states": (
        SimpleNamespace(cache_config=SimpleNamespace(use_replayssm=True)),
        "--use-replayssm",
    ),
    "encoder only": (
        SimpleNamespace(is_mm_encoder_only=True),
        "--mm-encoder-only, or ec_role ec_producer",
    ),
    "prefix LM": (
        SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True)),
        "attend in both directions",
    ),
    "scores by text of embeddings": (
        SimpleNamespace(model_config=SimpleNamespace(enable_prompt_embeds=True)),
        "--enable-prompt-embeds",
    ),
    "sessions of an external launcher": (
        SimpleNamespace(
            parallel_config=SimpleNamespace(
                distributed_executor_backend="external_launcher", world_size=2
            ),
            additional_config={"kv_sessions": True},
        ),
        "--distributed-executor-backend external_launcher",
    ),
    "pooling": (
        SimpleNamespace(model_config=SimpleNamespace(runner_type="pooling")),
        "text generation only",
    ),
}
ON_CUDA: dict[str, tuple[Any, str]] = {
    # configuration, message; the platform is faked
    "attention backend": (
        SimpleNamespace(attention_config=SimpleNamespace(backend="FLASH_ATTN")),
        "--attention-backend",
    ),
    "untested recurrent layers on CUDA": (
        SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="jamba"))
        ),
        "are not tested",
    ),
    "attention backend of drafts": (
        SimpleNamespace(speculative_config=SimpleNamespace(attention_backend="FLASH_ATTN")),
        "brings its own backend; remove it",
    ),
    "cache type on CUDA": (
        SimpleNamespace(
            model_config=SimpleNamespace(dtype="torch.bfloat16"),
            cache_config=SimpleNamespace(cache_dtype="float16"),
        ),
        "in the model's own type or in 8 bits",
    ),
}
ENVIRONMENT = {"Model Runner V2 on the CPU", "Rust front-end", "Ray's first executor"}


def create(model: Path, budget: int = 128, **kwargs: Any) -> Any:
    policy = {"name": "cascade", "budget": budget, "prefill_stride": 64}
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        additional_config={"kv_policy": policy},
        **kwargs,
    ).create_engine_config()


def all_on_cuda() -> set[str]:
    alone = {RULES_ON_CUDA, OLD_CARDS, OFFSETS_ON_CUDA, LONG_HEADS}
    return {*ON_CUDA, *RECALL_ON_CUDA, *VARIABLES_ON_CUDA, *alone}


def test_the_list_is_complete() -> None:
    tested = set(SETTINGS) | set(MODELS) | set(FAKED) | all_on_cuda() | ENVIRONMENT
    tested.add(ODD_HEADS)
    assert tested == {entry.name for device in DEVICES.values() for entry in device.refusals}


def refusal_of(name: str, device: str = "cpu") -> Refusal:
    (found,) = [entry for entry in DEVICES[device].refusals if entry.name == name]
    return found


def test_the_device_of_another_platform_is_not_asked() -> None:
    elsewhere = {entry.name for entry in DEVICES["cuda"].own_refusals}
    assert elsewhere == all_on_cuda()
    assert not elsewhere & {entry.name for entry in DEVICES["cpu"].refusals}


@pytest.mark.parametrize("name", SETTINGS)
def test_refused_setting(name: str) -> None:
    settings, message = SETTINGS[name]
    with pytest.raises(KVPolicyError, match=message):
        create(MODEL, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_refused_model(name: str, tmp_path: Path) -> None:
    config, message = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KVPolicyError, match=message):
        create(tmp_path)


GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 1,
    "n_positions": 1024,
    "vocab_size": 128,
}


def test_streams_past_learned_positions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert create(tmp_path).model_config.max_model_len == 1024
    with pytest.raises(KVPolicyError, match=r"--max-model-len 1025 .* 1024 .*at most 1024"):
        create(tmp_path, max_model_len=1025)


def test_a_rotary_type_of_one_base(tmp_path: Path) -> None:
    """HunYuan's; with a factor above 1 it would change with the length of a stream."""
    config = rope(rope_type="dynamic", alpha=1000.0, factor=1.0)
    hunyuan = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
    (tmp_path / "config.json").write_text(json.dumps(config | hunyuan))
    create(tmp_path)
    config["rope_parameters"]["factor"] = 2.0
    (tmp_path / "config.json").write_text(json.dumps(config | hunyuan))
    with pytest.raises(KVPolicyError, match=r"supported: .*dynamic with alpha"):
        create(tmp_path)


@pytest.mark.parametrize(
    ("keys", "applies"),
    [
        ({"indexer_budget": 2048}, True),  # Qwen 4
        ({"indexer_budget": None}, False),
        ({"sparse_attention_config": {"sparse_topk_blocks": 16}}, True),  # MiniMax M3
        ({"compress_ratios": [0, 4]}, True),
        ({}, False),
    ],
)
def test_layers_that_choose_tokens(keys: dict[str, Any], applies: bool) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**keys)))
    assert refusal_of("sparse attention").applies(config, resolve({"name": "sink"})) == applies


@pytest.mark.parametrize("name", FAKED)
def test_refused_configuration(name: str) -> None:
    config, message = FAKED[name]
    refusal = refusal_of(name)
    own = {
        "clusters over ranks": {"name": "dgc", "importance": "cluster"},
        "quantised means": {"name": "dgc", "importance": "cluster"},
        "drafts of scores by text": {"name": "dgc", "importance": "tfidf"},
        "drafts of moved tokens": {
            "name": "dgc",
            "importance": "attention",
            "order": "importance",
        },
        "scores by text over stages": {"name": "dgc", "importance": "tfidf"},
        "scores by text of embeddings": {"name": "dgc", "importance": "tfidf"},
        "recall of several shapes": {"name": "sink", "recall": 8},
        "recalled latents in 8 bits": {"name": "sink", "recall": 2, "recall_rows": "int8"},
    }
    raw = own.get(name, {"name": "cascade", "head_policy": "per_kv_head"})
    assert refusal.applies(config, resolve(raw))
    assert message in refusal.message


@pytest.mark.parametrize("name", ON_CUDA)
def test_refused_on_cuda(name: str) -> None:
    config, message = ON_CUDA[name]
    refusal = refusal_of(name, "cuda")
    assert refusal.applies(config, resolve({"name": "cascade"}))
    assert message in refusal.message


@pytest.mark.parametrize(
    "keys",
    [
        *({"model_type": model_type} for model_type in WITHOUT_CPU_KERNEL),
        {"model_type": "alice", "architectures": ["AliceAIForCausalLM"]},  # Kimi's layers
    ],
    ids=lambda keys: keys["model_type"],
)
def test_models_with_recurrent_layers_that_are_refused(keys: dict[str, Any]) -> None:
    hf = SimpleNamespace(**keys)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=hf))
    policy = resolve({"name": "sink"})
    assert refusal_of("untested recurrent layers on CUDA", "cuda").applies(config, policy)
    assert refusal_of("recurrent layers without a kernel").applies(config, policy)


@pytest.mark.parametrize(
    ("keys", "applies"),
    [
        ({"recurrent_kv_cache_mode": "per_loop", "n_recurrent_loops": 2}, False),
        ({"recurrent_kv_cache_mode": "last_loop", "n_recurrent_loops": 1}, False),
        ({}, False),
    ],
)
def test_runs_with_caches_of_their_own(keys: dict[str, Any], applies: bool) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**keys)))
    refusal = refusal_of("runs that overwrite a cache")
    assert refusal.applies(config, resolve({"name": "sink"})) == applies


@pytest.mark.parametrize(
    ("blocks", "applies"),
    [
        ([{"attention": SimpleNamespace(n_heads_in_group=size)} for size in (4, 2)], True),
        ([{"num_key_value_heads": heads} for heads in (8, None, 4)], True),  # others' are experts
        ([{"num_key_value_heads": heads} for heads in (8, None, 8)], False),
        (None, False),
    ],
)
def test_numbers_of_kv_heads(blocks: Any, applies: bool) -> None:
    hf = SimpleNamespace(block_configs=blocks)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=hf))
    refusal = refusal_of("recall of several shapes")
    assert refusal.applies(config, resolve({"name": "sink", "recall": 8})) == applies
    assert not refusal.applies(config, resolve({"name": "sink"}))


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "float16", *CODES])
@pytest.mark.parametrize("use_mla", [True, False])
def test_cache_types_on_cuda(cache_dtype: str, use_mla: bool) -> None:
    """The model's own type, and codes."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    works = cache_dtype in ("auto", "bfloat16", *CODES)
    refusal = refusal_of("cache type on CUDA", "cuda")
    assert refusal.applies(config, resolve({"name": "cascade"})) != works
    backend = CUDALatentBackend if use_mla else CUDAKVPolicyBackend
    if works:
        assert backend.supports_kv_cache_dtype(cache_dtype)


ODD_HEADS = "recall of odd head sizes"
BLOCKS = [{"attention": {"n_heads_in_group": size, "no_op": False}} for size in (2, 4)]
"""DeciLM's layers."""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 50}, "no multiple of 4"),  # four channels are multiplied at once
        ({**GEMMA4, "head_dim": 64, "global_head_dim": 50}, "no multiple of 4"),
        ({"num_hidden_layers": 2, "block_configs": BLOCKS}, "numbers of KV heads (DeciLM)"),
    ],
    ids=["odd head sizes", "odd head sizes without windows", "layers of several shapes"],
)
def test_models_that_run_without_recall(
    changed: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Recall's default gives way; recall that is asked for is an error."""
    monkeypatch.setattr(engine.logger, "propagate", True)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    assert create(tmp_path).additional_config["kv_policy"]["recall"] == 0
    assert "evicted tokens cannot be recalled" in caplog.text and reason in caplog.text
    policy = {"name": "sink", "budget": 128, "prefill_stride": 64, "recall": 8}
    with pytest.raises(KVPolicyError, match=re.escape(f"{reason}; set --kv-recall 0")):
        EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            additional_config={"kv_policy": policy},
        ).create_engine_config()


RECALL_ON_CUDA: dict[str, tuple[Any, dict[str, Any], str]] = {
    # configuration, settings beside recall, message
    "recall of long units on CUDA": (
        None,
        {"unit": 256, "budget": 2048},
        "128 tokens at most",
    ),
    "recalled rows in 8 bits on CUDA": (None, {"recall_rows": "int8"}, "set recall_rows to exact"),
}


@pytest.mark.parametrize("name", RECALL_ON_CUDA)
def test_recall_refused_on_cuda(name: str) -> None:
    config, settings, message = RECALL_ON_CUDA[name]
    refusal = refusal_of(name, "cuda")
    plain = {"name": "sink", "num_sinks": 0, "prefill_stride": 512, **settings}
    recall = resolve({**plain, "recall": 8})
    assert refusal.applies(config, recall) and not refusal.applies(config, resolve(plain))
    assert message in refusal.message


def test_recall_on_cuda_needs_nothing_else() -> None:
    """Two ranks, snapshots, units of 16."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    policy = resolve({"name": "sink", "recall": 8})
    for name in RECALL_ON_CUDA:
        assert not refusal_of(name, "cuda").applies(config, policy), name


RULES_ON_CUDA = "rules of kept prompts on CUDA"
OLD_CARDS = "old cards"
OFFSETS_ON_CUDA = "cached tokens on CUDA"
LONG_HEADS = "long heads on CUDA"


@pytest.mark.parametrize(
    ("card", "is_old"), [((7, 5), True), ((8, 0), False), ((12, 1), False), (None, False)]
)
def test_cards_that_no_kernel_is_compiled_for(
    card: tuple[int, int] | None, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = None if card is None else DeviceCapability(*card)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: capability)
    refusal = refusal_of(OLD_CARDS, "cuda")
    assert refusal.applies(SimpleNamespace(), resolve({"name": "sink"})) is is_old
    assert "compute capability 8.0" in refusal.message and "--kv-policy full" in refusal.message


def test_rules_of_kept_prompts_must_fit() -> None:
    """Those of a full batch; without kept prompts, requests' own policies are bounded."""
    refusal = refusal_of(RULES_ON_CUDA, "cuda")
    assert "256 MiB" in refusal.message and "overflow or --max-num-seqs" in refusal.message
    many, few = (
        SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=n)) for n in (1024, 256)
    )
    plain = {"name": "cascade", "budget": 1024, "num_subcaches": 4, "overflow": 999}
    kept = resolve({**plain, "keep_prompt": 64})
    assert refusal.applies(many, kept) and not refusal.applies(few, kept)
    assert not refusal.applies(many, resolve(plain))
    tables = DeviceTables(compiled(kept), torch.device("meta"), 256)
    assert tables.rules.nbytes <= MOST_BYTES < 4 * tables.rules.nbytes


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ({**LLAMA, "head_dim": 128}, 8_388_544),  # of units of 64, those below 2^31 / 256
        ({**GEMMA4, "head_dim": 128, "global_head_dim": 512}, 2_097_088),
        ({**LATENT, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 3_728_256),
    ],
    ids=["one size", "long heads without windows", "latent rows"],
)
def test_rows_that_offsets_reach(model: dict[str, Any], fits: int, tmp_path: Path) -> None:
    """Layers with the longest rows decide. Only budgets in units can be as large."""
    refusal = refusal_of(OFFSETS_ON_CUDA, "cuda")
    assert "--kv-budget" in refusal.message and "8,388,608" in refusal.message
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    for sinks in (0, 64):
        for tokens in (2048, fits, fits + 64):
            own = {"unit": 64, "num_sinks": sinks, "budget": tokens - sinks - 64}
            policy = resolve({"name": "sink", **own})
            assert policy.capacity == tokens, "and the unit that is being filled"
            assert refusal.applies(config, policy) is (tokens > fits)


VARIABLES_ON_CUDA: dict[str, tuple[str, dict[str, Any], str]] = {
    # variable, settings that it is refused with, message
    "batch invariance on CUDA": ("VLLM_BATCH_INVARIANT", {}, "unset it, or use --kv-policy full"),
    "start plans on CUDA": ("VLLM_ENABLE_STARTUP_PLAN", {"recall": 8}, "set recall_memory"),
}


@pytest.mark.parametrize("name", VARIABLES_ON_CUDA)
def test_refused_variable_on_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, settings, message = VARIABLES_ON_CUDA[name]
    refusal, policy = refusal_of(name, "cuda"), resolve({"name": "sink", **settings})
    config = SimpleNamespace()
    assert message in refusal.message and variable in refusal.message
    assert not refusal.applies(config, policy)
    monkeypatch.setenv(variable, "1")
    assert refusal.applies(config, policy)


def test_start_plans_know_the_memory_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of what vLLM finds a plan by; a policy without recall has none."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    refusal = refusal_of("start plans on CUDA", "cuda")
    given = {"name": "sink", "recall": 8, "recall_memory": 4}
    assert not refusal.applies(SimpleNamespace(), resolve(given))
    assert not refusal.applies(SimpleNamespace(), resolve({"name": "sink"}))


@pytest.mark.parametrize(
    "argument",
    [
        {"mamba_cache_mode": "align"},
        {"mamba_block_size": 64},
        {"enable_mamba_shared_prefix_checkpoint": True},
        {"prefix_match_unit": 32},
        None,
    ],
    ids=repr,
)
def test_settings_of_vllms_own_prefix_caching(
    argument: dict[str, Any] | None, tmp_path: Path
) -> None:
    """In models with recurrent layers vLLM fills some of them in; those are no error."""
    model = AutoConfig.for_model("lfm2", architectures=["Lfm2ForCausalLM"], num_hidden_layers=4)
    model.layer_types = ["conv", "full_attention", "conv", "conv"]
    model.save_pretrained(tmp_path)
    asked = {"dtype": "float32", "max_model_len": 1024, "enable_prefix_caching": True}
    if argument is None:
        config = create(tmp_path, **asked)
        assert config.cache_config.mamba_cache_mode == "none"
        return
    with pytest.raises(KVPolicyError, match=f"{next(iter(argument)).replace('_', '-')}.* remove"):
        create(tmp_path, **asked, **argument)


@pytest.mark.parametrize("sizes", [{"block_size": 32}, {}])
def test_a_unit_may_be_a_page(sizes: dict[str, int]) -> None:
    """Also where vLLM chooses the page's size."""
    policy = {"name": "cascade", "budget": 256, "num_subcaches": 2, "unit": "page"}
    made = EngineArgs(model=str(MODEL), additional_config={"kv_policy": policy}, **sizes)
    config = made.create_engine_config()
    resolved = config.additional_config["kv_policy"]
    assert resolved["unit"] == resolved["num_sinks"] == config.cache_config.block_size
    assert config.cache_config.block_size == sizes.get("block_size", 128)


def test_a_unit_that_does_not_divide_a_page() -> None:
    policy = {"name": "sink", "budget": 96, "unit": 48}
    with pytest.raises(KVPolicyError, match=r"unit.\] 48 does not divide a page of 32 tokens"):
        EngineArgs(
            model=str(MODEL), additional_config={"kv_policy": policy}, block_size=32
        ).create_engine_config()


def test_cuda_needs_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is pointed at the GPU worker and vLLM's CUSTOM backend."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    monkeypatch.delenv("VLLM_CASCADE_CUDA", raising=False)
    monkeypatch.setattr(CUDA, "stock_worker", DEVICES["cpu"].stock_worker)  # this machine's
    config = create(MODEL)
    assert config.parallel_config.worker_cls == DEVICES["cuda"].worker
    assert config.attention_config.backend.name == "CUSTOM"
    assert config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, False),
        ({"attention_backend": "auto"}, False),
        ({"attention_backend": "TRITON_ATTN"}, True),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, True),
    ],
)
def test_a_backend_that_vllm_has_chosen_is_not_refused(
    given: dict[str, Any], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses one for Gemma 4 on cards without FlashAttention 4."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda version: False)
    stock = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    assert stock.attention_config.backend.name == "TRITON_ATTN"
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(CUDA, "stock_worker", DEVICES["cpu"].stock_worker)  # this machine's
    if refused:
        with pytest.raises(KVPolicyError, match=r"--attention-backend, .* remove one of the two"):
            create(tmp_path, **given)
    else:
        assert create(tmp_path, **given).attention_config.backend.name == "CUSTOM"


def write_gemma4(folder: Path, **heads: int) -> None:
    """A configuration of two layers, whose heads differ."""
    model = AutoConfig.for_model(
        "gemma4_text",
        architectures=["Gemma4ForCausalLM"],
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=128,
        max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        hidden_size_per_layer_input=0,
        **heads,
    )
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("heads", "refused"),
    [
        ({"head_dim": 256, "global_head_dim": 512}, False),
        ({"head_dim": 256, "global_head_dim": 520}, True),
        ({"head_dim": 520, "global_head_dim": 256}, True),
    ],
)
def test_heads_without_a_kernel_on_cuda(
    heads: dict[str, int], refused: bool, tmp_path: Path
) -> None:
    """Those of any layer count; vLLM's check of the backend agrees. CPUs take all."""
    write_gemma4(tmp_path, **heads)
    config = create(tmp_path)
    refusal = refusal_of(LONG_HEADS, "cuda")
    assert refusal.applies(config, resolve({"name": "cascade"})) is refused
    assert "more than 512 channels" in refusal.message
    assert all(map(CUDAKVPolicyBackend.supports_head_size, heads.values())) is not refused


def test_latent_rows_are_no_long_heads(tmp_path: Path) -> None:
    """DeepSeek's have 576 channels."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(LATENT | sizes))
    config = create(tmp_path)
    assert config.model_config.get_head_size() == 576
    assert not refusal_of(LONG_HEADS, "cuda").applies(config, resolve({"name": "cascade"}))


@pytest.mark.parametrize(("importance", "warned"), [("attention", False), ("cluster", True)])
def test_what_no_kernel_does_is_said(
    importance: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.logger, "propagate", True)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(), model_config=SimpleNamespace(use_mla=False)
    )
    with caplog.at_level("WARNING", logger=engine.logger.name):
        DEVICES["cuda"].configure(config, resolve({"name": "dgc", "importance": importance}))
    assert ("attention runs in PyTorch" in caplog.text) == warned


@pytest.mark.parametrize("importance", ["attention", "cluster"])
def test_drafts_are_accepted_where_tokens_stay(importance: str) -> None:
    """Merged tokens are refused."""
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    policy = resolve({"name": "dgc", "importance": importance})
    found = refusal_of("drafts of moved tokens").applies(config, policy)
    assert found == (importance == "cluster")


@pytest.mark.parametrize("drafts", [None, NGRAM, DRAFTS], ids=["none", "ngram", "draft-model"])
def test_drafts_need_synchronous_scheduling(drafts: dict[str, Any] | None) -> None:
    """The next step undoes rejected drafts. With vLLM 0.33 ``ngram`` would be asynchronous, too."""
    config = EngineArgs(str(MODEL), speculative_config=drafts).create_engine_config()
    config.scheduler_config.async_scheduling = True
    engine.apply_policy(config, {"name": "sink", "budget": 256, "recall": 0}, 1024, 1024)
    assert config.scheduler_config.async_scheduling is (drafts is None)
    assert ("Async" in config.scheduler_config.scheduler_cls) is (drafts is None)


def draft_of(path: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a draft model that is a configuration without weights."""
    (path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 4096, **changes}))
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}},
            "the drafting model of --speculative-config: .*dynamic NTK",
        ),
        (LATENT, "multi-head latent attention beside one without it"),
        (
            {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "index_topk": 8},
            "the drafting model of --speculative-config: .*layers choose the tokens",
        ),
    ],
)
def test_a_draft_model_is_checked_like_a_model(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(KVPolicyError, match=says):
        create(MODEL, speculative_config=draft_of(tmp_path, **{**changes, "vocab_size": 4096}))


def test_a_policy_fits_in_the_positions_of_both_models(tmp_path: Path) -> None:
    """The model has 1,024 positions, the draft model 256."""
    drafts = draft_of(tmp_path, max_position_embeddings=256)
    create(MODEL, budget=512)
    with pytest.raises(KVPolicyError, match="256"):
        create(MODEL, budget=512, speculative_config=drafts)
    made = create(MODEL, budget=128, speculative_config=drafts)
    assert not made.scheduler_config.async_scheduling  # as vLLM decides for its CPU platform


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("positions", [256, 4096])
def test_an_eagle_head_has_the_model_s_positions(
    method: str, positions: int, tmp_path: Path
) -> None:
    """Heads for Llama 3.1 say 2,048. Nor does a head get a position for each token of a stream."""
    config = json.loads((MODEL / "config.json").read_text())
    kind = "LlamaForCausalLM" if method == "eagle" else "LlamaForCausalLMEagle3"
    config |= {"architectures": [kind], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": positions})
    )
    drafts = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    made = create(MODEL, budget=512, speculative_config=drafts, max_model_len=100_000)
    assert made.speculative_config.draft_model_config.hf_config.max_position_embeddings == 1024
    with pytest.raises(KVPolicyError, match="1024"):
        create(MODEL, budget=1024, speculative_config=drafts)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
BEFORE_033 = pytest.mark.skipif(
    not hasattr(VllmConfig, "_limit_max_model_len_to_draft"), reason="new in vLLM 0.33"
)


@BEFORE_033
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, YARN])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_streams_may_be_longer_than_a_drafting_model_s_positions(
    method: str, rope: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second runner ends stock streams there, also where a configuration is made again."""
    others = (one for one in CPU.own_refusals if one.name != "Model Runner V2 on the CPU")
    monkeypatch.setattr(CPU, "own_refusals", tuple(others))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    parameters = {"rope_theta": 10000.0, **rope}
    drafts = draft_of(tmp_path, max_position_embeddings=256, rope_parameters=parameters)
    drafts["method"] = method
    stock = EngineArgs(model=str(MODEL), skip_tokenizer_init=True, speculative_config=drafts)
    enlarged = method == "eagle" and rope is not YARN
    assert stock.create_engine_config().model_config.max_model_len == (1024 if enlarged else 256)
    made = create(MODEL, budget=128, speculative_config=drafts, max_model_len=1_000_000)
    for config in (made, config_replace(made)):
        assert config.model_config.max_model_len == 1_000_000


def test_an_eagle_head_whose_positions_cannot_be_enlarged(tmp_path: Path) -> None:
    """YaRN's table has the length that its own parameters give."""
    parameters = {"rope_theta": 10000.0, **YARN}
    drafts = draft_of(tmp_path, max_position_embeddings=256, rope_parameters=parameters)
    drafts["method"] = "eagle"
    create(MODEL, budget=128, speculative_config=drafts, max_model_len=100_000)
    with pytest.raises(KVPolicyError, match="256"):
        create(MODEL, budget=512, speculative_config=drafts, max_model_len=100_000)


@BEFORE_033
def test_mtp_layers_by_transformers_are_refused(tmp_path: Path) -> None:
    """vLLM 0.33 can run them."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_mtp_layers": 1}))
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(KVPolicyError, match="MTP layers that vLLM runs by transformers"):
        create(tmp_path, model_impl="transformers", speculative_config=drafts)


def test_an_mtp_layer_has_the_model_s_positions(tmp_path: Path) -> None:
    """vLLM 0.33 gives it one for each token of a stream."""
    target = write_target(tmp_path, "mtp")
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    made = create(target, budget=128, speculative_config=drafts, max_model_len=1_000_000)
    model = made.speculative_config.draft_model_config
    assert model.hf_config.max_position_embeddings == 512
    assert model.hf_text_config.max_position_embeddings == 512


def test_clusters_of_each_head_are_accepted_over_ranks() -> None:
    refusal = refusal_of("clusters over ranks")
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    raw = {"name": "dgc", "importance": "cluster", "head_policy": "per_kv_head"}
    assert not refusal.applies(config, resolve(raw))


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_other_policies_are_accepted_with_quantised_rows(cache_dtype: str) -> None:
    config = create(MODEL, kv_cache_dtype=cache_dtype)
    assert config.cache_config.cache_dtype == cache_dtype


FP8_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "quantization_status": "compressed",
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}
CLUSTERS = {"name": "dgc", "budget": 64, "importance": "cluster", "prefill_stride": 32}


def create_with_scheme(folder: Path, policy: dict[str, Any], **settings: Any) -> Any:
    """An engine of a checkpoint that has keys and values in FP8 where nothing else is said."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": FP8_SCHEME}))
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        additional_config={"kv_policy": policy},
        **settings,
    ).create_engine_config()


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (CLUSTERS, {}, "rewrites a mean"),
        (
            {"name": "sink", "budget": 128, "prefill_stride": 64},
            {"kv_cache_dtype_skip_layers": ["0"]},
            "--kv-cache-dtype-skip-layers",
        ),
    ],
)
def test_a_checkpoints_own_cache_type_is_checked(
    policy: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """vLLM sets it where the model is built, which is later; so does the way out."""
    with pytest.raises(KVPolicyError, match=f"{message}.* model's dtype"):
        create_with_scheme(tmp_path, policy, **settings)
    made = create_with_scheme(tmp_path, policy, kv_cache_dtype="bfloat16", **settings)
    assert made.cache_config.cache_dtype == "bfloat16"


NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": "NVFP4",
}


@pytest.mark.parametrize(
    ("name", "device"), [("quantised KV cache", "cpu"), ("cache type on CUDA", "cuda")]
)
def test_a_checkpoint_that_asks_for_another_type(name: str, device: str, tmp_path: Path) -> None:
    """``auto`` is then that type; the message names what works."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": NVFP4}))
    refusal, policy = refusal_of(name, device), resolve({"name": "sink"})

    def config(**settings: Any) -> VllmConfig:
        return EngineArgs(
            str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", **settings
        ).create_engine_config()

    assert config().cache_config.cache_dtype == "nvfp4"
    assert refusal.applies(config(kv_cache_dtype="auto"), policy)
    assert re.search(r"auto \((to )?a 16-bit model's dtype if its checkpoint", refusal.message)
    assert not refusal.applies(config(kv_cache_dtype="bfloat16"), policy)


def test_recall_counts_a_checkpoints_own_cache_type(tmp_path: Path) -> None:
    """Its rows are half as long as those of the model's type."""
    policy = {"name": "sink", "budget": 128, "unit": 16, "prefill_stride": 64, "recall": 8}
    found = {}
    for cache_dtype in ("auto", "fp8", "bfloat16"):
        config = create_with_scheme(tmp_path, policy, kv_cache_dtype=cache_dtype)
        resolved = policy_of(config.additional_config)
        assert resolved is not None
        found[cache_dtype] = resolved.recall_memory
    assert found["auto"] == found["fp8"] < found["bfloat16"]


def test_refused_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(KVPolicyError, match="run on CPUs and on CUDA"):
        create(MODEL)


def test_refused_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes requests past every check in Python."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", "none")
    with pytest.raises(KVPolicyError, match=r"VLLM_USE_RUST_FRONTEND=1 .* unset it"):
        create(MODEL)


@pytest.mark.skipif(
    not hasattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"), reason="vLLM 0.33 has one executor"
)
def test_refused_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = refusal_of("Ray's first executor")
    for backend, chosen, expected in (("ray", "0", True), ("ray", "1", False), ("mp", "0", False)):
        monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", chosen)
        parallel = SimpleNamespace(distributed_executor_backend=backend)
        config = SimpleNamespace(parallel_config=parallel)
        assert entry.applies(config, resolve({"name": "sink"})) == expected
    assert "unset it" in entry.message


def test_sessions_of_an_external_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a user starts have a scheduler each; with one process there is one."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as vLLM sets it, and restored
    launched = {"distributed_executor_backend": "external_launcher", "kv_sessions": True}
    create(MODEL, **launched)
    create(MODEL, **{**launched, "kv_sessions": None}, tensor_parallel_size=2)
    create(MODEL, **{**launched, "distributed_executor_backend": "mp"}, tensor_parallel_size=2)
    refused = "--kv-sessions cannot be combined .* external_launcher .* use .* mp, or remove"
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(KVPolicyError, match=refused):
            create(MODEL, **launched, **sizes)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(KVPolicyError, match=refused):
        create(MODEL, **launched, data_parallel_size=2)


def test_refused_micro_batches() -> None:
    """vLLM's two flags for them."""
    for flags in ({"enable_dbo": True}, {"ubatch_size": 2}):
        parallel = ParallelConfig.__new__(ParallelConfig)
        vars(parallel).update({"enable_dbo": False, "ubatch_size": 0, **flags})
        config = SimpleNamespace(parallel_config=parallel)
        assert refusal_of("micro-batches").applies(config, resolve({"name": "sink"}))


def test_refused_backends_by_kind() -> None:
    attention = AttentionConfig(backend_per_kind={"full_attention": "FLASH_ATTN"})
    config = SimpleNamespace(attention_config=attention)
    assert refusal_of("attention backend", "cuda").applies(config, resolve({"name": "sink"}))


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_num_batched_tokens": 256, "max_num_scheduled_tokens": 200}, 200),
        ({"max_num_batched_tokens": 128, "max_num_scheduled_tokens": 200}, 128),
        ({"max_num_batched_tokens": 256, "speculative_config": DRAFTS}, 255),
    ],
)
def test_a_stride_is_at_most_what_a_step_schedules(settings: dict[str, Any], most: int) -> None:
    """A longer one would wait for a step that never comes."""
    common = {"model": str(MODEL), "kv_policy": "sink", "max_num_seqs": 2, **settings}
    config = EngineArgs(**common).create_engine_config()
    assert config.additional_config["kv_policy"]["prefill_stride"] == 128
    own = {"kv_policy_config": {"prefill_stride": most + 1, "num_sinks": 0}}
    with pytest.raises(KVPolicyError, match=f"larger than the {most} tokens .* at most {most}"):
        EngineArgs(**common, **own).create_engine_config()
    own["kv_policy_config"]["prefill_stride"] = most
    EngineArgs(**common, **own).create_engine_config()


def test_refused_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    config = create(MODEL)  # where Triton has no CPU backend, vLLM refuses this runner itself
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config.scheduler_config.scheduler_cls = None
    with pytest.raises(KVPolicyError, match="VLLM_USE_V2_MODEL_RUNNER"):
        check(config, resolve({"name": "cascade"}), DEVICES["cpu"].refusals)


def test_a_cpu_with_triton_has_the_first_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would choose the second one, unless it is told not to."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # is restored after the test
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    for module in (devices, vllm_config):
        monkeypatch.setattr(module, "HAS_TRITON", True)
    assert EngineArgs(model=str(MODEL)).create_engine_config().use_v2_model_runner
    assert not create(MODEL).use_v2_model_runner
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(KVPolicyError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        create(MODEL)


def test_watermarks_need_the_second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs them in it whatever the variable says, so the variable is no way out."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = create(MODEL)
    assert not config.use_v2_model_runner
    config.watermark_config = WatermarkConfig(key=1)
    assert config.use_v2_model_runner
    with pytest.raises(KVPolicyError, match="--watermark-config") as refused:
        check(config, resolve({"name": "cascade"}), DEVICES["cpu"].refusals)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in str(refused.value)


@pytest.mark.parametrize(
    "flags", [{"enable_fault_tolerance": True}, {"fault_tolerance_config": {}}, {}], ids=repr
)
def test_refused_fault_tolerance(flags: dict[str, Any], tmp_path: Path) -> None:
    """vLLM has it for experts, with an engine of several behind another load balancer."""
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    engine_of_two = {"data_parallel_size": 2, "data_parallel_rank": 0}
    if not flags:
        assert create(tmp_path, **engine_of_two).parallel_config.data_parallel_external_lb
        return
    with pytest.raises(KVPolicyError, match=r"--enable-fault-tolerance, .* remove one of the two"):
        create(tmp_path, **engine_of_two, **flags)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "longrope", "yarn"])
def test_accepted_rope_types(rope_type: str, tmp_path: Path) -> None:
    extra = {
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": {
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "longrope": {
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 512},
    }[rope_type]
    (tmp_path / "config.json").write_text(json.dumps(rope(rope_type=rope_type, **extra)))
    config = create(tmp_path, max_model_len=50_000)
    assert config.model_config.max_model_len == 50_000
    assert config.scheduler_config.scheduler_cls.endswith("KVPolicyScheduler")
    assert config.additional_config["kv_policy"]["budget"] == 128


def test_a_budget_in_the_long_range_of_longrope(tmp_path: Path) -> None:
    """vLLM's default length is the short range: so are a policy's defaults, not what it may have.

    The model's cached tokens then rotate by the frequencies for long streams.
    """
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = rope(rope_type="longrope", **factors) | {"original_max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(long))
    for length in (None, 100_000):
        kwargs = {} if length is None else {"max_model_len": length}
        config = create(tmp_path, budget=640, **kwargs)
        assert config.model_config.max_model_len == (length or 512)
        assert config.additional_config["kv_policy"]["budget"] == 640
        with pytest.raises(KVPolicyError, match="but the model has 1024"):
            create(tmp_path, budget=1024, **kwargs)
        default = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, kv_policy="sink")
        policy = resolve(default.create_engine_config().additional_config["kv_policy"])
        assert 512 - 16 < policy.max_position <= 512


def test_a_tokenizer_may_have_fewer_positions_than_longrope() -> None:
    patch = importlib.import_module("vllm_cascade.patches.max_model_len")
    native = patch.NativeLength()
    long = SimpleNamespace(rope_parameters={"rope_type": "longrope", "rope_theta": 1.0})
    model = SimpleNamespace(derived_max_model_len_and_key=(4096, ""))
    for tokenizer, longest in (({"model_max_length": 2048}, 2048), ({}, 4096), (None, 4096)):
        assert patch._longest(512, long, model, tokenizer) == longest
        native.ranges.append((longest, 512))
    assert native.of(None) == (2048, 512)


def test_a_full_attention_model_with_layer_types_is_accepted(tmp_path: Path) -> None:
    config = {**LLAMA, "layer_types": ["full_attention"], "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    create(tmp_path)


def test_positions_are_checked_against_the_model(tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match="but the model has 1024; set it to at most 764"):
        EngineArgs(
            model=str(MODEL), additional_config={"kv_policy": {"name": "sink", "budget": 4096}}
        ).create_engine_config()


def test_without_a_policy_the_length_check_is_vllms() -> None:
    with pytest.raises(ValueError, match="greater than the derived max_model_len"):
        EngineArgs(model=str(MODEL), max_model_len=5000).create_engine_config()
