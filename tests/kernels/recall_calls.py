# SPDX-License-Identifier: Apache-2.0
"""One call of each of recall's launchers, for a layer and a store that are described by the rest.

``steps`` is int32 ``[R, STEP_COLUMNS]``, ``table`` int32 ``[>= R, P]`` and ``recall`` int32
``[>= R, RECALL_COLUMNS]``.
"""

from typing import Any

import torch

from vllm_cascade.kernels.triton.recall import Judge
from vllm_cascade.kernels.triton.recall_choose import Recaller
from vllm_cascade.kernels.triton.recall_rows import RecallRows
from vllm_cascade.kernels.triton.recall_store import UnitStore
from vllm_cascade.kernels.triton.shapes import Shapes
from vllm_cascade.kernels.triton.strides import Tokens


def empty(shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised tensors, each with memory of its own."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }


def judge_units(
    query: torch.Tensor,
    steps: torch.Tensor,
    table: torch.Tensor,
    recall: torch.Tensor,
    **layer: Any,
) -> torch.Tensor:
    """Evidence, fp32 ``[R, S, capacity]``: units ``BEGIN .. END - 1``; the rest is not written."""
    judge, tokens = Judge(**layer, num_queries=query.shape[1]), Tokens(query, query)
    room = empty(judge.shapes(len(steps), len(steps)), query.device)
    rows = RecallRows(steps, table, recall, judge.parts(steps, table, recall, room))
    judge(tokens, rows)
    return room["evidence"]


def recall_units(
    evidence: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    recall: torch.Tensor,
    **store: Any,
) -> torch.Tensor:
    """Numbers of the recalled units in stream order, int32 ``[R, S, room]``; ``room >= most``."""
    recaller = Recaller(**store, capacity=evidence.shape[2])
    room = empty(recaller.shapes(len(steps)), steps.device)
    recaller(RecallRows(steps, table, recall, [], evidence, **room))
    return room["chosen"]


def ranks_before(
    table: torch.Tensor, steps: torch.Tensor, recall: torch.Tensor, **store: Any
) -> torch.Tensor:
    """Ranks before an insertion, int32 ``[R, S, N]``, for requests whose token evicts a unit."""
    made = UnitStore(**store)
    room = made.room(len(steps), table.shape[1], None, steps.device)
    made.before(RecallRows(steps, table, recall, **room))
    return room["ranks"]


def store_units(
    keep: torch.Tensor | None,
    ranks: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    table: torch.Tensor,
    steps: torch.Tensor,
    recall: torch.Tensor,
    **store: Any,
) -> None:
    """Store what strides evict, by ``keep`` and with ``key`` and ``value``, or single tokens.

    Args:
        ranks: of ``ranks_before``; without ``keep``.
    """
    assert (keep is None) != (ranks is None) and (key is None) == (keep is None)
    made, columns = UnitStore(**store), None if keep is None else keep.shape[2]
    room = made.room(len(steps), table.shape[1], columns, steps.device)
    if ranks is not None:
        room["ranks"] = ranks
    rows = RecallRows(steps, table, recall, **room)
    made(rows, None if key is None else Tokens(None, key, value), keep)
