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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens=300"], "--tokens: too few for --recall units"),
        (["--sinks=12"], "--sinks: a multiple of --unit"),
    ],
)
def test_settings(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert message in capsys.readouterr().err


def test_positions_end() -> None:
    with pytest.raises(SystemExit, match="--tokens 1,000,000: the model has"):
        main([f"--model={MODEL}", "--tokens=1000000"])
