# SPDX-License-Identifier: Apache-2.0
"""Rows with drafts, all of which are rejected, for the check of a device."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.step.drafts import Drafts
from vllm_cascade.step.inputs import Undone


class EveryDraft(Drafts):
    """Takes all tokens of a step for drafts, but the first of each row."""

    def __init__(self, most: int, firsts: Sequence[int]) -> None:
        super().__init__(len(firsts), most)
        self._firsts = np.asarray(firsts)

    def drafting(self, names: Sequence[str | None], ends: np.ndarray) -> list[int]:
        return list(range(len(self._firsts)))

    def saves(
        self, names: Sequence[str | None], rows: np.ndarray, stream: np.ndarray
    ) -> np.ndarray:
        ahead = stream - self._firsts[rows]
        return np.where(ahead > 0, rows * self.most + ahead - 1, -1).astype(np.int32)

    def rejected(
        self, lengths: Sequence[int], schedule: Schedule, table: torch.Tensor
    ) -> Undone | None:
        """All drafts of rows of these lengths; None if there are none."""
        rows = [
            (row * self.most, length - 1, schedule.peak_at(first + 1), first + 1)
            for row, (first, length) in enumerate(zip(self._firsts.tolist(), lengths, strict=True))
            if length > 1
        ]
        which = [row for row, length in enumerate(lengths) if length > 1]
        return Undone(torch.tensor(rows, dtype=torch.int32), table[which]) if rows else None
