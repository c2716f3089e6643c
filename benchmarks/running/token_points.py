# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.token_time`` measures at each context."""

import argparse
from dataclasses import dataclass
from statistics import geometric_mean, mean, median
from typing import Any

import numpy as np

STOCK, POLICY, ANCHOR = "stock", "policy", "anchor"

SHORT_PROMPT = 4096
"""From here on, the time a prompt token is to be flat."""


@dataclass(frozen=True)
class Step:
    """One step of one engine; milliseconds.

    Attributes:
        attention: the part of it inside the attention implementations of all layers.
    """

    total: float
    attention: float


@dataclass(frozen=True)
class Point:
    """One context, of the arms that took part.

    Attributes:
        prompt: ms of the whole prompt, each time it was read, by arm.
        beside: mean ms a token of the short prompts read meanwhile, each time.
        steps: of each generated token after the first, by arm.
    """

    context: int
    prompt: dict[str, list[float]]
    beside: list[float]
    steps: dict[str, list[Step]]

    def token(self, arm: str) -> float | None:
        """Median ms a token."""
        found = self.steps.get(arm)
        return median(step.total for step in found) if found else None

    def paired(self, over: str, under: str) -> float | None:
        """One arm's time over another's: medians of each half's steps, and their mean."""
        if over not in self.steps or under not in self.steps:
            return None
        pairs = zip(self.steps[over], self.steps[under], strict=True)
        ratios = [a.total / b.total for a, b in pairs]
        half = len(ratios) // 2
        return geometric_mean([median(ratios[:half]), median(ratios[half:])])

    def prompt_token(self, arm: str) -> float | None:
        """Mean ms a prompt token."""
        return mean(self.prompt[arm]) / self.context if arm in self.prompt else None

    @property
    def prompt_over_short(self) -> float:
        """The policy's time a prompt token over the time in the short prompts read meanwhile."""
        pairs = zip(self.prompt[POLICY], self.beside, strict=True)
        return geometric_mean([ms / self.context / beside for ms, beside in pairs])

    def without_attention(self, arm: str) -> float | None:
        """Median ms a token less its attention."""
        found = self.steps.get(arm)
        return median(step.total - step.attention for step in found) if found else None


def short_length(args: argparse.Namespace) -> int:
    """Tokens of the prompts that are read beside the others."""
    return min(SHORT_PROMPT, max(args.contexts))


def summary(point: Point) -> dict[str, Any]:
    """What is kept of a context's steps."""

    def spread(times: list[float]) -> list[float]:
        return [round(float(x), 3) for x in np.percentile(times, (10, 50, 90))]

    return {
        "context": point.context,
        "prompt_ms": point.prompt,
        "short_prompts_ms_a_token": point.beside,
        "num_steps": {name: len(steps) for name, steps in point.steps.items()},
        "step_ms_p10_p50_p90": {
            name: spread([step.total for step in steps]) for name, steps in point.steps.items()
        },
        "attention_ms_p10_p50_p90": {
            name: spread([step.attention for step in steps]) for name, steps in point.steps.items()
        },
        "ratio": {
            f"{over} / {under}": point.paired(over, under)
            for over, under in ((STOCK, POLICY), (POLICY, ANCHOR))
        },
    }
