# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a Hugging Face folder that vLLM loads: weights, config, tokenizer.

transformers 5.19 reads the weights of such a file, but neither saves what it read nor knows these
tokenizers. So this is written here, for the architectures of the benchmarks' models only: a
subclass each. Anything else is refused by name.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
"""Kinds of token in ``tokenizer.ggml.token_type``: text, what only a template writes, text that is
taken before any merge, a byte."""


class UnsuitableFile(ValueError):
    """A GGUF that is not converted; the message says what was found."""


class GGUFFile(ABC):
    """One GGUF file, read as its metadata and weights are asked for.

    Raises:
        UnsuitableFile: another architecture, tokenizer or set of weights; a damaged file.
    """

    demands: ClassVar[dict[str, str]]
    """Metadata that a file must have."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise UnsuitableFile(f"{path} is not a whole GGUF file: {error}") from error
        for key, value in self.demands.items():
            if self[key] != value:
                raise UnsuitableFile(f"only {key} = {value} is converted, not {self[key]}")
        if "output.weight" in {tensor.name for tensor in self._reader.tensors}:
            raise UnsuitableFile(f"{path} has output.weight: only tied embeddings are converted")
        kinds = set(self["tokenizer.ggml.token_type"])
        if unknown := kinds - self.kinds_of_token:
            raise UnsuitableFile(f"kinds of token {sorted(unknown)} are not converted")

    kinds_of_token: ClassVar[set[int]]
    """Kinds that ``tokenizer`` knows."""

    def __getitem__(self, key: str) -> Any:
        """A value of the metadata."""
        field = self._reader.get_field(key)
        if field is None:
            raise UnsuitableFile(f"the GGUF has no metadata {key}")
        return field.contents()

    def of_model(self, key: str) -> Any:
        """A value that the architecture's name stands before."""
        return self[f"{self['general.architecture']}.{key}"]

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    @abstractmethod
    def config(self) -> "PretrainedConfig":
        """The model's shape and constants, for weights that are stored in bf16."""

    @abstractmethod
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer with its special tokens, and its chat template if it has one."""

    def shape(self) -> dict[str, Any]:
        """Arguments of every configuration."""
        heads = {"num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv"}
        return {
            "vocab_size": len(self["tokenizer.ggml.tokens"]),
            "hidden_size": self.of_model("embedding_length"),
            "intermediate_size": self.of_model("feed_forward_length"),
            "num_hidden_layers": self.of_model("block_count"),
            **{name: self.of_model(f"attention.{key}") for name, key in heads.items()},
            "max_position_embeddings": self.of_model("context_length"),
            # A 32-bit number in the file: 1e-5, not 9.999999747378752e-06.
            "rms_norm_eps": float(f"{self.of_model('attention.layer_norm_rms_epsilon'):.6g}"),
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "bos_token_id": self["tokenizer.ggml.bos_token_id"],
            "eos_token_id": self["tokenizer.ggml.eos_token_id"],
            "pad_token_id": self["tokenizer.ggml.padding_token_id"],
        }

    def named_tokens(self) -> dict[str, str]:
        """``bos_token`` and so on."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        tokens = self["tokenizer.ggml.tokens"]
        return {
            f"{name}_token": tokens[self[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in keys.items()
        }

    def tokens_of(self, kind: int) -> list[str]:
        """The tokens of one kind."""
        kinds = self["tokenizer.ggml.token_type"]
        tokens = self["tokenizer.ggml.tokens"]
        return [text for text, own in zip(tokens, kinds, strict=True) if own == kind]

    def weights(self) -> dict[str, "torch.Tensor"]:
        """Hugging Face's names and the dequantised weights, float32, as transformers reads them.

        Raises:
            UnsuitableFile: weights are missing, or not of this architecture.
        """
        import torch
        from transformers import AutoModelForCausalLM

        path = {"pretrained_model_name_or_path": self._path.parent, "gguf_file": self._path.name}
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **path, dtype=torch.float32, output_loading_info=True
        )
        if wrong := {kind: keys for kind, keys in loaded.items() if keys}:
            raise UnsuitableFile(f"{self._path}: {wrong}")
        return {k: w for k, w in model.state_dict().items() if k != "lm_head.weight"}  # tied

    def save(self, folder: Path) -> None:
        """Write the Hugging Face folder: bf16 weights, config, generation config, tokenizer.

        A dequantised weight (a few bits times a 16-bit scale, plus a 16-bit offset) has more digits
        than bf16 holds: each is rounded to the nearest bf16, at most 2**-9 of its size away.
        """
        import torch
        from safetensors.torch import save_file
        from transformers import GenerationConfig

        folder.mkdir(parents=True, exist_ok=True)
        config = self.config()
        weights = {name: weight.to(torch.bfloat16) for name, weight in self.weights().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        ).save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
