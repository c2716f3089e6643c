# SPDX-License-Identifier: Apache-2.0
"""Tokens compared by score: the best of every group stays, or the lowest of a range leave."""

import torch


def contest(
    scores: torch.Tensor, line: torch.Tensor, groups: torch.Tensor, newest_wins: bool
) -> torch.Tensor:
    """The highest-scoring contender of every slot.

    Successive pairwise contests keep the last maximum where the incoming token wins ties and
    the first where the resident does, so a whole slot is one arg-max.

    Args:
        scores: fp32 ``[num_sets, n]``.
        line: int64 ``[num_sets, m]``, chronological indices into ``scores``.
        groups: int64 ``[slots, contenders]`` into ``line``, padded with -1 at the end.

    Returns:
        int64 ``[num_sets, slots]``: indices into ``scores``.
    """
    if groups.shape[1] == 1:
        return line[:, groups[:, 0]]
    if newest_wins:
        groups = groups.flip(1)
    members = line[:, groups.clamp_min(0)]
    values = scores.gather(1, members.flatten(1)).view(members.shape)
    values = values.masked_fill(groups < 0, -torch.inf)
    # argmax returns the first of equal values only on the CPU; make the order explicit.
    best = values == values.amax(-1, keepdim=True)
    return members.gather(-1, best.int().argmax(-1, keepdim=True)).squeeze(-1)


def drop_lowest(scores: torch.Tensor, first: int, last: int, excess: int, tie: str) -> torch.Tensor:
    """All but the ``excess`` lowest scores of the tokens ``[first, last)``.

    Args:
        scores: fp32 ``[num_sets, n]``, chronological.
        tie: of equal scores the older leaves first (``incoming`` stays), or the newer
            (``resident``).

    Returns:
        bool ``[num_sets, n]``: which tokens stay.
    """
    mask = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if excess:
        middle = scores[:, first:last]
        flip = tie == "resident"
        order = (middle.flip(1) if flip else middle).sort(dim=1, stable=True).indices
        order = middle.shape[1] - 1 - order if flip else order
        mask.scatter_(1, order[:, :excess] + first, False)
    return mask
