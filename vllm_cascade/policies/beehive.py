# SPDX-License-Identifier: Apache-2.0
"""Beehive sampling: between sinks and window, one token per cell stays."""

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.rules import Insertions, Rule, Rules, Scoring
from vllm_cascade.policies.settings import Misfit


class Beehive(Policy):
    """BUZZ: segment maxima of accumulated attention for new tokens, intervals for old ones.

    The tokens between sinks and window are the middle. When it exceeds ``threshold``, an eviction
    thins it in two ways, as the authors' code does (docs/ALGORITHMS.md, "Beehive"):

    - Of the previous eviction's survivors, every ``floor((stride + 1) / 2)``-th stays.
    - Of every ``stride`` newer tokens, the one with the most accumulated attention stays.

    The check runs after every token, also inside a prompt's stride, and repeats until the middle is
    within the threshold. The bound therefore always holds, and the count depends only on the
    number of tokens seen.
    """

    name: ClassVar[str] = "beehive"
    paper: ClassVar[str] = (
        "BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters for Efficient LLM "
        "Inference, https://arxiv.org/abs/2410.23079"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})
    token_keys: ClassVar[tuple[str, ...]] = (*Policy.token_keys, "window", "threshold")

    head_policy: Literal["homogeneous", "per_kv_head"] = Field(
        "per_kv_head", description="keep the same tokens for all heads, or choose per KV head"
    )
    tie: Literal["incoming", "resident"] = Field(
        "resident", description="which of equal scores in a segment stays: the last or the first"
    )
    stride: int = Field(5, description="s: one of this many new tokens stays")
    window: int | None = Field(
        None, ge=1, description="most recent tokens, always kept; null: by the paper's theorem"
    )
    threshold: int | None = Field(
        None, ge=1, description="T: tokens between sinks and window; null: the rest of the budget"
    )
    threshold_counts: Literal["middle", "new"] = Field(
        "middle", description="counted by the threshold: the middle (authors' code) or new tokens"
    )
    log_n: bool = Field(False, description="multiply logits by log(n) / log(512)")
    log_n_counts: Literal["seen", "cached"] = Field(
        "seen", description="n: tokens seen so far (paper) or keys in the cache"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stride < 3:
            reason = (
                "would never thin old tokens (their interval is floor((stride + 1) / 2) = 1), so "
                "the cache would grow without bound"
            )
            raise Misfit("stride", self.stride, reason, {"stride": 3}, bound="at least ")
        units, size, budget = self.in_units, self.unit, self.budget
        recent, comb = units.recent * size, units.comb * size
        if budget < 2 * size:
            one = "token" if size == 1 else "unit"
            reason, change = f"leaves no room for a recent and a middle {one}", {"budget": 2 * size}
            raise Misfit("budget", budget, reason, change, bound="at least ")
        if comb < size:
            reason = f"leaves nothing of the budget {budget} for the middle"
            changes = {"window": budget - size}, {"budget": recent + size}
            raise Misfit("window", recent, reason, *changes, bound="at most ")
        if recent + comb > budget:
            raise Misfit(
                "threshold",
                comb,
                f"and window {recent} are together more than the budget {budget}",
                {"threshold": budget - recent},
                {"budget": recent + comb},
                bound="at most ",
            )
        if self.threshold_counts == "new":
            self.check_rows()
            peak = (units._most_cached() - units.num_sinks) * size
            if peak > budget:
                reason = f"counting new tokens needs up to {peak} cached tokens, more than the "
                reason += f"budget {budget}"
                raise Misfit("threshold", comb, reason, {"budget": peak}, hint="lower it")
        return self

    @property
    def recent(self) -> int:
        """The window w. The theorem's T / w is (s^2 + 1) / (s + 1) for odd s, s - 1 for even s."""
        if self.window is not None:
            return self.window
        s = self.stride
        ratio = (s * s + 1) / (s + 1) if s % 2 else s - 1
        if self.threshold is not None:
            return max(min(round(self.threshold / ratio), self.budget - self.threshold), 1)
        return max(int(self.budget / (1 + ratio)), 1)

    @property
    def comb(self) -> int:
        """The threshold T."""
        if self.threshold is not None:
            return self.threshold
        left = self.budget - self.recent
        if self.threshold_counts == "middle":
            return left
        # Survivors add to the T new tokens. At the fixed point n = n / s_old + T / s.
        old = (self.stride + 1) // 2
        return max(int((left - 3) / (1 + old / (self.stride * (old - 1)))), 1)

    def logit_scale(self, t: np.ndarray, cached: np.ndarray) -> np.ndarray | None:
        if not self.log_n:
            return None
        n = t + 1 if self.log_n_counts == "seen" else cached
        return np.log(n) / math.log(512)

    def derived(self) -> dict[str, Any]:
        units = self.in_units
        return {"window": units.recent * self.unit, "threshold": units.comb * self.unit}

    def without_effect(self) -> set[str]:
        return super().without_effect() | (set() if self.log_n else {"log_n_counts"})

    @property
    def scoring(self) -> Scoring:
        return Scoring("attention", newest_stays=self.tie == "incoming")

    def insertions(self) -> Insertions:
        rules, _, period = self._walk()
        return Insertions(rules, period)

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        old = _survivors(self)[t - 1] if t else 0  # pyright: ignore[reportArgumentType]
        recent = min(count - sinks, self.recent)
        new = count - sinks - recent - old
        return ["sink"] * sinks + ["old"] * old + ["new"] * new + ["window"] * recent

    def _walk(self) -> tuple[list[Rules], list[int], int]:
        """Insert tokens until an eviction leaves the same number of survivors as an earlier one.

        Returns:
            The rules of every token, the survivors in the middle after every token, and the period.
        """
        length, old, fixed = 0, 0, self.num_sinks + self.recent
        rules: list[Rules] = []
        olds: list[int] = []
        seen: dict[int, int] = {}
        while True:
            length += 1
            todo: list[Rule] = []
            while length - fixed - (old if self.threshold_counts == "new" else 0) > self.comb:
                thinned, old = self._thin(length, old)
                todo += thinned
                length = fixed + old
            rules.append(tuple(todo))
            olds.append(old)
            if todo and old in seen:
                return rules, olds, len(rules) - seen[old]
            if todo:
                seen[old] = len(rules)

    def _most_cached(self) -> int:
        grown = (1 - sum(rule.evicts for rule in todo) for todo in self._walk()[0])
        return max(accumulate(grown))

    @property
    def interval(self) -> int:
        """Cell size for survivors of earlier evictions; the first of each cell stays."""
        return (self.stride + 1) // 2

    def _thin(self, length: int, old: int) -> tuple[list[Rule], int]:
        """One eviction: its rules and the number of survivors in the middle.

        The rule for new tokens runs first, because it does not shift the ranks of older ones.
        """
        first, end = self.num_sinks + old, length - self.recent
        new_left, old_left = -(-(end - first) // self.stride), -(-old // self.interval)
        thinned = [
            (first, end, end - first - new_left, self.stride),
            (self.num_sinks, first, old - old_left, -self.interval),
        ]
        return [Rule(*rule) for rule in thinned if rule[2]], new_left + old_left


@lru_cache(maxsize=8)
def _survivors(policy: Beehive) -> list[int]:
    """Survivors in the middle after every token, cached because traces call it repeatedly."""
    return policy._walk()[1]
