# SPDX-License-Identifier: Apache-2.0
"""Patch of ``InputProcessor.process_inputs`` and ``AsyncLLM.generate`` (checked against 0.32.0).

What: a request that asks for a policy or budget it cannot have, needs more pages than the pool has,
or has pictures whose positions a policy cannot move, is an error; for the API server, before it
answers, so that also a streaming request gets a 400.
Why: ``Platform.validate_request``, vLLM's only hook for such checks, belongs to platforms and sees
neither the configuration nor the final ``max_tokens``; and it runs when a stream's status line has
been sent.
Removed when: general plugins can validate requests.
"""

import functools
from collections.abc import AsyncGenerator
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor


def apply() -> None:
    """Wrap the methods; ``patches.apply_all`` calls this once."""
    InputProcessor.process_inputs = _wrap_process_inputs(InputProcessor.process_inputs)
    AsyncLLM.generate = _wrap_generate(AsyncLLM.generate)


def _wrap_process_inputs(original):
    @functools.wraps(original)
    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        from vllm_cascade.engine.admission import check_media, check_request

        request = original(self, *args, **kwargs)
        check_media(self.vllm_config, bool(request.mm_features))
        length = length_from_prompt_token_ids_or_embeds(
            request.prompt_token_ids, request.prompt_embeds
        )
        check_request(self.vllm_config, length, request.sampling_params)
        return request

    return process_inputs


def _wrap_generate(original):
    @functools.wraps(original)
    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm_cascade.engine.admission import check_media, check_request

        # The API server's prompts are tokenised already; others are checked by process_inputs.
        if isinstance(prompt, dict) and "type" in prompt:
            length = length_from_prompt_token_ids_or_embeds(
                prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
            )
            check_media(self.vllm_config, prompt["type"] == "multimodal")
            check_request(self.vllm_config, length, sampling_params)
        return original(self, prompt, sampling_params, *args, **kwargs)

    return generate
