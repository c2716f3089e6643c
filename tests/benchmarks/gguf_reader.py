# SPDX-License-Identifier: Apache-2.0
"""A GGUF Llama read by the format's definition and run as it lies in the file.

Independent of what it checks (``benchmarks/inputs/gguf_llama.py``): neither the package ``gguf``
nor transformers nor tokenizers is used. Queries and keys keep GGUF's order of rows, so RoPE turns
neighbouring dimensions here, as llama.cpp does it; and text is split by the regular expressions
that llama.cpp has for the pre-tokenizer ``smollm``.
"""

import itertools
import math
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
import torch.nn.functional as F
from torch import Tensor

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


class GGUF:
    """Metadata and dequantised tensors of a file, version 3, little-endian."""

    def __init__(self, path: Path) -> None:
        self.bytes = path.read_bytes()
        self.at = 0
        magic, version = self._number("I"), self._number("I")
        assert magic == int.from_bytes(b"GGUF", "little") and version == 3
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.metadata = {self._string(): self._value(self._number("I")) for _ in range(num_values)}
        self.tensors = {}
        for _ in range(num_tensors):
            name = self._string()
            shape = [self._number("Q") for _ in range(self._number("I"))]
            self.tensors[name] = (shape[::-1], self._number("I"), self._number("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        self.data = -(-self.at // alignment) * alignment

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.bytes, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self.at += length
        return self.bytes[self.at - length : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(count)]
        return self._number(SCALARS[kind])

    def tensor(self, name: str) -> Tensor:
        """float32, slowest dimension first."""
        shape, kind, offset = self.tensors[name]
        read = {0: _plain, 3: _q4_1, 8: _q8_0}[kind]
        values = read(self.bytes, self.data + offset, math.prod(shape))
        return torch.from_numpy(values.reshape(shape))


def _plain(data: bytes, at: int, count: int) -> np.ndarray:
    return np.frombuffer(data, "<f4", count, at).copy()


def _q4_1(data: bytes, at: int, count: int) -> np.ndarray:
    """Blocks of 32: scale and smallest value in 16 bits; 16 bytes whose low halves come first."""
    block = np.dtype([("scale", "<f2"), ("least", "<f2"), ("quants", "u1", 16)])
    blocks = np.frombuffer(data, block, count // 32, at)
    quants = np.concatenate([blocks["quants"] & 15, blocks["quants"] >> 4], axis=1)
    scale, least = (blocks[name].astype(np.float32)[:, None] for name in ("scale", "least"))
    return (quants * scale + least).astype(np.float32).ravel()


def _q8_0(data: bytes, at: int, count: int) -> np.ndarray:
    """Blocks of 32: a scale in 16 bits, 32 signed bytes."""
    blocks = np.frombuffer(
        data, np.dtype([("scale", "<f2"), ("quants", "i1", 32)]), count // 32, at
    )
    scale = blocks["scale"].astype(np.float32)[:, None]
    return (blocks["quants"] * scale).astype(np.float32).ravel()


class Llama:
    """The model, without a cache: ``logits(tokens)`` of every position."""

    def __init__(self, file: GGUF) -> None:
        of = file.metadata
        self.weights = {name: file.tensor(name) for name in file.tensors}
        self.layers = of["llama.block_count"]
        self.heads = of["llama.attention.head_count"]
        self.kv_heads = of["llama.attention.head_count_kv"]
        self.eps = of["llama.attention.layer_norm_rms_epsilon"]
        size = of["llama.rope.dimension_count"]
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        self.frequencies = of["llama.rope.freq_base"] ** -steps

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weights[name]

    def _turned(self, x: Tensor) -> Tensor:
        """RoPE on ``(tokens, heads, size)``; dimensions 2 i and 2 i + 1 are a pair."""
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * self.frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2).float()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """``(tokens, vocabulary)``."""
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.layers):
            x = x + self._attention(x, f"blk.{layer}")
            h = self._norm(x, f"blk.{layer}.ffn_norm.weight")
            up, gate = (h @ self.weights[f"blk.{layer}.ffn_{w}.weight"].T for w in ("up", "gate"))
            x = x + (F.silu(gate) * up) @ self.weights[f"blk.{layer}.ffn_down.weight"].T
        return self._norm(x, "output_norm.weight") @ self.weights["token_embd.weight"].T

    def _attention(self, x: Tensor, block: str) -> Tensor:
        h = self._norm(x, f"{block}.attn_norm.weight")
        q, k, v = (h @ self.weights[f"{block}.attn_{w}.weight"].T for w in "qkv")
        q = self._turned(q.unflatten(-1, (self.heads, -1)))
        k = self._turned(k.unflatten(-1, (self.kv_heads, -1)))
        k, v = (
            heads.repeat_interleave(self.heads // self.kv_heads, 1)
            for heads in (k, v.unflatten(-1, (self.kv_heads, -1)))
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return mixed @ self.weights[f"{block}.attn_output.weight"].T

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The ``count`` most likely next tokens, one after another."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[-count:]


WORDS = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)")
"""Each expression splits what the one before has left; what lies between matches is a piece too."""


def tokenizer(file: GGUF) -> Callable[[str], list[int]]:
    """Text to token ids: special tokens, then words, then byte pairs, best merge first."""
    texts = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata["tokenizer.ggml.token_type"]
    ids = {text: at for at, text in enumerate(texts)}
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == 3]
    ranks = {
        tuple(merge.split(" ")): rank
        for rank, merge in enumerate(file.metadata["tokenizer.ggml.merges"])
    }
    letters = _letters()

    @cache
    def pairs(word: str) -> list[int]:
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            couples = list(itertools.pairwise(parts))
            best = min(couples, key=lambda couple: ranks.get(couple, math.inf))
            if best not in ranks:
                break
            at = couples.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for piece in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
            if piece in special:
                found.append(ids[piece])
                continue
            words = [piece]
            for expression in WORDS:
                words = [part for word in words for part in _pieces(expression, word)]
            found += [token for word in words for token in pairs(word)]
        return found

    return encode


def _pieces(expression: str, text: str) -> list[str]:
    """Matches and what lies between them, in order."""
    cuts = {0, len(text)}
    for match in regex.finditer(expression, text):
        cuts |= {match.start(), match.end()}
    ends = sorted(cuts)
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def _letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
