# SPDX-License-Identifier: Apache-2.0
"""Arguments of launches over single tokens, checked once for all layers of a step.

As for a prompt's strides (``strides.py``), a launch combines constants of a layer (a class beside
each kernel), the tokens in that layer (``Tokens``), and what all layers share (``Singles``).
"""

from dataclasses import dataclass

import torch

from .configs import MAX_SPLITS
from .launch import variant_of
from .tiles import RULE, check_steps


@dataclass(eq=False)
class Singles:
    """Single tokens of ``B`` requests, and the buffers that their kernels share.

    Row ``r`` of a layer's ``Tokens`` is the token of request ``r``; there may be more rows. ``Hq``
    query heads, ``S`` head sets, ``N`` slots or units of a block table's pages.

    Attributes:
        steps: int32 ``[B, STEP_COLUMNS]`` step rows (``tiles``).
        table: int32 ``[>= B, P]`` block numbers.
        rules: int32 ``[n, RULE_COLUMNS]``, the rules after each row's first.
        partial, partial_lse: fp32 ``[B, Hq, splits, D]`` and ``[B, Hq, splits]``: attention in
            parts, of the values' D, and its log-sum-exps.
        lse: fp32 ``[B, Hq]``, log-sum-exps over all keys and sinks.
        logits, own: fp32 ``[B, Hq, masses]`` and ``[B, Hq]``, raw logits of cached and new tokens
            (``attend.masses_of``); empty without scores by attention.
        masses: fp32 ``[B, N + 1]``, probabilities of slots, or of units of slots, and the new
            token's at the end (``scores.HeadMasses``); anything in rows that are padding and in
            slots that are not in use. None unless tensor-parallel ranks put them together.
        new_score: fp32 ``[B, S]``, scores of the new tokens, or of the units they open.
        cells: fp32 ``[B, S, N]``, scratch of rules of cells; of one number without them.
        logit_scale: fp32 ``[>= B]``, factors on the logits, or None.
        positions: int64, positions of all tokens of the step, in layers with a window; else None.
        saves: int32 ``[>= B]``, places of drafts, -1 for other tokens; None: there are no drafts.
        variant: ``launch.variant_of`` all that kernels are compiled for.
    """

    steps: torch.Tensor
    table: torch.Tensor
    rules: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    partial_lse: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    own: torch.Tensor | None = None
    masses: torch.Tensor | None = None
    new_score: torch.Tensor | None = None
    cells: torch.Tensor | None = None
    logit_scale: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    saves: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_steps(self.steps, self.table)
        self.num_rows, self.num_pages = len(self.steps), self.table.shape[1]
        self.table_place = self.table.stride(0)
        own = self.logits, self.own, self.masses, self.cells
        made = self.partial, self.partial_lse, self.lse, *own
        for one in (*made, self.new_score):
            assert one is None or one.is_contiguous(), one.stride()
        self.splits = 1 if self.partial is None else self.partial.shape[2]
        assert self.splits <= MAX_SPLITS, self.splits
        self.num_masses = 0
        if self.logits is not None and self.logits.dim() == 3:
            self.num_masses = self.logits.shape[2]
        rules, positions, saves = self.rules, self.positions, self.saves
        if rules is not None:
            assert rules.dtype == torch.int32 and rules.is_contiguous(), rules.dtype
            assert rules.shape[1] == RULE.value, rules.shape
        assert positions is None or positions.dtype == torch.int64, positions
        if saves is not None:
            assert saves.dtype == torch.int32 and len(saves) >= self.num_rows, saves.shape
        tensors = self.steps, self.table, rules, *made, self.new_score, self.logit_scale
        numbers = self.table_place, self.num_pages, self.num_masses
        self.variant = variant_of(*tensors, positions, saves, *numbers)
