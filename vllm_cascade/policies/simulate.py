# SPDX-License-Identifier: Apache-2.0
"""Simulates which tokens a policy keeps, without a model.

Schedule and selection use the same code as the engine. An array of probabilities replaces
attention. Without an array, every score is 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.random import drawn
from vllm_cascade.policies.schedule import compared, compiled


@dataclass(frozen=True)
class Step:
    """The cache after ``t`` tokens: stream indices in cache order and their regions."""

    t: int
    kept: list[int]
    region: list[str]


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
    scoring, unit = schedule.scoring, schedule.unit
    if scoring.source == "random" and probs is None:
        probs = drawn(scoring.seed, 0, num_tokens)
    axes = 1 if scoring.from_host else 2
    if probs is not None and (probs.ndim != axes or min(probs.shape) < num_tokens):
        raise ValueError(
            f"scores must be an array [{', '.join('T' * axes)}] with T >= {num_tokens} tokens, "
            f"not {probs.shape}"
        )
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
            sums = torch.from_numpy(score.reshape(-1, unit).sum(1))
            values = compared(scoring, sums, torch.from_numpy(t + 1 - kept[::unit]))
            stays = schedule.survivors(values[None], schedule.plan(t, 1))[0].numpy().repeat(unit)
            kept, score = kept[stays], score[stays]
        if (t + 1) % every == 0:
            yield Step(t + 1, kept.tolist(), schedule.regions(t + 1))
