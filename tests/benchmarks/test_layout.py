# SPDX-License-Identifier: Apache-2.0
"""Who imports whom in ``benchmarks/``: commands use its folders, and nothing goes in a circle."""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.running.environment import ROOT
from tests.test_structure import imports as imported

Imports = dict[str, set[str]]

MAY_USE = {"inputs": set(), "gpu": set(), "running": {"inputs"}, "reporting": {"inputs", "running"}}
"""What the files of a folder may import of ``benchmarks``, besides each other: no command."""


def imports(root: Path) -> Imports:
    """Modules of ``root/benchmarks`` and what each imports of them, inside functions too."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in (root / "benchmarks").rglob("*.py")
    }
    # ``from a import b`` is of ``a``, and of ``a.b`` if that is a module.
    named = {
        module: {name for full in imported(file) for name in (full, full.rpartition(".")[0])}
        for module, file in files.items()
    }
    return {module: names & set(files) for module, names in named.items()}


def folder_of(module: str) -> str:
    """The folder of a module; of a command, the empty word."""
    parts = module.split(".")[1:]
    return parts[0] if len(parts) > 1 or (parts and parts[0] in MAY_USE) else ""


def forbidden(found: Imports) -> Iterable[str]:
    """Imports out of a folder that it may not make."""
    for module, used in found.items():
        allowed = MAY_USE.get(folder_of(module))
        if allowed is not None:
            bad = {name for name in used if folder_of(name) not in allowed | {folder_of(module)}}
            yield from (f"{module} imports {name}" for name in sorted(bad - {"benchmarks"}))


def test_no_import_circle() -> None:
    found = imports(ROOT)
    assert "benchmarks.reporting.results" in found["benchmarks.perplexity"], "imports are found"
    tuple(TopologicalSorter(found).static_order())  # CycleError names the circle


def test_folders_import_no_command() -> None:
    assert list(forbidden(imports(ROOT))) == []


def test_top_level_is_commands() -> None:
    """Every file there is something to run."""
    for file in (ROOT / "benchmarks").glob("*.py"):
        assert file.stem == "__init__" or '__name__ == "__main__"' in file.read_text("utf-8"), file


def test_what_the_checks_find(tmp_path: Path) -> None:
    """A circle by way of a function's import, and a folder that imports a command."""
    folder = tmp_path / "benchmarks"
    (folder / "running").mkdir(parents=True)
    (folder / "command.py").write_text("from benchmarks.running import load\n")
    (folder / "running/load.py").write_text("def f():\n    import benchmarks.command\n")
    found = imports(tmp_path)
    assert list(forbidden(found)) == ["benchmarks.running.load imports benchmarks.command"]
    with pytest.raises(CycleError, match="cycle"):
        tuple(TopologicalSorter(found).static_order())
