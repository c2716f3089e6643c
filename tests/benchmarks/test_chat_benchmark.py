# SPDX-License-Identifier: Apache-2.0
"""The chat benchmark: its arithmetic, and that unequal answers are an error."""

import json
from pathlib import Path

import pytest

from benchmarks import chat
from benchmarks.chat import Turn


def fake(seconds: float, cached: int, logprob: float = -1.0) -> list[Turn]:
    return [Turn(100 * (t + 1), cached * t, seconds * (t + 1), [7], [logprob]) for t in range(3)]


def test_medians_by_turn() -> None:
    cold = [fake(0.1, 0), fake(0.3, 0), fake(0.2, 0)]
    rows = chat.numbers(cold, [fake(0.01, 64), fake(0.05, 64), fake(0.02, 64)])
    assert [row["prompt_tokens"] for row in rows] == [100, 200, 300]
    assert [row["cached_tokens"] for row in rows] == [0, 64, 128]
    assert rows[2]["ttft_ms_without"] == pytest.approx(600)
    assert rows[2]["ttft_ms_with"] == pytest.approx(60)
    assert all(row["same_tokens"] and row["same_logprobs"] for row in rows)


@pytest.mark.parametrize("other", [-1.0, -1.0000001])
def test_answers_that_differ_are_an_error(
    other: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    chats = {False: [fake(0.2, 0)], True: [fake(0.1, 64, other)]}
    monkeypatch.setattr(chat, "measure", lambda args, tokens, caching: chats[caching])
    out = tmp_path / "chat.json"
    if other == -1.0:
        chat.main(["--out", str(out)])
    else:
        with pytest.raises(SystemExit, match="not those without"):
            chat.main(["--out", str(out)])
    assert ("DIFFERENT" in capsys.readouterr().out) == (other != -1.0)
    assert json.loads(out.read_text())["data"]["turns"][1]["cached_tokens"] == 64
