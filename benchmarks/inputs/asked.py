# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers repeat their prompt, and others: what speculation with n-grams can do."""

import colorsys
import inspect
import shlex
import statistics
import string
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from benchmarks.inputs.texts import passages

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(colorsys.rgb_to_hls, textwrap.indent, statistics.median, colorsys.rgb_to_hsv, shlex.split),
    *(string.capwords, colorsys.hsv_to_rgb, statistics.median_high, shlex.quote),
    *(colorsys.hls_to_rgb, statistics.median_low, textwrap.dedent),
)
"""Of Python's own library, whose sources everyone has; another version may have other ones."""

SUBJECTS = (
    *("a lighthouse keeper and a storm", "two sisters who open a bakery", "a lost dog"),
    *("how rain forms", "why cities have parks", "how to learn to swim", "what makes music sad"),
    *("the history of bread", "a walk in the mountains", "how bridges are built"),
    *("a letter to a friend who moved away", "the first day at a new school"),
)

KINDS = ("edit", "quote", "other")
REPEATS = ("edit", "quote")
"""Kinds whose answers repeat parts of the prompt."""


BEGINNING = 12
"""Words of a passage with which its quote begins: small models quote only then."""


@dataclass(frozen=True)
class Request:
    """What a user writes, and how the answer begins."""

    kind: str
    text: str
    answer: str = ""


def requests(kind: str, num: int, book: str, tokenizer: Any, size: int = 160) -> list[Request]:
    """``num`` requests of a kind.

    Args:
        book: a text, for quotes.
        size: tokens of a quoted passage, at most.

    Raises:
        ValueError: there are fewer.
    """
    made = list(islice(_of_kind(kind, book, tokenizer, size), num))
    if len(made) < num:
        raise ValueError(f"{kind}: there are {len(made)} requests, not {num}")
    return made


def _of_kind(kind: str, book: str, tokenizer: Any, size: int) -> Iterator[Request]:
    if kind == "edit":
        for one in FUNCTIONS:
            yield Request(
                kind,
                f"Here is a function:\n\n```python\n{inspect.getsource(one)}```\n\nRename the "
                f"function to `{one.__name__}_2` and write the whole code again.",
            )
    elif kind == "quote":
        for passage in passages(book, tokenizer, size):
            begin = " ".join(passage.split()[:BEGINNING])
            yield Request(kind, f'Quote this passage in full:\n\n"{passage}"', f'"{begin}')
    else:
        for subject in SUBJECTS:
            yield Request(kind, f"Write a long text about this subject: {subject}.")
