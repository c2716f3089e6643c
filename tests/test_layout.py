# SPDX-License-Identifier: Apache-2.0
"""The package's rooms: which room may import which, and no circle of files.

The whole syntax tree of a file counts: imports inside functions and under ``TYPE_CHECKING``, too.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = {
    "vllm_cascade": "vllm_cascade",
    "kernels": "vllm_cascade.kernels",
    "patches": "vllm_cascade.patches",
}
MODULES = {
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}
BELOW_STEP = {"cache", "recall", "models", "policies", "kernels"}
MAY_IMPORT = {
    "patches": {"engine", "attention", "step", "sessions"} | BELOW_STEP,
    "engine": {"attention", "step", "sessions", "patches"} | BELOW_STEP,
    "attention": {"step"} | BELOW_STEP,
    "step": BELOW_STEP,
    "sessions": {"recall", "policies"},
    "cache": {"policies", "kernels"},
    "recall": {"policies", "kernels"},
    "models": {"policies"},
    "policies": set(),
    "kernels": set(),
}
"""engine -> attention -> step -> {cache, recall, models} -> policies; kernels know none of them.

``sessions`` is used by the engine and by flags only, and knows logs of evicted units.
"""
DEVICES = {
    "attention.torch": {"attention.cpu", "attention.cuda"},
    "attention.cpu": {"attention.cuda"},
    "attention.cuda": {"attention.cpu"},
}
"""Folders of devices, and those that they must not import."""


def imported(module: str, path: Path) -> Iterator[str]:
    """Modules of ours that a file imports anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = names_in(ast.parse(path.read_text("utf-8")), package)
    yield from (name for name in names if name != module)


def names_in(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules of ours that a file of ``package`` with this syntax tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(filter(None, [*(up if node.level else []), node.module]))
            names = [f"{base}.{alias.name}" for alias in node.names] + [base]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def room_of(module: str) -> str:
    """The folder of a module; empty for files beside the rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


ARROWS = {module: set(imported(module, path)) for module, path in MODULES.items()}


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vllm_cascade.cache.spec import KVPolicySpec
def late():
    from . import plan
"""
    found = set(names_in(ast.parse(source), "vllm_cascade.step"))
    assert found == {"vllm_cascade.cache.spec", "vllm_cascade.step", "vllm_cascade.step.plan"}
    assert sum(map(len, ARROWS.values())) > 100


def test_no_import_circle() -> None:
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    # `from package import name` also runs the package, which imports its parts: no circle.
    arrows = {m: {o for o in to if o not in packages} for m, to in ARROWS.items()}
    TopologicalSorter(arrows).prepare()  # CycleError names the circle
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"b"}}).prepare()


def test_every_folder_is_a_room_with_a_row() -> None:
    folders = {path.name for path in (ROOT / "vllm_cascade").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(MAY_IMPORT) - {"kernels", "patches"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_which_room_imports_which(room: str) -> None:
    """One way down: no import runs back to a room above, or to one beside."""
    inside = [module for module in MODULES if room_of(module) == room]
    assert len(inside) > 1, room
    wrong = {
        (module, other)
        for module in inside
        for other in ARROWS[module]
        if room_of(other) not in MAY_IMPORT[room] | {room, ""}
    }
    assert not wrong


@pytest.mark.parametrize("folder", DEVICES)
def test_devices_know_nothing_of_each_other(folder: str) -> None:
    inside = [module for module in MODULES if module.startswith(f"vllm_cascade.{folder}.")]
    assert len(inside) > 1, folder
    others = tuple(f"vllm_cascade.{other}" for other in DEVICES[folder])
    assert not {(m, o) for m in inside for o in ARROWS[m] if o.startswith(others)}


ASKS_WHAT_IT_IS = re.compile(r"\b(current_platform|is_cuda|is_cpu|device_type)\b|\.type ==")


def test_only_the_device_module_asks_what_the_device_is() -> None:
    """Engine code uses ``Device`` instead; policies know no device."""
    asks = {
        module
        for module, path in MODULES.items()
        if room_of(module) in ("engine", "policies")
        and ASKS_WHAT_IT_IS.search(path.read_text("utf-8"))
    }
    assert asks == {"vllm_cascade.engine.devices"}


@pytest.mark.parametrize("path", MODULES.values(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_its_idea_first(path: Path) -> None:
    """A docstring, whose first line is one sentence or the beginning of one."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert text and len(text.split("\n", maxsplit=1)[0]) > 15
