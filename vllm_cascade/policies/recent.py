# SPDX-License-Identifier: Apache-2.0
"""Base of policies that keep the most recent tokens and the highest scores among older ones."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.rules import Insertions, Rule
from vllm_cascade.policies.settings import Misfit


class Recent(Policy):
    """Every insertion into a full cache evicts the lowest score behind the sinks and the window.

    A subclass says in ``scoring`` where scores come from.
    """

    token_keys: ClassVar[tuple[str, ...]] = (*Policy.token_keys, "window")

    window: int | None = Field(
        None, ge=1, description="most recent tokens, always kept; null: half the budget"
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.window is not None and self.window > self.budget:
            reason = f"is larger than the budget {self.budget}"
            changes = {"window": self.budget}, {"budget": self.window}
            raise Misfit("window", self.window, reason, *changes, bound="at most ")
        return self

    @property
    def recent(self) -> int:
        """Most recent tokens that are always kept."""
        return max(self.budget // 2, 1) if self.window is None else self.window

    @property
    def compares(self) -> bool:
        units = self.in_units
        return units.recent < units.budget

    def without_effect(self) -> set[str]:
        keys = super().without_effect()
        if not self.compares:  # only the oldest token behind the sinks is ever evicted
            scored = {"head_reduction", "tie", "normalise", "seed"}
            keys |= scored & type(self).model_fields.keys()
        if self.budget == self.unit:
            keys.add("window")
        return keys

    def insertions(self) -> Insertions:
        first = self.num_sinks
        lowest = Rule(first, first + self.budget + 1 - self.recent, 1)
        return Insertions([()] * self.base_capacity + [(lowest,)])

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        recent = min(count - sinks, self.recent)
        return ["sink"] * sinks + ["older"] * (count - sinks - recent) + ["window"] * recent
