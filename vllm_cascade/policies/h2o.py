# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters: the tokens that have received most attention, and the most recent ones."""

from typing import ClassVar

from pydantic import Field

from vllm_cascade.policies.recent import Recent
from vllm_cascade.policies.rules import Scoring


class H2O(Recent):
    """Accumulated attention decides among all but the last ``window`` tokens."""

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = (
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, "
        "https://arxiv.org/abs/2306.14048"
    )
    inert_keys: ClassVar[frozenset[str]] = frozenset({"ema_gamma"})

    normalise: bool = Field(
        False, description="compare attention per query that saw the token; sums favour old tokens"
    )

    @property
    def scoring(self) -> Scoring:
        newest = self.tie == "incoming"
        return Scoring("attention", per_age=self.normalise, newest_stays=newest)
