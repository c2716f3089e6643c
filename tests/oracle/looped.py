# SPDX-License-Identifier: Apache-2.0
"""IQuest Loop Coder in PyTorch: Llama's modules, run twice.

In the second run every layer attends twice: to the keys of the first run, and to those of the
second in a window. A gate, made of the rotated query, mixes both by head.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

RUNS = 2


class LoopCoderConfig(LlamaConfig):
    """Checkpoints bring code for it."""

    model_type = "iquestloopcoder"


class LoopCoder(PreTrainedModel):
    """The model for the oracle of ``streamed.py``.

    Of ``n`` layers that oracle has first those of the first run, then ``n`` of the second run's
    windows, then ``n`` that attend to the first ones' caches again.
    """

    config_class = LoopCoderConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config: LoopCoderConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        gates = (
            nn.Linear(config.head_dim, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )
        self.model.gate_projections = nn.ModuleList(gates)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Tensor | bool) -> CausalLMOutput:
        attend = AttentionInterface()[self.config._attn_implementation]
        hidden, num = self.model.embed_tokens(input_ids), len(self.model.layers)
        positions = attend.position + torch.arange(input_ids.shape[1])
        first: list[tuple[Tensor, Tensor]] = []
        for run in range(RUNS):
            for index, layer in enumerate(self.model.layers):
                own, normed = layer.self_attn, layer.input_layernorm(hidden)
                query, key, value = (
                    project(normed).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
                    for project in (own.q_proj, own.k_proj, own.v_proj)
                )
                if run == 0:
                    first.append((key, value))
                    rows = attend(
                        SimpleNamespace(layer_idx=index), query, key, value, None, own.scaling
                    )[0]
                else:
                    again, near = SimpleNamespace(), SimpleNamespace()
                    again.layer_idx, near.layer_idx = 2 * num + index, num + index
                    whole = attend(again, query, *first[index], None, own.scaling)[0]
                    window = attend(near, query, key, value, None, own.scaling)[0]
                    turned = attend.layers[index].rotate(query[0], positions).float()
                    gate = self.model.gate_projections[index]
                    logits = torch.einsum("htd,hd->th", turned, gate.weight) + gate.bias
                    share = logits.sigmoid()[None, :, :, None]
                    rows = share * whole + (1 - share) * window
                hidden = hidden + own.o_proj(rows.flatten(2))
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return CausalLMOutput(logits=self.lm_head(self.model.norm(hidden)))
