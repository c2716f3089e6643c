# SPDX-License-Identifier: Apache-2.0
"""Recall: how a pass key is asked for, what counts as an answer, and who judges a cell."""

from typing import Any

import numpy as np
import pytest

from benchmarks import perplexity, recall
from benchmarks.inputs import pass_keys
from benchmarks.inputs.pass_keys import Hidden, digits_right, is_exact
from benchmarks.running.answers import as_tokens
from benchmarks.running.arms import Outcome
from benchmarks.running.engines import load_tokenizer
from benchmarks.running.scoring import Scored
from tests.conftest import MODEL

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = "It was a plain day and nothing of note was said by anyone. " * 60
CELLS = [(400, 0.25), (800, 0.25)]


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


def options(*more: str) -> Any:
    given = ["passkey", "--lengths", "400", "--depths", "0.25", "--samples", "3", *more]
    return recall.parse_args(given)


def test_pass_keys_are_hidden_where_asked(tokenizer: Any) -> None:
    prompts = recall.hidden(options(), tokenizer, TEXT)
    assert len({one.key for one in prompts}) == 3
    texts = [tokenizer.decode(one.prompt) for one in prompts]
    assert len({text[:40] for text in texts}) > 1, "each in another part of the text"
    for one, text in zip(prompts, texts, strict=True):
        assert 370 < len(one.prompt) <= 400
        assert 0.15 < text.index(f"key is {one.key}") / len(text) < 0.35
        assert text.endswith("What is the pass key? The pass key is")


def test_a_chat_asks_in_the_users_turn(tokenizer: Any) -> None:
    """The question is the last of what the user says, and the answer is still to come."""
    tokenizer.chat_template = TEMPLATE
    for one in recall.hidden(options("--chat"), tokenizer, TEXT):
        text = tokenizer.decode(one.prompt)
        assert text.endswith("What is the pass key?<|end|><|assistant|>")
        assert text.startswith("<|user|>") and text.count(f"key is {one.key}") == 1
        assert 370 < len(one.prompt) <= 400, "with all that the template adds"


def test_a_model_without_a_template_cannot_chat(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no chat template; leave --chat out"):
        as_tokens(tokenizer, "hello", chat=True)
    assert list(as_tokens(tokenizer, "hello", chat=False)) == tokenizer("hello")["input_ids"]


def test_too_short_for_a_needle(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="length 20: needle and question alone take"):
        recall.hidden(options("--lengths", "20"), tokenizer, TEXT)


def test_digits_and_exact_answers() -> None:
    assert digits_right(" 12345.", "12345") == 1.0 and is_exact(" 12345.", "12345")
    assert digits_right("The 5-digit pass key is 12345.", "12345") == 1.0
    assert digits_right("1 2 9 4", "12345") == pytest.approx(3 / 5)
    assert not is_exact("1 2 3 4 5", "12345") and not is_exact("123456", "12345")
    assert digits_right("none", "12345") == 0.0


def hidden(length: int, key: str) -> Hidden:
    return Hidden(length, 0.25, key, (1,) * length)


def test_full_attention_judges_the_cells() -> None:
    """The first it can do, the second it cannot, the third is beyond its positions."""
    cells = [*CELLS, (9000, 0.25)]
    prompts = [hidden(length, key) for length, _ in cells for key in ("12345", "67890")]
    given = {
        "sink": ["12345", "60000", "no", "67", "no", "no"],
        "full": ["12345", "It is 67890.", "11111", "no"],
    }
    asked = {"sink": prompts, "full": prompts[:4]}
    found = recall.shares(given, asked)
    table = recall.pass_key_table(found, cells, 2, {"dgc": "ValueError: too small"})
    assert table.columns[1:] == (
        "400 tokens, depth 0.25",
        "800 tokens, depth 0.25 †",
        "9,000 tokens, depth 0.25 ‡",
    )
    assert table.rows[0] == ("sink", "70% / 50%", "20% / 0%", "0% / 0%")
    assert table.rows[1] == ("full", "100% / 100%", "10% / 0%", "-")
    assert table.rows[2][:2] == ("dgc", "failed: ValueError: too small")
    assert "finds less than 50% of the digits" in table.note and "not judged" in table.note
    assert "cannot do the task" not in table.note


@pytest.mark.parametrize(("gain", "able"), [(0.02, False), (2.0, True)])
def test_a_model_that_cannot_recall_is_called_so(gain: float, able: bool) -> None:
    rng = np.random.default_rng(0)
    gains = {
        name: {CELLS[0]: rng.normal(mean, 0.001, 10)}
        for name, mean in (("sink", 3), ("full", gain))
    }
    table = recall.associative_table(gains, CELLS[:1], 9.0, 10, {})
    assert ("cannot do the task" in table.note) != able
    assert ("†" in table.columns[1]) != able, "whatever sink gains"
    assert float(table.rows[1][1].split()[0]) == pytest.approx(gain, abs=0.005)


def test_places_of_a_rewind_are_resampled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a place share its context: only the places are independent."""
    again, places = 200, 3

    def score(work: Any, jobs: Any, args: Any) -> Outcome[Scored]:
        def of(label: str) -> Scored:
            gains = (0.0,) * places if label == "sink" else (0.1, 0.2, 0.6)
            values = [np.full(again - 1, 2.0 - gain) for gain in gains]
            return Scored(label, [*values, *values], 1.0, {}, 1)

        return Outcome({job.label: of(job.label) for job in jobs}, {})

    monkeypatch.setattr(recall.results, "run_arms", score)
    words = ["rewind", "--policies", "sink", "cascade", "--samples", f"{places}"]
    words += ["--burn-in", "600", "--back", "300", "--again", f"{again}", "--dtype", "float32"]
    (table,), _, _ = recall.rewind(recall.parse_args(words))
    row = next(row for row in table.rows if row[0] == "cascade")
    assert row[-1] == "-0.3000 (-0.6000 to -0.1000)", "of three places the extremes are likely"
    assert "over whole places" in table.note


def test_full_is_asked_what_its_positions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get every prompt; all of them land in the table."""
    monkeypatch.setattr(perplexity, "native_positions", lambda model: 500)
    asked = {}

    def answer(work: Any, jobs: Any, args: Any) -> Outcome[list[str]]:
        asked.update({job.label: job for job in jobs})
        return Outcome({job.label: ["none"] * len(job.prompts) for job in jobs}, {})

    monkeypatch.setattr(recall.results, "run_arms", answer)
    args = options("--lengths", "400", "700", "--policies", "sink", "--dtype", "float32")
    (table,), _, failed = recall.passkey(args)
    assert len(asked["sink"].prompts) == 6 and len(asked["full"].prompts) == 3
    assert asked["full"].engine.max_model_len == 500 and not failed
    assert asked["sink"].engine.max_model_len == 700 + recall.ANSWER_TOKENS
    assert [row[2] for row in table.rows] == ["0% / 0%", "-"]
    assert pass_keys.DIGITS == 5
