# SPDX-License-Identifier: Apache-2.0
"""Patch of ``InputProcessor.process_inputs`` (checked against vLLM 0.32.0).

What: in an engine with a policy, a request that needs more pages than the pool has is an error.
Why: ``Platform.validate_request``, vLLM's only hook for such checks, belongs to platforms and sees
neither the configuration nor the final ``max_tokens``.
Removed when: general plugins can validate requests.
"""

import functools
from typing import Any

from vllm.v1.engine.input_processor import InputProcessor


def apply() -> None:
    """Wrap the method; ``patches.apply_all`` calls this once."""
    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self, *args: Any, **kwargs: Any):
        from vllm_cascade.limits import check_request

        request = original(self, *args, **kwargs)
        check_request(self.vllm_config, request)
        return request

    InputProcessor.process_inputs = process_inputs
