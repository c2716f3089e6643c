# SPDX-License-Identifier: Apache-2.0
"""Simulates which tokens a policy keeps, without a model.

The schedule is the engine's, and NumPy applies its rules token by token. An array of probabilities
replaces attention. Without an array, every score is 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.random import drawn
from vllm_cascade.policies.rules import Rule
from vllm_cascade.policies.schedule import Schedule, compiled


@dataclass(frozen=True)
class Step:
    """The cache after ``t`` tokens: stream indices in cache order and their regions.

    Attributes:
        stored: Evicted tokens in host memory, for recall.
        recalled: Tokens of these that are cached besides ``kept``. Queries select which.
    """

    t: int
    kept: list[int]
    region: list[str]
    stored: int
    recalled: int


def simulate(
    policy: Policy, num_tokens: int, probs: np.ndarray | None = None, every: int = 1
) -> Iterator[Step]:
    """Stream tokens one by one through a policy.

    Args:
        probs: ``[T, T]``, attention of one head set, reduced over heads; rows are queries, columns
            keys. Columns of evicted tokens are ignored. For policies that score tokens by their
            text: ``[T]``, the scores.
        every: yield only steps at multiples of this.

    Raises:
        ValueError: the array is too small or has the wrong number of axes.
    """
    schedule = compiled(policy)
    scoring = schedule.scoring
    if scoring.source == "random" and probs is None:
        probs = drawn(scoring.seed, 0, num_tokens)
    axes = 1 if scoring.from_host else 2
    if probs is not None and (probs.ndim != axes or min(probs.shape) < num_tokens):
        raise ValueError(
            f"scores must be an array [{', '.join('T' * axes)}] with T >= {num_tokens} tokens, "
            f"not {probs.shape}"
        )
    return _steps(policy, schedule, num_tokens, probs, every)


def _steps(
    policy: Policy, schedule: Schedule, num_tokens: int, probs: np.ndarray | None, every: int
) -> Iterator[Step]:
    """The steps of ``simulate``, which has checked the arguments."""
    scoring, unit = schedule.scoring, schedule.unit
    kept = np.zeros(0, dtype=np.int64)
    score = np.zeros(0, dtype=np.float32)
    for t in range(num_tokens):
        kept = np.append(kept, t)
        score = np.append(score, np.float32(0))
        if scoring.source == "attention" and probs is not None:
            weight = np.float32(scoring.weight)
            score = np.float32(scoring.decay) * score
            score += weight * probs[t, kept].astype(np.float32)
        judged = t - schedule.lag
        if scoring.from_host and probs is not None and judged >= 0:
            score[kept == judged] = probs[judged]
        if (t + 1) % unit == 0:
            values = score.reshape(-1, unit).sum(1)
            if scoring.per_age:
                values /= (t + 1 - kept[::unit]).astype(np.float32)
            line = np.arange(len(values))
            for rule in schedule.rules_at(t):
                line = np.delete(line, evicted(values[line], rule, scoring.newest_stays))
            kept, score = (one.reshape(-1, unit)[line].ravel() for one in (kept, score))
        if (t + 1) % every == 0:
            stored = recalled = 0
            if policy.recall:
                seen = np.asarray(t + 1)
                stored = min(int(schedule.evicted(seen)), policy.recall_store // unit) * unit
                recalled = int(schedule.recalled(seen)) * unit
            yield Step(t + 1, kept.tolist(), schedule.regions(t + 1), stored, recalled)


def evicted(values: np.ndarray, rule: Rule, newest_stays: bool) -> np.ndarray:
    """Ranks that a rule evicts from a line.

    Args:
        values: fp32 ``[n]``, compared values in chronological order.
        newest_stays: which of equal values stays: the newest (True) or the oldest.

    Returns:
        int64 ``[rule.evicts]``.
    """
    ranks = np.arange(rule.lo, rule.hi)
    if not rule.cell and rule.evicts == rule.size:
        return ranks
    # The value decides, then the age: the last of this order stays, the first is evicted.
    order = np.lexsort((ranks if newest_stays else -ranks, values[rule.lo : rule.hi]))
    if not rule.cell:
        return ranks[order[:1]]
    cell = (ranks - rule.lo) // abs(rule.cell)
    if rule.cell < 0:
        stays = np.unique(cell, return_index=True)[1]
    else:
        last = len(order) - 1 - np.unique(cell[order][::-1], return_index=True)[1]
        stays = order[last]
    return np.delete(ranks, stays)
