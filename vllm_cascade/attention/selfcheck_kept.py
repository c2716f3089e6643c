# SPDX-License-Identifier: Apache-2.0
"""What pages hold after a step of the check, and whether two devices kept the same units.

A policy that keeps the highest scores compares hundreds of pairs in a long stride. Two scores may
be closer than rounding, so a right device may keep the other of the two. Such a pair is accepted:
the unit was there to be kept, and its score is the score of the one that the reference kept.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_cascade.cache.layout import Pages

Kept = dict[str, torch.Tensor]
"""A head set's units in the order of ranks: ``rank``, ``born``, ``score`` and, where pages have it,
``token`` ``[n]``; rows ``kv`` ``[heads, n, unit, row_size]``."""
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative difference of two scores that rounding may decide, by dtype."""
MOST_CLOSE = 50
"""At most one unit in this many, plus one, may differ."""


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number of what is expected; NaN is infinite."""
    if expected.numel() == 0:
        return 0.0
    found, expected = found.cpu().double(), expected.cpu().double()
    difference = (found - expected).abs().max()
    most = expected.abs().max().clamp_min(1e-9)
    return float("inf") if difference.isnan() else float(difference / most)


def kept_units(pages: Pages, blocks: torch.Tensor, slots: int) -> list[Kept]:
    """What a request's pages hold, by head set."""
    blocks, unit, found = blocks.long(), pages.unit, []
    num_sets = pages.rank.shape[1]
    heads = pages.kv.shape[1] // num_sets
    words = {
        name: getattr(pages, name)[blocks.to(pages.rank.device)].cpu().transpose(0, 1).flatten(1)
        for name in ("rank", "born", "score", "token")
        if getattr(pages, name) is not None
    }
    kv = pages.rows(blocks.to(pages.kv.device)).cpu().transpose(0, 1).flatten(1, 2)
    kv = kv.unflatten(1, (-1, unit))
    for head_set in range(num_sets):
        rank = words["rank"][head_set, : slots // unit]
        order = rank.argsort(stable=True)
        order = order[rank[order] >= 0]
        own = {name: word[head_set][order] for name, word in words.items()}
        own["kv"] = kv[head_set * heads : (head_set + 1) * heads, order]
        found.append(own)
    return found


def rows_and_scores(kept: Kept, seen: int, unit: int) -> dict[str, torch.Tensor]:
    """Rows of slots that hold a token, and scores; a request's last unit may not be full."""
    used = torch.ones(len(kept["rank"]), unit, dtype=torch.bool)
    if len(used) and seen % unit:
        used[-1, seen % unit :] = False
    return {"rows": kept["kv"][:, used], "scores": kept["score"]}


class Differing(NamedTuple):
    """Two sides' units less those that only one of them kept, and the number of these."""

    ours: Kept
    theirs: Kept
    num: int


def same_units(
    ours: Kept,
    theirs: Kept,
    width: int,
    candidates: Callable[[], torch.Tensor],
    close: float,
    rounding: float,
) -> Differing | None:
    """The units that both sides kept, or None if they differ by more than close calls.

    Args:
        ours, theirs: also have ``compared`` ``[n]``, what the policy compares: mostly scores.
        width: channels of a row's value.
        candidates: values ``[n, width]`` of the first head of all tokens that could be kept. A unit
            that only we kept begins with one of them.
        close: relative difference of two scores that rounding may decide; 0: none.
        rounding: largest difference of a value in the pages, relative to the largest one.
    """
    if _equal(ours, theirs):
        return Differing(ours, theirs, 0)
    if not close or not torch.equal(ours["rank"], theirs["rank"]):
        return None
    sides = [kept | {"value": kept["kv"][0, :, 0, -width:]} for kept in (ours, theirs)]
    firsts = [side["value"] for side in sides]
    shared = _shared(*firsts)
    here, there = (_select(side, mask) for side, mask in zip(sides, shared, strict=True))
    if not _equal(here, there, words=("born", "token", "value")):
        return None
    won, lost = (side["compared"][~mask] for side, mask in zip(sides, shared, strict=True))
    if not 0 < len(won) == len(lost) <= 1 + len(firsts[0]) // MOST_CLOSE:
        return None
    if ((won - lost).abs() > close * lost.abs()).any():
        return None
    offered = candidates().float()
    away = torch.cdist(firsts[0][~shared[0]].float(), offered, p=torch.inf).amin(dim=1)
    if (away > rounding * offered.abs().max()).any():
        return None
    return Differing(here, there, len(won))


def num_differing(ours: Kept, theirs: Kept, width: int) -> int:
    """Units that only we kept, or that stand elsewhere; at least 1 of sides that differ."""
    shared = _shared(*(kept["kv"][0, :, 0, -width:] for kept in (ours, theirs)))
    return max(1, int((~shared[0]).sum()), len(theirs["rank"]) - len(ours["rank"]))


def _shared(*values: torch.Tensor) -> list[torch.Tensor]:
    """For each side's values ``[n, width]``, bool ``[n]``: those that the other side has, too."""
    names = [[bytes(row) for row in side.contiguous().view(torch.uint8).numpy()] for side in values]
    known = [set(side) for side in names]
    return [
        torch.tensor([name in other for name in side])
        for side, other in zip(names, known[::-1], strict=True)
    ]


def _equal(ours: Kept, theirs: Kept, words: Sequence[str] = ("rank", "born", "token")) -> bool:
    return all(torch.equal(ours[word], theirs[word]) for word in words if word in ours)


def _select(kept: Kept, mask: torch.Tensor) -> Kept:
    return {name: x[:, mask] if name == "kv" else x[mask] for name, x in kept.items()}
