# SPDX-License-Identifier: Apache-2.0
"""vllm_cascade: a bounded, training-free KV cache for vLLM.

Importing this package makes ``LLM(model, kv_policy="cascade", kv_budget=2048)`` work. Installing
it is enough for ``vllm serve --kv-policy cascade`` and for ``additional_config``: vLLM calls
``register`` in every process.
"""

import importlib.util
from pathlib import Path

# In a checkout, kernels/ and patches/ stand beside this package; installed, they are inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.py").is_file() and (_checkout / "patches").is_dir():
    __path__.append(str(_checkout))

from vllm_cascade.policies.settings import KVPolicyConfig, KVPolicyError  # noqa: E402

__version__ = "0.1.0"
__all__ = ["KVPolicyConfig", "KVPolicyError", "__version__", "register"]


def register() -> None:
    """Make vLLM know the policies; vLLM's entry point, safe to call any number of times.

    Raises:
        RuntimeError: a vLLM version that the patches were not checked against. Loud on purpose: a
            server that silently ran without the policy it was asked for would be worse.
    """
    from vllm_cascade.patches import apply_all

    apply_all()


if importlib.util.find_spec("vllm") is not None:
    register()
