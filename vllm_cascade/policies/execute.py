# SPDX-License-Identifier: Apache-2.0
"""Runs the victim rules of a whole stride in PyTorch.

Scores are frozen within a stride, so most strides need no rule-by-rule loop. ``make_plan`` picks
one of three forms:

- **groups**: rules that delete a fixed rank or hold a contest (two neighbours, or a cell). Chained
  contests leave the best of all contenders, so one arg-max per group replaces them.
- **lowest**: every insertion evicts the lowest of one long range, as heavy hitters do. Evicting
  the lowest of all at once gives the same result.
- **rules**: everything else runs rule by rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from vllm_cascade.policies.rules import Rule, Rules


@dataclass(frozen=True, eq=False)
class Plan:
    """How a stride's tokens are inserted.

    At most one of ``groups``, ``lowest`` and ``rules`` is set. If none is, all tokens stay.

    Attributes:
        num_line: tokens in the line, cached and inserted. Tokens behind them wait and stay.
        groups: int64 ``[slots, contenders]``, ranks, padded at the end with -1. Only the best
            contender of each group stays.
        lowest: ``(first, last, excess)``. The ``excess`` lowest of the ranks ``[first, last)``
            are evicted.
        rules: the rules of every inserted token.
    """

    num_line: int
    groups: torch.Tensor | None = None
    lowest: tuple[int, int, int] | None = None
    rules: tuple[Rules, ...] = ()


def make_plan(cached: int, rules: Sequence[Rules]) -> Plan:
    """Plan the insertion of one token per entry of ``rules``, behind ``cached`` tokens."""
    total = cached + len(rules)
    if not any(rules):
        return Plan(total)
    lowest = _lowest(cached, rules)
    if lowest is not None:
        return Plan(total, lowest=lowest)
    groups = _groups(cached, rules)
    if groups is not None:
        return Plan(total, groups=_padded(groups))
    return Plan(total, rules=tuple(rules))


def _groups(cached: int, rules: Sequence[Rules]) -> list[list[int]] | None:
    """Contenders for every place of the final line; None if a rule is no contest."""
    line = [[rank] for rank in range(cached)]
    for token, todo in enumerate(rules):
        line.append([cached + token])
        for rule in todo:
            size, lo, hi = rule.size, rule.lo, rule.hi
            if rule.cell:
                step = abs(rule.cell)
                cells = [line[i : min(i + step, hi)] for i in range(lo, hi, step)]
                line[lo:hi] = [list(chain(*cell)) if rule.cell > 0 else cell[0] for cell in cells]
            elif rule.evicts == size:
                del line[lo:hi]
            elif size == 2:
                line[lo:hi] = [line[lo] + line[lo + 1]]
            else:
                return None
    return line


def _lowest(cached: int, rules: Sequence[Rules]) -> tuple[int, int, int] | None:
    """``Plan.lowest`` if every insertion evicts the lowest of one full range; else None.

    The range ends a constant number of tokens before the newest. Each eviction takes the lowest,
    so the survivors are the highest of all tokens that entered the range.
    """
    ranges = set()
    excess, length = 0, cached
    for todo in rules:
        length += 1
        if not todo:
            if excess:
                return None
            continue
        rule, *others = todo
        if others or rule.cell or rule.evicts != 1 or rule.size <= 2:
            return None
        ranges.add((rule.lo, length - rule.hi))
        excess, length = excess + 1, length - 1
    if len(ranges) != 1:
        return None
    ((first, newer),) = ranges
    return first, cached + len(rules) - newer, excess


def _padded(groups: list[list[int]]) -> torch.Tensor:
    widest = max(map(len, groups), default=1)
    return torch.tensor([group + [-1] * (widest - len(group)) for group in groups]).view(-1, widest)


def survivors(values: torch.Tensor, plan: Plan, newest_stays: bool) -> torch.Tensor:
    """Select the tokens that stay.

    Args:
        values: fp32 ``[num_sets, n]``, compared values in chronological order, new tokens last.
        newest_stays: which of equal values stays: the newest (True) or the oldest.

    Returns:
        bool ``[num_sets, n]``, True for tokens that stay.
    """
    mask = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    line = values[:, : plan.num_line]
    if plan.groups is not None:
        winners = best_of(line, plan.groups.to(values.device), newest_stays)
        mask[:, : plan.num_line] = False
        return mask.scatter_(1, winners, True)
    if plan.lowest is not None:
        first, last, excess = plan.lowest
        gone = lowest_of(line[:, first:last], excess, newest_stays) + first
        return mask.scatter_(1, gone, False)
    if not plan.rules:
        return mask
    ranks = rule_by_rule(line, plan.num_line - len(plan.rules), plan.rules, newest_stays)
    mask[:, : plan.num_line] = False
    return mask.scatter_(1, ranks, True)


def best_of(values: torch.Tensor, groups: torch.Tensor, newest_stays: bool) -> torch.Tensor:
    """The highest-scoring contender of every group, int64 ``[num_sets, slots]``.

    Successive contests keep the last maximum if the newest of equals stays, else the first. One
    arg-max per group gives the same result.
    """
    if groups.shape[1] == 1:
        return groups[:, 0].expand(len(values), -1)
    if newest_stays:
        groups = groups.flip(1)
    compared = values[:, groups.clamp_min(0)].masked_fill(groups < 0, -torch.inf)
    # argmax returns the first of equal values only on the CPU; make the order explicit.
    best = (compared == compared.amax(-1, keepdim=True)) & (groups >= 0)
    place = best.int().argmax(-1, keepdim=True)
    # Warm-up scores may be NaN. Any place is fine then, but it must be a valid index.
    return groups.expand(compared.shape).gather(-1, place).squeeze(-1).clamp_min(0)


def lowest_of(values: torch.Tensor, excess: int, newest_stays: bool) -> torch.Tensor:
    """Places of the ``excess`` lowest values, int64 ``[num_sets, excess]``.

    Of equal values the oldest is evicted first if ``newest_stays``, else the newest.
    """
    newest_first = not newest_stays
    order = (values.flip(1) if newest_first else values).sort(dim=1, stable=True).indices
    return (values.shape[1] - 1 - order if newest_first else order)[:, :excess]


def rule_by_rule(
    values: torch.Tensor, cached: int, rules: Sequence[Rules], newest_stays: bool
) -> torch.Tensor:
    """Apply the rules one by one and return the final line, int64 ``[num_sets, stay]``."""
    num_sets, total = values.shape
    ranks = torch.arange(total, device=values.device).expand(num_sets, -1)
    line = ranks[:, :cached]
    for token, todo in enumerate(rules):
        line = torch.cat([line, ranks[:, cached + token : cached + token + 1]], dim=1)
        for rule in todo:
            line = apply_rule(values, line, rule, newest_stays)
    return line


def apply_rule(
    values: torch.Tensor, line: torch.Tensor, rule: Rule, newest_stays: bool
) -> torch.Tensor:
    """Remove the tokens that one rule deletes from a line of places in ``values``.

    Args:
        values: fp32 ``[num_sets, n]``.
        line: int64 ``[num_sets, m]``, indices into ``values``.
    """
    head, middle, tail = line[:, : rule.lo], line[:, rule.lo : rule.hi], line[:, rule.hi :]
    if rule.cell < 0:
        middle = middle[:, :: -rule.cell]
    elif rule.cell > 0:
        starts = range(0, middle.shape[1], rule.cell)
        cells = [list(range(i, min(i + rule.cell, middle.shape[1]))) for i in starts]
        places = best_of(values.gather(1, middle), _padded(cells).to(line.device), newest_stays)
        middle = middle.gather(1, places)
    elif rule.evicts == middle.shape[1]:
        middle = middle[:, :0]
    else:
        gone = lowest_of(values.gather(1, middle), 1, newest_stays)
        stays = torch.ones_like(middle, dtype=torch.bool).scatter_(1, gone, False)
        middle = middle[stays].view(len(line), -1)
    return torch.cat([head, middle, tail], dim=1)
