# SPDX-License-Identifier: Apache-2.0
"""A Gemma 3 out of a GGUF file: sliding windows beside full attention, SentencePiece's BPE."""

from typing import TYPE_CHECKING, ClassVar

from benchmarks.inputs.gguf_file import BYTE, CONTROL, NORMAL, USER_DEFINED, GGUFFile

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig, PreTrainedTokenizerFast

LOCAL_THETA = 10_000.0
EVERY = 6
"""Of so many layers the last has full attention. Neither this nor ``LOCAL_THETA`` is in a file:
every Gemma 3 has them."""
SPACE = "▁"


class GemmaFile(GGUFFile):
    """One GGUF file of a Gemma 3, text only."""

    demands: ClassVar = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
    }
    kinds_of_token: ClassVar = {NORMAL, CONTROL, USER_DEFINED, BYTE}

    def config(self) -> "Gemma3TextConfig":
        from transformers import Gemma3TextConfig

        size = self.of_model("attention.key_length")
        theta = {
            "full_attention": self.of_model("rope.freq_base"),
            "sliding_attention": LOCAL_THETA,
        }
        layers = range(1, self.of_model("block_count") + 1)
        return Gemma3TextConfig(
            architectures=["Gemma3ForCausalLM"],
            head_dim=size,
            query_pre_attn_scalar=size,
            sliding_window=self.of_model("attention.sliding_window"),
            layer_types=[
                "sliding_attention" if layer % EVERY else "full_attention" for layer in layers
            ],
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()
            },
            **self.shape(),
        )

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
        from transformers import PreTrainedTokenizerFast

        names = self.named_tokens()
        model = models.BPE(
            {text: at for at, text in enumerate(self["tokenizer.ggml.tokens"])},
            self._merges(),
            unk_token=names["unk_token"],
            fuse_unk=True,
            byte_fallback=True,
        )
        fast = Tokenizer(model)
        fast.normalizer = normalizers.Replace(" ", SPACE)
        fast.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special = self.tokens_of(CONTROL)
        fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
        fast.add_tokens(
            [AddedToken(text, normalized=False) for text in self.tokens_of(USER_DEFINED)]
        )
        template = "tokenizer.chat_template"
        return PreTrainedTokenizerFast(
            tokenizer_object=fast,
            add_bos_token=self["tokenizer.ggml.add_bos_token"],
            chat_template=self[template] if self.has(template) else None,
            model_max_length=self.of_model("context_length"),
            clean_up_tokenization_spaces=False,
            **names,
        )

    def _merges(self) -> list[tuple[str, str]]:
        """Every two tokens that make a third, by its score.

        SentencePiece joins whatever two neighbours make the token of the best score; a BPE has a
        list of pairs instead.
        """
        tokens, kinds = self["tokenizer.ggml.tokens"], self["tokenizer.ggml.token_type"]
        number = {text: at for at, text in enumerate(tokens) if kinds[at] == NORMAL}
        scores = self["tokenizer.ggml.scores"]
        found = [
            (-scores[at], number[text[:cut]], number[text[cut:]])
            for text, at in number.items()
            for cut in range(1, len(text))
            if text[:cut] in number and text[cut:] in number
        ]
        return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]
