# SPDX-License-Identifier: Apache-2.0
"""The package's rooms: which room may import which, and no import circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = {"vllm_cascade": "vllm_cascade", "kernels": "vllm_cascade.kernels"}
FILES = {
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]): path
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def imported(module: str, path: Path) -> Iterator[str]:
    """Modules of ours that a file imports when it is imported itself."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*up, node.module or ""]).strip(".") if node.level else node.module
            names = [f"{base}.{alias.name}" for alias in node.names] + [base]
        else:
            continue
        yield from (name for name in names if name in MODULES and name != module)


ARROWS = {module: set(imported(module, path)) for module, path in MODULES.items()}


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """A way from a module back to itself; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for other in sorted(arrows.get(module, ())):
                if found := walk(other, [*way, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in arrows if (found := walk(module, []))), [])


def test_no_import_circle() -> None:
    assert sum(map(len, ARROWS.values())) > 100, "imports are found"
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    # `from package import name` also runs the package, which imports its parts: no circle.
    arrows = {m: {o for o in to if o not in packages} for m, to in ARROWS.items()}
    assert circle(arrows) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("policies", ("cache", "attention", "engine", "kernels")),
        ("cache", ("attention", "engine")),
        ("attention.torch", ("attention.cpu", "attention.cuda")),
        ("attention.cpu", ("attention.cuda",)),
        ("attention.cuda", ("attention.cpu",)),
        ("kernels", ("policies", "cache", "attention", "engine")),
    ],
)
def test_who_imports_whom(room: str, forbidden: tuple[str, ...]) -> None:
    """Policies know nothing of pages, pages nothing of attention, devices nothing of each other."""
    inside = {module for module in MODULES if module.startswith(f"vllm_cascade.{room}")}
    assert len(inside) > 1, room
    wrong = {
        (module, other)
        for module in inside
        for other in ARROWS[module]
        if other.startswith(tuple(f"vllm_cascade.{name}" for name in forbidden))
    }
    assert not wrong
