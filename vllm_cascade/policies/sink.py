# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: the first tokens of the stream and the most recent ones."""

from typing import ClassVar

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.rules import Insertions, Rule


class Sink(Policy):
    """Attention sinks plus a recency window of ``budget`` tokens."""

    name: ClassVar[str] = "sink"
    paper: ClassVar[str] = (
        "Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"head_reduction", "ema_gamma", "tie"})

    def insertions(self) -> Insertions:
        oldest = Rule(self.num_sinks, self.num_sinks + 1, 1)
        return Insertions([()] * self.base_capacity + [(oldest,)])

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        return ["sink"] * sinks + ["window"] * (count - sinks)
