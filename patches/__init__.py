# SPDX-License-Identifier: Apache-2.0
"""What the plugin changes in vLLM, one file a target, and the versions it was checked against.

Code outside this folder is the same for all of them. What has to know where a version keeps
something asks here (``kv_cache_planning``); what is expected of each name in each version is in
``hooks/``.
"""

from types import ModuleType

if __name__ == "patches":
    raise ImportError("this folder is installed as vllm_cascade.patches")

CHECKED_VERSIONS = ("0.32", "0.33")
_applied = False


def apply_all() -> None:
    """Apply every patch once in a process.

    Raises:
        RuntimeError: this vLLM version was not checked.
    """
    global _applied
    if _applied:
        return
    check_version()
    from vllm_cascade.patches import (
        engine_args,
        max_model_len,
        pool_size,
        request_checks,
        stat_loggers,
    )

    for patch in (max_model_len, engine_args, pool_size, request_checks, stat_loggers):
        patch.apply()
    _applied = True


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM that the patches were not checked against.

    Raises:
        RuntimeError: with the versions that work.
    """
    if version is None:
        from vllm import __version__ as version
    if ".".join(version.split(".")[:2]) not in CHECKED_VERSIONS:
        supported = ", ".join(f"{checked}.*" for checked in CHECKED_VERSIONS)
        raise RuntimeError(
            f"vllm_cascade works with vLLM {supported}, but vLLM {version} is installed. Install a "
            'matching version, uninstall vllm-cascade, or set VLLM_PLUGINS="" to run stock vLLM.'
        )


def kv_cache_planning() -> ModuleType:
    """vLLM's module that sizes pools and groups layers: part of ``kv_cache_utils`` before 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning
    return planning
