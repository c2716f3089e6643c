# SPDX-License-Identifier: Apache-2.0
"""Arguments of recall's launches, checked once for all layers of a step.

As for other kernels (``strides.py``, ``singles.py``), a launch combines constants of a layer, the
tokens in that layer, and what all layers share (``RecallRows``).
"""

from dataclasses import dataclass, field

import torch

from .launch import variant_of
from .recall_columns import check_recall
from .tiles import check_steps


@dataclass(eq=False)
class Judged:
    """Some rows whose queries judge stored units at once, and scratch memory, which others share.

    ``A`` queries of a stride judge at most.

    Attributes:
        steps, table, recall: these rows' parts of ``RecallRows``.
        evidence: fp32 ``[R, S, capacity]``, what each stored unit is worth to a head set.
        asked, sizes: int8 ``[R, Hq, A, D]`` and fp32 ``[R, Hq, A]``, queries in 8 bits; sizes
            include log2(e).
        to_sinks: fp32 ``[R, Hq, A]`` of ``attend_sinks``.
        of_units, sums: fp32 ``[R, Hq, A, capacity]`` and ``[R, Hq, A, spans]``, base-2 logarithms
            of sums of exponentials.
    """

    steps: torch.Tensor
    table: torch.Tensor
    recall: torch.Tensor
    evidence: torch.Tensor
    asked: torch.Tensor
    sizes: torch.Tensor
    to_sinks: torch.Tensor
    of_units: torch.Tensor
    sums: torch.Tensor

    def __post_init__(self) -> None:
        self.num_rows, self.table_place = len(self.steps), self.table.stride(0)
        made = self.asked, self.sizes, self.to_sinks, self.of_units, self.sums
        given = self.steps, self.table, self.recall
        self.variant = variant_of(*given, self.evidence, *made, self.table_place)


@dataclass(eq=False)
class RecallRows:
    """``R`` strides of requests with stored units, and the memory that recall's kernels share.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]``.
        table: int32 ``[>= R, P]`` block numbers.
        recall: int32 ``[>= R, RECALL_COLUMNS]``.
        parts: rows that are judged at once: all together, or a few at a time.
        evidence: fp32 ``[R, S, capacity]``, of all parts.
        chosen, moves: int32 ``[R, S, room]``, recalled units, and the slots that they go to.
        scratch: int32 ``[R, S, 3, room]``.
        ranks: int32 ``[R, S, N]``, ranks before single tokens are inserted; None for strides.
        numbers, sources: int32 ``[R, S, C]``, evicted units, and where they are.
        variant: ``launch.variant_of`` all that kernels are compiled for.
    """

    steps: torch.Tensor
    table: torch.Tensor
    recall: torch.Tensor
    parts: list[Judged] = field(default_factory=list)
    evidence: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    moves: torch.Tensor | None = None
    scratch: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    sources: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_steps(self.steps, self.table)
        check_recall(self.recall, self.steps)
        self.num_rows, self.num_pages = len(self.steps), self.table.shape[1]
        self.table_place = self.table.stride(0)
        self.columns = 0 if self.numbers is None else self.numbers.shape[2]
        made = self.evidence, self.chosen, self.moves, self.scratch
        found = self.ranks, self.numbers, self.sources
        for one in (*made, *found):
            assert one is None or one.is_contiguous(), one.stride()
        self.variant = variant_of(
            *(self.steps, self.table, self.recall, *made, *found),
            *(self.table_place, self.num_pages),
        )
