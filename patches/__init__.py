# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, one file per target, and the vLLM versions they support.

Code outside this folder is the same for every version. Where versions keep something in different
modules, a function here finds it (``kv_cache_planning``). ``tests/patches/snapshots`` lists every
name of vLLM that the plugin uses, with its signature in each version.
"""

from types import ModuleType

if __name__ == "patches":
    raise ImportError("this folder is installed as vllm_cascade.patches")

CHECKED_VERSIONS = ("0.32", "0.33")
_applied = False


def apply_all() -> None:
    """Apply every patch. Later calls in the same process do nothing.

    Raises:
        RuntimeError: this vLLM version is not supported.
    """
    global _applied
    if _applied:
        return
    check_version()
    from vllm_cascade.patches import (
        engine_args,
        max_model_len,
        pool_size,
        preload,
        ready_response,
        request_checks,
        snapshot_create,
        stat_loggers,
    )

    for patch in (
        max_model_len,
        engine_args,
        pool_size,
        preload,
        ready_response,
        request_checks,
        snapshot_create,
        stat_loggers,
    ):
        patch.apply()
    _applied = True


def check_version(version: str | None = None) -> None:
    """Check that the patches support a vLLM version.

    Args:
        version: None for the installed one.

    Raises:
        RuntimeError: they do not; the message lists the supported versions.
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
    """vLLM's module that sizes block pools and groups layers: ``kv_cache_utils`` before 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as planning  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning
    return planning
