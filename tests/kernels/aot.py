# SPDX-License-Identifier: Apache-2.0
"""Compile kernels for GPUs that are not here, and read what they need from the binary.

The launchers themselves run, on meta tensors, with the launch replaced by a note of it: what is
compiled is what would be launched, down to the specialisation on divisible strides.
``TRITON_INTERPRET`` must not be set.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from tests.kernels.launchers import Layer, Shape
from vllm_cascade.kernels.triton import configs
from vllm_cascade.kernels.triton.recall_copy import copy_ring

CAPABILITIES = (80, 90, 100)
SMALL_BLOCKS = (86, 89, 120)
"""Compute capabilities with 99 KB of shared memory a block: A10, L4 and L40S, RTX 50."""
MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10} | dict.fromkeys(SMALL_BLOCKS, 99 << 10)
"""Bytes of shared memory that one block may use."""
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_TYPES |= {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments it was launched with."""

    function: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return self.function.fn.__name__.removeprefix("_")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs. ``spilled``: bytes of stack a thread, 0 is none."""

    kernel: str
    label: str
    capability: int
    warps: int
    registers: int
    shared: int
    spilled: int


OPTIONS = ("num_warps", "num_stages", "maxnreg")


def launches_of(call: Callable[[], Any], capability: int = 90) -> list[Launch]:
    """The kernels that a function would launch on a GPU; nothing runs."""
    launches: list[Launch] = []
    original, version = JITFunction.run, configs.capability

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        assert set(arguments) == set(self.arg_names), set(self.arg_names) ^ set(arguments)
        launches.append(Launch(self, arguments, options))

    JITFunction.run, configs.capability = note, lambda _: capability
    try:
        call()
    finally:
        JITFunction.run, configs.capability = original, version
    return launches


def binary_of(launch: Launch, capability: int) -> CompiledKernel:
    """A launch's kernel for a compute capability, such as 90."""
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET to compile"
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.function.params):
        value = launch.arguments[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(launch.function, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch.options)


def compile_launch(launch: Launch, label: str, capability: int) -> Resources:
    """Compile for a compute capability and read the binary's needs."""
    return resources(binary_of(launch, capability), launch, label, capability)


def resources(binary: CompiledKernel, launch: Launch, label: str, capability: int) -> Resources:
    registers, stack = _usage(binary.asm["cubin"])
    name, metadata = launch.name, binary.metadata
    return Resources(name, label, capability, metadata.num_warps, registers, metadata.shared, stack)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread, from the tool that comes with Triton."""
    done = run_tool("cuobjdump", "--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done)
    assert found is not None, done
    return int(found[1]), int(found[2])


def run_tool(name: str, option: str, cubin: bytes) -> str:
    """What a tool that comes with Triton prints about a binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)


def recall_resources(shape: Shape, capability: int) -> list[Resources]:
    """Every kernel of recall, of single tokens and of strides; those launched differently twice."""
    layer, found = Layer(shape), {}
    for asking, label in ((1, ""), (32, ", strides")):
        for launch in launches_of(lambda asking=asking: layer.recall(asking), capability):
            given = launch.arguments.values()
            values = [x.dtype if isinstance(x, torch.Tensor) else x for x in given]
            found.setdefault((launch.name, *values), (launch, label))
    return [compile_launch(one, shape.label() + more, capability) for one, more in found.values()]


def resources_of(shape: Shape, capability: int) -> list[Resources]:
    """Every kernel of both paths, compiled for one capability; or those the shape is meant for."""
    layer = Layer(shape)
    launches = launches_of(lambda: (layer.decode(), layer.prefill()), capability)
    if shape.only:
        launches = [one for one in launches if one.name == shape.only]
    return [compile_launch(launch, shape.label(), capability) for launch in launches]


def draft_resources(shape: Shape, capability: int) -> list[Resources]:
    """Every kernel that a row with drafts launches otherwise than single tokens."""
    launches = launches_of(Layer(shape).drafting, capability)
    return [compile_launch(launch, shape.label(), capability) for launch in launches]


def copy_resources(capability: int) -> list[Resources]:
    """The copy of a ring for a snapshot, in both directions."""
    ring, kept = (torch.empty(8, n, 4096, dtype=torch.int32, device="meta") for n in (512, 96))
    chunks = torch.empty(3, dtype=torch.int32, device="meta")
    launches = [
        launch
        for restores in (False, True)
        for launch in launches_of(
            lambda restores=restores: copy_ring(ring, kept, chunks, 16, 40, 256, restores),
            capability,
        )
    ]
    return [compile_launch(launch, "rings", capability) for launch in launches]


DEFAULT_SHAPES = tuple(
    Shape(head_size=size, dtype=dtype)
    for size in (64, 80, 96, 128, 256)
    for dtype in (torch.float16, torch.bfloat16)
)
"""What models use: every head size, both 16-bit types."""
_UNSCORED = {"keep_logits": False}
OTHER_SHAPES = (
    Shape(group=1),
    Shape(group=8, num_heads=4),
    Shape(dtype=torch.float32),
    Shape(dtype=torch.float32, head_size=64),
    Shape(dtype=torch.float32, group=1, num_heads=32),
    Shape(per_head=True),
    Shape(per_head=True, reduction="max", token=True),
    Shape(reduction="median"),
    Shape(interleaved=True, head_size=64),
    Shape(alibi=True),
    Shape(softcap=30.0, logit_scale=True),
    Shape(rotary=False, keep_logits=False),
    Shape(sinks=True, group=8, head_size=64),
    Shape(sinks=True, group=8, head_size=64, window=128, block_size=8, **_UNSCORED),
    Shape(head_size=256, window=1024, block_size=4, pages=256, group=2, num_heads=16, **_UNSCORED),
    Shape(window=1024, block_size=47, pages=22, **_UNSCORED),
    Shape(window=8192, chunked=True, group=5, block_size=63, **_UNSCORED),
    Shape(keep_logits=False),
    Shape(head_size=256, keep_logits=False),
    Shape(keep_logits=False, salted=True),
    Shape(head_size=256, group=16, num_heads=2),
    Shape(head_size=256, block_size=8, pages=128),
    Shape(head_size=512, num_heads=4),
    Shape(block_size=32, pages=65),
    Shape(pages=30),
)
_ALONE = {"only": "attend_units"}
UNIT_SHAPES = (
    Shape(unit=16),
    Shape(unit=8, **_ALONE),
    Shape(unit=32, block_size=32, pages=65, **_ALONE),
    Shape(unit=64, block_size=64, pages=33, **_ALONE),
    Shape(unit=16, head_size=64, dtype=torch.bfloat16, **_ALONE),
    Shape(unit=16, head_size=80, **_ALONE),
    Shape(unit=16, head_size=256, **_ALONE),
    Shape(unit=16, group=1, **_ALONE),
    Shape(unit=16, group=8, num_heads=4, **_ALONE),
    Shape(unit=16, dtype=torch.float32, **_ALONE),
    Shape(unit=16, alibi=True, **_ALONE),
    Shape(unit=16, softcap=30.0, logit_scale=True, **_ALONE),
    Shape(unit=16, keep_logits=False, **_ALONE),
)
"""Pages of units: every kernel once, and the one that their size changes in all its ways."""
SPLIT_SHAPE = Shape(group=8, num_heads=1, stride=256, parts=8, only="attend_strides")
"""A rank of eight of a large Llama: few query heads, so that strides are split over keys."""
SPLIT_SHAPES = (
    SPLIT_SHAPE,
    replace(SPLIT_SHAPE, dtype=torch.bfloat16, sinks=True, unit=16),
    replace(SPLIT_SHAPE, head_size=64, sinks=True),
    replace(SPLIT_SHAPE, head_size=80, interleaved=True),
    replace(SPLIT_SHAPE, head_size=256),
    replace(SPLIT_SHAPE, dtype=torch.float32),
    replace(SPLIT_SHAPE, group=1, num_heads=4, per_head=True, token=True, unit=16),
    replace(SPLIT_SHAPE, alibi=True, softcap=30.0, logit_scale=True),
)
"""With all that changes the kernel of a stride's attention."""
LATENT = Shape(
    head_size=576, latent=512, num_heads=1, group=16, dtype=torch.bfloat16, interleaved=True
)
LATENT_SHAPES = (
    LATENT,
    replace(LATENT, group=128),
    replace(LATENT, group=20, unit=16),
    replace(LATENT, group=64, unit=16),
    replace(LATENT, group=32, head_size=288, latent=256, interleaved=False),
    replace(LATENT, dtype=torch.float32),
    replace(LATENT, unit=4, token=True),
    replace(LATENT, keep_logits=False),
)
"""Latent rows as DeepSeek V2 and V3, GLM-4.7-Flash, Kimi K2 and MiniCPM3 have them."""
LATENT_SPLIT = replace(LATENT, stride=64, parts=8, only="attend_strides")
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORED = replace(LATENT, code=_E4M3)
STORED_SHAPES = (
    STORED,
    replace(LATENT, code=torch.int8),
    replace(STORED, row_scales=False),
    replace(LATENT, code=_E5M2, row_scales=False),
    replace(STORED, group=128),
    replace(LATENT, code=torch.int8, group=20, unit=16),
    replace(STORED, group=32, head_size=288, latent=256, interleaved=False),
    replace(STORED, dtype=torch.float16),
    replace(STORED, unit=4, token=True, row_scales=False),
    replace(STORED, keep_logits=False),
)
"""The same rows in 8 bits."""
CODED = Shape(dtype=torch.bfloat16, code=_E4M3)
CODED_SHAPES = (
    CODED,
    replace(CODED, code=torch.int8, dtype=torch.float16, head_size=64),
    replace(CODED, row_scales=False, head_size=80, interleaved=True),
    replace(CODED, code=_E5M2, row_scales=False, group=8, num_heads=4),
    replace(CODED, code=torch.int8, group=1, num_heads=32),
    replace(CODED, per_head=True, token=True, reduction="max"),
    replace(CODED, head_size=256),
    replace(CODED, code=torch.int8, dtype=torch.float32),
    replace(CODED, alibi=True),
    replace(CODED, unit=4, sinks=True),
)
CODED_UNITS = (
    replace(CODED, unit=16),
    replace(CODED, code=torch.int8, unit=8, head_size=64),
    replace(CODED, code=torch.int8, unit=16, head_size=256, row_scales=False),
    replace(CODED, unit=64, block_size=64, pages=33, dtype=torch.float32),
)
CODED_UNSCORED = (
    replace(CODED, sinks=True, group=8, head_size=64, window=128, block_size=8, **_UNSCORED),
    replace(CODED, code=torch.int8, head_size=256, window=1024, block_size=4, pages=256, group=2,
            num_heads=16, **_UNSCORED),
)  # fmt: skip
CODED_UNITS_UNSCORED = (
    replace(CODED, unit=16, keep_logits=False),
    replace(CODED, code=torch.int8, unit=8, head_size=64, keep_logits=False),
)
"""Other rows in 8 bits."""
LONG = Shape(head_size=512, num_heads=1, group=8, dtype=torch.bfloat16)
LONG_SHAPES = (
    LONG,
    replace(LONG, group=4, num_heads=2, dtype=torch.float16),
    replace(LONG, group=1, num_heads=8, per_head=True),
    replace(LONG, group=16),
    replace(LONG, group=16, unit=16),
    replace(LONG, unit=4, token=True),
    replace(LONG, dtype=torch.float32),
    replace(LONG, code=_E4M3),
    replace(LONG, code=torch.int8, dtype=torch.float16, row_scales=False),
)
LONG_UNITS = (
    replace(LONG, unit=16),
    replace(LONG, unit=16, group=4, num_heads=2, dtype=torch.float16),
    replace(LONG, unit=16, group=1, num_heads=8),
    replace(LONG, unit=16, dtype=torch.float32),
    replace(LONG, unit=16, code=_E4M3),
    replace(LONG, unit=16, code=torch.int8, dtype=torch.float16, row_scales=False),
)
LONG_UNSCORED = replace(LONG, keep_logits=False), replace(LONG, code=_E4M3, keep_logits=False)
LONG_UNITS_UNSCORED = replace(LONG, unit=16, keep_logits=False)
LONG_RECALL = (
    replace(LONG, unit=16, recall=8),
    replace(LONG, unit=16, recall=8, group=16),
    replace(LONG, unit=4, recall=8, group=4, num_heads=2),
    replace(LONG, unit=16, recall=8, dtype=torch.float32),
    replace(LONG, unit=16, recall=8, code=_E4M3),
)
LONG_SPLIT = replace(LONG, stride=64, parts=8, only="attend_strides")
"""Heads of 512 channels, as Gemma 4's layers without windows have them."""
RECALL_SHAPES = (
    Shape(unit=16, recall=8),
    Shape(unit=16, recall=8, dtype=torch.bfloat16, per_head=True),
    Shape(unit=16, recall=8, head_size=64),
    Shape(unit=16, recall=8, head_size=80, interleaved=True),
    Shape(unit=16, recall=8, head_size=256),
    Shape(unit=16, recall=8, group=1, num_heads=32, alibi=True),
    Shape(unit=16, recall=8, group=8, num_heads=4),
    Shape(unit=16, recall=8, dtype=torch.float32),
    Shape(unit=4, recall=64),
    Shape(unit=64, block_size=64, pages=33, recall=2),
    Shape(unit=128, block_size=128, pages=17, recall=2),
    Shape(unit=16, recall=8, store=1 << 20),
    replace(LATENT, unit=16, recall=8),
    replace(LATENT, unit=16, recall=8, group=128),
    replace(LATENT, unit=4, recall=8, head_size=288, latent=256),
    replace(STORED, unit=16, recall=8),
    replace(LATENT, code=torch.int8, unit=4, recall=8),
    replace(STORED, row_scales=False, unit=16, recall=8),
    replace(CODED, unit=16, recall=8),
    replace(CODED, code=torch.int8, unit=4, recall=8, per_head=True),
)
"""Where evicted units come back: head sizes, groups, units, and long stores."""
DRAFT_SHAPES = (
    Shape(drafts=4),
    Shape(drafts=1, per_head=True, token=True),
    Shape(drafts=7, num_heads=32, group=1, dtype=torch.float32),
    Shape(drafts=3, head_size=80, keep_logits=False),
    Shape(drafts=4, unit=16),
    Shape(drafts=4, block_size=47, pages=22),
    replace(LATENT, drafts=4),
    replace(LONG, drafts=4),
)
"""Rows with drafts: few and many, heads that share their tokens and that do not, units."""
TABLED_RECALL = (
    Shape(unit=16, recall=8),
    Shape(unit=16, recall=8, head_size=64),
    Shape(unit=16, recall=8, head_size=256),
    replace(LATENT, unit=16, recall=8),
)
TABLED_SHAPES = (
    Shape(),
    Shape(head_size=64),
    Shape(head_size=256),
    Shape(dtype=torch.float32),
    Shape(per_head=True),
    Shape(unit=16),
    SPLIT_SHAPE,
    LATENT,
    replace(LATENT, group=128),
    *(replace(STORED, only=kernel) for kernel in ("attend", "gather_strides")),
    *(replace(CODED, only=kernel) for kernel in ("attend", "gather_strides")),
    replace(CODED, unit=16, only="attend_units"),
)
"""What the table in the documentation shows."""
