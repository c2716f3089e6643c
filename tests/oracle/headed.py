# SPDX-License-Identifier: Apache-2.0
"""Models that transformers has no class of its own for, or no class of their configuration.

Text models that are parts of models for images get a head here; vLLM runs them alone, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.granitemoeshared.modeling_granitemoeshared import (
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSharedRMSNorm,
)
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextConfig, Step3p7TextModel

from .looped import LoopCoder


class Headed(PreTrainedModel):
    """A text model and the weights of its logits."""

    body: type[PreTrainedModel]
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, **inputs: Any) -> CausalLMOutput:
        logits = self.lm_head(self.model(**inputs).last_hidden_state)
        logits = logits * getattr(self.config, "output_multiplier", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return CausalLMOutput(logits=logits if cap is None else cap * torch.tanh(logits / cap))


class MuseGlimmerReference(MuseGlimmerTextConfig):
    """Under another name: vLLM puts a class of its own under transformers' name."""

    model_type = "muse_glimmer_reference"


class MuseGlimmerText(Headed):
    config_class, body = MuseGlimmerReference, MuseGlimmerTextModel


class Step3p5Reference(Step3p7TextConfig):
    """As for Muse Glimmer."""

    model_type = "step3p5_reference"


class Step3p7Text(Headed):
    config_class, body = Step3p5Reference, Step3p7TextModel


class Step3Reference(GraniteMoeSharedConfig):
    """As for Muse Glimmer; without Granite's multipliers."""

    model_type = "step3_reference"


class Step3Text(GraniteMoeSharedForCausalLM):
    """Granite's layers, whose queries are made of fewer channels that are normalised."""

    config_class = Step3Reference

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.q_proj = nn.Sequential(
                nn.Linear(config.hidden_size, config.share_q_dim, bias=False),
                GraniteMoeSharedRMSNorm(config.share_q_dim, config.rms_norm_eps),
                nn.Linear(config.share_q_dim, layer.self_attn.q_proj.out_features, bias=False),
            )


class K2HorizonConfig(PreTrainedConfig):
    """Checkpoints bring code for it."""

    model_type = "k2_horizon"


class SarvamConfig(PreTrainedConfig):
    """Checkpoints bring code for it."""

    model_type = "sarvam_mla"


class TeleChatConfig(PreTrainedConfig):
    """Checkpoints bring code for it."""

    model_type = "telechat"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }


def register() -> None:
    """Let transformers find these classes by their configurations."""
    kinds = (LoopCoder, MuseGlimmerText, Step3p7Text, Step3Text)
    own = (K2HorizonConfig, SarvamConfig, TeleChatConfig)
    for config in (*own, *(kind.config_class for kind in kinds)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for kind in kinds:
        AutoModelForCausalLM.register(kind.config_class, kind, exist_ok=True)
