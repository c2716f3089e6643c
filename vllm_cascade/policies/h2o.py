# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters: the tokens that have received most attention, and the most recent ones."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.rules import Insertions, Rule, Scoring
from vllm_cascade.policies.settings import Misfit


class H2O(Policy):
    """Accumulated attention decides among all but the last ``window`` tokens."""

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = (
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, "
        "https://arxiv.org/abs/2306.14048"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})
    token_keys: ClassVar[tuple[str, ...]] = (*Policy.token_keys, "window")

    window: int | None = Field(
        None, ge=1, description="most recent tokens, always kept; null: half the budget"
    )
    normalise: bool = Field(
        False, description="compare attention per query that saw the token; sums favour old tokens"
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.window is not None and self.window > self.budget:
            reason, change = f"is larger than the budget {self.budget}", {"window": self.budget}
            raise Misfit("window", self.window, reason, change, bound="at most ")
        return self

    @property
    def recent(self) -> int:
        """Most recent tokens that are always kept."""
        return max(self.budget // 2, 1) if self.window is None else self.window

    @property
    def scoring(self) -> Scoring:
        newest = self.tie == "incoming"
        return Scoring("attention", per_age=self.normalise, newest_stays=newest)

    def insertions(self) -> Insertions:
        first = self.num_sinks
        lowest = Rule(first, first + self.budget + 1 - self.recent, 1)
        return Insertions([()] * self.base_capacity + [(lowest,)])

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        recent = min(count - sinks, self.recent)
        return ["sink"] * sinks + ["heavy"] * (count - sinks - recent) + ["window"] * recent
