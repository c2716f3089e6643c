# SPDX-License-Identifier: Apache-2.0
"""Which judge of evicted units finds what queries want? ``python -m benchmarks.judges``.

A model reads texts with full attention, which says how much of its attention every query gives to
every unit that a cache of ``--window`` tokens would have evicted. Judges then choose ``--recall``
units for each stride and layer, as the plugin does, from what each of them keeps of a unit's keys.
Two numbers a judge: the attention that goes to the units it chose, as a share of what the best
choice gets; and, of all lookups (a head and a query that give a tenth of their attention or more to
one evicted unit), in how many that unit was chosen. Nothing is evicted here: every judge is asked
about the same queries, keys and attention, so differences of a few percent count. Models of the
Llama architecture only, within their positions.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.inputs.texts import read
from benchmarks.models import real_model
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table
from benchmarks.running.engines import BOOK, load_tokenizer, quiet
from vllm_cascade.attention.torch.recall import asking

LOOKUP = 0.1
"""Of a query's attention: what makes a unit one that is looked up."""


@dataclass(frozen=True)
class Judge:
    """How a unit is judged.

    Attributes:
        bits: of a key's channels, with a scale a key; 32: as they are.
        keys: what is kept of a unit's keys: ``all``, ``busiest 4`` (those that had most attention
            before they left), ``means of 4`` (of neighbours) or ``mean``.
        rotated: where keys are judged: ``recalled`` (in the middle of the recalled units, behind
            the window), ``no`` (before rotation, queries too) or ``true`` (as they stood).
        worth: ``largest and mean`` of its keys' probabilities, ``largest`` or ``sum``.
        queries: of a stride, that ask.
        over_queries: ``best`` or ``mean``.
        heads: ``shared``: mean over all; ``shared, best``; ``per KV head``, which choose on their
            own.
    """

    bits: int = 8
    keys: str = "all"
    rotated: str = "recalled"
    worth: str = "largest and mean"
    queries: int = 32
    over_queries: str = "best"
    heads: str = "shared"

    def bytes_a_key(self, size: int, unit: int) -> float:
        """Bytes that a key of ``size`` channels costs a judge, scale included."""
        kept = {"all": unit, "busiest 4": 4, "means of 4": unit / 4, "mean": 1}[self.keys]
        return kept / unit * (self.bits * size / 8 + (0 if self.bits == 32 else 4))


JUDGES = {
    "8 bits (the plugin's)": Judge(),
    "32 bits": Judge(bits=32),
    "4 bits": Judge(bits=4),
    "2 bits": Judge(bits=2),
    "4 busiest keys": Judge(keys="busiest 4"),
    "means of 4 keys": Judge(keys="means of 4"),
    "one mean key": Judge(keys="mean"),
    "where they stood": Judge(rotated="true"),
    "before rotation": Judge(rotated="no"),
    "largest key": Judge(worth="largest"),
    "sum of keys": Judge(worth="sum"),
    "8 queries ask": Judge(queries=8),
    "the last query asks": Judge(queries=1),
    "all queries ask": Judge(queries=1 << 20),
    "mean of 32 queries": Judge(over_queries="mean"),
    "best head": Judge(heads="shared, best"),
    "each KV head for itself": Judge(heads="per KV head"),
}


@dataclass(frozen=True)
class Layer:
    """What one layer computed of a text of ``T`` tokens.

    Attributes:
        query: fp32 ``[H, T, D]``, before rotation, times the scale of logits.
        key: fp32 ``[K, T, D]``, before rotation.
        turn: rotates ``[..., T, D]`` vectors to int64 ``[T]`` positions.
    """

    query: torch.Tensor
    key: torch.Tensor
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def group(self) -> int:
        return len(self.query) // len(self.key)

    def attention(self, begin: int, end: int) -> torch.Tensor:
        """fp32 ``[H, end - begin, end]``: probabilities of the queries of these tokens."""
        at = torch.arange(end)
        query = self.turn(self.query[:, begin:end], at[begin:])
        key = self.turn(self.key[:, :end], at).repeat_interleave(self.group, 0)
        logits = query @ key.transpose(1, 2)
        return logits.masked_fill(at > at[begin:, None], -torch.inf).softmax(-1)


@dataclass(frozen=True)
class Place:
    """A stride of one layer: tokens ``begin .. end - 1``, and ``units`` that were evicted.

    Attributes:
        first: the token that the first unit begins with.
        mass: fp32 ``[H, Q, units]``, attention that the stride's queries give to each unit.
        busy: fp32 ``[H, units * unit]``, attention that keys had from the ``window`` tokens after
            them.
    """

    layer: Layer
    begin: int
    end: int
    first: int
    units: int
    mass: torch.Tensor
    busy: torch.Tensor


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.judges",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=None, help="default: the real model")
    parser.add_argument("--data", nargs="+", default=[str(BOOK)], help="files, folders, hf:...")
    parser.add_argument("--tokens", type=int, default=6144, help="of each text")
    parser.add_argument("--sinks", type=int, default=16, help="tokens never evicted")
    parser.add_argument("--window", type=int, default=368, help="tokens that are not evicted yet")
    parser.add_argument("--unit", type=int, default=16)
    parser.add_argument("--recall", type=int, default=8, help="units")
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--every", type=int, default=4, help="one of so many strides is judged")
    parser.add_argument("--layers", type=int, default=3, help="one of so many layers is judged")
    results.add_arguments(parser, "judges")
    args = parser.parse_args(argv)
    if args.tokens < args.sinks + args.window + args.unit * args.recall + args.stride:
        parser.error("--tokens: too few for --recall units to be evicted before a stride")
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


def places_of(layer: Layer, args: argparse.Namespace) -> Iterator[Place]:
    """The strides that are judged, with the attention that judges are to foresee."""
    unit, num_tokens = args.unit, layer.query.shape[1]
    most = (num_tokens - args.sinks) // unit * unit
    busy = torch.zeros(len(layer.query), most)
    for begin in range(0, num_tokens - args.stride + 1, args.stride):
        end = begin + args.stride
        attention = layer.attention(begin, end)
        seen = attention[..., args.sinks : args.sinks + most]
        near = torch.arange(begin, end)[:, None] - torch.arange(seen.shape[-1]) < args.window
        busy[:, : seen.shape[-1]] += (seen * near).sum(1)
        units = max(0, begin - args.window - args.sinks) // unit
        if units <= args.recall or begin // args.stride % args.every:
            continue
        old = units * unit
        mass = seen[..., :old].unflatten(-1, (units, unit)).sum(-1)
        yield Place(layer, begin, end, args.sinks, units, mass, busy[:, :old].clone())


def in_bits(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 ``[..., D]`` keys as they are read from ``bits`` a channel and a scale a key."""
    if bits == 32:
        return keys
    levels = 2 ** (bits - 1) - 1
    scale = keys.abs().amax(-1, keepdim=True).clamp_min(1e-30) / levels
    return (keys / scale).round() * scale


def kept_keys(judge: Judge, keys: torch.Tensor, busy: torch.Tensor) -> torch.Tensor:
    """fp32 ``[K, units, kept, D]``: what a judge keeps of ``[K, units, unit, D]`` keys.

    Args:
        busy: fp32 ``[K, units, unit]``, attention that keys had.
    """
    if judge.keys == "busiest 4":
        best = busy.topk(4, dim=-1).indices.sort(-1).values
        keys = keys.gather(2, best[..., None].expand(*best.shape, keys.shape[-1]))
    elif judge.keys == "means of 4":
        keys = keys.unflatten(2, (-1, 4)).mean(3)
    elif judge.keys == "mean":
        keys = keys.mean(2, keepdim=True)
    return in_bits(keys, judge.bits)


def evidence(judge: Judge, place: Place, unit: int, away: int) -> torch.Tensor:
    """fp32 ``[K, G, units]``: how much each query head asks for each unit.

    Args:
        away: how far before the stride recalled units would stand.
    """
    layer, old = place.layer, place.units * unit
    at = torch.from_numpy(asking(place.end - place.begin, judge.queries)) + place.begin
    token = torch.arange(place.first, place.first + old)
    query, key = layer.query[:, at], layer.key[:, token]
    if judge.rotated == "true":
        query, key = layer.turn(query, at), layer.turn(key, token)
    elif judge.rotated == "recalled":
        query = layer.turn(query, at - place.begin + away)
        key = layer.turn(key, torch.zeros_like(token))
    busy = place.busy.unflatten(0, (-1, layer.group)).sum(1).unflatten(-1, (-1, unit))
    kept = kept_keys(judge, key.unflatten(1, (-1, unit)), busy)
    num_heads, _, each, _ = kept.shape
    asks = query.unflatten(0, (num_heads, -1)).flatten(1, 2)  # [K, G * Q, D]
    probs = (asks @ kept.flatten(1, 2).transpose(1, 2)).softmax(-1).unflatten(-1, (-1, each))
    worth = {
        "largest and mean": lambda: probs.amax(-1) + probs.mean(-1),
        "largest": lambda: probs.amax(-1),
        "sum": lambda: probs.sum(-1),
    }[judge.worth]()
    worth = (worth / worth.sum(-1, keepdim=True)).unflatten(1, (layer.group, len(at)))
    return worth.amax(2) if judge.over_queries == "best" else worth.mean(2)


def chosen(judge: Judge, place: Place, unit: int, away: int, num: int) -> torch.Tensor:
    """bool ``[H, units]``: which units each query head finds in its cache."""
    asked = evidence(judge, place, unit, away)
    if judge.heads == "per KV head":
        asked = asked.mean(1).repeat_interleave(place.layer.group, 0)
    else:
        asked = asked.flatten(0, 1)
        asked = (asked.amax(0) if judge.heads == "shared, best" else asked.mean(0)).expand_as(asked)
    return best(asked, num)


def best(values: torch.Tensor, num: int) -> torch.Tensor:
    """bool like ``values``: the ``num`` largest of each row."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(
        -1, values.topk(num, dim=-1).indices, True
    )


@dataclass
class Found:
    """Sums over places, of one judge: attention, the best choice's, lookups, and those found."""

    mass: float = 0.0
    most: float = 0.0
    lookups: int = 0
    found: int = 0

    def add(self, place: Place, here: torch.Tensor, num: int) -> None:
        """Count a place.

        Args:
            here: bool ``[H, units]``, units that each head finds.
        """
        share = place.mass.mean(1)
        self.mass += float((share * here).sum())
        self.most += float((share * best(share.mean(0).expand_as(share), num)).sum())
        largest, where = place.mass.max(-1)
        looked = largest >= LOOKUP
        self.lookups += int(looked.sum())
        self.found += int((here.gather(1, where) & looked).sum())


def main(argv: Sequence[str] | None = None) -> None:
    """Ask every judge about every place."""
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
    found = {name: Found() for name in JUDGES}
    away = args.window + args.recall * args.unit // 2
    num_places = 0
    for text in (text for source in args.data for text in read(source).values()):
        token_ids = tokenizer(text)["input_ids"][: args.tokens]
        for layer in layers_of(model, token_ids, args.layers):
            for place in places_of(layer, args):
                num_places += 1
                for name, judge in JUDGES.items():
                    here = chosen(judge, place, args.unit, away, args.recall)
                    found[name].add(place, here, args.recall)
    data = {name: vars(one) for name, one in found.items()}
    size = model.config.head_dim
    table = report(found, {n: j.bytes_a_key(size, args.unit) for n, j in JUDGES.items()}, args)
    results.save(args.out, [table], {"places": num_places, "judges": data}, vars(args), argv)


def report(
    found: dict[str, Found], bytes_a_key: dict[str, float], args: argparse.Namespace
) -> Table:
    """A row a judge."""
    rows = [
        (
            name,
            f"{bytes_a_key[name]:.0f}",
            f"{one.mass / one.most:.1%}",
            f"{one.found / one.lookups:.1%}" if one.lookups else "-",
        )
        for name, one in found.items()
    ]
    lookups = next(iter(found.values())).lookups
    return Table(
        "Judges of evicted units",
        ("judge", "bytes a key", "attention found", "lookups found"),
        tuple(rows),
        f"{args.recall} units of {args.unit} tokens a stride of {args.stride} and layer, of all "
        f"that left a window of {args.window}. Attention: of what the best {args.recall} units for "
        f"all heads together hold. Lookups: {lookups:,} of a head and a query that give a tenth of "
        "their attention or more to one evicted unit. Every row differs from the first in one "
        "thing.",
    )


if __name__ == "__main__":
    main()
