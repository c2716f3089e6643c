# SPDX-License-Identifier: Apache-2.0
"""Launches that are noted in one layer and repeated for another, with a kernel of one line."""

import ctypes
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from vllm_cascade.kernels.cpp.build import BuildError, build
from vllm_cascade.kernels.triton import repeat
from vllm_cascade.kernels.triton.launch import Launcher, between, noted
from vllm_cascade.kernels.triton.repeat import Launches, Repeater
from vllm_cascade.kernels.triton.strides import Tokens


@triton.jit
def _add(key, bias, output, shared, factor, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    total = tl.load(key + place) + tl.load(bias + place % N) + tl.load(shared + place % N)
    tl.store(output + place, total * factor)


class Layer:
    """Adds a layer's bias and a step's numbers to keys."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.bias = torch.randn(4, generator=generator)
        self.key = torch.randn(3, 1, 4, generator=generator).to(dtype)
        self.output = torch.zeros(3, 1, 4)
        self.launch = Launcher(_add, bias=self.bias, N=4)
        self.repeater = Repeater()

    @property
    def tokens(self) -> Tokens:
        return Tokens(None, self.key, output=self.output.to(self.key.dtype))

    def run(self, shared: torch.Tensor, factor: int, grid: int = 3, begin: int = 0) -> Launches:
        """Launch, and note it."""
        tokens = self.tokens
        with noted() as launched:
            for number in range(2):
                self.launch(
                    (grid, 1, 1), 0, key=tokens.key[begin:], output=tokens.output[begin:],
                    shared=shared, factor=factor + number,
                )  # fmt: skip
        return Launches(launched, tokens)

    def expected(self, shared: torch.Tensor, factor: int) -> torch.Tensor:
        return (self.key + self.bias + shared) * (factor + 1)


@pytest.fixture
def layers() -> tuple[Layer, Layer]:
    return Layer(0), Layer(1)


def test_another_layers_launches_with_own_rows_and_constants(layers: tuple[Layer, Layer]) -> None:
    first, other = layers
    shared = torch.ones(4)
    done = first.run(shared, 2)
    assert not other.repeater(done, other.tokens), "it has launched nothing yet"
    other.repeater.learn(other.run(shared, 2), done)
    other.output.zero_()
    for factor in (5, 7):
        first.key, other.key, shared = (torch.randn_like(x) for x in (first.key, other.key, shared))
        done = first.run(shared, factor)
        before = Repeater.number
        assert other.repeater(done, other.tokens)
        assert Repeater.number == before + 1
        for layer in layers:
            torch.testing.assert_close(layer.output, layer.expected(shared, factor))


def test_rows_that_begin_later(layers: tuple[Layer, Layer]) -> None:
    """Single tokens are a slice of the step's."""
    first, other = layers
    shared = torch.zeros(4)
    other.repeater.learn(other.run(shared, 1, 2, 1), first.run(shared, 1, 2, 1))
    other.output.fill_(-9)
    assert other.repeater(first.run(shared, 3, 2, 1), other.tokens)
    torch.testing.assert_close(other.output[1:], other.expected(shared, 3)[1:])
    assert (other.output[0] == -9).all()


@pytest.mark.parametrize("differs", ["argument", "number", "grid", "place", "rows", "kernels"])
def test_launches_of_another_kind_are_not_repeated(
    differs: str, layers: tuple[Layer, Layer]
) -> None:
    first, other = layers
    shared = torch.ones(4)
    if differs == "rows":
        first = Layer(0, torch.float16)
    done = first.run(shared, 2, 2)
    arguments: dict[str, Any] = {"shared": shared, "factor": 2, "grid": 2}
    arguments |= {
        "argument": {"shared": shared.clone()},
        "number": {"factor": 3},
        "grid": {"grid": 1},
        "place": {"begin": 1},
    }.get(differs, {})
    own = other.run(**arguments)
    if differs == "kernels":
        with noted() as launched:
            other.launch((2, 1, 1), 0, key=other.key, output=other.output, shared=shared, factor=2)
        own = Launches(launched[:1], other.tokens)
    other.repeater.learn(own, done)
    assert not other.repeater(done, other.tokens)
    if differs not in ("rows", "kernels"):  # and is not compared again
        other.repeater.learn(other.run(shared, 2, 2), done)
        assert not other.repeater(done, other.tokens)


def double(values: torch.Tensor, times: int) -> None:
    values.mul_(2 * times)


@pytest.mark.parametrize("differs", ["nothing", "place", "argument", "tensor", "function"])
def test_what_is_done_between_launches(differs: str, layers: tuple[Layer, Layer]) -> None:
    """In its place; not if the layer did something else there, or elsewhere."""
    first, other = layers
    shared = torch.ones(4)

    def run(layer: Layer, *given: Any, function: Any = double, place: int = 1) -> Launches:
        tokens = layer.tokens
        own = {"key": tokens.key, "output": tokens.output, "shared": shared}
        with noted() as launched:
            for number in range(2):
                if number == place:
                    between(function, *given)
                layer.launch((3, 1, 1), number, **own, factor=number)
        return Launches(launched, tokens)

    given: tuple[Any, ...] = (shared, 1)
    own: dict[str, Any] = {}
    if differs == "argument":
        given = (shared, 2)
    elif differs == "tensor":
        given = (shared.clone(), 1)
    elif differs != "nothing":
        own = {"place": {"place": 0}, "function": {"function": lambda *_: None}}[differs]
    other.repeater.learn(run(other, *given, **own), run(first, shared, 1))
    done = run(first, shared, 1)
    shared.fill_(3)
    other.output.zero_()
    assert other.repeater(done, other.tokens) == (differs == "nothing")
    if differs == "nothing":
        assert (shared == 6).all()
        torch.testing.assert_close(other.output, other.key + other.bias + 6)
    else:
        assert (shared == 3).all() and not other.output.any()


def test_known_launches_in_another_order(layers: tuple[Layer, Layer]) -> None:
    """As many as a step has; one of a variant that is not known is launched by the layer."""
    first, other = layers
    shared = torch.ones(4)
    other.repeater.learn(other.run(shared, 2), first.run(shared, 2))
    own = {"key": first.key, "output": first.output, "shared": shared}
    for variants in ([0], [0, 0, 0], [0, 1]):
        with noted() as launched:
            for factor, variant in enumerate(variants):
                first.launch((3, 1, 1), variant, **own, factor=factor)
        done, known = Launches(launched, first.tokens), 1 not in variants
        other.output.zero_()
        assert other.repeater(done, other.tokens) == known
        expected = other.expected(shared, len(variants) - 2)
        torch.testing.assert_close(other.output, expected if known else 0 * expected)


def test_rows_of_another_kind_later(layers: tuple[Layer, Layer]) -> None:
    """Such as rows that do not begin at a multiple of 16 bytes, which compiled kernels rely on."""
    first, other = layers
    shared = torch.ones(4)
    other.repeater.learn(other.run(shared, 2), first.run(shared, 2))
    other.key = torch.randn(13)[1:].view(3, 1, 4)
    assert not other.repeater(first.run(shared, 2), other.tokens)


def test_only_a_context_notes(layers: tuple[Layer, Layer]) -> None:
    """Also one that an error has ended; and notes of two layers at once are an error."""
    first, _ = layers
    tokens = first.tokens
    own = {"key": tokens.key, "output": tokens.output, "shared": torch.ones(4), "factor": 1}
    with pytest.raises(AssertionError, match="noted already"), noted() as launched:
        first.launch((3, 1, 1), 0, **own)
        first.run(torch.ones(4), 1)
    first.launch((3, 1, 1), 0, **own)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (-2, "i32", b"\xfe\xff\xff\xff"),
        (1 << 40, "i64", b"\0\0\0\0\0\1\0\0"),
        (True, "i1", b"\1"),
        (0.5, "fp32", b"\0\0\0\x3f"),
        (torch.empty(0), "*fp32", b"\0" * 8),
    ],
)
def test_arguments_are_bytes(value: Any, kind: str, expected: bytes) -> None:
    """The driver reads as many as the type has."""
    word = repeat._word(value, kind).to_bytes(8, "little")
    assert word[: len(expected)] == expected


@pytest.mark.parametrize("loads", [False, True], ids=["compiler", "folder"])
def test_a_library_that_cannot_be_is_tried_once(
    loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, or from a folder whose files cannot be executed; the driver is there."""
    tried: list[str] = []

    def made(*_: Any) -> str:
        tried.append("build")
        if not loads:
            raise BuildError("no C++ compiler")
        return "launches.so"

    def load(name: str) -> Any:
        if name == "libcuda.so.1":
            return SimpleNamespace(cuLaunchKernel=None)
        raise OSError(f"{name}: failed to map segment")

    monkeypatch.setattr(repeat, "build", made)
    monkeypatch.setattr(repeat.ctypes, "CDLL", load)
    repeat._load.cache_clear()
    try:
        for _ in range(3):
            with pytest.raises(BuildError, match="failed to map" if loads else "no C.. compiler"):
                repeat.library()
    finally:
        repeat._load.cache_clear()
    assert tried == ["build"]


# --- the C function -------------------------------------------------------------------------------

DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip


@pytest.mark.parametrize("error", [0, 700])
def test_arguments_that_the_driver_finds(error: int) -> None:
    """Two kernels, a layer's arguments and a step's, a grid of nothing, an error."""
    seen: list[tuple[Any, ...]] = []

    @DRIVER
    def launch(function: int, *rest: Any) -> int:
        *numbers, stream, arguments, _ = rest
        words = [ctypes.c_uint64.from_address(arguments[i]).value for i in range(3)]
        seen.append((function, *numbers, stream, *words))
        return error

    library = ctypes.CDLL(str(build(None, "launches", repeat.SOURCE, repeat.FLAGS)))
    constants = np.array([[10, 0, 30], [0, 50, 0]], dtype=np.uint64)
    places = [np.array(x, dtype=np.int32) for x in ([1], [2, 0])]
    bound = [
        repeat._Bound(7 + i, constants[i].ctypes.data, places[i].ctypes.data, 3, len(places[i]),
                      128, 64 * i)
        for i in range(2)
    ]  # fmt: skip
    order = [0, 1, 0]
    kernels = (ctypes.c_void_p * 3)(*[ctypes.addressof(bound[i]) for i in order])
    grids = np.array([[2, 3, 4], [1, 1, 1], [0, 5, 5]], dtype=np.uint32)
    values = np.array([20, 2, -3, 21], dtype=np.int64)
    bases = np.array([0, 3, 0, 0], dtype=np.uint8)
    rows = np.array([0, 100, 200, 300, 400], dtype=np.uint64)
    arrays = [ctypes.c_void_p(x.ctypes.data) for x in (grids, values, bases, rows)]
    failed = library.repeat_launches(launch, ctypes.c_void_p(9), 3, kernels, *arrays)
    first = (7, 2, 3, 4, 128, 1, 1, 0, 9, 10, 20, 30)
    second = (8, 1, 1, 1, 128, 1, 1, 64, 9, 2**64 - 3, 50, 302)
    assert failed == error
    assert seen == ([first] if error else [first, second])


def test_rows_are_not_kept(layers: tuple[Layer, Layer]) -> None:
    """A model frees a layer's rows when the layer has run; a step ends much later."""
    first, _ = layers
    key = ref(first.key)
    done = first.run(torch.ones(4), 1)
    first.key = torch.ones(3, 1, 4)
    assert key() is None and len(done.launched) == 2
