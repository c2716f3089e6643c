# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of a Llama as a Hugging Face folder that vLLM loads: weights, config, tokenizer.

transformers 5.19 reads such a file but cannot save what it read, so this is written here, and
only for what the benchmarks' model is: the Llama architecture with tied embeddings and a
byte-level BPE tokenizer that splits digits (``smollm``). Anything else is refused by name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_WEIGHTS = {
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
"""GGUF's names, and the Hugging Face names inside ``model.layers.<n>``."""

NORMAL, CONTROL = 1, 3
"""Kinds of token in ``tokenizer.ggml.token_type``: text, and what only a template writes."""


class UnsuitableFile(ValueError):
    """A GGUF that this module does not convert; the message says what it has found."""


class LlamaFile:
    """One GGUF file, read as its metadata and weights are asked for.

    Raises:
        UnsuitableFile: another architecture, tokenizer or set of weights; a damaged file.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise UnsuitableFile(f"{path} is not a whole GGUF file: {error}") from error
        self._demand("general.architecture", "llama")
        self._demand("tokenizer.ggml.model", "gpt2")
        self._demand("tokenizer.ggml.pre", "smollm")
        layers = range(self["llama.block_count"])
        expected = {f"blk.{layer}.{name}" for layer in layers for name in LAYER_WEIGHTS}
        found = {tensor.name for tensor in self._reader.tensors}
        if found != (expected := expected | set(WEIGHTS)):
            raise UnsuitableFile(
                f"{path} is not a Llama with tied embeddings: "
                f"missing {sorted(expected - found)[:5]}, unexpected {sorted(found - expected)[:5]}"
            )

    def __getitem__(self, key: str) -> Any:
        """A value of the metadata."""
        field = self._reader.get_field(key)
        if field is None:
            raise UnsuitableFile(f"the GGUF has no metadata {key}")
        return field.contents()

    def _demand(self, key: str, value: str) -> None:
        if self[key] != value:
            raise UnsuitableFile(f"only {key} = {value} is converted, not {self[key]}")

    def config(self) -> "LlamaConfig":
        """The model's shape and constants, for weights that are stored in bf16."""
        from transformers import LlamaConfig

        heads = self["llama.attention.head_count"]
        width = self["llama.embedding_length"]
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self["llama.vocab_size"],
            hidden_size=width,
            intermediate_size=self["llama.feed_forward_length"],
            num_hidden_layers=self["llama.block_count"],
            num_attention_heads=heads,
            num_key_value_heads=self["llama.attention.head_count_kv"],
            head_dim=self["llama.rope.dimension_count"],
            max_position_embeddings=self["llama.context_length"],
            # A 32-bit number in the file: 1e-5, not 9.999999747378752e-06.
            rms_norm_eps=float(f"{self['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            rope_parameters={"rope_type": "default", "rope_theta": self["llama.rope.freq_base"]},
            tie_word_embeddings=True,
            dtype="bfloat16",
            bos_token_id=self["tokenizer.ggml.bos_token_id"],
            eos_token_id=self["tokenizer.ggml.eos_token_id"],
            pad_token_id=self["tokenizer.ggml.padding_token_id"],
        )

    def weights(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Hugging Face's names and the dequantised weights, float32, one at a time."""
        heads = self["llama.attention.head_count"]
        kv_heads = self["llama.attention.head_count_kv"]
        for tensor in self._reader.tensors:
            weight = _dequantised(tensor)
            if tensor.name in WEIGHTS:
                yield WEIGHTS[tensor.name], weight
                continue
            _, layer, name = tensor.name.split(".", 2)
            if name in ("attn_q.weight", "attn_k.weight"):
                weight = halves_together(weight, heads if name == "attn_q.weight" else kv_heads)
            yield f"model.layers.{layer}.{LAYER_WEIGHTS[name]}", weight

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer with its special tokens and its chat template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens: list[str] = self["tokenizer.ggml.tokens"]
        kinds: list[int] = self["tokenizer.ggml.token_type"]
        if set(kinds) - {NORMAL, CONTROL}:
            raise UnsuitableFile(f"kinds of token {sorted(set(kinds))}; only 1 and 3 are converted")
        merges = [tuple(merge.split(" ")) for merge in self["tokenizer.ggml.merges"]]
        fast = Tokenizer(models.BPE({text: at for at, text in enumerate(tokens)}, merges))
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        fast.decoder = decoders.ByteLevel()
        special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
        fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
        named = {
            f"{name}_token": tokens[self[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=fast,
            additional_special_tokens=special,
            chat_template=self["tokenizer.chat_template"],
            model_max_length=self["llama.context_length"],
            clean_up_tokenization_spaces=False,
            **named,
        )

    def save(self, folder: Path) -> None:
        """Write the Hugging Face folder: bf16 weights, config, generation config, tokenizer.

        A dequantised weight (4 bits times a 16-bit scale, plus a 16-bit offset) has more digits
        than bf16 holds: each is rounded to the nearest bf16, at most 2**-9 of its size away.
        """
        import torch
        from safetensors.torch import save_file
        from transformers import GenerationConfig

        folder.mkdir(parents=True, exist_ok=True)
        config = self.config()
        weights = {name: weight.to(torch.bfloat16) for name, weight in self.weights()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        ).save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)


def _dequantised(tensor: "ReaderTensor") -> "torch.Tensor":
    import torch
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


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
