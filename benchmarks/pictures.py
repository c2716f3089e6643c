# SPDX-License-Identifier: Apache-2.0
"""The demo's two pictures: perplexity over the stream, and the tokens each policy still holds."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.stream import StreamResult

COLOURS = {
    "window": "#d55e00",
    "sink": "#009e73",
    "cascade": "#0072b2",
    "cascade per KV head": "#cc79a7",
    "full": "#222222",
}
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def sliding_perplexity(nll: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Perplexity of the ``width`` tokens up to each token: ``(token indices, values)``."""
    width = min(width, len(nll))
    sums = np.concatenate([[0.0], np.cumsum(nll)])
    return np.arange(width, len(nll) + 1), np.exp((sums[width:] - sums[:-width]) / width)


def perplexity(results: dict[str, StreamResult], native_len: int, path: Path) -> None:
    """Left: the stream's beginning, where full attention can still run. Right: all of it."""
    longest = max(result.num_tokens for result in results.values())
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.7))
    _perplexity_lines(left, results, width=native_len // 4, end=4 * native_len)
    _perplexity_lines(right, results, width=4 * native_len, end=longest)
    for axes in (left, right):
        axes.axvline(native_len, color="#888888", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter(THOUSANDS)
        axes.set_xlabel("tokens streamed")
        axes.grid(alpha=0.25)
        axes.set_xlim(left=0)
    left.annotate(
        f"the model's\n{native_len:,} positions end",
        (native_len, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color="#555555",
    )
    left.set_ylabel("perplexity (lower is better)")
    left.set_title(f"the beginning, mean of {native_len // 4:,} tokens", fontsize=10)
    right.set_title(f"the whole stream, mean of {4 * native_len:,} tokens", fontsize=10)
    left.legend(fontsize=9, loc="lower right")
    figure.suptitle("Perplexity while a book streams through a bounded KV cache")
    figure.savefig(path, dpi=150)


def _perplexity_lines(axes: Axes, results: dict[str, StreamResult], width: int, end: int) -> None:
    for label, result in results.items():
        if len(result.nll) < width:
            continue
        at, values = sliding_perplexity(result.nll[: end - 1], width)
        step = max(len(at) // 2000, 1)
        front = label == "full"
        axes.plot(
            at[::step],
            values[::step],
            label=label,
            color=COLOURS[label],
            linewidth=2.2 if front else 1.2,
            linestyle=":" if front else "-",
            zorder=3 if front else 2,
        )


def kept_tokens(results: dict[str, StreamResult], path: Path) -> None:
    """One row of ticks per policy, layer and head set; the long gap after the sinks is cut out."""
    rows = _rows(results)
    end = max(result.num_tokens for result in results.values())
    num_sinks = 4
    old = [index for _, _, kept in rows for index in kept if index >= 2 * num_sinks]
    begin = max(min(old, default=0) - (end - min(old, default=0)) // 30, 0)
    figure = Figure(figsize=(13, 1.6 + 0.24 * len(rows)), layout="constrained")
    first, rest = figure.subplots(1, 2, sharey=True, width_ratios=(1, 14))
    for place, (_, label, kept) in enumerate(rows):
        for axes in (first, rest):
            axes.vlines(kept, place - 0.38, place + 0.38, color=COLOURS[label], linewidth=0.7)
    first.set_xlim(-1, 2 * num_sinks)
    rest.set_xlim(begin, end + (end - begin) // 100)
    first.set_ylim(len(rows) - 0.4, -0.6)
    first.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    rest.tick_params(axis="y", length=0)
    rest.xaxis.set_major_formatter(THOUSANDS)
    _cut(first, rest)
    first.set_xlabel("first tokens")
    rest.set_xlabel("token's index in the stream (the newest at the right; the gap is cut out)")
    figure.suptitle(f"Tokens still in the cache after {end:,} tokens", fontsize=12)
    figure.savefig(path, dpi=150)


def _rows(results: dict[str, StreamResult]) -> list[tuple[str, str, list[int]]]:
    """``(row name, policy, kept tokens)``; one row where all layers keep the same tokens."""
    rows = []
    for label, result in results.items():
        sets = [
            (layer, head, kept)
            for layer, heads in enumerate(result.kept.values())
            for head, kept in enumerate(heads)
        ]
        if sets and all(kept == sets[0][2] for _, _, kept in sets):
            rows.append((f"{label}, every layer", label, sets[0][2]))
            continue
        many = len(sets) > len(result.kept)
        rows += [
            (f"{label}, layer {layer}" + (f", head {head}" if many else ""), label, kept)
            for layer, head, kept in sets
        ]
    return rows


def _cut(left: Axes, right: Axes) -> None:
    """Draw the two axes as one with a piece missing."""
    left.spines["right"].set_visible(False)
    right.spines["left"].set_visible(False)
    marks = {"marker": [(-1, -2), (1, 2)], "markersize": 8, "color": "k", "linestyle": "none"}
    left.plot([1, 1], [0, 1], transform=left.transAxes, clip_on=False, **marks)
    right.plot([0, 0], [0, 1], transform=right.transAxes, clip_on=False, **marks)
