# SPDX-License-Identifier: Apache-2.0
"""A setting or a model that cannot run, and what several of these ask about a model."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.config import ModelConfig, VllmConfig

from vllm_cascade.policies import Policy


@dataclass(frozen=True)
class Refusal:
    """``message`` says what is set, why it cannot work and what to do instead."""

    name: str
    applies: Callable[[VllmConfig, Policy], bool]
    message: str


def layer_types(model: ModelConfig) -> set[str]:
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def windowed(model: ModelConfig) -> bool:
    kinds = layer_types(model)
    return "sliding_attention" in kinds or (model.get_sliding_window() is not None and not kinds)
