# SPDX-License-Identifier: Apache-2.0
"""Builds the table of document frequencies that ``importance: tfidf`` reads.

The corpus is streamed, so memory use does not grow with its size. Sentences are split as in a
request: at token ids that end a sentence, or after ``MAX_SENTENCE`` tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_cascade.policies.text_importance import MAX_SENTENCE, IdfTable

BLOCK_CHARACTERS = 1 << 20
"""Characters tokenized at a time."""
CLOSING = "\"'”’»)]}*_ \t"
"""Characters that may follow the final mark of a sentence."""
MARKS = tuple(".!?…。！？")


def ends_sentence(text: str) -> bool:
    """Whether the text contains a newline or ends with a sentence mark."""
    return "\n" in text or text.rstrip(CLOSING).endswith(MARKS)


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """bool ``[vocab]``, True for token ids that end a sentence, including special tokens."""
    size = max(tokenizer.get_vocab().values()) + 1
    texts = [tokenizer.decode([token]) for token in range(size)]
    ends = np.fromiter(map(ends_sentence, texts), dtype=bool, count=size)
    ends[[token for token in tokenizer.all_special_ids if token < size]] = True
    return ends


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary and its ids."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocab.encode()).hexdigest()


def blocks(path: Path) -> Iterator[tuple[str, int]]:
    """Split a text file at newlines or spaces. Yields each piece and its size in bytes."""
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while text := file.read(BLOCK_CHARACTERS):
            text = rest + text
            cut = text.rfind("\n") + 1 or text.rfind(" ") or len(text)
            cut = cut if cut > 0 else len(text)
            rest = text[cut:]
            yield text[:cut], len(text[:cut].encode())
    if rest:
        yield rest, len(rest.encode())


class SentenceCounter:
    """Counts tokens, sentences, and the sentences that contain each token.

    Args:
        ends: bool ``[vocab]``, True for tokens that end a sentence.
    """

    def __init__(self, ends: np.ndarray) -> None:
        self.ends = ends
        self._open = np.zeros(0, dtype=np.int64)  # tokens of the unfinished sentence
        self.num_sentences = 0
        self.sentences = np.zeros(len(ends), dtype=np.int64)
        self.counts = np.zeros(len(ends), dtype=np.int64)

    def add(self, tokens: list[int]) -> None:
        ids = np.concatenate([self._open, np.asarray(tokens, dtype=np.int64)])
        index = _sentence_index(self.ends[ids])
        # Hold back the last sentence: a following end token would still belong to it.
        done = int(np.argmax(index == index[-1])) if len(ids) else 0
        self._count(ids[:done], index[:done])
        self._open = ids[done:]

    def close(self) -> None:
        """Count the last sentence at the end of the corpus."""
        self._count(self._open, np.zeros(len(self._open), dtype=np.int64))
        self._open = self._open[:0]

    def _count(self, ids: np.ndarray, index: np.ndarray) -> None:
        if len(ids) == 0:
            return
        self.num_sentences += int(index[-1]) + 1
        self.counts += np.bincount(ids, minlength=len(self.counts))
        pairs = np.unique(index * len(self.counts) + ids)
        self.sentences += np.bincount(pairs % len(self.counts), minlength=len(self.counts))


def _sentence_index(ends: np.ndarray) -> np.ndarray:
    """int64 ``[n]``, sentence index of every token.

    Args:
        ends: bool ``[n]``, True for tokens that end a sentence.
    """
    place = np.arange(len(ends))
    first = np.concatenate([[True], ends[:-1] & ~ends[1:]])[: len(ends)]
    within = place - np.maximum.accumulate(np.where(first, place, 0))
    return np.cumsum(within % MAX_SENTENCE == 0) - 1


def build_from_files(tokenizer: Any, paths: list[Path]) -> IdfTable:
    """Count tokens and sentences of text files, with a progress bar over their bytes.

    Args:
        tokenizer: a Hugging Face tokenizer, or one with its interface.
        paths: UTF-8 text files, read as one text. A sentence may span two files.
    """
    from tqdm import tqdm

    counter = SentenceCounter(sentence_ends(tokenizer))
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True, desc="counting tokens") as bar:
        for text, size in (block for path in paths for block in blocks(path)):
            counter.add(tokenizer.encode(text, add_special_tokens=False))
            bar.update(size)
    counter.close()
    return IdfTable(
        *(counter.num_sentences, counter.sentences, counter.counts, counter.ends),
        fingerprint(tokenizer),
    )
