# SPDX-License-Identifier: Apache-2.0
"""The study of judges, on a tiny random Llama: attention, evidence and counts by other means."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import judges
from benchmarks.judges import JUDGES, Found, Judge, Layer, Place, parse_args
from tests.conftest import MODEL

UNIT = 4
AWAY = 10


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    made = LlamaForCausalLM(config).eval()
    for block in made.model.layers:  # sharper than fresh weights, whose attention is even
        for name in ("q_proj", "k_proj"):
            getattr(block.self_attn, name).weight.data *= 30
    return made


@pytest.fixture(scope="module")
def layers(model) -> list[Layer]:
    token_ids = np.random.default_rng(1).integers(0, 64, 60).tolist()
    return list(judges.layers_of(model, token_ids, 1))


def test_attention_is_the_models(model, layers: list[Layer]) -> None:
    token_ids = np.random.default_rng(1).integers(0, 64, 60).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([token_ids]), output_attentions=True).attentions
    for layer, wanted in zip(layers, theirs, strict=True):
        assert wanted.max() > 0.5  # sharp enough to tell a wrong rotation
        torch.testing.assert_close(layer.attention(40, 60), wanted[0, :, 40:60], rtol=0, atol=1e-5)


def places(layers: list[Layer], **settings: int) -> tuple[list[Place], object]:
    sizes = {"tokens": 60, "sinks": 4, "window": 10, "unit": UNIT, "recall": 2, "stride": 12}
    words = [w for k, v in {**sizes, "every": 1, **settings}.items() for w in (f"--{k}", str(v))]
    args = parse_args(words)
    return [place for layer in layers for place in judges.places_of(layer, args)], args


def test_places_hold_what_left_the_window(layers: list[Layer]) -> None:
    found, args = places(layers[:1])
    assert [(place.begin, place.units) for place in found] == [(36, 5), (48, 8)]
    place, attention = found[0], layers[0].attention(36, 48)
    for number in range(place.units):
        first = args.sinks + number * UNIT
        wanted = attention[..., first : first + UNIT].sum(-1)
        torch.testing.assert_close(place.mass[..., number], wanted)
    for token in range(place.units * UNIT):
        near = sum(
            layers[0].attention(query, query + 1)[:, 0, token + args.sinks]
            for query in range(token + args.sinks, min(48, token + args.window))
        )
        torch.testing.assert_close(place.busy[:, token], near, rtol=0, atol=1e-5)


def literal(place: Place, bits: int, num_queries: int) -> torch.Tensor:
    """The plugin's judge, key by key, in fp64: ``[H, units]``."""
    layer, asked = place.layer, []
    levels = 2 ** (bits - 1) - 1
    ends = [(i + 1) * (place.end - place.begin) // num_queries - 1 for i in range(num_queries)]
    for head in range(len(layer.query)):
        shares = []
        for end in ends:
            logits = []
            for token in range(place.first, place.first + place.units * UNIT):
                key = layer.key[head // layer.group, token].double()
                step = key.abs().max() / levels
                query = layer.query[head, place.begin + end][None]
                query = layer.turn(query, torch.tensor([end + AWAY]))[0].double()
                logits.append(query @ ((key / step).round() * step))
            probs = torch.stack(logits).softmax(0).view(-1, UNIT)
            worth = probs.max(1).values + probs.mean(1)
            shares.append(worth / worth.sum())
        asked.append(torch.stack(shares).max(0).values)
    return torch.stack(asked)


@pytest.mark.parametrize("bits", [8, 4])
def test_evidence(layers: list[Layer], bits: int) -> None:
    for place in places(layers)[0]:
        wanted = literal(place, bits, 3)
        ours = judges.evidence(Judge(bits=bits, queries=3), place, UNIT, AWAY).flatten(0, 1)
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=2e-5)
        mean = torch.zeros_like(wanted, dtype=torch.bool)
        mean[:, wanted.mean(0).topk(2).indices] = True
        assert torch.equal(judges.chosen(Judge(bits=bits, queries=3), place, UNIT, AWAY, 2), mean)


def test_every_judge_differs_from_the_plugins_in_one_thing(layers: list[Layer]) -> None:
    """And each of them changes what is found: none silently does nothing."""
    plain, unit = Judge(), 8
    place = places(layers, unit=unit, window=12, stride=20)[0][-1]
    few = judges.evidence(replace(plain, queries=4), place, unit, AWAY)
    for name, judge in list(JUDGES.items())[1:]:
        changed = {k for k, v in vars(judge).items() if v != getattr(plain, k)}
        assert len(changed) == 1, name
        if changed == {"heads"}:
            continue
        asks = judge if changed == {"queries"} else replace(judge, queries=4)
        assert not torch.equal(judges.evidence(asks, place, unit, AWAY), few), name


def test_who_chooses(layers: list[Layer]) -> None:
    """Heads together by their mean or the best of them, or each KV head by its own."""
    place = places(layers)[0][-1]
    asked = judges.evidence(Judge(), place, UNIT, AWAY)
    for heads, wanted in (
        ("shared", asked.flatten(0, 1).mean(0).expand(4, -1)),
        ("shared, best", asked.flatten(0, 1).amax(0).expand(4, -1)),
        ("per KV head", torch.stack([asked[0].mean(0)] * 2 + [asked[1].mean(0)] * 2)),
    ):
        here = judges.chosen(Judge(heads=heads), place, UNIT, AWAY, 2)
        for row, values in zip(here, wanted, strict=True):
            assert set(row.nonzero().flatten().tolist()) == set(values.topk(2).indices.tolist())


def test_what_is_counted() -> None:
    """Two heads, one query, three units; the best unit for both is the last."""
    mass = torch.tensor([[[0.3, 0.0, 0.2]], [[0.0, 0.05, 0.4]]])
    place = Place(None, 0, 1, 0, 3, mass, torch.zeros(0))  # type: ignore[arg-type]
    found = Found()
    found.add(place, torch.tensor([[True, False, False], [False, False, True]]), 1)
    assert (found.lookups, found.found) == (2, 2)
    assert found.mass == pytest.approx(0.7) and found.most == pytest.approx(0.6)
    found.add(place, torch.tensor([[False, True, False]] * 2), 1)
    assert (found.lookups, found.found) == (4, 2)
    assert found.mass == pytest.approx(0.75) and found.most == pytest.approx(1.2)


def test_bytes() -> None:
    sizes = {name: judge.bytes_a_key(64, 16) for name, judge in JUDGES.items()}
    assert (sizes["8 bits (the plugin's)"], sizes["32 bits"], sizes["4 bits"]) == (68, 256, 36)
    assert (sizes["4 busiest keys"], sizes["one mean key"]) == (17, 4.25)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "600"], "too few for --recall units"),
        (["--model", str(MODEL), "--tokens", "5000"], "the model has 1,024 positions"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        judges.main(words)
    assert message in f"{refused.value} {capsys.readouterr().err}"


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "judges.json"
    sizes = ["--tokens", "900", "--window", "200", "--recall", "4", "--layers", "2"]
    judges.main(["--model", str(MODEL), *sizes, "--out", str(out)])
    made = json.loads(out.read_text())["data"]
    assert set(made["judges"]) == set(JUDGES) and made["places"] > 0
    shares = {name: one["mass"] / one["most"] for name, one in made["judges"].items()}
    assert all(0 < share <= 1.2 for share in shares.values())
    assert shares["8 bits (the plugin's)"] == pytest.approx(shares["32 bits"], abs=0.02)
