# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.config.model._get_and_verify_max_len`` (checked against vLLM 0.32.0).

What: while a configuration with a KV policy is created, ``--max-model-len`` may exceed the model's
position range, and the range itself is noted so that the policy can be checked against it.
Why: a policy keeps positions below sinks + budget + stride for ever, so a stream may be longer
than the range; vLLM refuses that, or takes it from an environment variable that also lets through
what would really be wrong.
Removed when: vLLM lets a KV cache spec say that its positions are bounded.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from vllm.config import model as vllm_model_config


@dataclass
class NativeLength:
    """The longest stream the model's own positions allow."""

    max_len: int = 0


_recording: ContextVar[NativeLength | None] = ContextVar("kv_policy_native_length", default=None)


@contextmanager
def positions_are_bounded() -> Iterator[NativeLength]:
    """Within this context the check passes any length and notes the native one."""
    native = NativeLength()
    token = _recording.set(native)
    try:
        yield native
    finally:
        _recording.reset(token)


def apply() -> None:
    """Wrap the function; ``patches.apply_all`` calls this once."""
    original = vllm_model_config._get_and_verify_max_len

    @functools.wraps(original)
    def _get_and_verify_max_len(*, max_model_len: int | None, **kwargs) -> int:
        native = _recording.get()
        if native is None:
            return original(max_model_len=max_model_len, **kwargs)
        native.max_len = original(max_model_len=None, **kwargs)
        return native.max_len if max_model_len in (None, -1) else max_model_len

    vllm_model_config._get_and_verify_max_len = _get_and_verify_max_len
