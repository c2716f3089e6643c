# SPDX-License-Identifier: Apache-2.0
"""What the judge of recall finds: sums by hand, a planted lookup, and a whole run."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recall_judge
from benchmarks.recall_judge import Found, Layer, judge_layer, main, parse_args
from tests.conftest import MODEL

SIZES = ["--sinks=8", "--window=24", "--unit=4", "--recall=2", "--stride=16", "--every=1"]

SIZES_OF_STORES = ["16 to 32", "32 to 64", "64 to 128", "128 to 256"]


def test_sums() -> None:
    """Two heads, one query, four units."""
    found = Found()
    attention = torch.tensor([[[0.5, 0.0, 0.1, 0.05]], [[0.0, 0.3, 0.02, 0.09]]])
    found.add(attention, torch.tensor([0, 2]))
    assert found.mass == pytest.approx((0.5 + 0.12) / 2)
    assert found.most == pytest.approx((0.5 + 0.3) / 2)
    assert found.all == pytest.approx((0.65 + 0.41) / 2)
    assert (found.lookups, found.found) == (3, 2)
    found.compare(torch.tensor([0.25, 1.0, 0.75, 0.5]), torch.tensor([2, 3]))
    found.compare(torch.tensor([1.0, 0.0]), torch.tensor([0]))
    assert found.worth == pytest.approx(1.25 / 1.75 + 1) and found.selections == 2


def planted(to: int, turned: list[list[int]] | None = None) -> Layer:
    """Every query asks for token ``to``, from token 64 on; positions do not matter.

    Args:
        turned: the positions of every rotation are added.
    """
    torch.manual_seed(0)
    key, query = torch.randn(1, 120, 8) * 0.3, torch.zeros(2, 120, 8)
    key[0, to] = query[:, 64:] = 2

    def turn(vectors: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if turned is not None:
            turned.append(position.tolist())
        return vectors

    return Layer(query, key, turn)


@pytest.mark.parametrize("to", [8, 21])
def test_a_planted_lookup_is_found(to: int) -> None:
    args, found = parse_args(SIZES), {}
    judge_layer(planted(to), args, found)
    assert {who for who, _ in found} == {"a stride of 16", "one token"}
    assert {size for _, size in found} == {16, 32, 64}, "16, 32, 48 and 64 tokens are stored"
    for (_, size), one in found.items():
        if size > 16:  # the first stride asks for nothing
            assert one.found > 0 and one.mass > 0.9 * one.most


def test_where_keys_are_judged() -> None:
    """In the middle of two recalled units of 4 tokens, behind 8 sinks and before 24 tokens."""
    turned: list[list[int]] = []
    recall_judge.Store(planted(8, turned), 8, 24, 4, 2).choose(12, 64, 80)
    assert turned == [list(range(40, 56)), list(range(8)), list(range(28, 44))]


def test_what_was_not_evicted_is_no_lookup() -> None:
    """A sink, and a token that the window still holds."""
    for to in (3, 60):
        args, found = parse_args(SIZES), {}
        judge_layer(planted(to), args, found)
        first = found["a stride of 16", 32]
        assert first.found == 0 and first.all < 0.2


def test_units_of_other_texts() -> None:
    """They stand before the text's own, and count as stored."""
    layer, args, found = planted(21), parse_args(SIZES), {}
    others = torch.zeros(1, 402, 8)  # the last 2 are no whole unit
    others[:, 40:44] = 2.0
    store = recall_judge.Store(layer, 8, 24, 4, 3, others)
    chosen, worth = store.choose(12, 64, 80)
    # Unit 10 of the other text is four strong keys, and unit 3 of the text's own has one. What
    # continues them is worth an eighth of them.
    assert chosen.tolist() == [10, 11, 100 + 3] and len(worth) == 100 + 12
    assert worth[11] == worth[10] / 8 and worth[104] == worth[103] / 8
    rest = [u for u in range(112) if u not in (10, 11, 103, 104)]
    assert worth[10] > worth[103] > 10 * worth[rest].max()
    judge_layer(layer, args, found, others)
    assert {size for _, size in found} == {256}, "400 tokens and at most 64"
    for one in found.values():
        assert one.selections > 0 and one.worth == pytest.approx(one.selections)
        assert one.lookups == 0, "there is no full attention to tell them"


def test_candidates_may_miss_what_all_keys_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units whose keys point both ways, so that their mean looks like nothing."""
    layer = planted(21)
    layer.key[0, 20:24] = torch.tensor([2.0, -2.2, 2.0, -2.2]).unsqueeze(1)
    others = torch.randn(1, 400, 8) * 0.1
    store = recall_judge.Store(layer, 8, 24, 4, 2, others)
    monkeypatch.setattr(recall_judge, "Store", lambda *args: store)
    shares = []
    for candidates in (1000, 50):
        monkeypatch.setattr(recall_judge.judge, "CANDIDATES", candidates)
        if candidates == 50:
            for chunk in store._log.chunks:
                chunk.spread.zero_()
        found: dict[tuple[str, int], Found] = {}
        judge_layer(layer, parse_args(SIZES), found, others)
        one = found["one token", 256]
        shares.append(one.worth / one.selections)
    assert shares[0] == pytest.approx(1) and shares[1] < 0.6


def test_the_keys_of_other_texts(tmp_path: Path) -> None:
    """The model's own, of pieces of the texts in turn, less the sinks of each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    texts = {"a.txt": list(range(100, 250)), "b.txt": list(range(300, 430))}
    for name, token_ids in texts.items():
        (tmp_path / name).write_text(" ".join(map(str, token_ids)), "utf-8")

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    flags = ["--tokens=60", f"--others={tmp_path}", "--layers=1"]
    small = ["--sinks=4", "--window=8", "--unit=4", "--recall=2", "--stride=8"]
    args = parse_args([*flags, *small, "--beside=120"])
    keys = recall_judge.keys_beside(model, tokenizer, args)
    pieces = [texts["a.txt"][:60], texts["b.txt"][:60], texts["a.txt"][60:120]]
    expected = [[layer.key[:, 4:] for layer in recall_judge.layers_of(model, p, 1)] for p in pieces]
    assert len(keys) == len(expected[0]) > 1
    for mine, theirs in zip(keys, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(theirs, dim=1)[:, :120], atol=0, rtol=0)
    args.beside = [4, 300]
    with pytest.raises(SystemExit, match="--beside 300: --others have 224 tokens"):
        recall_judge.keys_beside(model, tokenizer, args)


def test_full_attention_is_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(range(5, 45))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), output_attentions=True).attentions
    for layer, of_model in zip(recall_judge.layers_of(model, tokens, 1), expected, strict=True):
        torch.testing.assert_close(layer.attention(16, 40), of_model[0][:, 16:], atol=1e-5, rtol=0)


def test_a_run(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "judge.json"
    text.write_text("The ship left the harbour in the morning. " * 60, "utf-8")
    run = [f"--model={MODEL}", f"--data={text}", "--tokens=200", f"--out={out}", *SIZES]
    main(run)
    (table,) = json.loads(out.read_text("utf-8"))["tables"]
    assert [row[0] for row in table["rows"]] == SIZES_OF_STORES * 2
    assert all(0 < float(row[2].rstrip("%")) <= 100 for row in table["rows"])
    main([*run, "--beside=300", f"--others={text}"])
    (table,) = json.loads(out.read_text("utf-8"))["tables"]
    assert [row[0] for row in table["rows"]] == ["256 to 512"] * 2
    assert table["columns"][2:] == ["of the worth of all keys' choice", "selections"]
    assert [row[2] for row in table["rows"]] == ["100.0%"] * 2, "less than 512 units"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens=300"], "--tokens: too few for --recall units"),
        (["--sinks=12"], "--sinks: a multiple of --unit"),
        (["--beside=100"], "--beside: name texts other than --data with --others"),
    ],
)
def test_settings(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert message in capsys.readouterr().err


def test_positions_end() -> None:
    with pytest.raises(SystemExit, match="--tokens 1,000,000: the model has"):
        main([f"--model={MODEL}", "--tokens=1000000"])
