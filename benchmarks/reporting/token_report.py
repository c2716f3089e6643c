# SPDX-License-Identifier: Apache-2.0
"""The tables of ``benchmarks.token_time``: what it measured, and which goals that reaches."""

import argparse
from collections.abc import Callable, Sequence

from benchmarks.reporting.goals import (
    LONG,
    PROMPT_FASTER,
    PROMPT_FLAT,
    TOKEN_COST,
    TOKEN_FASTER,
    TOKEN_FLAT,
)
from benchmarks.reporting.tables import Table, number
from benchmarks.running.token_points import (
    ANCHOR,
    POLICY,
    SHORT_PROMPT,
    STOCK,
    Point,
    short_length,
)


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


def _prompt_ratio(point: Point) -> float | None:
    stock, ours = point.prompt_token(STOCK), point.prompt_token(POLICY)
    return stock / ours if stock and ours else None


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value - 1:+.1%}"
