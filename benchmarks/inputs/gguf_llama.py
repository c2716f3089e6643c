# SPDX-License-Identifier: Apache-2.0
"""A Llama out of a GGUF file: tied embeddings, a byte-level BPE that splits digits (``smollm``)."""

from typing import TYPE_CHECKING, ClassVar

from benchmarks.inputs.gguf_file import CONTROL, NORMAL, GGUFFile

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerFast


class LlamaFile(GGUFFile):
    """One GGUF file of a Llama."""

    demands: ClassVar = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    layer_weights: ClassVar = {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    }
    kinds_of_token: ClassVar = {NORMAL, CONTROL}

    def config(self) -> "LlamaConfig":
        from transformers import LlamaConfig

        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            head_dim=self.of_model("rope.dimension_count"),
            rope_parameters={"rope_type": "default", "rope_theta": self.of_model("rope.freq_base")},
            **self.shape(),
        )

    def converted(self, name: str, weight: "torch.Tensor") -> "torch.Tensor":
        heads = {"attn_q.weight": "head_count", "attn_k.weight": "head_count_kv"}
        if name in heads:
            return halves_together(weight, self.of_model(f"attention.{heads[name]}"))
        return weight

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens: list[str] = self["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in self["tokenizer.ggml.merges"]]
        fast = Tokenizer(models.BPE({text: at for at, text in enumerate(tokens)}, merges))
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        fast.decoder = decoders.ByteLevel()
        special = self.tokens_of(CONTROL)
        fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
        return PreTrainedTokenizerFast(
            tokenizer_object=fast,
            additional_special_tokens=special,
            chat_template=self["tokenizer.chat_template"],
            model_max_length=self.of_model("context_length"),
            clean_up_tokenization_spaces=False,
            **self.named_tokens(),
        )


def halves_together(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Rows of a query or key weight in Hugging Face's order, from GGUF's.

    RoPE turns pairs of a head's dimensions. GGUF keeps the two rows of a pair side by side
    (0, 32, 1, 33, ...); Hugging Face keeps all first ones and then all second ones (0, 1, ...,
    32, 33, ...).

    Args:
        weight: ``(heads * head size, width)``.
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width).contiguous()
