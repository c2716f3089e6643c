# SPDX-License-Identifier: Apache-2.0
"""Beehive sampling: between sinks and window, one token of every cell of a comb stays."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_cascade.policies.base import MAX_POLICIES, Policy, Rule, StepTables
from vllm_cascade.policies.contest import contest


class Beehive(Policy):
    """BUZZ: segment maxima of accumulated attention for new tokens, intervals for old ones.

    When the tokens between sinks and window are more than ``threshold``, the survivors of the
    last time are thinned to every ``floor((stride + 1) / 2)``-th, and of every ``stride`` newer
    ones the one with the most accumulated attention stays (the code's reading;
    docs/INTERNALS.md, "Beehive").
    The check runs after every token, also inside a prompt's stride, and again until the middle
    is within the threshold: the bound always holds, and the count is a function of the tokens
    seen.
    """

    name: ClassVar[str] = "beehive"
    paper: ClassVar[str] = (
        "BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters for Efficient LLM "
        "Inference, https://arxiv.org/abs/2410.23079"
    )
    uses_scores: ClassVar[bool] = True
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})

    head_policy: Literal["homogeneous", "per_kv_head"] = Field(
        "per_kv_head", description="one kept set for all heads, or one for each KV head"
    )
    tie: Literal["incoming", "resident"] = Field(
        "resident", description="which of a segment's equal scores stays: the last or the first"
    )
    stride: int = Field(5, description="s: new tokens of which one stays")
    window: int | None = Field(
        None, ge=1, description="most recent tokens, always kept; null: by the paper's theorem"
    )
    threshold: int | None = Field(
        None, ge=1, description="T: tokens between sinks and window; null: what the budget leaves"
    )
    threshold_counts: Literal["middle", "new"] = Field(
        "middle", description="what the threshold counts: all in the middle (the code), or new ones"
    )
    log_n: bool = Field(False, description="multiply logits by log(n) / log(512)")
    log_n_counts: Literal["seen", "cached"] = Field(
        "seen", description="n: tokens seen so far (the paper), or keys in the cache"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stride < 3:
            raise ValueError(
                f"stride {self.stride} would never thin old tokens (their interval is "
                "floor((stride + 1) / 2) = 1), so the cache would grow without bound; set stride "
                "to at least 3"
            )
        if self.comb < 1:
            raise ValueError(
                f"window {self.recent} leaves nothing of the budget {self.budget} for the middle; "
                f"set window to at most {self.budget - 1}"
            )
        if self.recent + self.comb > self.budget:
            raise ValueError(
                f"window {self.recent} + threshold {self.comb} is more than the budget "
                f"{self.budget}; lower the threshold to at most {self.budget - self.recent}"
            )
        if self.threshold_counts == "new":
            peak = int(self.insertions().count.max()) - self.num_sinks
            if peak > self.budget:
                raise ValueError(
                    f"threshold {self.comb} counting new tokens needs up to {peak} cached tokens, "
                    f"more than the budget {self.budget}; lower the threshold"
                )
        return self

    @property
    def recent(self) -> int:
        """w. The theorem's ratio T / w is (s^2 + 1) / (s + 1) for odd s, s - 1 for even s."""
        if self.window is not None:
            return self.window
        s = self.stride
        ratio = (s * s + 1) / (s + 1) if s % 2 else s - 1
        if self.threshold is not None:
            return max(min(round(self.threshold / ratio), self.budget - self.threshold), 1)
        return max(int(self.budget / (1 + ratio)), 1)

    @property
    def comb(self) -> int:
        """T."""
        if self.threshold is not None:
            return self.threshold
        left = self.budget - self.recent
        if self.threshold_counts == "middle":
            return left
        # Survivors come on top of T new tokens: n = n / s_old + T / s at the fixed point.
        old = (self.stride + 1) // 2
        return max(int((left - 3) / (1 + old / (self.stride * (old - 1)))), 1)

    def logit_scale(self, t: np.ndarray, cached: np.ndarray) -> np.ndarray | None:
        if not self.log_n:
            return None
        n = t + 1 if self.log_n_counts == "seen" else cached
        return np.log(n) / math.log(512)

    def derived(self) -> dict[str, Any]:
        return {"window": self.recent, "threshold": self.comb}

    def _evicts(self, length: int, old: int) -> bool:
        middle = length - self.num_sinks - self.recent
        return middle - (old if self.threshold_counts == "new" else 0) > self.comb

    def _survivors(self, length: int, old: int) -> int:
        """Tokens left between sinks and window by one eviction."""
        middle = length - self.num_sinks - self.recent
        interval = (self.stride + 1) // 2
        return -(-old // interval) + -(-(middle - old) // self.stride)

    def insertions(self) -> StepTables:
        return _walk(self)[0]

    def plan_insertions(self, t: int, num_tokens: int) -> list["Comb"]:
        """The evictions of a stride, each as cells of the line as it then is."""
        length, old = self.base_count(t), self._old(t)
        combs = []
        appended = 0
        for _ in range(num_tokens):
            length, appended = length + 1, appended + 1
            while self._evicts(length, old):
                combs.append(self._comb(length, old, appended))
                old = self._survivors(length, old)
                length, appended = self.num_sinks + self.recent + old, 0
        return [*combs, Comb(appended, None)]

    def _old(self, t: int) -> int:
        """Survivors of earlier evictions in the middle after ``t`` tokens."""
        table, old = _walk(self)
        return int(old[table.rows(np.asarray(t - 1))]) if t else 0

    def batch_rules(self, t: int) -> list[Rule]:
        length, old = self.base_count(t) + 1, self._old(t)
        interval, rules = (self.stride + 1) // 2, []
        while self._evicts(length, old):
            first, end = self.num_sinks + old, length - self.recent
            survivors = self._survivors(length, old)
            old_left = -(-old // interval)
            # The newer ones first: what they leave does not move the older ones.
            thinned = [
                (first, end, end - first - (survivors - old_left), self.stride),
                (self.num_sinks, first, old - old_left, -interval),
            ]
            rules += [Rule(*rule) for rule in thinned if rule[2]]
            old, length = survivors, self.num_sinks + self.recent + survivors
        return rules

    def _comb(self, length: int, old: int, appended: int) -> "Comb":
        """Which cells keep one token: int64 ``[cells, stride]`` into the line, padded with -1."""
        sinks, end = self.num_sinks, length - self.recent
        interval = (self.stride + 1) // 2
        single = [*range(sinks), *range(sinks, sinks + old, interval)]
        cells = [[i] for i in single]
        cells += [
            list(range(begin, min(begin + self.stride, end)))
            for begin in range(sinks + old, end, self.stride)
        ]
        cells += [[i] for i in range(end, length)]
        groups = torch.full((len(cells), self.stride), -1, dtype=torch.int64)
        for row, cell in enumerate(cells):
            groups[row, : len(cell)] = torch.tensor(cell)
        return Comb(appended, groups)

    def base_regions(self, t: int) -> list[str]:
        sinks, old = min(t, self.num_sinks), self._old(t)
        stored = self.base_count(t) - sinks
        recent = min(stored, self.recent)
        new = stored - recent - old
        return ["sink"] * sinks + ["old"] * old + ["new"] * new + ["window"] * recent

    def choose(self, scores: torch.Tensor, plan: list["Comb"]) -> torch.Tensor:
        num_sets, total = scores.shape
        first = total - sum(comb.appended for comb in plan)
        line = torch.arange(first, device=scores.device).expand(num_sets, -1)
        for comb in plan:
            new = torch.arange(first, first + comb.appended, device=scores.device)
            line = torch.cat([line, new.expand(num_sets, -1)], dim=1)
            first += comb.appended
            if comb.groups is not None:
                line = contest(scores, line, comb.groups, newest_wins=self.tie == "incoming")
        mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        return mask.scatter_(1, line, True)


@dataclass(frozen=True)
class Comb:
    """Tokens appended, then an eviction (None: no eviction, the stride is over)."""

    appended: int
    groups: torch.Tensor | None


@lru_cache(maxsize=MAX_POLICIES)
def _walk(policy: Beehive) -> tuple[StepTables, np.ndarray]:
    """Counts until an eviction leaves as many survivors as an earlier one did: one period.

    Returns:
        The schedule, and the survivors in the middle after each of its rows.
    """
    length = old = 0
    count, batch, olds, seen = [], [], [], dict[int, int]()
    while True:
        length += 1
        evicts = False
        while policy._evicts(length, old):
            evicts = True
            old = policy._survivors(length, old)
            length = policy.num_sinks + policy.recent + old
        count.append(length)
        batch.append(evicts)
        olds.append(old)
        if evicts:
            if old in seen:
                break
            seen[old] = len(count)
    none = np.zeros(len(count), dtype=np.int32)
    counts, batches = np.asarray(count, np.int32), np.asarray(batch)
    return StepTables(none, none, counts, seen[old], batches), np.asarray(olds)
