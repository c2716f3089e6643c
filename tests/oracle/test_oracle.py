# SPDX-License-Identifier: Apache-2.0
"""The oracle against the cases of docs/ALGORITHMS.md, "Cascade", and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import MODEL
from tests.oracle.model import (
    alibi_slopes,
    discounted_mass,
    load_model,
    log_n,
    paper_gamma,
    reduce_heads,
    stream,
    strides,
)
from tests.oracle.policies import BeehiveSim, CascadeSim, H2OSim, OverflowSim, Sim, WindowSim
from tests.oracle.random_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, write_bloom, write_llama

transformers = pytest.importorskip("transformers")


# ------------------------------------------------- the cases of docs/ALGORITHMS.md, "Cascade"


def zero(token: int) -> float:
    return 0.0


def multiple_of_three(token: int) -> float:
    return 1.0 if token % 3 == 0 else 0.0


def run(sim: CascadeSim, last: int, score: Callable[[int], float] = zero) -> CascadeSim:
    for p in range(last + 1):
        sim.insert(p, score)
    return sim


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


RESIDENT = {
    5: [[2, 3, 4, 5], [1], []],
    10: [[7, 8, 9, 10], [1, 3, 5], []],
    13: [span(10, 13), [3, 5, 7, 9], [1]],
    20: [span(17, 20), [9, 11, 13, 15], [1, 5]],
    40: [span(37, 40), [29, 31, 33, 35], [13, 17, 21, 25]],
}
INCOMING = {
    6: [span(3, 6), [2], []],
    10: [span(7, 10), [2, 4, 6], []],
    40: [span(37, 40), [30, 32, 34, 36], [16, 20, 24, 28]],
}
THREES = {
    40: [span(37, 40), [30, 31, 33, 36], [15, 18, 21, 27]],
    60: [span(57, 60), [49, 51, 54, 55], [33, 39, 42, 45]],
}
EAGER = {
    12: [span(9, 12), span(5, 8), span(1, 4)],
    13: [span(10, 13), span(6, 9), span(2, 5)],
    14: [span(11, 14), [6, 7, 8, 10], span(2, 5)],
    40: INCOMING[40],
}
VECTORS = [
    pytest.param(eager, tie, score, p, subcaches, id=f"{name}-{p}")
    for name, eager, tie, score, table in (
        ("resident", False, "resident", zero, RESIDENT),
        ("incoming", False, "incoming", zero, INCOMING),
        ("threes", False, "resident", multiple_of_three, THREES),
        ("eager", True, "incoming", zero, EAGER),
    )
    for p, subcaches in table.items()
]


@pytest.mark.parametrize(("eager", "tie", "score", "p", "subcaches"), VECTORS)
def test_contents(
    eager: bool, tie: str, score: Callable[[int], float], p: int, subcaches: list[list[int]]
) -> None:
    sim = run(CascadeSim(1, 3, 4, eager_fill=eager, tie=tie), p, score)
    assert sim.sinks == [0]
    assert sim.subcaches == subcaches
    assert sim.tokens() == [0] + subcaches[2] + subcaches[1] + subcaches[0]


def counts(sim: CascadeSim, n: int) -> list[int]:
    result = []
    for p in range(n):
        sim.insert(p, zero)
        result.append(len(sim.tokens()))
    return result


def test_counts() -> None:
    text = "1 2 3 4 5 6 6 7 7 8 8 9 9 10 10 10 10 11 11 11 11 12 12 12 12 13 13 13"
    expected = [int(word) for word in text.split()]
    assert counts(CascadeSim(1, 3, 4, eager_fill=False), 28) == expected


@pytest.mark.parametrize(
    ("sinks", "window", "subcaches", "full_at"),
    [(4, 512, 4, 7676), (4, 8, 4, 116), (0, 32, 4, 472), (4, 7, 3, 48)],
)
def test_first_full(sinks: int, window: int, subcaches: int, full_at: int) -> None:
    sim = CascadeSim(sinks, subcaches, window, eager_fill=False)
    size = sinks + subcaches * window
    for p in range(full_at + 1):
        sim.insert(p, zero)
        full = len(sim.sinks) + sum(map(len, sim.subcaches)) == size
        assert full == (p == full_at)


@pytest.mark.parametrize(
    ("sinks", "window", "subcaches"), [(1, 4, 3), (4, 8, 4), (0, 32, 4), (2, 6, 1), (3, 16, 2)]
)
def test_count_closed_form(sinks: int, window: int, subcaches: int) -> None:
    def closed_form(p: int) -> int:
        if p < sinks:
            return p + 1
        j = p - sinks
        for i in range(subcaches):
            if j < (2 ** (i + 1) - 1) * window:
                offers = (j - (2**i - 1) * window) // 2**i
                return sinks + min(subcaches * window, i * window + 1 + offers)
        return sinks + subcaches * window

    n = sinks + (2**subcaches + 1) * window
    walk = counts(CascadeSim(sinks, subcaches, window, eager_fill=False), n)
    assert walk == [closed_form(p) for p in range(n)]
    eager = counts(CascadeSim(sinks, subcaches, window), n)
    assert eager == [min(p + 1, sinks + subcaches * window) for p in range(n)]


def test_paper_example() -> None:
    """After j = 1024 only 769 of 2048 slots are used; the steady span is 7666 .. 7680."""
    sim = run(CascadeSim(0, 4, 512, eager_fill=False), 1024)
    assert len(sim.tokens()) == 769
    for tie, expected in (("incoming", range(7666, 7674)), ("resident", range(7673, 7681))):
        sim = run(CascadeSim(0, 4, 512, eager_fill=False, tie=tie), 11999)
        spans = set()
        for p in range(12000, 12100):
            sim.insert(p, zero)
            spans.add(p - sim.tokens()[0] + 1)
        assert spans == set(expected)


def test_eager_fill_includes_the_step_at_capacity() -> None:
    """Visible only where 2^(N-1) does not divide W: p = C + S still accepts everywhere."""
    sim = run(CascadeSim(1, 3, 3), 10)
    assert sim.subcaches == [[8, 9, 10], [5, 6, 7], [2, 3, 4]]
    sim.insert(11, zero)  # j = 10: the second sub-cache accepts, the third does not
    assert sim.subcaches == [[9, 10, 11], [6, 7, 8], [2, 3, 5]]


def test_eager_and_gated_agree_in_the_end() -> None:
    for tie in ("incoming", "resident"):
        n = 4 + (2**4 - 1) * 8 + 40
        eager = run(CascadeSim(4, 4, 8, tie=tie), n)
        gated = run(CascadeSim(4, 4, 8, tie=tie, eager_fill=False), n)
        assert eager.subcaches == gated.subcaches


sizes = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.sampled_from(["incoming", "resident"]), st.randoms())
def test_invariants(size: tuple[int, int, int, int], eager: bool, tie: str, random: Random) -> None:
    """Chronological order, sizes, the counts' independence of scores, and what insert returns."""
    sinks, subcaches, window, base = size
    sim = CascadeSim(sinks, subcaches, window, base, eager, tie)
    plain = CascadeSim(sinks, subcaches, window, base, eager, tie)
    scores = [random.choice([0.0, 0.5, 1.0]) for _ in range(150)]
    for p in range(150):
        before = set(sim.tokens()) | {p}
        lost = sim.insert(p, scores.__getitem__)
        plain.insert(p, zero)
        after = sim.tokens()
        assert after == sorted(after)
        assert before - set(after) == ({lost} if lost is not None else set())
        assert sim.sinks == list(range(min(sinks, p + 1)))
        assert all(len(subcache) <= window for subcache in sim.subcaches)
        assert [len(s) for s in sim.subcaches] == [len(s) for s in plain.subcaches]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 12), st.integers(1, 4), st.booleans(), st.randoms())
def test_one_subcache_is_a_window(
    sinks: int, window: int, base: int, eager: bool, random: Random
) -> None:
    cascade, sink = CascadeSim(sinks, 1, window, base, eager), WindowSim(sinks, window)
    for p in range(60):
        assert cascade.insert(p, lambda _: random.random()) == sink.insert(p, zero)
        assert cascade.tokens() == sink.tokens()
        assert cascade.sinks == sink.sinks and cascade.subcaches == sink.subcaches


# --------------------------------------------------------------------------------- score formulas


def test_paper_gamma() -> None:
    assert paper_gamma(512) ** 512 == pytest.approx(0.01)
    assert paper_gamma(512) == pytest.approx(0.991, abs=1e-4)


def test_chunk_ema_equals_single_updates() -> None:
    """One formula serves cached keys and the stride's own: T single updates, frozen cache."""
    gamma, cached, length = 0.9, 3, 5
    probs = torch.rand(2, length, cached + length)
    for q in range(length):
        probs[:, q, cached + q + 1 :] = 0
    mu = torch.cat((torch.rand(2, cached), torch.zeros(2, length)), 1)
    chunk = gamma**length * mu + discounted_mass(probs, gamma)
    for q in range(length):
        mu = gamma * mu + (1 - gamma) * probs[:, q]
    torch.testing.assert_close(chunk, mu)


def test_chunk_sum() -> None:
    """Decay 1, weight 1: the probabilities of all queries are added up."""
    probs = torch.rand(2, 5, 8)
    torch.testing.assert_close(discounted_mass(probs, 1.0, 1.0), probs.sum(-2))


def test_reduce_heads() -> None:
    mass = torch.tensor([[[1.0], [5.0]], [[2.0], [8.0]]])  # 2 KV heads of 2 query heads, 1 key
    expected = {"mean": (4.0, [3.0, 5.0]), "max": (8.0, [5.0, 8.0]), "median": (2.0, [1.0, 2.0])}
    for reduction, (everything, groups) in expected.items():
        assert reduce_heads(mass, "homogeneous", reduction).tolist() == [[everything]]
        assert reduce_heads(mass, "per_kv_head", reduction)[:, 0].tolist() == groups


def test_strides() -> None:
    assert strides(12, 10, 4) == [(0, 4), (4, 8), (8, 10), (10, 11), (11, 12)]
    assert strides(3, 10, 2) == [(0, 2), (2, 3)]


# ----------------------------------------------------------------------------- against transformers


def random_tokens(n: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(path: Path) -> Any:
    """transformers' own model, with attention probabilities on request."""
    loader = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def partly_rotated_reference(path: Path) -> Any:
    """The same weights as a dense GLM-4-MoE: a Llama whose rotary embedding may be partial."""
    llama = transformers.LlamaConfig.from_pretrained(path)
    config = transformers.Glm4MoeConfig(
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=llama.num_hidden_layers,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        max_position_embeddings=llama.max_position_embeddings,
        rms_norm_eps=llama.rms_norm_eps,
        tie_word_embeddings=llama.tie_word_embeddings,
        rope_parameters=dict(llama.rope_parameters),
        first_k_dense_replace=llama.num_hidden_layers,
        use_qk_norm=False,
        num_mtp_layers=0,
    )
    model = transformers.Glm4MoeForCausalLM(config)
    weights = transformers.LlamaForCausalLM.from_pretrained(path).state_dict()
    model.load_state_dict(weights)
    return model.eval()


def check_full_attention(
    path: Path,
    n: int,
    vocab: int,
    load: Callable[[Path], Any] = reference,
    logit_scale: Callable[[int], float] | None = None,
) -> None:
    tokens = random_tokens(n, vocab)
    with torch.no_grad():
        expected = load(path)(torch.tensor([tokens])).logits[0]
    logprobs = expected.log_softmax(-1)[torch.arange(n - 1), torch.tensor(tokens[1:])]
    model = load_model(path)
    for stride, head_policy in ((7, "homogeneous"), (1, "per_kv_head"), (n, "homogeneous")):
        result = stream(
            model,
            tokens,
            prompt_len=n - 3,
            stride=stride,
            make_sim=lambda: CascadeSim(2, 2, n),
            head_policy=head_policy,
            gamma=0.9,
            logit_scale=logit_scale,
        )
        torch.testing.assert_close(result.logits_last, expected[-1], atol=1e-3, rtol=0)
        torch.testing.assert_close(torch.tensor(result.logprobs), logprobs, atol=1e-3, rtol=0)
        assert result.kept[n] == [[list(range(n))] * len(result.kept[n][0])] * model.num_layers


def test_books_model_equals_transformers() -> None:
    check_full_attention(MODEL, 150, 4096)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-mscale": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16.0},
    "yarn-factor": {**YARN_ROPE, "attention_factor": 1.4, "truncate": False},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_kinds_equal_transformers(rope: str, tmp_path: Path) -> None:
    write_llama(tmp_path, rope_parameters=ROPES[rope], tie_word_embeddings=rope == "linear")
    check_full_attention(tmp_path, 200, 512)


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_partial_rotary_equals_transformers(rope: str, tmp_path: Path) -> None:
    write_llama(tmp_path, rope_parameters=ROPES[rope], partial_rotary_factor=0.5, head_dim=64)
    check_full_attention(tmp_path, 120, 512, partly_rotated_reference)


@pytest.mark.parametrize("num_heads", [4, 6])
def test_bloom_equals_transformers(num_heads: int, tmp_path: Path) -> None:
    write_bloom(tmp_path, num_heads=num_heads)
    check_full_attention(tmp_path, 120, 512)


def log_n_reference(path: Path) -> Any:
    """Queries that are log_512 n times as long, and nothing else changed."""
    model = reference(path)

    def longer(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        n = torch.arange(1, out.shape[1] + 1)
        factor = (n.log() / math.log(512))[:, None]
        if not bloom:
            return out * factor
        heads = out.unflatten(-1, (model.config.n_head, 3, -1)).clone()
        heads[..., 0, :] *= factor[:, None]
        return heads.flatten(2)

    bloom = model.config.model_type == "bloom"
    for name, module in model.named_modules():
        if name.endswith("query_key_value" if bloom else "q_proj"):
            module.register_forward_hook(longer)
    return model


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_log_n_equals_transformers(kind: str, tmp_path: Path) -> None:
    """The factor is on q k alone: ALiBi's bias stays as it is."""
    (write_llama if kind == "llama" else write_bloom)(tmp_path)
    check_full_attention(tmp_path, 120, 512, log_n_reference, log_n())
    with pytest.raises(AssertionError):
        check_full_attention(tmp_path, 120, 512, log_n_reference)


def test_alibi_slopes() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 2.0**-6, 2.0**-8, 0.5, 0.125]


def test_partial_rotary_at_either_place(tmp_path: Path) -> None:
    """The fraction may stand in rope_parameters or at the top level of config.json."""
    write_llama(tmp_path, partial_rotary_factor=0.5)
    model = load_model(tmp_path)
    assert model.config["rope_parameters"]["partial_rotary_factor"] == 0.5
    for place in ("inside", "outside"):
        config = {**model.config, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        (config["rope_parameters"] if place == "inside" else config)["partial_rotary_factor"] = 0.5
        if place == "inside":
            config.pop("partial_rotary_factor", None)
        assert len(type(model)(config, model.weights).inv_freq) == 8


# ---------------------------------------------------------------------------- streams with eviction


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_window_equals_banded_attention(kind: str, tmp_path: Path) -> None:
    """Without sinks, relative positions make a token-by-token window a band of full attention."""
    (write_llama if kind == "llama" else write_bloom)(tmp_path)
    n, window = 60, 9
    tokens = random_tokens(n, 512)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    allowed = (distance >= 0) & (distance <= window)
    mask = torch.zeros(1, 1, n, n).masked_fill(~allowed, torch.finfo(torch.float32).min)
    hf = reference(tmp_path)
    with torch.no_grad():
        if kind == "bloom":  # takes no 4D mask: add the band inside its attention
            for block in hf.transformer.h:
                block.self_attention.register_forward_pre_hook(
                    lambda _, args, kwargs: (args, {**kwargs, "attention_mask": mask}),
                    with_kwargs=True,
                )
            expected = hf(torch.tensor([tokens])).logits[0]
        else:
            expected = hf(torch.tensor([tokens]), attention_mask=mask).logits[0]
    result = stream(
        load_model(tmp_path),
        tokens,
        prompt_len=40,
        stride=1,
        make_sim=lambda: WindowSim(0, window),
        head_policy="per_kv_head",
        gamma=0.9,
    )
    logprobs = expected.log_softmax(-1)[torch.arange(n - 1), torch.tensor(tokens[1:])]
    torch.testing.assert_close(torch.tensor(result.logprobs), logprobs, atol=1e-3, rtol=0)
    assert result.kept[30][0] == [list(range(21, 30))] * len(result.kept[30][0])


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda heads: sum(heads) / len(heads),
    "max": max,
    "median": lambda heads: sorted(heads)[(len(heads) - 1) // 2],
}


def replay(
    hf: Any,
    tokens: list[int],
    cuts: list[tuple[int, int]],
    sim: Sim,
    decay: float,
    weight: float,
    reduction: str,
    heads: slice,
) -> tuple[dict[int, list[int]], dict[int, float], list[float]]:
    """A one-layer stream by transformers: kept tokens per stride, scores, log-probabilities.

    In one layer a token's key depends on the token alone, so the kept tokens and a stride can be
    read as one short text. The probabilities of `heads` are summed up one query at a time.
    """
    mu: dict[int, float] = dict.fromkeys(range(len(tokens)), 0.0)
    queries: dict[int, int] = dict.fromkeys(range(len(tokens)), 0)
    kept: dict[int, list[int]] = {}
    logprobs: list[float] = []
    for start, end in cuts:
        length = end - start
        text = sim.tokens() + list(range(start, end))
        with torch.no_grad():
            out = hf(torch.tensor([[tokens[i] for i in text]]), output_attentions=True)
        probs = out.attentions[0][0, heads].tolist()  # [head][query][key]
        for rank, token in enumerate(text):
            per_head = []
            for head in probs:
                mass = 0.0
                for query in head[-length:]:
                    mass = decay * mass + weight * query[rank]
                per_head.append(mass)
            mu[token] = decay**length * mu[token] + REDUCTIONS[reduction](per_head)
            queries[token] += sum(token <= query for query in range(start, end))
        score = {t: mu[t] / queries[t] if sim.normalise else mu[t] for t in text}
        for token in range(start, end):
            sim.insert(token, score.__getitem__)
        sim.end_stride(score.__getitem__)
        kept[end] = sim.tokens()
        following = tokens[start + 1 : end + 1]
        logits = out.logits[0, -length:].log_softmax(-1)
        logprobs += [logits[i, token].item() for i, token in enumerate(following)]
    return kept, mu, logprobs


@pytest.mark.parametrize("stride", [1, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["llama", "bloom", "per_kv_head"])
def test_one_layer_cascade_step_by_step(
    kind: str, reduction: str, stride: int, tmp_path: Path
) -> None:
    """Same tokens kept, same scores and (one set of heads) same log-probabilities as a replay."""
    if kind == "bloom":
        write_bloom(tmp_path, num_layers=1)
    else:
        write_llama(tmp_path, rope_parameters=YARN_ROPE, num_layers=1, num_heads=6)
    head_policy = "per_kv_head" if kind == "per_kv_head" else "homogeneous"
    groups = [slice(0, 3), slice(3, 6)] if kind == "per_kv_head" else [slice(None)]
    n, prompt_len, gamma = 70, 52, 0.8
    tokens = random_tokens(n, 512)
    result = stream(
        load_model(tmp_path),
        tokens,
        prompt_len=prompt_len,
        stride=stride,
        make_sim=lambda: CascadeSim(2, 3, 4),
        head_policy=head_policy,
        head_reduction=reduction,
        gamma=gamma,
    )
    assert 1e-6 < result.closest_contest < math.inf
    cuts = strides(n, prompt_len, stride)
    assert list(result.kept) == [end for _, end in cuts]
    for s, heads in enumerate(groups):
        kept, mu, logprobs = replay(
            reference(tmp_path),
            tokens,
            cuts,
            CascadeSim(2, 3, 4),
            gamma,
            1 - gamma,
            reduction,
            heads,
        )
        assert {end: layers[0][s] for end, layers in result.kept.items()} == kept
        for token in kept[n][2:]:
            assert result.scores[0][s, token].item() == pytest.approx(mu[token], abs=1e-5)
        assert result.scores[0][s, :2].tolist() == [0.0, 0.0]
        if len(groups) == 1:
            expected = torch.tensor(logprobs)
            torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-3, rtol=0)
    if len(groups) == 2:
        assert result.kept[n][0][0] != result.kept[n][0][1]


SUMS: dict[str, Callable[[], Sim]] = {
    "h2o": lambda: H2OSim(2, 12, 5),
    "h2o-normalised": lambda: H2OSim(2, 12, 5, normalise=True),
    "h2o-overflow": lambda: H2OSim(2, 12, 5, overflow=4),
    "h2o-normalised-overflow": lambda: OverflowSim(H2OSim(2, 12, 5, normalise=True), 4),
    "beehive": lambda: BeehiveSim(2, 5, 3, 8),
    "beehive-new": lambda: BeehiveSim(2, 5, 4, 6, "new"),
    "cascade-overflow": lambda: OverflowSim(CascadeSim(2, 3, 4), 5),
}


@pytest.mark.parametrize("stride", [1, 26])
@pytest.mark.parametrize("kind", SUMS)
def test_one_layer_sums_step_by_step(kind: str, stride: int, tmp_path: Path) -> None:
    """Plain sums, per query where asked, overflow and evictions at a stride's end: a replay."""
    write_llama(tmp_path, num_layers=1)
    n, prompt_len = 70, 52
    tokens = random_tokens(n, 512)
    result = stream(
        load_model(tmp_path),
        tokens,
        prompt_len=prompt_len,
        stride=stride,
        make_sim=SUMS[kind],
        head_policy="homogeneous",
        decay=1.0,
        weight=1.0,
    )
    assert 1e-6 < result.closest_contest < math.inf
    cuts = strides(n, prompt_len, stride)
    hf = reference(tmp_path)
    kept, mu, logprobs = replay(hf, tokens, cuts, SUMS[kind](), 1.0, 1.0, "mean", slice(None))
    assert {end: layers[0][0] for end, layers in result.kept.items()} == kept
    for token in kept[n][2:]:
        assert result.scores[0][0, token].item() == pytest.approx(mu[token], abs=1e-4)
    expected = torch.tensor(logprobs)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-3, rtol=0)


def test_score_rule_is_stated_once(tmp_path: Path) -> None:
    model = load_model(write_llama(tmp_path))
    settings: dict[str, Any] = {"prompt_len": 40, "stride": 8, "make_sim": lambda: H2OSim(2, 9, 4)}
    tokens = random_tokens(40, 512)
    short = stream(model, tokens, **settings, gamma=0.75)
    long = stream(model, tokens, **settings, decay=0.75, weight=0.25)
    assert short.kept == long.kept and short.logprobs == long.logprobs
    for rule in ({}, {"decay": 0.5}, {"gamma": 0.5, "decay": 0.5, "weight": 0.5}):
        with pytest.raises(ValueError, match="gamma"):
            stream(model, tokens, **settings, **rule)


def test_kept_at(tmp_path: Path) -> None:
    write_llama(tmp_path)
    result = stream(
        load_model(tmp_path),
        random_tokens(30, 512),
        prompt_len=20,
        stride=4,
        make_sim=lambda: CascadeSim(2, 3, 4),
        head_policy="per_kv_head",
        gamma=paper_gamma(4),
        kept_at=[8, 30],
    )
    assert list(result.kept) == [8, 30]
    assert [[len(kept) for kept in layer] for layer in result.kept[30]] == [[14, 14], [14, 14]]


def test_positions_change_the_logits(tmp_path: Path) -> None:
    """The random models are sharp enough: rotating with another base is seen at once."""
    tokens = random_tokens(40, 512)
    logits = []
    for theta in (1e4, 2e4):
        path = write_llama(tmp_path / str(theta), rope_parameters={"rope_theta": theta})
        result = stream(
            load_model(path),
            tokens,
            prompt_len=40,
            stride=40,
            make_sim=lambda: WindowSim(0, 40),
            gamma=0.9,
        )
        logits.append(result.logits_last)
    assert (logits[0] - logits[1]).abs().max() > 0.1
