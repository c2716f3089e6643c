# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, one file per target, and the vLLM versions they support.

Code outside this folder is the same for every version. Where versions keep something in different
modules, a function here finds it (``kv_cache_planning``). ``tests/patches/snapshots`` lists every
name of vLLM that the plugin uses, with its signature in each version.
"""

from importlib import import_module
from types import ModuleType

if __name__ == "patches":
    raise ImportError("this folder is installed as vllm_cascade.patches")

CHECKED_VERSIONS = ("0.32", "0.33")
PATCHES = (
    "environment",
    "max_model_len",
    "engine_args",
    "bench_forward",
    "pool_size",
    "preload",
    "ready_response",
    "request_checks",
    "snapshot_create",
    "stat_loggers",
)
_applied: set[str] = set()
"""Patches of this process, by module: a second one would wrap the first."""


def apply_all() -> None:
    """Apply every patch, or under an unsupported vLLM version the one that refuses policies.

    Later calls in the same process do what an earlier one could not.
    """
    if (why := why_unsupported()) is not None:
        from vllm_cascade.log import logger
        from vllm_cascade.patches import unsupported

        if unsupported.__name__ not in _applied:
            unsupported.apply(why)
            logger.warning("%s", why)
            _applied.add(unsupported.__name__)
        return
    for name in PATCHES:
        patch = import_module(f"{__name__}.{name}")
        if patch.__name__ not in _applied:
            patch.apply()
            _applied.add(patch.__name__)


def why_unsupported(version: str | None = None) -> str | None:
    """Why policies cannot run with a vLLM version; None: they can.

    A development build is not supported: one made after 0.33.0 has code of 0.34, and is called
    0.33.1.dev214.

    Args:
        version: None for the installed one.
    """
    if version is None:
        from vllm import __version__ as version
    development = "dev" in version.partition("+")[0]
    if ".".join(version.split(".")[:2]) in CHECKED_VERSIONS and not development:
        return None
    hint = ""
    if development:
        hint = (
            ". Development builds count as unchecked, because they may have a later version's "
            "code; if yours is a release's, build it with that version, such as "
            f"VLLM_VERSION_OVERRIDE={CHECKED_VERSIONS[-1]}.0"
        )
    checked = ", ".join(f"{one}.*" for one in CHECKED_VERSIONS)
    return (
        f"vllm_cascade runs KV policies with vLLM {checked}, but vLLM {version} is installed: "
        "engines without a policy are stock vLLM's, others do not start. Install a matching "
        f"version to use a policy, or uninstall vllm-cascade{hint}"
    )


def kv_cache_planning() -> ModuleType:
    """vLLM's module that sizes block pools and groups layers: ``kv_cache_utils`` before 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as planning  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning
    return planning
