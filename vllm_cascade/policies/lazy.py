# SPDX-License-Identifier: Apache-2.0
"""Lazy pruning: a window that is pruned rarely and by a bounded number of tokens."""

from typing import Any, ClassVar

from pydantic import Field

from vllm_cascade.policies.rules import Insertions, Rule
from vllm_cascade.policies.sink import Sink


class Lazy(Sink):
    """Sinks and a window that grows by ``overflow`` tokens before it is pruned (Algorithm 1).

    With ``C = num_sinks + budget``, a cache of ``L >= C + overflow`` tokens is pruned to
    ``min(max(L - max_drop, C), C + slack)``, or to ``C`` if ``max_drop`` is 0. The check runs after
    every token, also inside a stride, so the count depends only on the number of tokens seen.
    """

    name: ClassVar[str] = "lazy"
    paper: ClassVar[str] = (
        "Lazy Pruning, Slack, and Staged Eviction for streaming LLMs (Algorithm 1)"
    )
    batches_itself: ClassVar[bool] = True
    token_keys: ClassVar[tuple[str, ...]] = (*Sink.token_keys, "slack", "max_drop")

    overflow: int = Field(32, ge=1, description="R: tokens over the budget before pruning")
    slack: int = Field(24, ge=0, description="σ: tokens over the budget that pruning may leave")
    max_drop: int = Field(8, ge=0, description="δ: tokens pruned at once; 0: all of them")

    @classmethod
    def unit_defaults(cls, unit: int) -> dict[str, Any]:
        """Scale the defaults proportionally so that whole units are dropped."""
        drop = 8 if 8 % unit == 0 else unit
        pruning = {"overflow": 4 * drop, "slack": 3 * drop, "max_drop": drop}
        return {**super().unit_defaults(unit), **pruning}

    def pruned(self, length: int) -> int:
        """Tokens left after one check of a cache of ``length`` tokens (Algorithm 1)."""
        capacity = self.base_capacity
        if length < capacity + self.overflow:
            return length
        if self.max_drop == 0:
            return capacity
        return min(max(length - self.max_drop, capacity), capacity + self.slack)

    def insertions(self) -> Insertions:
        peak = self.base_capacity + self.overflow
        dropped = peak - self.pruned(peak)  # per pruning; also the tokens between two prunings
        prune = Rule(self.num_sinks, self.num_sinks + dropped, dropped)
        return Insertions([()] * (peak - 1) + [(prune,)] + [()] * (dropped - 1), period=dropped)

    def remarks(self) -> list[str]:
        overflow = max(self.overflow, self.unit)
        if self.max_drop >= overflow or (self.slack == 0 and self.max_drop == 0):
            return [
                f"slack {self.slack} and max_drop {self.max_drop} have no effect: every pruning "
                f"drops overflow = {overflow} tokens; set 0 < max_drop < overflow, slack > 0"
            ]
        if self.max_drop == 0:
            return [f"slack {self.slack} has no effect without max_drop; set 0 < max_drop"]
        if self.slack == 0:
            return [f"max_drop {self.max_drop} has no effect without slack; set slack > 0"]
        if overflow - self.slack > self.max_drop:
            return [
                f"every pruning drops overflow - slack = {overflow - self.slack} tokens, more "
                f"than max_drop {self.max_drop}; set slack to at least overflow - max_drop"
            ]
        return []
