# SPDX-License-Identifier: Apache-2.0
"""The base class of KV policies: settings plus the victim rules of inserting one token.

Each subclass is one file and independent of pages, slots, devices and vLLM. It implements:

- ``insertions``: the rules that each insertion applies.
- ``regions``: names for the parts of its cache, used by traces.
- ``scoring`` (optional): how scores are computed and compared.

``schedule.py`` compiles counts, positions and plans from these.

``t`` is the number of earlier tokens in the stream, sinks included. The policy ``in_units`` gives
the rules: if ``unit`` is larger than 1, "token" there means a unit, and with ``keep_prompt`` the
kept part of the prompt counts as sinks.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from vllm_cascade.policies.rules import Insertions, Scoring
from vllm_cascade.policies.settings import KVPolicyConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TokenScores:
    """Scores that the host computes from token ids alone.

    Attributes:
        rule: a key of ``text_importance.RULES``.
        idf: path of a table of document frequencies. None: use the request's own past.
    """

    rule: str
    idf: str | None


class Policy(KVPolicyConfig):
    """Base of every policy."""

    paper: ClassVar[str]
    """Title and URL of the source, shown in ``vllm-cascade policies`` and the documentation."""
    batches_itself: ClassVar[bool] = False
    """True if the policy's own rules implement ``overflow``; else the schedule adds it."""

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...  # frozen models have one

    # --- Required --------------------------------------------------------------------------------

    @abstractmethod
    def insertions(self) -> Insertions:
        """The rules of every insertion, without ``overflow`` unless ``batches_itself``."""

    @abstractmethod
    def regions(self, t: int, count: int) -> list[str]:
        """Region name of every cached token after ``t`` insertions, oldest first.

        Args:
            t: at most the length of ``insertions().rules``.
            count: tokens cached after ``t`` insertions.
        """

    # --- Optional --------------------------------------------------------------------------------

    @property
    def scoring(self) -> Scoring:
        """How scores are computed and compared."""
        return Scoring("none")

    @classmethod
    def budget_step(cls, raw: dict[str, Any]) -> int:
        """Number of tokens that a budget must be a multiple of, given the raw settings."""
        return cls.unit_of(raw)

    @property
    def token_scores(self) -> TokenScores | None:
        """Scores that the host computes; None unless the scoring source is ``text``."""
        return None

    @property
    def score_lag(self) -> int:
        """Tokens between a token and the step in which the host sets its score.

        Set it to the length of the window that is never evicted: a score is set when its token can
        first be evicted, and a score by text uses the part of its sentence seen by then.
        """
        return 0

    @property
    def arranges(self) -> bool:
        """True if positions follow ``arrange`` instead of chronological order."""
        return False

    def arrange(self, values: "torch.Tensor", t: int) -> "torch.Tensor":
        """Order the cached tokens by position.

        Args:
            values: fp32 ``[num_sets, count]``, compared values in chronological order.
            t: tokens inserted so far.

        Returns:
            int64 ``[num_sets, count]``, chronological ranks in position order. Every row is a
            permutation.
        """
        raise NotImplementedError

    @property
    def merge_into(self) -> tuple[int, int] | None:
        """Ranks ``[lo, hi)`` that evicted tokens are averaged into; None: they are dropped."""
        return None

    def logit_scale(self, t: np.ndarray, cached: np.ndarray) -> np.ndarray | None:
        """Factors on the logits of ``n`` queries; None if all are 1.

        Args:
            t: int ``[n]``, stream index of each query.
            cached: int ``[n]``, keys that each query sees, its own included.

        Returns:
            float ``[n]`` or None.
        """
        return None

    def derived(self) -> dict[str, Any]:
        """Values derived from the settings, for the startup log line."""
        return {}

    def remarks(self) -> list[str]:
        """Warnings about these settings."""
        return []

    def without_effect(self) -> set[str]:
        """Keys that change nothing, whatever their values, with the other settings as they are."""
        keys = set(self.inert_keys)
        if not self.recall:
            keys |= {key for key in type(self).model_fields if key.startswith("recall_")}
        if self.keep_prompt and self.keep_prompt <= self.num_sinks:
            keys.add("keep_prompt")
        if not (self.heads_differ or self.recall):
            keys.add("head_policy")
        if self.overflow == self.unit > 1 and not self.batches_itself:
            keys.add("overflow")  # as its default, which is 1
        return keys

    # --- Derived ---------------------------------------------------------------------------------

    @property
    def base_capacity(self) -> int:
        """Most tokens cached, without waiting and recalled ones."""
        return self.protected + self.budget

    @property
    def capacity(self) -> int:
        """Most slots needed between strides, including the unit that is being filled."""
        filling = self.unit if self.unit > 1 else 0
        return self.base_capacity + self.recalled + self.waiting + filling

    @property
    def uses_attention(self) -> bool:
        """Whether scores come from attention probabilities."""
        return self.scoring.source == "attention"

    @property
    def compares(self) -> bool:
        """Whether scores decide what stays. Override it if that depends on settings."""
        return self.scoring.source != "none"

    @property
    def heads_differ(self) -> bool:
        """Whether KV heads may keep different tokens, without recall. All read the same text."""
        by_head = self.compares and self.scoring.source != "text"
        return by_head or self.merge_into is not None

    @property
    def without_recall(self) -> Self:
        """The same policy, with no evicted units recalled."""
        return self.model_copy(update={"recall": 0}) if self.recall else self

    @property
    def keeps_ages(self) -> bool:
        """Whether pages store each token's stream index: for ages, traces or recall."""
        return self.trace or self.scoring.per_age or self.recall > 0
