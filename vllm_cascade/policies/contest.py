# SPDX-License-Identifier: Apache-2.0
"""Groups of tokens of which the highest-scoring one stays."""

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
