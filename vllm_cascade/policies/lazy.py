# SPDX-License-Identifier: Apache-2.0
"""Lazy pruning: a window that is cut back seldom, and then by a bounded amount."""

from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from vllm_cascade.policies.base import Policy, Rule, StepTables


class Lazy(Policy):
    """Sinks and a window that grows by ``overflow`` tokens before it is pruned (Algorithm 1).

    With ``C = num_sinks + budget``, a cache of ``L >= C + overflow`` tokens is cut to ``C``, or
    with ``max_drop`` to ``min(max(L - max_drop, C), C + slack)``. The check runs after every
    token, also inside a stride, so that the count is a function of the tokens seen.
    """

    name: ClassVar[str] = "lazy"
    paper: ClassVar[str] = (
        "Lazy Pruning, Slack, and Staged Eviction for streaming LLMs (Algorithm 1)"
    )
    uses_scores: ClassVar[bool] = False
    batches_itself: ClassVar[bool] = True
    inert_keys: ClassVar[frozenset[str]] = frozenset({"head_reduction", "ema_gamma", "tie"})

    overflow: int = Field(32, ge=1, description="R: tokens over the budget before pruning")
    slack: int = Field(24, ge=0, description="σ: tokens over the budget that pruning may leave")
    max_drop: int = Field(8, ge=0, description="δ: tokens pruned at once; 0 is all of them")

    def pruned(self, length: int) -> int:
        """Tokens left by one check of a cache of ``length`` (Algorithm 1)."""
        capacity = self.base_capacity
        if length < capacity + self.overflow:
            return length
        if self.max_drop == 0:
            return capacity
        return min(max(length - self.max_drop, capacity), capacity + self.slack)

    def insertions(self) -> StepTables:
        peak = self.base_capacity + self.overflow
        floor = self.pruned(peak)
        period = peak - floor  # tokens dropped at once, and tokens until the next time
        t = np.arange(peak - 1 + period, dtype=np.int32)
        prunes = t == peak - 1
        count = np.where(t < peak - 1, t + 1, floor + t - (peak - 1)).astype(np.int32)
        single = prunes if period == 1 else np.zeros_like(prunes)
        lo = np.full_like(t, self.num_sinks)
        return StepTables(
            lo=lo,
            hi=(lo + single).astype(np.int32),
            count=count,
            transient=peak - 1,
            batch=prunes if period > 1 else None,
        )

    def plan_insertions(self, t: int, num_tokens: int) -> torch.Tensor:
        """bool ``[count(t) + T]``: sinks and the most recent tokens, however often it was cut."""
        total = self.base_count(t) + num_tokens
        recent = self.base_count(t + num_tokens) - min(t + num_tokens, self.num_sinks)
        rank = torch.arange(total)
        return (rank < self.num_sinks) | (rank >= total - recent)

    def batch_rules(self, t: int) -> list[Rule]:
        dropped = self.base_count(t) + 1 - self.base_count(t + 1)
        return [Rule(self.num_sinks, self.num_sinks + dropped, dropped)]

    def base_regions(self, t: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        return ["sink"] * sinks + ["window"] * (self.base_count(t) - sinks)

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        return plan.to(scores.device).expand(scores.shape)

    def remarks(self) -> list[str]:
        if self.max_drop >= self.overflow or (self.slack == 0 and self.max_drop == 0):
            return [
                f"slack {self.slack} and max_drop {self.max_drop} have no effect: every pruning "
                f"drops overflow = {self.overflow} tokens; set 0 < max_drop < overflow, slack > 0"
            ]
        if self.max_drop == 0:
            return [f"slack {self.slack} has no effect without max_drop; set 0 < max_drop"]
        if self.slack == 0:
            return [f"max_drop {self.max_drop} has no effect without slack; set slack > 0"]
        if self.overflow - self.slack > self.max_drop:
            return [
                f"every pruning drops overflow - slack = {self.overflow - self.slack} tokens, more "
                f"than max_drop {self.max_drop}; set slack to at least overflow - max_drop"
            ]
        return []
