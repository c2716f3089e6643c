# SPDX-License-Identifier: Apache-2.0
"""What the judge of recall finds, by stored tokens: ``python -m benchmarks.recall_judge``.

A model reads texts with full attention, which says how much attention every query gives to every
unit that a cache of ``--window`` tokens would have evicted. Then the plugin's judge
(``attention/torch/recall.py``) chooses ``--recall`` of these units: once for a prompt's stride, and
once for its last token alone, as in decoding. Nothing is evicted here, so the judge sees exact
queries and keys. Models of the Llama architecture only, within their positions.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.inputs.texts import read
from benchmarks.models import real_model
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table
from benchmarks.running.engines import BOOK, load_tokenizer, quiet
from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.attention.torch import recall as judge
from vllm_cascade.recall.log import Log, UnitShape

LOOKUP = 0.1
"""Share of a query's attention that makes a unit one that is looked up."""
ASKING = 32
"""Queries of a stride that ask, as ``recall_queries`` by default."""


@dataclass(frozen=True)
class Layer:
    """What one layer computed of a text of ``T`` tokens.

    Attributes:
        query: fp32 ``[H * G, T, D]``, before rotation, times the scale of logits.
        key: fp32 ``[H, T, D]``, before rotation.
        turn: rotates ``[..., n, D]`` vectors to int64 ``[n]`` positions.
    """

    query: torch.Tensor
    key: torch.Tensor
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def attention(self, begin: int, end: int) -> torch.Tensor:
        """fp32 ``[H * G, end - begin, end]``: probabilities of the queries of these tokens."""
        at = torch.arange(end)
        query = self.turn(self.query[:, begin:end], at[begin:])
        key = self.turn(self.key[:, :end], at)
        logits = query @ key.repeat_interleave(len(query) // len(key), 0).transpose(1, 2)
        return logits.masked_fill(at > at[begin:, None], -torch.inf).softmax(-1)


@dataclass
class Found:
    """Sums over selections.

    Attributes:
        mass: attention to the chosen units, ``most``: to the best ones, ``all``: to all units.
        lookups, found: lookups, and those whose unit was chosen.
    """

    mass: float = 0.0
    most: float = 0.0
    all: float = 0.0
    lookups: int = 0
    found: int = 0

    def add(self, attention: torch.Tensor, chosen: torch.Tensor) -> None:
        """Count a selection.

        Args:
            attention: fp32 ``[H * G, Q, units]``, of the queries that see the chosen units.
            chosen: int64 ``[num]``.
        """
        each = attention.mean((0, 1))
        self.mass += float(each[chosen].sum())
        self.most += float(each.topk(len(chosen)).values.sum())
        self.all += float(each.sum())
        looked = attention >= LOOKUP
        self.lookups += int(looked.sum())
        self.found += int(looked[..., chosen].sum())


class Store:
    """A layer's evicted units in a log, and the judge's choices among them.

    Args:
        window: tokens in the cache behind the recalled units.
        sinks: tokens that are never evicted, a multiple of ``unit``.
    """

    def __init__(self, layer: Layer, sinks: int, window: int, unit: int, recall: int) -> None:
        num_heads, _, size = layer.key.shape
        self.layer, self._sinks, self._unit, self._recall = layer, sinks, unit, recall
        self._behind = sinks + recall * unit + window
        keys = layer.key[:, sinks:]
        num = keys.shape[1] // unit
        shape = UnitShape(
            1, num_heads, 1, unit, size, torch.float32, num, recall, row_scales=0, in_8_bits=True
        )
        self._log = Log(shape)
        codes, scale = judge.encode(keys[:, : num * unit].unflatten(1, (-1, unit)))
        for chunk, to, which in self._log.grow(num).pieces():
            judge.write_keys(chunk, 0, to, codes[:, which], scale[:, which])
            chunk.token[0, 0, to] = torch.arange(which.start, which.stop) * unit
        self._config = LayerConfig(num_heads, size, 1, 1.0, 0.0, None, None, True, False, "mean")

    def choose(self, units: int, begin: int, end: int) -> torch.Tensor:
        """int64 ``[recall]``: what tokens ``begin .. end - 1`` select of the first ``units``."""
        which = torch.from_numpy(judge.asking(end - begin, ASKING))
        query, at = self.layer.query[:, begin + which], self._behind + which
        sinks = torch.arange(self._sinks)
        to_sinks = judge.to_sinks(
            self._config,
            self.layer.turn(query, at).transpose(0, 1),
            self.layer.turn(self.layer.key[:, sinks], sinks),
        )
        middle = self._sinks + self._recall // 2 * self._unit
        asks = self.layer.turn(query, at - middle).transpose(0, 1)
        stored = self._log.part(0, units)
        (chosen,) = judge.choose(self._config, 0, stored, asks, to_sinks, self._recall)
        return torch.from_numpy(chosen)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("recall_judge", __doc__)
    add = parser.add_argument
    add("--model", default=None, help="default: the real model")
    add("--data", nargs="+", default=[str(BOOK)], help="files, folders, hf:...")
    add("--tokens", type=int, default=8000, help="of each text")
    add("--sinks", type=int, default=16, help="tokens never evicted")
    add("--window", type=int, default=368, help="tokens that are not evicted yet")
    add("--unit", type=int, default=16)
    add("--recall", type=int, default=8, help="units")
    add("--stride", type=int, default=128)
    add("--every", type=int, default=4, help="one of so many strides is judged")
    add("--layers", type=int, default=3, help="one of so many layers is judged")
    args = parser.parse_args(argv)
    if args.tokens < args.sinks + args.window + args.unit * args.recall + args.stride:
        parser.error("--tokens: too few for --recall units to be evicted before a stride")
    if args.sinks % args.unit:
        parser.error("--sinks: a multiple of --unit")
    return args


def layers_of(model: Any, token_ids: list[int], every: int) -> Iterator[Layer]:
    """What a Llama of transformers computes of a text, in every ``every``-th layer."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    kept: dict[tuple[int, str], torch.Tensor] = {}
    hooks = []
    for index, block in enumerate(model.model.layers[::every]):
        for name in ("q_proj", "k_proj"):

            def keep(_module: Any, _args: Any, out: torch.Tensor, at: Any = (index, name)) -> None:
                kept[at] = out[0]

            hooks.append(getattr(block.self_attn, name).register_forward_hook(keep))
    with torch.inference_mode():
        model.model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()

    def turn(vectors: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cos, sin = model.model.rotary_emb(vectors, position[None])
        return apply_rotary_pos_emb(vectors[None], vectors[None], cos, sin)[0][0]

    size = model.config.head_dim
    for index in range(len(model.model.layers[::every])):
        query, key = (
            kept.pop((index, name)).unflatten(-1, (-1, size)).transpose(0, 1)
            for name in ("q_proj", "k_proj")
        )
        yield Layer(query * size**-0.5, key, turn)


def judge_layer(
    layer: Layer, args: argparse.Namespace, found: dict[tuple[str, int], Found]
) -> None:
    """Add the selections of a layer's strides, by who asks and by stored tokens."""
    store = Store(layer, args.sinks, args.window, args.unit, args.recall)
    num_tokens = layer.query.shape[1]
    for begin in range(0, num_tokens - args.stride + 1, args.stride * args.every):
        units = max(0, begin - args.window - args.sinks) // args.unit
        if units <= args.recall:
            continue
        end, old = begin + args.stride, units * args.unit
        attention = layer.attention(begin, end)[..., args.sinks : args.sinks + old]
        attention = attention.unflatten(-1, (units, args.unit)).sum(-1)
        size = 1 << old.bit_length() - 1
        for who, first in ((f"a stride of {args.stride}", begin), ("one token", end - 1)):
            of_size = found.setdefault((who, size), Found())
            of_size.add(attention[:, first - end :], store.choose(units, first, end))


def table(found: dict[tuple[str, int], Found], args: argparse.Namespace) -> Table:
    """A row for each size of the store and who asks."""
    rows = [
        {
            "stored tokens": f"{size:,} to {2 * size:,}",
            "who asks": who,
            "of the best units' attention": f"{one.mass / one.most:.1%}",
            "of all evicted attention": f"{one.mass / one.all:.1%}",
            "lookups found": f"{one.found / one.lookups:.1%}" if one.lookups else "-",
            "lookups": f"{one.lookups:,}",
        }
        for (who, size), one in sorted(found.items(), key=lambda item: (item[0][0], item[0][1]))
    ]
    note = (
        f"{args.recall} units of {args.unit} tokens, of all that left a window of {args.window}. "
        "The best units: those to which the asking tokens give most, over all heads. Lookups: a "
        "head and a query that give a tenth of their attention or more to one evicted unit."
    )
    return Table.of("What the judge of recall finds", rows, note)


def main(argv: Sequence[str] | None = None) -> None:
    """Judge every text."""
    args = parse_args(argv)
    quiet()
    from transformers import AutoModelForCausalLM

    args.model = args.model or str(real_model())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if model.config.model_type != "llama":
        raise SystemExit(f"--model: {model.config.model_type} is not of the Llama architecture")
    most = model.config.max_position_embeddings
    if args.tokens > most:
        raise SystemExit(f"--tokens {args.tokens:,}: the model has {most:,} positions")
    tokenizer = load_tokenizer(args.model)
    found: dict[tuple[str, int], Found] = {}
    for text in (text for source in args.data for text in read(source).values()):
        token_ids = tokenizer(text)["input_ids"][: args.tokens]
        for layer in layers_of(model, token_ids, args.layers):
            judge_layer(layer, args, found)
    data = {f"{who}, {size}": asdict(one) for (who, size), one in found.items()}
    results.finish(args, argv, [table(found, args)], data)


if __name__ == "__main__":
    main()
