# SPDX-License-Identifier: Apache-2.0
"""How large a KV pool an engine needs: the pages of its requests, in bytes of its model."""

from typing import Any

EngineSettings = Any
"""``engines.EngineSettings``, which asks this file for its pool."""

MARGIN_PAGES = 8
"""Beside vLLM's null block: a pool that is never quite empty."""
MOST_BYTES = 1 << 30
"""Where one request needs no more: with a smaller pool than all of them need, some wait."""


def pool_bytes(settings: EngineSettings) -> int:
    """Bytes for ``max_num_seqs`` requests of ``max_model_len`` tokens, and a margin.

    At most 1 GiB, unless a single request needs more than that; then that.
    """
    page, pages, spare = page_bytes(settings), pages_of_request(settings), 1 + MARGIN_PAGES
    all_ = (settings.max_num_seqs * pages + spare) * page
    return max(min(all_, MOST_BYTES), (pages + spare) * page)


def pages_of_request(settings: EngineSettings) -> int:
    """Most pages that one request ever holds."""
    from vllm.utils.math_utils import cdiv

    from vllm_cascade.policies.registry import resolve
    from vllm_cascade.policies.schedule import compiled

    longest = settings.max_model_len or _model(settings).max_model_len
    held = compiled(resolve(settings.policy)).peak_at(longest) if settings.policy else longest
    return cdiv(held, settings.block_size)


def page_bytes(settings: EngineSettings) -> int:
    """Bytes of one page over all layers, a policy's numbers of each slot included."""
    from vllm.config import ParallelConfig
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from vllm_cascade.cache.spec import KVPolicySpec
    from vllm_cascade.policies.registry import resolve

    model, parallel = _model(settings), ParallelConfig()
    cache_dtype = settings.arguments.get("kv_cache_dtype", "auto")
    spec: Any = FullAttentionSpec(
        block_size=settings.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache_dtype, model),
        kv_quant_mode=get_kv_quant_mode(cache_dtype),
    )
    if settings.policy:
        spec = KVPolicySpec.from_full(spec, resolve(settings.policy))
    return model.get_num_layers(parallel) * spec.page_size_bytes


def _model(settings: EngineSettings) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    named = {"model": settings.model, "dtype": settings.dtype}
    return EngineArgs(**named).create_model_config()
