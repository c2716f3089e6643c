# SPDX-License-Identifier: Apache-2.0
"""Training, end to end at a tiny size: it learns, it goes on where it was, and its model loads."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import train_lm
from tests.conftest import BOOK


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "part.txt"
    assert BOOK is not None
    path.write_text(BOOK.read_text()[:60_000])
    return str(path)


def run(text: str, out: Path, *options: str) -> dict:
    """A short run; returns what training.json says."""
    train_lm.main(
        [
            *(text, "--out", str(out), "--vocab", "300", "--hidden", "32", "--layers", "1"),
            *("--heads", "2", "--kv-heads", "1", "--length", "128", "--batch", "4"),
            *("--warm-up", "5", "--rate", "0.01", "--no-compile", "--device", "cpu", *options),
        ]
    )
    return json.loads((out / "training.json").read_text())


def test_it_learns_and_resumes_as_if_never_interrupted(text: str, tmp_path: Path, capsys) -> None:
    whole = run(text, tmp_path / "whole", "--steps", "40", "--every", "20")
    first, last = whole["log"]
    assert (first["step"], last["step"]) == (20, 40)
    assert last["everything"] < first["everything"] < 5.0, "log(300) is 5.7"
    assert last["distant"] > 0 and last["everything"] != last["ordinary"]

    parts = tmp_path / "parts"
    with pytest.MonkeyPatch.context() as patch:
        step, stop_at = train_lm.Trainer.train_step, 20

        def interrupted(trainer, done):
            if trainer.step == stop_at:
                raise KeyboardInterrupt
            return step(trainer, done)

        patch.setattr(train_lm.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(text, parts, "--steps", "40", "--every", "20")
    capsys.readouterr()
    resumed = run(text, parts, "--steps", "40", "--every", "20")
    assert "Going on from step 20" in capsys.readouterr().out
    assert [entry["step"] for entry in resumed["log"]] == [20, 40], "the log goes on, too"
    for found, expected in zip(resumed["log"], whole["log"], strict=True):
        assert found["everything"] == pytest.approx(expected["everything"], abs=1e-4)


def test_the_model_loads_and_predicts_what_it_was_trained_on(text: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "model"
    made = run(text, out, "--steps", "30", "--every", "30")
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model.config.max_position_embeddings == 128
    ids = torch.tensor([tokenizer(Path(text).read_text())["input_ids"][:128]])
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss == pytest.approx(made["log"][-1]["ordinary"], abs=0.7)
    assert loss < 5.0, "log(300) is 5.7"


def test_held_out_texts_judge_and_are_not_trained_on(text: str, tmp_path: Path) -> None:
    digits = tmp_path / "digits.txt"
    digits.write_text("0123456789 " * 3000)
    both = str(tmp_path / "both")
    Path(both).mkdir()
    for source in (text, str(digits)):
        (Path(both) / Path(source).name).write_text(Path(source).read_text())
    options = ("--steps", "30", "--every", "30", "--repeat-share", "0", "--passkey-share", "0")
    unseen = run(both, tmp_path / "a", *options, "--held-out", "digits")
    seen = run(both, tmp_path / "b", *options, "--held-out", "part")
    assert unseen["log"][-1]["everything"] > 5.0, "digits were never seen"
    assert seen["log"][-1]["everything"] > 5.0, "letters were never seen"


def test_sequences_grow_with_the_tokens_of_a_step_unchanged(text: str, tmp_path: Path) -> None:
    shapes = []
    with pytest.MonkeyPatch.context() as patch:
        forward = train_lm.Trainer._token_losses

        def seen(trainer, tokens):
            if trainer.model.training:
                shapes.append(tuple(tokens.shape))
            return forward(trainer, tokens)

        patch.setattr(train_lm.Trainer, "_token_losses", seen)
        run(text, tmp_path, "--steps", "9", "--every", "9", "--warm-up", "0", "--grow-from", "32")
    assert shapes == [(16, 32)] * 3 + [(8, 64)] * 3 + [(4, 128)] * 3


def test_minutes_end_a_run(text: str, tmp_path: Path) -> None:
    made = run(text, tmp_path / "none", "--steps", "1000", "--minutes", "0")
    assert made["log"] == []
    assert list((tmp_path / "none").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--hidden", "33"], "multiple"), (["--held-out", "nothing"], "not among part")],
)
def test_refused(option: list[str], message: str, text: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(text, tmp_path, *option)
    assert message in capsys.readouterr().err + str(stopped.value)
