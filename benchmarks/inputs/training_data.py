# SPDX-License-Identifier: Apache-2.0
"""Training sequences that reward a long memory: books, repeated passages, pass keys.

A sequence is one of three kinds. ``book``: text as it comes. ``repeat``: text in which a passage
from earlier is inserted again, farther away than any window a policy would keep. ``passkey``: a
number told early and asked for late. Repeated tokens and the number's digits are marked, so that
their loss can be reported apart: it falls only in a model that looks back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("book", "repeat", "passkey")
NEEDLE = "\nThe pass key is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is {key}."
DIGITS = 5


@dataclass(frozen=True)
class Batch:
    """Token ids and what to report apart.

    Attributes:
        tokens: int64 ``[batch, length]``.
        distant: bool ``[batch, length]``, tokens that can only be known from far back.
    """

    tokens: np.ndarray
    distant: np.ndarray


def train_tokenizer(texts: Sequence[str], vocab_size: int, folder: Path) -> Any:
    """A byte-level BPE in which every digit is a token of its own; saved to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end
    )
    fast.save_pretrained(folder)
    return fast


class Sequences:
    """Draws training sequences from a long array of tokens, reproducibly.

    Args:
        tokens: all books, one after the other.
        shares: of ``repeat`` and ``passkey`` sequences; the rest is ``book``.
        passage: least and most tokens of a repeated passage.
        distance: least tokens between a passage and its repetition, as a share of the length.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: Any,
        length: int,
        *,
        shares: tuple[float, float] = (0.3, 0.1),
        passage: tuple[int, int] = (16, 128),
        distance: float = 0.3,
        seed: int = 0,
    ) -> None:
        if len(tokens) < length + 1:
            raise ValueError(
                f"{len(tokens):,} tokens of text are too few for sequences of {length:,}"
            )
        if sum(shares) > 1 or min(shares) < 0:
            raise ValueError(f"shares {shares} must be at least 0 and sum to at most 1")
        self.tokens, self.length, self.seed = tokens, length, seed
        self._tokenizer = tokenizer
        self._chances = (1 - sum(shares), *shares)
        self._passage, self._distance = passage, distance

    def batch(self, step: int, size: int, length: int | None = None) -> Batch:
        """The batch of a step: always the same, so that a resumed run goes on where it was.

        Args:
            length: of its sequences, at most the usual one, which is the default.
        """
        rng = np.random.default_rng((self.seed, step))
        rows = [self._sequence(rng, length or self.length) for _ in range(size)]
        return Batch(np.stack([tokens for tokens, _ in rows]), np.stack([mark for _, mark in rows]))

    def batches(self, first: int, size: int) -> Iterator[Batch]:
        """Batches from step ``first`` on, for ever."""
        step = first
        while True:
            yield self.batch(step, size)
            step += 1

    def _sequence(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        kind = rng.choice(KINDS, p=self._chances)
        begin = int(rng.integers(len(self.tokens) - length))
        text = np.array(self.tokens[begin : begin + length], dtype=np.int64)
        mark = np.zeros(length, dtype=bool)
        if kind == "repeat":
            return self._repeat(rng, text, mark)
        return self._passkey(rng, text, mark) if kind == "passkey" else (text, mark)

    def _repeat(
        self, rng: np.random.Generator, text: np.ndarray, mark: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put early passages a second time, in place of later text."""
        length = len(text)
        apart = int(self._distance * length)
        most = min(self._passage[1], length - apart)
        used = np.zeros_like(mark)  # a copy must not overwrite another one's source
        for _ in range(3):
            size = int(rng.integers(min(self._passage[0], most), most + 1))
            source = int(rng.integers(0, length - apart - size + 1))
            place = int(rng.integers(source + apart, length - size + 1))
            if used[source : source + size].any() or used[place : place + size].any():
                continue
            used[source : source + size] = used[place : place + size] = True
            text[place : place + size] = text[source : source + size]
            mark[place + 1 : place + size] = True  # nothing tells the first one
        return text, mark

    def _passkey(
        self, rng: np.random.Generator, text: np.ndarray, mark: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tell a number in the first part, ask for it at the end."""
        key = "".join(str(digit) for digit in rng.integers(0, 10, DIGITS))
        told, asked = (self._ids(part.format(key=key)) for part in (NEEDLE, QUESTION))
        length = len(text)
        if len(told) + len(asked) > length:
            return text, mark
        place = int(rng.integers(0, max((length - len(told) - len(asked)) // 2, 1)))
        text[place : place + len(told)] = told
        text[length - len(asked) :] = asked
        digits = {self._tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)}
        tail = range(length - len(asked), length)
        mark[[index for index in tail if int(text[index]) in digits]] = True
        return text, mark

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
