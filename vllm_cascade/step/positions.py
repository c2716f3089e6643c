# SPDX-License-Identifier: Apache-2.0
"""Positions inside the cache: rotary tables, rotation by ``rank - born``, what the model sees.

A key is rotated by the model at the position it has when it is written (``born``). Later its
position is its rank, so reading it rotates it by ``rank - born``, in fp32, always from the key as
written: corrections never pile up. Queries and new keys get the number of cached tokens plus
their offset in the stride, which the host knows ahead of time.
"""

from typing import Any

import torch
from torch import nn

from vllm_cascade.cache.transfer import sent


class CachePositions:
    """A persistent buffer of cache positions, handed to the model in place of vLLM's own.

    vLLM's buffer cannot be written over: the V2 sampler reads it afterwards, and positions that
    stopped growing would freeze its random numbers. A persistent buffer keeps full CUDA graphs
    possible: they read the same memory at every replay.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self.buffer = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def fill(self, positions: torch.Tensor) -> None:
        """Write the positions of a step; the device need not have come so far."""
        target = self.buffer[: positions.shape[0]]
        target.copy_(sent(positions, self.buffer.device), non_blocking=True)

    def install(self, model: nn.Module) -> None:
        """Make calls of ``model`` see this buffer.

        By a ``__call__`` of its class, not by a hook: a model that vLLM compiles as a whole has one
        of its own that runs no hooks.
        """
        kind = type(model)

        def call(module: nn.Module, *args: Any, positions: torch.Tensor, **kwargs: Any) -> Any:
            ours = self.buffer[: positions.shape[-1]]
            # Of text all axes are equal.
            return kind.__call__(module, *args, positions=ours.expand(positions.shape), **kwargs)

        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        model.__class__ = type(kind.__name__, (kind,), {**names, "__call__": call})
