# SPDX-License-Identifier: Apache-2.0
"""What the trials of ``benchmarks.throughput`` say: tables and a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reporting.tables import Table, number, spread

Record = dict[str, Any]
Metric = tuple[str, int]
COLUMNS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("output tok/s", (("output_throughput", 1),)),
    ("req/s", (("request_throughput", 3),)),
    ("TTFT ms: p50 / p99", (("median_ttft_ms", 0), ("p99_ttft_ms", 0))),
    ("TPOT ms: mean / p50 / p99", (("mean_tpot_ms", 1), ("median_tpot_ms", 1), ("p99_tpot_ms", 1))),
    ("ITL ms: mean / p50 / p99", (("mean_itl_ms", 1), ("median_itl_ms", 1), ("p99_itl_ms", 1))),
    ("running", (("peak_running", 0),)),
    ("preempted", (("preemptions", 0),)),
    ("pages: peak / pool", (("peak_pages", 0), ("num_pages", 0))),
)
NOTE_OFFLINE = "Medians of the trials; of tokens/s also their range, where there are several."
NOTE = f"{NOTE_OFFLINE} The last three columns are the server's own, sampled five times a second."


def line(record: Record) -> str:
    """One trial, as it ends."""
    head = f"{record['arm']:>16} context {record['context']:,}, {record['concurrency']} at once"
    head += f", pool {record['pool'] / 2**20:,.0f} MiB"
    if "refused" in record:
        return f"{head}: refused: {record['refused'].splitlines()[-1][:200]}"
    text = f"{head}: {record['output_throughput']:,.1f} tok/s"
    if "mean_tpot_ms" in record:
        text += f", TPOT {record['mean_tpot_ms']:,.1f} ms, TTFT {record['median_ttft_ms']:,.0f} ms"
    return text


def _key(record: Record) -> tuple[int, int, int]:
    return record["pool"], record["concurrency"], record["context"]


def _points(records: Iterable[Record]) -> list[tuple[int, int, int]]:
    return list(dict.fromkeys(_key(record) for record in records))


def values(records: Iterable[Record], key: str, **match: Any) -> list[float]:
    """A metric of the trials that match."""
    return [
        record[key]
        for record in records
        if key in record and all(record[name] == value for name, value in match.items())
    ]


def tables(records: Sequence[Record]) -> list[Table]:
    """A table a pool and concurrency: a row an arm and context."""
    keys = {key for record in records for key in record}
    shown = [column for column in COLUMNS if column[1][0][0] in keys]
    made = []
    for pool, at_once in dict.fromkeys(_key(record)[:2] for record in records):
        part = [r for r in records if (r["pool"], r["concurrency"]) == (pool, at_once)]
        rows = [
            _row(part, shown, arm, context)
            for context in dict.fromkeys(r["context"] for r in part)
            for arm in dict.fromkeys(r["arm"] for r in part)
        ]
        made.append(
            Table(
                f"KV pool {pool / 2**20:,.1f} MiB, {at_once} requests in flight",
                ("context, arm", *(name for name, _ in shown)),
                tuple(rows),
                NOTE if "peak_running" in keys else NOTE_OFFLINE,
            )
        )
    return made


def _row(
    part: Sequence[Record], shown: Sequence[tuple[str, tuple[Metric, ...]]], arm: str, context: int
) -> tuple[str, ...]:
    name, here = f"{context:,} {arm}", {"arm": arm, "context": context}
    if not any((r["arm"], r["context"]) == (arm, context) for r in part):
        return (name, "not run", *[""] * (len(shown) - 1))
    if any("refused" in r for r in part if (r["arm"], r["context"]) == (arm, context)):
        return (name, "does not start", *[""] * (len(shown) - 1))
    cells = []
    for _, metrics in shown:
        found = [values(part, key, **here) for key, _ in metrics]
        if len(metrics) == 1:
            cells.append(spread(found[0], metrics[0][1]))
        else:
            pairs = zip(found, metrics, strict=True)
            cells.append(" / ".join(number(median(v) if v else None, m[1]) for v, m in pairs))
    return (name, *cells)


def picture(records: Sequence[Record], path: Path) -> None:
    """Left: throughput over the pool's size. Right: time per token over the context."""
    from matplotlib.figure import Figure

    done = [record for record in records if "refused" not in record]
    if not done:
        return
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    longest = max(record["context"] for record in done)
    busiest = max(record["concurrency"] for record in done)
    for arm in dict.fromkeys(record["arm"] for record in done):
        mine = [r for r in done if r["arm"] == arm and r["concurrency"] == busiest]
        pools = sorted({r["pool"] for r in mine if r["context"] == longest})
        speed = [median(values(mine, "output_throughput", pool=p, context=longest)) for p in pools]
        left.plot([pool / 2**20 for pool in pools], speed, marker="o", label=arm)
        ample = max(r["pool"] for r in mine)
        contexts = sorted(
            {r["context"] for r in mine if r["pool"] == ample and "mean_tpot_ms" in r}
        )
        times = [median(values(mine, "mean_tpot_ms", pool=ample, context=c)) for c in contexts]
        right.plot(contexts, times, marker="o", label=arm)
    left.set(xlabel="KV pool, MiB", ylabel="output tokens/s", ylim=(0, None))
    left.set_title(f"{longest:,}-token prompts, {busiest} in flight", fontsize=10)
    right.set(xlabel="context, tokens", ylabel="time per output token, ms", ylim=(0, None))
    right.set_title(f"{busiest} in flight, the largest pool", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=130)
