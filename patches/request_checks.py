# SPDX-License-Identifier: Apache-2.0
"""Patch of ``InputProcessor.process_inputs``, ``AsyncLLM.generate`` and
``OpenAIServingResponses._generate_with_builtin_tools``.

What: rejects requests with an invalid policy or budget, requests that need more pages than the
pool has, and images whose positions a policy cannot move. The API server checks before it answers,
so that streaming and background requests get status 400 too.
Why: ``Platform.validate_request`` is vLLM's only hook for such checks. It belongs to platforms,
sees neither the configuration nor the final ``max_tokens``, and runs after the status line of a
stream has been sent. ``/v1/responses`` calls ``generate`` after that line, too: its generator calls
the engine when the first event is read.
Removed when: general plugins can validate requests.
"""

import functools
from collections.abc import AsyncGenerator
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.inputs import EngineInput, split_enc_dec_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor


def apply() -> None:
    """Wrap the methods. ``patches.apply_all`` calls this once."""
    InputProcessor.process_inputs = _wrap_process_inputs(InputProcessor.process_inputs)
    AsyncLLM.generate = _wrap_generate(AsyncLLM.generate)
    AsyncLLM.__init__ = _wrap_init(AsyncLLM.__init__)


@functools.cache
def apply_to_responses() -> None:
    """Wrap the endpoint's generator, once.

    Only front-ends that serve import the endpoint; workers and engines do without.
    """
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    OpenAIServingResponses._generate_with_builtin_tools = _wrap_responses(
        OpenAIServingResponses._generate_with_builtin_tools
    )


def _wrap_init(original):
    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        apply_to_responses()

    return __init__


def _wrap_process_inputs(original):
    @functools.wraps(original)
    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        from vllm_cascade.engine.admission import check_media, check_request

        request = original(self, *args, **kwargs)
        check_media(self.vllm_config, bool(request.mm_features))
        length = length_from_prompt_token_ids_or_embeds(
            request.prompt_token_ids, request.prompt_embeds
        )
        check_request(self.vllm_config, length, request.sampling_params, request.resumable)
        return request

    return process_inputs


def _wrap_generate(original):
    @functools.wraps(original)
    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm_cascade.engine.admission import check_request

        if isinstance(prompt, AsyncGenerator):
            # vLLM makes the request that ends streaming input first, and that one looks small.
            check_request(self.vllm_config, 1, sampling_params, resumable=True)
        _check_tokenised(self.vllm_config, prompt, sampling_params)
        return original(self, prompt, sampling_params, *args, **kwargs)

    return generate


def _wrap_responses(original):
    """Not a generator itself: it checks when it is called, before the answer begins."""

    @functools.wraps(original)
    def generate_with_builtin_tools(
        self,
        request_id: str,
        engine_input: Any,
        sampling_params: SamplingParams,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        _check_tokenised(self.engine_client.vllm_config, engine_input, sampling_params)
        return original(self, request_id, engine_input, sampling_params, *args, **kwargs)

    return generate_with_builtin_tools


def _check_tokenised(vllm_config: VllmConfig, prompt: Any, params: SamplingParams) -> None:
    """Check a prompt from the API server, which is tokenised; process_inputs checks all others."""
    from vllm_cascade.engine.admission import check_media, check_request

    if not isinstance(prompt, dict) or "type" not in prompt:
        return
    # The decoder's part; models without an encoder have no other.
    _, prompt = split_enc_dec_input(cast(EngineInput, prompt))
    length = length_from_prompt_token_ids_or_embeds(
        prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
    )
    check_media(vllm_config, prompt["type"] == "multimodal")
    check_request(vllm_config, length, params)
