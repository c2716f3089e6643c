# SPDX-License-Identifier: Apache-2.0
"""Victim rules run over a whole stride in PyTorch: which of its tokens, and of the cached, stay.

Scores are frozen within a stride, so most rules need not run one by one. A fixed victim is known
ahead, and a chain of contests between neighbours, or in cells, ends with the best of all that took
part: ``plan`` follows the rules on *groups* of contenders, and one arg-max over all groups is the
stride. Where every token drives the lowest of a long range out, as heavy hitters do, the end is the
same as dropping so many of the lowest at once. Anything else runs rule by rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from vllm_cascade.policies.rules import Rule, Rules


@dataclass(frozen=True, eq=False)
class Plan:
    """Inserting some tokens into a line of ``num_line`` tokens in all; the ranks behind wait.

    All tokens stay where none of the three fields says otherwise.

    Attributes:
        groups: int64 ``[slots, contenders]`` ranks, padded with -1 at the end; the best of each
            stays, and nothing else.
        lowest: ``(first, last, excess)``: of the ranks ``[first, last)`` the ``excess`` lowest
            leave, and nothing else.
        rules: what every inserted token does, where neither of the two says it.
    """

    num_line: int
    groups: torch.Tensor | None = None
    lowest: tuple[int, int, int] | None = None
    rules: tuple[Rules, ...] = ()


def make_plan(cached: int, rules: Sequence[Rules]) -> Plan:
    """How to insert a token for each entry of ``rules`` behind ``cached`` ones."""
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
    """Contenders for every place of the line at the end; None where a rule is no contest."""
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
    """One range that the lowest is driven out of by every token once it is full; None: otherwise.

    The range ends a constant number of tokens before the newest. What a token drives out is lower
    than all that stay, so the survivors are the highest of all that were ever in the range.
    """
    ranges = set()
    excess, length = 0, cached
    for todo in rules:
        length += 1
        if not todo:
            if excess:
                return None
            continue
        if len(todo) > 1 or todo[0].cell or todo[0].evicts != 1 or todo[0].size <= 2:
            return None
        ranges.add((todo[0].lo, length - todo[0].hi))
        excess, length = excess + 1, length - 1
    if len(ranges) != 1:
        return None
    ((first, newer),) = ranges
    return first, cached + len(rules) - newer, excess


def _padded(groups: list[list[int]]) -> torch.Tensor:
    widest = max(map(len, groups), default=1)
    return torch.tensor([group + [-1] * (widest - len(group)) for group in groups]).view(-1, widest)


def survivors(values: torch.Tensor, plan: Plan, newest_stays: bool) -> torch.Tensor:
    """Which tokens stay.

    Args:
        values: fp32 ``[num_sets, n]``, what is compared, chronological, the new tokens last.

    Returns:
        bool of the same shape.
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

    Successive contests keep the last maximum where the newest of equals stays, and the first where
    the oldest does, so a whole group is one arg-max.
    """
    if groups.shape[1] == 1:
        return groups[:, 0].expand(len(values), -1)
    if newest_stays:
        groups = groups.flip(1)
    compared = values[:, groups.clamp_min(0)].masked_fill(groups < 0, -torch.inf)
    # argmax returns the first of equal values only on the CPU; make the order explicit.
    best = (compared == compared.amax(-1, keepdim=True)) & (groups >= 0)
    place = best.int().argmax(-1, keepdim=True)
    # A warm-up's scores may be no numbers: any place will do then, but it must be one.
    return groups.expand(compared.shape).gather(-1, place).squeeze(-1).clamp_min(0)


def lowest_of(values: torch.Tensor, excess: int, newest_stays: bool) -> torch.Tensor:
    """int64 ``[num_sets, excess]``: places of the lowest; of equals the older leaves first."""
    newest_first = not newest_stays
    order = (values.flip(1) if newest_first else values).sort(dim=1, stable=True).indices
    return (values.shape[1] - 1 - order if newest_first else order)[:, :excess]


def rule_by_rule(
    values: torch.Tensor, cached: int, rules: Sequence[Rules], newest_stays: bool
) -> torch.Tensor:
    """The line that is left, int64 ``[num_sets, stay]``: what the rules mean, literally."""
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
    """A line int64 ``[num_sets, m]`` of places in ``values`` without what one rule deletes."""
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
