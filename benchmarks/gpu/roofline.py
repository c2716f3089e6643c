# SPDX-License-Identifier: Apache-2.0
"""An estimate of time to the first token and of decode, term by term; nothing here was measured.

    python -m benchmarks.gpu.roofline --out results/       # a table, and roofline.json

From the machine code of decode attention (``tests/kernels/machine_code.py``), a card's published
numbers, and assumptions that are all fields of ``Assumptions``, ``Path`` and ``Card``. A
measurement on a card can refute each term by itself: the JSON has every term of every line. Left
out: the scores that ranks exchange where all heads keep the same tokens.
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File
from typing import Any

from benchmarks.gpu.kernels_alone import without_the_plugin

Row = dict[str, Any]
CONTEXTS = (8192, 32768, 131072)


@dataclass(frozen=True)
class Model:
    """A Llama, its matrices spread over ``ranks`` GPUs; 16-bit weights and cache."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    ranks: int = 1

    @property
    def matrices(self) -> int:
        """Weights of all layers' matrices, which every token is multiplied with."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_size
        return self.layers * self.hidden * (heads + 3 * self.inner)

    @property
    def weights(self) -> int:
        """All weights, with the embedding and the output's matrix."""
        return self.matrices + 2 * self.vocab * self.hidden

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token on one rank."""
        return 4 * self.layers * self.head_size * max(self.kv_heads // self.ranks, 1)


LLAMA_8B = Model("Llama 8B", 4096, 32, 32, 8, 128, 14336, 128256)
LLAMA_70B = Model("Llama 70B, TP 8", 8192, 80, 64, 8, 128, 28672, 128256, ranks=8)


@dataclass(frozen=True)
class Assumptions:
    """What no maker and no count gives, for stock and ours alike.

    Attributes:
        matrix_share: of the card's 16-bit peak, in the matrices of a prompt.
        bandwidth_share: of its memory bandwidth, where weights or K and V are read.
        link_share: of the link's bandwidth, in an all-reduce, of which a layer has two.
        link_latency: seconds of an all-reduce of nothing.
        memory_share: of the card's memory that vLLM may use.
        reserve: bytes of it for activations, graphs and workspaces.
        most_requests: that a step decodes at a time.
        step_seconds: of a decode step that no GPU work hides: scheduling, sampling.
    """

    matrix_share: float = 0.6
    bandwidth_share: float = 0.8
    link_share: float = 0.7
    link_latency: float = 15e-6
    memory_share: float = 0.9
    reserve: float = 4e9
    most_requests: int = 256
    step_seconds: float = 1.5e-3


@dataclass(frozen=True)
class Path:
    """How attention is done.

    Attributes:
        budget: tokens that stay cached; 0 is all of them.
        stride: tokens between two evictions of a prompt.
        attention_share: of the card's 16-bit peak, in a prompt's attention. It takes programs on
            all multiprocessors, also where a rank has few heads: strides are split over keys.
        passes: of queries over keys in a prompt, where attention over values is 2: column sums
            are one more.
        stride_seconds: host time of one stride in one layer, which is not hidden.
        layer_seconds: of small kernels a layer and decode step that nothing hides.
        bytes_beyond: that decode attention reads and writes beyond K and V, by their size.
        kernel_share: of the memory's bandwidth that decode attention's instructions, L2 traffic
            and bytes on their way allow.
    """

    name: str
    budget: int = 0
    stride: int = 1024
    attention_share: float = 0.6
    passes: int = 2
    stride_seconds: float = 0.0
    layer_seconds: float = 4e-6
    bytes_beyond: float = 0.0
    kernel_share: float = 1.0


STOCK = Path("stock, FlashAttention")
LAUNCHES = 40e-6
"""Seconds of the host in a stride of a layer, assumed of its three launches, all included."""


def ours(name: str, stride: int, stride_seconds: float, counts: Any, card: Any) -> Path:
    """A cache of 2,048 tokens, with decode attention as it was counted."""
    return Path(
        name=name,
        budget=2048,
        stride=stride,
        attention_share=0.4,
        passes=3,
        stride_seconds=stride_seconds,
        layer_seconds=15e-6,
        bytes_beyond=counts.other_bytes / counts.kv_bytes,
        kernel_share=counts.share(card),
    )


def pairs(tokens: int, path: Path) -> int:
    """Queries times keys of a prompt: all before a token, or what a stride finds, and itself."""
    if not path.budget:
        return tokens * (tokens + 1) // 2
    total = 0
    for begin in range(0, tokens, path.stride):
        length = min(path.stride, tokens - begin)
        total += length * min(begin, path.budget) + length * (length + 1) // 2
    return total


def reduced(model: Model, card: Any, tokens: int, of: Assumptions) -> float:
    """Seconds of the all-reduces of one forward pass over tokens."""
    if model.ranks == 1:
        return 0.0
    sent = 2 * (model.ranks - 1) / model.ranks * 2 * tokens * model.hidden
    return 2 * model.layers * (sent / card.link / of.link_share + of.link_latency)


def first_token(model: Model, card: Any, tokens: int, path: Path, of: Assumptions) -> Row:
    """Seconds of one prompt, alone: the GPU's and the host's side by side."""
    flops = card.flops * model.ranks
    row: Row = {"matrices_s": 2 * model.matrices * tokens / (flops * of.matrix_share)}
    row["matrices_s"] += 2 * model.vocab * model.hidden / (flops * of.matrix_share)
    products = 2 * path.passes * pairs(tokens, path) * model.heads * model.head_size * model.layers
    row["attention_s"] = products / (flops * path.attention_share)
    row["reduced_s"] = reduced(model, card, tokens, of)
    strides = -(-tokens // path.stride) if path.budget else 0
    row["strides"] = strides * model.layers
    row["host_s"] = row["strides"] * path.stride_seconds
    device = row["matrices_s"] + row["attention_s"] + row["reduced_s"]
    return row | {"ttft_s": max(device, row["host_s"])}


def requests_of(model: Model, card: Any, cached: int, of: Assumptions) -> int:
    """Requests whose caches fit the memory that weights leave, on every rank."""
    room = card.memory * of.memory_share - 2 * model.weights / model.ranks - of.reserve
    return min(of.most_requests, int(room // (cached * model.token_bytes)))


def decode(model: Model, card: Any, tokens: int, path: Path, of: Assumptions) -> Row:
    """Tokens a second at a context, with as many requests as fit; none where not one does."""
    cached = min(tokens, path.budget) if path.budget else tokens
    requests = requests_of(model, card, cached, of)
    if requests < 1:
        return {"requests": 0, "tokens_per_s": 0.0}
    bandwidth = card.bandwidth * of.bandwidth_share
    used = model.matrices + model.vocab * model.hidden
    read = 2 * used / model.ranks / bandwidth
    products = 2 * used * requests / (card.flops * model.ranks * of.matrix_share)
    kv = requests * cached * model.token_bytes * (1 + path.bytes_beyond)
    row: Row = {"requests": requests, "matrices_s": max(read, products)}
    row["attention_s"] = kv / (card.bandwidth * min(of.bandwidth_share, path.kernel_share))
    row["small_s"] = path.layer_seconds * model.layers
    row["reduced_s"] = reduced(model, card, requests, of)
    row["step_s"] = of.step_seconds + sum(row[f"{term}_s"] for term in TERMS)
    return row | {"tokens_per_s": requests / row["step_s"]}


TERMS = ("matrices", "attention", "small", "reduced")


def estimates(card: Any, counts: dict[int, Any], of: Assumptions) -> Iterator[Row]:
    """Every model, context and path; ``counts``: decode attention's by query heads a KV head."""
    for model in (LLAMA_8B, LLAMA_70B):
        counted = counts[model.heads // model.kv_heads]
        paths = (
            STOCK,
            ours("strides of 256", 256, LAUNCHES, counted, card),
            ours("strides of 1024", 1024, LAUNCHES, counted, card),
        )
        for tokens in CONTEXTS:
            for path in paths:
                row: Row = {"model": model.name, "context": tokens, "path": path.name}
                row["prefill"] = first_token(model, card, tokens, path, of)
                row["decode"] = decode(model, card, tokens, path, of)
                row["of_64"] = decode(model, card, tokens, path, replace(of, most_requests=64))
                yield row | {"assumed": asdict(path)}


def table(rows: list[Row]) -> str:
    lines = ["estimates, nothing measured:"]
    form = "{:16} {:>8} {:26} {:>8} {:>9} {:>9}"
    lines.append(form.format("model", "context", "path", "TTFT s", "requests", "tokens/s"))
    for row in rows:
        prefill, decoded = row["prefill"], row["decode"]
        numbers = f"{prefill['ttft_s']:.2f}", decoded["requests"], f"{decoded['tokens_per_s']:.0f}"
        lines.append(form.format(row["model"], row["context"], row["path"], *numbers))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=File, help="folder for roofline.json")
    parser.add_argument("--card", choices=("H100", "A100"), default="H100")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # what is counted is compiled
    without_the_plugin()
    from tests.kernels import aot
    from tests.kernels import machine_code as code

    card, capability = getattr(code, options.card), {"H100": 90, "A100": 80}[options.card]
    bf16 = {"dtype": aot.torch.bfloat16, "unit": 16}
    counts = {g: code.decode_counts(aot.Shape(group=g, **bf16), capability) for g in (4, 8)}
    of = Assumptions()
    rows = list(estimates(card, counts, of))
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        counted = {group: asdict(found) for group, found in counts.items()}
        found = {"estimates": True, "card": asdict(card), "assumed": asdict(of), "counts": counted}
        (options.out / "roofline.json").write_text(json.dumps(found | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
