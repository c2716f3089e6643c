# SPDX-License-Identifier: Apache-2.0
"""One program, one question, one process: ``python -m benchmarks.running.peers.process TASK OUT``.

Runs in the environment of the program that it asks, so nothing here imports vLLM, transformers or
llama.cpp before it knows which. TASK and OUT are JSON files.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.running.environment import ROOT
from benchmarks.running.peers.environment import python_of
from benchmarks.running.peers.questions import WARM_UP, Cannot, Program

PROGRAMS = {
    "vLLM": ("with_vllm", None),
    "kvpress": ("with_kvpress", "kvpress"),
    "llama.cpp": ("with_llama_cpp", "llama-cpp"),
}
"""By program: the module that runs it, and the environment it needs (None: this one)."""

QUESTIONS = ("stream", "continuation", "passkey", "speed")
LOG_LINES = 15
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Arm:
    """A program with one way to bound its cache.

    Attributes:
        program: a key of ``PROGRAMS``.
        settings: what its module's ``load`` takes.
        bounded: False for full attention, the ceiling.
    """

    label: str
    program: str
    settings: dict[str, Any] = field(default_factory=dict)
    bounded: bool = True


@dataclass(frozen=True)
class Task:
    """A question to an arm.

    Attributes:
        model: the model's folder. ``gguf``: the file it was made from.
        items: what is asked, as the question's function below reads it.
    """

    arm: Arm
    question: str
    model: str
    gguf: str
    threads: int
    items: list[Any] = field(repr=False)


class Failed(RuntimeError):
    """A process that did not answer; the message holds the end of what it said."""


def ask(task: Task) -> dict[str, Any]:
    """The answer of a fresh process: ``{"found": ..., "held": ..., ...}`` or ``{"cannot": why}``.

    Raises:
        Failed: the process ended without an answer.
        PeerUnavailable: the program is not installed and cannot be.
    """
    _, environment = PROGRAMS[task.arm.program]
    python = sys.executable if environment is None else str(python_of(environment))
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        asked, answered = Path(scratch) / "task.json", Path(scratch) / "answer.json"
        asked.write_text(json.dumps(asdict(task)), "utf-8")
        command = [python, "-m", __name__, str(asked), str(answered)]
        done = subprocess.run(
            command, cwd=ROOT, env=_variables(task), text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        if not answered.exists():
            said = "\n".join(done.stdout.splitlines()[-LOG_LINES:])
            raise Failed(f"ended with status {done.returncode}:\n{said}")
        return json.loads(answered.read_text("utf-8"))


def _variables(task: Task) -> dict[str, str]:
    """A child's environment: its threads, no network, no progress bars."""
    own = {
        "OMP_NUM_THREADS": str(task.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**os.environ, **own}


# --- in the child -------------------------------------------------------------------------------


def answer(task: Task, program: Program) -> dict[str, Any]:
    """What the question's function finds, and the most that the cache held for it."""
    ask_for = {"stream": _stream, "continuation": _continuation, "passkey": _passkey}
    found = {**ask_for, "speed": _speed}[task.question](program, task.items)
    return {"found": found, "held": asdict(program.held())}


def _stream(program: Program, items: list[list[int]]) -> list[list[float]]:
    """Nats of each text's tokens; a program whose positions end stops there."""
    return [program.stream(ids[: program.positions]).tolist() for ids in items]


def _continuation(program: Program, items: list[dict[str, Any]]) -> list[list[float]]:
    """Items: ``{"prompt": ids, "following": ids}``. Nats of the following tokens."""
    return [program.continuation(i["prompt"], i["following"]).tolist() for i in items]


def _passkey(program: Program, items: list[dict[str, Any]]) -> list[list[int]]:
    """Items: ``{"context": ids, "question": ids, "most": n}``. Answers as token ids."""
    return [program.answer(i["context"], i["question"], i["most"]) for i in items]


def _speed(program: Program, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Items: ``{"prompt": ids, "new": n}``, a trial each. Seconds, and resident memory in bytes."""
    program.speed(items[0]["prompt"][:WARM_UP], 4)
    program.speed(items[0]["prompt"], 4)
    fresh = forget_peak()
    times = [asdict(program.speed(i["prompt"], i["new"])) for i in items]
    return {"times": times, "resident_peak": resident_peak(), "load_included": not fresh}


def resident_peak() -> int:
    """Most bytes of memory that this process had since ``forget_peak``."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


def forget_peak() -> bool:
    """Count resident memory from now on; False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    except OSError:
        return False
    return True


def end_with_parent() -> None:
    """Be told to end when the parent does, however that ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before it was to be watched
        sys.exit(1)


def main(argv: list[str]) -> None:
    """Answer the task in the file ``argv[0]`` into the file ``argv[1]``."""
    end_with_parent()
    raw = json.loads(Path(argv[0]).read_text("utf-8"))
    task = Task(**{**raw, "arm": Arm(**raw["arm"])})
    module, _ = PROGRAMS[task.arm.program]
    try:
        program = import_module(f"benchmarks.running.peers.{module}").load(task)
        found = answer(task, program)
    except Cannot as why:
        found = {"cannot": str(why)}
    Path(argv[1]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
