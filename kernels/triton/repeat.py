# SPDX-License-Identifier: Apache-2.0
"""Launches of one layer, repeated for the other layers of a step.

Outside CUDA graphs all layers of a model launch the same kernels in a step, with the step's
arguments; only a layer's constants and its new rows differ. So the first layer's launches are noted
(``launch.noted``), and each other layer's follow in one call of C (``repeat.cpp``), which takes the
host about as long as Python takes for one launch.

A layer repeats only launches like those that it has made itself in an earlier step, after the first
layer's: then its own kernels are known, and it was compared that all other arguments were the same.
Callers note launches only where nothing else than ``Launcher`` uses the device.
"""

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from triton.runtime.driver import driver

from vllm_cascade.kernels.cpp.build import build

from .launch import Launched, Launcher, Variant, profiled
from .strides import Tokens

ROWS = ("query", "key", "value", "output")
"""Names of arguments that are a layer's new rows."""
MOST_ARGUMENTS = 96  # as in repeat.cpp
SOURCE = Path(__file__).with_name("repeat.cpp")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
MOST_PATTERNS = 256
"""Kinds of steps that a layer can repeat at once. There are about as many as kinds of batches."""
MOST_LAUNCHES = 1024
"""Of a layer that is repeated; a prompt has four for each stride."""


class Rows(NamedTuple):
    """An argument that is a layer's new rows, or some of them.

    Attributes:
        begin: bytes from the first row of this name.
    """

    begin: int
    shape: torch.Size
    stride: tuple[int, ...]


class Launches:
    """What a layer launched in a step. Its rows are not kept in memory.

    Attributes:
        launched: the launches, in their order, with ``Rows`` instead of the layer's.
        rows: ``Tokens.variant`` of these.
        pattern: says which kernels, and what they are compiled for; equal for equal ones only.
    """

    def __init__(self, launched: Sequence[Launched], tokens: Tokens) -> None:
        begins, self.rows = addresses(tokens), tokens.variant
        self.launched: list[Launched] = []
        for launcher, grid, variant, own in launched:
            moved = {name: _row(own[name], begin) for name, begin in begins.items() if name in own}
            self.launched.append((launcher, grid, variant, own | moved))
        kernels = [(launcher.name, variant) for launcher, _, variant, _ in launched]
        self.pattern = _number((self.rows, *kernels))
        self._packed: tuple[np.ndarray, ...] | None = None

    def packed(self, kernels: "Sequence[Kernel]") -> tuple[np.ndarray, ...]:
        """Grids, the step's arguments and their bases, as repeat.cpp takes them; made once.

        Args:
            kernels: of any layer that repeats these launches.
        """
        if self._packed is None:
            grids: list[int] = []
            values: list[int] = []
            bases: list[int] = []
            for kernel, (_, grid, _, own) in zip(kernels, self.launched, strict=True):
                grids += grid
                for name in kernel.names:
                    value, base = own[name], 0
                    if isinstance(value, Rows):
                        value, base = value.begin, 1 + ROWS.index(name)
                    elif isinstance(value, torch.Tensor):
                        value = value.data_ptr()
                    values.append(value)
                    bases.append(base)
            arrays = (grids, np.uint32), (values, np.int64), (bases, np.uint8)
            self._packed = tuple(np.array(numbers, dtype=kind) for numbers, kind in arrays)
        return self._packed


def addresses(tokens: Tokens) -> dict[str, int]:
    """Of the layer's new rows, by name; 0 for those that it has not."""
    rows = tokens.query, tokens.key, tokens.value, tokens.output
    return {
        name: 0 if one is None else one.data_ptr() for name, one in zip(ROWS, rows, strict=True)
    }


def _row(value: Any, begin: int) -> Any:
    if value is None:
        return None
    return Rows(value.data_ptr() - begin, value.shape, value.stride())


_patterns: dict[tuple[Any, ...], int] = {}
_numbers = itertools.count()


def _number(pattern: tuple[Any, ...]) -> int:
    """A number for a pattern. One that has not been seen for long gets another number."""
    found = _patterns.pop(pattern, None)
    _patterns[pattern] = number = next(_numbers) if found is None else found
    if len(_patterns) > MOST_PATTERNS:
        del _patterns[next(iter(_patterns))]
    return number


class Repeater:
    """Launches for one layer what another of the step has launched.

    Attributes:
        number: how often any layer has done so in this process.
        known: how to, by pattern; None: launches of the pattern differed.
    """

    number: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[int, Callable[[Launches, Tokens], None] | None] = {}

    def __call__(self, first: Launches, tokens: Tokens) -> bool:
        """Launch with the layer's ``tokens``.

        Args:
            first: the other layer's launches.

        Returns:
            False: nothing was launched, because the layer has not launched the like yet.
        """
        repeat = self.known.get(first.pattern)
        if repeat is None or tokens.variant != first.rows or profiled():
            return False
        repeat(first, tokens)
        Repeater.number += 1
        return True

    def learn(self, own: Launches, first: Launches) -> None:
        """Be able to repeat launches like ``first`` if the layer's ``own`` were the same."""
        if own.rows != first.rows or first.pattern in self.known:
            return
        if len(self.known) >= MOST_PATTERNS:
            self.known.pop(next(iter(self.known)))
        few = len(own.launched) <= MOST_LAUNCHES
        self.known[first.pattern] = _repeat(own) if few and _are_same(own, first) else None


def _are_same(own: Launches, first: Launches) -> bool:
    """Whether launches of two layers differ in nothing but the layers' constants and rows."""
    return own.pattern == first.pattern and all(
        mine[1] == theirs[1] and _described(mine) == _described(theirs)
        for mine, theirs in zip(own.launched, first.launched, strict=True)
    )


def _described(launched: Launched) -> list[tuple[str, Any]]:
    """A launch's arguments, as what can be compared."""
    return [
        (name, (x.data_ptr(), x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x)
        for name, x in launched[3].items()
    ]


def _repeat(own: Launches) -> Callable[[Launches, Tokens], None] | None:
    """How to repeat a layer's launches; None: not at all."""
    launchers = [launcher for launcher, *_ in own.launched]
    if all(launcher.is_interpreted for launcher in launchers):
        return _Interpreted(launchers)
    if library() is None:
        return None
    kernels = [_kernel_of(launcher, variant, own) for launcher, _, variant, own in own.launched]
    found = [kernel for kernel in kernels if kernel is not None]
    return _Native(found) if len(found) == len(kernels) else None


class _Interpreted:
    """Repeats kernels that Triton's interpreter runs, as C would on a card."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._launchers = launchers

    def __call__(self, first: Launches, tokens: Tokens) -> None:
        for launcher, (_, grid, variant, own) in zip(self._launchers, first.launched, strict=True):
            moved = {name: _of_layer(name, value, tokens) for name, value in own.items()}
            launcher(grid, variant, **moved)


def _of_layer(name: str, value: Any, tokens: Tokens) -> Any:
    """An argument with the layer's rows."""
    if not isinstance(value, Rows):
        return value
    rows = getattr(tokens, name)
    begin = rows.storage_offset() + value.begin // rows.element_size()
    return rows.as_strided(value.shape, value.stride, begin)


# --- compiled kernels -----------------------------------------------------------------------------


class _Bound(ctypes.Structure):
    """``Bound`` of repeat.cpp."""

    _fields_: ClassVar = [
        ("function", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("num_arguments", ctypes.c_int32),
        ("num_places", ctypes.c_int32),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
    ]


class Kernel:
    """A compiled kernel with a layer's constants.

    Attributes:
        names: of the step's arguments that the kernel takes, in the order of calls.
        bound: what C is given.

    Args:
        own: names of the step's arguments, in the order of calls.
    """

    def __init__(self, launcher: Launcher, compiled: Any, own: Sequence[str]) -> None:
        types = {x: kind for x, kind in compiled.src.signature.items() if kind != "constexpr"}
        order = list(types)
        self.names = [name for name in own if name in types]
        # Two more: Triton's scratch memory, which these kernels have not.
        self._arguments = np.zeros(len(order) + 2, dtype=np.uint64)
        assert len(self._arguments) <= MOST_ARGUMENTS, order
        for place, name in enumerate(order):
            if name in launcher.fixed:
                self._arguments[place] = _word(launcher.fixed[name], types[name])
        self._places = np.array([order.index(name) for name in self.names], dtype=np.int32)
        self._layer = launcher.fixed  # keeps tensors alive
        self.bound = _Bound(
            compiled.function,
            self._arguments.ctypes.data,
            self._places.ctypes.data,
            len(self._arguments),
            len(self._places),
            32 * compiled.metadata.num_warps,
            compiled.metadata.shared,
        )


def _kernel_of(launcher: Launcher, variant: Variant, own: dict[str, Any]) -> Kernel | None:
    """A launcher's kernel, made once; None if it cannot be launched as here."""
    if variant not in launcher.repeated:
        compiled = launcher.chosen(variant)
        found = Kernel(launcher, compiled, list(own)) if _is_plain(compiled) else None
        launcher.repeated[variant] = found
    return launcher.repeated[variant]


def _is_plain(compiled: Any) -> bool:
    """Whether a kernel is known, and is launched without clusters, scratch memory and the like."""
    if compiled is None:
        return False
    run, metadata = compiled.run, compiled.metadata
    unusual = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size")
    return metadata.num_ctas == 1 and not any(
        getattr(run, name, True) for name in (*unusual, "profile_scratch_size")
    )


def _word(value: Any, kind: str) -> int:
    """An argument's bytes, as a number."""
    if isinstance(value, torch.Tensor):
        return _on_device(value.data_ptr())
    if kind.startswith("fp"):
        assert kind == "fp32", kind
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value) & (2**64 - 1)


def _on_device(address: int) -> int:
    """Where kernels find what the host finds at an address; pinned memory may be elsewhere."""
    found, cuda = ctypes.c_uint64(), ctypes.CDLL("libcuda.so.1")
    error = cuda.cuPointerGetAttribute(
        ctypes.byref(found), DEVICE_POINTER, ctypes.c_uint64(address)
    )
    if error:
        raise RuntimeError(f"CUDA does not know the memory of a kernel's argument: error {error}")
    return found.value


class _Native:
    """Repeats compiled kernels."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels, self._num = kernels, sum(len(kernel.names) for kernel in kernels)
        bound = [ctypes.addressof(kernel.bound) for kernel in kernels]
        self._bound = (ctypes.c_void_p * len(bound))(*bound)

    def __call__(self, first: Launches, tokens: Tokens) -> None:
        launch = library()
        assert launch is not None, "there is one where compiled kernels are repeated"
        active: Any = driver.active
        stream = active.get_current_stream(active.get_current_device())
        grids, values, bases = first.packed(self._kernels)
        assert len(values) == self._num, "kernels are specialised alike"
        rows = (ctypes.c_uint64 * 5)(0, *addresses(tokens).values())
        arrays = grids.ctypes.data, values.ctypes.data, bases.ctypes.data
        error = launch(stream, len(self._kernels), self._bound, *arrays, rows)
        if error:
            raise RuntimeError(f"a layer's launches failed: CUDA error {error}")


@lru_cache(maxsize=1)
def library() -> Callable[..., int] | None:
    """``repeat_launches`` without its first argument; None on machines without CUDA's driver.

    The first call compiles it.

    Raises:
        BuildError: it cannot be compiled.
    """
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    repeat = ctypes.CDLL(str(build(None, "launches", SOURCE, FLAGS))).repeat_launches
    pointer = ctypes.c_void_p
    repeat.argtypes = [pointer, pointer, ctypes.c_int, *[pointer] * 5]
    repeat.restype = ctypes.c_int
    return partial(repeat, ctypes.cast(launch, pointer))
