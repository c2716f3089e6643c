# SPDX-License-Identifier: Apache-2.0
"""A Llama out of a GGUF file: tied embeddings, a byte-level BPE that splits digits (``smollm``)."""

from typing import TYPE_CHECKING, ClassVar

from benchmarks.inputs.gguf_file import CONTROL, NORMAL, GGUFFile

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast


class LlamaFile(GGUFFile):
    """One GGUF file of a Llama."""

    demands: ClassVar = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
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
