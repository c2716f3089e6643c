# SPDX-License-Identifier: Apache-2.0
"""The demo's two pictures: perplexity over the stream, and the tokens each policy still holds."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.running.stream import StreamResult

COLOURS = {
    "window": "#d55e00",
    "sink": "#009e73",
    "cascade": "#0072b2",
    "cascade per KV head": "#cc79a7",
    "beehive": "#e69f00",
    "lazy": "#56b4e9",
    "dgc": "#8c6d31",
    "h2o": "#7b5aa6",
    "full": "#222222",
}
SPREAD = ("cascade", "cascade per KV head")
"""Policies of which every layer and head set gets a row of its own; of others, the first."""
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def sliding_perplexity(nll: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Perplexity of the ``width`` tokens up to each token: ``(token indices, values)``."""
    width = min(width, len(nll))
    sums = np.concatenate([[0.0], np.cumsum(nll)])
    return np.arange(width, len(nll) + 1), np.exp((sums[width:] - sums[:-width]) / width)


def perplexity(results: dict[str, StreamResult], native_len: int, path: Path) -> None:
    """Left: the stream's beginning, where full attention can still run. Right: all of it.

    The text itself moves perplexity far more than any policy does, so a second row of axes shows
    every policy relative to the plain window.
    """
    longest = max(result.num_tokens for result in results.values())
    ends = (min(4 * native_len, longest), longest)
    widths = (native_len // 4, min(4 * native_len, max(longest // 8, 1)))
    figure = Figure(figsize=(12, 7), layout="constrained")
    grid = figure.subplots(
        2, 2, sharex="col", sharey="row", width_ratios=(1, 1.7), height_ratios=(1.5, 1)
    )
    for column, (end, width) in enumerate(zip(ends, widths, strict=True)):
        _perplexity_lines(grid[0, column], grid[1, column], results, width, end)
        grid[1, column].set_xlabel("tokens streamed")
        grid[1, column].set_xlim(0, end)
    for axes in grid.flat:
        axes.axvline(native_len, color="#888888", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter(THOUSANDS)
        axes.grid(alpha=0.25)
    _annotate_limit(grid[0, 0], native_len)
    grid[0, 0].set_ylabel("perplexity (lower is better)")
    grid[1, 0].set_ylabel("difference from window, %")
    grid[0, 0].set_title(f"the beginning (mean of {widths[0]:,} tokens)", fontsize=10)
    grid[0, 1].set_title(f"the whole stream (mean of {widths[1]:,} tokens)", fontsize=10)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.suptitle("Perplexity while a book streams through a bounded KV cache")
    figure.savefig(path, dpi=150)


def _annotate_limit(axes: Axes, native_len: int) -> None:
    axes.annotate(
        f"the model's\n{native_len:,} positions end",
        (native_len, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color="#555555",
        bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1},
    )


def _perplexity_lines(
    top: Axes, bottom: Axes, results: dict[str, StreamResult], width: int, end: int
) -> None:
    _, reference = sliding_perplexity(results["window"].nll[: end - 1], width)
    for label, result in results.items():
        if len(result.nll) < width:
            continue
        at, values = sliding_perplexity(result.nll[: end - 1], width)
        relative = 100 * (values / reference[: len(values)] - 1)
        step = max(len(at) // 2000, 1)
        front, wide = label == "full", label in ("full", "window")  # seen around other lines
        for axes, line in ((top, values), (bottom, relative)):
            axes.plot(
                at[::step],
                line[::step],
                label=label,
                color=COLOURS[label],
                linewidth=2.6 if wide else 1.1,
                linestyle=":" if front else "-",
                zorder=3 if front else 2,
            )


def kept_tokens(results: dict[str, StreamResult], path: Path) -> None:
    """One row of ticks per policy, layer and head set; the long gap after the sinks is cut out.

    The right part begins where the cascades' oldest token is; a row that holds older ones (heavy
    hitters may be from anywhere) says how many.
    """
    rows = _rows(results)
    end = max(result.num_tokens for result in results.values())
    num_sinks = 4
    old = [
        index
        for _, label, kept in rows
        for index in kept
        if index >= 2 * num_sinks and label in SPREAD
    ]
    begin = max(min(old, default=0) - (end - min(old, default=0)) // 30, 0)
    rows = [
        (name + _elsewhere(kept, 2 * num_sinks, begin), label, kept) for name, label, kept in rows
    ]
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
        if label not in SPREAD:
            sets = sets[:1]
        rows += [
            (f"{label}, layer {layer}" + (f", head {head}" if many else ""), label, kept)
            for layer, head, kept in sets
        ]
    return rows


def _elsewhere(kept: list[int], begin: int, end: int) -> str:
    """How many tokens of a row are in the part that is cut out."""
    hidden = sum(begin <= index < end for index in kept)
    return f" (+{hidden} older)" if hidden else ""


def _cut(left: Axes, right: Axes) -> None:
    """Draw the two axes as one with a piece missing."""
    left.spines["right"].set_visible(False)
    right.spines["left"].set_visible(False)
    marks = {"marker": [(-1, -2), (1, 2)], "markersize": 8, "color": "k", "linestyle": "none"}
    left.plot([1, 1], [0, 1], transform=left.transAxes, clip_on=False, **marks)
    right.plot([0, 0], [0, 1], transform=right.transAxes, clip_on=False, **marks)
