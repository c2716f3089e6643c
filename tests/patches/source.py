# SPDX-License-Identifier: Apache-2.0
"""Source files as data: the modules, classes and functions of our code and of installed packages.

Nothing is imported, so a vLLM that the plugin refuses can be read as well.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FOREIGN = ("vllm", "torch", "triton")
"""Packages whose names may change without notice."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Class:
    """A class statement.

    Attributes:
        name: dotted name of its definition.
        bases: dotted names of its bases.
        body: values and annotations of names assigned in its body.
        on_self: the same of ``self.name`` in its methods, with the method.
    """

    name: str
    module: "Module"
    node: ast.ClassDef
    bases: list[str]
    body: dict[str, list[ast.AST]] = field(default_factory=dict)
    methods: dict[str, list[Function]] = field(default_factory=dict)
    on_self: dict[str, list[tuple[ast.AST, Function]]] = field(default_factory=dict)

    @cached_property
    def members(self) -> set[str]:
        return self.body.keys() | self.methods.keys() | self.on_self.keys()


def chain(node: ast.AST) -> str:
    """``self.pool`` of such an expression; empty if it is anything but names and dots."""
    if isinstance(node, ast.Attribute):
        owner = chain(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def pairs(target: ast.AST, value: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Single targets of an assignment, each with the expression that its value is part of."""
    if isinstance(target, ast.Starred):
        target = target.value
    if isinstance(target, ast.Tuple | ast.List):
        alike = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for index, part in enumerate(target.elts):
            yield from pairs(part, value.elts[index] if alike else value)
    else:
        yield target, value


def assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Targets of any statement or expression that binds, each with a value or an annotation."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign):
        yield node.target, node.annotation
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from pairs(node.target, node.iter)
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            if item.optional_vars is not None:
                yield from pairs(item.optional_vars, item.context_expr)


class Module:
    """One file.

    Attributes:
        imports: local names to the dotted names that they may stand for.
    """

    def __init__(self, name: str, file: Path, *, is_package: bool) -> None:
        self.name, self.file = name, file
        self.tree = ast.parse(file.read_text("utf-8"))
        self.imports: dict[str, list[str]] = {}
        package = name if is_package else name.rpartition(".")[0]
        self.annotations: set[ast.AST] = set()
        self.class_nodes: dict[str, ast.ClassDef] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    self.imports.setdefault(alias.asname or whole, []).append(whole)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    up = package.split(".")[: len(package.split(".")) - node.level + 1]
                    source = ".".join([*up, source]).strip(".")
                for alias in node.names:
                    whole = f"{source}.{alias.name}"
                    self.imports.setdefault(alias.asname or alias.name, []).append(whole)
            elif isinstance(node, ast.AnnAssign):
                self.annotations.add(node.annotation)
            elif isinstance(node, ast.ClassDef):
                self.class_nodes[node.name] = node
        self.functions: dict[str, Function] = {}
        self.values: dict[str, list[ast.AST]] = {}
        for node in self._top(self.tree):
            if isinstance(node, Function):
                self.functions[node.name] = node
            for target, value in assigned(node):
                if isinstance(target, ast.Name):
                    self.values.setdefault(target.id, []).append(value)

    @cached_property
    def classes(self) -> dict[str, Class]:
        return {name: self._class(node) for name, node in self.class_nodes.items()}

    def _top(self, node: ast.AST) -> Iterator[ast.AST]:
        """Statements that run when the module is imported, inside ``if`` and ``try`` too."""
        for part in ast.iter_child_nodes(node):
            yield part
            if isinstance(part, ast.If | ast.Try | ast.With | ast.ExceptHandler | ast.For):
                yield from self._top(part)

    def _class(self, node: ast.ClassDef) -> Class:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [name for base in bases for name in self.dotted(base)]
        found = Class(f"{self.name}.{node.name}", self, node, names)
        for part in self._top(node):
            if isinstance(part, Function):
                found.methods.setdefault(part.name, []).append(part)
            for target, value in assigned(part):
                if isinstance(target, ast.Name):
                    found.body.setdefault(target.id, []).append(value)
        for methods in found.methods.values():
            for method in methods:
                for part in ast.walk(method):
                    for target, value in assigned(part):
                        if isinstance(target, ast.Attribute) and chain(target.value) == "self":
                            found.on_self.setdefault(target.attr, []).append((value, method))
        return found

    def dotted(self, node: ast.AST) -> list[str]:
        """Dotted names that a name or a chain of attributes may stand for."""
        if isinstance(node, ast.Attribute):
            return [f"{owner}.{node.attr}" for owner in self.dotted(node.value)]
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, [f"{self.name}.{node.id}"])
        return []


class Packages:
    """Other packages, whose files are read as they are asked for.

    Args:
        folders: of packages, instead of where they are installed.
    """

    def __init__(self, folders: dict[str, Path] | None = None) -> None:
        self._folders = dict(folders or {})
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        package, *parts = name.split(".")
        place = self.folder(package).joinpath(*parts)
        if (place / "__init__.py").is_file():
            return Module(name, place / "__init__.py", is_package=True)
        file = place.with_name(f"{place.name}.py")
        return Module(name, file, is_package=False) if parts and file.is_file() else None

    def folder(self, package: str) -> Path:
        """Where a package is installed."""
        if package not in self._folders:
            spec = importlib.util.find_spec(package)
            assert spec is not None and spec.origin is not None, f"{package} is not installed"
            self._folders[package] = Path(spec.origin).parent
        return self._folders[package]


class Sources:
    """Our modules, and those of other packages.

    Args:
        root: of our repository.
        folders: in it, whose files are ours.
        packages: the others.
    """

    def __init__(self, root: Path, folders: tuple[str, ...], packages: Packages) -> None:
        self.packages = packages
        self.ours: dict[str, Module] = {}
        for folder in folders:
            for file in sorted((root / folder).rglob("*.py")):
                parts = list(file.relative_to(root).with_suffix("").parts)
                if parts[0] in ("kernels", "patches"):
                    parts.insert(0, "vllm_cascade")
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                self.ours[name] = Module(name, file, is_package=is_package)

    def module(self, name: str) -> Module | None:
        if name in self.ours or name.split(".")[0] not in FOREIGN:
            return self.ours.get(name)
        return self.packages.module(name)
