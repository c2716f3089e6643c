# SPDX-License-Identifier: Apache-2.0
"""vllm_cascade: a bounded, training-free KV cache for vLLM.

Import this package to use ``LLM(model, kv_policy="cascade", kv_budget=2048)``. For
``vllm serve --kv-policy cascade`` and ``additional_config``, installing it is enough, because vLLM
calls ``register`` in every process.
"""

import importlib.util
import sys
from pathlib import Path

# In a checkout, kernels/ and patches/ are beside this package; when installed, inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.py").is_file() and (_checkout / "patches").is_dir():
    __path__.append(str(_checkout))

from vllm_cascade.policies.settings import KVPolicyConfig, KVPolicyError  # noqa: E402

__version__ = "0.1.0"
__all__ = ["KVPolicyConfig", "KVPolicyError", "__version__", "register"]


def register() -> None:
    """Patch vLLM to support the policies. This is the plugin entry point; repeated calls are safe.

    With a vLLM version that the patches were not tested with, engines with a policy do not start.
    """
    from vllm_cascade.patches import apply_all

    apply_all()


# The command `vllm-cascade` loads vLLM only where it needs it: that takes seconds.
if Path(*sys.argv[:1]).name != "vllm-cascade" and importlib.util.find_spec("vllm") is not None:
    register()
