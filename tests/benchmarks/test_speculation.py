# SPDX-License-Identifier: Apache-2.0
"""The benchmark of speculation: its requests, its clock and its tables."""

import inspect
import platform
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import speculation
from benchmarks.inputs import asked
from benchmarks.speculation import ARMS, Answer, Answers


class Words:
    """A tokenizer of words."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[str]]]:
        return {"input_ids": [text.split() for text in texts]}


BOOK = " ".join(f"It is sentence number {i}, and it ends here." for i in range(60))


@pytest.mark.parametrize("kind", asked.KINDS)
def test_requests(kind: str) -> None:
    made = asked.requests(kind, 5, BOOK, Words(), size=40)
    assert len({one.text for one in made}) == 5 and {one.kind for one in made} == {kind}
    with pytest.raises(ValueError, match=f"{kind}: there are .* requests, not 999"):
        asked.requests(kind, 999, BOOK, Words(), size=40)


def test_what_answers_repeat_stands_in_the_prompt() -> None:
    edits = asked.requests("edit", len(asked.FUNCTIONS), BOOK, Words())
    source = inspect.getsource(textwrap.indent)
    assert any(source in edit.text and "`indent_2`" in edit.text for edit in edits)
    for quote in asked.requests("quote", 4, BOOK, Words(), size=40):
        assert quote.answer.startswith('"It is') and quote.answer in quote.text
        assert len(quote.answer.split()) == asked.BEGINNING


class Engine:
    """Gives the numbers of tokens that it is told, a step each."""

    def __init__(self, *totals: int) -> None:
        self.totals = list(totals)

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert prompt == {"prompt_token_ids": [1, 2]} and params.max_tokens == 9

    def has_unfinished_requests(self) -> bool:
        return bool(self.totals)

    def step(self) -> list[Any]:
        num = self.totals.pop(0)
        outputs = [SimpleNamespace(token_ids=list(range(num)))]
        return [SimpleNamespace(outputs=outputs)] if num else []


@pytest.mark.parametrize(
    ("totals", "waits", "num"), [((0, 0, 1, 4, 9), 2, 2), ((1, 2), 1, 1), ((1,), 1, 0)]
)
def test_only_steps_after_the_first_token_are_timed(
    totals: tuple[int, ...], waits: int, num: int
) -> None:
    *none, answer = speculation.steps(Engine(*totals), [1, 2], 9, 0.0)
    assert none == [None] * waits
    assert answer is not None and answer.steps == num
    assert len(answer.tokens) == totals[-1] and (answer.seconds > 0) == (num > 0)


def made(seconds: dict[str, tuple[float, float, float]]) -> Answers:
    """Eleven tokens each, in so many seconds for an edit, a quote and another text."""
    return {
        arm: [
            (kind, Answer(list(range(11)), took, 5))
            for kind, took in zip(asked.KINDS, seconds[arm], strict=True)
        ]
        for arm in ARMS
    }


def test_steps_are_shown_apart_from_what_they_give() -> None:
    stock, drafted, policy, policy_drafted = ARMS
    answers = {
        stock: [Answer([0] * 11, 1.0, 10), Answer([0] * 31, 6.0, 30)],
        drafted: [Answer([0] * 11, 1.0, 10), Answer([0] * 31, 2.0, 10)],
        policy: [Answer([0] * 11, 1.0, 10), Answer([0], 0.0, 0)],
        policy_drafted: [Answer([0] * 11, 1.0, 5)],
    }
    found = {arm: [("other", one) for one in some] for arm, some in answers.items()}
    for some in found.values():
        some.extend([("edit", Answer([0] * 3, 1.0, 2)), ("quote", Answer([0] * 3, 1.0, 2))])
    table = speculation.step_table(found, speculation.parse_args(["--policy", "cascade"]))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["other text, stock"] == (
        "175.0 (100.0 to 200.0)", "150.0 (100.0 to 200.0)", "2.00 (1.00 to 3.00)"
    )  # fmt: skip
    assert rows["other text, cascade"] == ("100.0", "200.0", "2.00"), "one answer: no interval"


def test_the_note_says_whose_code_is_edited() -> None:
    found = made(dict.fromkeys(ARMS, (1, 1, 1)))
    note = speculation.speed_table(found, speculation.parse_args([])).note
    assert f"Python {platform.python_version()}" in note


def test_tables() -> None:
    stock, drafted, policy, policy_drafted = ARMS
    found = made(
        {stock: (4, 4, 4), drafted: (2, 2, 4), policy: (2, 2, 1), policy_drafted: (1, 1.2, 1.1)}
    )
    args = speculation.parse_args(["--requests", "1"])
    rows = {row[0]: row[1:] for row in speculation.speed_table(found, args).rows}
    assert rows["edits of code"] == ("2.5", "5.0", "2.00x", "2.00", "5.0", "10.0", "2.00x", "2.00")
    assert rows["text that repeats"][4:7] == ("5.0", "9.1", "1.82x")
    assert rows["other text"][:3] == ("2.5", "2.5", "1.00x")
    goals = speculation.goal_table(found).rows
    assert [row[1:] for row in goals] == [("1.82x", "yes"), ("1.82x", "no"), ("0.91x", "no")]
    found[policy_drafted][0] = "edit", Answer([5], 1.0, 1)
    assert speculation.same(found, policy) == 1 and speculation.same(found, stock) == 2
