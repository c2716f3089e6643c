# SPDX-License-Identifier: Apache-2.0
"""Builds the table of document frequencies that ``importance: tfidf`` reads.

The corpus is streamed: memory does not grow with it. Sentences are found among token ids, by the
same rule as in a request: at tokens that end one, or after ``MAX_SENTENCE`` tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_cascade.policies.text_importance import MAX_SENTENCE, IdfTable

BLOCK_CHARACTERS = 1 << 20
"""Text that is tokenized at once."""
CLOSING = "\"'”’»)]}*_ \t"
"""What may follow a sentence's last mark."""
MARKS = tuple(".!?…。！？")


def ends_sentence(text: str) -> bool:
    """Whether a piece of text ends a sentence: a final mark, or a line's end."""
    return "\n" in text or text.rstrip(CLOSING).endswith(MARKS)


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """bool ``[vocab]``: the token ids that end a sentence. Special tokens do."""
    size = max(tokenizer.get_vocab().values()) + 1
    texts = [tokenizer.decode([token]) for token in range(size)]
    ends = np.fromiter(map(ends_sentence, texts), dtype=bool, count=size)
    ends[[token for token in tokenizer.all_special_ids if token < size]] = True
    return ends


def fingerprint(tokenizer: Any) -> str:
    """Tells tokenizers with different ids apart."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocab.encode()).hexdigest()


def blocks(path: Path) -> Iterator[tuple[str, int]]:
    """A text file in pieces that end at a line's end or between words, and the bytes they had."""
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
    """How many tokens and sentences there are, and in how many sentences each token stands."""

    def __init__(self, ends: np.ndarray) -> None:
        self.ends = ends
        self._open = np.zeros(0, dtype=np.int64)  # the tokens of a sentence that has not ended
        self.num_sentences = 0
        self.sentences = np.zeros(len(ends), dtype=np.int64)
        self.counts = np.zeros(len(ends), dtype=np.int64)

    def add(self, tokens: list[int]) -> None:
        ids = np.concatenate([self._open, np.asarray(tokens, dtype=np.int64)])
        index = _sentence_index(self.ends[ids])
        # The last sentence waits for more: another end would still be part of it.
        done = int(np.argmax(index == index[-1])) if len(ids) else 0
        self._count(ids[:done], index[:done])
        self._open = ids[done:]

    def close(self) -> None:
        """The corpus is over, and so is its last sentence."""
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
    """Number of the sentence that every token stands in, from which tokens end one."""
    place = np.arange(len(ends))
    first = np.concatenate([[True], ends[:-1] & ~ends[1:]])[: len(ends)]
    within = place - np.maximum.accumulate(np.where(first, place, 0))
    return np.cumsum(within % MAX_SENTENCE == 0) - 1


def build_from_files(tokenizer: Any, paths: list[Path]) -> IdfTable:
    """Count tokens and sentences of text files, with a progress bar over their bytes.

    Args:
        tokenizer: a Hugging Face tokenizer, or one with its interface.
        paths: a sentence may go on from one file to the next.
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
