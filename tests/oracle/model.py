# SPDX-License-Identifier: Apache-2.0
"""A plain fp32 decoder whose cache is an explicit list of tokens per layer and head set.

Keys are stored before rotation and rotated at every read, at position = chronological rank.
Nothing here knows about pages, slots or kernels.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from .dgc import nearest_centres
from .policies import Sim
from .quantised import Quantiser, Stored, write_rows, written_at
from .recall import RecallSettings, RecallSim

HEAD_POLICIES = ("homogeneous", "per_kv_head")


def paper_gamma(window: int) -> float:
    """The paper's decay: a score loses 99 % of its weight over one sub-cache of `window` tokens."""
    return math.exp(-math.log(100) / window)


# --------------------------------------------------------------------------- rotary frequencies


def rotary_frequencies(
    config: dict[str, Any], head_dim: int, long: bool = False
) -> tuple[Tensor, float]:
    """Inverse frequencies (one per rotated pair) and the factor on cos and sin.

    Args:
        long: whether LongRoPE's are those for long streams.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    dim = head_dim if fraction is None else int(head_dim * fraction)
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "proportional":  # halves of the whole head are paired; the other pairs stand still
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / head_dim
        return torch.cat([theta**-exponent, torch.zeros(head_dim // 2 - len(exponent))]), 1.0
    if kind == "linear":
        return inv_freq / rope["factor"], 1.0
    if kind == "dynamic" and rope.get("alpha"):
        base = theta * rope["alpha"] ** (dim / (dim - 2))
        return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "longrope":
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original))
        return inv_freq / torch.tensor(rope["long_factor" if long else "short_factor"]), factor
    if kind == "llama3":
        return _llama3(inv_freq, rope, original), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, original, theta, dim)
    raise NotImplementedError(f"rope_type {kind!r}")


def _llama3(inv_freq: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    """Long waves are slowed down by `factor`, short ones kept, with a ramp between."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor


def _yarn(
    inv_freq: Tensor, rope: dict[str, Any], original: int, theta: float, dim: int
) -> tuple[Tensor, float]:
    """NTK-by-parts: a linear ramp over the dimensions, and a factor on cos and sin."""
    factor = rope["factor"]

    def mscale(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        a, b = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = mscale(a) / mscale(b) if a and b else mscale()

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dim_of(rope.get("beta_fast") or 32)
    high = dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq * (1 - slow) + inv_freq / factor * slow, float(attention_factor)


def alibi_slopes(num_heads: int) -> Tensor:
    """Geometric slopes; a head count that is no power of two takes every second of the next."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-8.0 * (2 * h + 1) / (2 * power)) for h in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


# --------------------------------------------------------------------------------------- models


class OracleModel(ABC):
    """The parts of a decoder around attention. Tensors of tokens are [tokens, ...]."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids -> hidden states."""

    @abstractmethod
    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states -> q [T, H, D], k and v [T, Hkv, D], none of them rotated."""

    @abstractmethod
    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """Residual, output projection and MLP of a layer; `attended` is [T, H * D]."""

    @abstractmethod
    def unembed(self, x: Tensor) -> Tensor:
        """Hidden states -> logits."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary positions to x [..., len(positions), D]."""
        return x

    def rotate_back(self, x: Tensor, positions: Tensor) -> Tensor:
        """Take `rotate` back."""
        return x

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """Additive bias [H, queries, keys], if the model has one."""
        return None


class LlamaOracle(OracleModel):
    """LlamaForCausalLM: grouped-query attention, rotary positions, gated MLP."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__(config, weights)
        if config.get("hidden_act", "silu") != "silu":
            raise NotImplementedError(config["hidden_act"])
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads") or self.num_heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.eps = config["rms_norm_eps"]
        self.inv_freq, self.rotary_scale = rotary_frequencies(config, self.head_dim)
        self.cos = self.sin = torch.empty(0, len(self.inv_freq))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weights[f"{name}.weight"] * (x * scale)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weights["model.embed_tokens.weight"])

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name = f"model.layers.{layer}"
        h = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.linear(h, f"{name}.self_attn.{p}_proj").unflatten(-1, (-1, self.head_dim))
            for p in "qkv"
        )
        return q, k, v

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        name = f"model.layers.{layer}"
        x = x + self.linear(attended, f"{name}.self_attn.o_proj")
        h = self.norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(self.linear(h, f"{name}.mlp.gate_proj"))
        return x + self.linear(
            gate * self.linear(h, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
        )

    def unembed(self, x: Tensor) -> Tensor:
        tied = self.config.get("tie_word_embeddings", False)
        name = "model.embed_tokens" if tied else "lm_head"
        return self.linear(self.norm(x, "model.norm"), name)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        # A table of all positions so far, for speed.
        if len(positions) and len(self.cos) <= positions[-1]:
            angles = torch.arange(2 * positions[-1] + 2)[:, None] * self.inv_freq
            self.cos, self.sin = angles.cos() * self.rotary_scale, angles.sin() * self.rotary_scale
        cos, sin = self.cos[positions], self.sin[positions]
        half = len(self.inv_freq)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def rotate_back(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (table[positions] / self.rotary_scale**2 for table in (self.cos, self.sin))
        half = len(self.inv_freq)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)


class BloomOracle(OracleModel):
    """BloomForCausalLM: ALiBi, fused qkv interleaved per head, layer norm after embeddings."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        weights = {name.removeprefix("transformer."): w for name, w in weights.items()}
        super().__init__(config, weights)
        self.num_layers = config.get("n_layer", config.get("num_hidden_layers"))
        self.num_heads = config.get("n_head", config.get("num_attention_heads"))
        self.num_kv_heads = self.num_heads
        self.hidden_size = config.get("hidden_size", config.get("n_embed"))
        self.head_dim = self.hidden_size // self.num_heads
        self.eps = config.get("layer_norm_epsilon", 1e-5)
        self.residual_after_norm = config.get("apply_residual_connection_post_layernorm", False)
        self.slopes = alibi_slopes(self.num_heads)
        self.gelu = "tanh"

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, (self.hidden_size,), weight, bias, self.eps)

    def embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weights["word_embeddings.weight"])
        return self.norm(x, "word_embeddings_layernorm")

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.norm(x, f"h.{layer}.input_layernorm")
        fused = self.linear(h, f"h.{layer}.self_attention.query_key_value")
        q, k, v = fused.unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        return q, k, v

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        name = f"h.{layer}"
        residual = self.norm(x, f"{name}.input_layernorm") if self.residual_after_norm else x
        x = residual + self.linear(attended, f"{name}.self_attention.dense")
        h = self.norm(x, f"{name}.post_attention_layernorm")
        residual = h if self.residual_after_norm else x
        h = F.gelu(self.linear(h, f"{name}.mlp.dense_h_to_4h"), approximate=self.gelu)
        return residual + self.linear(h, f"{name}.mlp.dense_4h_to_h")

    def unembed(self, x: Tensor) -> Tensor:
        tied = self.config.get("tie_word_embeddings", True)
        return self.linear(self.norm(x, "ln_f"), "word_embeddings" if tied else "lm_head")

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        distance = key_positions[None, :] - query_positions[:, None]
        return self.slopes[:, None, None] * distance.to(torch.float32)


MODELS: dict[str, type[OracleModel]] = {
    "LlamaForCausalLM": LlamaOracle,
    "BloomForCausalLM": BloomOracle,
}


def load_model(path: str | Path, *, bloom_gelu: str = "tanh") -> OracleModel:
    """Read config.json and model.safetensors of a Hugging Face directory; weights become fp32.

    `bloom_gelu` is "tanh" as in transformers, or "none" for the exact GELU that vLLM runs in Bloom.
    """
    path = Path(path)
    config = json.loads((path / "config.json").read_text())
    weights = {n: w.to(torch.float32) for n, w in load_file(path / "model.safetensors").items()}
    model = MODELS[config["architectures"][0]](config, weights)
    if isinstance(model, BloomOracle):
        model.gelu = bloom_gelu
    return model


# --------------------------------------------------------------------------- attention and scores


def log_n(base: float = 512) -> Callable[[int], float]:
    """BUZZ's factor on the logits of the query at stream index i: log n, n = i + 1 tokens seen."""
    return lambda i: math.log(i + 1) / math.log(base)


def attend(
    model: OracleModel, q: Tensor, k: Tensor, v: Tensor, logit_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the T newest positions over n + T keys at positions 0 .. n + T - 1.

    q is [T, H, D]; k and v are [Hkv, n + T, D], each head's tokens in chronological order, the
    stride's own last. `logit_scale` [T] multiplies q k / sqrt(D), not a bias that the model adds.
    Returns the output [T, H * D] and the probabilities [Hkv, group, T, n + T].
    """
    num_queries, num_keys = len(q), k.shape[1]
    key_positions = torch.arange(num_keys)
    query_positions = key_positions[num_keys - num_queries :]
    k = model.rotate(k, key_positions)
    q = model.rotate(q.transpose(0, 1), query_positions)
    # Query head h reads KV head h // group: fold a group's heads and queries into one axis.
    grouped = q.reshape(model.num_kv_heads, -1, model.head_dim)
    logits = grouped @ k.transpose(-1, -2) / math.sqrt(model.head_dim)
    logits = logits.view(model.num_kv_heads, -1, num_queries, num_keys)
    if logit_scale is not None:
        logits = logits * logit_scale[:, None]
    bias = model.bias(query_positions, key_positions)
    if bias is not None:
        logits = logits + bias.view(logits.shape)
    future = key_positions[None, :] > query_positions[:, None]
    probs = logits.masked_fill(future, -math.inf).softmax(-1)
    out = (probs.flatten(1, 2) @ v).view(model.num_heads, num_queries, model.head_dim)
    return out.transpose(0, 1).flatten(1), probs


def discounted_mass(probs: Tensor, decay: float, weight: float | None = None) -> Tensor:
    """weight sum_q decay^(T - 1 - q) a[q, k] over the queries: [..., T, K] -> [..., K].

    Without `weight` an exponential moving average: weight = 1 - decay.
    """
    num_queries = probs.shape[-2]
    weight = 1 - decay if weight is None else weight
    weights = [weight * decay ** (num_queries - 1 - q) for q in range(num_queries)]
    return torch.tensor(weights, dtype=torch.float32) @ probs


def reduce_heads(mass: Tensor, head_policy: str, head_reduction: str) -> Tensor:
    """[Hkv, group, K] -> [sets, K]."""
    if head_policy == "homogeneous":
        mass = mass.flatten(0, 1)[None]
    if head_reduction == "mean":
        return mass.mean(1)
    if head_reduction == "max":
        return mass.amax(1)
    if head_reduction == "median":
        return mass.median(1).values  # the lower one of an even number
    raise ValueError(f"head_reduction={head_reduction!r}")


def on_first_of_units(mass: Tensor, unit: int) -> Tensor:
    """[..., K]: what a unit's tokens got, all of it on the first: heads judge whole units.

    Cached units are complete, so the K keys in their order are cut into units from the first on.
    """
    num_keys = mass.shape[-1]
    whole = F.pad(mass, (0, -num_keys % unit)).unflatten(-1, (-1, unit))
    first = F.pad(whole.sum(-1, keepdim=True), (0, unit - 1))
    return first.flatten(-2)[..., :num_keys]


# --------------------------------------------------------------------------------------- streams


@dataclass
class OracleResult:
    """What one stream gives."""

    logprobs: list[float]
    """Log-probability of tokens[i + 1] given the past, len(tokens) - 1 entries."""
    logits_last: Tensor
    """Logits after the last token."""
    kept: dict[int, list[list[list[int]]]]
    """End of a stride (tokens seen) -> [layer][set] -> token indices, chronological."""
    scores: list[Tensor]
    """Per layer [sets, tokens]: each token's score as last updated (0: sink, or never scored);
    a unit's, whole, is its first token's."""
    closest_contest: float
    """Smallest relative gap of two scores in a contest, over all layers and sets."""
    recalls: tuple[int, int] = (0, 0)
    """Choices among units to recall, and how many of them rounding decided."""


def strides(num_tokens: int, prompt_len: int, stride: int) -> list[tuple[int, int]]:
    """Cut the prompt at absolute multiples of `stride`, everything after it token by token."""
    prompt_len = min(prompt_len, num_tokens)
    cuts = [(a, min(a + stride, prompt_len)) for a in range(0, prompt_len, stride)]
    return cuts + [(a, a + 1) for a in range(prompt_len, num_tokens)]


def merge(sim: Sim, members: dict[int, int], keys: Tensor, values: Tensor) -> None:
    """Average the tokens that join others into them; `keys`, `values` are a set's [heads, ...].

    A token joins the centre nearest to it before any of them joins.
    """
    centres, joining = sim.take_merged()
    if not joining:
        return
    features = keys.transpose(0, 1).flatten(1).numpy().copy()
    targets, lead = nearest_centres(features, centres, joining)
    sim.closest_contest = min(sim.closest_contest, lead)
    for token, centre in zip(joining, targets, strict=True):
        count = members.get(centre, 1)
        for rows in (keys, values):
            rows[:, centre] = (count * rows[:, centre] + rows[:, token]) / (count + 1)
        members[centre] = count + 1


@torch.inference_mode()
def stream(
    model: OracleModel,
    tokens: list[int],
    *,
    prompt_len: int,
    stride: int,
    make_sim: Callable[[], Sim],
    head_policy: str = "homogeneous",
    head_reduction: str = "mean",
    gamma: float | None = None,
    decay: float | None = None,
    weight: float | None = None,
    logit_scale: Callable[[int], float] | None = None,
    token_scores: Callable[[int, int], list[float]] | None = None,
    kept_at: Collection[int] | None = None,
    recall: RecallSettings | None = None,
    chosen: dict[int, list[list[list[int]]]] | None = None,
    quantiser: Quantiser | None = None,
    stored: list[Stored] | None = None,
) -> OracleResult:
    """Run `tokens` through the model with one token-retention simulation per layer and head set.

    Per stride: attend to the cache and, causally, to the stride; update the scores; insert the
    stride's tokens one by one, with those scores frozen; end the stride. `kept_at` limits which
    ends of strides are recorded in `kept` (default: all).

    Every query turns the score of a token it sees into decay * score + weight * probability: an
    exponential moving average with (gamma, 1 - gamma), for which `gamma` is a short form, a plain
    sum with (1, 1). A simulation with `normalise` is shown that score divided by the number of
    queries that saw the token (of a unit: its first token), its own included. `logit_scale` gives
    a factor on the logits of the query at stream index i (`log_n()`; default 1). `token_scores`
    of a layer and head set are shown in place of scores by attention. Tokens that a simulation
    merges into others are averaged into them. With `recall` the queries of a stride bring evicted
    units back; `chosen` is what another implementation kept (as `kept`), whose choice stands where
    rounding decides.
    With a `quantiser` a stride's rows are quantised when it is over, rotated to where they stand;
    `stored` is what another implementation wrote, by layer; its codes stand where rounding decides.
    """
    if gamma is not None:
        if decay is not None or weight is not None:
            raise ValueError("gamma stands for decay and weight: give one or the others")
        decay, weight = gamma, 1 - gamma
    if decay is None or weight is None:
        raise ValueError("no score rule: give gamma, or decay and weight")
    if head_policy not in HEAD_POLICIES:
        raise ValueError(f"head_policy={head_policy!r}: one of {HEAD_POLICIES}")
    num_sets = 1 if head_policy == "homogeneous" else model.num_kv_heads
    num_layers, total = model.num_layers, len(tokens)
    shape = (model.num_kv_heads, total, model.head_dim)
    # Every token's key (never rotated), value and score, by token index; the simulations alone
    # say which of them are cached.
    keys = [torch.zeros(shape) for _ in range(num_layers)]
    values = [torch.zeros(shape) for _ in range(num_layers)]
    scores = [torch.zeros(num_sets, total) for _ in range(num_layers)]
    sims = [[make_sim() for _ in range(num_sets)] for _ in range(num_layers)]
    stores = [
        [RecallSim(recall) if recall else None for _ in range(num_sets)] for _ in range(num_layers)
    ]
    members = [[dict[int, int]() for _ in range(num_sets)] for _ in range(num_layers)]

    heads = torch.arange(model.num_kv_heads)[:, None]
    sets = torch.arange(num_sets)[:, None]
    token_ids = torch.tensor(tokens)
    logprobs: list[float] = []
    kept: dict[int, list[list[list[int]]]] = {}
    logits = torch.empty(0)

    for start, end in strides(total, prompt_len, stride):
        length = end - start
        factor = None
        if logit_scale is not None:
            factor = torch.tensor([logit_scale(i) for i in range(start, end)], dtype=torch.float32)
        x = model.embed(token_ids[start:end])
        for layer in range(num_layers):
            q, k, v = model.qkv(layer, x)
            keys[layer][:, start:end] = k.transpose(0, 1)
            values[layer][:, start:end] = v.transpose(0, 1)

            # Attend to the cached tokens and this stride: [sets, n + T] token indices.
            own = list(range(start, end))
            lines = [sim.arranged() for sim in sims[layer]]
            for s, store in enumerate(stores[layer]):
                if store is None:
                    continue
                num_sinks = len(sims[layer][s].sinks)
                if store.chooses(start, end):
                    of_set = slice(None) if num_sets == 1 else slice(s, s + 1)
                    asking = store.asking(length)
                    away = store.distances(len(lines[s]), asking, num_sinks)
                    asked = model.rotate(q[asking].transpose(0, 1), away).transpose(0, 1)
                    asked = asked.unflatten(1, (model.num_kv_heads, -1))[:, of_set].flatten(1, 2)
                    stay = torch.zeros(total, dtype=torch.long)
                    there = model.rotate(keys[layer][of_set], stay)
                    hint = None if chosen is None else store.hint(chosen[end][layer][s], num_sinks)
                    at = store.positions(len(lines[s]), asking)
                    turned = model.rotate(q[asking].transpose(0, 1), at).transpose(0, 1)
                    turned = turned.unflatten(1, (model.num_kv_heads, -1))[:, of_set]
                    first = torch.arange(num_sinks)
                    stand = model.rotate(keys[layer][of_set][:, sims[layer][s].sinks], first)
                    to_sinks = torch.einsum("qhgd,hnd->qhgn", turned, stand).flatten(1, 2)
                    to_sinks *= model.head_dim**-0.5
                    store.choose(asked, there, to_sinks, hint)
                lines[s] = store.line(lines[s], num_sinks)
            seen = torch.tensor([line + own for line in lines])
            rows = seen.expand(model.num_kv_heads, -1)
            cached_k, cached_v = keys[layer][heads, rows], values[layer][heads, rows]
            attended, probs = attend(model, q, cached_k, cached_v, factor)
            x = model.finish(layer, x, attended)

            # Update scores. The stride's own tokens start from 0, so one formula serves both.
            mass = discounted_mass(probs, decay, weight)
            if sims[layer][0].unit > 1:
                mass = on_first_of_units(mass, sims[layer][0].unit)
            mass = reduce_heads(mass, head_policy, head_reduction)
            score = scores[layer]
            score[sets, seen] = decay**length * score[sets, seen] + mass

            # Insert, one token after the other, with these scores.
            for s, sim in enumerate(sims[layer]):
                shown = dict(zip(seen[s].tolist(), score[s, seen[s]].tolist(), strict=True))
                if sim.normalise:  # seen by every query from its own up to the stride's last
                    shown = {t: value / (end - sim.first_of(t)) for t, value in shown.items()}
                if token_scores is not None:
                    own_scores = token_scores(layer, s)
                    shown = {token: own_scores[token] for token in shown}
                before = sim.tokens() + own
                for token in own:
                    sim.insert(token, shown.__getitem__)
                sim.end_stride(shown.__getitem__)
                in_set = slice(None) if num_sets == 1 else slice(s, s + 1)
                rows_of_set = keys[layer][in_set], values[layer][in_set]
                if (store := stores[layer][s]) is not None:
                    store.note(before, sim.tokens(), *rows_of_set)
                merge(sim, members[layer][s], *rows_of_set)
                score[s, sim.sinks] = 0.0  # sinks are never scored
            if quantiser is not None:
                sim, store = sims[layer][0], stores[layer][0]
                after = len(sim.tokens()) + (0 if store is None else store.tokens_to_show)
                at = written_at(len(lines[0]), after, length, end % sim.unit)
                theirs = None if stored is None else stored[layer]
                write_rows(model, quantiser, keys[layer], values[layer], own, at, theirs)

        logits = model.unembed(x)
        following = token_ids[start + 1 : end + 1]
        logprob = logits[: len(following)].log_softmax(-1)
        logprobs += logprob.gather(-1, following[:, None])[:, 0].tolist()
        if kept_at is None or end in kept_at:
            kept[end] = [[sim.tokens() for sim in layer_sims] for layer_sims in sims]
            for layer_kept, layer_sims, layer_stores in zip(kept[end], sims, stores, strict=True):
                for s, store in enumerate(layer_stores):
                    if store is not None:
                        layer_kept[s] = store.line(layer_kept[s], len(layer_sims[s].sinks))

    gaps = [sim.closest_contest for row in sims for sim in row]
    used = [store for row in stores for store in row if store is not None]
    choices = sum(store.choices for store in used), sum(store.near for store in used)
    return OracleResult(logprobs, logits[-1].clone(), kept, scores, min(gaps), choices)
