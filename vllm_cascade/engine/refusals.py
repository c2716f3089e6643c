# SPDX-License-Identifier: Apache-2.0
"""Engine settings and models that a policy cannot run with, each with its reason and its fix.

A setting that would be ignored, or would make a cache silently wrong, is an error before a model
is loaded. An entry leaves this list when a test shows that it works. Those of one device are in
``devices.py``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.config import ModelConfig, VllmConfig
from vllm.transformers_utils.config import iter_rope_parameters

from vllm_cascade.cache.quantised import CODES
from vllm_cascade.models.architectures import may_be_unrotated, needs_no_positions
from vllm_cascade.models.rotary import SUPPORTED_ROPE_TYPES
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.settings import KVPolicyError

UNQUANTISED = ("auto", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Refusal:
    """``message`` says what is set, why it cannot work and what to do instead."""

    name: str
    applies: Callable[[VllmConfig, Policy], bool]
    message: str


def layer_types(model: ModelConfig) -> set[str]:
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def windowed(model: ModelConfig) -> bool:
    kinds = layer_types(model)
    return "sliding_attention" in kinds or (model.get_sliding_window() is not None and not kinds)


def _rope_types(config: VllmConfig) -> set[str]:
    parameters = iter_rope_parameters(config.model_config.hf_text_config)
    return {entry.get("rope_type", "default") for entry in parameters}


def _chunked(model: ModelConfig) -> bool:
    chunks = getattr(model.hf_text_config, "attention_chunk_size", None)
    return "chunked_attention" in layer_types(model) or bool(chunks)


def _unknown_cache_dtype(config: VllmConfig, policy: Policy) -> bool:
    return config.cache_config.cache_dtype not in (*UNQUANTISED, *CODES)


def _some_layers_quantised(config: VllmConfig, policy: Policy) -> bool:
    cache = config.cache_config
    return cache.cache_dtype in CODES and bool(cache.kv_cache_dtype_skip_layers)


def _quantised_means(config: VllmConfig, policy: Policy) -> bool:
    return config.cache_config.cache_dtype in CODES and policy.merge_into is not None


def _no_movable_positions(config: VllmConfig) -> bool:
    hf = config.model_config.hf_text_config
    rotary = ("rotary_dim", "rotary_pct", "rope_theta", "rotary_emb_base")
    return (
        not config.model_config.uses_alibi
        and not needs_no_positions(hf)
        and not _rope_types(config)
        and not any(getattr(hf, key, None) for key in rotary)
    )


def _model(name: str, what: str, applies: Callable[[ModelConfig], bool]) -> Refusal:
    """A kind of model that no policy knows."""
    message = f"{what} not supported; use --kv-policy full"
    return Refusal(name, lambda config, _: applies(config.model_config), message)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "recall beside windows",
        lambda config, policy: policy.recall > 0 and windowed(config.model_config),
        "recall moves positions in a way that layers with sliding windows do not follow yet; "
        "set --kv-recall 0 for this model",
    ),
    Refusal(
        "recall over stages",
        lambda config, policy: (
            policy.recall > 0 and config.parallel_config.pipeline_parallel_size > 1
        ),
        "recall is not tested with --pipeline-parallel-size above 1 yet; set --kv-recall 0, or use "
        "--tensor-parallel-size",
    ),
    Refusal(
        "scores by text over stages",
        lambda config, policy: (
            policy.token_scores is not None and config.parallel_config.pipeline_parallel_size > 1
        ),
        "an importance that comes from token ids is not tested with --pipeline-parallel-size above "
        '1 yet; set importance to "attention", or use --tensor-parallel-size',
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
        "an importance that comes from token ids cannot be combined with --enable-prompt-embeds, "
        'whose prompts have none; remove it, or set importance to "attention"',
    ),
    Refusal(
        "speculative decoding",
        lambda config, _: config.speculative_config is not None,
        "--speculative-config cannot be combined with --kv-policy: rejected draft tokens would "
        "already have evicted others; remove one of the two",
    ),
    Refusal(
        "KV connector",
        lambda config, _: config.kv_transfer_config is not None,
        "--kv-transfer-config cannot be combined with --kv-policy: pages change in place and "
        "cannot be shared with a connector; remove one of the two",
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
        "--tensor-parallel-size must divide the model's KV heads with head_policy per_kv_head: a "
        "KV head on several ranks would keep different tokens on each; use fewer ranks or "
        "head_policy homogeneous",
    ),
    Refusal(
        "micro-batches",
        lambda config, _: config.parallel_config.enable_dbo,
        "--enable-dbo cannot be combined with --kv-policy: remove one of the two",
    ),
    Refusal(
        "quantised KV cache",
        _unknown_cache_dtype,
        "--kv-cache-dtype has a type that no policy can store keys and values in; set it to auto "
        f"or to one of {', '.join(CODES)}",
    ),
    Refusal(
        "layers that are not quantised",
        _some_layers_quantised,
        "--kv-cache-dtype-skip-layers cannot be combined with --kv-policy: pages have as many "
        "tokens in every layer; remove it, or set --kv-cache-dtype to auto",
    ),
    Refusal(
        "quantised means",
        _quantised_means,
        "importance 'cluster' writes a mean anew with every token that joins it, and 8 bits would "
        "round it every time; set --kv-cache-dtype to auto, or another importance",
    ),
    _model("MLA", "models with multi-head latent attention are", lambda m: m.use_mla),
    _model("encoder-decoder", "encoder-decoder models are", lambda m: m.is_encoder_decoder),
    Refusal(
        "pooling",
        lambda config, _: config.model_config.runner_type != "generate",
        "KV policies apply to text generation only; remove --kv-policy or use --runner generate",
    ),
    Refusal(
        "prefix LM",
        lambda config, _: config.model_config.is_mm_prefix_lm,
        "models whose image tokens attend in both directions are not supported: a stride is "
        "causal; add --language-model-only to serve text alone, or use --kv-policy full",
    ),
    Refusal(
        "state-space layers",
        lambda config, _: config.model_config.is_attention_free,
        "all layers of the model are recurrent (Mamba and others) and keep no tokens that a policy "
        "could evict; remove --kv-policy",
    ),
    Refusal(
        "recall beside recurrent layers",
        lambda config, policy: policy.recall > 0 and config.model_config.is_hybrid,
        "recall is not tested in models with recurrent layers; set --kv-recall 0 for this model",
    ),
    Refusal(
        "replayed states",
        lambda config, _: config.cache_config.use_replayssm,
        "--use-replayssm cannot be combined with --kv-policy: a snapshot would need the tokens "
        "that wait to be replayed; remove one of the two",
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
    Refusal(
        "absolute positions",
        lambda config, _: _no_movable_positions(config),
        "the model adds positions to its inputs (learned or sinusoidal), so cached keys cannot be "
        "moved to new positions; use --kv-policy full",
    ),
    _model(
        "chunked layers",
        "models whose layers attend within chunks of the stream (Llama 4) are",
        _chunked,
    ),
    _model(
        "shared caches",
        "models whose layers share the caches of others (Gemma 3n, Gemma 4 E2B and E4B) are",
        lambda m: bool(getattr(m.hf_text_config, "num_kv_shared_layers", 0)),
    ),
    _model(
        "random windows",
        "models whose windows are drawn at random are",
        lambda m: m.rswa_window is not None,
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
        "importance 'cluster' with one set of tokens for all heads would need every rank's keys "
        'to find a cluster; set head_policy to "per_kv_head" with --tensor-parallel-size > 1',
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


def check(config: VllmConfig, policy: Policy, refusals: Iterable[Refusal]) -> None:
    """Raise for the first setting that cannot work.

    Raises:
        KVPolicyError: names the setting and the fix.
    """
    for refusal in refusals:
        if refusal.applies(config, policy):
            raise KVPolicyError(f"kv_policy {policy.name}: {refusal.message}")
