# SPDX-License-Identifier: Apache-2.0
"""The documents of the local lm-evaluation-harness tasks, made from the shipped book."""

import random
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

BOOK = Path(__file__).resolve().parent.parent / "books/persuasion.txt"
QUESTIONS = 60
CONTEXT_CHARACTERS = 2400
PIECES = 4
PIECE_CHARACTERS = 9000
SHORTEST = 60


def cloze(**_: Any) -> dict[str, Dataset]:
    """Passages with four next sentences to choose from, three of them from other places."""
    text = _text()
    rng = random.Random(0)
    sentences = [m for m in re.finditer(r"[A-Z][^.!?]*[.!?]", text) if len(m[0]) >= SHORTEST]
    later = [m for m in sentences if m.start() >= CONTEXT_CHARACTERS]
    rows = []
    for right in rng.sample(later, QUESTIONS):
        others = rng.sample([m[0] for m in sentences if m[0] != right[0]], 3)
        choices = [right[0], *others]
        rng.shuffle(choices)
        context = text[right.start() - CONTEXT_CHARACTERS : right.start()]
        rows.append({"context": context, "choices": choices, "gold": choices.index(right[0])})
    return {"test": Dataset.from_list(rows)}


def pieces(**_: Any) -> dict[str, Dataset]:
    """Long pieces, spread over the book."""
    text = _text()
    step = (len(text) - PIECE_CHARACTERS) // (PIECES - 1)
    rows = [{"text": text[begin : begin + PIECE_CHARACTERS]} for begin in range(0, len(text), step)]
    return {"test": Dataset.from_list(rows[:PIECES])}


def _text() -> str:
    return re.sub(r"\s+", " ", BOOK.read_text(encoding="utf-8"))
