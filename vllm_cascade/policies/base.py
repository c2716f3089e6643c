# SPDX-License-Identifier: Apache-2.0
"""What a KV policy is: a schedule known ahead of time, and a choice that scores make.

A cache is a list of tokens, oldest to newest; inserting a token appends it and deletes some.
How many tokens are cached after ``t`` is a function of ``t`` alone, so pages, positions and
block-table widths never wait for the device. Which tokens survive may depend on their scores.

Vocabulary: ``t`` counts the tokens of a stream that came before (sinks included); a token's
``rank`` is its index in the cache, oldest first; a stride of ``T`` tokens is inserted at once
with frozen scores, exactly as if one by one.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_cascade.config import KVPolicyConfig


@dataclass(frozen=True)
class StepTables:
    """A policy's schedule for single insertions: a transient, then a period.

    Row ``i`` describes the insertion of token ``t = i`` (rows past the transient repeat):
    the token with the lowest score among ranks ``[lo[i], hi[i])`` of the ``count(t) + 1``
    tokens (the new one has the highest rank) is deleted; none where ``lo[i] == hi[i]``.

    Attributes:
        lo, hi: int32 ``[transient + period]``.
        count: int32 ``[transient + period]``, tokens cached after the insertion.
        transient: rows that occur once.
    """

    lo: np.ndarray
    hi: np.ndarray
    count: np.ndarray
    transient: int

    @property
    def period(self) -> int:
        return len(self.lo) - self.transient

    def rows(self, t: np.ndarray) -> np.ndarray:
        """Table rows of the insertions of tokens ``t``."""
        return np.where(t < self.transient, t, self.transient + (t - self.transient) % self.period)


class Policy(KVPolicyConfig):
    """Base of every policy. A subclass is one file: settings, schedule, choice.

    It defines ``name``, ``paper``, ``uses_scores``, its own settings as fields, ``tables()``,
    ``plan(t, T)`` and ``keep(scores, plan)``. It knows nothing of pages, slots or devices.
    """

    paper: ClassVar[str]
    """Title and address of the source, shown in ``vllm-cascade policies`` and the README."""
    uses_scores: ClassVar[bool]
    """Whether attention probabilities decide anything; without, no score is computed."""

    @classmethod
    def budget_step(cls, raw: dict[str, Any]) -> int:
        """Budgets must be multiples of this, given the other raw settings."""
        return 1

    @property
    def capacity(self) -> int:
        """Most tokens ever cached, between strides."""
        return self.num_sinks + self.budget

    @property
    def gamma(self) -> float:
        """Decay of the exponential moving average of attention, per query token."""
        raise NotImplementedError(f"{self.name} keeps no scores")

    @abstractmethod
    def tables(self) -> StepTables:
        """The schedule of single insertions."""

    @abstractmethod
    def plan(self, t: int, num_tokens: int) -> Any:
        """Index tables for inserting tokens ``t .. t + num_tokens - 1``; shared by all layers."""

    @abstractmethod
    def keep(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        """Which tokens survive a stride.

        Args:
            scores: fp32 ``[num_sets, count(t) + T]``, chronological, the new tokens last.
            plan: what ``plan(t, T)`` returned.

        Returns:
            bool of the same shape, with ``count(t + T)`` True values in every row.
        """

    def count(self, t: int) -> int:
        """Tokens cached after the first ``t`` tokens of a stream."""
        return int(self.counts(np.asarray([t]))[0])

    def counts(self, t: np.ndarray) -> np.ndarray:
        """``count`` for an int array of any shape."""
        table = step_tables(self)
        return np.where(t > 0, table.count[table.rows(np.maximum(t - 1, 0))], 0)

    def peaks(self, t: np.ndarray) -> np.ndarray:
        """``max(count(u) for u <= t)``: the slots a stream of ``t`` tokens has ever needed."""
        table = step_tables(self)
        return np.where(t > 0, _peak_table(self)[np.clip(t - 1, 0, len(table.count) - 1)], 0)

    def peak(self, t: int) -> int:
        return int(self.peaks(np.asarray([t]))[0])

    def victims(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rank ranges ``[lo, hi)`` from which inserting tokens ``t`` deletes one."""
        table = step_tables(self)
        rows = table.rows(t)
        return table.lo[rows], table.hi[rows]


@lru_cache(maxsize=64)
def step_tables(policy: Policy) -> StepTables:
    """``policy.tables()``, built once in a process."""
    return policy.tables()


@lru_cache(maxsize=64)
def _peak_table(policy: Policy) -> np.ndarray:
    return np.maximum.accumulate(step_tables(policy).count)


@lru_cache(maxsize=4096)
def stride_plan(policy: Policy, t: int, num_tokens: int) -> Any:
    """``policy.plan``, cached: batches of equal strides and all layers share it."""
    return policy.plan(t, num_tokens)
