# SPDX-License-Identifier: Apache-2.0
"""Dynamic Global Context: sinks, the most important older tokens, and the most recent ones."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_cascade.policies.policy import Policy, TokenScores
from vllm_cascade.policies.rules import Insertions, Rule, Scoring
from vllm_cascade.policies.settings import Misfit

if TYPE_CHECKING:
    import torch

GLOBAL_SHARE = 5
"""By default 1/5 of the budget is global. The papers' best results use 60 to 160 of 510 tokens."""


class DGC(Policy):
    """The ``global_size`` most important tokens beside the most recent ones (Algorithm 1).

    A token that leaves the recent part joins the global part. If the global part is then too large,
    its least important token is evicted. ``importance`` is one of:

    - ``tfidf``: Eq. 4 of the paper over token ids. Occurrences in the token's sentence, divided by
      occurrences in the corpus, times ``ln(sentences / sentences with it)``.
    - ``tfidf_sklearn``: the score of the authors' code. Occurrences in the sentence times
      ``ln((1 + sentences) / (1 + sentences with it)) + 1``, divided by the sentence's L2 norm.
    - ``attention``: the mean attention a token received while cached (Algorithm 2, but an evicted
      token never returns).
    - ``cluster``: the first ``global_size`` tokens of the global part become cluster centres and
      are never evicted. A token that leaves the recent part is averaged into the nearest centre
      (Algorithms 3 and 4 for a KV cache; ``vllm_cascade/attention/torch/merge.py``).
    """

    name: ClassVar[str] = "dgc"
    paper: ClassVar[str] = (
        "Dynamic Global Context for StreamingLLM, "
        "https://github.com/aaron-jx-li/augmented_streamingLLM"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})
    token_keys: ClassVar[tuple[str, ...]] = (*Policy.token_keys, "global_size")

    importance: Literal["tfidf", "tfidf_sklearn", "attention", "cluster"] = Field(
        "tfidf", description="what makes a token important"
    )
    global_size: int | None = Field(
        None, ge=1, description="tokens of the global part; null: a fifth of the budget"
    )
    idf: str | None = Field(
        None,
        description="table made by `vllm-cascade idf`; null: frequencies in the request so far",
    )
    order: Literal["chronological", "importance"] = Field(
        "chronological",
        description="positions of the global part: by time, or the most important token first, "
        "as in the authors' code",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.budget < 2 * self.unit:
            one = "token" if self.unit == 1 else "unit"
            reason = f"leaves no room for a global and a recent {one}"
            change = {"budget": 2 * self.unit}
            raise Misfit("budget", self.budget, reason, change, bound="at least ")
        if self.num_global >= self.budget:
            reason = f"leaves no recent token in the budget {self.budget}"
            changes = (
                {"global_size": self.budget - self.unit},
                {"budget": self.num_global + self.unit},
            )
            raise Misfit("global_size", self.global_size, reason, *changes, bound="at most ")
        if self.idf is not None and self.token_scores is None:
            reason = f"is not used with importance {self.importance}"
            changes = [{"importance": rule} for rule in ("tfidf", "tfidf_sklearn")]
            raise Misfit("idf", self.idf, reason, *changes, hint="remove it")
        if self.order == "importance" and self.importance == "cluster":
            changes = [{"order": "chronological"}, {"importance": "attention"}]
            raise Misfit("order", self.order, "has no meaning for clusters", *changes)
        if self.unit > 1 and (self.merge_into is not None or self.arranges):
            key = "order" if self.arranges else "importance"
            change = {key: type(self).model_fields[key].default}
            reason = f"moves single tokens, and unit is {self.unit}"
            raise Misfit(key, getattr(self, key), reason, change, {"unit": 1})
        return self

    @property
    def num_global(self) -> int:
        """Tokens in the global part."""
        if self.global_size is not None:
            return self.global_size
        return max(self.budget // self.unit // GLOBAL_SHARE, 1) * self.unit

    @property
    def recent(self) -> int:
        """Most recent tokens, always kept."""
        return self.budget - self.num_global

    @property
    def scoring(self) -> Scoring:
        newest = self.tie == "incoming"
        if self.importance == "attention":
            return Scoring("attention", per_age=True, newest_stays=newest)
        return Scoring("none" if self.token_scores is None else "text", newest_stays=newest)

    @property
    def token_scores(self) -> TokenScores | None:
        if self.importance not in ("tfidf", "tfidf_sklearn"):
            return None
        return TokenScores(self.importance, self.idf)

    @property
    def score_lag(self) -> int:
        return 0 if self.token_scores is None else self.recent

    @property
    def merge_into(self) -> tuple[int, int] | None:
        if self.importance != "cluster":
            return None
        return self.num_sinks, self.num_sinks + self.num_global

    @property
    def arranges(self) -> bool:
        return self.order == "importance"

    def arrange(self, values: "torch.Tensor", t: int) -> "torch.Tensor":
        """Sort the global part by falling importance once a token has been evicted."""
        import torch

        ranks = torch.arange(values.shape[1]).repeat(len(values), 1)
        if t > self.base_capacity:
            middle = slice(self.num_sinks, self.num_sinks + self.num_global)
            order = values[:, middle].sort(dim=1, descending=True, stable=True).indices
            ranks[:, middle] = order + self.num_sinks
        return ranks

    def insertions(self) -> Insertions:
        first, candidates = self.num_sinks, self.num_global + 1
        if self.merge_into is not None:
            first, candidates = first + self.num_global, 1  # the token that leaves the recent part
        least = Rule(first, first + candidates, 1)
        return Insertions([()] * self.base_capacity + [(least,)])

    def regions(self, t: int, count: int) -> list[str]:
        sinks = min(t, self.num_sinks)
        recent = min(count - sinks, self.recent)
        return ["sink"] * sinks + ["global"] * (count - sinks - recent) + ["recent"] * recent

    def derived(self) -> dict[str, Any]:
        return {"global_size": self.num_global, "recent": self.recent}

    def remarks(self) -> list[str]:
        fields = type(self).model_fields
        unused = ["head_reduction"] if not self.uses_attention else []
        if self.merge_into is not None:
            unused.append("tie")
        return [
            f"{key} has no effect with importance {self.importance}"
            for key in unused
            if getattr(self, key) != fields[key].default
        ]
