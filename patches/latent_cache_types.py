# SPDX-License-Identifier: Apache-2.0
"""Patch of ``CpuPlatform.get_attn_backend_cls``, which selects the attention backend on a CPU.

What: while a policy's model is built, vLLM's check of ``--kv-cache-dtype`` is skipped for
multi-head latent attention. For other models vLLM already asks the backend. The CPU worker with a
policy applies it.
Why: from 0.33 on vLLM refuses 8-bit types for these models before it looks up the backend, which
is ours and reads them.
Removed when: vLLM asks the backend for latent attention, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.platforms.cpu import CpuPlatform


@contextmanager
def left_to_backend() -> Iterator[None]:
    """Replace the method until the context ends; engines without a policy keep vLLM's."""
    original = CpuPlatform.get_attn_backend_cls

    def get_attn_backend_cls(
        _: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> str:
        if attn_selector_config.use_mla:
            attn_selector_config = attn_selector_config._replace(kv_cache_dtype="auto")
        return original(selected_backend, attn_selector_config, num_heads)

    replaced: Any = classmethod(get_attn_backend_cls)
    CpuPlatform.get_attn_backend_cls = replaced
    try:
        yield
    finally:
        CpuPlatform.get_attn_backend_cls = original
