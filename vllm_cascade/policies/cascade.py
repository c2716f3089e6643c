# SPDX-License-Identifier: Apache-2.0
"""Cascading sub-caches: each keeps a thinner, older part of the stream than the one before.

Sub-cache ``i`` holds ``window`` tokens and accepts a token at every ``base**i``-th step of the
stream. A token that its sub-cache pushes out is offered to the next one; where that one does not
accept at this step, the offered token and the newest resident are compared by score and one of
them is dropped. The sub-caches are only boundaries in one chronological list: deepest first.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_cascade.policies.base import Policy, StepTables
from vllm_cascade.policies.contest import contest


class Cascade(Policy):
    """Training-free cascading KV cache with token selection (Algorithm 1 of the paper)."""

    name: ClassVar[str] = "cascade"
    paper: ClassVar[str] = (
        "Training-Free Exponential Context Extension via Cascading KV Cache, "
        "https://arxiv.org/abs/2406.17808"
    )
    uses_scores: ClassVar[bool] = True
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
        }
    }

    preset: Literal["paper"] | None = Field(
        None, description="`paper`: the paper's own setting, for keys that are not given"
    )
    num_subcaches: int = Field(4, ge=1, le=16, description="sub-caches that share the budget")
    cascade_base: int = Field(
        2, ge=2, description="each sub-cache accepts this many times less often than the one before"
    )
    eager_fill: bool = Field(
        True, description="fill the whole budget before thinning; false is the paper's"
    )

    @classmethod
    def budget_step(cls, raw: dict[str, Any]) -> int:
        fields = cls.model_fields
        num = raw.get("num_subcaches", fields["num_subcaches"].default)
        base = raw.get("cascade_base", fields["cascade_base"].default)
        if not (isinstance(num, int) and isinstance(base, int) and 1 <= num <= 16 and base >= 2):
            return 1  # the field checks will name what is wrong
        return num * base ** (num - 1)

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        step = self.budget_step(self.model_dump())
        if self.budget % step:
            below, above = self.budget // step * step, -(-self.budget // step) * step
            good = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"budget {self.budget} does not fit {self.num_subcaches} sub-caches of base "
                f"{self.cascade_base}: it must be a multiple of num_subcaches * "
                f"cascade_base**(num_subcaches - 1) = {step}; nearest good values: {good}"
            )
        return self

    @property
    def window(self) -> int:
        """Tokens in one sub-cache."""
        return self.budget // self.num_subcaches

    @property
    def gamma(self) -> float:
        """The paper's ``exp(-ln(100) / window)`` unless ``ema_gamma`` is given."""
        return math.exp(-math.log(100) / self.window) if self.ema_gamma is None else self.ema_gamma

    def accepts(self, level: int, t: np.ndarray) -> np.ndarray:
        """Whether sub-cache ``level`` accepts while token ``t`` (sinks counted) is inserted."""
        on_step = (t - self.num_sinks) % self.cascade_base**level == 0
        return on_step | (t <= self.base_capacity) if self.eager_fill else on_step

    def derived(self) -> dict[str, Any]:
        return {"window": self.window, "gamma": round(self.gamma, 6)}

    @property
    def decay(self) -> float:
        return self.gamma

    @property
    def weight(self) -> float:
        return 1.0 - self.gamma

    def insertions(self) -> StepTables:
        sizes = [0] * self.num_subcaches
        lo, hi, count = [], [], []
        period = self.cascade_base ** (self.num_subcaches - 1)
        t, full_at = 0, None
        while full_at is None or t < full_at + period:
            victim = self._insert(sizes, t)
            lo.append(victim[0])
            hi.append(victim[1])
            count.append(min(t + 1, self.num_sinks) + sum(sizes))
            t += 1
            # `t <= base_capacity` accepts everywhere under eager_fill: no part of the period yet.
            if full_at is None and sum(sizes) == self.budget and t > self.base_capacity:
                full_at = t
        as_array = [np.asarray(column, dtype=np.int32) for column in (lo, hi, count)]
        return StepTables(*as_array, transient=t - period)

    def _insert(self, sizes: list[int], t: int) -> tuple[int, int]:
        """Walk one token through sub-caches of these ``sizes`` (updated): its victim range."""
        if t < self.num_sinks:
            return 0, 0
        step = np.asarray(t)
        for level, size in enumerate(sizes):
            if self.accepts(level, step):
                if size < self.window:
                    sizes[level] += 1
                    return 0, 0
                continue  # full: its oldest moves on to the next sub-cache
            if size == 0:
                sizes[level] = 1
                return 0, 0
            newest = self.num_sinks + sum(sizes[level:]) - 1
            return newest, newest + 2  # the resident and, right after it, the incoming token
        return self.num_sinks, self.num_sinks + 1

    def plan_insertions(self, t: int, num_tokens: int) -> "CascadePlan":
        cached = self.base_count(t)
        sinks_now = min(t, self.num_sinks)
        sizes = self._sizes(t)
        first = cached + max(self.num_sinks - t, 0)  # first new token that is not a sink
        steps = np.arange(max(t, self.num_sinks), t + num_tokens)
        levels, end = [], cached
        for level, size in enumerate(sizes):
            resident = np.arange(end - size, end)
            end -= size
            plan, steps = self._plan_level(level, size, steps)
            levels.append(Level(torch.from_numpy(resident), *plan))
        assert end == sinks_now
        new = torch.arange(min(first, cached + num_tokens), cached + num_tokens)
        sinks = torch.cat(
            [torch.arange(sinks_now), torch.arange(cached, min(first, cached + num_tokens))]
        )
        return CascadePlan(tuple(levels), new, sinks, self.tie == "incoming")

    def _sizes(self, t: int) -> list[int]:
        """Sub-cache sizes after ``t`` tokens; ``count`` and acceptance alone decide them."""
        stored = self.base_count(t) - min(t, self.num_sinks)
        # Sub-caches fill front to back, and a full one never shrinks.
        sizes = []
        for _ in range(self.num_subcaches):
            sizes.append(min(stored, self.window))
            stored -= sizes[-1]
        return sizes

    def _plan_level(
        self, level: int, size: int, steps: np.ndarray
    ) -> tuple[tuple[torch.Tensor, int], np.ndarray]:
        """Group one sub-cache's residents and offers into slots.

        A slot opens with every resident, and with an offer that is accepted (or that finds the
        sub-cache empty); every other offer contests the slot before it. The oldest slots that
        no longer fit leave at the step that opened the slot pushing them out.

        Returns:
            ``(groups, leaving)``: int64 ``[slots, most contenders]`` into residents + offers,
            padded with -1, and how many slots leave; then the steps at which they leave.
        """
        opens = np.concatenate([np.ones(size, bool), self.accepts(level, steps)])
        if size == 0 and len(opens):
            opens[0] = True
        slot = np.cumsum(opens) - 1
        starts = np.flatnonzero(opens)
        widest = int(np.bincount(slot).max()) if len(slot) else 1
        groups = np.full((len(starts), widest), -1, dtype=np.int64)
        members = np.arange(len(slot))
        groups[slot, members - starts[slot] if len(slot) else members] = members
        leaving = max(len(starts) - self.window, 0)
        pushers = starts[self.window : self.window + leaving] - size
        return (torch.from_numpy(groups), leaving), steps[pushers]

    def base_regions(self, t: int) -> list[str]:
        names = ["sink"] * min(t, self.num_sinks)
        for level, size in reversed(list(enumerate(self._sizes(t)))):
            names += [f"sub{level}"] * size
        return names

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        mask[:, plan.sinks] = True
        offers = plan.new.expand(scores.shape[0], -1)
        for level in plan.levels:
            line = torch.cat([level.resident.expand(scores.shape[0], -1), offers], dim=1)
            winners = contest(scores, line, level.groups, plan.newest_wins)
            offers = winners[:, : level.leaving]
            mask.scatter_(1, winners[:, level.leaving :], True)
        return mask


@dataclass(frozen=True)
class Level:
    """One sub-cache in a stride: its residents' ranks, slots of contenders, slots that leave."""

    resident: torch.Tensor
    groups: torch.Tensor
    leaving: int


@dataclass(frozen=True)
class CascadePlan:
    """Everything about a stride that scores do not decide."""

    levels: tuple[Level, ...]
    new: torch.Tensor
    sinks: torch.Tensor
    newest_wins: bool
