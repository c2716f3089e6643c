# SPDX-License-Identifier: Apache-2.0
"""Scores tokens by their text alone: streaming tf-idf over token ids.

A term is a token id; a document is a sentence. Term frequencies come from the token's sentence.
Document frequencies come from a table (``IdfTable``) or from the request's own past.

A token is scored ``lag`` tokens after it was read, when it can first be evicted. The score uses
only the text seen so far.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_cascade.policies.settings import KVPolicyError

FORMAT = "vllm-cascade-idf-1"
MAX_SENTENCE = 256
"""Longest sentence in tokens. Longer ones are split, which bounds their term counts."""


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


def tfidf(token: int, sentence: Counter[int], corpus: Corpus) -> float:
    """Tf-idf as in Eq. 4 of the DGC paper."""
    frequency = sentence[token] / corpus.occurrences(token)
    return frequency * math.log(corpus.num_sentences / corpus.sentences_with(token))


def tfidf_sklearn(token: int, sentence: Counter[int], corpus: Corpus) -> float:
    """Tf-idf as in scikit-learn's default ``TfidfVectorizer``, which the DGC code uses."""

    def weight(term: int) -> float:
        ratio = (1 + corpus.num_sentences) / (1 + corpus.sentences_with(term))
        return sentence[term] * (math.log(ratio) + 1)

    return weight(token) / math.sqrt(sum(weight(term) ** 2 for term in sentence))


RULES = {"tfidf": tfidf, "tfidf_sklearn": tfidf_sklearn}


@dataclass
class _Stream:
    """State of one request: its corpus, its current sentence and its unscored tokens.

    Attributes:
        last: the first index of the tokens that were read last, and those tokens.
        judged: the scores that were given for them.
    """

    corpus: Corpus
    num_tokens: int = 0
    last: tuple[int, list[int]] | None = None
    judged: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    sentence: Counter[int] = field(default_factory=Counter)
    sentence_length: int = 0
    ended: bool = False
    pending: deque[tuple[int, Counter[int]]] = field(default_factory=deque)


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

        If the stored stream does not end at ``begin`` (after a preemption or a snapshot), it is
        read again from the start. If it was given these tokens last, their scores are given again:
        layers of several shapes ask for them one after the other.

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
            stream = _Stream(self._table if self._table is not None else OwnPast())
            self._streams[request_id] = stream
            self._read(stream, tokens[:begin].tolist(), lag)
        judged = self._read(stream, last[1], lag)
        stream.last, stream.judged = last, np.asarray(judged, dtype=np.float32)
        return stream.judged

    def forget(self, request_id: str) -> None:
        """Drop a stream, if there is one. Its tokens are read again should it go on."""
        self._streams.pop(request_id, None)

    def _read(self, stream: _Stream, tokens: list[int], lag: int) -> list[float]:
        judged = []
        for token in tokens:
            sentence = self._sentence_of(stream, token)
            sentence[token] += 1
            if isinstance(stream.corpus, OwnPast):
                stream.corpus.counts[token] += 1
                stream.corpus.sentences[token] += sentence[token] == 1
            stream.pending.append((token, sentence))
            known = len(stream.pending) > lag
            judged.append(self._rule(*stream.pending.popleft(), stream.corpus) if known else 0.0)
        stream.num_tokens += len(tokens)
        return judged

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
