# SPDX-License-Identifier: Apache-2.0
"""TOVA: evict the token that the newest query attended to least."""

from typing import ClassVar

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.rules import Insertions, Rule, Scoring


class Tova(Policy):
    """The newest query's attention decides among all tokens but the sinks."""

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "Transformers are Multi-State RNNs, https://arxiv.org/abs/2401.06104"
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})

    @property
    def scoring(self) -> Scoring:
        # A decay of 0 forgets earlier queries.
        return Scoring("attention", decay=0.0, newest_stays=self.tie == "incoming")

    def insertions(self) -> Insertions:
        lowest = Rule(self.num_sinks, self.num_sinks + self.budget + 1, 1)
        return Insertions([()] * self.base_capacity + [(lowest,)])

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        return ["sink"] * sinks + ["attended"] * (count - sinks)
