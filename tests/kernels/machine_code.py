# SPDX-License-Identifier: Apache-2.0
"""What decode attention executes for one cached key of one KV head, counted from its machine code;
a prompt's attention and scores for one logit; and the judge of recall for one stored key.

Instructions are those of the compiled binary's inner loop, as ``nvdisasm`` prints them: one turn
takes so many keys of so many KV heads, and every warp of the block executes all of it. A branch
inside the loop counts as taken and not taken, so these are upper bounds; over prompts it counts as
taken, since only a prompt's last tiles of keys need masks. Bytes are those that the
program asks for, counted before the compiler, in the shapes of its loads and stores: an address
that several elements share counts for each.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from triton.compiler import CompiledKernel

from tests.kernels.aot import Launch, Resources, binary_of, launches_of, resources, run_tool
from tests.kernels.launchers import Layer, Shape

LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
ACCESS = re.compile(r"tt\.(load|store) .*?: (?:tensor<((?:\d+x)+))?!tt\.ptr<\w*?(\d+)>")
KINDS = {
    "ffma": ("FFMA", "FFMA2"),
    "hmma": ("HMMA", "QGMMA", "HGMMA", "UTCHMMA"),
    "mufu": ("MUFU",),
    "shared_loads": ("LDS", "LDSM"),
    "global_loads": ("LDG", "LDGSTS"),
    "barriers": ("BAR",),
}


@dataclass(frozen=True)
class Card:
    """A GPU's numbers, as its maker gives them unless said otherwise.

    ``l2_bandwidth`` and ``latency`` (seconds from a load to its data under load) are assumptions:
    no maker gives them.
    """

    name: str = "H100 SXM"
    bandwidth: float = 3.35e12
    l2_bandwidth: float = 5.5e12
    latency: float = 1e-6
    sms: int = 132
    clock: float = 1.755e9
    schedulers: int = 4
    registers: int = 65536
    shared: int = 228 << 10


H100 = Card()


def programs(own: Resources, card: Card = H100) -> int:
    """Blocks of a kernel that a multiprocessor holds at a time."""
    each = math.ceil(own.registers * 32 / 256) * 256 * own.warps
    return min(card.registers // each, card.shared // (own.shared + 1024), 64 // own.warps, 32)


@dataclass(frozen=True)
class LoopCounts:
    """Per cached key and KV head, but for ``resources``.

    Attributes:
        instructions: of a warp, and of these the kinds that follow.
        kv_bytes: of K and V.
        other_bytes: of global memory beyond: block numbers, words, rotations, what goes to the
            scores, and a program's queries and partial results by its share of keys.
        buffers: tiles of K and of V in shared memory, the least of all that are copied there.
        tile_bytes: of K and V that one turn of the loop asks for.
    """

    resources: Resources
    instructions: float
    ffma: float
    hmma: float
    mufu: float
    shared_loads: float
    global_loads: float
    barriers: float
    kv_bytes: float
    other_bytes: float
    buffers: int
    tile_bytes: int

    def programs(self, card: Card = H100) -> int:
        """Blocks that a multiprocessor holds at a time."""
        return programs(self.resources, card)

    def issue_share(self, card: Card = H100) -> float:
        """Of the memory's bandwidth: what the issue slots allow, one warp instruction a cycle."""
        keys = card.sms * card.schedulers * card.clock / self.instructions
        return keys * self.kv_bytes / card.bandwidth

    def l2_share(self, card: Card = H100) -> float:
        """What the L2 cache allows, through which all bytes go."""
        return (
            card.l2_bandwidth / card.bandwidth * self.kv_bytes / (self.kv_bytes + self.other_bytes)
        )

    def latency_share(self, card: Card = H100) -> float:
        """What the bytes on their way allow; a program waits for one tile of its buffers."""
        flying = card.sms * self.programs(card) * self.tile_bytes * max(self.buffers - 1, 1)
        return flying / card.latency / card.bandwidth

    def share(self, card: Card = H100) -> float:
        """The least of the three, at most 1."""
        return min(1.0, self.issue_share(card), self.l2_share(card), self.latency_share(card))


def branches(listing: str) -> tuple[list[str], list[tuple[int, int]]]:
    """All opcodes of ``nvdisasm``'s listing, and the branches: what follows one, and its target."""
    opcodes, labels, found = [], {}, []
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif code := INSTRUCTION.match(line):
            opcodes.append(code[1])
            target = re.search(r"\.L_x_\d+", code[2])
            if code[1].startswith("BRA") and target:
                found.append((len(opcodes), target[0]))
    return opcodes, [(at, labels[target]) for at, target in found if target in labels]


def inner_loops(jumps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Loops by first opcode and what follows the last, that are long and hold no other long one."""
    loops = [(target, at) for at, target in jumps if at - target > 8]
    return [
        (a, b)
        for a, b in loops
        if not any((a <= c and d < b) for c, d in loops if (a, b) != (c, d))
    ]


def inner_loop(listing: str) -> list[str]:
    """Opcodes of the longest inner loop."""
    opcodes, jumps = branches(listing)
    begin, end = max(inner_loops(jumps), key=lambda loop: loop[1] - loop[0])
    return opcodes[begin:end]


def shortest_turn(listing: str) -> list[str]:
    """Opcodes of a turn of the inner loop with the fewest, with every branch inside it taken."""
    opcodes, jumps = branches(listing)

    def turn(begin: int, end: int) -> list[str]:
        skipped = {i for at, to in jumps if begin < at < to < end for i in range(at, to)}
        return [opcodes[i] for i in range(begin, end) if i not in skipped]

    return min((turn(*loop) for loop in inner_loops(jumps)), key=len)


def bytes_asked(ir: str) -> tuple[int, int]:
    """Bytes of global loads and stores inside and outside of the loop of Triton's first IR."""
    inside, outside, depth = 0, 0, 0
    for line in ir.splitlines():
        depth += "scf.for" in line
        if access := ACCESS.search(line):
            elements = math.prod(map(int, access[2].rstrip("x").split("x"))) if access[2] else 1
            size = elements * int(access[3]) // 8
            inside, outside = (inside + size, outside) if depth else (inside, outside + size)
        depth -= "scf.yield" in line and depth > 0
    return inside, outside


def buffers(ir: str) -> int:
    """The least number of buffers of what is copied to shared memory while the loop runs."""
    found = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ir)
    return min(map(int, found), default=0)


def keys_of(launch: Launch) -> tuple[int, int]:
    """Keys, and KV heads, that one turn of a kernel's loop takes."""
    arguments = launch.arguments
    if launch.name == "attend_units":
        return arguments["CHUNK"], 1
    return arguments["TILE"], arguments["HEADS"]


def counts_of(launch: Launch, binary: CompiledKernel, shape: Shape, capability: int) -> LoopCounts:
    """Count one compiled kernel of decode attention."""
    found = resources(binary, launch, shape.label(), capability)
    opcodes = inner_loop(run_tool("nvdisasm", "-c", binary.asm["cubin"]))
    tile, heads = keys_of(launch)
    keys = tile * heads
    kv_bytes = 2 * shape.head_size * shape.dtype.itemsize
    inside, outside = bytes_asked(binary.asm["ttir"])
    of_program = shape.block_size * shape.pages // shape.splits * heads
    other = inside / keys - kv_bytes + outside / of_program

    def each(names: Iterable[str]) -> float:
        return sum(code.split(".")[0] in names for code in opcodes) * found.warps / keys

    return LoopCounts(
        resources=found,
        instructions=len(opcodes) * found.warps / keys,
        **{kind: each(names) for kind, names in KINDS.items()},
        kv_bytes=kv_bytes,
        other_bytes=other,
        buffers=buffers(binary.asm["ttgir"]),
        tile_bytes=kv_bytes * keys,
    )


def decode_counts(shape: Shape, capability: int) -> LoopCounts:
    """The attention kernel that a shape's decode launches, compiled and counted."""
    layer = Layer(shape)
    launches = launches_of(layer.decode, capability)
    (launch,) = [one for one in launches if one.name.startswith("attend")]
    return counts_of(launch, binary_of(launch, capability), shape, capability)


@dataclass(frozen=True)
class JudgeCounts:
    """What the judge of recall executes for one stored key of one KV head, but for ``resources``.

    Attributes:
        instructions: of a warp, and of these the kinds that follow.
        integers: products of 8-bit numbers on tensor cores.
        queries: of a program, padded; each has a logit for the key.
        key_bytes: of a key in 8 bits and its scale.
        buffers: tiles of keys in shared memory, or 0: they go to registers.
        tile_bytes: of keys that one turn of the loop asks for.
    """

    resources: Resources
    instructions: float
    integers: float
    mufu: float
    shared_loads: float
    global_loads: float
    barriers: float
    queries: int
    key_bytes: int
    buffers: int
    tile_bytes: int

    @property
    def per_logit(self) -> float:
        """Instructions of a thread for one query and key."""
        return 32 * self.instructions / self.queries

    def issue_share(self, card: Card = H100) -> float:
        """Of the memory's bandwidth: what the issue slots allow, one warp instruction a cycle."""
        keys = card.sms * card.schedulers * card.clock / self.instructions
        return keys * self.key_bytes / card.bandwidth


@dataclass(frozen=True)
class PromptCounts:
    """What a stride's kernel executes for 32 logits of cached keys, but for ``resources``.

    Attributes:
        instructions: of a warp, and of these the kinds that follow.
    """

    resources: Resources
    instructions: float
    ffma: float
    hmma: float
    mufu: float
    shared_loads: float
    global_loads: float
    barriers: float

    def programs(self, card: Card = H100) -> int:
        """Blocks that a multiprocessor holds at a time."""
        return programs(self.resources, card)


def prompt_counts(shape: Shape, capability: int) -> list[PromptCounts]:
    """A stride's attention, and the sums that make its scores."""
    launches = launches_of(Layer(shape).prefill, capability)
    kernels = {one.name: one for one in reversed(launches)}  # a stride comes before a chunk
    found = []
    for name in ("attend_strides", "column_sums"):
        launch = kernels[name]
        binary = binary_of(launch, capability)
        own = resources(binary, launch, shape.label(), capability)
        opcodes = shortest_turn(run_tool("nvdisasm", "-c", binary.asm["cubin"]))
        each = own.warps * 32 / (launch.arguments["QUERIES"] * launch.arguments["TILE"])
        kinds = {
            kind: sum(code.split(".")[0] in names for code in opcodes) * each
            for kind, names in KINDS.items()
        }
        found.append(PromptCounts(own, len(opcodes) * each, **kinds))
    return found


INTEGERS = ("IMMA", "IGMMA", "UTCIMMA", "HMMA", "HGMMA")


def judge_counts(shape: Shape, capability: int, asking: int) -> JudgeCounts:
    """The kernel that looks at every stored key, of single tokens or of strides."""
    layer = Layer(shape)
    launches = launches_of(lambda: layer.recall(asking), capability)
    (launch,) = [one for one in launches if one.name == "judge"]
    binary = binary_of(launch, capability)
    label = shape.label() + (f", {asking} ask" if asking > 1 else "")
    found = resources(binary, launch, label, capability)
    opcodes = inner_loop(run_tool("nvdisasm", "-c", binary.asm["cubin"]))
    keys = launch.arguments["UNITS"] * launch.arguments["UNIT"]

    def each(names: Iterable[str]) -> float:
        return sum(code.split(".")[0] in names for code in opcodes) * found.warps / keys

    return JudgeCounts(
        resources=found,
        instructions=len(opcodes) * found.warps / keys,
        integers=each(INTEGERS),
        mufu=each(KINDS["mufu"]),
        shared_loads=each(KINDS["shared_loads"]),
        global_loads=each(KINDS["global_loads"]),
        barriers=each(KINDS["barriers"]),
        queries=launch.arguments["QUERIES"],
        key_bytes=shape.head_size + 4,
        buffers=buffers(binary.asm["ttgir"]),
        tile_bytes=(shape.head_size + 4) * keys,
    )


ROUNDING = ("FADD", "FMUL", "FFMA", "MUFU")


def float_operations(launch: Launch, capability: int, file: str) -> list[tuple[int, str]]:
    """Source lines of ``file`` with the fp32 instructions for them that round; sorted, each once.

    How often one occurs is left out: the compiler may copy code into two branches.
    """
    listing = run_tool("nvdisasm", "-g", binary_of(launch, capability).asm["cubin"])
    found, where = set(), ("", 0)
    for line in listing.splitlines():
        if source := re.search(r'//## File "([^"]*)", line (\d+)', line):
            where = source[1].rpartition("/")[2], int(source[2])
        elif (code := INSTRUCTION.match(line)) and where[0] == file:
            if code[1].split(".")[0] in ROUNDING:
                found.add((where[1], code[1]))
    return sorted(found)


_BF16 = {"dtype": torch.bfloat16}
DECODE_SHAPES = (
    Shape(unit=16, **_BF16),
    Shape(unit=16, group=8, **_BF16),
    Shape(unit=16, group=1, **_BF16),
    Shape(unit=16, per_head=True, **_BF16),
    Shape(unit=16, head_size=64, **_BF16),
    Shape(unit=16, head_size=256, **_BF16),
    Shape(unit=64, block_size=64, pages=33, **_BF16),
    Shape(unit=8, **_BF16),
    Shape(**_BF16),
    Shape(group=8, **_BF16),
    Shape(group=8, num_heads=4, **_BF16),
    Shape(group=8, num_heads=1, **_BF16),
    Shape(per_head=True, **_BF16),
    Shape(head_size=64, **_BF16),
    Shape(head_size=256, **_BF16),
)
"""What is counted for the table of decode."""
PROMPT_SHAPES = (
    Shape(**_BF16),
    Shape(unit=16, **_BF16),
    Shape(per_head=True, reduction="max", token=True, **_BF16),
    Shape(head_size=64, **_BF16),
    Shape(head_size=256, **_BF16),
)
"""What is counted for the table of prompts."""
