# SPDX-License-Identifier: Apache-2.0
"""Numbers hidden in a text, and asked for in the user's turn once the text has been read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DIGITS = 5
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key that the text above names? Answer with the number alone."
_PLACE = "<<the text>>"


@dataclass(frozen=True)
class PassKey:
    """A prompt in two parts, so that a cache can be bounded before the question is known.

    Attributes:
        depth: where in the text the number stands, 0 to 1.
    """

    depth: float
    key: str
    context: list[int]
    question: list[int]


def pass_keys(
    tokenizer: Any,
    text: Sequence[int],
    length: int,
    depths: Sequence[float],
    samples: int,
    seed: int = 0,
) -> list[PassKey]:
    """``samples`` prompts a depth, each in another part of the text.

    Args:
        tokenizer: of transformers, with a chat template.
        text: token ids of what stands around the number.
        length: tokens of every context, the beginning of the chat included.

    Raises:
        ValueError: a length with no room for the number, or more than the text has; no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model has no chat template, so it cannot be asked")
    rng = np.random.default_rng(seed)
    before, after = (_ids(tokenizer, part) for part in _turn(tokenizer).split(_PLACE))
    question = _ids(tokenizer, QUESTION) + after
    made = []
    for depth in depths:
        for _ in range(samples):
            key = "".join(map(str, rng.integers(0, 10, DIGITS)))
            needle = _ids(tokenizer, NEEDLE.format(key=key))
            room = length - len(before) - len(needle)
            if not 0 < room <= len(text):
                raise ValueError(f"length {length}: no room, or more than {len(text)} tokens")
            start = int(rng.integers(len(text) - room + 1))
            filler = list(text[start : start + room])
            place = int(depth * room)
            context = [*before, *filler[:place], *needle, *filler[place:]]
            made.append(PassKey(depth, key, context, question))
    return made


def _turn(tokenizer: Any) -> str:
    """A user's turn and the beginning of the answer, around a mark for the text."""
    messages = [{"role": "user", "content": _PLACE}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def exact(answer: str, key: str) -> bool:
    """Whether the answer's first number is the key."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == key


def digits_right(answer: str, key: str) -> float:
    """Share of the key's digits that stand at their place among the first ones of the answer."""
    found = [char for char in answer if char.isdigit()][: len(key)]
    return sum(a == b for a, b in zip(found, key, strict=False)) / len(key)
