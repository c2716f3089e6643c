# SPDX-License-Identifier: Apache-2.0
"""Policies that only a benchmark needs: a random control, and the papers' ablated variants.

They go into the registry of the process that asks for them (``register``) and are not part of the
product: none of them is a good idea, which is what they are there to show.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from vllm_cascade.policies.beehive import Beehive
from vllm_cascade.policies.cascade import Cascade
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES
from vllm_cascade.policies.rules import Insertions, Rule, Rules, Scoring

DRAWS = 1 << 16
"""Random victims before they repeat: more than a cache's tokens can remember."""


class Random(Policy):
    """Every insertion into a full cache drops one token that is not a sink, at random.

    Which one is drawn by its rank, the same for all layers and heads, as rules know no chance. A
    token's age when it leaves is geometric: the cache reaches far back, without any reason to keep
    what it keeps.
    """

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "control"

    draw: int = Field(7, description="seed of the victims")

    def insertions(self) -> Insertions:
        rng = np.random.default_rng(self.draw)
        victims = rng.integers(self.num_sinks, self.base_capacity + 1, DRAWS).tolist()
        rules = [(Rule(rank, rank + 1, 1),) for rank in victims]
        return Insertions([()] * self.base_capacity + rules, period=DRAWS)

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        return ["sink"] * sinks + ["random"] * (count - sinks)


class CascadeWithoutSelection(Cascade):
    """The cascade without token selection (the paper's Table 3): a contest's resident stays."""

    name: ClassVar[str] = "cascade_unselected"

    tie: Literal["resident"] = Field("resident", description="every contest is a tie")

    @property
    def scoring(self) -> Scoring:
        return Scoring("none", newest_stays=False)

    def insertions(self) -> Insertions:
        made = super().insertions()
        return Insertions([self._decided(todo) for todo in made.rules], made.period)

    @staticmethod
    def _decided(todo: Rules) -> Rules:
        return tuple(Rule(rule.hi - 1, rule.hi, 1) if rule.size == 2 else rule for rule in todo)


class BeehiveIntervals(Beehive):
    """BUZZ without its segment maxima: of new tokens, too, every ``stride``-th stays (Figure 8)."""

    name: ClassVar[str] = "beehive_intervals"

    tie: Literal["resident"] = Field("resident", description="the first of a segment stays")

    @property
    def scoring(self) -> Scoring:
        return Scoring("none", newest_stays=False)

    def insertions(self) -> Insertions:
        made = super().insertions()
        rules = [
            tuple(Rule(rule.lo, rule.hi, rule.evicts, -abs(rule.cell)) for rule in todo)
            for todo in made.rules
        ]
        return Insertions(rules, made.period)


class BeehiveSwapped(Beehive):
    """BUZZ with its two strides exchanged: old tokens are thinned more than new ones (Figure 8)."""

    name: ClassVar[str] = "beehive_swapped"

    def _thin(self, length: int, old: int) -> tuple[list[Rule], int]:
        first, end = self.num_sinks + old, length - self.recent
        new_left, old_left = -(-(end - first) // self.interval), -(-old // self.stride)
        thinned = [
            (first, end, end - first - new_left, self.interval),
            (self.num_sinks, first, old - old_left, -self.stride),
        ]
        return [Rule(*rule) for rule in thinned if rule[2]], new_left + old_left


CONTROLS: dict[str, type[Policy]] = {
    cls.name: cls for cls in (Random, CascadeWithoutSelection, BeehiveIntervals, BeehiveSwapped)
}


def register() -> None:
    """Make these policies known in this process; any number of times.

    An engine with processes of its own does not see them, so it needs
    ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, which ``EngineSettings`` sets.
    """
    POLICIES.update(CONTROLS)
