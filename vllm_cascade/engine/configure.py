# SPDX-License-Identifier: Apache-2.0
"""Configures an engine to run a policy, by changing a complete stock ``VllmConfig``."""

from collections.abc import Callable
from copy import copy
from typing import Any

from vllm.config import VllmConfig

from vllm_cascade.engine.devices import this_device
from vllm_cascade.engine.lookup import token_importance
from vllm_cascade.engine.recall_memory import log_token_ids, shortage, with_defaults
from vllm_cascade.engine.refusals import check
from vllm_cascade.log import logger
from vllm_cascade.models.architectures import LATENT, learns_positions
from vllm_cascade.policies.arguments import ARGUMENTS
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import UNUSABLE, resolve
from vllm_cascade.policies.settings import CONFIG_KEY, Given, KVPolicyError
from vllm_cascade.sessions.settings import SessionSettings
from vllm_cascade.step.drafts import MODEL_DRAFTERS, most_drafts

MEASURED = "recall_memory"
"""The setting whose default depends on the host's free memory."""
HASHES_AHEAD = "disable_lookahead_block_hashes"
"""vLLM's switch for hashes of a block that cover the token behind it, too; new in 0.33."""
Positions = tuple[int | None, int | None]
"""Positions of the model, and those that defaults stay within; None: unbounded."""


def apply_policy(
    config: VllmConfig, raw: dict[str, Any], native_max_len: int, default_max_len: int
) -> None:
    """Check the settings, then select the policy's scheduler, worker and backend.

    Args:
        config: changed in place.
        raw: the user's settings, including ``name``.
        native_max_len: the longest sequence, in tokens, that the model's positions allow without a
            policy.
        default_max_len: the longest sequence that vLLM serves without ``--max-model-len``.

    Raises:
        KVPolicyError: a setting cannot work; names the setting and the fix.
    """
    device, cache = this_device(), config.cache_config
    if config.model_config.hf_text_config.model_type in LATENT:
        # vLLM's layers are latent whatever this flag says; backends and shapes go by it.
        config.model_config.model_arch_config.is_deepseek_mla = True
    if _is_fp8_by_default(config):
        cache.cache_dtype = "fp8"
    if device.page_tokens is not None and not cache.user_specified_block_size:
        cache.block_size, cache.user_specified_block_size = device.page_tokens, True
    if learns_positions(config.model_config.hf_text_config):
        _check_stream_fits(config.model_config.max_model_len, native_max_len)
    positions = None, None
    if not config.model_config.uses_alibi:
        positions = native_max_len, default_max_len
    _bound_drafting_positions(config, native_max_len)
    if hasattr(config.speculative_config, HASHES_AHEAD):
        # Else prompts that part right behind a snapshot would not share it.
        setattr(config.speculative_config, HASHES_AHEAD, True)
    policy = _policy(raw, config, positions)
    token_importance(policy, config.model_config)  # raises errors before a model is loaded
    reasons = []
    if policy.token_scores is not None:
        reasons.append(f"{policy.name} scores tokens by their ids")
    if config.speculative_config is not None:
        reasons.append("the next step undoes the drafts that were rejected")
    if SessionSettings.of(config.additional_config) is not None:
        reasons.append("a session ends with the tokens of its request")
    if reasons and config.scheduler_config.async_scheduling:
        config.scheduler_config.async_scheduling = False
        logger.info("Asynchronous scheduling is off: %s.", ", and ".join(reasons))
    if config.model_config.is_hybrid:
        # One state per request, updated in place; snapshots hold copies (``cache/states.py``).
        cache.mamba_cache_mode = "none"
        cache.mamba_block_size = config.model_config.max_model_len  # as in vLLM
    assert isinstance(config.additional_config, dict), "the policy was read from it"
    others = {k: v for k, v in config.additional_config.items() if k not in ARGUMENTS}
    config.additional_config = {**others, CONFIG_KEY: _resolved(policy, raw)}
    kind = "Async" if config.scheduler_config.async_scheduling else ""
    config.scheduler_config.scheduler_cls = f"vllm_cascade.engine.scheduler.{kind}KVPolicyScheduler"
    config.parallel_config.worker_cls = device.worker
    device.configure(config, policy)
    _log(policy, raw, config, positions[0])


def _resolved(policy: Policy, raw: dict[str, Any]) -> Given:
    """All settings of a policy, as every process of the engine reads them."""
    settings = Given({"name": policy.name, **policy.model_dump()})
    if raw.get(MEASURED) is None:
        settings.measured = {MEASURED: settings[MEASURED]}
        settings[MEASURED] = None
    return settings


def _bound_drafting_positions(config: VllmConfig, native_max_len: int) -> None:
    """Give EAGLE's and MTP's layers the model's positions; vLLM has made them
    ``--max-model-len``, in 0.32 those of EAGLE only.

    Their table of rotations would grow with streams, whose positions in the cache do not.
    """
    drafts = config.speculative_config
    if drafts is None or drafts.method not in MODEL_DRAFTERS or drafts.method == "draft_model":
        return
    model = drafts.draft_model_config
    for own in (model.hf_config, model.hf_text_config):
        if getattr(own, "max_position_embeddings", 0) > native_max_len:
            own.max_position_embeddings = native_max_len


def _is_fp8_by_default(config: VllmConfig) -> bool:
    """Whether the checkpoint asks for keys and values in FP8, and nothing else is set.

    vLLM sets the type of such a cache when the model is built, after all checks. It does not for
    multi-head latent attention.
    """
    if config.cache_config.cache_dtype != "auto" or config.model_config.use_mla:
        return False
    return getattr(config.quant_config, "kv_cache_scheme", None) is not None


def prompt_tokens(config: VllmConfig) -> int:
    """Most tokens of a prompt in a step; fewer than ``--max-num-batched-tokens`` if vLLM keeps
    room for drafts, or has a lower ``--max-num-scheduled-tokens``."""
    batched = batched_tokens(config)
    return min(batched, config.scheduler_config.max_num_scheduled_tokens or batched)


def batched_tokens(config: VllmConfig) -> int:
    """``--max-num-batched-tokens`` without the room that vLLM keeps for a request's drafts."""
    drafts = config.speculative_config
    slots = 0 if drafts is None else drafts.max_num_new_slots_for_drafting
    return config.scheduler_config.max_num_batched_tokens - slots


def _check_stream_fits(max_model_len: int, native_max_len: int) -> None:
    """Refuse streams that are longer than a model's learned positions.

    Raises:
        KVPolicyError: names the setting and the positions.
    """
    if max_model_len > native_max_len:
        raise KVPolicyError(
            f"kv_policy: --max-model-len {max_model_len} is more than the model's {native_max_len} "
            "positions. They are learned, so a policy bounds memory, but cannot give a token a "
            f"position in the cache; set it to at most {native_max_len}"
        )


def _policy(raw: dict[str, Any], config: VllmConfig, positions: Positions) -> Policy:
    """The checked policy.

    Raises:
        KVPolicyError: a setting cannot work, with the default recall or without.
    """

    def attempt(settings: dict[str, Any]) -> tuple[Policy, str]:
        policy = _checked(settings, config, positions)
        return policy, shortage(policy, config)

    return default_recall(raw, attempt)


def default_recall(
    raw: dict[str, Any], attempt: Callable[[dict[str, Any]], tuple[Policy, str]]
) -> Policy:
    """The policy of settings; if nothing is said about recall, with the device's default of it.

    Presets are the papers' settings, which have no recall. Where default recall cannot run, or the
    host lacks the memory, the policy runs without, and the log says why.

    Args:
        attempt: returns the policy, and the host's shortage as text (empty if none).

    Raises:
        KVPolicyError: ``attempt`` raises it with the default recall and without.
    """
    units = this_device().default_recall
    if not units or "recall" in raw or raw.get("preset") is not None:
        policy, lack = attempt(raw)
        if lack:
            logger.warning("KV policy: %s; requests that fill it would run out of memory", lack)
        return policy
    recalling = copy(raw)  # with the names of its keys
    recalling["recall"] = units
    try:
        policy, why_not = attempt(recalling)
        if not why_not:
            return policy
    except KVPolicyError as error:
        why_not = str(error)
    policy, _ = attempt(raw)
    logger.warning(
        "KV policy %s: evicted tokens cannot be recalled. The default of %d units does not fit "
        "(%s). Set recall to 0 to run without, as now",
        policy.name,
        units,
        why_not,
    )
    return policy


def _checked(raw: dict[str, Any], config: VllmConfig, positions: Positions) -> Policy:
    """The policy of exactly these settings; raises ``KVPolicyError``."""
    policy = resolve(
        raw,
        max_position=positions[0],
        default_position=positions[1],
        max_num_batched_tokens=prompt_tokens(config),
        block_size=config.cache_config.block_size,
    )
    check(config, policy, this_device().refusals)
    if isinstance(raw, Given):  # of an engine's other processes, which are configured later
        policy = policy.model_copy(update=dict(raw.measured))
    return with_defaults(policy, config)


def _log(policy: Policy, raw: dict[str, Any], config: VllmConfig, max_position: int | None) -> None:
    resolved = {**policy.model_dump(), **policy.derived()}
    settings = ", ".join(f"{key}={value}" for key, value in resolved.items())
    notes = []
    if raw.get("budget") is None:
        room = f" in the model's {max_position} positions" if max_position else ""
        notes.append(f"default budget, or the largest that fits{room}")
    if policy.max_position <= (max_position or 0) < config.model_config.max_model_len:
        notes.append(
            f"sequences of up to {config.model_config.max_model_len} tokens use positions below "
            f"{policy.max_position}"
        )
    logger.info("KV policy %s: %s%s", policy.name, settings, "".join(f" ({n})" for n in notes))
    for remark in policy.remarks():
        logger.warning("KV policy %s: %s", policy.name, remark)
    inert = sorted(policy.without_effect() & set(raw))
    if inert:
        without = ", ".join(inert)
        logger.warning("KV policy %s: settings without effect on it: %s", policy.name, without)
    for name, error in UNUSABLE.items():
        logger.warning("KV policy %r of another package is ignored (%s)", name, error)
    log_token_ids(config)
    limits = config.scheduler_config
    # A request that decodes takes a token and its drafts, and the room that vLLM keeps for them.
    each = 1 + most_drafts(config) + limits.max_num_batched_tokens - batched_tokens(config)
    decoding = min(
        (batched_tokens(config) - policy.prefill_stride) // each,
        (prompt_tokens(config) - policy.prefill_stride) // (1 + most_drafts(config)),
    )
    if decoding < limits.max_num_seqs - 1:
        logger.warning(
            f"KV policy {policy.name}: while {decoding + 1} or more requests decode, a prompt's "
            f"stride of {policy.prefill_stride} tokens does not fit --max-num-batched-tokens "
            f"{limits.max_num_batched_tokens} and waits; raise it or lower prefill_stride"
        )
