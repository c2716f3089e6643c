# SPDX-License-Identifier: Apache-2.0
"""Dynamic Global Context: sinks, the most important older tokens, and the most recent ones."""

from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_cascade.policies.base import Policy, StepTables, TokenScores
from vllm_cascade.policies.contest import drop_lowest

GLOBAL_SHARE = 5
"""The papers' tables are best with 60 to 160 of 510 tokens in the global part: a fifth."""


class DGC(Policy):
    """The ``global_size`` most important tokens beside the most recent ones (Algorithm 1).

    A token that leaves the recent part joins the global one, and when that is too large, its least
    important token is deleted. ``importance``:

    - ``tfidf``: the paper's Eq. 4, of token ids: occurrences in the token's sentence over those in
      the corpus, times ``ln(sentences / sentences with it)``;
    - ``tfidf_sklearn``: as the authors' code scores: occurrences in the sentence times
      ``ln((1 + sentences) / (1 + sentences with it)) + 1``, over the sentence's L2 norm;
    - ``attention``: the mean attention a token got while it was cached (Algorithm 2, but a deleted
      token is gone for good);
    - ``cluster``: no token is deleted from the global part: its first ``global_size`` tokens become
      cluster centres, and a token that leaves the recent part is averaged into the nearest
      (Algorithms 3 and 4 for a KV cache; ``vllm_cascade/attention/merge.py``).
    """

    name: ClassVar[str] = "dgc"
    paper: ClassVar[str] = (
        "Dynamic Global Context for StreamingLLM, "
        "https://github.com/aaron-jx-li/augmented_streamingLLM"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})

    importance: Literal["tfidf", "tfidf_sklearn", "attention", "cluster"] = Field(
        "tfidf", description="what makes a token important"
    )
    global_size: int | None = Field(
        None, ge=1, description="tokens of the global part; null is a fifth of the budget"
    )
    idf: str | None = Field(
        None,
        description="table made by `vllm-cascade idf`; null: frequencies in the request's own past",
    )
    order: Literal["chronological", "importance"] = Field(
        "chronological",
        description="positions of the global part: by time, or the most important first, as the "
        "authors' code has them",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.budget < 2:
            raise ValueError("budget 1 leaves no room for a global and a recent token; set >= 2")
        if self.num_global >= self.budget:
            raise ValueError(
                f"global_size {self.global_size} leaves no recent token in the budget "
                f"{self.budget}; set it to at most {self.budget - 1}"
            )
        if self.idf is not None and self.token_scores is None:
            raise ValueError(
                f"idf is not used with importance {self.importance!r}; remove it, or set "
                "importance to tfidf or tfidf_sklearn"
            )
        if self.order == "importance" and self.importance == "cluster":
            raise ValueError("order 'importance' has no meaning for clusters; remove it")
        return self

    @property
    def num_global(self) -> int:
        """Tokens of the global part."""
        return max(self.budget // GLOBAL_SHARE, 1) if self.global_size is None else self.global_size

    @property
    def recent(self) -> int:
        """Most recent tokens, always kept."""
        return self.budget - self.num_global

    @property
    def uses_scores(self) -> bool:
        return self.importance == "attention"

    @property
    def token_scores(self) -> TokenScores | None:
        if self.importance not in ("tfidf", "tfidf_sklearn"):
            return None
        return TokenScores(self.importance, self.idf, self.recent)

    @property
    def needs_age(self) -> bool:
        return self.importance == "attention"

    def comparable(self, scores: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return scores / age.clamp_min(1)

    @property
    def merge_into(self) -> tuple[int, int] | None:
        if self.importance != "cluster":
            return None
        return self.num_sinks, self.num_sinks + self.num_global

    @property
    def arranges(self) -> bool:
        return self.order == "importance"

    def arrange(self, values: torch.Tensor, t: int) -> torch.Tensor:
        """Once a token has been deleted, the global part from the most important down."""
        ranks = torch.arange(values.shape[1]).repeat(len(values), 1)
        if self.inserted(np.asarray(t)) > self.base_capacity:
            middle = slice(self.num_sinks, self.num_sinks + self.num_global)
            order = values[:, middle].sort(dim=1, descending=True, stable=True).indices
            ranks[:, middle] = order + self.num_sinks
        return ranks

    def insertions(self) -> StepTables:
        fill, first = self.base_capacity, self.num_sinks
        t = np.arange(fill + 1, dtype=np.int32)
        candidates = self.num_global + 1
        if self.merge_into is not None:
            first, candidates = first + self.num_global, 1  # what leaves the recent part
        lo = np.full_like(t, first)
        return StepTables(
            lo=lo,
            hi=np.where(t >= fill, lo + candidates, lo).astype(np.int32),
            count=np.minimum(t + 1, fill),
            transient=fill,
        )

    def plan_insertions(self, t: int, num_tokens: int) -> tuple[int, int]:
        """Tokens in all, and how many between sinks and recent part must leave."""
        total = self.base_count(t) + num_tokens
        return total, total - self.base_count(t + num_tokens)

    def choose(self, scores: torch.Tensor, plan: Any) -> torch.Tensor:
        total, excess = plan
        if self.merge_into is None:
            return drop_lowest(scores, self.num_sinks, total - self.recent, excess, self.tie)
        mask = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        last = self.merge_into[1]
        mask[:, last : last + excess] = False
        return mask

    def base_regions(self, t: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        stored = self.base_count(t) - sinks
        recent = min(stored, self.recent)
        return ["sink"] * sinks + ["global"] * (stored - recent) + ["recent"] * recent

    def derived(self) -> dict[str, Any]:
        return {"global_size": self.num_global, "recent": self.recent}

    def remarks(self) -> list[str]:
        fields = type(self).model_fields
        unused = ["head_reduction"] if not self.uses_scores else []
        if self.merge_into is not None:
            unused.append("tie")
        return [
            f"{key} has no effect with importance {self.importance}"
            for key in unused
            if getattr(self, key) != fields[key].default
        ]
