# SPDX-License-Identifier: Apache-2.0
"""One way to bound a cache, one question, one process, in the environment of its program.

The process is ``python -m benchmarks.running.peers.process FD``, by this project's Python or a
peer's. It reads its task from standard input and writes an answer a line to the file descriptor FD.
What it prints is shown if it fails.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from benchmarks.running import arms, parts
from benchmarks.running.children import ChildError
from benchmarks.running.environment import ROOT
from benchmarks.running.peers import questions
from benchmarks.running.peers.environment import python_of, requirements

PROGRAMS = {
    "vLLM": ("with_vllm", None),
    "kvpress": ("with_kvpress", "kvpress"),
    "llama.cpp": ("with_llama_cpp", "llama-cpp"),
}
"""By program: the module that runs it, and the environment it needs (None: this one)."""

SAID = 3
"""Last lines of a failed process that its reason repeats."""


@dataclass(frozen=True)
class Entry:
    """A program with one way to bound its cache: a row of the table.

    Attributes:
        program: a key of ``PROGRAMS``.
        settings: what its module's ``load`` takes.
        bounded: False for full attention, the ceiling.
        cannot: why, by question, for those that are not asked.
    """

    label: str
    program: str
    settings: dict[str, Any] = field(default_factory=dict)
    bounded: bool = True
    cannot: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a program's process needs.

    Attributes:
        model: the model's folder. ``gguf``: the file it was made from.
    """

    program: str
    settings: dict[str, Any]
    model: str
    gguf: str
    threads: int


@dataclass(frozen=True)
class Asked(arms.Job):
    """A question to an entry, and all its items, JSON (see ``questions.ask``)."""

    entry: Entry
    question: str
    task: Task
    items: tuple[Any, ...] = field(repr=False)

    @property
    def keys(self) -> list[str]:
        return [f"{place}-{parts.digest(item)}" for place, item in enumerate(self.items)]

    def determines(self) -> dict[str, Any]:
        """The model stands for its GGUF, too. Threads change no answer; times are not kept."""
        _, peer = PROGRAMS[self.entry.program]
        return {
            "program": self.entry.program,
            "settings": self.entry.settings,
            "question": self.question,
            "model": parts.model(self.task.model),
            "pins": requirements(peer).read_text("utf-8") if peer else None,
        }


def ask(job: Asked) -> list[Any]:
    """An entry's answers, ``{"found": ..., "held": ...}`` an item, from a process of its program.

    Raises:
        ChildError: the process has ended without all answers.
        PeerUnavailable: the peer is not installed and cannot be.
    """
    print(f"peers: {job.label}", file=sys.stderr, flush=True)
    _, peer = PROGRAMS[job.entry.program]
    python = str(python_of(peer)) if peer else sys.executable

    def work(places: list[int]) -> Iterator[dict[int, Any]]:
        found = _answers(python, job, [job.items[place] for place in places])
        yield from ({place: one} for place, one in zip(places, found, strict=True))

    return arms.fill(job, work)


def variables(threads: int) -> dict[str, str]:
    """Environment of a process that answers: its threads, no network, no progress bars."""
    on = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    return {"OMP_NUM_THREADS": str(threads), **dict.fromkeys(on, "1"), **quiet}


def _answers(python: str, job: Asked, items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Each answer as soon as it is there."""
    asked = {"task": asdict(job.task), "question": job.question, "items": items}
    readable, writable = os.pipe()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(json.dumps(asked).encode())
        given.seek(0)
        child = subprocess.Popen(
            [python, "-m", __name__, str(writable)],
            cwd=ROOT,
            env={**os.environ, **variables(job.task.threads)},
            stdin=given,
            stdout=said,
            stderr=said,
            pass_fds=[writable],
        )
        os.close(writable)
        with child, open(readable, encoding="utf-8") as lines:
            yield from map(json.loads, lines)
        if child.returncode:
            said.seek(0)
            last = [line for line in said.read().decode(errors="replace").splitlines() if line]
            raise ChildError(f"status {child.returncode}: " + " / ".join(last[-SAID:]))


def main(words: Sequence[str]) -> None:
    """A program's process."""
    given = json.loads(sys.stdin.read())
    task = Task(**given["task"])
    with open(int(words[0]), "w", encoding="utf-8") as out:
        module, _ = PROGRAMS[task.program]
        program = import_module(f"benchmarks.running.peers.{module}").load(task)
        for place, item in enumerate(given["items"]):
            answer = questions.ask(program, given["question"], item, place == 0)
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
