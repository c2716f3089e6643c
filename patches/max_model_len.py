# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.config.model._get_and_verify_max_len`` (checked against vLLM 0.32.0).

What: lets ``--max-model-len`` exceed the model's position range while a configuration with a KV
policy is created, and records the range so that the policy can be checked against it.
Why: a policy keeps positions below sinks + budget + stride, so a stream may be longer than the
range. vLLM rejects such lengths. ``VLLM_ALLOW_LONG_MAX_MODEL_LEN`` would allow them for stock
attention as well, where the output would be wrong.
Removed when: a KV cache spec of vLLM can declare that its positions are bounded.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.config import model as vllm_model_config
from vllm.transformers_utils.config import iter_rope_parameters


@dataclass
class NativeLength:
    """The model's position range.

    Attributes:
        max_len: tokens of the longest stream it allows; 0 until vLLM has checked the model. With a
            drafting model, the smaller of both.
        default: tokens of the longest stream without ``--max-model-len``. Fewer than ``max_len``
            with LongRoPE, whose frequencies for short streams are the better ones.
    """

    max_len: int = 0
    default: int = 0

    def note(self, longest: int, default: int) -> None:
        """Lower the range to that of one more model."""
        self.max_len = min(self.max_len or longest, longest)
        self.default = min(self.default or default, default)


_recording: ContextVar[NativeLength | None] = ContextVar("kv_policy_native_length", default=None)


@contextmanager
def positions_are_bounded() -> Iterator[NativeLength]:
    """Accept any ``--max-model-len`` within this context, and record the model's own range."""
    native = NativeLength()
    token = _recording.set(native)
    try:
        yield native
    finally:
        _recording.reset(token)


def is_bounded() -> bool:
    """Whether this runs within ``positions_are_bounded``."""
    return _recording.get() is not None


def _longest(
    own: int, hf_config: Any, model_arch_config: Any, tokenizer_config: Any = None, **_: Any
) -> int:
    """The model's whole range, if ``own`` is vLLM's default length of it."""
    if not any(rope["rope_type"] == "longrope" for rope in iter_rope_parameters(hf_config)):
        return own
    derived, _key = model_arch_config.derived_max_model_len_and_key
    return int(min(derived, (tokenizer_config or {}).get("model_max_length", derived)))


def apply() -> None:
    """Wrap the function. ``patches.apply_all`` calls this once."""
    original = vllm_model_config._get_and_verify_max_len

    @functools.wraps(original)
    def _get_and_verify_max_len(*, max_model_len: int | None, **kwargs) -> int:
        native = _recording.get()
        if native is None:
            return original(max_model_len=max_model_len, **kwargs)
        own = original(max_model_len=None, **kwargs)
        native.note(_longest(own, **kwargs), own)
        return own if max_model_len in (None, -1) else max_model_len

    vllm_model_config._get_and_verify_max_len = _get_and_verify_max_len
