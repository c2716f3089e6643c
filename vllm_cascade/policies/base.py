# SPDX-License-Identifier: Apache-2.0
"""What a KV policy is: a schedule known ahead of time, and a choice that scores make.

A cache is a list of tokens, oldest to newest; inserting a token appends it and deletes some.
How many tokens are cached after ``t`` is a function of ``t`` alone, so pages, positions and
block-table widths never wait for the device. Which tokens survive may depend on their scores.

Vocabulary: ``t`` counts the tokens of a stream that came before (sinks included); a token's
``rank`` is its index in the cache, oldest first; a stride of ``T`` tokens is inserted at once
with frozen scores, exactly as if one by one.

A subclass says what inserting tokens does (``insertions``, ``plan_insertions``, ``choose``). The
engine asks ``count``, ``victims``, ``plan`` and ``keep``, which add ``overflow`` to any of them:
tokens wait in the cache, visible and scored, until ``overflow`` of them are inserted in one batch.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_cascade.policies.settings import KVPolicyConfig

MAX_POLICIES = 512
"""Policies whose tables a process remembers: requests may bring their own."""


@dataclass(frozen=True)
class StepTables:
    """A policy's schedule for single insertions: a transient, then a period.

    Row ``i`` describes the insertion of token ``t = i`` (rows past the transient repeat). Where
    ``batch[i]`` is False, the token with the lowest score among ranks ``[lo[i], hi[i])`` of the
    ``count(t) + 1`` tokens (the new one has the highest rank) is deleted; none where
    ``lo[i] == hi[i]``. Where it is True, ``plan`` and ``keep`` say what is deleted.

    Attributes:
        lo, hi: int32 ``[transient + period]``.
        count: int32 ``[transient + period]``, tokens cached after the insertion.
        transient: rows that occur once.
        batch: bool ``[transient + period]``; None: all False.
    """

    lo: np.ndarray
    hi: np.ndarray
    count: np.ndarray
    transient: int
    batch: np.ndarray | None = None

    @property
    def period(self) -> int:
        return len(self.lo) - self.transient

    def rows(self, t: np.ndarray) -> np.ndarray:
        """Table rows of the insertions of tokens ``t``."""
        return np.where(t < self.transient, t, self.transient + (t - self.transient) % self.period)

    def counts(self, t: np.ndarray) -> np.ndarray:
        """Tokens cached after the first ``t`` tokens of a stream."""
        return np.where(t > 0, self.count[self.rows(np.maximum(t - 1, 0))], 0)


@dataclass(frozen=True)
class Rule:
    """What one eviction deletes among the ranks ``[lo, hi)`` of the line as it then is.

    Attributes:
        lo, hi: the range; the newest token has the highest rank.
        evicts: how many are deleted.
        cell: 0: the lowest score (``evicts`` is 1) or the whole range (``hi - lo``). Else the range
            is cut from ``lo`` into cells of ``abs(cell)`` ranks, the last one possibly shorter, and
            of every cell one token stays: positive: the one with the highest score; negative: the
            oldest.
    """

    lo: int
    hi: int
    evicts: int
    cell: int = 0

    def __post_init__(self) -> None:
        stay = -(-(self.hi - self.lo) // abs(self.cell)) if self.cell else None
        allowed = (1, self.hi - self.lo) if stay is None else (self.hi - self.lo - stay,)
        assert 0 <= self.lo < self.hi and self.evicts in allowed, self


@dataclass(frozen=True)
class TokenScores:
    """Scores that follow from the text alone, which the host works out from token ids.

    Attributes:
        rule: how (``vllm_cascade/importance.py``).
        idf: path of a table of document frequencies; None: from the request's own past.
        lag: a token's score is set when this many more tokens are known, its own sentence's among
            them: when it first may be deleted.
    """

    rule: str
    idf: str | None
    lag: int


class Policy(KVPolicyConfig):
    """Base of every policy. A subclass is one file: settings, schedule, choice.

    It knows nothing of pages, slots, devices or vLLM.
    """

    paper: ClassVar[str]
    """Title and address of the source, shown in ``vllm-cascade policies`` and the README."""
    uses_scores: ClassVar[bool]
    """Whether attention probabilities decide anything; without, no score is summed up. A policy
    where that depends on a setting overrides it with a property."""
    batches_itself: ClassVar[bool] = False
    """Whether ``overflow`` is part of the policy's own schedule instead of added here."""

    # --- what a subclass defines ---------------------------------------------------------------

    @abstractmethod
    def insertions(self) -> StepTables:
        """The schedule of single insertions, without ``overflow``."""

    @abstractmethod
    def plan_insertions(self, t: int, num_tokens: int) -> Any:
        """Index tables for inserting tokens ``t .. t + num_tokens - 1``; shared by all layers."""

    @abstractmethod
    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        """Which tokens survive the insertions of a plan; see ``keep``."""

    def batch_rules(self, t: int) -> list[Rule]:
        """An insertion that ``StepTables.batch`` marks, as rules to be applied one by one."""
        raise NotImplementedError(f"{self.name} marks no batches")

    @abstractmethod
    def base_regions(self, t: int) -> list[str]:
        """What part of the cache each of ``base_count(t)`` tokens is in, oldest first."""

    @classmethod
    def budget_step(cls, raw: dict[str, Any]) -> int:
        """Budgets must be multiples of this, given the other raw settings."""
        return 1

    @property
    def decay(self) -> float:
        """A token's score is multiplied by this at every query. Default: a plain sum."""
        return 1.0

    @property
    def weight(self) -> float:
        """The query's attention probability is added times this."""
        return 1.0

    @property
    def needs_age(self) -> bool:
        """Whether scores are compared per query that saw a token: raw sums favour old tokens."""
        return False

    def comparable(self, scores: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        """The values that are compared, from scores and ages (queries seen, own included)."""
        return scores / age.clamp_min(1) if self.needs_age else scores

    @property
    def token_scores(self) -> TokenScores | None:
        """Where scores come from the token ids instead of from attention; None: nowhere."""
        return None

    @property
    def arranges(self) -> bool:
        """Whether positions are another order than time: that of ``arrange``."""
        return False

    def arrange(self, values: torch.Tensor, t: int) -> torch.Tensor:
        """The cached tokens' chronological ranks in the order of their positions.

        Args:
            values: fp32 ``[num_sets, count(t)]``, comparable, chronological.

        Returns:
            int64 of the same shape, a permutation in every row.
        """
        raise NotImplementedError

    @property
    def merge_into(self) -> tuple[int, int] | None:
        """Ranks ``[lo, hi)`` of the tokens that deleted ones are averaged into; None: dropped."""
        return None

    def logit_scale(self, t: np.ndarray, cached: np.ndarray) -> np.ndarray | None:
        """Factors on the logits of queries at stream indices ``t``; None: all 1.

        Args:
            t: int ``[n]``.
            cached: int ``[n]``, keys that each query sees, its own included.
        """
        return None

    def derived(self) -> dict[str, Any]:
        """What follows from the settings, for the log line at start."""
        return {}

    def remarks(self) -> list[str]:
        """Things worth a warning about these settings."""
        return []

    # --- what the engine asks ------------------------------------------------------------------

    @property
    def base_capacity(self) -> int:
        """Most tokens cached, without those that wait for a batch."""
        return self.num_sinks + self.budget

    @property
    def capacity(self) -> int:
        """Most tokens ever cached, between strides."""
        return self.base_capacity + self.overflow - 1

    def base_count(self, t: int) -> int:
        """``count`` without ``overflow``."""
        return int(insertion_tables(self).counts(np.asarray(t)))

    def inserted(self, t: np.ndarray) -> np.ndarray:
        """How many of the first ``t`` tokens are inserted; the others wait.

        Batches end where a cache that only grew would be ``overflow`` tokens over its capacity.
        """
        if self.overflow == 1 or self.batches_itself:
            return t
        return np.maximum(t - (t - self.base_capacity) % self.overflow, 0)

    def tables(self) -> StepTables:
        """The schedule of single insertions, ``overflow`` included."""
        base = insertion_tables(self)
        if self.overflow == 1 or self.batches_itself:
            return base
        period = math.lcm(base.period, self.overflow)
        transient = base.transient + self.overflow
        t = np.arange(transient + period + 1)
        done = self.inserted(t)
        count = base.counts(done) + t - done
        none = np.zeros(len(t) - 1, dtype=np.int32)
        return StepTables(
            lo=none,
            hi=none,
            count=count[1:].astype(np.int32),
            transient=transient,
            batch=count[1:] <= count[:-1],
        )

    def plan(self, t: int, num_tokens: int) -> Any:
        """Index tables for a stride of tokens ``t .. t + num_tokens - 1``."""
        begin, end = self.inserted(np.asarray([t, t + num_tokens])).tolist()
        inner = self.plan_insertions(begin, end - begin) if end > begin else None
        return BatchPlan(inner, self.base_count(begin) + end - begin)

    def keep(self, scores: torch.Tensor, plan: "BatchPlan") -> torch.Tensor:
        """Which tokens survive a stride.

        Args:
            scores: fp32 ``[num_sets, count(t) + T]``, chronological, the new tokens last.
            plan: what ``plan(t, T)`` returned.

        Returns:
            bool of the same shape, with ``count(t + T)`` True values in every row.
        """
        mask = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        if plan.inner is not None:
            head = scores[:, : plan.num_inserted]
            mask[:, : plan.num_inserted] = self.choose(head, plan.inner)
        return mask

    def count(self, t: int) -> int:
        """Tokens cached after the first ``t`` tokens of a stream."""
        return int(self.counts(np.asarray(t)))

    def regions(self, t: int) -> list[str]:
        """What part of the cache each of ``count(t)`` tokens is in; ``waiting``: for a batch."""
        inserted = int(self.inserted(np.asarray(t)))
        return self.base_regions(inserted) + ["waiting"] * (t - inserted)

    def counts(self, t: np.ndarray) -> np.ndarray:
        """``count`` for an int array of any shape."""
        return step_tables(self).counts(t)

    def peaks(self, t: np.ndarray) -> np.ndarray:
        """``max(count(u) for u <= t)``: the slots a stream of ``t`` tokens has ever needed."""
        table = _peak_table(self)
        return np.where(t > 0, table[np.clip(t - 1, 0, len(table) - 1)], 0)

    def peak(self, t: int) -> int:
        """``peaks`` of one number, which the scheduler asks for every request in every step."""
        table = _peak_table(self)
        return int(table[min(t, len(table)) - 1]) if t > 0 else 0

    def victims(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rank ranges ``[lo, hi)`` from which inserting tokens ``t`` deletes one."""
        table = step_tables(self)
        rows = table.rows(t)
        return table.lo[rows], table.hi[rows]

    def batches(self, t: np.ndarray) -> np.ndarray:
        """Whether inserting token ``t`` needs ``plan`` and ``keep`` also on its own."""
        if self.arranges or self.merge_into is not None:
            return np.ones(t.shape, dtype=bool)
        table = step_tables(self)
        if table.batch is None:
            return np.zeros(t.shape, dtype=bool)
        return table.batch[table.rows(t)]


@dataclass(frozen=True)
class BatchPlan:
    """A stride: the policy's own plan for the first ``num_inserted`` tokens; the others wait."""

    inner: Any
    num_inserted: int


@lru_cache(maxsize=MAX_POLICIES)
def step_tables(policy: Policy) -> StepTables:
    """``policy.tables()``, built once in a process."""
    return policy.tables()


@lru_cache(maxsize=MAX_POLICIES)
def insertion_tables(policy: Policy) -> StepTables:
    return policy.insertions()


@lru_cache(maxsize=MAX_POLICIES)
def _peak_table(policy: Policy) -> np.ndarray:
    return np.maximum.accumulate(step_tables(policy).count)


@lru_cache(maxsize=512)  # a plan of the default cascade takes 53 KB
def stride_plan(policy: Policy, t: int, num_tokens: int) -> Any:
    """``policy.plan``, cached: batches of equal strides and all layers share it."""
    return policy.plan(t, num_tokens)
