# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the names that our source uses of vLLM, torch and Triton, a file per vLLM version.

    python -m tests.patches.snapshot

writes the snapshot of the installed vLLM, and of the one in ``.venv-next`` if that environment
exists. A line has how a name is used (``used``, ``overridden`` by a subclass, ``replaced``), the
name, and what the installed source says of it: a signature or an annotation. Nothing here imports
vLLM or vllm_cascade, so it also works beside a vLLM that the plugin refuses.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version as installed_version
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from tests.patches.flow import Flow, is_private
from tests.patches.source import Class, Function, Module, Packages, Sources

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent / "snapshots"
COMMAND = "python -m tests.patches.snapshot"
PACKAGE = ("vllm_cascade", "kernels", "patches")
SUPPORT = ("tests", "benchmarks")
ABSENT = "absent"
"""What is said of a name that this version does not have."""


class Row(NamedTuple):
    """A line of a snapshot.

    Attributes:
        how: ``used``, ``overridden`` or ``replaced``.
        says: a signature, an annotation, ``class``, ``module`` or ABSENT; may be empty.
    """

    how: str
    says: str

    def line(self, name: str) -> str:
        return f"{self.how} {name}: {self.says}" if self.says else f"{self.how} {name}"


Rows = dict[str, Row]


# --- what the installed source says ---------------------------------------------------------------


def says(flow: Flow, target: str) -> str:
    """A signature or an annotation from the installed source; ABSENT for a name that is gone."""
    if flow.sources.module(target) is not None:
        return "module"
    owner, _, name = target.rpartition(".")
    module = flow.sources.module(owner)
    if module is not None:
        return _of_module(flow, module, name)
    order = flow.mro(owner)
    for cls in order:
        if name in cls.members:
            return _of_class(cls, name)
    if order and name == "__init__":
        return _generated(order)
    if owner == "*" or any(thing.kind == "function" for thing in flow.find(owner)):
        return ""
    return ABSENT if target.startswith("vllm.") else _compiled(target)


def _compiled(target: str) -> str:
    """ABSENT unless Triton or torch has a name that its Python source does not define."""
    try:
        resolve_name(target)
    except (AttributeError, ImportError):
        return ABSENT
    return ""


def _of_module(flow: Flow, module: Module, name: str) -> str:
    if name in module.functions:
        return _signature(module.functions[name])
    for thing in sorted(flow.find(f"{module.name}.{name}")):
        if thing.kind == "class" and thing.name.rpartition(".")[2] == name:
            return "class"
        if thing.kind == "function":
            function = flow.function(thing.name)
            if function is not None and function.name == name:
                return _signature(function)
    if name in module.values:
        return _annotation(module, module.values[name])
    if name in module.classes:
        return "class"
    for whole in (*module.imports.get(name, ()), *module.imports.get("*", ())):
        source, _, last = whole.rpartition(".")
        passed_on = flow.sources.module(source)
        if passed_on is None:
            if last == name:
                return ""  # of a package that is not read
        elif passed_on is not module:
            said = _of_module(flow, passed_on, name if last == "*" else last)
            if said != ABSENT:
                return said
    return ABSENT if module.name.startswith("vllm") else _compiled(f"{module.name}.{name}")


def _of_class(cls: Class, name: str) -> str:
    if name in cls.methods:
        method = cls.methods[name][-1]  # past its overloads
        words = [ast.unparse(decorator).rpartition(".")[2] for decorator in method.decorator_list]
        if any("property" in word for word in words):
            return "" if method.returns is None else ast.unparse(method.returns)
        kinds = [word for word in words if word in ("classmethod", "staticmethod")]
        return " ".join([*kinds, _signature(method)])
    values = [*cls.body.get(name, ()), *(value for value, _ in cls.on_self.get(name, ()))]
    return _annotation(cls.module, values)


def _annotation(module: Module, values: list[ast.AST]) -> str:
    return next((ast.unparse(value) for value in values if value in module.annotations), "")


def _signature(function: Function) -> str:
    text = f"({ast.unparse(function.args)})"
    if function.returns is not None:
        text += f" -> {ast.unparse(function.returns)}"
    return f"async {text}" if isinstance(function, ast.AsyncFunctionDef) else text


def _generated(order: list[Class]) -> str:
    """The required fields of a class without ``__init__``, as a dataclass takes them."""
    fields: dict[str, str] = {}
    optional = False
    for cls in reversed(order):
        for name, values in cls.body.items():
            annotation = _annotation(cls.module, values)
            if not annotation or "ClassVar" in annotation:
                continue
            if len(values) == 1:
                fields[name] = f"{name}: {annotation}"
            else:
                optional = True
                fields.pop(name, None)
    return f"({', '.join(['self', *fields.values(), *(['...'] if optional else [])])})"


# --- what our source uses -------------------------------------------------------------------------


def is_internal(target: str) -> bool:
    """Whether tests and benchmarks need a row for a name: one outside vLLM's public modules."""
    package, *parts = target.split(".")
    return package != "vllm" or parts[:1] == ["v1"] or any(map(is_private, parts))


class Section:
    """The rows of all uses that a flow found."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        hows: dict[str, str] = {}
        self.places: dict[str, list[str]] = {}
        for use, found in sorted(flow.uses.items()):
            if hows.get(use.target, "used") == "used":
                hows[use.target] = use.how
            self.places[use.target] = sorted({*self.places.get(use.target, ()), *found})
        self.rows = {name: Row(how, says(flow, name)) for name, how in hows.items()}

    def differences(self, before: Rows) -> Iterator[str]:
        """How the rows differ from those of a snapshot, a sentence each."""
        for name in sorted(before.keys() | self.rows.keys()):
            old, new = before.get(name), self.rows.get(name)
            if old is None:
                told = f"a new use, not in the snapshot ({new.says or 'no type'})"
            elif new is None:
                gone = says(self.flow, name) == ABSENT != old.says
                told = "gone" if gone else "in the snapshot, but nothing uses it any more"
            elif new.says != old.says:
                gone = "gone; " if new.says == ABSENT else ""
                now = "" if gone else f", the installed source {new.says or 'no type'}"
                told = f"{gone}the snapshot has {old.says or 'no type'}{now}"
            elif new.how != old.how:
                told = f"{old.how} in the snapshot, now {new.how}"
            else:
                continue
            yield f"{name}: {told}{self._where(name)}"

    def _where(self, name: str) -> str:
        unknown = self.flow.unknown.get(name.rpartition(".")[2], ())
        places = self.places.get(name) or sorted(unknown)
        return f"; used in {', '.join(places)}" if places else ""


def of_package(root: Path = ROOT, packages: Packages | None = None) -> Section:
    """What the package uses, for the arguments of ``derive``."""
    return Section(Flow(Sources(root, PACKAGE, packages or Packages())))


def derive(root: Path = ROOT, packages: Packages | None = None) -> dict[str, Section]:
    """Sections by title: what the package uses, and what only tests and benchmarks use.

    Args:
        root: a checkout of ours.
        packages: instead of the installed ones.
    """
    packages = packages or Packages()
    ours = of_package(root, packages)
    support = Section(
        Flow(Sources(root, PACKAGE + SUPPORT, packages), noted=SUPPORT, only_private=True)
    )
    support.rows = {
        name: row
        for name, row in support.rows.items()
        if row.how == "replaced" or (name not in ours.rows and is_internal(name))
    }
    return {"package": ours, "tests and benchmarks": support}


# --- the files ------------------------------------------------------------------------------------


def minor(version: str) -> str:
    """``0.32.1+cpu`` is ``0.32``: patch releases share a snapshot."""
    return ".".join(version.split(".")[:2])


def file_of(version: str) -> Path:
    return FOLDER / f"vllm-{minor(version)}.txt"


def text_of(version: str, sections: dict[str, Rows]) -> str:
    lines = [f"# Names that our source uses, and what vLLM {minor(version)} says of them."]
    lines += [f"# Written by {COMMAND}."]
    for title, rows in sections.items():
        lines += ["", f"[{title}]", *(row.line(name) for name, row in sorted(rows.items()))]
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, Rows]:
    """The sections of a snapshot."""
    sections: dict[str, Rows] = {}
    for line in text.splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            how, _, rest = line.partition(" ")
            name, _, said = rest.partition(": ")
            rows[name] = Row(how, said)
    return sections


def main() -> None:
    version = installed_version("vllm")
    FOLDER.mkdir(exist_ok=True)
    sections = {title: section.rows for title, section in derive().items()}
    file_of(version).write_text(text_of(version, sections), "utf-8")
    print(f"{file_of(version).relative_to(ROOT)}: {sum(map(len, sections.values()))} names")
    other = ROOT / ".venv-next/bin/python"
    if Path(sys.prefix).name != ".venv-next":
        if other.is_file():
            subprocess.run([str(other), "-m", "tests.patches.snapshot"], cwd=ROOT, check=True)
        else:
            print("the next vLLM's snapshot is as it was: run tools/next_vllm.py first")


if __name__ == "__main__":
    main()
