# SPDX-License-Identifier: Apache-2.0
"""Memory that the kernels of a stride leave each other, the same for all layers and strides.

They run one after another, so one piece serves all; so does one row of counters, which every kernel
leaves at 0. Both are made in vLLM's profiling run, as large as the worst batch needs (``reserve``),
so that what vLLM gives to pages is what is left; after that nothing is allocated for a stride.
"""

import math
from collections.abc import Mapping

import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
ALIGNED = 256
"""Bytes; where a tensor begins decides which variant of a kernel is launched."""

_of_devices: dict[torch.device, "Workspace"] = {}


class Workspace:
    """One piece of memory and one of counters, which grow where they have to.

    Attributes:
        grown: how often it has.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self.grown = 0

    @property
    def num_bytes(self) -> int:
        return len(self._memory) + 4 * len(self._counters)

    def reserve(self, num_bytes: int, num_counters: int = 0) -> None:
        """Have at least so much; tensors that were carved before keep what they have."""
        if num_counters > len(self._counters):
            self._counters = self._counters.new_zeros(num_counters)
        if num_bytes > len(self._memory):
            self._memory = self._memory.new_empty(num_bytes)
            self.grown += 1

    def carve(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Tensors side by side, until somebody carves again; what they hold is anything."""
        self.reserve(size_of(shapes))
        made, begin = {}, 0
        for name, (shape, dtype) in shapes.items():
            size = math.prod(shape) * dtype.itemsize
            made[name] = self._memory[begin : begin + size].view(dtype).view(shape)
            begin += -(-size // ALIGNED) * ALIGNED
        return made

    def counters(self, number: int) -> torch.Tensor:
        """int32 zeros, which whoever counts leaves behind."""
        self.reserve(0, number)
        return self._counters[:number]


def size_of(shapes: Shapes) -> int:
    """Bytes that ``carve`` needs."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def workspace_of(device: torch.device) -> Workspace:
    """A device's, for all engines of this process: none computes while another does."""
    if device not in _of_devices:
        _of_devices[device] = Workspace(device)
    return _of_devices[device]
