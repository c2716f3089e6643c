# SPDX-License-Identifier: Apache-2.0
"""Policies that only a benchmark needs: the papers' ablated variants.

They go into the registry of the process that asks for them (``register``) and are not part of the
product: none of them is a good idea, which is what they are there to show.
"""

from typing import ClassVar, Literal

from pydantic import Field

from vllm_cascade.policies.beehive import Beehive
from vllm_cascade.policies.cascade import Cascade
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES
from vllm_cascade.policies.rules import Insertions, Rule, Rules, Scoring


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
    cls.name: cls for cls in (CascadeWithoutSelection, BeehiveIntervals, BeehiveSwapped)
}


def register() -> None:
    """Make these policies known in this process; any number of times.

    An engine with processes of its own does not see them, so it needs
    ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, which ``EngineSettings`` sets.
    """
    POLICIES.update(CONTROLS)
