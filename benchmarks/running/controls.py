# SPDX-License-Identifier: Apache-2.0
"""Policies that only a benchmark needs: a random control, and the papers' ablated variants.

They go into the registry of the process that asks for them (``register``) and are not part of the
product: none of them is a good idea, which is what they are there to show.
"""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from vllm_cascade.policies import POLICIES, Policy, StepTables
from vllm_cascade.policies.beehive import Beehive, Comb
from vllm_cascade.policies.cascade import Cascade


class Random(Policy):
    """Every insertion into a full cache drops one token that is not a sink, at random.

    Each layer and head set draws for itself, from PyTorch's generator (the engine's ``seed``).
    A token's age when it leaves is geometric: the cache reaches far back, without any reason to
    keep what it keeps.
    """

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "control"
    uses_scores: ClassVar[bool] = False

    def insertions(self) -> StepTables:
        fill = self.base_capacity
        t = np.arange(fill + 1, dtype=np.int32)
        return StepTables(
            lo=np.zeros_like(t),
            hi=np.zeros_like(t),
            count=np.minimum(t + 1, fill),
            transient=fill,
            batch=t >= fill,  # `choose` decides, also about a single token
        )

    def plan_insertions(self, t: int, num_tokens: int) -> tuple[int, int]:
        return self.base_count(t), num_tokens

    def base_regions(self, t: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        return ["sink"] * sinks + ["random"] * (self.base_count(t) - sinks)

    def choose(self, scores: torch.Tensor, plan: tuple[int, int]) -> torch.Tensor:
        cached, num_tokens = plan
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        draws = torch.rand(len(scores), num_tokens, dtype=torch.float64).tolist()
        for row, draw in zip(mask, draws, strict=True):
            kept = list(range(cached))
            for token, chance in enumerate(draw, start=cached):
                kept.append(token)
                if len(kept) > self.base_capacity:
                    del kept[self.num_sinks + int(chance * (len(kept) - self.num_sinks))]
            row[kept] = True
        return mask.to(scores.device)


class CascadeWithoutSelection(Cascade):
    """The cascade without token selection (the paper's Table 3): a contest's resident stays."""

    name: ClassVar[str] = "cascade_unselected"
    uses_scores: ClassVar[bool] = False

    tie: Literal["resident"] = Field("resident", description="every contest is a tie")

    def insertions(self) -> StepTables:
        tables = super().insertions()
        contests = tables.hi - tables.lo == 2
        return StepTables(tables.lo + contests, tables.hi, tables.count, tables.transient)

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        return super().choose(torch.zeros_like(scores), plan)


class BeehiveIntervals(Beehive):
    """BUZZ without its segment maxima: of new tokens, too, every ``stride``-th stays (Figure 8)."""

    name: ClassVar[str] = "beehive_intervals"
    uses_scores: ClassVar[bool] = False

    tie: Literal["resident"] = Field("resident", description="the first of a segment stays")

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        return super().choose(torch.zeros_like(scores), plan)


class BeehiveSwapped(Beehive):
    """BUZZ with its two strides exchanged: old tokens are thinned more than new ones (Figure 8)."""

    name: ClassVar[str] = "beehive_swapped"

    @property
    def segment(self) -> int:
        """New tokens of which one stays; of old ones, every ``stride``-th."""
        return (self.stride + 1) // 2

    def _survivors(self, length: int, old: int) -> int:
        middle = length - self.num_sinks - self.recent
        return -(-old // self.stride) + -(-(middle - old) // self.segment)

    def _comb(self, length: int, old: int, appended: int) -> Comb:
        sinks, end = self.num_sinks, length - self.recent
        cells = [[i] for i in (*range(sinks), *range(sinks, sinks + old, self.stride))]
        for begin in range(sinks + old, end, self.segment):
            cells.append(list(range(begin, min(begin + self.segment, end))))
        cells += [[i] for i in range(end, length)]
        groups = torch.full((len(cells), self.segment), -1, dtype=torch.int64)
        for row, cell in enumerate(cells):
            groups[row, : len(cell)] = torch.tensor(cell)
        return Comb(appended, groups)


CONTROLS: dict[str, type[Policy]] = {
    cls.name: cls for cls in (Random, CascadeWithoutSelection, BeehiveIntervals, BeehiveSwapped)
}


def register() -> None:
    """Make these policies known in this process; any number of times.

    An engine with processes of its own does not see them, so it needs
    ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, which ``EngineSettings`` sets.
    """
    POLICIES.update(CONTROLS)
