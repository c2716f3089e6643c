# SPDX-License-Identifier: Apache-2.0
"""How important a token is by its text alone: tf-idf over token ids, as a stream goes by.

A term is a token id, a document is a sentence. Term frequencies come from the sentence a token
stands in, document frequencies from a table (``IdfTable``) or from the request's own past. Nothing
looks ahead: a token is judged when it first may be deleted, ``lag`` tokens after it was read, with
what its sentence, and the past, had by then.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_cascade.policies.settings import KVPolicyError

FORMAT = "vllm-cascade-idf-1"
MAX_SENTENCE = 256
"""A run of tokens without a sentence's end is cut here, so that its counts stay small."""


@dataclass(frozen=True)
class IdfTable:
    """Document frequencies of a corpus, made once by ``vllm-cascade idf``.

    Attributes:
        num_sentences: sentences of the corpus.
        sentences: int64 ``[vocab]``, how many have each token.
        counts: int64 ``[vocab]``, how often each token occurs.
        ends: bool ``[vocab]``, the tokens that end a sentence.
        tokenizer: fingerprint of the tokenizer whose ids these are.
    """

    num_sentences: int
    sentences: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    tokenizer: str

    def occurrences(self, token: int) -> int:
        """How often the corpus has a token; one that it does not have counts as seen once."""
        return max(int(self.counts[token]), 1) if token < len(self.counts) else 1

    def sentences_with(self, token: int) -> int:
        """How many of its sentences do, likewise."""
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
            KVPolicyError: no such file, or not a table.
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
    """Document frequencies of what a request has read so far, asked for as an ``IdfTable``'s."""

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
    """The DGC paper's Eq. 4."""
    frequency = sentence[token] / corpus.occurrences(token)
    return frequency * math.log(corpus.num_sentences / corpus.sentences_with(token))


def tfidf_sklearn(token: int, sentence: Counter[int], corpus: Corpus) -> float:
    """What scikit-learn's ``TfidfVectorizer`` gives with its defaults, which the code uses."""

    def weight(term: int) -> float:
        ratio = (1 + corpus.num_sentences) / (1 + corpus.sentences_with(term))
        return sentence[term] * (math.log(ratio) + 1)

    return weight(token) / math.sqrt(sum(weight(term) ** 2 for term in sentence))


RULES = {"tfidf": tfidf, "tfidf_sklearn": tfidf_sklearn}


@dataclass
class _Stream:
    """One request: its past, the sentence it is in, and the tokens not judged yet."""

    corpus: Corpus
    num_tokens: int = 0
    sentence: Counter[int] = field(default_factory=Counter)
    sentence_length: int = 0
    ended: bool = False
    pending: deque[tuple[int, Counter[int]]] = field(default_factory=deque)


class TokenImportance:
    """Judges the tokens of many requests, each as its stream grows.

    Args:
        rule: a key of ``RULES``.
        ends: bool ``[vocab]``, the tokens that end a sentence.
        table: the corpus; None: every request's own past.
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
        """Read tokens ``[begin, end)`` of a stream and judge those of ``lag`` tokens before.

        A stream that was not followed up to ``begin`` (a preemption, a snapshot) is read again.

        Args:
            tokens: token ids of the stream, at least ``end``.
            lag: a token is judged when this many more are known; the same for a whole stream.

        Returns:
            fp32 ``[end - begin]``, the importance of tokens ``[begin - lag, end - lag)``; 0 before
            the stream's start.
        """
        stream = self._streams.get(request_id)
        if stream is None or stream.num_tokens != begin:
            stream = _Stream(self._table if self._table is not None else OwnPast())
            self._streams[request_id] = stream
            self._read(stream, tokens[:begin].tolist(), lag)
        judged = self._read(stream, tokens[begin:end].tolist(), lag)
        return np.asarray(judged, dtype=np.float32)

    def forget(self, alive: set[str]) -> None:
        """Drop every stream but these."""
        self._streams = {key: self._streams[key] for key in alive & self._streams.keys()}

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
        """The sentence that the next token stands in; several ends in a row end the same one."""
        is_end = bool(self._ends[token])
        if (stream.ended and not is_end) or stream.sentence_length == MAX_SENTENCE:
            stream.sentence, stream.sentence_length = Counter(), 0
        if stream.sentence_length == 0 and isinstance(stream.corpus, OwnPast):
            stream.corpus.num_sentences += 1
        stream.sentence_length += 1
        stream.ended = is_end
        return stream.sentence
