# SPDX-License-Identifier: Apache-2.0
"""Positions inside the cache, which the model gets instead of positions in the stream.

Queries and new keys have the number of cached tokens, plus their offset in the stride, as their
position. The host knows it ahead of time. The model rotates a new key at this position (``born``).
Later the key's position is its rank, so attention rotates it by ``rank - born`` in fp32. Each
rotation starts from the key as written, so rounding errors do not accumulate.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_cascade.cache.transfer import sent
from vllm_cascade.policies.schedule import Schedule, by_schedule


def position_strides(
    frames: Sequence[Schedule], stream: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of strides, the same in all layers of a model.

    Args:
        frames: schedules of the layers that give positions: those under the engine's policy.
        stream: int64 ``[R]``, stream index of each stride's first token.

    Returns:
        int32 ``[R]``, the positions of these tokens; and bool ``[R]``, whether any cached key may
        have left the position it was written at.
    """
    position, moved = np.empty(len(stream), np.int32), np.empty(len(stream), bool)
    for frame, rows in by_schedule(frames):
        position[rows], moved[rows] = frame.positions(stream[rows]), frame.moved(stream[rows])
    return position, moved


class CachePositions:
    """A persistent buffer of cache positions that the model reads instead of vLLM's buffer.

    vLLM's buffer must stay unchanged: the V2 sampler reads it later, and positions that stop
    growing would freeze its random numbers. The buffer is persistent because full CUDA graphs read
    the same memory at every replay.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self.buffer = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def fill(self, positions: torch.Tensor) -> None:
        """Write the positions of a step, int64 ``[num_tokens]``, without waiting for the device."""
        target = self.buffer[: positions.shape[0]]
        target.copy_(sent(positions, self.buffer.device), non_blocking=True)

    def install(self, model: nn.Module) -> None:
        """Make calls of ``model`` see this buffer.

        This overrides ``__call__`` of the model's class instead of registering a hook. If vLLM
        compiles a model as a whole, the model has its own ``__call__``, which runs no hooks.
        """
        kind = type(model)

        def call(module: nn.Module, *args: Any, positions: torch.Tensor, **kwargs: Any) -> Any:
            ours = self.buffer[: positions.shape[-1]]
            # For text, all axes of M-RoPE positions are equal.
            return kind.__call__(module, *args, positions=ours.expand(positions.shape), **kwargs)

        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        model.__class__ = type(kind.__name__, (kind,), {**names, "__call__": call})
