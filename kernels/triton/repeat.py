# SPDX-License-Identifier: Apache-2.0
"""Launches of one layer, repeated for the other layers of a step.

Outside CUDA graphs all layers of a model launch the same kernels in a step, with the step's
arguments; only a layer's constants and its new rows differ. So the first layer's launches are noted
(``launch.noted``), and each other layer's follow in one call of C (``repeat.cpp``), which takes the
host about as long as Python takes for one launch.

A layer repeats a launch once it has made the like itself in an earlier step, after the first layer:
then its own kernel is known, and it was compared that all arguments but the layer's were the same.
Callers note launches only where nothing but ``Launcher`` and ``between`` uses the device.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from triton.runtime.driver import driver

from vllm_cascade.kernels.cpp.build import BuildError, build

from .launch import Between, Launched, Launcher, Variant, profiled
from .strides import Tokens

ROWS = ("query", "key", "value", "output")
"""Names of arguments that are a layer's new rows."""
MOST_ARGUMENTS = 96  # as in repeat.cpp
SOURCE = Path(__file__).with_name("repeat.cpp")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER


_kinds: dict[tuple[int, Variant], int] = {}


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
        parts: in their order; those that launch one after another are one.
        launched: all launches, with ``Rows`` instead of the layer's.
        kinds: a number for each one's launcher and variant.
        rows: ``Tokens.variant`` of the layer's rows.
    """

    def __init__(self, noted: Sequence[Launched | Between], tokens: Tokens) -> None:
        begins, self.rows = addresses(tokens), tokens.variant
        self.parts: list[Part | Between] = []
        self.launched: list[Launched] = []
        part: Part | None = None
        for one in noted:
            if isinstance(one, Between):
                self.parts.append(one)
                part = None
                continue
            if part is None:
                self.parts.append(part := Part())
            launcher, grid, variant, own = one
            moved = {name: _row(own[name], begin) for name, begin in begins.items() if name in own}
            part.launched.append((launcher, grid, variant, own | moved))
            self.launched.append(part.launched[-1])
        kinds = ((launcher.number, variant) for launcher, _, variant, _ in self.launched)
        self.kinds = [_kinds.setdefault(kind, len(_kinds)) for kind in kinds]


class Part:
    """Launches with nothing between them."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self._packed: list[np.ndarray] = []
        self._addresses: tuple[int, ...] = ()

    def packed(self, kernels: "Sequence[Kernel]") -> tuple[int, ...]:
        """Where grids, the step's arguments and their bases are, as repeat.cpp takes them.

        Args:
            kernels: of any layer that repeats these launches.
        """
        if not self._packed:
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
            self._packed = [np.array(numbers, dtype=kind) for numbers, kind in arrays]
            self._addresses = tuple(one.ctypes.data for one in self._packed)
        return self._addresses


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


class Repeater:
    """Launches for one layer what another of the step has launched.

    Attributes:
        number: how often any layer has done so in this process.
        known: what launches the layer's kernel, by the kind of the other layer's launch; None: they
            differ.
    """

    number: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[int, Kernel | Launcher | None] = {}

    def __call__(self, first: Launches, tokens: Tokens) -> bool:
        """Launch with the layer's ``tokens``.

        Args:
            first: the other layer's launches.

        Returns:
            False: nothing was launched, because the layer has not launched the like yet.
        """
        known = self.known
        kernels: list[Any] = [known.get(kind) for kind in first.kinds]
        if None in kernels or not kernels or tokens.variant != first.rows or profiled():
            return False
        run, known_ones = _interpret if isinstance(kernels[0], Launcher) else _repeat, iter(kernels)
        for part in first.parts:
            if isinstance(part, Between):
                part()
            else:
                run(list(islice(known_ones, len(part.launched))), part, tokens)
        Repeater.number += 1
        return True

    def learn(self, own: Launches, first: Launches) -> None:
        """Be able to repeat launches like ``first``, where the layer's ``own`` are the same."""
        if own.rows != first.rows or _order(own) != _order(first):
            return
        for kind, mine, theirs in zip(first.kinds, own.launched, first.launched, strict=True):
            if kind not in self.known:
                self.known[kind] = _repeating(mine) if _are_same(mine, theirs) else None


def _order(launches: Launches) -> list[Any]:
    """How many launches come between what else is done, and what that is."""
    return [
        [part.function, *map(_comparable, part.given)]
        if isinstance(part, Between)
        else len(part.launched)
        for part in launches.parts
    ]


def _are_same(own: Launched, first: Launched) -> bool:
    """Whether two layers' launches differ in nothing but the layers' constants and rows."""
    kernels = (own[0].name, *own[1:3]), (first[0].name, *first[1:3])
    same = kernels[0] == kernels[1] and _described(own) == _described(first)
    return same and _taken(own) == _taken(first)


def _described(launched: Launched) -> list[tuple[str, Any]]:
    """A launch's arguments, as what can be compared."""
    return [(name, _comparable(value)) for name, value in launched[3].items()]


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return value


def _taken(launched: Launched) -> list[str]:
    """Names of the step's arguments that a compiled kernel takes, in the order of the call."""
    launcher, _, variant, own = launched
    compiled = launcher.chosen(variant)
    types = {} if compiled is None else compiled.src.signature
    return [name for name in own if types.get(name, "constexpr") != "constexpr"]


def _interpret(launchers: Sequence[Launcher], first: Part, tokens: Tokens) -> None:
    """Repeat kernels that Triton's interpreter runs, as C would on a card."""
    for launcher, (_, grid, variant, own) in zip(launchers, first.launched, strict=True):
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
        address: of what C is given.
    """

    def __init__(self, launcher: Launcher, compiled: Any, names: list[str]) -> None:
        types = {x: kind for x, kind in compiled.src.signature.items() if kind != "constexpr"}
        order = list(types)
        self.names = names
        # Two more: Triton's scratch memory, which these kernels have not.
        self._arguments = np.zeros(len(order) + 2, dtype=np.uint64)
        assert len(self._arguments) <= MOST_ARGUMENTS, order
        for place, name in enumerate(order):
            if name in launcher.fixed:
                self._arguments[place] = _word(launcher.fixed[name], types[name])
        self._places = np.array([order.index(name) for name in self.names], dtype=np.int32)
        self._kept = launcher.fixed, compiled  # alive
        self._bound = _Bound(
            compiled.function,
            self._arguments.ctypes.data,
            self._places.ctypes.data,
            len(self._arguments),
            len(self._places),
            32 * compiled.metadata.num_warps,
            compiled.metadata.shared,
        )
        self.address = ctypes.addressof(self._bound)


def _repeating(own: Launched) -> Kernel | Launcher | None:
    """What repeats a layer's launch; None if it cannot be repeated."""
    launcher, _, variant, _ = own
    if launcher.is_interpreted:
        return launcher
    compiled = launcher.chosen(variant)
    return Kernel(launcher, compiled, _taken(own)) if _is_plain(compiled) else None


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
    if address == 0:  # of a tensor without elements
        return 0
    found, cuda = ctypes.c_uint64(), ctypes.CDLL("libcuda.so.1")
    error = cuda.cuPointerGetAttribute(
        ctypes.byref(found), DEVICE_POINTER, ctypes.c_uint64(address)
    )
    if error:
        raise RuntimeError(f"CUDA does not know the memory of a kernel's argument: error {error}")
    return found.value


def _repeat(kernels: Sequence[Kernel], first: Part, tokens: Tokens) -> None:
    """Launch compiled kernels."""
    launch = library()
    assert launch is not None, "there is one where kernels are compiled"
    active: Any = driver.active
    stream = active.get_current_stream(active.get_current_device())
    grids, values, bases = first.packed(kernels)
    bound = array("Q", [kernel.address for kernel in kernels])
    rows = array("Q", (0, *addresses(tokens).values()))
    told = bound.buffer_info()[0], grids, values, bases, rows.buffer_info()[0]
    error = launch(stream, len(kernels), *told)
    if error:
        raise RuntimeError(f"a layer's launches failed: CUDA error {error}")


def library() -> Callable[..., int] | None:
    """``repeat_launches`` without its first argument; None on machines without CUDA's driver.

    The first call in a process compiles it.

    Raises:
        BuildError: it cannot be compiled, or not be loaded.
    """
    launch, reason = _load()
    if reason:
        raise BuildError(reason)
    return launch


@lru_cache(maxsize=1)
def _load() -> tuple[Callable[..., int] | None, str]:
    """The library, or why there is none."""
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None, ""
    try:
        repeat = ctypes.CDLL(str(build(None, "launches", SOURCE, FLAGS))).repeat_launches
    except (BuildError, OSError) as error:  # a folder whose files cannot be executed
        return None, str(error)
    pointer = ctypes.c_void_p
    repeat.argtypes = [pointer, pointer, ctypes.c_int, *[pointer] * 5]
    repeat.restype = ctypes.c_int
    return partial(repeat, ctypes.cast(launch, pointer)), ""
