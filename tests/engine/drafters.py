# SPDX-License-Identifier: Apache-2.0
"""Drafters that are right as often as a test wants (vLLM's method ``custom_class``).

They know the answers, which a run without speculation gave in the same process.
"""

import random
from typing import Any, ClassVar

import numpy as np
from vllm.config import VllmConfig


def scripted(drafts: int) -> dict[str, Any]:
    """vLLM's ``speculative_config`` of up to so many scripted drafts."""
    return {
        "method": "custom_class",
        "model": "tests.engine.drafters.Scripted",
        "num_speculative_tokens": drafts,
    }


class Scripted:
    """Proposes the tokens that will follow, each replaced by a wrong one with some probability.

    Attributes:
        answers: prompts with their answers.
        right: probability of a right token.
        proposed: drafts proposed since the engine started.
    """

    answers: ClassVar[list[list[int]]] = []
    right: ClassVar[float] = 1.0
    proposed: ClassVar[int] = 0

    def __init__(self, config: VllmConfig) -> None:
        self._most = config.num_speculative_tokens
        self._random = random.Random(0)

    def load_model(self, model: Any) -> None:
        """vLLM's runner on CPUs calls it for every drafter."""

    def propose(
        self,
        sampled: list[list[int]],
        num_tokens: np.ndarray,
        token_ids: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        drafts = []
        for row, new in enumerate(sampled):
            known = token_ids[row, : num_tokens[row]].tolist()
            drafts.append(self._drafts(known) if new else [])
        Scripted.proposed += sum(map(len, drafts))
        return drafts

    def _drafts(self, known: list[int]) -> list[int]:
        for answer in self.answers:
            if answer[: len(known)] == known:
                following = answer[len(known) : len(known) + self._most]
                return [t if self._random.random() < self.right else t ^ 1 for t in following]
        return []
