# SPDX-License-Identifier: Apache-2.0
"""Patch of ``InputProcessor.process_inputs`` (checked against vLLM 0.32.0).

What: ``kv_budget`` and ``kv_policy`` of a request are checked in the front-end, so that a value
that cannot be honoured is an error (HTTP 400 in the server) before the request is queued.
Why: ``Platform.validate_request``, vLLM's only hook for such checks, belongs to platforms and does
not see the configuration.
Removed when: general plugins can validate requests.
"""

import functools
from typing import Any

from vllm.v1.engine.input_processor import InputProcessor


def apply() -> None:
    """Wrap the method; ``patches.apply_all`` calls this once."""
    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any):
        from vllm_cascade.requests import check_request
        from vllm_cascade.runtime import policy_of

        check_request(policy_of(self.vllm_config), params)
        return original(self, request_id, prompt, params, *args, **kwargs)

    InputProcessor.process_inputs = process_inputs
