# SPDX-License-Identifier: Apache-2.0
"""Which classes the values in our source may have, and so which members of vLLM's classes we use.

Types come from annotations, constructor calls, ``isinstance`` and the arguments of our own calls,
in our source and in vLLM's. A container has the type of its contents: ``dict[str, Request]`` counts
as ``Request``. Passes over our source repeat until no type is added.
"""

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tests.patches.ordinary import COMMON, vllm_members
from tests.patches.source import FOREIGN, Class, Function, Module, Sources, assigned, chain

INNER = ("triton.runtime", "triton.compile", "triton.backends", "triton.knobs")
"""Modules of Triton that are no interface for users."""


class Thing(NamedTuple):
    """What an expression may stand for.

    Attributes:
        kind: ``instance`` of a class, or the ``class``, ``function`` or ``module`` itself.
        name: dotted name of the definition.
    """

    kind: str
    name: str


class Use(NamedTuple):
    """A name of another package that our source uses.

    Attributes:
        how: ``used``, ``overridden`` by a subclass of ours, or ``replaced`` by something of ours.
    """

    target: str
    how: str


@dataclass
class Scope:
    """A module, or a function in it or in a method: where names are looked up."""

    module: Module
    cls: str | None = None
    function: Function | ast.Lambda | None = None
    outer: "Scope | None" = None
    bound: dict[str, list[ast.AST]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    checked: dict[str, list[ast.AST]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[ast.arg]:
        if self.function is None:
            return []
        args = self.function.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        return [arg for arg in every if arg is not None]


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function or module but those of the functions in it."""
    for part in ast.iter_child_nodes(function):
        yield part
        if not isinstance(part, Function | ast.ClassDef):
            yield from inside(part)


def type_of(node: ast.AST) -> str:
    """``x.y`` of ``type(x.y)``; empty for anything else."""
    is_call = isinstance(node, ast.Call) and chain(node.func) == "type" and len(node.args) == 1
    return chain(node.args[0]) if is_call else ""


def checked(function: ast.AST) -> dict[str, list[ast.AST]]:
    """Names and chains of attributes, each with the classes that a function checks it for.

    By ``isinstance(x, C)``, ``type(x) is C``, or ``kind is C`` after ``kind = type(x)``.
    """
    nodes = list(inside(function))
    named = {
        target.id: type_of(value)
        for node in nodes
        for target, value in assigned(node)
        if isinstance(target, ast.Name) and type_of(value)
    }
    found: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and chain(node.func) == "isinstance":
            found.setdefault(chain(node.args[0]), []).append(node.args[1])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.In | ast.Eq):
            name = type_of(node.left) or named.get(chain(node.left), "")
            found.setdefault(name, []).append(node.comparators[0])
    found.pop("", None)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class Flow:
    """The uses of other packages in our source.

    Args:
        noted: beginnings of the names of our modules whose uses count.
        only_private: names in strings do not count, and attributes whose owner has no known type
            only if they are private.

    Attributes:
        uses: each with the places that have it, ``file:line``.
        unknown: the same of attributes whose owner has no known type.
    """

    def __init__(
        self, sources: Sources, noted: tuple[str, ...] = ("",), *, only_private: bool = False
    ) -> None:
        self.sources = sources
        self._noted = {
            name: module for name, module in sources.ours.items() if name.startswith(noted)
        }
        self.uses: dict[Use, set[str]] = {}
        self.unknown: dict[str, set[str]] = {}
        self._table: dict[Any, set[Thing]] = {}
        self._fresh: set[Any] = set()
        self._scopes: dict[ast.AST, Scope] = {}
        self._functions: dict[str, Scope] = {}
        self._mros: dict[str, list[Class]] = {}
        self._work = [
            pair
            for module in sources.ours.values()
            for pair in self._expressions(module.tree, Scope(module))
        ]
        size = -1
        while size != (size := self._pass()):
            pass
        self._overridden()
        self._imported()
        if not only_private:
            self._in_strings()
        self._guessed(only_private)

    # --- what there is ----------------------------------------------------------------------------

    def _pass(self) -> int:
        self._fresh.clear()
        self.unknown.clear()
        for node, scope in self._work:
            if isinstance(node, ast.Assign):
                self._replaced(node, scope)
            else:
                self.types(node, scope)
        return sum(map(len, self._table.values()))

    def _expressions(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        """What to evaluate of our source below a node, each with where its names are looked up."""
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                cls = f"{scope.module.name}.{part.name}"
                yield from self._expressions(part, Scope(scope.module, cls, None, scope))
            elif isinstance(part, Function):
                yield from ((decorator, scope) for decorator in part.decorator_list)
                yield from self._expressions(part, self.scope_of(part, scope))
            elif isinstance(part, ast.Lambda):
                yield from self._expressions(part, Scope(scope.module, scope.cls, part, scope))
            else:
                if isinstance(part, ast.Attribute | ast.Call | ast.Subscript | ast.Assign):
                    yield part, scope
                yield from self._expressions(part, scope)

    def scope_of(self, function: Function, outer: Scope) -> Scope:
        if function not in self._scopes:
            scope = Scope(outer.module, outer.cls, function, outer, checked=checked(function))
            for part in inside(function):
                if isinstance(part, Function):
                    scope.functions[part.name] = part
                for target, value in assigned(part):
                    if isinstance(target, ast.Name):
                        scope.bound.setdefault(target.id, []).append(value)
            self._scopes[function] = scope
            self._functions[self.name_of(function, outer)] = scope
        return self._scopes[function]

    def name_of(self, function: Function, outer: Scope) -> str:
        if outer.function is not None:
            return f"{self.name_of(outer.function, outer.outer)}.<locals>.{function.name}"
        return f"{outer.cls or outer.module.name}.{function.name}"

    def find(self, dotted: str) -> set[Thing]:
        """What a dotted name stands for, past what modules pass on from others."""
        return self._fixed(("find", dotted), lambda: self._find(dotted))

    def _find(self, dotted: str) -> set[Thing]:
        if self.sources.module(dotted) is not None:
            return {Thing("module", dotted)}
        owner, _, name = dotted.rpartition(".")
        if not owner:
            return set()
        found: set[Thing] = set()
        for thing in self.find(owner):
            if thing.kind == "module":
                module = self.sources.module(thing.name)
                assert module is not None
                found |= self._in_module(module, name)
            elif thing.kind == "class":
                found |= self.member(thing.name, name)[1]
        return found

    def _in_module(self, module: Module, name: str) -> set[Thing]:
        if name in module.classes:
            return {Thing("class", f"{module.name}.{name}")}
        scope = Scope(module)
        if name in module.functions:
            return self._function(module.functions[name], scope)
        found: set[Thing] = set()
        for value in module.values.get(name, ()):
            found |= self._bound(value, scope)
        for whole in module.imports.get(name, ()):
            if whole != f"{module.name}.{name}":
                found |= self.find(whole)
        if not found:
            for whole in module.imports.get("*", ()):
                found |= self.find(f"{whole.removesuffix('.*')}.{name}")
        return found

    def _function(self, node: Function, outer: Scope) -> set[Thing]:
        self.scope_of(node, outer)
        found = {Thing("function", self.name_of(node, outer))}
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if not outer.module.dotted(call) or chain(call).startswith(("functools", "wraps")):
                continue
            for thing in self.types(call, outer):
                if thing.kind == "function" and thing.name.startswith(("torch", "triton")):
                    found |= {
                        made for made in self._returned(thing.name) if made.kind == "instance"
                    }
        return found

    def mro(self, cls: str) -> list[Class]:
        """A class and its ancestors, as far as their source is known, nearest first."""
        if cls not in self._mros:
            module = self.sources.module(cls.rpartition(".")[0])
            node = module.classes.get(cls.rpartition(".")[2]) if module else None
            lines = [] if node is None else [self.mro(base) for base in self._bases(node)]
            every = [] if node is None else [node, *(c for line in lines for c in line)]
            # an ancestor of several comes after all of them: keep the last mention
            self._mros[cls] = [c for i, c in enumerate(every) if c not in every[i + 1 :]]
        return self._mros[cls]

    def _bases(self, cls: Class) -> list[str]:
        found = [sorted(t.name for t in self.find(base) if t.kind == "class") for base in cls.bases]
        return [name for names in found for name in names[:1] if name != cls.name]

    @cached_property
    def our_classes(self) -> list[Class]:
        return [cls for module in self.sources.ours.values() for cls in module.classes.values()]

    @cached_property
    def _families(self) -> dict[str, list[Class]]:
        """Our classes by each of their ancestors."""
        found: dict[str, list[Class]] = {}
        for cls in self.our_classes:
            for ancestor in self.mro(cls.name):
                found.setdefault(ancestor.name, []).append(cls)
        return found

    def _and_descendants(self, cls: str) -> list[Class]:
        return self._families.get(cls, [])

    # --- what values may be -----------------------------------------------------------------------

    def _fixed(self, key: Any, compute: Callable[[], set[Thing]]) -> set[Thing]:
        """The value of a key, computed once a pass; within itself it is what it was before."""
        found = self._table.setdefault(key, set())
        if key not in self._fresh:
            self._fresh.add(key)
            found |= compute()
        return found

    def function(self, dotted: str) -> Function | None:
        """The statement of a function that was met."""
        scope = self._functions.get(dotted)
        return None if scope is None else scope.function

    def member(self, cls: str, name: str) -> tuple[str | None, set[Thing]]:
        """The class that defines a member, and what the member may be."""
        for owner in self.mro(cls):
            if name in owner.members:
                key = ("member", owner.name, name)
                return owner.name, self._fixed(key, lambda o=owner: self._member(o, name))
        return None, set()

    def _member(self, cls: Class, name: str) -> set[Thing]:
        scope = Scope(cls.module, cls.name)
        found: set[Thing] = set()
        for method in cls.methods.get(name, ()):
            if any("property" in ast.unparse(decorator) for decorator in method.decorator_list):
                self.scope_of(method, scope)
                found |= self._returned(f"{cls.name}.{name}")
            else:
                found |= self._function(method, scope)
        values = cls.body.get(name, [])
        annotations = [value for value in values if value in cls.module.annotations]
        for value in annotations or values:
            found |= self._bound(value, scope)
        for value, method in cls.on_self.get(name, ()):
            found |= self._bound(value, self.scope_of(method, scope))
        return found

    def _bound(self, value: ast.AST, scope: Scope) -> set[Thing]:
        if value in scope.module.annotations:
            return self.annotated(value, scope)
        return self.types(value, scope)

    def annotated(self, node: ast.AST | None, scope: Scope) -> set[Thing]:
        """Instances of all classes that an annotation names."""
        if node is None:
            return set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.annotated(ast.parse(node.value, mode="eval").body, scope)
            except SyntaxError:
                return set()
        if isinstance(node, ast.Name | ast.Attribute):
            found = set()
            for dotted in scope.module.dotted(node):
                for thing in self.find(dotted):
                    kind = "instance" if thing.kind == "class" else thing.kind
                    found.add(thing._replace(kind=kind))
            return {thing for thing in found if thing.kind == "instance"}
        if isinstance(node, ast.Subscript):
            name = chain(node.value).rpartition(".")[2]
            if name in ("type", "Type"):
                made = self.annotated(node.slice, scope)
                return {thing._replace(kind="class") for thing in made}
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name == "Callable":
                parts = parts[-1:]
            if name == "Literal":
                return set()
            return self.annotated(node.value, scope).union(
                *(self.annotated(part, scope) for part in parts)
            )
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left, scope) | self.annotated(node.right, scope)
        if isinstance(node, ast.List | ast.Tuple):
            return set().union(*(self.annotated(part, scope) for part in node.elts))
        return set()

    def _returned(self, function: str) -> set[Thing]:
        return self._fixed(("returned", function), lambda: self._compute_returned(function))

    def _compute_returned(self, function: str) -> set[Thing]:
        scope = self._functions.get(function)
        if scope is None or scope.function is None:
            return set()
        found = self.annotated(scope.function.returns, scope)
        if not found:
            for part in inside(scope.function):
                if isinstance(part, ast.Return | ast.Yield) and part.value is not None:
                    found |= self.types(part.value, scope)
        return found

    def types(self, node: ast.AST, scope: Scope) -> set[Thing]:
        """What an expression may be."""
        return self._fixed(node, lambda: self._types(node, scope))

    def _types(self, node: ast.AST, scope: Scope) -> set[Thing]:
        if isinstance(node, ast.Name):
            return self._named(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, node.value, node.attr, scope) | self._narrowed(node, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Subscript):
            owners = node.value
            if isinstance(owners, ast.Attribute) and owners.attr == "__annotations__":
                if isinstance(node.slice, ast.Constant):
                    self._attribute(node, owners.value, str(node.slice.value), scope)
            return self.types(owners, scope)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare | ast.Lambda | ast.Slice):
            return set()
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self.types(node.elt, scope)
        if isinstance(node, ast.DictComp):
            return self.types(node.value, scope) | self.types(node.key, scope)
        if isinstance(node, ast.IfExp):
            return self.types(node.body, scope) | self.types(node.orelse, scope)
        if isinstance(node, ast.expr):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            return set().union(*(self.types(part, scope) for part in parts))
        return set()

    def _named(self, name: str, scope: Scope) -> set[Thing]:
        found = self._narrowed_name(name, scope)
        where: Scope | None = scope
        while where is not None and where.function is not None:
            known = False
            for index, parameter in enumerate(where.parameters):
                if parameter.arg == name:
                    known = True
                    found |= self._parameter(where, index, parameter)
            if name in where.functions:
                known = True
                found |= self._function(where.functions[name], where)
            for value in where.bound.get(name, ()):
                known = True
                found |= self._bound(value, where)
            if known:
                return found
            where = where.outer
        return found | self._in_module(scope.module, name)

    def _narrowed(self, node: ast.AST, scope: Scope) -> set[Thing]:
        name = chain(node)
        return self._narrowed_name(name, scope) if name else set()

    def _narrowed_name(self, name: str, scope: Scope) -> set[Thing]:
        """Instances of the classes that a name or a chain of attributes is checked for."""
        found = set()
        for classes in scope.checked.get(name, ()):
            found |= {t._replace(kind="instance") for t in self.types(classes, scope)}
        return found

    def _parameter(self, scope: Scope, index: int, parameter: ast.arg) -> set[Thing]:
        function, cls = scope.function, scope.cls
        assert function is not None
        in_class = cls is not None and scope.outer is not None and scope.outer.function is None
        if index == 0 and in_class and isinstance(function, Function):
            decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
            if "staticmethod" in decorators:
                return self._table.setdefault(("given", function, parameter.arg), set())
            kind = "class" if "classmethod" in decorators else "instance"
            return {Thing(kind, c.name) for c in self._and_descendants(cls)} | {Thing(kind, cls)}
        found = self.annotated(parameter.annotation, scope)
        if not found:
            found = found | self._table.setdefault(("given", function, parameter.arg), set())
        return found

    def _attribute(self, node: ast.AST, value: ast.AST, name: str, scope: Scope) -> set[Thing]:
        found: set[Thing] = set()
        known = False
        owners = self.types(value, scope)
        for thing in sorted(owners):
            if thing.kind == "module":
                more = self._in_module(self.sources.module(thing.name), name)
                more = more or self.find(f"{thing.name}.{name}")
                known = True
                self._note(f"{thing.name}.{name}", node, scope)
                found |= more
            elif thing.kind in ("class", "instance"):
                owner, more = self.member(thing.name, name)
                if owner is not None:
                    known = True
                    if name != "__init__":
                        self._note(f"{owner}.{name}", node, scope)
                    found |= more
            elif thing.kind == "function" and is_private(thing.name.rpartition(".")[2]):
                self._note(f"{thing.name}.{name}", node, scope)  # such as a cache's cache_clear
        if known:
            return found
        self._unknown(name, node, scope)
        return {thing for thing in owners if thing.kind == "instance"}  # a container's method

    def _call(self, node: ast.Call, scope: Scope) -> set[Thing]:
        name = chain(node.func)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name == "super":
            return self._super(scope)
        if name in ("cast", "typing.cast"):
            return self.annotated(node.args[0], scope)
        if name.rpartition(".")[2] in ("getattr", "setattr", "hasattr", "delattr"):
            return self._by_string(node, scope)
        last = name.rpartition(".")[2]
        if last in ("resolve_name", "import_module") and isinstance(values[0], ast.Constant):
            return self.find(str(values[0].value).replace(":", "."))
        if last == "replace":  # of dataclasses
            self._members_named(node, scope)
        called = self.types(node.func, scope)
        found = set()
        for thing in sorted(called):
            if thing.kind == "class":
                found.add(Thing("instance", thing.name))
                self._give(f"{thing.name}.__init__", node, scope, bound=True)
                self._constructed(thing.name, node, scope)
            elif thing.kind == "function":
                if thing.name.startswith("vllm."):
                    self._members_named(node, scope)
                bound = isinstance(node.func, ast.Attribute) and any(
                    owner.kind == "instance" for owner in self.types(node.func.value, scope)
                )
                self._give(thing.name, node, scope, bound=bound)
                found |= self._returned(thing.name)
            elif thing.kind == "instance":
                found |= self.member(thing.name, "__call__")[1] or {thing}
        if not called and name in dir(builtins):  # such as list(...) or sorted(...)
            found = found.union(*(self.types(value, scope) for value in values))
            for value in values:
                if isinstance(value, ast.Lambda):  # a key
                    self._give_lambda(value, [found] * len(value.args.args))
        return found

    def _give_lambda(self, node: ast.Lambda, given: list[set[Thing]]) -> None:
        for parameter, things in zip(node.args.args, given, strict=False):
            self._table.setdefault(("given", node, parameter.arg), set()).update(things)

    def _give_callable(self, node: ast.AST, annotation: ast.AST | None, scope: Scope) -> None:
        """Parameters of a lambda that is passed where ``Callable[[A, B], C]`` is expected."""
        if isinstance(node, ast.Lambda) and isinstance(annotation, ast.Subscript):
            parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
            if parts and isinstance(parts[0], ast.List):
                self._give_lambda(node, [self.annotated(part, scope) for part in parts[0].elts])

    def _constructed(self, cls: str, node: ast.Call, scope: Scope) -> None:
        """A call of a class uses its ``__init__``, or its fields if it is generated from them."""
        owner, _ = self.member(cls, "__init__")
        if owner is not None:
            self._note(f"{owner}.__init__", node, scope)
            return
        self._note(f"{cls}.__init__", node, scope)
        for keyword in node.keywords:
            owner, _ = self.member(cls, keyword.arg or "")
            if owner is not None:
                self._note(f"{owner}.{keyword.arg}", node, scope)
        fields = {
            name: (values[0], Scope(c.module))
            for c in reversed(self.mro(cls))
            for name, values in c.body.items()
            if values[0] in c.module.annotations
        }
        by_position = zip(fields, node.args, strict=False)
        for name, value in (*by_position, *((k.arg, k.value) for k in node.keywords)):
            if name in fields:
                self._give_callable(value, *fields[name])

    def _members_named(self, node: ast.Call, scope: Scope) -> None:
        """Fields that a call names, as ``replace_as(spec, Spec, drop=("sliding_window",))``."""
        names = {keyword.arg for keyword in node.keywords if keyword.arg}
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                names.add(part.value)
        for value in node.args:
            for thing in self.types(value, scope):
                for name in names:
                    owner, _ = self.member(thing.name, name)
                    if owner is not None:
                        self._note(f"{owner}.{name}", node, scope)

    def _super(self, scope: Scope) -> set[Thing]:
        """Instances of the classes that may follow in the method resolution order."""
        if scope.cls is None:
            return set()
        found = set()
        for cls in self._and_descendants(scope.cls):
            order = [ancestor.name for ancestor in self.mro(cls.name)]
            after = order[order.index(scope.cls) + 1 :]
            found |= {Thing("instance", name) for name in after[:1]}
        return found

    def _by_string(self, node: ast.Call, scope: Scope) -> set[Thing]:
        """``getattr`` and its like, and pytest's ``monkeypatch.setattr``."""
        if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
            return set()
        owner, name = node.args[0], str(node.args[1].value)
        if chain(node.func).endswith("setattr"):
            for thing in self.types(owner, scope):
                if thing.kind in ("module", "class"):
                    self._note_replaced(thing, name, node, scope)
        found = self._attribute(node, owner, name, scope)
        return found.union(*(self.types(value, scope) for value in node.args[2:]))

    def _give(self, function: str, node: ast.Call, scope: Scope, *, bound: bool) -> None:
        """Note what a function of ours is called with, for parameters without a type."""
        own = self._functions.get(function)
        if own is None or own.module.name not in self.sources.ours:
            owner, _, name = function.rpartition(".")
            for cls in self.mro(owner):
                if name in cls.methods and cls.module.name in self.sources.ours:
                    own = self.scope_of(cls.methods[name][0], Scope(cls.module, cls.name))
                    break
            else:
                return
        assert own.function is not None
        positional = [*own.function.args.posonlyargs, *own.function.args.args]
        for parameter, value in zip(positional[int(bound) :], node.args, strict=False):
            if not isinstance(value, ast.Starred):
                self._given(own, parameter.arg, self.types(value, scope))
                self._give_callable(value, parameter.annotation, own)
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._given(own, keyword.arg, self.types(keyword.value, scope))

    def _given(self, own: Scope, name: str, things: set[Thing]) -> None:
        self._table.setdefault(("given", own.function, name), set()).update(things)

    # --- what is used -----------------------------------------------------------------------------

    def _replaced(self, node: ast.Assign, scope: Scope) -> None:
        """Assignments to members of another package's classes and modules."""
        for target, value in assigned(node):
            if not isinstance(target, ast.Attribute):
                continue
            for thing in self.types(target.value, scope):
                if thing.kind not in ("module", "class") or thing.name.split(".")[0] not in FOREIGN:
                    continue
                self._note_replaced(thing, target.attr, target, scope)
                for ours in self.types(value, scope):
                    own = self._functions.get(ours.name)
                    if thing.kind == "class" and own is not None and own.parameters:
                        self._given(own, own.parameters[0].arg, {Thing("instance", thing.name)})

    def _note_replaced(self, thing: Thing, name: str, node: ast.AST, scope: Scope) -> None:
        if thing.name.split(".")[0] in FOREIGN and scope.module.name in self._noted:
            place = f"{scope.module.name}:{getattr(node, 'lineno', 0)}"
            self.uses.setdefault(Use(f"{thing.name}.{name}", "replaced"), set()).add(place)

    def _note(self, target: str, node: ast.AST, scope: Scope) -> None:
        package, *_, last = target.split(".")
        if scope.module.name not in self._noted or package not in FOREIGN:
            return
        if (last.startswith("__") and last != "__init__") or self.sources.module(target):
            return
        if not self._counts(target):
            return
        place = f"{scope.module.name}:{getattr(node, 'lineno', 0)}"
        self.uses.setdefault(Use(target, "used"), set()).add(place)

    def _counts(self, target: str) -> bool:
        """Any name of vLLM; of torch and Triton, what is private or in Triton's inner modules."""
        package, *_, last = target.split(".")
        return package == "vllm" or is_private(last) or target.startswith(INNER)

    def _unknown(self, name: str, node: ast.AST, scope: Scope) -> None:
        if scope.module.name in self._noted:
            place = f"{scope.module.name}:{getattr(node, 'lineno', 0)}"
            self.unknown.setdefault(name, set()).add(place)

    def _overridden(self) -> None:
        for cls in self.our_classes:
            if cls.module.name not in self._noted:
                continue
            order = self.mro(cls.name)
            ours = {c.name for c in order if c.module.name in self.sources.ours}
            members = {name for c in order if c.name in ours for name in c.members}
            for name in members:
                for ancestor in order:
                    if ancestor.name not in ours and name in ancestor.members:
                        target = f"{ancestor.name}.{name}"
                        if self._counts(target):
                            use = Use(target, "overridden")
                            self.uses.setdefault(use, set()).add(f"{cls.name}.{name}")
                        break

    def _imported(self) -> None:
        for module in self._noted.values():
            for whole in (name for names in module.imports.values() for name in names):
                package, *rest = whole.split(".")
                private = any(map(is_private, rest))
                if package == "vllm" or (package in FOREIGN and private) or whole.startswith(INNER):
                    self._import(whole, module)

    def _in_strings(self) -> None:
        """Class paths and environment variables of vLLM that are written as strings."""
        for module in self._noted.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    *owner, last = node.value.split(".")
                    if owner[:1] == ["vllm"] and re.fullmatch(r"[A-Z]\w*", last):
                        self._import(node.value, module)
                    if re.fullmatch(r"VLLM_(?!CASCADE_)[A-Z0-9_]+", last):
                        self._import(f"vllm.envs.{last}", module)

    def _guessed(self, only_private: bool) -> None:
        """Owners of attributes that flow does not find, by the attributes' names.

        They are classes that our source meets, or else their neighbours; ``*`` where only other
        files of vLLM have such a member. Names that our own classes or well-known types have are
        left out.
        """
        met = {thing.name for things in self._table.values() for thing in things}
        for module in self._noted.values():
            for whole in (name for names in module.imports.values() for name in names):
                met |= {thing.name for thing in self.find(whole)}
        modules = {self.sources.module(name.rpartition(".")[0]) for name in sorted(met)}
        near = [cls for m in modules if m for cls in m.classes.values()]
        ordinary = self._ordinary()
        elsewhere = vllm_members(self.sources.packages.folder("vllm"))
        for name, places in self.unknown.items():
            if name in ordinary or name.startswith("__"):
                continue
            if only_private and not is_private(name):
                continue
            having = [c for c in near if name in c.members and c.name.startswith("vllm.")]
            owners = [c.name for c in having if c.name in met] or [c.name for c in having]
            if not owners and (name in elsewhere or is_private(name)):
                owners = ["*"]
            for owner in owners:
                self.uses.setdefault(Use(f"{owner}.{name}", "used"), set()).update(places)

    def _ordinary(self) -> set[str]:
        """Names that our classes and modules, or well-known types, have."""
        found = set(COMMON)
        for module in self.sources.ours.values():
            found |= module.functions.keys() | module.values.keys() | module.classes.keys()
        return found.union(*(cls.members for cls in self.our_classes))

    def _import(self, whole: str, module: Module) -> None:
        if whole not in FOREIGN:
            self.uses.setdefault(Use(whole, "used"), set()).add(module.name)
