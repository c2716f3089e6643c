# SPDX-License-Identifier: Apache-2.0
"""Refuses engine settings and models that a policy cannot run with.

A setting that would have no effect, or would make a cache silently wrong, is an error before a
model is loaded. An entry leaves this list when a test shows that it works. Refusals of one device
are in ``devices.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.transformers_utils.config import iter_rope_parameters

from vllm_cascade.cache.quantised import CODES
from vllm_cascade.models.architectures import (
    BOTH_WAYS,
    LEARNED,
    OWN_ATTENTION,
    SCALED_BY_POSITION,
    learns_positions,
    looks_back,
    loops,
    may_be_unrotated,
    needs_no_positions,
    overwrites,
    several_kv_heads,
    shares_caches,
)
from vllm_cascade.models.rotary import SUPPORTED_ROPE_TYPES
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.settings import SessionSettings
from vllm_cascade.step.drafts import HOST_DRAFTERS, MODEL_DRAFTERS

SPARSE = ("index_topk", "compress_ratios", "indexer_budget", "sparse_attention_config")
"""Configuration keys of layers that choose the tokens that they attend to."""
UNQUANTISED = ("auto", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Refusal:
    """One combination that is refused.

    Attributes:
        name: its row in docs/OPERATING.md.
        applies: whether a configuration and a policy are this combination.
        message: the setting, why it cannot work, and the fix.
    """

    name: str
    applies: Callable[[VllmConfig, Policy], bool]
    message: str


def layer_types(model: ModelConfig) -> set[str]:
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def _rope_type(parameters: Mapping[str, Any]) -> str:
    """The type of rotary parameters.

    HunYuan's dynamic type has one base, made of ``alpha``, as long as its factor is 1.
    """
    kind = parameters.get("rope_type", "default")
    fixed = parameters.get("alpha") and (parameters.get("factor") or 1.0) == 1.0
    return "dynamic with alpha" if kind == "dynamic" and fixed else kind


def _rope_types(config: VllmConfig) -> set[str]:
    return set(map(_rope_type, iter_rope_parameters(config.model_config.hf_text_config)))


def _no_movable_positions(config: VllmConfig) -> bool:
    hf = config.model_config.hf_text_config
    rotary = ("rotary_dim", "rotary_pct", "rope_theta", "rotary_emb_base")
    return (
        not config.model_config.uses_alibi
        and not needs_no_positions(hf)
        and not learns_positions(hf)
        and not _rope_types(config)
        and not any(getattr(hf, key, None) for key in rotary)
        and not hasattr(hf, "original_rope")  # ChatGLM's, true or false
        and hf.model_type != "telechat"  # vLLM rotates TeleChat2 by default
    )


def _sets_own_prefix_caching(config: VllmConfig) -> bool:
    """Whether a setting is given of what a policy's snapshots replace."""
    cache = config.cache_config
    if cache.prefix_cache_retention_interval != 0:
        return True
    return config.model_config.is_hybrid and (
        cache.mamba_cache_mode != "none"
        or cache.mamba_block_size is not None
        or cache.enable_mamba_shared_prefix_checkpoint
        or cache.prefix_match_unit is not None
    )


def _several_mtp_layers(drafts: SpeculativeConfig) -> bool:
    if drafts.method != "mtp":
        return False
    return (getattr(drafts.draft_model_config.hf_config, "n_predict", None) or 1) > 1


def _quantisation(model: ModelConfig) -> dict[str, Any]:
    """What a checkpoint says of its quantisation."""
    return getattr(model.hf_config, "quantization_config", None) or {}


def _model(name: str, what: str, applies: Callable[[ModelConfig], bool]) -> Refusal:
    """Refuse a kind of model that no policy supports."""
    message = f"{what} not supported; use --kv-policy full"
    return Refusal(name, lambda config, _: applies(config.model_config), message)


def _of_drafts(
    name: str, applies: Callable[[SpeculativeConfig, VllmConfig, Policy], bool], message: str
) -> Refusal:
    """Refuse something of speculative decoding."""

    def drafts_and_applies(config: VllmConfig, policy: Policy) -> bool:
        drafts = config.speculative_config
        return drafts is not None and applies(drafts, config, policy)

    return Refusal(name, drafts_and_applies, message)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "scores by text over stages",
        lambda config, policy: (
            policy.token_scores is not None and config.parallel_config.pipeline_parallel_size > 1
        ),
        "importance from token ids is not tested with --pipeline-parallel-size above 1 yet; set "
        'importance to "attention", or use --tensor-parallel-size',
    ),
    Refusal(
        "recurrent layers over stages",
        lambda config, _: (
            config.model_config.is_hybrid and config.parallel_config.pipeline_parallel_size > 1
        ),
        "models with recurrent layers are not tested with --pipeline-parallel-size above 1 yet; "
        "use --tensor-parallel-size",
    ),
    Refusal(
        "scores by text of embeddings",
        lambda config, policy: (
            policy.token_scores is not None and config.model_config.enable_prompt_embeds
        ),
        "importance from token ids cannot be combined with --enable-prompt-embeds, because such "
        'prompts have no token ids; remove it, or set importance to "attention"',
    ),
    _of_drafts(
        "other drafters",
        lambda drafts, *_: drafts.method not in (*HOST_DRAFTERS, *MODEL_DRAFTERS),
        f"--speculative-config has a method that is not tested with --kv-policy; set its method "
        f"to one of {', '.join((*HOST_DRAFTERS, *MODEL_DRAFTERS))}",
    ),
    _of_drafts(
        "drafters of their own kind",
        lambda drafts, *_: (
            drafts.use_gemma4_mtp() or drafts.use_step3p5_mtp() or _several_mtp_layers(drafts)
        ),
        "MTP layers that share the model's cache (Gemma 4), that vLLM runs by a proposer of their "
        "own (Step 3.5), or of which a model has several are not built; remove "
        "--speculative-config, or set its method to draft_model, ngram or suffix",
    ),
    _of_drafts(
        "MTP by transformers",
        lambda drafts, *_: (
            drafts.method == "mtp"
            and any(
                name.startswith("Transformers") for name in drafts.draft_model_config.architectures
            )
        ),
        "MTP layers that vLLM runs by transformers are not tested with --kv-policy; set "
        "--model-impl vllm, or the method of --speculative-config to draft_model, ngram or suffix",
    ),
    _of_drafts(
        "parallel drafts",
        lambda drafts, *_: drafts.parallel_drafting,
        "parallel_drafting in --speculative-config (PARD, P-EAGLE) cannot be combined with "
        "--kv-policy: its tokens attend in one stride, and a policy inserts drafts one by one; "
        "set it to false",
    ),
    _of_drafts(
        "drafts of another vocabulary",
        lambda drafts, *_: drafts.use_heterogeneous_vocab,
        "use_heterogeneous_vocab in --speculative-config is not tested with --kv-policy; use a "
        "draft model with the model's own vocabulary",
    ),
    _of_drafts(
        "adaptive verification",
        lambda drafts, *_: drafts.enable_adaptive_verification,
        "enable_adaptive_verification in --speculative-config cannot be combined with --kv-policy, "
        "which has to know how many drafts a step has; set it to false",
    ),
    _of_drafts(
        "drafts cached in another type",
        lambda drafts, *_: drafts.kv_cache_dtype is not None,
        "kv_cache_dtype in --speculative-config is not tested with --kv-policy; remove it, and the "
        "drafting model's cache has the type of --kv-cache-dtype",
    ),
    _of_drafts(
        "drafts that quantise their cache",
        lambda drafts, config, _: (
            config.cache_config.cache_dtype == "auto"
            and drafts.method in MODEL_DRAFTERS
            and bool(_quantisation(drafts.draft_model_config).get("kv_cache_scheme"))
        ),
        "--speculative-config names a checkpoint with keys and values in FP8, beside a model that "
        "caches its own type; set --kv-cache-dtype to fp8, or to the model's dtype",
    ),
    _of_drafts(
        "drafts of scores by text",
        lambda _, config, policy: policy.token_scores is not None,
        "--speculative-config cannot be combined with importance from token ids, which counts "
        'tokens that may be rejected; remove it, or set importance to "attention"',
    ),
    _of_drafts(
        "drafts of moved tokens",
        lambda _, config, policy: policy.arranges or policy.merge_into is not None,
        "--speculative-config cannot be combined with importance cluster or order importance: a "
        "rejected draft would already be part of a mean or an order; remove it, or set importance "
        'to "attention" and order to "chronological"',
    ),
    _of_drafts(
        "drafts of recurrent layers",
        lambda _, config, policy: config.model_config.is_hybrid,
        "--speculative-config cannot be combined with a model with recurrent layers: their states "
        "are updated in place, also by rejected drafts; remove it",
    ),
    _of_drafts(
        "drafts of shared caches",
        lambda _, config, policy: shares_caches(config.model_config.hf_text_config),
        "--speculative-config cannot be combined with models whose layers share caches (Gemma 3n, "
        "Gemma 4 E2B and E4B): the last of them inserts a step's tokens, so a step holds one "
        "stride of a request, and every draft is a stride; remove it",
    ),
    _of_drafts(
        "drafts over stages",
        lambda _, config, policy: config.parallel_config.pipeline_parallel_size > 1,
        "--speculative-config cannot be combined with --pipeline-parallel-size above 1: vLLM asks "
        "every stage for the drafter, which only the last one has; use --tensor-parallel-size",
    ),
    Refusal(
        "KV offloading",
        lambda config, _: config.cache_config.kv_offloading_size is not None,
        "--kv-offloading-size cannot be combined with --kv-policy: pages change in place, so vLLM "
        "cannot copy them as parts of a prefix; remove one of the two",
    ),
    Refusal(
        "KV connector",
        lambda config, _: config.kv_transfer_config is not None,
        "--kv-transfer-config cannot be combined with --kv-policy: pages change in place, so a "
        "connector cannot share them; remove one of the two",
    ),
    Refusal(
        "Rust front-end",
        lambda *_: envs.VLLM_USE_RUST_FRONTEND,
        "VLLM_USE_RUST_FRONTEND=1 cannot be combined with --kv-policy: requests are checked in "
        "vLLM's front-end in Python only; unset it",
    ),
    Refusal(
        "Ray's first executor",
        lambda config, _: (
            config.parallel_config.distributed_executor_backend == "ray"
            and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)  # gone in vLLM 0.33
        ),
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 cannot be combined with --kv-policy: that executor "
        "calls the model without the worker, which tells the policy of a step's requests; unset it",
    ),
    Refusal(
        "sessions of an external launcher",
        lambda config, _: (
            (parallel := config.parallel_config).distributed_executor_backend == "external_launcher"
            and parallel.world_size > 1
            and SessionSettings.of(config.additional_config) is not None
        ),
        "--kv-sessions cannot be combined with --distributed-executor-backend external_launcher "
        "over several processes: each has a scheduler, and only one would learn which sessions are "
        "complete; use --distributed-executor-backend mp, or remove --kv-sessions",
    ),
    Refusal(
        "block events",
        lambda config, _: (
            (events := config.kv_events_config) is not None and events.enable_kv_cache_events
        ),
        "--kv-events-config cannot be combined with --kv-policy: pages change in place and are "
        "not those of a prefix, so there are no events of them; remove one of the two, or where a "
        "server switches events on by itself (vllm serve --grpc), add --kv-events-config "
        """'{"enable_kv_cache_events": false}'""",
    ),
    Refusal(
        "returned experts",
        lambda config, _: config.aux_output_config.enabled,
        "--enable-return-routed-experts cannot be combined with --kv-policy: vLLM stores experts "
        "by pages of a prefix, and a bounded cache has none; remove one of the two",
    ),
    Refusal(
        "context parallelism",
        lambda config, _: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
        "--decode-context-parallel-size and --prefill-context-parallel-size must be 1 with "
        "--kv-policy: a bounded cache is not split by position",
    ),
    Refusal(
        "tensor parallelism",
        lambda config, policy: (
            policy.head_policy == "per_kv_head"
            and config.model_config.get_total_num_kv_heads()
            % config.parallel_config.tensor_parallel_size
            != 0
        ),
        "--tensor-parallel-size must divide the number of KV heads with head_policy per_kv_head: a "
        "KV head on several ranks would keep different tokens on each; use fewer ranks, or set "
        "head_policy to homogeneous",
    ),
    Refusal(
        "micro-batches",
        lambda config, _: config.parallel_config.use_ubatching,
        "--enable-dbo and --ubatch-size cannot be combined with --kv-policy: remove one of the two",
    ),
    Refusal(
        "elastic engines",
        lambda config, _: config.parallel_config.enable_elastic_ep,
        "--enable-elastic-ep is not tested with --kv-policy: engines that join a running group "
        "take its cache's size instead of measuring their memory; remove one of the two",
    ),
    Refusal(
        "fault tolerance",
        lambda config, _: config.parallel_config.enable_fault_tolerance,
        "--enable-fault-tolerance, which --fault-tolerance-config implies, cannot be combined with "
        "--kv-policy: a step that fails has updated the pages of some layers only, and sessions "
        "and snapshots would keep them; remove one of the two",
    ),
    Refusal(
        "quantised KV cache",
        lambda config, _: config.cache_config.cache_dtype not in (*UNQUANTISED, *CODES),
        "--kv-cache-dtype has an unsupported type; set it to auto (to a 16-bit model's dtype if "
        f"its checkpoint has keys and values in another type) or to one of {', '.join(CODES)}",
    ),
    Refusal(
        "layers that are not quantised",
        lambda config, _: (
            config.cache_config.cache_dtype in CODES
            and bool(config.cache_config.kv_cache_dtype_skip_layers)
        ),
        "--kv-cache-dtype-skip-layers cannot be combined with --kv-policy: pages hold the same "
        "number of tokens in every layer; remove it, or set --kv-cache-dtype to auto (to a "
        "16-bit model's dtype if its checkpoint has keys and values in FP8)",
    ),
    Refusal(
        "quantised means",
        lambda config, policy: (
            config.cache_config.cache_dtype in CODES and policy.merge_into is not None
        ),
        "importance 'cluster' rewrites a mean for every token that joins it, and 8 bits would "
        "round it every time; set --kv-cache-dtype to auto (to a 16-bit model's dtype if its "
        "checkpoint has keys and values in FP8), or choose another importance",
    ),
    Refusal(
        "sparse attention",
        lambda config, _: any(
            getattr(config.model_config.hf_text_config, key, None) is not None for key in SPARSE
        ),
        "the model's layers choose the tokens that they attend to (DeepSeek V3.2 and V4, GLM-5, "
        "MiniMax M3, Qwen 4), by keys of their own that a policy would have to evict, too; use "
        "--kv-policy full",
    ),
    Refusal(
        "MLA by transformers",
        lambda config, _: (
            config.model_config.use_mla and config.model_config.using_transformers_backend()
        ),
        "multi-head latent attention of a model that vLLM runs by transformers is not tested; set "
        "--model-impl vllm, or use --kv-policy full",
    ),
    Refusal(
        "recalled latents in 8 bits",
        lambda config, policy: (
            policy.recall > 0 and policy.recall_rows == "int8" and config.model_config.use_mla
        ),
        "recall stores latent rows of MLA models as they are cached; set recall_rows to exact",
    ),
    Refusal(
        "recall of several shapes",
        lambda config, policy: (
            policy.recall > 0 and several_kv_heads(config.model_config.hf_text_config)
        ),
        "recall stores units of one shape, and the model's layers have different numbers of KV "
        "heads (DeciLM); set --kv-recall 0",
    ),
    Refusal(
        "attention of its own",
        lambda config, _: config.model_config.hf_text_config.model_type in OWN_ATTENTION,
        "the model's layers call attention kernels of their own (Flint, Step 5), which a policy's "
        "would replace; use --kv-policy full",
    ),
    _model("encoder-decoder", "encoder-decoder models are", lambda m: m.is_encoder_decoder),
    Refusal(
        "pooling",
        lambda config, _: config.model_config.runner_type != "generate",
        "KV policies apply to text generation only; remove --kv-policy or use --runner generate",
    ),
    Refusal(
        "encoder only",
        lambda config, _: config.is_mm_encoder_only,
        "an engine that runs the encoder only (--mm-encoder-only, or ec_role ec_producer in "
        "--ec-transfer-config) caches no tokens; remove --kv-policy, and set it on the engine that "
        "decodes",
    ),
    Refusal(
        "prefix LM",
        lambda config, _: config.model_config.is_mm_prefix_lm,
        "models whose image tokens attend in both directions are not supported: strides are "
        "causal; add --language-model-only to serve text only, or use --kv-policy full",
    ),
    Refusal(
        "prompts in both directions",
        lambda config, _: config.model_config.hf_text_config.model_type in BOTH_WAYS,
        "a token of the model's prompts attends to later ones, too (HRM-Text): strides are causal; "
        "use --kv-policy full",
    ),
    Refusal(
        "values scaled by position",
        lambda config, _: config.model_config.hf_text_config.model_type in SCALED_BY_POSITION,
        "the model's cached values have a factor that depends on their token's position "
        "(Moondream 3), and a policy moves tokens to other positions; use --kv-policy full",
    ),
    Refusal(
        "diffusion",
        lambda config, _: config.diffusion_config is not None,
        "models that write a block of tokens by diffusion are not supported: they read a block "
        "several times before it is final; use --kv-policy full",
    ),
    Refusal(
        "state-space layers",
        lambda config, _: config.model_config.is_attention_free,
        "all layers of the model are recurrent (Mamba and others), so a policy has no tokens to "
        "evict; remove --kv-policy",
    ),
    Refusal(
        "vLLM's own prefix caching",
        lambda config, _: _sets_own_prefix_caching(config),
        "--prefix-cache-retention-interval, and in models with recurrent layers "
        "--mamba-cache-mode, --mamba-block-size, --enable-mamba-shared-prefix-checkpoint and "
        "--prefix-match-unit, have no effect with --kv-policy, whose snapshots replace vLLM's "
        "prefix caching; remove them",
    ),
    Refusal(
        "replayed states",
        lambda config, _: config.cache_config.use_replayssm,
        "--use-replayssm cannot be combined with --kv-policy: a snapshot would need the tokens to "
        "be replayed; remove one of the two",
    ),
    _model(
        "dual-chunk attention",
        "dual-chunk attention is",
        lambda m: bool(getattr(m.hf_text_config, "dual_chunk_attention_config", None)),
    ),
    Refusal(
        "rope type",
        lambda config, _: bool(_rope_types(config) - set(SUPPORTED_ROPE_TYPES)),
        "the model's rope_type has no single frequency table (dynamic NTK and others), "
        f"so cached keys cannot be moved; supported: {', '.join(SUPPORTED_ROPE_TYPES)}; "
        "use --kv-policy full",
    ),
    _model(
        "layers without rotary positions",
        "this model's layers without rotary positions are",
        lambda m: may_be_unrotated(m.hf_text_config),
    ),
    _of_drafts(
        "learned positions of a drafting model",
        lambda drafts, *_: (
            drafts.method in MODEL_DRAFTERS
            and learns_positions(drafts.draft_model_config.hf_text_config)
        ),
        "--speculative-config names a model with learned positions (GPT-2, OPT), and a drafting "
        "model is given positions in the cache; use another one, or method ngram or suffix",
    ),
    Refusal(
        "absolute positions",
        lambda config, _: _no_movable_positions(config),
        "the model has neither rotary positions nor ALiBi, and is none of those whose learned "
        f"positions are supported ({', '.join(LEARNED)}), so cached keys cannot be moved to new "
        "positions; use --kv-policy full",
    ),
    Refusal(
        "shared caches over stages",
        lambda config, _: (
            shares_caches(config.model_config.hf_text_config)
            and config.parallel_config.pipeline_parallel_size > 1
        ),
        "--pipeline-parallel-size must be 1 for models whose layers share caches (Gemma 3n, Gemma "
        "4 E2B and E4B): these layers must be in one process; use --tensor-parallel-size",
    ),
    Refusal(
        "whole images beside shared caches",
        lambda config, _: (
            shares_caches(config.model_config.hf_text_config)
            and config.scheduler_config.disable_chunked_mm_input
        ),
        "--disable-chunked-mm-input cannot be combined with models whose layers share caches "
        "(Gemma 3n, Gemma 4 E2B and E4B): a step holds one stride of a request, and an image may "
        "be longer; remove it",
    ),
    Refusal(
        "more than two runs",
        lambda config, _: (
            loops(hf := config.model_config.hf_text_config) and getattr(hf, "loop_num", 2) != 2
        ),
        "models that run their layers other than two times (loop_num of IQuest Loop Coder) are "
        "not supported; use --kv-policy full",
    ),
    Refusal(
        "runs that overwrite a cache",
        lambda config, _: overwrites(config.model_config.hf_text_config),
        "the model runs its layers several times, and each run overwrites what the last one cached "
        "(recurrent_kv_cache_mode last_loop of Dory), where a policy would cache every token "
        "again; use --kv-policy full",
    ),
    Refusal(
        "fast prefill",
        lambda config, _: config.cache_config.kv_sharing_fast_prefill,
        "--kv-sharing-fast-prefill cannot be combined with --kv-policy: a layer that skips a "
        "prompt's tokens would not attend before they are evicted; remove one of the two",
    ),
    _model(
        "random windows",
        "models with random windows are",
        lambda m: m.rswa_window is not None,
    ),
    _model(
        "chunks with the one before",
        "layers that attend to their chunk and the one before (Rnj-1) are",
        lambda m: looks_back(m.hf_text_config),
    ),
    Refusal(
        "scheduler",
        lambda config, _: config.scheduler_config.scheduler_cls is not None,
        "--scheduler-cls cannot be combined with --kv-policy, which brings its own scheduler; "
        "remove one of the two",
    ),
    Refusal(
        "clusters over ranks",
        lambda config, policy: (
            policy.merge_into is not None
            and policy.head_policy == "homogeneous"
            and config.parallel_config.tensor_parallel_size > 1
        ),
        "importance 'cluster' with head_policy homogeneous would need the keys of every rank; set "
        'head_policy to "per_kv_head" with --tensor-parallel-size above 1',
    ),
    Refusal(
        "prefill threshold",
        lambda config, policy: (
            0 < config.scheduler_config.long_prefill_token_threshold < policy.prefill_stride
        ),
        "--long-prefill-token-threshold is smaller than prefill_stride, so no prompt could ever "
        "be scheduled; raise it or lower prefill_stride",
    ),
)


def check(config: VllmConfig, policy: Policy, refusals: Sequence[Refusal]) -> None:
    """Raise for the first setting that cannot work, also for what a drafting model is.

    Raises:
        KVPolicyError: names the setting and the fix.
    """
    for refusal in refusals:
        if refusal.applies(config, policy):
            raise KVPolicyError(f"kv_policy {policy.name}: {refusal.message}")
    drafts = config.speculative_config
    if drafts is None or drafts.method not in MODEL_DRAFTERS:
        return
    drafting = copy(config)
    drafting.model_config = drafts.draft_model_config
    if drafting.model_config.use_mla != config.model_config.use_mla:
        raise KVPolicyError(
            f"kv_policy {policy.name}: --speculative-config names a model with multi-head latent "
            "attention beside one without it, which vLLM cannot give one attention backend; use "
            "two models of one kind, or method ngram or suffix"
        )
    for refusal in refusals:
        if refusal.name != "pooling" and refusal.applies(drafting, policy):
            raise KVPolicyError(
                f"kv_policy {policy.name}: the drafting model of --speculative-config: "
                f"{refusal.message}"
            )
