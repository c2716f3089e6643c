# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: the first tokens of the stream and the most recent ones."""

from typing import Any, ClassVar

import numpy as np
import torch

from vllm_cascade.policies.base import Policy, StepTables


class Sink(Policy):
    """Attention sinks plus a recency window of ``budget`` tokens."""

    name: ClassVar[str] = "sink"
    paper: ClassVar[str] = (
        "Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453"
    )
    uses_scores: ClassVar[bool] = False
    inert_keys: ClassVar[frozenset[str]] = frozenset({"head_reduction", "ema_gamma", "tie"})

    def insertions(self) -> StepTables:
        fill, sinks = self.base_capacity, self.num_sinks
        t = np.arange(fill + 1, dtype=np.int32)
        full = t >= fill
        return StepTables(
            lo=np.full_like(t, sinks),
            hi=np.where(full, sinks + 1, sinks).astype(np.int32),
            count=np.minimum(t + 1, fill),
            transient=fill,
        )

    def plan_insertions(self, t: int, num_tokens: int) -> torch.Tensor:
        """bool ``[count(t) + T]``: the same for every layer and head."""
        total = self.base_count(t) + num_tokens
        rank = torch.arange(total)
        return (rank < self.num_sinks) | (rank >= total - self.budget)

    def base_regions(self, t: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        return ["sink"] * sinks + ["window"] * (self.base_count(t) - sinks)

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        return plan.to(scores.device).expand(scores.shape)
