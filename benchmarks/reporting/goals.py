# SPDX-License-Identifier: Apache-2.0
"""The project's speed goals, as far as the trials of ``benchmarks.throughput`` reach them.

A goal compares medians over the trials: of an arm with the better of the stock arms, or of an arm
with itself over contexts. Latencies are judged where one request is in flight, because with several
at once a token's time has parts of the others' prompts in it, and a prompt's time its wait.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.reporting.tables import Table, number

Record = dict[str, Any]
Point = tuple[int, int, int]
"""Pool in bytes, requests in flight, context."""
STOCK = "full"
THROUGHPUT, TPOT, TTFT = "output_throughput", "mean_tpot_ms", "median_ttft_ms"
LONG = 16384
TOKEN_FLAT, PROMPT_FLAT = 0.05, 0.10
TOKEN_FASTER, PROMPT_FASTER = 3.5, 2.5  # than stock's, at LONG
TOKEN_COST = 1.1  # over stock's, where nothing is evicted


@dataclass(frozen=True)
class Ratio:
    """Ours over stock's, or the other way round for a time, where ``applies``.

    Attributes:
        bound: at least this; at most, where ``below``.
        alone: only where one request is in flight.
    """

    title: str
    metric: str
    bound: float
    applies: Callable[[Record, int], bool]
    inverse: bool = False
    below: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Flat:
    """A time that does not grow with the context; of a prompt, its time a token."""

    title: str
    metric: str
    within: float
    begin: int
    per_token: bool = False


def _long(record: Record, budget: int) -> bool:
    return record["context"] == LONG


def _short(record: Record, budget: int) -> bool:
    return record["context"] + record["output_len"] <= budget


GOALS: tuple[Ratio | Flat, ...] = (
    Flat(f"TPOT flat within {TOKEN_FLAT:.0%} from 2k", TPOT, TOKEN_FLAT, 2048),
    Flat(
        f"prompt time a token flat within {PROMPT_FLAT:.0%} from 4k",
        *(TTFT, PROMPT_FLAT, 4096),
        per_token=True,
    ),
    Ratio(f"at least 3x stock's throughput at {LONG:,}", THROUGHPUT, 3.0, _long),
    Ratio(
        f"TPOT at least {TOKEN_FASTER}x faster at {LONG:,}",
        *(TPOT, TOKEN_FASTER, _long),
        inverse=True,
        alone=True,
    ),
    Ratio(
        f"prompt at least {PROMPT_FASTER}x faster at {LONG:,}",
        *(TTFT, PROMPT_FASTER, _long),
        inverse=True,
        alone=True,
    ),
    Ratio("at least 0.9x stock's throughput where nothing is evicted", THROUGHPUT, 0.9, _short),
    Ratio(
        f"TPOT at most {TOKEN_COST}x stock's where nothing is evicted",
        *(TPOT, TOKEN_COST, _short),
        below=True,
        alone=True,
    ),
)


def goals(records: Sequence[Record], budget: int) -> list[Table]:
    """One table, a row a goal and setting that the trials reach; none where they reach none."""
    done = [record for record in records if "refused" not in record]
    arms = [arm for arm in dict.fromkeys(r["arm"] for r in done) if not arm.startswith(STOCK)]
    rows = []
    for arm in arms:
        for goal in GOALS:
            judge = _flat if isinstance(goal, Flat) else _ratios
            rows += [(f"{arm}: {goal.title}", *row) for row in judge(done, arm, goal, budget)]
    if not rows:
        return []
    columns = ("goal", "setting", "measured", "holds")
    return [Table("Goals", columns, tuple(rows), "Ratios of medians over the trials.")]


def _middle(records: Iterable[Record], metric: str, arm: str, point: Point) -> float | None:
    pool, at_once, context = point
    wanted = (arm, pool, at_once, context)
    found = [
        r[metric]
        for r in records
        if metric in r and (r["arm"], r["pool"], r["concurrency"], r["context"]) == wanted
    ]
    return median(found) if found else None


def _row(where: str, text: str, holds: bool) -> tuple[str, str, str]:
    return where, text, "yes" if holds else "no"


def _where(pool: int, at_once: int) -> str:
    return f"{at_once} at once, {pool / 2**20:,.0f} MiB"


def _flat(
    records: Sequence[Record], arm: str, goal: Flat, budget: int
) -> list[tuple[str, str, str]]:
    contexts = sorted({r["context"] for r in records if r["context"] >= goal.begin})
    rows = []
    for pool in dict.fromkeys(record["pool"] for record in records):
        found = {c: _middle(records, goal.metric, arm, (pool, 1, c)) for c in contexts}
        times = {c: t / c if goal.per_token else t for c, t in found.items() if t is not None}
        if len(times) < 2:
            continue
        low, high = min(times.values()), max(times.values())
        ends = f"{min(times):,} to {max(times):,} tokens, {_where(pool, 1)}"
        digits = 3 if goal.per_token else 2
        text = f"{number(low, digits)} to {number(high, digits)} ms ({high / low - 1:+.1%})"
        rows.append(_row(ends, text, high <= low * (1 + goal.within)))
    return rows


def _ratios(
    records: Sequence[Record], arm: str, goal: Ratio, budget: int
) -> list[tuple[str, str, str]]:
    stock_arms = {r["arm"] for r in records if r["arm"].startswith(STOCK)}
    best = max if goal.metric == THROUGHPUT else min
    points = {
        (r["pool"], r["concurrency"], r["context"])
        for r in records
        if goal.applies(r, budget) and (r["concurrency"] == 1 or not goal.alone)
    }
    rows = []
    for point in sorted(points):
        ours = _middle(records, goal.metric, arm, point)
        stock = [_middle(records, goal.metric, name, point) for name in stock_arms]
        stock = [value for value in stock if value is not None]
        if ours is None or not stock:
            continue
        ratio = best(stock) / ours if goal.inverse else ours / best(stock)
        holds = ratio <= goal.bound if goal.below else ratio >= goal.bound
        where = f"{point[2]:,} tokens, {_where(*point[:2])}"
        rows.append(_row(where, f"{ratio:.2f}x", holds))
    return rows
