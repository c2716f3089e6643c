# SPDX-License-Identifier: Apache-2.0
"""Dynamic Global Context, literally: which tokens stay, and how important each is by the text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .policies import Score, Sim, relative_gap


class DGCSim(Sim):
    """Algorithm 1: the oldest recent token moves to the global part, whose least important leaves.

    Of equally important tokens the older leaves first. With `by_importance` the global part stands
    in the cache from the most important down, as it was when the last token left; `exact` scores
    are the same numbers in every implementation, so that their ties are no danger; with
    `exact_zero` that holds for 0 only, as for a sum of numbers that are never negative.
    """

    def __init__(
        self,
        num_sinks: int,
        num_global: int,
        num_recent: int,
        *,
        normalise: bool = False,
        by_importance: bool = False,
        exact: bool = False,
        exact_zero: bool = False,
        tie: str = "incoming",
    ) -> None:
        self.num_sinks, self.num_global, self.num_recent = num_sinks, num_global, num_recent
        self.budget = num_global + num_recent
        self.normalise, self.by_importance, self.exact = normalise, by_importance, exact
        self.exact_zero = exact_zero
        self.tie = tie
        self.sinks: list[int] = []
        self.global_part: list[int] = []
        self.recent: list[int] = []
        self.order: list[int] | None = None
        self.gone: list[int] = []

    def insert(self, token: int, score: Score) -> int | None:
        if len(self.sinks) < self.num_sinks:
            self.sinks.append(token)
            return None
        self.recent.append(token)
        if len(self.recent) <= self.num_recent:
            return None
        self.global_part.append(self.recent.pop(0))
        if len(self.global_part) <= self.num_global:
            return None
        candidates = self.global_part if self.tie == "incoming" else self.global_part[::-1]
        loser = min(candidates, key=score)
        self.global_part.remove(loser)
        self.gone.append(loser)
        self.order = sorted(self.global_part, key=lambda token: -score(token))
        return loser

    def end_stride(self, score: Score) -> None:
        if self.gone and not self.exact:
            values = [max(map(score, self.gone)), *sorted(map(score, self.global_part))]
            pairs = list(pairwise(values)) if self.by_importance else [(values[0], values[1])]
            if self.exact_zero:
                pairs = [pair for pair in pairs if pair != (0, 0)]
            gap = min((relative_gap(a, b) for a, b in pairs), default=math.inf)
            self.closest_contest = min(self.closest_contest, gap)
        self.gone = []

    def tokens(self) -> list[int]:
        return self.sinks + self.global_part + self.recent

    def arranged(self) -> list[int]:
        if self.order is None or not self.by_importance:
            return self.tokens()
        return self.sinks + self.order + self.recent


class ClusterSim(Sim):
    """The first `num_centres` tokens that leave the recent part stay; the others join them.

    Which centre a token joins is up to the keys: whoever holds them asks for `take_merged`.
    """

    def __init__(self, num_sinks: int, num_centres: int, num_recent: int) -> None:
        self.num_sinks, self.num_centres, self.num_recent = num_sinks, num_centres, num_recent
        self.budget = num_centres + num_recent
        self.sinks: list[int] = []
        self.centres: list[int] = []
        self.recent: list[int] = []
        self.joining: list[int] = []

    def insert(self, token: int, score: Score) -> int | None:
        if len(self.sinks) < self.num_sinks:
            self.sinks.append(token)
            return None
        self.recent.append(token)
        if len(self.recent) <= self.num_recent:
            return None
        leaving = self.recent.pop(0)
        if len(self.centres) < self.num_centres:
            self.centres.append(leaving)
            return None
        self.joining.append(leaving)
        return leaving

    def take_merged(self) -> tuple[list[int], list[int]]:
        joining, self.joining = self.joining, []
        return self.centres, joining

    def tokens(self) -> list[int]:
        return self.sinks + self.centres + self.recent


def nearest_centres(
    keys: np.ndarray, centres: Sequence[int], joining: Sequence[int]
) -> tuple[list[int], float]:
    """For each joining token the centre of highest cosine; `keys` is [tokens, features].

    Also the smallest lead of a nearest centre over the second: when it is tiny, two correct
    implementations may choose differently.
    """

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))

    nearest, lead = [], math.inf
    for token in joining:
        ranked = sorted(centres, key=lambda centre: -cosine(keys[token], keys[centre]))
        nearest.append(ranked[0])
        for second in ranked[1:2]:
            gap = cosine(keys[token], keys[ranked[0]]) - cosine(keys[token], keys[second])
            lead = min(lead, gap)
    return nearest, lead


def sentence_ends(tokenizer: Any) -> list[bool]:
    """Which token ids end a sentence: special ones, a final mark before closing quotes, a newline.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    marks = re.compile(r"[.!?…。！？][\"'”’»)\]}*_ \t]*\s*$|\n")
    special = set(tokenizer.all_special_ids)
    return [token in special or bool(marks.search(text)) for token, text in enumerate(texts)]


def sentences_of(
    tokens: Sequence[int], ends: Callable[[int], bool], longest: int = 256
) -> list[list[int]]:
    """Token ids, cut between the end of a sentence and what is none, and after `longest`."""
    sentences: list[list[int]] = []
    for i, token in enumerate(tokens):
        starts = i == 0 or (ends(tokens[i - 1]) and not ends(token))
        if starts or len(sentences[-1]) == longest:
            sentences.append([])
        sentences[-1].append(token)
    return sentences


def importance(
    tokens: Sequence[int],
    rule: str,
    lag: int,
    ends: Callable[[int], bool],
    corpus: Sequence[Sequence[int]] | None = None,
) -> list[float]:
    """How important each token is `lag` tokens after it was read (0: never judged).

    `corpus` is a list of sentences; None: all the stream's sentences up to that moment.
    """
    result = [0.0] * len(tokens)
    fixed = None if corpus is None else Frequencies(corpus)
    for now in range(lag, len(tokens)):
        known = sentences_of(tokens[: now + 1], ends)
        place, start = 0, now - lag
        while start >= len(known[place]):
            start -= len(known[place])
            place += 1
        of_corpus = Frequencies(known) if fixed is None else fixed
        value = RULES[rule](tokens[now - lag], known[place], of_corpus)
        result[now - lag] = float(np.float32(value))
    return result


class Frequencies:
    """Counts of a list of sentences; what is not in it counts as seen once."""

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        self.total = len(sentences)
        self.occurrences: dict[int, int] = {}
        self.documents: dict[int, int] = {}
        for sentence in sentences:
            for token in sentence:
                self.occurrences[token] = self.occurrences.get(token, 0) + 1
            for token in set(sentence):
                self.documents[token] = self.documents.get(token, 0) + 1


def equation_4(token: int, sentence: list[int], corpus: Frequencies) -> float:
    """(count in the sentence / count in the corpus) ln(sentences / sentences with the token)."""
    tf = sentence.count(token) / corpus.occurrences.get(token, 1)
    return tf * math.log(corpus.total / corpus.documents.get(token, 1))


def sklearn_weight(token: int, sentence: list[int], corpus: Frequencies) -> float:
    """count * (ln((1 + n) / (1 + df)) + 1), over the L2 norm of the sentence's row."""
    row = {
        term: sentence.count(term)
        * (math.log((1 + corpus.total) / (1 + corpus.documents.get(term, 1))) + 1)
        for term in dict.fromkeys(sentence)
    }
    return row[token] / math.sqrt(sum(value**2 for value in row.values()))


RULES = {"tfidf": equation_4, "tfidf_sklearn": sklearn_weight}
