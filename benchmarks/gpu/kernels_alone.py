# SPDX-License-Identifier: Apache-2.0
"""Kernels without the plugin: ``vllm_cascade.kernels`` where vLLM is not installed or not wanted.

``import vllm_cascade`` patches vLLM and so imports it, and the bare name ``kernels`` belongs to a
package on PyPI.
"""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def without_the_plugin() -> None:
    """Let ``vllm_cascade`` be an empty package around the checkout's ``kernels/``.

    For processes that run or compile kernels only; call it before the first import of a kernel. A
    process that has imported the plugin keeps it, and its kernels.
    """
    if "vllm_cascade" not in sys.modules:
        package = ModuleType("vllm_cascade")
        package.__path__ = [str(ROOT)]
        sys.modules[package.__name__] = package
