# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.engine.arg_utils.EngineArgs`` under a vLLM version that is not supported.

What: an engine with a KV policy does not start. It is the only patch then, so engines without one
are stock vLLM's.
Why: vLLM logs what a plugin raises while it loads, and goes on. An engine would run without the
policy that its ``additional_config`` asks for; flags are unknown to vLLM anyway.
Removed when: vLLM stops at such an error.
"""

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_cascade.policies.arguments import parse
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.settings import SessionSettings


def apply(why: str) -> None:
    """Wrap the method. ``patches.apply_all`` calls this once."""
    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        given = self.additional_config
        if parse(given) is not None or SessionSettings.of(given) is not None:
            raise KVPolicyError(why)
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config
