# SPDX-License-Identifier: Apache-2.0
"""The oracle for models of other families: transformers' own modules around explicit token lists.

Every module of the model is transformers', run at position 0 for all tokens, so that nothing is
rotated, and with an attention function of ours. That has each layer's cache as a list of tokens:
what a simulation keeps, or the last tokens of a window, which are found by their places in the
stream and have their true positions. Rotations are in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .model import (
    OracleResult,
    discounted_mass,
    on_first_of_units,
    reduce_heads,
    rotary_frequencies,
    strides,
)
from .policies import Sim
from .quantised import Quantiser, Stored, read_parts, write_rows, written_at
from .recall import RecallSettings, RecallSim

OURS = "explicit_tokens"


@dataclass
class Layer:
    """One layer: how it rotates and what it has seen, by places in the stream.

    Attributes:
        inv_freq: None where the layer has no rotary positions.
        window: tokens that a query sees, its own included; None: what ``sims`` keep.
        chunked: whether these are those of its chunk of ``window`` tokens.
        stores: of units that left, by head set; empty where none comes back.
        begin: a head's first channel that rotates.
    """

    inv_freq: Tensor | None
    interleaved: bool
    window: int | None
    sims: list[Sim]
    keys: Tensor
    values: Tensor
    scores: Tensor
    stores: list[RecallSim] = field(default_factory=list)
    begin: int = 0
    chunked: bool = False

    def first_seen(self, token: int) -> int:
        """The first token that ``token`` sees."""
        if self.chunked:
            return token // self.window * self.window
        return max(token - self.window + 1, 0)

    @property
    def lines(self) -> list[list[int]]:
        """Tokens in order of position, by head set, recalled ones included."""
        lines = [sim.tokens() for sim in self.sims]
        for s, store in enumerate(self.stores):
            lines[s] = store.line(lines[s], len(self.sims[s].sinks))
        return lines

    @property
    def num_tokens(self) -> int:
        """Tokens in a line when the next stride attends, which may recall more than are now."""
        shown = self.stores[0].tokens_to_show if self.stores else 0
        return len(self.sims[0].tokens()) + shown

    def rotate_back(self, x: Tensor, positions: Tensor) -> Tensor:
        """Take ``rotate`` back."""
        return self.rotate(x, -positions)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """fp64 rotation of ``[..., n, D]`` at ``[..., n]`` positions."""
        if self.inv_freq is None:
            return x.double()
        if self.begin:
            plain, x = x.double().split([self.begin, x.shape[-1] - self.begin], dim=-1)
            return torch.cat((plain, replace(self, begin=0).rotate(x, positions)), dim=-1)
        angle = positions[..., None].double() * self.inv_freq.double()
        cos, sin, half = angle.cos(), angle.sin(), len(self.inv_freq)
        x = x.double()
        if self.interleaved:
            a, b, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
            return torch.cat((turned, rest), dim=-1)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@dataclass
class Streamed:
    """What transformers calls in place of attention, for one stride after the other.

    ``chosen`` is what another implementation kept, by end of a stride, layer that attends and head
    set, recalled tokens included: its choices of these stand where rounding decides. With a
    ``quantiser`` a stride's rows are quantised when it is over, rotated to where they stand: from
    ``position`` on. ``stored`` is what another implementation wrote, by layer: its codes stand
    where rounding decides. ``owners`` is, by layer that has no cache of its own, the layer whose
    cache it attends to; nothing of that changes before ``end_stride``.
    """

    layers: list[Layer] | dict[int, Layer]
    decay: float
    weight: float
    reduction: str
    per_head: bool
    start: int = 0
    end: int = 0
    position: int = 0
    seen: dict[int, Tensor] = field(default_factory=dict)
    quantiser: Quantiser | None = None
    stored: list[Stored] | None = None
    chosen: dict[int, list[list[list[int]]]] | None = None
    latent: bool = False
    owners: dict[int, int] = field(default_factory=dict)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def end_stride(self) -> None:
        """Evict from caches that several layers attend to."""
        for keep in self.waiting:
            keep()
        self.waiting.clear()

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """``query`` ``[1, heads, T, D]``, ``key`` and ``value`` ``[1, KV heads, T, D]``."""
        index = self.owners.get(module.layer_idx, module.layer_idx)
        layer, shared = self.layers[index], index in self.owners.values()
        own = list(range(self.start, self.end))
        layer.keys[:, own], layer.values[:, own] = key[0].float(), value[0].float()
        num_kv = key.shape[1]
        if layer.window is None:
            if index == module.layer_idx:
                self._recall(module, query[0], scaling)
            lists = [line + own for line in layer.lines]
        else:
            lists = [list(range(layer.first_seen(self.start), self.end))]
        rows = torch.tensor(lists)  # [sets, n + T]
        self.seen[index] = rows
        rows = rows.expand(num_kv, -1)
        places = rows if layer.window is not None else torch.arange(rows.shape[1]).expand_as(rows)
        heads = torch.arange(num_kv)[:, None]
        of_queries, of_keys = weights_after(module)
        keys = layer.rotate(layer.keys[heads, rows] / of_keys, places) * of_keys
        queries = query[0].unflatten(0, (num_kv, -1))  # [KV heads, group, T, D]
        queries = layer.rotate(queries / of_queries, places[:, None, -len(own) :]) * of_queries
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        logits = queries @ keys[:, None].transpose(-1, -2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        distance = torch.tensor(own)[:, None] - rows[:, None]  # [KV heads, T, n + T], in the stream
        hidden = distance < 0
        if layer.window is not None:
            first = torch.tensor([layer.first_seen(token) for token in own])
            hidden |= rows[:, None] < first[:, None]
        logits = logits.masked_fill(hidden[:, None], -math.inf)
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            nothing = sinks.double().view(num_kv, -1, 1, 1).expand(*logits.shape[:-1], 1)
            probs = torch.cat((logits, nothing), dim=-1).softmax(-1)[..., :-1]
        else:
            probs = logits.softmax(-1)
        output = probs @ layer.values[heads, rows][:, None].double()
        if index == module.layer_idx:
            done = partial(self._after, module, own, torch.tensor(lists), probs.float())
            self.waiting.append(done) if shared else done()
        return output.flatten(0, 1).transpose(0, 1)[None].to(query.dtype).contiguous(), None

    def _after(self, module: Any, own: list[int], seen: Tensor, probs: Tensor) -> None:
        """Evict from a layer's cache, and quantise what a stride has written."""
        index = module.layer_idx
        layer = self.layers[index]
        self._keep(layer, own, seen, probs)
        if self.quantiser is not None:
            at = self.position + torch.arange(len(own))
            if layer.window is None:
                filling = self.end % layer.sims[0].unit
                at = written_at(self.position, layer.num_tokens, len(own), filling)
            theirs = None if self.stored is None else self.stored[index]
            if self.latent:
                write_latents(module, layer, self.quantiser, own, at, theirs)
            else:
                write_rows(layer, self.quantiser, layer.keys, layer.values, own, at, theirs)

    def _recall(self, module: Any, query: Tensor, scaling: float | None) -> None:
        """Units that the stride's queries ``[heads, T, D]`` bring back."""
        index = module.layer_idx
        layer, num_sets = self.layers[index], len(self.layers[index].sims)
        place = sorted(self.layers).index(index) if isinstance(self.layers, dict) else index
        for s, (sim, store) in enumerate(zip(layer.sims, layer.stores, strict=False)):
            if not store.chooses(self.start, self.end):
                continue
            num_sinks = len(sim.sinks)
            asking = store.asking(self.end - self.start)
            away = store.distances(len(sim.tokens()), asking, num_sinks)
            of_set = slice(None) if num_sets == 1 else slice(s, s + 1)
            asked = layer.rotate(query[:, asking].float(), away).float()
            asked = asked.unflatten(0, (len(layer.keys), -1))[of_set].flatten(0, 1).transpose(0, 1)
            hint = None
            if self.chosen is not None:
                hint = store.hint(self.chosen[self.end][place][s], num_sinks)
            keys = layer.keys[of_set]
            at = store.positions(len(sim.tokens()), asking)
            turned = layer.rotate(query[:, asking].float(), at).unflatten(0, (len(layer.keys), -1))
            sinks = layer.rotate(keys[:, sim.sinks], torch.arange(num_sinks))
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            to_sinks = torch.einsum("hgqd,hnd->qhgn", turned[of_set], sinks).flatten(1, 2) * scale
            if self.latent:
                asked, keys = as_latent(module, asked, layer.keys, layer.values)
            store.choose(asked, keys, to_sinks, hint, scaling)

    def _keep(self, layer: Layer, own: list[int], seen: Tensor, probs: Tensor) -> None:
        """Scores after these queries, and with them what stays."""
        if layer.window is not None:
            return
        mass = discounted_mass(probs, self.decay, self.weight)
        if layer.sims[0].unit > 1:
            mass = on_first_of_units(mass, layer.sims[0].unit)
        mass = reduce_heads(mass, "per_kv_head" if self.per_head else "homogeneous", self.reduction)
        sets = torch.arange(len(layer.sims))[:, None]
        layer.scores[sets, seen] = self.decay ** len(own) * layer.scores[sets, seen] + mass
        for s, sim in enumerate(layer.sims):
            shown = dict(zip(seen[s].tolist(), layer.scores[s, seen[s]].tolist(), strict=True))
            if sim.normalise:
                shown = {t: v / (self.end - sim.first_of(t)) for t, v in shown.items()}
            before = sim.tokens() + own
            for token in own:
                sim.insert(token, shown.__getitem__)
            sim.end_stride(shown.__getitem__)
            if layer.stores:
                of_set = slice(None) if len(layer.sims) == 1 else slice(s, s + 1)
                layer.stores[s].note(before, sim.tokens(), layer.keys[of_set], layer.values[of_set])
            layer.scores[s, sim.sinks] = 0.0

    def kept(self, end: int) -> list[list[list[int]]]:
        """Tokens that are left after ``end``, by layer and head set."""
        result = []
        for index, layer in enumerate(self.layers):
            if index in self.owners:
                continue
            if layer.window is None:
                result.append(layer.lines)
            else:
                result.append([list(range(layer.first_seen(end), end))])
        return result


def weights_after(module: Any) -> tuple[Tensor, Tensor]:
    """By channel, what the model multiplies queries and keys by after they were rotated."""
    norms = (getattr(module, f"{name}_layernorm", None) for name in ("query", "key"))
    found = [torch.ones(()) if norm is None else norm.weight for norm in norms]
    return found[0], found[1]


def latents_of(module: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The latents fp64 ``[n, latent]`` of which keys and values ``[heads, n, D]`` are made.

    They are products with weights that have more rows than columns, which are returned, too:
    ``[heads, D + D, latent]``.
    """
    heads, plain = len(keys), module.qk_nope_head_dim
    weights = module.kv_b_proj.weight.double().unflatten(0, (heads, -1))
    both = torch.cat((keys[..., :plain], values), dim=-1).double()
    return both.transpose(0, 1).flatten(1) @ torch.linalg.pinv(weights.flatten(0, 1)).T, weights


def write_latents(
    module: Any,
    layer: Layer,
    quantiser: Quantiser,
    own: list[int],
    at: Tensor,
    stored: Stored | None,
) -> None:
    """``write_rows`` where a row is the rotated part of all heads' keys, then their latent."""
    plain = module.qk_nope_head_dim
    keys, values = layer.keys[:, own], layer.values[:, own]
    latents, weights = latents_of(module, keys, values)
    keys = layer.rotate(keys, at)
    turned, latents = read_parts(
        quantiser, (keys[:1, :, plain:].float(), latents[None].float()), own, stored
    )
    both = torch.einsum("hdl,nl->hnd", weights, latents[0].double())
    keys = torch.cat((both[..., :plain], turned.double().expand(len(keys), -1, -1)), dim=-1)
    layer.keys[:, own] = layer.rotate_back(keys, at).float()
    layer.values[:, own] = both[..., plain:].float()


def as_latent(module: Any, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as they are judged where all heads share one cached row.

    Args:
        queries: ``[asking, heads, D]``.
        keys, values: ``[heads, n, D]``; values may have another D.

    Returns:
        Queries ``[asking, heads, row]`` and keys ``[1, n, row]`` with the same products.
    """
    plain = module.qk_nope_head_dim
    latents, weights = latents_of(module, keys, values)
    rows = torch.cat((latents, keys[0, :, plain:].double()), dim=-1)
    absorbed = torch.einsum("ahd,hdl->ahl", queries[..., :plain].double(), weights[:, :plain])
    asked = torch.cat((absorbed, queries[..., plain:].double()), dim=-1)
    return asked.float(), rows[None].float()


def rope_of(config: Any, kind: str, index: int) -> dict[str, Any]:
    """The rotary parameters of a layer of a kind."""
    rope = config.rope_parameters
    rope, bases = dict(rope.get(kind, rope)), getattr(config, "layer_rope_theta", None)
    return rope if bases is None else {**rope, "rope_theta": bases[index]}


def heads_of(config: Any, index: int) -> tuple[int, int]:
    """KV heads of a layer and their size, which some models have by layer."""
    if hasattr(config, "per_layer_config"):
        config = config.per_layer_config[index % config.num_hidden_layers]
    num_heads = config.num_attention_heads
    num_kv = getattr(config, "num_key_value_heads", None) or num_heads
    return num_kv, getattr(config, "head_dim", None) or config.hidden_size // num_heads


def sizes_of(config: Any, index: int) -> tuple[int, int, int]:
    """Channels of a layer's keys and values, and of its keys the first that rotates."""
    unrotated = getattr(config, "qk_nope_head_dim", None)
    if not unrotated:
        size = heads_of(config, index)[1]
        return size, size, 0
    return unrotated + config.qk_rope_head_dim, config.v_head_dim, unrotated


def frequencies(config: Any, kind: str, index: int, head_dim: int, long: bool = False) -> Tensor:
    """Radians a position, of the pairs of a layer's heads."""
    settings = {
        "rope_parameters": rope_of(config, kind, index),
        "max_position_embeddings": config.max_position_embeddings,
    }
    return rotary_frequencies(settings, head_dim, long)[0]


def stores_of(recall: RecallSettings | None, num_sets: int) -> list[RecallSim]:
    """A layer's empty stores."""
    return [RecallSim(recall) for _ in range(num_sets)] if recall else []


def result_of(
    layers: list[Layer], logprobs: list[float], logits: Tensor, kept: dict[int, Any]
) -> OracleResult:
    """With the closest contest, and how many choices of units there were, over all layers."""
    gaps = [sim.closest_contest for layer in layers for sim in layer.sims]
    used = [store for layer in layers for store in layer.stores]
    choices = sum(store.choices for store in used), sum(store.near for store in used)
    return OracleResult(logprobs, logits, kept, [], min(gaps), choices)


@torch.inference_mode()
def stream_family(
    model: PreTrainedModel,
    tokens: list[int],
    *,
    windows: list[int | None],
    rotated: list[bool],
    interleaved: bool,
    latent: bool = False,
    chunked: bool = False,
    owners: dict[int, int] | None = None,
    learned: bool = False,
    long: bool = False,
    prompt_len: int,
    stride: int,
    make_sim: Callable[[], Sim],
    head_policy: str = "homogeneous",
    head_reduction: str = "mean",
    decay: float,
    weight: float,
    logit_scale: Any = None,
    recall: RecallSettings | None = None,
    chosen: dict[int, list[list[list[int]]]] | None = None,
    quantiser: Quantiser | None = None,
    stored: list[Stored] | None = None,
) -> OracleResult:
    """``tests.oracle.model.stream`` for a model of transformers'.

    Args:
        windows: by layer, tokens that a query sees, its own included; None: what is kept.
        rotated: by layer, whether it has rotary positions.
        interleaved: whether pairs of channels are neighbours, or the halves of a head.
        latent: whether all heads share one cached row, and so the tokens that are kept.
        chunked: whether windows are sizes of chunks of the stream.
        owners: by layer without a cache of its own, the layer whose cache it attends to.
        learned: whether inputs have learned positions, those of the stream.
        long: whether LongRoPE's frequencies are those for long streams.
    """
    assert logit_scale is None
    config = model.config
    per_head = head_policy == "per_kv_head" and not latent
    layers = []
    for index, (window, turns) in enumerate(zip(windows, rotated, strict=True)):
        kind = "full_attention" if window is None else "sliding_attention"
        num_kv = heads_of(config, index)[0]
        size, value_size, begin = sizes_of(config, index)
        num_sets = num_kv if per_head else 1
        layers.append(
            Layer(
                frequencies(config, kind, index, size - begin, long) if turns else None,
                interleaved,
                window,
                [make_sim() for _ in range(num_sets)],
                torch.zeros(num_kv, len(tokens), size),
                torch.zeros(num_kv, len(tokens), value_size),
                torch.zeros(num_sets, len(tokens)),
                stores_of(recall if window is None else None, num_sets),
                begin,
                chunked,
            )
        )
    state = Streamed(layers, decay, weight, head_reduction, per_head)
    state.chosen, state.quantiser, state.stored = chosen, quantiser, stored
    state.latent, state.owners = latent, owners or {}
    AttentionInterface.register(OURS, state)
    AttentionMaskInterface.register(OURS, lambda *args, **kwargs: None)
    model.set_attn_implementation(OURS)
    ids = torch.tensor(tokens)
    logprobs: list[float] = []
    kept: dict[int, list[list[list[int]]]] = {}
    logits = torch.empty(0)
    for start, end in strides(len(tokens), prompt_len, stride):
        state.start, state.end = start, end
        of_policy = [layer.num_tokens for layer in layers if layer.window is None]
        state.position = of_policy[0] if of_policy else start
        places = torch.arange(start, end)[None] * learned  # nothing is rotated at position 0
        logits = model(input_ids=ids[None, start:end], position_ids=places, use_cache=False).logits
        state.end_stride()
        logits = logits[0].float()
        following = ids[start + 1 : end + 1]
        logprob = logits[: len(following)].log_softmax(-1)
        logprobs += logprob.gather(-1, following[:, None])[:, 0].tolist()
        kept[end] = state.kept(end)
    return result_of(layers, logprobs, logits[-1].clone(), kept)
