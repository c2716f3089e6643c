# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: perplexity while a novel goes past the positions that a model has."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK = 64
"""Tokens whose mean is kept as one number."""

SMOOTHED = 16
"""Blocks that a point of the picture is the mean of: 1,024 tokens."""

COLOURS = {
    "stock vLLM": "#222222",
    "window": "#d55e00",
    "sink": "#009e73",
    "cascade": "#0072b2",
    "sink, recall": "#cc79a7",
}
DARK = "#555555"
TICKS = (5, 7, 10, 15, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 700, 1000)


def block_means(nll: np.ndarray) -> list[float]:
    """Mean of every ``BLOCK`` values; what is left over at the end makes no block."""
    whole = len(nll) // BLOCK
    return [round(float(mean), 4) for mean in nll[: whole * BLOCK].reshape(whole, BLOCK).mean(1)]


def curve(blocks: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """``(tokens read, perplexity of the last SMOOTHED blocks)``; of as many as there are at first.

    The first point has a quarter of them behind it.
    """
    sums = np.concatenate([[0.0], np.cumsum(blocks)])
    ends = np.arange(SMOOTHED // 4, len(blocks) + 1)
    begins = np.maximum(ends - SMOOTHED, 0)
    return ends * BLOCK, np.exp((sums[ends] - sums[begins]) / (ends - begins))


def digest(stream: dict[str, Any]) -> str:
    """Of the numbers that the picture shows; the picture carries it (PNG text ``Source``)."""
    return hashlib.sha256(json.dumps(stream, sort_keys=True).encode()).hexdigest()


def draw(stream: dict[str, Any], path: Path) -> None:
    """Write the picture of a demo's ``stream`` data."""
    from matplotlib.figure import Figure  # not in every engine's process

    positions, longest = stream["positions"], stream["tokens"]
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.subplots()
    for label, arm in stream["arms"].items():
        at, values = curve(arm["mean_nll_per_block"])
        if len(at):
            _line(axes, label, arm, at, values)
    axes.set_xlim(0, longest * 1.2)
    _beyond(axes, positions, longest)
    _axes(axes, longest)
    model = stream["model"]
    axes.set_title(
        f"A novel read past the {positions:,} positions of {model}, by vLLM", fontsize=12, pad=10
    )
    figure.savefig(path, dpi=140, metadata={"Source": digest(stream)})


def _line(
    axes: "Axes", label: str, arm: dict[str, Any], at: np.ndarray, values: np.ndarray
) -> None:
    """One arm's line, with its name and its memory where it ends."""
    stock, colour = bool(arm["refusal"]), COLOURS[label]
    axes.plot(at, values, color=colour, linewidth=2.2 if stock else 1.8, zorder=3 if stock else 2)
    memory = f"{arm['peak_kv_bytes'] / 2**20:,.1f} MiB"
    style = {"textcoords": "offset points", "color": colour, "fontsize": 10, "fontweight": "bold"}
    end = at[-1], values[-1]
    if stock:
        axes.plot(*end, marker="X", color=colour, markersize=10, zorder=4)
        text = f"stock vLLM stops\n({memory})"
        axes.annotate(text, end, xytext=(-10, -26), ha="right", va="top", **style)
    else:
        up = {"window": 0, "sink": 9, "cascade": -9, "sink, recall": -27}[label]
        text = f"{label} ({memory})"
        axes.annotate(text, end, xytext=(8, up), ha="left", va="center", **style)


def _beyond(axes: "Axes", positions: int, longest: int) -> None:
    """Mark where the model's positions end."""
    axes.axvline(positions, color=DARK, linestyle="--", linewidth=1.2)
    axes.axvspan(positions, longest, color="#f2e8d5", alpha=0.6, zorder=0, linewidth=0)
    place = {"xycoords": ("data", "axes fraction"), "xytext": (6, 0), "textcoords": "offset points"}
    style = {"va": "top", "fontsize": 9.5, "color": DARK}
    text = f"the model's {positions:,} positions end here"
    axes.annotate(text, (positions, 0.98), **place, **style)


def _axes(axes: "Axes", longest: int) -> None:
    from matplotlib.ticker import NullFormatter

    low, high = axes.get_ylim()
    axes.set_yscale("log")
    axes.set_ylim(low * 0.85, high * 1.1)
    axes.set_yticks([tick for tick in TICKS if low * 0.85 <= tick <= high * 1.1])
    axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    step = 2 ** max(round(np.log2(longest / 6)), 0)
    axes.set_xticks(range(0, longest + 1, step))
    axes.set_xlabel("tokens of the novel read")
    axes.set_ylabel(f"perplexity of the last {BLOCK * SMOOTHED:,} tokens\n(lower is better; log)")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
