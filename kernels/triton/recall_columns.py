# SPDX-License-Identifier: Apache-2.0
"""Column names of recall rows (``kernels/columns.py``) as Triton's constants."""

import torch
import triton.language as tl

from .. import columns

HOW = tl.constexpr(columns.HOW)
RING = tl.constexpr(columns.RING)
BEFORE = tl.constexpr(columns.BEFORE)
NOW = tl.constexpr(columns.NOW)
BEGIN = tl.constexpr(columns.BEGIN)
END = tl.constexpr(columns.END)
STORED = tl.constexpr(columns.STORED)
SINKS = tl.constexpr(columns.SINKS)
MORE_RECALLED = tl.constexpr(columns.MORE_RECALLED)
RECALL = tl.constexpr(columns.RECALL_COLUMNS)
JUDGED = tl.constexpr(columns.JUDGED)


def check_recall(recall: torch.Tensor, steps: torch.Tensor) -> None:
    """Check that every step row has a recall row."""
    assert recall.dtype == torch.int32 and recall.is_contiguous(), recall.dtype
    assert recall.shape[1] == RECALL.value and len(recall) >= len(steps), recall.shape
