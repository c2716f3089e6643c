# SPDX-License-Identifier: Apache-2.0
"""Scores tokens by their text alone: streaming tf-idf over token ids.

A term is a token id; a document is a sentence. Term frequencies come from the token's sentence.
Document frequencies come from a table (``IdfTable``) or from the request's own past.

A token is scored ``lag`` tokens after it was read, when it can first be evicted. The score uses
only the text seen so far.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_cascade.policies.settings import KVPolicyError

FORMAT = "vllm-cascade-idf-1"
MAX_SENTENCE = 256
"""Longest sentence in tokens. Longer ones are split, which bounds their term counts."""
LOG_ONE = 1 << 52
"""What a logarithm of 1 is scaled to."""


@dataclass(frozen=True)
class IdfTable:
    """Document frequencies of a corpus, made once by ``vllm-cascade idf``.

    Attributes:
        num_sentences: sentences in the corpus.
        sentences: int64 ``[vocab]``, number of sentences that contain each token.
        counts: int64 ``[vocab]``, number of occurrences of each token.
        ends: bool ``[vocab]``, True for tokens that end a sentence.
        tokenizer: fingerprint of the tokenizer that defines the ids.
    """

    num_sentences: int
    sentences: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    tokenizer: str

    def occurrences(self, token: int) -> int:
        """Occurrences of a token in the corpus; 1 for unseen tokens."""
        return max(int(self.counts[token]), 1) if token < len(self.counts) else 1

    def sentences_with(self, token: int) -> int:
        """Sentences of the corpus that contain a token; 1 for unseen tokens."""
        return max(int(self.sentences[token]), 1) if token < len(self.sentences) else 1

    def save(self, path: str | Path) -> None:
        from safetensors.numpy import save_file

        kinds = {"sentences": np.int64, "counts": np.int64, "ends": np.uint8}
        arrays = {name: getattr(self, name).astype(kind) for name, kind in kinds.items()}
        meta = {"num_sentences": str(self.num_sentences), "tokenizer": self.tokenizer}
        save_file(arrays, path, metadata={"format": FORMAT, **meta})

    @classmethod
    def load(cls, path: str | Path) -> "IdfTable":
        """Read a table.

        Raises:
            KVPolicyError: the file cannot be read or is not an IDF table.
        """
        from safetensors import SafetensorError, safe_open

        fix = "make one with `vllm-cascade idf --tokenizer MODEL --corpus FILE --out FILE`"
        try:
            with safe_open(path, "numpy") as file:
                meta = file.metadata() or {}
                if meta.get("format") != FORMAT:
                    raise KVPolicyError(
                        f"kv_policy: idf = {str(path)!r} is not an IDF table; {fix}"
                    )
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise KVPolicyError(
                f"kv_policy: idf = {str(path)!r} cannot be read ({error}); {fix}"
            ) from None
        arrays["ends"] = arrays["ends"].astype(bool)
        return cls(int(meta["num_sentences"]), tokenizer=meta["tokenizer"], **arrays)


class OwnPast:
    """Document frequencies of the text a request has seen, with the interface of ``IdfTable``."""

    def __init__(self) -> None:
        self.num_sentences = 0
        self.counts: Counter[int] = Counter()
        self.sentences: Counter[int] = Counter()

    def occurrences(self, token: int) -> int:
        return self.counts[token]

    def sentences_with(self, token: int) -> int:
        return self.sentences[token]


Corpus = IdfTable | OwnPast


class Norm:
    """L2 norm of a sentence's weights, updated with every token that the stream reads.

    A term's weight is ``n * (top - log(1 + d))``, with ``top = 1 + log(1 + sentences)`` and ``d``
    sentences that have the term. The sum of squares then follows from three sums over terms that
    do not depend on ``top``. Logarithms are scaled to integers: exact sums do not depend on the
    order of updates, so a stream that is read again gets the same scores.
    """

    def __init__(self, sentence: Counter[int], corpus: Corpus) -> None:
        self.sentence, self.corpus = sentence, corpus
        self._sums = [0, 0, 0]  # n**2 * log(1 + d)**k for k = 0, 1, 2
        for term in sentence:
            self.count(term, 1)

    def count(self, term: int, sign: int) -> None:
        """Add a term with its current counts, or with ``sign`` -1 take it out."""
        if number := self.sentence[term]:
            log = self._log(self.corpus.sentences_with(term))
            for power in range(3):
                self._sums[power] += sign * number**2 * log**power

    def weight(self, term: int) -> float:
        """The weight of a term, divided by the norm."""
        top = LOG_ONE + self._log(self.corpus.num_sentences)
        own = self.sentence[term] * (top - self._log(self.corpus.sentences_with(term)))
        squares, products, logs = self._sums
        return own / math.sqrt(top**2 * squares - 2 * top * products + logs)

    @staticmethod
    def _log(number: int) -> int:
        return round(math.log(1 + number) * LOG_ONE)


@dataclass
class _Stream:
    """State of one request: its corpus, its current sentence and its unscored tokens.

    Attributes:
        last: the first index of the tokens that were read last, and those tokens.
        judged: the scores that were given for them.
        norm: of the sentence that was scored last, if the rule needs it.
    """

    corpus: Corpus
    num_tokens: int = 0
    last: tuple[int, list[int]] | None = None
    judged: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    sentence: Counter[int] = field(default_factory=Counter)
    sentence_length: int = 0
    ended: bool = False
    pending: deque[tuple[int, Counter[int]]] = field(default_factory=deque)
    norm: Norm | None = None

    def count(self, token: int) -> None:
        """Count a token that was read into the current sentence."""
        if self.norm is not None:
            self.norm.count(token, -1)
        self.sentence[token] += 1
        if isinstance(self.corpus, OwnPast):
            self.corpus.counts[token] += 1
            self.corpus.sentences[token] += self.sentence[token] == 1
        if self.norm is not None:
            self.norm.count(token, 1)


def tfidf(token: int, sentence: Counter[int], stream: _Stream) -> float:
    """Tf-idf as in Eq. 4 of the DGC paper."""
    corpus = stream.corpus
    frequency = sentence[token] / corpus.occurrences(token)
    return frequency * math.log(corpus.num_sentences / corpus.sentences_with(token))


def tfidf_sklearn(token: int, sentence: Counter[int], stream: _Stream) -> float:
    """Tf-idf as in scikit-learn's default ``TfidfVectorizer``, which the DGC code uses."""
    if stream.norm is None or stream.norm.sentence is not sentence:
        stream.norm = Norm(sentence, stream.corpus)
    return stream.norm.weight(token)


RULES = {"tfidf": tfidf, "tfidf_sklearn": tfidf_sklearn}


class TokenImportance:
    """Scores the tokens of many requests as their streams grow.

    Args:
        rule: a key of ``RULES``.
        ends: bool ``[vocab]``, True for tokens that end a sentence.
        table: corpus statistics. None: use each request's own past.
    """

    def __init__(self, rule: str, ends: np.ndarray, table: IdfTable | None) -> None:
        self._rule = RULES[rule]
        self._ends = ends
        self._table = table
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def advance(
        self, request_id: str, tokens: np.ndarray, begin: int, end: int, lag: int
    ) -> np.ndarray:
        """Read tokens ``[begin, end)`` of a stream and score tokens ``[begin - lag, end - lag)``.

        If the stored stream does not end at ``begin`` (after a preemption or a snapshot), its state
        is made again, without scores. If it was given these tokens last, their scores are given
        again: layers of several shapes ask for them one after the other.

        Args:
            tokens: int ``[n]``, token ids of the stream, with ``n >= end``.
            lag: tokens read after a token before it is scored. Constant for a stream.

        Returns:
            fp32 ``[end - begin]``, one score per token of ``[begin - lag, end - lag)``; 0 for
            negative indices.
        """
        stream, last = self._streams.get(request_id), (begin, tokens[begin:end].tolist())
        if stream is not None and stream.last == last:
            return stream.judged
        if stream is None or stream.num_tokens != begin:
            stream = self._streams[request_id] = self._state(tokens[:begin], lag)
        judged = [
            0.0 if known is None else self._rule(*known, stream)
            for known in self._read(stream, last[1], lag)
        ]
        stream.last, stream.judged = last, np.asarray(judged, dtype=np.float32)
        return stream.judged

    def forget(self, request_id: str) -> None:
        """Drop a stream, if there is one. Its tokens are read again should it go on."""
        self._streams.pop(request_id, None)

    def _state(self, tokens: np.ndarray, lag: int) -> _Stream:
        """The state of a stream after these tokens. Nothing is scored.

        Own frequencies count all tokens. With a table, the state begins with the sentence of the
        first token without a score.
        """
        if self._table is None:
            stream = _Stream(OwnPast())
        else:
            stream = _Stream(self._table, self._sentence_begin(tokens, len(tokens) - max(lag, 1)))
        deque(self._read(stream, tokens[stream.num_tokens :].tolist(), lag), maxlen=0)
        return stream

    def _sentence_begin(self, tokens: np.ndarray, place: int) -> int:
        """First index of the sentence that has token ``place``; 0 if it is not positive."""
        if place <= 0:
            return 0
        ends = self._ends[tokens[: place + 1]]
        begins = np.flatnonzero(ends[:-1] & ~ends[1:])
        begin = int(begins[-1]) + 1 if len(begins) else 0
        return place - (place - begin) % MAX_SENTENCE

    def _read(
        self, stream: _Stream, tokens: list[int], lag: int
    ) -> Iterator[tuple[int, Counter[int]] | None]:
        """Read tokens. Yields, after each, the token to score now and its sentence, or None."""
        for token in tokens:
            sentence = self._sentence_of(stream, token)
            stream.count(token)
            stream.pending.append((token, sentence))
            stream.num_tokens += 1
            yield stream.pending.popleft() if len(stream.pending) > lag else None

    def _sentence_of(self, stream: _Stream, token: int) -> Counter[int]:
        """Term counts of the next token's sentence. Consecutive ends belong to one sentence."""
        is_end = bool(self._ends[token])
        if (stream.ended and not is_end) or stream.sentence_length == MAX_SENTENCE:
            stream.sentence, stream.sentence_length = Counter(), 0
        if stream.sentence_length == 0 and isinstance(stream.corpus, OwnPast):
            stream.corpus.num_sentences += 1
        stream.sentence_length += 1
        stream.ended = is_end
        return stream.sentence
