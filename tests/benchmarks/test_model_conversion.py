# SPDX-License-Identifier: Apache-2.0
"""The converted model is the model of the GGUF: weights, logits, tokens and templates.

The tests' own reader of the same file (``gguf_reader.py``) says what is right: it runs the weights
in the file's order and shares no code with the conversion, in which transformers reads them.

The folder's weights are bf16, the file's are not: 4 bits, a 16-bit scale and a 16-bit offset make
up to 17 significant bits. So logits are compared before rounding, where they must agree as fp32
does; rounding is checked to be to the nearest bf16, bit for bit; and what it changes is bounded.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.inputs.gguf_llama import LlamaFile
from benchmarks.models import STAMP, real_gguf
from tests.benchmarks.gguf_reader import GGUF, Llama, tokenizer
from tests.conftest import BOOK

MAX_ERROR = 5e-4
"""Of a logit, fp32 against fp32; logits are up to 40, and 30 layers add up in another order."""

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "def factorial(n):\n",
)
TEXTS = (
    "",
    " ",
    "   ",
    "  leading and trailing  ",
    "In 2024 it's 12345.67, isn't it?  We'll see:\n\n\tdef f(x):\n        return x**2\n",
    "DON'T 'tis I'LL he'd they've ''s",
    "naïve café Ærøskøbing — “quoted” … €5",
    "½ ²³ x² ٣٤ ⅷ Ⅻ ① 1 2",
    "東京は日本の首都です。 Привет, мир! שלום 안녕",
    "🙂👩‍👩‍👧 \u200b\u00a0x\u3000y\r\n z\x00\x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start <|im_end|><repo_name>x<file_sep>",
)

LLAMA_CPP = {
    " ": [216],
    "  leading and trailing  ": [216, 2899, 284, 35079, 256],
    "DON'T 'tis I'LL he'd they've ''s": (
        [52, 2154, 23, 68, 637, 34818, 339, 23, 16421, 384, 6737, 502, 3543, 10922, 99]
    ),
    "½ ²³ x²": [16738, 216, 19133, 39050, 1792, 19133],
    "٣٤ ⅷ Ⅻ ①": [164, 113, 164, 114, 216, 173, 223, 132, 216, 173, 223, 121, 216, 173, 235, 250],
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start <|im_end|><repo_name>x<file_sep>": (
        [1, 4093, 198, 26843, 2, 198, 0, 44, 108, 306, 79, 3738, 216, 2, 3, 104, 5]
    ),
}
"""What llama.cpp (llama-cpp-python 0.3.36) makes of these texts with the same file."""


@pytest.fixture(scope="module")
def path(real_model: Path) -> Path:
    """The GGUF itself."""
    return real_gguf()


@pytest.fixture(scope="module")
def source(path: Path) -> GGUF:
    return GGUF(path)


@pytest.fixture(scope="module")
def reader(source: GGUF) -> Llama:
    return Llama(source)


@pytest.fixture(scope="module")
def encode(source: GGUF) -> Any:
    return tokenizer(source)


@pytest.fixture(scope="module")
def converted(path: Path) -> LlamaFile:
    return LlamaFile(path)


@pytest.fixture(scope="module")
def weights(converted: LlamaFile) -> dict[str, torch.Tensor]:
    """Converted, not yet rounded to bf16."""
    return converted.weights()


@pytest.fixture(scope="module")
def model(converted: LlamaFile, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' Llama with the converted weights in fp32."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(converted.config())
    model = model.to_empty(device="cpu").float().eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(converted.config())
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    assert missing == ["lm_head.weight"] and not unexpected
    return model


@pytest.fixture(scope="module")
def tokens(encode: Any) -> list[int]:
    """A stretch of the book that the repository holds."""
    return encode(BOOK.read_text("utf-8")[20_000:20_700])


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def continued(model: Any, tokens: list[int], count: int) -> list[int]:
    """The most likely continuation, end tokens and all."""
    with torch.inference_mode():
        given = torch.tensor([tokens])
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return out[0, len(tokens) :].tolist()


@pytest.mark.slow
def test_logits_before_rounding(reader: Llama, model: Any, tokens: list[int]) -> None:
    truth, found = reader.logits(tokens), logits(model, tokens)
    error = (truth - found).abs()
    print(f"{len(tokens)} tokens: max {error.max():.1e}, mean {error.mean():.1e}")
    assert len(tokens) > 100 and truth.abs().max() > 20
    assert error.max() < MAX_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation(prompt: str, reader: Llama, model: Any, encode: Any) -> None:
    ids = encode(prompt)
    assert continued(model, ids, 16) == reader.greedy(ids, 16)


@pytest.mark.slow
def test_folder_is_rounded_to_nearest(real_model: Path, weights: dict[str, torch.Tensor]) -> None:
    """The folder's bits, by integer arithmetic: nearest bf16, the even one of two."""
    saved = load_file(real_model / "model.safetensors")
    assert set(saved) == set(weights)
    inexact = 0
    for name, weight in weights.items():
        bits = weight.view(torch.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert saved[name].dtype == torch.bfloat16
        assert torch.equal(saved[name].view(torch.int16), rounded.to(torch.int16)), name
        inexact += int((saved[name].float() != weight).sum())
    total = sum(weight.numel() for weight in weights.values())
    print(f"{inexact / total:.1%} of {total:,} weights are not exact in bf16")
    assert 0.5 < inexact / total < 1


@pytest.mark.slow
def test_what_rounding_changes(
    real_model: Path, model: Any, weights: dict[str, torch.Tensor], tokens: list[int]
) -> None:
    """Log-probabilities of the book with rounded weights, in fp32, beside those of the file's."""
    rounded = {name: weight.to(torch.bfloat16).float() for name, weight in weights.items()}
    before = logits(model, tokens).log_softmax(-1)
    model.load_state_dict(rounded, strict=False)
    try:
        after = logits(model, tokens).log_softmax(-1)
    finally:
        model.load_state_dict(weights, strict=False)
    at = torch.tensor(tokens)[1:, None]
    change = (after[:-1].gather(1, at) - before[:-1].gather(1, at)).squeeze(1)
    same = (after.argmax(-1) == before.argmax(-1)).float().mean()
    print(
        f"log-probability: mean change {change.mean():+.4f}, largest {change.abs().max():.3f}; "
        f"{same:.1%} of the most likely tokens are the same"
    )
    assert change.mean().abs() < 0.01 and change.abs().max() < 0.5 and same > 0.95


def test_folder_is_what_the_code_writes(
    real_model: Path, converted: LlamaFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever changes the conversion must count CONVERSION up, or old folders stay in use."""
    monkeypatch.setattr(LlamaFile, "weights", lambda self: {})
    converted.save(tmp_path)
    names = {file.name for file in real_model.iterdir()}
    assert names == {file.name for file in tmp_path.iterdir()} | {STAMP}
    differ = {
        name
        for name in names - {STAMP, "model.safetensors"}
        if (real_model / name).read_bytes() != (tmp_path / name).read_bytes()
    }
    assert not differ, "count benchmarks.models.CONVERSION up"


def test_configuration(real_model: Path) -> None:
    """What the model is known for."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(real_model)
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.bfloat16
    assert config.num_hidden_layers == 30 and config.tie_word_embeddings
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config.max_position_embeddings == 8192 and config.vocab_size == 49_152
    assert config.rms_norm_eps == 1e-5
    generation = GenerationConfig.from_pretrained(real_model)
    assert generation.eos_token_id == 2 and generation.pad_token_id == 2


@pytest.fixture(scope="module")
def loaded(real_model: Path) -> Any:
    """The folder's tokenizer as vLLM loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model)


@pytest.mark.parametrize("text", TEXTS)
def test_same_tokens(text: str, loaded: Any, encode: Any) -> None:
    ids = loaded(text)["input_ids"]
    assert ids == encode(text)
    assert loaded.decode(ids) == text


def test_llama_cpp_agrees(loaded: Any, encode: Any) -> None:
    for text, ids in LLAMA_CPP.items():
        assert loaded(text)["input_ids"] == encode(text) == ids


def test_same_tokens_of_a_book(loaded: Any, encode: Any) -> None:
    text = BOOK.read_text("utf-8")
    loaded.model_max_length = 1 << 60
    assert loaded(text)["input_ids"] == encode(text)


def test_special_tokens(loaded: Any) -> None:
    assert loaded.bos_token == "<|im_start|>" and loaded.eos_token == loaded.pad_token
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id) == (1, 2, 0)
    assert len(loaded) == loaded.vocab_size == 49_152
    assert loaded.decode([1, 504, 3575, 2], skip_special_tokens=True) == "The capital"
    assert sorted(loaded.all_special_ids) == list(range(17))


def test_chat_template(loaded: Any, encode: Any) -> None:
    """A turn as the model was trained on it, with the system's words that it adds."""
    chat = [{"role": "user", "content": "What is 2+2?"}]
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == text
    ids = loaded.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == encode(text) and ids[0] == 1
    chat = [{"role": "system", "content": "Be brief."}, *chat]
    text = loaded.apply_chat_template(chat, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n")
