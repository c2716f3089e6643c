# SPDX-License-Identifier: Apache-2.0
"""Patch of ``_check_enough_kv_cache_memory``, where vLLM sizes its block pool.

What: an engine with a policy starts even if a request of ``--max-model-len`` tokens does not fit
its pool. The scheduler warns, and ``patches/request_checks.py`` rejects such requests.
Why: vLLM refuses to start, because full attention could not serve ``--max-model-len``. With a
policy the memory that a request needs is known on arrival, so a small pool can serve the others.
Removed when: vLLM leaves this check to the KV cache spec.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from vllm_cascade.patches import kv_cache_planning


def apply() -> None:
    """Wrap the function. ``patches.apply_all`` calls this once."""
    planning: Any = kv_cache_planning()
    original = planning._check_enough_kv_cache_memory

    @functools.wraps(original)
    def _check_enough_kv_cache_memory(
        available_memory: int, get_needed_memory: Callable[[], int], *args
    ) -> None:
        from vllm_cascade.policies.registry import policy_of

        # A partial of _max_memory_usage_bytes_from_groups. The position of the configuration among
        # its arguments differs between versions, so it is found by its type.
        bound = getattr(get_needed_memory, "args", ())
        config = next((value for value in bound if isinstance(value, VllmConfig)), None)
        if available_memory <= 0 or config is None or policy_of(config.additional_config) is None:
            original(available_memory, get_needed_memory, *args)

    planning._check_enough_kv_cache_memory = _check_enough_kv_cache_memory
