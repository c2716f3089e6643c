# SPDX-License-Identifier: Apache-2.0
"""RULER's documents (arXiv 2404.06654) without a network: lm-evaluation-harness makes them.

Its generators run as they are. Two things that they download are replaced: the essays around the
needles by a novel, and NLTK's sentence splitter by a regular expression. The two tasks that need a
data set of questions (``qa_squad``, ``qa_hotpot``) are left out.
"""

import contextlib
import functools
import io
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

ESSAY, REPEAT, NEEDLE = "essay", "repeat", "needle"


def _needles(haystack: str, key: str, value: str, **counts: int) -> dict[str, Any]:
    names = {"type_haystack": haystack, "type_needle_k": key, "type_needle_v": value}
    return {**names, **counts}


NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": _needles(REPEAT, "words", "numbers"),
    "niah_single_2": _needles(ESSAY, "words", "numbers"),
    "niah_single_3": _needles(ESSAY, "words", "uuids"),
    "niah_multikey_1": _needles(ESSAY, "words", "numbers", num_needle_k=4),
    "niah_multikey_2": _needles(NEEDLE, "words", "numbers"),
    "niah_multikey_3": _needles(NEEDLE, "uuids", "uuids"),
    "niah_multivalue": _needles(ESSAY, "words", "numbers", num_needle_v=4),
    "niah_multiquery": _needles(ESSAY, "words", "numbers", num_needle_q=4),
}
"""Settings of the tasks that hide needles, as in the harness."""

ANSWER_TOKENS = {**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50}
"""All tasks, and the most tokens of an answer."""

SLACK = 32
"""Tokens by which the prompts of a task may differ: a key of more tokens, a longer question."""
SPARE = 4
"""Documents made beyond those asked for, in case that some do not fit."""
SEED = 42
SHORTEST = 1024

ToPrompt = Callable[[str, str], Sequence[int]]
"""From a question with its text, and the beginning of the answer, to tokens."""


@dataclass(frozen=True)
class Document:
    """A prompt and what its answer must contain.

    Attributes:
        length: most tokens of prompt and answer together.
        answers: strings; the score is the share of them that the answer contains.
        max_tokens: most tokens of the answer.
    """

    task: str
    length: int
    prompt: tuple[int, ...] = field(repr=False)
    answers: tuple[str, ...]
    max_tokens: int


def score(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that stand in the answer, in whatever case."""
    return sum(one.lower() in answer.lower() for one in expected) / len(expected)


def documents(
    task: str,
    length: int,
    count: int,
    tokenizer: Any,
    to_prompt: ToPrompt,
    novel: str,
    seed: int = SEED,
) -> list[Document]:
    """Documents of a task. The first ones do not depend on how many are asked for.

    Args:
        length: most tokens of a prompt with its answer.
        novel: the haystack; repeated if it is too short.
        seed: draws needles, places and words; other seeds give other documents.

    Raises:
        ValueError: fewer than ``count`` documents of this length can be made.
    """
    if length < SHORTEST:  # some generators would not end
        raise ValueError(f"RULER's documents have at least {SHORTEST:,} tokens, not {length:,}")
    words = re.sub(r"\s+", " ", novel.strip()).split(" ")
    words *= length // len(words) + 1

    def make(more: int, number: int) -> list[Document]:
        made = _generate(task, _counting(tokenizer, more), length, number, words, seed)
        return [
            Document(
                task,
                length,
                tuple(to_prompt(one["input"], one["gen_prefix"])),
                tuple(one["outputs"]),
                ANSWER_TOKENS[task],
            )
            for one in made
        ]

    # The generators count neither a chat template nor the beginning of the answer.
    (probe,) = make(0, 1)
    over = max(len(probe.prompt) + probe.max_tokens - length + SLACK, 0)
    made = make(over, count + SPARE)
    fitting = [one for one in made if len(one.prompt) + one.max_tokens <= length][:count]
    if len(fitting) < count:
        raise ValueError(f"{task}: {len(fitting)} of {count} documents fit {length:,} tokens")
    return fitting


def _counting(tokenizer: Any, more: int) -> Callable[[str], Any]:
    """A tokenizer for lengths alone: every text has ``more`` tokens more than it has."""
    return lambda text: SimpleNamespace(input_ids=[*tokenizer(text)["input_ids"], *[0] * more])


def _generate(
    task: str, tokenizer: Any, length: int, count: int, words: list[str], seed: int
) -> list[dict[str, Any]]:
    """The harness's own documents: ``input``, ``gen_prefix``, ``outputs``."""
    import numpy as np

    made = _generators()
    seed = zlib.crc32(f"{seed} {task} {length}".encode())
    random.seed(seed)
    np.random.seed(seed)
    made.cwe.RNG.seed(seed)
    # Some report their progress in hundreds of lines.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if task == "vt":
            track = functools.partial(made.vt.sys_vartrack_w_noise_random, tokenizer)
            (example,) = track(num_samples=1, max_seq_length=500, incremental=5)
            return track(num_samples=count, max_seq_length=length, icl_example=example)
        if task == "cwe":
            return made.cwe.sys_word_pair_random(count, length, tokenizer)
        if task == "fwe":
            return made.fwe.sys_kwext(tokenizer, length, num_samples=count)
        settings = NEEDLES[task]
        kind = settings["type_haystack"]
        return made.niah.generate_samples(
            words if kind == ESSAY else made.niah.get_haystack(kind),
            TOKENIZER=tokenizer,
            max_seq_length=length,
            num_samples=count,
            tokens_to_generate=ANSWER_TOKENS[task],
            template=made.template,
            **settings,
        )


@functools.cache
def _generators() -> SimpleNamespace:
    """The harness's modules; importing them downloads nothing.

    Raises:
        RuntimeError: a package is missing.
    """
    try:
        import nltk

        with mock.patch.object(nltk.data, "find"):  # else it looks for a download, then downloads
            from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
    except ImportError as error:
        raise RuntimeError('RULER needs the extra: pip install -e ".[bench]"') from error
    prepare_niah.cached_sent_tokenize = sentences
    return SimpleNamespace(
        niah=prepare_niah,
        template=niah_utils.TEMPLATE,
        vt=vt_utils,
        cwe=cwe_utils,
        fwe=fwe_utils,
    )


@functools.lru_cache(maxsize=16)
def sentences(text: str) -> list[str]:
    """A text's sentences: they end with ``.``, ``!`` or ``?`` and perhaps a closing quote."""
    return re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"”’'])\s+", text.strip())
