# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.envs.environment_variables``.

What: vLLM knows the plugin's environment variables that are set.
Why: it warns about every other name that begins with ``VLLM_``, and stops at one under
``--fail-on-environ-validation``.
Removed when: vLLM lets plugins declare such names.
"""

import functools
import os

from vllm import envs

NAMES = ("VLLM_CASCADE_CPU", "VLLM_CASCADE_LAUNCHES")
"""Read in ``attention/cpu/paths.py`` and ``attention/cuda/__init__.py``."""


def apply() -> None:
    """Add the names. ``patches.apply_all`` calls this once.

    Names that are not set stay unknown: those that vLLM knows are part of its compilation keys.
    """
    for name in NAMES:
        if name in os.environ and name not in envs.environment_variables:
            envs.environment_variables[name] = functools.partial(os.environ.get, name)
