# SPDX-License-Identifier: Apache-2.0
"""What an arm has finished, kept as it comes, so that a run that ends early can be taken up again.

Beside a result's JSON lies a folder of parts: one file an arm, one line a finished item (a stream
of a perplexity arm, a prompt of a recall arm). The file's name says what determines the arm: its
settings, the model, and the code and processor that ran. A line says what determines the item: its
tokens and, if an engine reads several streams at a time, those of its group. Nothing else may
matter, so equal names mean equal results, whatever else the run was about.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.running.environment import ROOT, commit, cpu_name, versions

MEASURED_CODE = (
    *("vllm_cascade", "kernels", "patches"),
    *("benchmarks/running", "benchmarks/inputs/tasks"),
)
"""What decides about a result, besides vLLM and PyTorch: ours, what drives the engines and the
peers, and the harness's local tasks, which jobs know by name only."""
SOURCES = {".py", ".cpp", ".h", ".hpp", ".cu", ".yaml"}
SAMPLE_BYTES = 1 << 20
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Parts:
    """A folder of parts.

    Attributes:
        any_code: take up what other code or another processor has measured, too.
    """

    folder: Path
    any_code: bool = False

    def arm(self, label: str, determines: dict[str, Any]) -> "Arm":
        """An arm's file; ``determines`` is all of its settings, and only those."""
        name = re.sub(r"[^\w.-]+", "-", label).strip("-")[:40]
        name = f"{name}-{digest(determines)}"
        own = self.folder / f"{name}-{code()}.jsonl"
        others = set(self.folder.glob(f"{name}-*.jsonl")) - {own} if self.any_code else ()
        oldest_first = sorted(others, key=lambda path: path.stat().st_mtime)
        return Arm(own, tuple(oldest_first), {"arm": determines, **origin()})


@dataclass(frozen=True)
class Arm:
    """What is kept of an arm.

    Attributes:
        own: the file that finished items are added to.
        others: files of other code that are read, too; of an item, the last one counts.
        header: the first line of ``own``.
    """

    own: Path
    others: tuple[Path, ...]
    header: dict[str, Any]

    def read(self) -> dict[str, Any]:
        """Finished items by key. A line that a killed process left incomplete is left out."""
        return {key: value for key, (value, _) in self.read_with_commits().items()}

    def read_with_commits(self) -> dict[str, tuple[Any, str]]:
        """Finished items by key, each with the commit that made it, as far as that is known."""
        found: dict[str, tuple[Any, str]] = {}
        for path in (*self.others, self.own):
            made_by = UNKNOWN
            for line in _lines(path):
                made_by = line.get("commit") or made_by
                if "item" in line:
                    found[line["item"]] = line["value"], made_by
        return found

    def add(self, items: dict[str, Any]) -> None:
        """Keep finished items; they are on the disk when this returns."""
        self.own.parent.mkdir(parents=True, exist_ok=True)
        with self.own.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(json.dumps(self.header))
            # Each begins a line of its own, also behind one that was cut off.
            for key, value in items.items():
                file.write("\n" + json.dumps({"item": key, "value": value}))
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # cut off in the middle
            yield json.loads(line)


def origin() -> dict[str, Any]:
    """What a file says of its items besides the arm."""
    return {"commit": commit(), "cpu": cpu_name(), "versions": versions()}


def digest(content: Any) -> str:
    """Twelve hexadecimal digits that stand for a JSON value."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_of_tokens(token_ids: Sequence[int]) -> str:
    """The same for tokens: their number is part of it, for people who read the file."""
    return f"{len(token_ids)}-{digest(list(token_ids))}"


@functools.cache
def code() -> str:
    """Eight digits for what measures: our code as it lies there, others' versions, the processor.

    A command asks for them before it measures: they stay what they were then.
    """
    found = hashlib.sha256(json.dumps([versions(), cpu_name()]).encode())
    for name in MEASURED_CODE:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in SOURCES:
                found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:8]


@functools.cache
def model(name: str) -> dict[str, Any]:
    """What a model is: for a folder its configurations, and its weights' sizes and samples of them.

    A model by name is that name: what the Hub gives for it is not looked at.
    """
    folder = Path(name)
    if not folder.is_dir():
        return {"name": name}
    weights = {
        file.name: [file.stat().st_size, _sample(file)]
        for file in sorted(folder.iterdir())
        if file.suffix in {".safetensors", ".bin", ".gguf"}
    }
    found = {"config": digest((folder / "config.json").read_text("utf-8")), "weights": weights}
    generation = folder / "generation_config.json"  # where answers end
    if generation.is_file():
        found["generation_config"] = digest(generation.read_text("utf-8"))
    return found


def _sample(file: Path) -> str:
    """Of the beginning, the middle and the end: weights of other training differ everywhere."""
    size = file.stat().st_size
    found = hashlib.sha256()
    with file.open("rb") as content:
        for begin in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
            content.seek(begin)
            found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest()[:12]
