# SPDX-License-Identifier: Apache-2.0
"""``tools.compare.times`` pairs the steps of two engines and says how their times relate."""

import io
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.compare import checkouts, stepper, times


class Answers:
    """Stands for an engine's process: answers in order, and what was asked of both."""

    def __init__(self, name: str, steps: Iterable[str], asked: list[str]) -> None:
        self._name, self._steps, self._asked = name, iter(steps), asked

    def ask(self, command: str) -> str:
        self._asked.append(f"{self._name} {command}")
        return "added" if command.startswith("add") else next(self._steps)


def paired(ours: Iterable[str], theirs: Iterable[str]) -> tuple[times.Pairs, list[str]]:
    asked: list[str] = []
    both = [Answers("ours", ours, asked), Answers("theirs", theirs, asked)]
    return times.rounds(cast(list[times.Engine], both), 3), asked


def test_engines_step_in_turn() -> None:
    pairs, asked = paired(["4 reads", "2 decodes", "none"], ["5 reads", "1 decodes", "none"])
    assert pairs == {"reads": [(4.0, 5.0)], "decodes": [(2.0, 1.0)]}
    assert asked[:2] == ["ours add 3", "theirs add 3"]
    names = [line.split()[0] for line in asked[2:]]
    assert names == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_engines_that_do_different_work_are_not_timed() -> None:
    with pytest.raises(SystemExit, match="step 1: one engine decodes, the other none"):
        paired(["4 reads", "2 decodes"], ["5 reads", "none"])


def test_a_ratio_weighs_either_order_alike() -> None:
    """Three pairs in which this checkout steps first, two in which it steps second."""
    pairs = [(4.0, 1.0), (1.0, 1.0), (4.0, 1.0), (1.0, 1.0), (9.0, 1.0)]
    assert times.ratio(pairs) == 2.0
    assert times.ratio(pairs[:1]) == 4.0
    assert times.described("decodes", pairs) == "decodes 5 steps: 4.000 and 1.000 ms, +100.00 %"


def test_a_step_reads_until_every_prompt_has_an_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    added: list[tuple[str, list[int], int]] = []
    outputs = [["0"], ["0", "1"], ["0", "1"], []]

    def add_request(name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.ignore_eos
        added.append((name, prompt["prompt_token_ids"], params.max_tokens))

    engine = SimpleNamespace(
        add_request=add_request,
        has_unfinished_requests=lambda: len(outputs) > 1,
        step=lambda: [SimpleNamespace(request_id=name) for name in outputs.pop(0)],
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("add 7\n" + "step\n" * 4))
    stepper.answers(SimpleNamespace(llm_engine=engine), [[3, 4], [5]])
    first, *steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (first, added) == (["added"], [("0", [3, 4], 7), ("1", [5], 7)])
    assert [step[-1] for step in steps] == ["reads", "reads", "decodes", "none"]
    assert all(float(step[0]) >= 0 for step in steps[:3])


def test_one_token_is_no_decode_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert times.parse_args(["other", "--tokens", "2"]).tokens == 2
    with pytest.raises(SystemExit):
        times.parse_args(["other", "--tokens", "1"])
    assert "--tokens is below 2" in capsys.readouterr().err


@pytest.mark.slow
def test_this_checkout_beside_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--starts", "1", "--prompt", "520", "--requests", "2", "--tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["times", str(checkouts.HERE), *arguments, "--most", "1000"])
    assert times.main() == 0
    said = capsys.readouterr().out
    # Chunks end where strides of 256 do: three of each prompt. One request then decodes alone.
    assert "reads 6 steps" in said and "decodes 4 steps" in said, said
    assert "mean of the starts: reads" in said
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "-100"])
    assert times.main() == 1
