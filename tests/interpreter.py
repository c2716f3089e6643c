# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again at every call.

It replaces the operations of ``triton.language`` at every launch and once more in every function
that a kernel calls, and looks for them among all names of the module each time; it describes every
tensor's shape and type anew; and it computes with integers a second time in 64 bits, to compare
the two and, unless ``debug`` is set, to ignore what it finds. In kernels of small functions and
small tiles that is most of the time. Here it looks once, what a launch has replaced stays until
its end, descriptions are kept, and nothing is computed to be ignored. What Triton's own functions
call (``tl.sum`` and others) stays replaced for good, as it does without this.
"""

import inspect
from dataclasses import replace
from functools import wraps
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

UNTOUCHED = tl.static_range
"""What the interpreter replaces first of all that it replaces."""


def quicken() -> None:
    """Change the interpreter of this process."""
    replace_operations_once()
    keep_types()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "an overflow is somebody's business after all"
    builder.options = replace(builder.options, sanitize_overflow=False)


def replace_operations_once() -> None:
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


def keep_types() -> None:
    """One description of each shape and each type, which nothing changes once they are made."""
    describe_block, describe_tensor = tl.block_type.__init__, tl.tensor.__init__
    numpy_type = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    @wraps(describe_block)
    def block(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        known = blocks.get((element_ty.name, sizes))
        if known is None:
            describe_block(self, element_ty, shape)
            blocks[element_ty.name, sizes] = vars(self).copy()
        else:
            vars(self).update(known, element_ty=element_ty)

    @wraps(describe_tensor)
    def tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            describe_tensor(self, handle, type)
            shapes[sizes] = {"shape": self.shape, "numel": self.numel}
        else:
            vars(self).update(known, handle=handle, type=type, dtype=type.scalar)

    @wraps(numpy_type)
    def of_numpy(kind: tl.dtype) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = of_numpy
