# SPDX-License-Identifier: Apache-2.0
"""What every program is asked, and how a program that reads step by step is asked it.

Nothing here knows a program: the same tokens go to all of them, and what differs (how a cache is
bounded, which positions its tokens get) is the program's own.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 256
"""Tokens whose logits a stepwise program gives at a time: 256 rows of 49,152 are 50 MB."""
QUESTIONS = ("stream", "continuation", "passkey", "speed")
"""Items of ``stream`` are token ids; those of the others name the arguments of their method."""


@dataclass(frozen=True)
class Held:
    """The most that a cache held since its program was loaded.

    Attributes:
        tokens: of one layer and head.
        bytes: of all layers, keys and values.
    """

    tokens: int
    bytes: int


@dataclass(frozen=True)
class Timing:
    """One prompt and its continuation, in seconds."""

    read: float
    decode: float


class Program:
    """A model, a cache and a rule that bounds it; tokens go in step by step.

    A program has ``begin``, ``read`` and ``held``, or answers the questions in its own way.

    Attributes:
        positions: tokens that it can read one after the other; None: any number.
        stops: token ids that end an answer.
    """

    positions: int | None = None
    stops: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Forget everything; the next ``read`` is a prompt."""
        raise NotImplementedError

    def read(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        """Read on. Logits after each token, or after the last: float32 ``[tokens or 1, vocab]``."""
        raise NotImplementedError

    def held(self) -> Held:
        """The most held so far."""
        raise NotImplementedError

    def stream(self, token_ids: Sequence[int]) -> np.ndarray:
        """Nats of tokens 1, 2, ..., each predicted from what the cache then holds."""
        self.begin()
        before, found = None, []
        for begin in range(0, len(token_ids), CHUNK):
            chunk = token_ids[begin : begin + CHUNK]
            logits = self.read(chunk, every=True)
            if before is None:
                found.append(nats(logits[:-1], chunk[1:]))
            else:
                found.append(nats(np.concatenate([before, logits[:-1]]), chunk))
            before = logits[-1:]
        return np.concatenate(found)

    def continuation(self, prompt: Sequence[int], following: Sequence[int]) -> np.ndarray:
        """Nats of every following token, after the prompt's cache was bounded."""
        self.begin()
        logits = self.read(prompt, every=False)
        if len(following) > 1:
            logits = np.concatenate([logits, self.read(following[:-1], every=True)])
        return nats(logits, following)

    def answer(self, context: Sequence[int], question: Sequence[int], most: int) -> list[int]:
        """Greedy tokens after a question that is not known while the context is read."""
        self.begin()
        self.read(context, every=False)
        return self._greedy(question, most, self.stops)

    def speed(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        """Seconds for a prompt up to its first token, and for the others, one at a time."""
        self.begin()
        start = time.perf_counter()
        first = int(self.read(prompt, every=False)[-1].argmax())
        read = time.perf_counter() - start
        self._greedy([first], new_tokens - 1, frozenset())
        return Timing(read, time.perf_counter() - start - read)

    def _greedy(self, token_ids: Sequence[int], most: int, stops: frozenset[int]) -> list[int]:
        """At most ``most`` tokens after some that were not read yet, without the stop."""
        made: list[int] = []
        while len(made) < most:
            token = int(self.read(token_ids, every=False)[-1].argmax())
            if token in stops:
                break
            made.append(token)
            token_ids = [token]
        return made


def ask(program: Program, question: str, item: Any, first: bool) -> dict[str, Any]:
    """A program's answer as JSON, and the most that its cache held so far.

    Args:
        question: one of ``QUESTIONS``.
        first: of the program's process. One-off costs of speed (allocating, choosing kernels) then
            come before anything counts.
    """
    if question == "stream":
        found: Any = program.stream(item[: program.positions]).tolist()
    elif question == "continuation":
        found = program.continuation(item["prompt"], item["following"]).tolist()
    elif question == "passkey":
        found = program.answer(item["context"], item["question"], item["most"])
    else:
        if first:
            program.speed(item["prompt"], 4)
        fresh = forget_peak()
        timing = program.speed(item["prompt"], item["new"])
        found = {**vars(timing), "resident_peak": resident_peak(), "load_included": not fresh}
    return {"found": found, "held": asdict(program.held())}


def resident_peak() -> int:
    """Most bytes of memory that this process had since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return peak << 10


def forget_peak() -> bool:
    """Count resident memory from now on; False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    except OSError:
        return False
    return True


def nats(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood of each row's target: float64 ``[rows]``."""
    from scipy.special import logsumexp

    wide = logits.astype(np.float64)
    return logsumexp(wide, axis=1) - wide[np.arange(len(targets)), np.asarray(targets)]


def removed_share(num_tokens: int, kept: int) -> float:
    """What a press is told to remove, so that ``int(num_tokens * (1 - share))`` is ``kept``."""
    return 0.0 if num_tokens <= kept else 1 - (kept + 0.5) / num_tokens
