# SPDX-License-Identifier: Apache-2.0
"""Changes a complete stock ``VllmConfig`` so that the engine runs a policy."""

from typing import Any

from vllm.config import CacheConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_cascade.engine import refusals
from vllm_cascade.engine.devices import this_device
from vllm_cascade.engine.lookup import token_importance
from vllm_cascade.log import logger
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import UNUSABLE, resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import ARGUMENTS, CONFIG_KEY

CPU_PAGE_TOKENS = 128
"""Page size in tokens on CPUs without ``--block-size``; vLLM's own default."""


def apply_policy(config: VllmConfig, raw: dict[str, Any], native_max_len: int) -> None:
    """Check the settings, then select our scheduler, worker and backend.

    Args:
        config: changed in place.
        raw: the user's settings, including ``name``.
        native_max_len: the longest stream that the model's positions allow without a policy.

    Raises:
        KVPolicyError: a setting cannot work; names the setting and the fix.
    """
    _fix_page_size(config.cache_config)
    max_position = None if config.model_config.uses_alibi else native_max_len
    policy = resolve(
        raw,
        max_position=max_position,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        block_size=config.cache_config.block_size,
    )
    refusals.check(config, policy)
    token_importance(policy, config.model_config)  # raises errors before a model is loaded
    if policy.token_scores is not None and config.scheduler_config.async_scheduling:
        config.scheduler_config.async_scheduling = False
        logger.info("Asynchronous scheduling is off: %s scores tokens by their ids.", policy.name)
    if config.model_config.is_hybrid:
        # One state per request, updated in place; snapshots hold copies (``cache/states.py``).
        config.cache_config.mamba_cache_mode = "none"
    others = {k: v for k, v in config.additional_config.items() if k not in ARGUMENTS}
    resolved = {"name": policy.name, **policy.model_dump()}
    config.additional_config = {**others, CONFIG_KEY: resolved}
    kind = "Async" if config.scheduler_config.async_scheduling else ""
    config.scheduler_config.scheduler_cls = f"vllm_cascade.engine.scheduler.{kind}KVPolicyScheduler"
    device = this_device()
    assert device is not None, "refused above"
    config.parallel_config.worker_cls = device.worker
    if not current_platform.is_cpu():
        _prepare_gpu(config, policy)
    _log(policy, raw, config, max_position)


def _fix_page_size(cache: CacheConfig) -> None:
    """Set vLLM's default page size on CPUs now; from 0.33 on, vLLM sets it at model load.

    Units may be pages, and admission counts pages, so the size must be known here.
    """
    if current_platform.is_cpu() and not cache.user_specified_block_size:
        cache.block_size, cache.user_specified_block_size = CPU_PAGE_TOKENS, True


def _prepare_gpu(config: VllmConfig, policy: Policy) -> None:
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    logger.warning("KV policy %s: the CUDA backend has not run on a GPU yet.", policy.name)
    if compiled(policy).moves_tokens:
        logger.warning(
            "KV policy %s: attention runs in PyTorch, outside full CUDA graphs and slower than the "
            "kernels, where tokens are merged or put out of order; importance and order say so.",
            policy.name,
        )


def _log(policy: Policy, raw: dict[str, Any], config: VllmConfig, max_position: int | None) -> None:
    resolved = {**policy.model_dump(), **policy.derived()}
    settings = ", ".join(f"{key}={value}" for key, value in resolved.items())
    notes = []
    if raw.get("budget") is None:
        room = f" in the model's {max_position} positions" if max_position else ""
        notes.append(f"budget chosen: the default, or the largest that fits{room}")
    if policy.max_position <= (max_position or 0) < config.model_config.max_model_len:
        notes.append(
            f"streams of up to {config.model_config.max_model_len} tokens use positions below "
            f"{policy.max_position}"
        )
    logger.info("KV policy %s: %s%s", policy.name, settings, "".join(f" ({n})" for n in notes))
    for remark in policy.remarks():
        logger.warning("KV policy %s: %s", policy.name, remark)
    inert = sorted(policy.inert_keys & set(raw))
    if inert:
        logger.warning("KV policy %s: no effect from %s", policy.name, ", ".join(inert))
    for name, error in UNUSABLE.items():
        logger.warning("KV policy %r of another package is ignored (%s)", name, error)
    most = config.scheduler_config.max_num_batched_tokens
    spare = most - policy.prefill_stride
    if spare < config.scheduler_config.max_num_seqs - 1:
        logger.warning(
            f"KV policy {policy.name}: with more than {max(spare, 0)} requests decoding, a "
            f"prompt's stride of {policy.prefill_stride} tokens does not fit "
            f"--max-num-batched-tokens {most} and waits; raise it or lower prefill_stride"
        )
