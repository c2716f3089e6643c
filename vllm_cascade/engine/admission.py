# SPDX-License-Identifier: Apache-2.0
"""Refuses requests that the engine cannot serve.

Without these checks, a request that never fits the pool would wait in the queue forever.
"""

from bisect import bisect_right

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv

from vllm_cascade.engine.devices import this_device
from vllm_cascade.engine.lookup import requests_of
from vllm_cascade.policies.arguments import KEYS, plain_key
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import CONFIG_KEY, KVPolicyError, cut, did_you_mean, shown
from vllm_cascade.sessions.settings import NAME as SESSION
from vllm_cascade.sessions.settings import RELEASE, SESSION_ARGUMENTS, SessionSettings

SHORT = {key.removeprefix("kv_"): key for key in KEYS}
"""Likely short spellings (``budget``, ``policy``, ``recall``), used to suggest the right key."""
VLLM_KEYS = ("kv_transfer_params", "kv_cache_report_mode")
"""``kv_*`` keys of ``extra_args`` that vLLM itself reads."""


def usable_pages(vllm_config: VllmConfig) -> int:
    """Pages of one engine's pool, without vLLM's null block.

    With several data-parallel engines, a front-end's ``num_gpu_blocks`` is the sum of their pools.
    Offline, every rank has a front-end of its own.
    """
    parallel = vllm_config.parallel_config
    launched = parallel.distributed_executor_backend == "external_launcher"
    if launched or parallel.data_parallel_rank_local is not None:
        return (vllm_config.cache_config.num_gpu_blocks or 0) - 1
    local = parallel.data_parallel_size_local if parallel.local_engines_only else 0
    engines = local or parallel.data_parallel_size
    return (vllm_config.cache_config.num_gpu_blocks or 0) // engines - 1


def longest_stream(schedule: Schedule, slots: int, limit: int) -> int:
    """Longest stream, up to ``limit`` tokens, that never needs more than ``slots`` slots."""
    return bisect_right(range(1, limit + 1), slots, key=schedule.peak_at)


def check_request(
    vllm_config: VllmConfig, prompt: int, params: SamplingParams | None, resumable: bool = False
) -> None:
    """Refuse a request with invalid arguments, or one that needs more pages than the pool has.

    Args:
        prompt: number of prompt tokens.
        params: None if the request does not generate.
        resumable: whether the request is a part of streaming input, whose prompt may go on.

    Raises:
        VLLMValidationError: HTTP 400; states the pages needed, the pages available, and the
            longest request that fits.
    """
    requests = requests_of(vllm_config)
    if params is not None:
        check_arguments(requests, params)
        check_session(vllm_config, params)
    if requests is None or params is None:
        return
    if vllm_config.model_config.is_hybrid:
        return  # pages have more slots than a block; the engine checks the longest request at start
    limit = vllm_config.model_config.max_model_len
    if resumable:
        # keep_prompt keeps of the first part, whose length other parts do not know: expect all.
        _check_stream(vllm_config, requests.schedule(params.extra_args), limit)
        return
    schedule = requests.schedule(params.extra_args, prompt)
    max_tokens = limit - prompt if params.max_tokens is None else params.max_tokens
    total = min(prompt + max_tokens, limit)
    block_size = vllm_config.cache_config.block_size
    need, have = cdiv(schedule.peak_at(total), block_size), usable_pages(vllm_config)
    if need <= have:
        return
    fits = longest_stream(schedule, have * block_size, limit)
    fix = f"lower max_tokens to at most {fits - prompt}" if fits > prompt else "shorten the prompt"
    raise VLLMValidationError(
        f"This request needs {need} KV cache pages of {block_size} tokens, but the pool has "
        f"{have}: under kv_policy {schedule.policy.name}, prompt and answer may have {fits} "
        f"tokens, and these are {total} (prompt {prompt} + max_tokens {max_tokens}, at most "
        f"max_model_len {limit}). Please {fix}.",
        parameter="max_tokens",
        value=max_tokens,
    )


def _check_stream(vllm_config: VllmConfig, schedule: Schedule, limit: int) -> None:
    """Refuse streaming input that could come to need more pages than the pool has.

    Raises:
        VLLMValidationError: HTTP 400; names the server's settings that would serve it.
    """
    block_size = vllm_config.cache_config.block_size
    need, have = cdiv(schedule.peak_at(limit), block_size), usable_pages(vllm_config)
    if need <= have:
        return
    fits = longest_stream(schedule, have * block_size, limit)
    raise VLLMValidationError(
        f"Streaming input may grow to --max-model-len {limit} tokens and then needs {need} KV "
        f"cache pages of {block_size} tokens under kv_policy {schedule.policy.name}, but the pool "
        f"has {have}. Please start the server with --num-gpu-blocks-override {need + 1} or more, "
        f"or with --max-model-len {fits} or less.",
        parameter="resumable",
        value=True,
    )


def check_media(vllm_config: VllmConfig, has_media: bool) -> None:
    """Refuse images, video and audio if the policy cannot move their positions (M-RoPE).

    Args:
        has_media: whether the request has any input other than text.

    Raises:
        VLLMValidationError: HTTP 400.
    """
    requests = requests_of(vllm_config) if has_media else None
    if requests is None or not vllm_config.model_config.uses_mrope:
        return
    raise VLLMValidationError(
        "This request has an image, a video or audio, to which the model gives positions of "
        f"several axes (M-RoPE), and kv_policy {requests.engine.policy.name} can only move those "
        "of text. Please send text, or ask a server without --kv-policy.",
        parameter="multi_modal_data",
    )


def check_arguments(requests: PerRequest | None, params: SamplingParams | PoolingParams) -> None:
    """Refuse a request with invalid ``kv_*`` arguments.

    Args:
        requests: the engine's schedules; None for stock vLLM, which would ignore the arguments.

    Raises:
        VLLMValidationError: HTTP 400; names the key and the fix.
    """
    extra_args = getattr(params, "extra_args", None) or {}
    for key in extra_args if requests is not None else ():
        if not isinstance(key, str):  # offline, vLLM takes any key
            continue
        plain = plain_key(key)
        known = (*KEYS, *SESSION_ARGUMENTS)
        if key in SHORT or (plain.startswith("kv_") and key not in (*known, *VLLM_KEYS)):
            hint = did_you_mean(SHORT.get(key, plain), known)
            raise _refusal(
                key, f"unknown argument {shown(key)}, choose from {', '.join(known)}{hint}"
            )
    asked = [key for key in KEYS if extra_args.get(key) is not None]
    if not asked:
        return
    if requests is None:
        if asked == [CONFIG_KEY] and extra_args[CONFIG_KEY] == "full":
            return
        raise _refusal(
            asked[0], f"{asked[0]}: this server runs no KV policy; start it with --kv-policy"
        )
    try:
        _check_rules(requests.schedule(extra_args), asked[0], this_device().most_rules)
    except KVPolicyError as error:
        key = next((key for key in asked if str(error).startswith(key)), asked[0])
        raise _refusal(key, str(error)) from None


def check_session(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """Refuse invalid ``kv_session*`` arguments.

    Raises:
        VLLMValidationError: HTTP 400; names the key and the fix.
    """
    extra_args = params.extra_args or {}
    asked = [key for key in SESSION_ARGUMENTS if extra_args.get(key) is not None]
    if not asked:
        return
    if SessionSettings.of(vllm_config.additional_config) is None:
        flags = "--kv-sessions"
        if policy_of(vllm_config.additional_config) is None:
            flags = f"--kv-policy and {flags}"
        raise _refusal(
            asked[0], f"{asked[0]}: this server keeps no sessions; start it with {flags}"
        )
    name = extra_args.get(SESSION)
    if not isinstance(name, str) or not 0 < len(name) <= 256 or not _is_unicode(name):
        raise _refusal(
            SESSION, f"{SESSION} must be a name of 1 to 256 characters, not {shown(name)}"
        )
    release = extra_args.get(RELEASE)
    if not isinstance(release, int | None) or release not in (None, 0, 1):
        raise _refusal(RELEASE, f"{RELEASE} must be true or false, not {shown(release)}")


def _is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_rules(own: Schedule, key: str, most: int | None) -> None:
    """Refuse a policy with more rules than the device's tables can hold for one request.

    Args:
        most: that number; None: no limit.

    Raises:
        KVPolicyError: the policy, the number of rules and the fix.
    """
    policy, num_rules = own.policy, len(own.further)
    if most is not None and num_rules > most:
        raise KVPolicyError(
            f"{key}: {policy.name} with overflow {policy.overflow} and a budget of {policy.budget} "
            f"evicts by {num_rules} rules, more than the {most} that the server's tables "
            "hold for one request; ask for a smaller kv_budget, or start the server with a smaller "
            "overflow"
        )


def _refusal(key: str, message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter=cut(key))
