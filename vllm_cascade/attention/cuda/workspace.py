# SPDX-License-Identifier: Apache-2.0
"""Memory that the kernels of a stride leave each other, the same for all layers and strides.

They run one after another, so one piece serves all. It is made in vLLM's profiling run, as large
as the worst batch needs (``reserve``), so that what vLLM gives to pages is what is left; after that
nothing is allocated for a stride.
"""

import math
from collections.abc import Mapping

import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
ALIGNED = 256
"""Bytes; where a tensor begins decides which variant of a kernel is launched."""

_of_devices: dict[torch.device, "Workspace"] = {}


class Workspace:
    """One piece of memory, which grows where it has to.

    Attributes:
        grown: how often it has.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.grown = 0

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def reserve(self, num_bytes: int) -> None:
        """Have at least so much; tensors that were carved before keep what they have."""
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


def size_of(shapes: Shapes) -> int:
    """Bytes that ``carve`` needs."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def workspace_of(device: torch.device) -> Workspace:
    """A device's, for all engines of this process: none computes while another does."""
    if device not in _of_devices:
        _of_devices[device] = Workspace(device)
    return _of_devices[device]
