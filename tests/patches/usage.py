# SPDX-License-Identifier: Apache-2.0
"""What our code uses of other packages, read from its syntax; the table plays no part in it.

Syntax has no types, so an attribute counts as vLLM's where its owner's type is written down (an
imported name, an annotated argument or field), or where classes of vLLM have such a member and
neither a class of ours nor a well-known type of Python, NumPy or torch has.
"""

import argparse
import ast
import builtins
import collections
import contextvars
import importlib.util
import logging
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import prometheus_client
import pydantic
import torch
import triton
from rich.table import Table

FOREIGN = ("vllm", "torch", "triton")
WELL_KNOWN = [
    *vars(builtins).values(),
    *(argparse.ArgumentParser, argparse.ArgumentParser().add_subparsers()),
    *(
        collections.OrderedDict,
        collections.deque,
        contextvars.ContextVar,
        logging.Logger,
        pathlib.Path,
    ),
    *(np, np.ndarray, prometheus_client.Counter, prometheus_client.Gauge, pydantic.BaseModel),
    *(Table, torch, torch.Tensor, torch.cuda, torch.nn.Module, triton, triton.language),
]
COMMON = {name for owner in WELL_KNOWN for name in dir(owner)}
VLLM_FOLDERS = (
    *("config", "engine", "v1", "v1/attention", "v1/attention/backends", "v1/core"),
    *("v1/core/sched", "v1/engine", "v1/metrics", "v1/worker", "v1/worker/gpu", "platforms"),
    *("model_executor/layers/attention", "model_executor/layers/rotary_embedding"),
)
"""Where the classes live that our code meets."""


def chain(node: ast.AST) -> str:
    """``self.pool`` of such an expression; empty where it is anything but names and dots."""
    if isinstance(node, ast.Attribute):
        owner = chain(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class Class:
    """A class of ours: dotted names of its bases, and what its body or its ``self`` has."""

    bases: list[str]
    members: set[str]
    fields: dict[str, str] = field(default_factory=dict)


class Module:
    """One file: what it imports, and its classes.

    Attributes:
        imports: local names to the dotted names they stand for.
    """

    def __init__(self, root: pathlib.Path, file: pathlib.Path) -> None:
        self.file = file.relative_to(root).as_posix()
        parts = list(file.relative_to(root).with_suffix("").parts)
        if parts[0] in ("kernels", "patches"):
            parts.insert(0, "vllm_cascade")
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(file.read_text("utf-8"))
        self.imports = dict(self._imported())
        self.classes = {
            node.name: self._class(node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef)
        }

    def _imported(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    yield alias.asname or whole, whole
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    package = self.name if self.is_package else self.name.rpartition(".")[0]
                    for _ in range(node.level - 1):
                        package = package.rpartition(".")[0]
                    source = f"{package}.{source}".strip(".")
                for alias in node.names:
                    yield alias.asname or alias.name, f"{source}.{alias.name}"

    def _class(self, node: ast.ClassDef) -> Class:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [self.dotted(base) or ast.unparse(base) for base in bases]
        found = Class(names, body_members(node))
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                found.fields |= self._typed(ast.unparse(part.target), part.annotation)
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                if chain(part.value) == "self":
                    found.members.add(part.attr)
        return found

    def dotted(self, node: ast.expr | None) -> str | None:
        """The dotted name that a name or a chain of attributes stands for, if imported or ours."""
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, f"{self.name}.{node.id}")
        return None

    def _typed(self, name: str, annotation: ast.expr | None) -> dict[str, str]:
        """``{name: vLLM's class}`` where the annotation is one, or one or None."""
        if isinstance(annotation, ast.BinOp):
            annotation = annotation.left
        dotted = self.dotted(annotation)
        return {name: dotted} if dotted and dotted.startswith("vllm.") else {}

    def foreign_imports(self) -> set[str]:
        """Names of other packages: all of vLLM's, and the inner ones of torch and Triton."""
        inner = ("triton.runtime", "triton.compiler", "triton.backends")
        found = set()
        for dotted in self.imports.values():
            package = dotted.split(".")[0]
            private = any(part.startswith("_") for part in dotted.split("."))
            if package == "vllm" or (package in FOREIGN and private) or dotted.startswith(inner):
                found.add(dotted)
        return found

    def foreign_strings(self) -> set[str]:
        """Class paths of vLLM, and its environment variables, as constants."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                *owner, last = node.value.split(".")
                if owner[:1] == ["vllm"] and last.isidentifier() and last[0].isupper():
                    found.add(node.value)
                if last.startswith("VLLM_") and last.isupper() and last.isidentifier():
                    found |= set() if last.startswith("VLLM_CASCADE_") else {f"vllm.envs.{last}"}
        return found

    @cached_property
    def attributes(self) -> list[ast.Attribute]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)]

    def attributes_of_typed(self) -> set[str]:
        """Attributes of what is annotated as vLLM's, or imported from it: ``Class.attribute``."""
        found = set()
        for node in self.attributes:
            if isinstance(node.value, ast.Name):
                owner = self.dotted(node.value)
                if owner and owner.startswith("vllm.") and owner != "vllm.__version__":
                    found.add(f"{owner}.{node.attr}")
        for scope in ast.walk(self.tree):
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                typed = {}
                for argument in (*scope.args.args, *scope.args.kwonlyargs):
                    typed |= self._typed(argument.arg, argument.annotation)
            elif isinstance(scope, ast.ClassDef):
                fields = self.classes[scope.name].fields
                typed = {f"self.{name}": dotted for name, dotted in fields.items()}
            else:
                continue
            if typed:
                for node in ast.walk(scope):
                    if isinstance(node, ast.Attribute) and chain(node.value) in typed:
                        found.add(f"{typed[chain(node.value)]}.{node.attr}")
        return {name for name in found if not name.rpartition(".")[2].startswith("__")}


class Code:
    """All files of a checkout below some folders."""

    def __init__(self, root: pathlib.Path, *folders: str) -> None:
        table = root / "patches" / "hooks"  # names in it are not uses
        files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
        modules = [Module(root, file) for file in files if table not in file.parents]
        self.modules = {module.name: module for module in modules}

    @cached_property
    def own_members(self) -> set[str]:
        """Members of our classes, and names of our modules."""
        found = set()
        for module in self.modules.values():
            for cls in module.classes.values():
                found |= cls.members
            for node in module.tree.body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    found.add(node.name)
                elif isinstance(node, ast.Assign):
                    found |= {ast.unparse(target) for target in node.targets}
                elif isinstance(node, ast.AnnAssign):
                    found.add(ast.unparse(node.target))
        return found

    def _own_class(self, dotted: str) -> Class | None:
        module, _, name = dotted.rpartition(".")
        if module not in self.modules:
            return None
        if name in self.modules[module].classes:
            return self.modules[module].classes[name]
        again = self.modules[module].imports.get(name)  # it passes on another module's
        return self._own_class(again) if again and again != dotted else None

    def _ancestors(self, cls: Class) -> tuple[set[str], set[str]]:
        """Members of a class and of its ancestors that are ours, and those that are vLLM's."""
        members, foreign = set(cls.members), set()
        for base in cls.bases:
            own = self._own_class(base)
            if own is not None:
                more_members, more_foreign = self._ancestors(own)
                members |= more_members
                foreign |= more_foreign
            elif base.split(".")[0] in FOREIGN:
                foreign.add(base)
        return members, foreign

    def subclasses(self) -> Iterator[tuple[str, str, set[str]]]:
        """A class of ours, a foreign base of it, and what ours have in front of it."""
        for module in self.modules.values():
            for name, cls in module.classes.items():
                members, foreign = self._ancestors(cls)
                for base in sorted(foreign):
                    yield f"{module.file}: {name}", base, members

    @cached_property
    def _ordinary(self) -> set[str]:
        return self.own_members | COMMON

    def private_attributes(self) -> set[tuple[str, str]]:
        """``_names`` that no class of ours has, with their files."""
        return {
            (module.file, node.attr)
            for module in self.modules.values()
            for node in module.attributes
            if node.attr.startswith("_") and not node.attr.startswith("__")
            if node.attr not in self._ordinary and not hasattr(os, node.attr)  # os._exit
        }

    def likely_attributes(self) -> set[tuple[str, str]]:
        """Attributes that classes of vLLM have and ours have not, with their files."""
        return {
            (module.file, node.attr)
            for module in self.modules.values()
            for node in module.attributes
            if node.attr in vllm_members() and node.attr not in self._ordinary
            if chain(node.value) != "args"  # argparse's answer
        }


MEMBER = re.compile(
    r"^    (?:async )?def (\w+)\(|^    (\w+): |^    ([A-Z]\w*) = |\bself\.(\w+)(?:: [^=\n]+)? = ",
    re.MULTILINE,
)


@cache
def vllm_members() -> set[str]:
    """What classes of vLLM have: methods, fields, members of enumerations, what is set on self.

    Read from its files, of which nothing has to be imported; their syntax would take seconds.
    """
    package = pathlib.Path(str(importlib.util.find_spec("vllm").origin)).parent
    files = [file for folder in VLLM_FOLDERS for file in (package / folder).glob("*.py")]
    found = [MEMBER.findall(file.read_text("utf-8")) for file in files]
    return {name for groups in found for group in groups for name in group if name}


def body_members(node: ast.ClassDef) -> set[str]:
    found = set()
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(part.name)
        elif isinstance(part, ast.AnnAssign):
            found.add(ast.unparse(part.target))
        elif isinstance(part, ast.Assign):
            found |= {ast.unparse(target) for target in part.targets}
    return found
