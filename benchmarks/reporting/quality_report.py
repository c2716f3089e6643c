# SPDX-License-Identifier: Apache-2.0
"""What the runs of ``benchmarks.perplexity`` say: tables, numbers and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import stats
from benchmarks.reporting.tables import Table, failure_rows, number
from benchmarks.running.scoring import REFERENCE, Scored, cached, eviction_batches


def overall(
    scored: Mapping[str, Scored],
    arms: Mapping[str, Any],
    base: str,
    capacity: int,
    failed: Mapping[str, str] | None = None,
) -> Table:
    """A row an arm: perplexity, its difference to ``base``, and what the cache held.

    Args:
        failed: arms without a result, and why; a row each.
    """
    columns = (
        "policy",
        "tokens",
        "perplexity",
        "mean of texts",
        f"nats a token more than {base} (95 % interval)",
        "cached: min / mean / max",
        "evicted",
        "tokens/s",
    )
    rows = [_row(run, arms.get(run.label), scored.get(base)) for run in scored.values()]
    rows += failure_rows(failed or {}, len(columns))
    note = (
        f"At most {capacity:,} tokens cached between strides, sinks included. `perplexity` weighs "
        "texts by tokens. Intervals: paired bootstrap over "
        f"{'texts' if _by_document(scored) else f'blocks of {stats.BLOCK} tokens'}"
        ", over the tokens that both have scored (`full` ends where the model's positions do). "
        f"`{REFERENCE}` predicts from a fresh pass over a window of that length. `tokens/s`: "
        "tokens of the texts that an engine read in a second."
    )
    return Table("Streaming perplexity at equal size", columns, tuple(rows), note)


def _row(run: Scored, policy: Any, base: Scored | None) -> tuple[str, ...]:
    least, mean, most = cached(policy, _longest(run)) if policy else (0, 0.0, 0)
    return (
        run.label,
        f"{run.num_tokens:,}",
        number(stats.perplexity(run.scored)),
        number(stats.perplexity_per_document(run.scored)),
        "-" if base is None or base is run else str(_difference(run, base)),
        f"{least:,} / {mean:,.0f} / {most:,}" if policy else "-",
        f"{run.counters['evicted_tokens']:,}" if run.counters else "-",
        f"{run.tokens_per_second:,.0f}",
    )


def _difference(run: Scored, base: Scored) -> stats.Difference:
    """Over the tokens that both have scored: one of them may have read less of the texts."""
    ours, theirs = [], []
    for own, other in zip(run.nll, base.nll, strict=True):
        length = min(len(own), len(other))
        own, other = own[:length], other[:length]
        both = ~np.isnan(own) & ~np.isnan(other)
        ours.append(own[both])
        theirs.append(other[both])
    return stats.paired_difference(ours, theirs)


def _longest(run: Scored) -> int:
    return max(len(values) for values in run.nll) + 1


def _by_document(scored: Mapping[str, Scored]) -> bool:
    return bool(scored) and len(next(iter(scored.values())).nll) >= stats.FEW_DOCUMENTS


def positions(scored: Mapping[str, Scored], base: str) -> Table:
    """Perplexity by position: of ``base``, and every other arm relative to it."""
    bins = stats.position_bins(max(_longest(run) for run in scored.values()))
    curves = {label: stats.curve(run.nll, bins) for label, run in scored.items()}
    rows = []
    for index, (begin, end) in enumerate(bins):
        reference = curves[base][index]
        if reference is None:
            continue
        cells = []
        for label in scored:
            point = curves[label][index]
            if label == base:
                cells.append(number(float(np.exp(reference[0]))))
            elif point is None or point[1] != reference[1]:
                cells.append("-")
            else:
                cells.append(f"{np.expm1(point[0] - reference[0]):+.2%}")
        rows.append((f"{begin:,} - {end:,}", *cells))
    return Table(
        "Perplexity by position in the text",
        ("tokens", *scored),
        tuple(rows),
        f"`{base}`: perplexity; the others: relative to it.",
    )


def spikes(scored: Mapping[str, Scored], settings: Mapping[str, Any], base: str) -> Table:
    """Whether tokens right after an eviction are predicted worse than those right before it."""
    from vllm_cascade.policies.registry import resolve

    rows = []
    (reference,) = scored[base].nll
    for label, run in scored.items():
        if label == base:
            continue
        # Token t's step evicts; the first forward pass without what left predicts token t + 2.
        events = eviction_batches(resolve(settings[label]), len(reference) + 1) + 1
        gap = int(np.diff(events).min()) if len(events) > 1 else len(reference)
        width = max(min(gap // 2, 16), 1)
        after, before = stats.after_events(run.nll[0] - reference, events.tolist(), width)
        if len(after) < 2:
            continue
        jump = stats.paired_difference([after], [before], block=1)
        rows.append(
            (label, f"{len(events):,}", f"{gap:,}", f"{width}", number(after.mean(), 4),
             number(before.mean(), 4), str(jump))
        )  # fmt: skip
    columns = (
        "policy",
        "evictions",
        "tokens between",
        "width",
        "after",
        "before",
        "after - before (95 % interval)",
    )
    note = (
        f"Token by token (stride 1). Mean of (NLL - NLL of {base}) over the `width` tokens after "
        "an eviction of several tokens, and over those before it; the interval is over evictions."
    )
    return Table("NLL at evictions, nats a token", columns, tuple(rows), note)


def sizes(held: Mapping[str, Mapping[str, Any]]) -> Table:
    """What a request holds, by arm: ``kv_cache_dtype``, ``pages``, ``bytes``."""
    rows = [
        (label, size["kv_cache_dtype"], f"{size['pages']:,}", f"{size['bytes'] / 1024:,.0f}")
        for label, size in held.items()
    ]
    columns = ("policy", "--kv-cache-dtype", "pages", "KiB")
    note = "At most, over all layers, with all that a page holds beside keys and values."
    return Table("What a request holds", columns, tuple(rows), note)


def numbers(scored: Mapping[str, Scored], arms: Mapping[str, Any]) -> dict[str, Any]:
    """Everything else, for the JSON: settings, counters, mean NLL by position."""
    bins = stats.position_bins(max(_longest(run) for run in scored.values()))
    return {
        label: {
            "policy": {"name": arms[label].name, **arms[label].model_dump()}
            if label in arms
            else None,
            "tokens": run.num_tokens,
            "perplexity": stats.perplexity(run.scored),
            "perplexity_mean_of_texts": stats.perplexity_per_document(run.scored),
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "counters": run.counters,
            "pages_peak": run.pages_peak,
            "texts": [float(values.mean()) for values in run.scored],
            "curve": [
                {"begin": begin, "end": end, "nll": point[0], "tokens": point[1]}
                for (begin, end), point in zip(bins, stats.curve(run.nll, bins), strict=True)
                if point
            ],
        }
        for label, run in scored.items()
    }


def _settings(policy: Any) -> dict[str, Any]:
    return {"name": policy.name, **policy.model_dump()}


def picture(scored: Mapping[str, Scored], base: str, path: Path) -> None:
    """Every arm's perplexity relative to ``base``, by position."""
    from matplotlib.figure import Figure

    bins = stats.position_bins(max(_longest(run) for run in scored.values()))
    reference = stats.curve(scored[base].nll, bins)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, run in scored.items():
        at, gain = [], []
        for (_, end), point, zero in zip(bins, stats.curve(run.nll, bins), reference, strict=True):
            if point and zero and point[1] == zero[1]:
                at.append(end)
                gain.append(100 * np.expm1(point[0] - zero[0]))
        style = ":" if label == REFERENCE else "-"
        axes.plot(at, gain, label=label, linestyle=style, marker=".")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the text (end of bin)", ylabel=f"perplexity against {base}, %")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
