# SPDX-License-Identifier: Apache-2.0
"""Requests that could never be served, refused before they wait for ever."""

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv

from vllm_cascade.engine.lookup import policy_of
from vllm_cascade.policies import Policy
from vllm_cascade.policies.per_request import check_arguments, request_policy


def usable_pages(vllm_config: VllmConfig) -> int:
    """Pages of one engine's pool, less vLLM's null block.

    A front-end of several data-parallel engines knows the sum of their pools.
    """
    parallel = vllm_config.parallel_config
    local = parallel.data_parallel_size_local if parallel.local_engines_only else 0
    return (vllm_config.cache_config.num_gpu_blocks or 0) // (
        local or parallel.data_parallel_size
    ) - 1


def longest_stream(policy: Policy, slots: int, limit: int) -> int:
    """Most tokens, at most ``limit``, that a stream may have and never need more than ``slots``."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if policy.peak(middle) <= slots else (low, middle - 1)
    return low


def check_request(vllm_config: VllmConfig, prompt: int, params: SamplingParams | None) -> None:
    """Refuse a request whose arguments cannot be honoured, or that the pool is too small for.

    Args:
        prompt: its prompt's tokens.
        params: None where the request does not generate.

    Raises:
        VLLMValidationError: HTTP 400; says how many pages it needs, how many there are, and how
            long a request may be.
    """
    engine_policy = policy_of(vllm_config)
    if params is not None:
        check_arguments(engine_policy, params)
    if engine_policy is None or params is None:
        return
    policy = request_policy(engine_policy, params.extra_args)
    limit = vllm_config.model_config.max_model_len
    max_tokens = limit - prompt if params.max_tokens is None else params.max_tokens
    total = min(prompt + max_tokens, limit)
    block_size = vllm_config.cache_config.block_size
    need, have = cdiv(policy.peak(total), block_size), usable_pages(vllm_config)
    if need <= have:
        return
    fits = longest_stream(policy, have * block_size, limit)
    fix = f"lower max_tokens to at most {fits - prompt}" if fits > prompt else "shorten the prompt"
    raise VLLMValidationError(
        f"This request needs {need} KV cache pages of {block_size} tokens, but the pool has "
        f"{have}: under kv_policy {policy.name}, prompt and answer may have {fits} tokens, and "
        f"these are {total} (prompt {prompt} + max_tokens {max_tokens}, at most "
        f"max_model_len {limit}). Please {fix}.",
        parameter="max_tokens",
        value=max_tokens,
    )
