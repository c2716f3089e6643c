# SPDX-License-Identifier: Apache-2.0
"""Patch of ``EngineCore.collective_rpc``, ``add_lora`` and ``reset_prefix_cache``.

What: a scheduler that keeps sessions hears that workers were told to change the model's weights, or
to load an adapter. A reset that drops sessions or evicted units makes an idle engine take a step.
Why: states of other weights must not be used or written as those of the weights in the model's
files, and vLLM sends such calls to workers only. A worker could tell with its next step's output,
but by then that step may have started a request from a session. A pause resets when the engine is
idle, just before it waits for messages without looking for work again, and workers hear of what
was dropped in a step.
Removed when: schedulers hear of weight updates, and an idle engine looks for work after callbacks.
"""

import functools
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore

CALLS = ("reload_weights", "update_weights", "finish_weight_update", "reset_weights")
"""Methods of vLLM's workers after which weights are others."""
_original, _add_lora = EngineCore.collective_rpc, EngineCore.add_lora
_reset = EngineCore.reset_prefix_cache


def _sessions(core: EngineCore) -> Any:
    """The sessions of a core's scheduler, or None.

    While a core starts, it calls its workers before it has a scheduler.
    """
    return getattr(getattr(core, "scheduler", None), "sessions", None)


@functools.wraps(_original)
def collective_rpc(self: EngineCore, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
    try:
        return _original(self, method, *args, **kwargs)
    finally:
        sessions = _sessions(self)
        if isinstance(method, str) and method in CALLS and sessions is not None:
            sessions.weights_changed()


@functools.wraps(_add_lora)
def add_lora(self: EngineCore, lora_request: LoRARequest) -> bool:
    sessions = _sessions(self)
    if sessions is not None:
        sessions.adapters.note(lora_request)
    return _add_lora(self, lora_request)


@functools.wraps(_reset)
def reset_prefix_cache(self: EngineCore, *args: Any, **kwargs: Any) -> bool:
    try:
        return _reset(self, *args, **kwargs)
    finally:
        # An engine without a process of its own has no queue.
        messages = getattr(self, "input_queue", None)
        if messages is not None and self.scheduler.has_requests():
            messages.put_nowait((EngineCoreRequestType.WAKEUP, None))


def apply() -> None:
    """Replace the methods; later calls change nothing."""
    EngineCore.collective_rpc, EngineCore.add_lora = collective_rpc, add_lora
    EngineCore.reset_prefix_cache = reset_prefix_cache
