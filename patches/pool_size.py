# SPDX-License-Identifier: Apache-2.0
"""Patch of ``_check_enough_kv_cache_memory``, where vLLM sizes pools (checked against vLLM 0.32.0
and 0.33.0).

What: an engine with a policy starts although one request of ``--max-model-len`` tokens does not fit
its pool; the scheduler warns, and ``patches/request_checks.py`` refuses such requests.
Why: vLLM stops there, because full attention could only serve less of ``--max-model-len``. A
bounded request's need is known when it comes, so a small pool can serve all the others.
Removed when: vLLM leaves this check to the KV cache spec.
"""

import functools
from collections.abc import Callable

from vllm.config import VllmConfig

from vllm_cascade.patches import kv_cache_planning


def apply() -> None:
    """Wrap the function; ``patches.apply_all`` calls this once."""
    planning = kv_cache_planning()
    original = planning._check_enough_kv_cache_memory

    @functools.wraps(original)
    def _check_enough_kv_cache_memory(
        available_memory: int, get_needed_memory: Callable[[], int], *args
    ) -> None:
        from vllm_cascade.policies.registry import policy_of

        # a partial of _max_memory_usage_bytes_from_groups, to which the configuration is bound
        bound = getattr(get_needed_memory, "args", ())
        config = next((value for value in bound if isinstance(value, VllmConfig)), None)
        if available_memory <= 0 or config is None or policy_of(config.additional_config) is None:
            original(available_memory, get_needed_memory, *args)

    planning._check_enough_kv_cache_memory = _check_enough_kv_cache_memory
