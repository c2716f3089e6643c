# SPDX-License-Identifier: Apache-2.0
"""Pass keys: numbers hidden in long texts, and what of them stands in an answer."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any

import numpy as np

DIGITS = 5
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
COMPLETED = "{text}\nWhat is the pass key? The pass key is"
"""A model that goes on with a text gets the beginning of the answer."""
ASKED = "Read this text. A pass key is hidden in it.\n\n{text}\n\nWhat is the pass key?"
"""One that answers gets a question, as the whole of the user's turn."""
SEAMS = 8
"""Tokens that joined parts of a text may have more than the parts."""


@dataclass(frozen=True)
class Hidden:
    """A prompt's tokens, and the number that is hidden in it.

    Attributes:
        length, depth: the cell it belongs to: tokens at most, and where in the text the number is.
    """

    length: int
    depth: float
    key: str
    prompt: tuple[int, ...]


def hide(
    tokenizer: Any,
    text: str,
    to_prompt: Callable[[str], tuple[int, ...]],
    question: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int,
) -> list[Hidden]:
    """A number at every length and depth, ``samples`` times, each in another part of the text.

    Args:
        to_prompt: tokens of a question with its text: as they are, or as a user's turn.
        question: ``COMPLETED`` or ``ASKED``.

    Raises:
        ValueError: a length with no room for a text.
    """
    rng = np.random.default_rng(seed)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    around = len(to_prompt(question.format(text=NEEDLE.format(key="0" * DIGITS)))) + SEAMS
    made = []
    for length in lengths:
        if length <= around:
            raise ValueError(f"length {length}: needle and question alone take {around} tokens")
        for depth, _ in product(depths, range(samples)):
            key = "".join(str(digit) for digit in rng.integers(0, 10, DIGITS))
            begin = int(rng.integers(len(tokens)))
            filler = list(islice(cycle(tokens), begin, begin + length - around))
            place = int(depth * len(filler))
            head, tail = tokenizer.decode(filler[:place]), tokenizer.decode(filler[place:])
            prompt = to_prompt(question.format(text=head + NEEDLE.format(key=key) + tail))
            made.append(Hidden(length, depth, key, prompt))
    return made


def is_exact(answer: str, key: str) -> bool:
    """Whether the answer says the key, and not only a number that contains it."""
    return key in re.findall(r"\d+", answer)


def digits_right(answer: str, key: str) -> float:
    """Share of the key's digits that stand at their place among the first ones of the answer."""
    if is_exact(answer, key):
        return 1.0
    found = [char for char in answer if char.isdigit()][: len(key)]
    return sum(a == b for a, b in zip(found, key, strict=False)) / len(key)
