# SPDX-License-Identifier: Apache-2.0
"""What a KV policy is: settings, and the victim rules of inserting one token.

A subclass is one file and knows nothing of pages, slots, devices or vLLM. It must say what
inserting a token deletes (``insertions``) and, for traces, what the parts of its cache are called
(``regions``). How scores are made and compared it says by naming one of a few ways (``scoring``).
Everything else follows: ``schedule.py`` compiles counts, positions and plans from these.

Vocabulary: ``t`` counts the tokens of a stream that came before (sinks included). With ``unit`` of
more than one token, the rules are those of the policy ``in_units``, where "token" means a unit.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_cascade.policies.rules import Insertions, Scoring
from vllm_cascade.policies.settings import KVPolicyConfig


@dataclass(frozen=True)
class TokenScores:
    """Scores that follow from the text alone, which the host works out from token ids.

    Attributes:
        rule: how (``text_importance.py``).
        idf: path of a table of document frequencies; None: from the request's own past.
        lag: a token's score is set when this many more tokens are known, its own sentence's among
            them: when it first may be deleted.
    """

    rule: str
    idf: str | None
    lag: int


class Policy(KVPolicyConfig):
    """Base of every policy."""

    paper: ClassVar[str]
    """Title and address of the source, shown in ``vllm-cascade policies`` and the documents."""
    batches_itself: ClassVar[bool] = False
    """Whether ``overflow`` is part of the policy's own rules instead of added by the schedule."""

    # --- what a subclass must say ----------------------------------------------------------------

    @abstractmethod
    def insertions(self) -> Insertions:
        """The rules of inserting each token, without ``overflow``."""

    @abstractmethod
    def regions(self, t: int, count: int) -> list[str]:
        """What part of the cache each of its tokens is in, oldest first, after ``t`` insertions.

        Args:
            t: at most the length of ``insertions().rules``.
            count: tokens cached then.
        """

    # --- what it may say -------------------------------------------------------------------------

    @property
    def scoring(self) -> Scoring:
        """How scores are made and compared."""
        return Scoring("none")

    @classmethod
    def budget_step(cls, raw: dict[str, Any]) -> int:
        """Budgets must be multiples of this many tokens, given the other raw settings."""
        return cls.unit_of(raw)

    @property
    def token_scores(self) -> TokenScores | None:
        """Which scores the host works out; None unless the source is ``text``."""
        return None

    @property
    def arranges(self) -> bool:
        """Whether positions are another order than time: that of ``arrange``."""
        return False

    def arrange(self, values: torch.Tensor, t: int) -> torch.Tensor:
        """The cached tokens' chronological ranks in the order of their positions.

        Args:
            values: fp32 ``[num_sets, count]``, as compared, chronological.
            t: tokens inserted.

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

    # --- what follows ----------------------------------------------------------------------------

    @property
    def base_capacity(self) -> int:
        """Most tokens cached, without those that wait for a batch or are recalled."""
        return self.num_sinks + self.budget

    @property
    def capacity(self) -> int:
        """Most slots ever needed, between strides: also of the unit that is being filled."""
        filling = self.unit if self.unit > 1 else 0
        return self.base_capacity + self.recalled + self.waiting + filling

    @property
    def uses_attention(self) -> bool:
        """Whether attention probabilities decide anything."""
        return self.scoring.source == "attention"

    @property
    def keeps_ages(self) -> bool:
        """Whether pages hold the tokens' indices in the stream: for ages, traces or recall."""
        return self.trace or self.scoring.per_age or self.recall > 0
