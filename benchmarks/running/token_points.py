# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.token_time`` measured at each context, and its tables."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, mean, median
from typing import Any

import numpy as np

from benchmarks.reporting.goals import (
    LONG,
    PROMPT_FASTER,
    PROMPT_FLAT,
    TOKEN_COST,
    TOKEN_FASTER,
    TOKEN_FLAT,
)
from benchmarks.reporting.tables import Table, number

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


def token_table(points: Sequence[Point], args: argparse.Namespace) -> Table:
    """Time a generated token, by context."""
    rows = []
    for point in points:
        ours, stock = point.token(POLICY), point.token(STOCK)
        floor = point.without_attention(STOCK)
        speed_up = point.paired(STOCK, POLICY)
        rows.append(
            (
                f"{point.context:,}",
                number(stock, 2),
                number(ours, 2),
                _times(speed_up),
                number(floor, 2),
                _times(stock / floor if stock and floor else None),
                _percent(point.paired(POLICY, ANCHOR)),
            )
        )
    return Table(
        f"ms a token, {args.policy} with budget {args.budget:,} beside stock vLLM",
        (
            *("context", "stock", args.policy, "faster"),
            *("stock, attention free", "faster at best", f"over {args.anchor:,} tokens"),
        ),
        tuple(rows),
        f"Medians of 2 x {args.output_len - 1} steps taken in turn, and of their paired ratios. "
        "Attention free: stock's steps less the time in its attention.",
    )


def prompt_table(points: Sequence[Point], args: argparse.Namespace) -> Table:
    """Time to read a prompt, by context."""
    rows = tuple(
        (
            f"{point.context:,}",
            *(number(point.prompt_token(arm), 3) for arm in (STOCK, POLICY)),
            _times(_prompt_ratio(point)),
            _percent(point.prompt_over_short),
        )
        for point in points
    )
    title = f"ms a prompt token, in chunks of {args.chunk:,}"
    over = f"over {short_length(args):,} tokens"
    columns = ("context", "stock", args.policy, "faster", over)
    return Table(title, columns, rows, "Means of two prompts; the last column beside short ones.")


def goal_table(points: Sequence[Point], args: argparse.Namespace) -> Table:
    """The project's goals, as far as the contexts reach them."""
    rows: list[tuple[str, str, str]] = []

    def judge(goal: str, value: float | None, holds: Callable[[float], bool], text: str) -> None:
        if value is not None:
            rows.append((goal, text.format(value), "yes" if holds(value) else "no"))

    by_context = {point.context: point for point in points}
    for context, point in by_context.items():
        if context + args.output_len <= args.budget:
            goal = f"at most {TOKEN_COST}x stock's time a token where nothing is evicted"
            cost = point.paired(POLICY, STOCK)
            judge(f"{goal} ({context:,})", cost, lambda x: x <= TOKEN_COST, "{:.2f}x")
    long = by_context.get(LONG)
    if long is not None:
        goal, speed_up = f"a token at least {TOKEN_FASTER}x faster", long.paired(STOCK, POLICY)
        judge(f"{goal} at {LONG:,}", speed_up, lambda x: x >= TOKEN_FASTER, "{:.2f}x")
        goal, speed_up = f"a prompt at least {PROMPT_FASTER}x faster", _prompt_ratio(long)
        judge(f"{goal} at {LONG:,}", speed_up, lambda x: x >= PROMPT_FASTER, "{:.2f}x")
    over = [x for p in points if p.context > args.anchor and (x := p.paired(POLICY, ANCHOR))]
    worst = max(over, key=lambda x: abs(x - 1), default=None)
    goal = f"time a token flat within {TOKEN_FLAT:.0%} from {args.anchor:,} to {max(by_context):,}"
    judge(goal, worst, lambda x: abs(x - 1) <= TOKEN_FLAT, "{:.3f}x at most")
    over = [p.prompt_over_short for c, p in by_context.items() if c > SHORT_PROMPT]
    worst = max(over, key=lambda x: abs(x - 1), default=None)
    span = f"from {SHORT_PROMPT:,} to {max(by_context):,}"
    goal = f"time a prompt token flat within {PROMPT_FLAT:.0%} {span}"
    judge(goal, worst, lambda x: abs(x - 1) <= PROMPT_FLAT, "{:.3f}x at most")
    return Table("Goals", ("goal", "measured", "holds"), tuple(rows))


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


def _prompt_ratio(point: Point) -> float | None:
    stock, ours = point.prompt_token(STOCK), point.prompt_token(POLICY)
    return stock / ours if stock and ours else None


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value - 1:+.1%}"
