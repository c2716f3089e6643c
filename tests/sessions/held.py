# SPDX-License-Identifier: Apache-2.0
"""Memory of sessions in a worker."""

from typing import Any

from vllm_cascade.recall.rings import RingCopy
from vllm_cascade.sessions.tiers import WorkerSessions


def held_bytes(sessions: WorkerSessions) -> int:
    """Bytes of host memory in use. What sessions share counts once."""
    states = [state for state in sessions.states.values() if state.error() is None]
    units: list[Any] = [state.units for state in states if state.units is not None]
    copies = [one.words for one in units if isinstance(one, RingCopy)]
    tensors = [tensor for one in (*copies, *(state.pages for state in states)) for tensor in one]
    pieces = {id(piece): piece.memory.nbytes for one in units for piece in one.pieces}
    return sum(tensor.nbytes for tensor in tensors) + sum(pieces.values())


def held_in(worker: Any) -> int:
    """``held_bytes`` of vLLM's worker."""
    return held_bytes(worker._sessions)
