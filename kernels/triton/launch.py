# SPDX-License-Identifier: Apache-2.0
"""Launches of one kernel with arguments that were bound and checked before.

Outside CUDA graphs every layer of every step launches from Python. Triton then binds some 50
arguments by name, looks at each, and compares the kernel's global constants, which takes the host
four times as long as the launch itself. A layer's arguments never change, and those of a step are
the same in all layers. So a ``Launcher`` binds a layer's once, and callers describe the others by a
number (``variant_of``) that they compute once for a step or a layer. Where the number was seen
before, the kernel that Triton chose then is launched directly, unless this version of Triton is
unknown here. What a layer launches can be noted, and repeated for other layers (``repeat.py``).
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

DIRECT = triton.__version__.startswith(("3.6.", "3.7."))
"""Whether compiled kernels are launched with the arguments that these versions give them."""

Variant = int | tuple[int, ...]
Launched = tuple["Launcher", tuple[int, int, int], Variant, dict[str, Any]]
"""A launcher, and what it was called with."""
_numbers: dict[tuple[Any, ...], int] = {}
_launchers = itertools.count()


class Between(NamedTuple):
    """What a layer does between launches without a ``Launcher``, such as an exchange of ranks.

    Attributes:
        function: of a module; it leaves results in its arguments.
        given: its arguments, the same in all layers.
    """

    function: Callable[..., None]
    given: tuple[Any, ...]

    def __call__(self) -> None:
        self.function(*self.given)


_notes: list[Launched | Between] | None = None


def variant_of(*values: Any) -> int:
    """A number that identifies everything Triton may specialise on.

    Of a tensor that is its type, and whether it begins at a multiple of 16 bytes. Other values
    stand for themselves, so pass none that changes from step to step.
    """
    said = tuple(
        (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
        for value in values
    )
    return _numbers.setdefault(said, len(_numbers))


def between(function: Callable[..., None], *given: Any) -> None:
    """Call a function as ``Between`` says, and note it among the launches."""
    note(function, *given)
    function(*given)


def note(function: Callable[..., None], *given: Any) -> None:
    """Note a call that only the layers that repeat this one's launches make."""
    if _notes is not None:
        _notes.append(Between(function, given))


@contextmanager
def noted() -> Iterator[list[Launched | Between]]:
    """Yields a list to which all launches and ``between`` are added, in this context only."""
    global _notes
    assert _notes is None, "launches are noted already"
    _notes = []
    try:
        yield _notes
    finally:
        _notes = None


class Launcher:
    """Launches one kernel of one layer.

    Attributes:
        number: its own.

    Args:
        kernel: a ``triton.jit`` function.
        fixed: arguments and options that never change.
    """

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        self._kernel, self.fixed = kernel, fixed
        self._ready: dict[Variant, tuple[Any, Callable[[Any], tuple[Any, ...]]]] = {}
        self._values = tuple(fixed.values())
        self.number = next(_launchers)

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self._kernel.fn.__name__)

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernel."""
        return not isinstance(self._kernel, JITFunction)

    def chosen(self, variant: Variant) -> Any:
        """The kernel that Triton chose for a variant; None: none is known."""
        return self._ready.get(variant, (None,))[0]

    def __call__(self, grid: tuple[int, int, int], variant: Variant, **own: Any) -> None:
        """Launch.

        Args:
            variant: says of ``own`` all that Triton may compile the kernel for. Numbers that the
                kernel does not specialise need not be in it if they are below 2**31.
            own: the other arguments and options, by the same names in the same order every time.
        """
        if 0 in grid:
            return
        if _notes is not None:
            _notes.append((self, grid, variant, own))
        ready = self._ready.get(variant)
        if ready is None or profiled():
            self._by_triton(grid, variant, own)
            return
        kernel, in_order = ready
        active: Any = driver.active
        kernel.run(
            *grid,
            active.get_current_stream(active.get_current_device()),
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            *in_order((*self._values, *own.values())),
        )

    def _by_triton(self, grid: tuple[int, int, int], variant: Variant, own: dict[str, Any]) -> None:
        """Launch as Triton does, and remember the kernel that it chose."""
        kernel = self._kernel[grid](**self.fixed, **own)
        # There is no kernel when it was interpreted, and in tests that launch nothing.
        if kernel is None or not isinstance(self._kernel, JITFunction) or not DIRECT:
            return
        given = [*self.fixed, *own]
        places = [given.index(name) for name in self._kernel.arg_names]
        self._ready[variant] = kernel, itemgetter(*places)


def profiled() -> bool:
    """Whether a launch hook is set. Only Triton's own launch calls it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))
