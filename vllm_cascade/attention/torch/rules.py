# SPDX-License-Identifier: Apache-2.0
"""Applies the victim rules of single tokens to ranks, for many requests at once.

``policies/rules.py`` defines the rules. Requests have different rules, so round ``i`` applies rule
``i`` of every request. Shapes: ``B`` requests, ``S`` head sets, ``M`` places (slots, then the new
token); rule numbers are ``[B, 1, 1]``.
"""

import torch

from vllm_cascade.kernels.columns import LO, MORE, NEWEST_STAYS, NUM_MORE, RULE_COLUMNS
from vllm_cascade.step.inputs import Singles

NEVER = torch.iinfo(torch.int64).max


def apply_rules(rank: torch.Tensor, values: torch.Tensor, singles: Singles) -> torch.Tensor:
    """Ranks after each request's rules; -1 for deleted entries.

    Args:
        rank: int64 ``[B, S, M]``, -1 in empty places.
        values: fp32 ``[B, S, M]``, the values that the rules compare.
    """
    newest_stays = singles.column(NEWEST_STAYS) != 0
    more, num_more = singles.steps[:, MORE].long(), singles.steps[:, NUM_MORE].long()
    rounds = 1 + int(num_more.max())
    for i in range(rounds):
        if i == 0:
            rule = singles.steps[:, LO : LO + RULE_COLUMNS].long()
        else:
            has = i <= num_more
            row = torch.where(has, more + i - 1, 0)
            rule = singles.rules[row].long() * has[:, None]
        lo, hi, evicts, cell = (column.view(-1, 1, 1) for column in rule.unbind(1))
        if bool((evicts > 0).any()):
            rank = _apply(rank, values, lo, hi, evicts, cell, newest_stays)
    return rank


def _apply(
    rank: torch.Tensor,
    values: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    evicts: torch.Tensor,
    cell: torch.Tensor,
    newest_stays: torch.Tensor,
) -> torch.Tensor:
    """Apply one rule of every request."""
    inside = (rank >= lo) & (rank < hi) & (evicts > 0)
    if bool((cell != 0).any()):
        thinned = _thin(rank, values, inside & (cell != 0), lo, cell, newest_stays)
    else:
        thinned = rank
    several = (cell == 0) & (evicts > 0) & (evicts < hi - lo)
    victim = lo
    if bool(several.any()):
        victim = torch.where(several, _lowest(rank, values, inside, newest_stays), lo)
    end = torch.where(several, victim + 1, hi)
    gone = (rank >= victim) & (rank < end) & (evicts > 0) & (cell == 0)
    closed = torch.where(rank >= end, rank - evicts, rank).masked_fill(gone, -1)
    return torch.where(inside & (cell != 0), thinned, closed)


def _lowest(
    rank: torch.Tensor, values: torch.Tensor, inside: torch.Tensor, newest_stays: torch.Tensor
) -> torch.Tensor:
    """Rank of the lowest value inside, ``[B, S, 1]``; a tie evicts the oldest or the newest."""
    lowest = values.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    tied = inside & (values == lowest)
    oldest = rank.masked_fill(~tied, NEVER).amin(-1, keepdim=True)
    newest = rank.masked_fill(~tied, -1).amax(-1, keepdim=True)
    return torch.where(newest_stays, oldest, newest)


def _thin(
    rank: torch.Tensor,
    values: torch.Tensor,
    inside: torch.Tensor,
    lo: torch.Tensor,
    cell: torch.Tensor,
    newest_stays: torch.Tensor,
) -> torch.Tensor:
    """New ranks inside a range of cells. Each cell keeps one token; the others get -1."""
    size = cell.abs().clamp_min(1)
    index = torch.where(inside, (rank - lo) // size, rank.shape[-1])  # last index: in no cell
    shape = (*rank.shape[:2], rank.shape[-1] + 1)
    best = torch.full(shape, -torch.inf).scatter_reduce(2, index, values, "amax")
    tied = inside & ((values == best.gather(2, index)) | (cell < 0))
    oldest = torch.full(shape, NEVER).scatter_reduce(
        2, index, rank.masked_fill(~tied, NEVER), "amin"
    )
    newest = torch.full(shape, -1).scatter_reduce(2, index, rank.masked_fill(~tied, -1), "amax")
    stays = torch.where(newest_stays & (cell > 0), newest, oldest).gather(2, index)
    return torch.where(inside & (rank == stays), lo + index, -1)
