# SPDX-License-Identifier: Apache-2.0
"""RULER's documents (arXiv 2404.06654) without a network: lm-evaluation-harness makes them.

Its generators run, with three changes. The essays around the needles are a novel, and NLTK's
sentence splitter is a regular expression: both would be downloads. The size of a haystack is found
by bisection, as in NVIDIA's RULER: the harness's steps of 25 needles can end far below the length.
The two tasks that need a data set of questions (``qa_squad``, ``qa_hotpot``) are left out.
"""

import bisect
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
                tuple(to_prompt(_asked(one), one["gen_prefix"])),
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


def _asked(made: dict[str, Any]) -> str:
    """A document as the model gets it: ``cwe`` has its example in a key of its own."""
    return "\n".join(made[key] for key in ("input_example", "input") if key in made)


def _counting(tokenizer: Any, more: int) -> Callable[[str], Any]:
    """A tokenizer for lengths alone: every text has ``more`` tokens more than it has."""
    return lambda text: SimpleNamespace(input_ids=[*tokenizer(text)["input_ids"], *[0] * more])


def _generate(
    task: str, tokenizer: Any, length: int, count: int, words: list[str], seed: int
) -> list[dict[str, Any]]:
    """Documents: ``input``, ``gen_prefix``, ``outputs``, and of ``cwe`` ``input_example``."""
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
            return track(
                num_samples=count, max_seq_length=length, incremental=5, icl_example=example
            )
        if task == "cwe":
            return made.cwe.sys_word_pair_random(count, length, tokenizer)
        if task == "fwe":
            return made.fwe.sys_kwext(tokenizer, length, num_samples=count)
        return _with_needles(made, task, tokenizer, length, count, words)


def _with_needles(
    made: SimpleNamespace, task: str, tokenizer: Any, length: int, count: int, words: list[str]
) -> list[dict[str, Any]]:
    """What ``prepare_niah.generate_samples`` makes, with the largest haystack that fits."""
    settings = NEEDLES[task]
    kind, asked = settings["type_haystack"], settings.get("num_needle_q", 1)
    keys, values = max(settings.get("num_needle_k", 1), asked), settings.get("num_needle_v", 1)
    generate = functools.partial(
        made.niah.generate_input_output,
        haystack=words if kind == ESSAY else made.niah.get_haystack(kind),
        template=made.template,
        **{**settings, "num_needle_k": keys, "num_needle_v": values},
    )

    def tokens(text: str, answers: Sequence[str], _: str) -> int:
        return len(tokenizer(text + " ".join(answers)).input_ids)

    def fitting(size: int) -> tuple[str, Sequence[str], str]:
        while tokens(*(found := generate(size))) > most and size > sizes[0]:
            size = max(size - 1 - size // 200, sizes[0])
        return found

    sizes, most = range(keys * values, length), length - ANSWER_TOKENS[task]
    fit = bisect.bisect(sizes, most, key=lambda size: tokens(*generate(size)))
    kind, verb = settings["type_needle_v"], "are"
    if asked * values == 1:
        kind, verb = kind[:-1], "is"
    beginning = f"The special magic {kind} for {{}} mentioned in the provided text {verb}"
    return [
        {"input": text, "gen_prefix": beginning.format(query), "outputs": answers}
        for text, answers, query in (fitting(sizes[max(fit - 1, 0)]) for _ in range(count))
    ]


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
