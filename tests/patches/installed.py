# SPDX-License-Identifier: Apache-2.0
"""What an installed package's own source says about one of its names.

Signatures come from ``inspect``; attributes, many of which exist only once an object does, from the
classes' source: an annotated field, a property, or the first assignment to ``self``.
"""

import ast
import importlib
import inspect
import textwrap
from functools import cache
from typing import Any


def resolve(target: str) -> tuple[Any, list[str]]:
    """The longest part of a dotted name that is a module, and what is left.

    Raises:
        LookupError: not even the package is there.
    """
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and something that it imports is not
    raise LookupError(f"no package {parts[0]}")


def says(target: str) -> str:
    """A signature or an annotation, as the table writes it.

    Raises:
        LookupError: which part of the name is not there.
    """
    found, rest = resolve(target)
    for name in rest[:-1]:
        found = _get(found, name)
    if not rest:
        return ""
    name = rest[-1]
    if inspect.isclass(found):
        for cls in found.__mro__:
            if name in members(cls):
                said = members(cls)[name]
                return signature(getattr(found, name)) if said is None else said
    value = _get(found, name)
    if inspect.ismodule(found) and not callable(value):
        return _annotation(found, name)
    return signature(value) if callable(value) else ""


def _get(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise LookupError(f"{getattr(owner, '__name__', owner)} has no {name}")
    return getattr(owner, name)


def _annotation(module: Any, name: str) -> str:
    """Of a module's variable, also where it is only promised to type checkers."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return ast.unparse(node.annotation)
    return ""


@cache
def members(cls: type) -> dict[str, str | None]:
    """A class's own attributes with their annotations; None: a method."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # built in, or made by a program
        return {}
    found: dict[str, str | None] = {}
    functions = []
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): "" for target in node.targets}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)
            is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
            returns = "" if node.returns is None else ast.unparse(node.returns)
            found.setdefault(node.name, returns if is_property else None)
    functions.sort(key=lambda function: function.name != "__init__")
    for function in functions:
        for name, annotation in _set_on_self(function):
            found.setdefault(name, annotation)
    return found


def _set_on_self(function: ast.AST) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            pairs = [(node.target, ast.unparse(node.annotation))]
        elif isinstance(node, ast.Assign):
            pairs = [(target, "") for whole in node.targets for target in _parts(whole)]
        else:
            continue
        found += [
            (target.attr, annotation)
            for target, annotation in pairs
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        ]
    return found


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def signature(function: Any) -> str:
    """Names, kinds and whether there is a default: ``(self, a, b=, *, c, **d)``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # such as a NewType
        return ""
    words, before = [], None
    for parameter in parameters:
        if before is parameter.POSITIONAL_ONLY and parameter.kind is not before:
            words.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.VAR_POSITIONAL,
            parameter.KEYWORD_ONLY,
        ):
            words.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "="
        words.append(f"{stars}{parameter.name}{default}")
        before = parameter.kind
    if before is inspect.Parameter.POSITIONAL_ONLY:
        words.append("/")
    return f"({', '.join(words)})"


def problem(target: str, expected: str) -> str | None:
    """How the installed package differs from what is expected of a name; None: it does not."""
    try:
        said = says(target)
    except LookupError as error:
        return f"{target}: {error}"
    if expected == "" and inspect.isclass(_object(target)):
        return None  # only its name is used
    if said.startswith("(") and _fits(
        expected.strip("()").split(", "), said.strip("()").split(", ")
    ):
        return None
    if said == expected:
        return None
    return f"{target}: expected {expected or 'nothing'}, but the source says {said or 'nothing'}"


def _object(target: str) -> Any:
    """None for what exists only on objects."""
    found, rest = resolve(target)
    for name in rest:
        found = getattr(found, name, None)
    return found


def _fits(expected: list[str], words: list[str]) -> bool:
    """Whether parameters are as expected, where ``...`` stands for any number of them."""
    if not expected:
        return not words
    if expected[0] == "...":
        return any(_fits(expected[1:], words[skip:]) for skip in range(len(words) + 1))
    return words[:1] == expected[:1] and _fits(expected[1:], words[1:])
