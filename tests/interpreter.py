# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again at every call.

It replaces the operations of ``triton.language`` at every launch and once more in every function
that a kernel calls, and looks for them among all names of the module each time. In kernels made of
small functions that is a third to a half of the time. Here it looks once, and what a launch has
replaced stays until its end. What Triton's own functions call (``tl.sum`` and others) stays
replaced for good, as it does without this.
"""

import inspect
from functools import wraps
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

UNTOUCHED = tl.static_range
"""What the interpreter replaces first of all that it replaces."""


def quicken() -> None:
    """Change the interpreter of this process."""
    builtins: dict[Any, list[tuple[str, Any]]] = {}
    call_anywhere = interpreter.InterpretedFunction.__call__
    replaced_in_core = False

    @wraps(interpreter._patch_builtin)
    def patch_builtins(package: Any, builder: Any, *scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [pair for pair in members if tl.core.is_builtin(pair[1])]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, *scope)

    @wraps(call_anywhere)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal replaced_in_core
        if tl.static_range is UNTOUCHED:  # by the host, within no launch
            return call_anywhere(function, *args, **kwargs)
        if not replaced_in_core and tl.core in function.fn.__globals__.values():
            replaced_in_core = True
            interpreter._patch_lang(function.fn)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtins
    interpreter.InterpretedFunction.__call__ = call
