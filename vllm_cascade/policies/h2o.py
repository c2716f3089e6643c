# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters: the tokens that have received most attention, and the most recent ones."""

from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_cascade.policies.base import Policy, StepTables
from vllm_cascade.policies.contest import drop_lowest


class H2O(Policy):
    """Accumulated attention decides among all but the last ``window`` tokens."""

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = (
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, "
        "https://arxiv.org/abs/2306.14048"
    )
    uses_scores: ClassVar[bool] = True
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})

    window: int | None = Field(
        None, ge=1, description="most recent tokens, always kept; null is half the budget"
    )
    normalise: bool = Field(
        False, description="compare attention per query that saw a token: raw sums favour old ones"
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.window is not None and self.window > self.budget:
            raise ValueError(
                f"window {self.window} is larger than the budget {self.budget}; "
                f"set it to at most {self.budget}"
            )
        return self

    @property
    def recent(self) -> int:
        """Most recent tokens that are always kept."""
        return max(self.budget // 2, 1) if self.window is None else self.window

    @property
    def needs_age(self) -> bool:
        return self.normalise

    def insertions(self) -> StepTables:
        fill = self.base_capacity
        t = np.arange(fill + 1, dtype=np.int32)
        lo = np.full_like(t, self.num_sinks)
        candidates = self.budget + 1 - self.recent
        return StepTables(
            lo=lo,
            hi=np.where(t >= fill, lo + candidates, lo).astype(np.int32),
            count=np.minimum(t + 1, fill),
            transient=fill,
        )

    def plan_insertions(self, t: int, num_tokens: int) -> tuple[int, int]:
        """Tokens in all, and how many between sinks and window must leave."""
        total = self.base_count(t) + num_tokens
        return total, total - self.base_count(t + num_tokens)

    def base_regions(self, t: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        stored = self.base_count(t) - sinks
        recent = min(stored, self.recent)
        return ["sink"] * sinks + ["heavy"] * (stored - recent) + ["window"] * recent

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        total, excess = plan
        return drop_lowest(scores, self.num_sinks, total - self.recent, excess, self.tie)
