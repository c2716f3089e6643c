# SPDX-License-Identifier: Apache-2.0
"""Answers of arms, kept as they come: a run that was ended goes on, and one arm fails alone."""

import hashlib
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.running.peers.environment import PeerUnavailable
from benchmarks.running.peers.process import Failed, Task, ask

Answer = dict[str, Any]
"""``found`` and ``held``, or ``cannot`` (the program can't do it), or ``failed``: why."""

TIMED = "speed"
"""The question whose answers are compared only within one run."""


def ask_all(
    tasks: Sequence[Task], folder: Path, asking: Callable[[Task], Answer] = ask
) -> dict[tuple[str, str], Answer]:
    """Answers by arm and question, from ``folder`` where they are, else asked and put there.

    A question that failed is asked again by the next run. Times are taken from the folder only if
    one run took them all.
    """
    run = uuid.uuid4().hex
    kept = {task_key(task): _load(folder, task) for task in tasks}
    timed = [kept[task_key(task)] for task in tasks if task.question == TIMED]
    if None in timed or len({answer["run"] for answer in timed if answer}) > 1:
        kept |= {task_key(task): None for task in tasks if task.question == TIMED}
    answers = {}
    for place, task in enumerate(tasks):
        key = task_key(task)
        answer = kept[key]
        if answer is None:
            start = time.perf_counter()
            answer = {**_asked(task, asking), "run": run}
            answer["seconds"] = round(time.perf_counter() - start, 1)
            _save(folder, task, answer)
        said = "failed" if "failed" in answer else "cannot" if "cannot" in answer else "done"
        print(
            f"peers: {place + 1} of {len(tasks)}, {task.arm.label}, {task.question}: {said} "
            f"({answer['seconds']:,.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        answers[key] = answer
    return answers


def task_key(task: Task) -> tuple[str, str]:
    """Arm and question."""
    return task.arm.label, task.question


def _asked(task: Task, asking: Callable[[Task], Answer]) -> Answer:
    try:
        return asking(task)
    except (Failed, PeerUnavailable) as error:
        return {"failed": str(error)}


def _identity(task: Task) -> str:
    """Changes with whatever the task's answer depends on."""
    return hashlib.sha256(json.dumps(asdict(task), sort_keys=True).encode()).hexdigest()[:16]


def _path(folder: Path, task: Task) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in f"{task.arm.label} {task.question}")
    return folder / f"{name.lower()}.json"


def _load(folder: Path, task: Task) -> Answer | None:
    """The kept answer, unless it is to another task or says that something failed."""
    try:
        kept = json.loads(_path(folder, task).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if kept["task"] != _identity(task) or "failed" in kept["answer"]:
        return None
    return kept["answer"]


def _save(folder: Path, task: Task, answer: Answer) -> None:
    """Write an answer so that an end in the middle leaves the old one or none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, task)
    scratch = path.with_suffix(".incomplete")
    scratch.write_text(json.dumps({"task": _identity(task), "answer": answer}), "utf-8")
    scratch.replace(path)
