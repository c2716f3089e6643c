# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.config.model._get_and_verify_max_len``.

What: lets ``--max-model-len`` exceed the model's position range while a configuration with a KV
policy is created, and records the range so that the policy can be checked against it. A drafting
model gets the length of the model.
Why: a policy keeps positions below sinks + budget + stride, so a stream may be longer than the
range. vLLM rejects such lengths, and 0.33 ends streams where a drafting model's length ends.
``VLLM_ALLOW_LONG_MAX_MODEL_LEN`` would allow them for stock attention as well, where the output
would be wrong.
Removed when: a KV cache spec of vLLM can declare that its positions are bounded.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.config import model as vllm_model_config
from vllm.transformers_utils.config import iter_rope_parameters

ENLARGED = ("default", "linear", "llama3", "ntk", "proportional")
"""Rope types of which ``max_position_embeddings`` is the length of the table and nothing else."""


@dataclass
class NativeLength:
    """The position ranges of a model and, after it, of a drafting model.

    Attributes:
        ranges: of each, tokens of the longest stream that it allows, and tokens of the longest
            stream without ``--max-model-len``. These are fewer with LongRoPE, whose frequencies for
            short streams are the better ones.
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)

    def of(self, drafts: SpeculativeConfig | None) -> tuple[int, int]:
        """The range of an engine: the smaller one of both models.

        An EAGLE head has the model's positions, whatever its checkpoint says: vLLM enlarges its
        table of rotations, unless the rope type has a table of another length.
        """
        shared = False
        if drafts is not None and drafts.method in ("eagle", "eagle3"):
            ropes = iter_rope_parameters(drafts.draft_model_config.hf_config)
            shared = all(rope.get("rope_type", "default") in ENLARGED for rope in ropes)
        longest, default = zip(*self.ranges[: 1 if shared else None], strict=True)
        return min(longest), min(default)


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
        native.ranges.append((_longest(own, **kwargs), own))
        if max_model_len in (None, -1):
            return max(own, kwargs.get("spec_target_max_model_len") or 0)
        return max_model_len

    vllm_model_config._get_and_verify_max_len = _get_and_verify_max_len
