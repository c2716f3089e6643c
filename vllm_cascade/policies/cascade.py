# SPDX-License-Identifier: Apache-2.0
"""Cascading sub-caches: each keeps an older, sparser part of the stream than the one before.

Sub-cache ``i`` holds ``window`` tokens and accepts a token at every ``base**i``-th step. A full
sub-cache passes its oldest token to the next one. If that one does not accept at this step, the
passed token competes with its newest resident, and the lower score is dropped. The sub-caches are
only boundaries in one chronological list, deepest first.
"""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.rules import MOST_INSERTIONS, Insertions, Rule, Rules, Scoring
from vllm_cascade.policies.settings import Misfit, nearest


class Cascade(Policy):
    """Training-free cascading KV cache with token selection (Algorithm 1 of the paper)."""

    name: ClassVar[str] = "cascade"
    paper: ClassVar[str] = (
        "Training-Free Exponential Context Extension via Cascading KV Cache, "
        "https://arxiv.org/abs/2406.17808"
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "num_sinks": 4,
            "num_subcaches": 4,
            "cascade_base": 2,
            "eager_fill": False,
            "prefill_stride": 1,
            "head_policy": "homogeneous",
            "head_reduction": "mean",
            "ema_gamma": None,
            "tie": "resident",
            "unit": 1,
        }
    }

    preset: Literal["paper"] | None = Field(
        None, description="`paper`: the paper's values for settings that are not given"
    )
    num_subcaches: int = Field(4, ge=1, le=16, description="sub-caches that share the budget")
    cascade_base: int = Field(
        2,
        ge=2,
        description="each sub-cache accepts tokens this many times less often than the last",
    )
    eager_fill: bool = Field(
        True, description="fill the whole budget before thinning; false: as in the paper"
    )

    @classmethod
    def budget_step(cls, raw: dict[str, Any]) -> int:
        fields = cls.model_fields
        num = raw.get("num_subcaches", fields["num_subcaches"].default)
        base = raw.get("cascade_base", fields["cascade_base"].default)
        if not (isinstance(num, int) and isinstance(base, int) and 1 <= num <= 16 and base >= 2):
            return 1  # the field checks will name what is wrong
        return math.lcm(num * base ** (num - 1), num * super().budget_step(raw))

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        step = self.budget_step(self.model_dump())
        if self.budget % step:
            units = "" if self.unit == 1 else f" and of num_subcaches * unit {self.unit}:"
            raise Misfit(
                "budget",
                self.budget,
                f"does not fit {self.num_subcaches} sub-caches of base {self.cascade_base}: it "
                "must be a multiple of num_subcaches * cascade_base**(num_subcaches - 1)"
                f"{units or ' ='} {step}",
                *nearest("budget", self.budget, step),
            )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        """Bound the table of rules, which has a row for each unit until the cache is full.

        Sub-cache ``i`` accepts every ``cascade_base**i``-th unit, so it takes that many times its
        window to fill.
        """
        spans = [1 if self.eager_fill else self.cascade_base**i for i in range(self.num_subcaches)]
        tokens = self.window // self.unit * sum(spans) + self.cascade_base ** (
            self.num_subcaches - 1
        )
        if tokens <= MOST_INSERTIONS:
            return self
        key = "num_subcaches" if self.eager_fill else "eager_fill"
        raise Misfit(
            key,
            getattr(self, key),
            f"makes rules that repeat only after {tokens} units: the engine has a table of at most "
            f"{MOST_INSERTIONS} rows",
            *([] if self.eager_fill else [{"eager_fill": True}]),
            hint="lower num_subcaches, cascade_base or the budget",
        )

    @property
    def compares(self) -> bool:
        return self.num_subcaches > 1

    def without_effect(self) -> set[str]:
        alone = {"cascade_base", "eager_fill", "tie", "ema_gamma", "head_reduction"}
        return super().without_effect() | (set() if self.compares else alone)

    @property
    def window(self) -> int:
        """Tokens in one sub-cache."""
        return self.budget // self.num_subcaches

    @property
    def gamma(self) -> float:
        """``ema_gamma``; by default the paper's ``exp(-ln(100) / window)``."""
        return math.exp(-math.log(100) / self.window) if self.ema_gamma is None else self.ema_gamma

    def derived(self) -> dict[str, Any]:
        return {"window": self.window, "gamma": round(self.gamma, 6)}

    @property
    def scoring(self) -> Scoring:
        newest = self.tie == "incoming"
        return Scoring("attention", self.gamma, 1.0 - self.gamma, newest_stays=newest)

    def insertions(self) -> Insertions:
        sizes = [0] * self.num_subcaches
        rules: list[Rules] = []
        period = self.cascade_base ** (self.num_subcaches - 1)
        full_at = None
        while full_at is None or len(rules) < full_at + period:
            rules.append(self._insert(sizes, len(rules)))
            # Under eager_fill every level accepts while `t <= base_capacity`, before the period.
            full = sum(sizes) == self.budget and len(rules) > self.base_capacity
            if full_at is None and full:
                full_at = len(rules)
        return Insertions(rules, period)

    def _insert(self, sizes: list[int], t: int) -> Rules:
        """Pass token ``t`` through the sub-caches, update ``sizes`` and return the rules."""
        if t < self.num_sinks:
            return ()
        for level, size in enumerate(sizes):
            if self._accepts(level, t):
                if size < self.window:
                    sizes[level] += 1
                    return ()
                continue  # full: its oldest moves on to the next sub-cache
            if size == 0:
                sizes[level] = 1
                return ()
            newest = self.num_sinks + sum(sizes[level:]) - 1
            # The resident and, right after it, the incoming token.
            return (Rule(newest, newest + 2, 1),)
        return (Rule(self.num_sinks, self.num_sinks + 1, 1),)

    def _accepts(self, level: int, t: int) -> bool:
        """Whether sub-cache ``level`` accepts when token ``t`` (sinks included) is inserted."""
        if self.eager_fill and t <= self.base_capacity:
            return True
        return (t - self.num_sinks) % self.cascade_base**level == 0

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        stored, names = count - sinks, []
        # Sub-caches fill front to back, and a full one never shrinks.
        for level in range(self.num_subcaches):
            size = min(stored, self.window)
            names = [f"sub{level}"] * size + names
            stored -= size
        return ["sink"] * sinks + names
