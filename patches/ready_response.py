# SPDX-License-Identifier: Apache-2.0
"""Patch of ``EngineCoreProc._make_ready_response`` and ``MPClient._apply_ready_response``.

What: an engine's first message to its front-ends has the settings of its policy, and a front-end
with other settings stops.
Why: a data-parallel engine on another node reads flags of its own. vLLM compares hashes of the
parallel configuration, and only for models with experts, which say nothing of a policy. Front-ends
check requests by their own settings.
Removed when: vLLM compares ``additional_config``, or plugins can add to this message.
"""

import functools
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import MPClient


@dataclass
class PolicyReadyResponse(EngineCoreReadyResponse):
    """vLLM's message, plus ``nodes.shared_settings``. vLLM drops fields that it does not know."""

    kv_policy: str = ""


def apply() -> None:
    """Wrap the methods. ``patches.apply_all`` calls this once."""
    EngineCoreProc._make_ready_response = _wrap_make(EngineCoreProc._make_ready_response)
    MPClient._apply_ready_response = _wrap_apply(MPClient._apply_ready_response)


def _wrap_make(original):
    @functools.wraps(original)
    def _make_ready_response(self) -> PolicyReadyResponse:
        from vllm_cascade.engine.nodes import shared_settings

        own = shared_settings(self.vllm_config.additional_config)
        return PolicyReadyResponse(**vars(original(self)), kv_policy=own)

    return _make_ready_response


def _wrap_apply(original):
    @functools.wraps(original)
    def _apply_ready_response(self, payload: bytes) -> None:
        from vllm_cascade.engine.nodes import check_same, shared_settings

        original(self, payload)
        if payload:
            response: dict[str, Any] = msgspec.msgpack.decode(payload)
            place = f"on the node of data-parallel engine {response['data_parallel_rank']}"
            settings = response.get("kv_policy") or "{}"  # without the plugin, vLLM is stock
            own = shared_settings(self.vllm_config.additional_config)
            check_same(own, settings, ("on this node", place))

    return _apply_ready_response
