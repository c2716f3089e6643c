# SPDX-License-Identifier: Apache-2.0
"""Differences between two runs over the same tokens, with paired bootstrap intervals."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 512
FEW_DOCUMENTS = 10
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of (one run minus another), nats a token, with an interval.

    Attributes:
        units: how many things were resampled.
    """

    mean: float
    low: float
    high: float
    units: int

    def __str__(self) -> str:
        if self.units < 2:
            return f"{self.mean:+.4f}"
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


def paired_difference(
    ours: Sequence[np.ndarray], base: Sequence[np.ndarray], *, block: int = BLOCK, seed: int = 0
) -> Difference:
    """Token-weighted mean difference of two runs over the same documents.

    What is resampled, in pairs, are whole documents where there are at least ten, else blocks of
    ``block`` tokens: neighbouring tokens share a context, so they are no independent samples.

    Args:
        ours, base: one float array ``[tokens]`` a document, of equal lengths.

    Raises:
        ValueError: lengths that differ, or no token at all.
    """
    if [len(a) for a in ours] != [len(b) for b in base]:
        raise ValueError("two runs over the same tokens are needed, but their lengths differ")
    differences = [np.asarray(a) - np.asarray(b) for a, b in zip(ours, base, strict=True)]
    units = [d for d in differences if len(d)]
    if len(units) < FEW_DOCUMENTS:
        units = [part for d in units for part in np.split(d, range(block, len(d), block))]
    if not units:
        raise ValueError("no token to compare")
    sums = np.asarray([float(unit.sum()) for unit in units])
    sizes = np.asarray([float(len(unit)) for unit in units])
    mean = float(sums.sum() / sizes.sum())
    low, high = _interval(sums, sizes, seed)
    return Difference(mean, low, high, len(units))


def ratio(sums: Sequence[float], sizes: Sequence[float]) -> tuple[float, float, float]:
    """``sum(sums) / sum(sizes)`` of some units, as ``(value, low, high)``; units are resampled.

    The interval is NaN for a single unit.
    """
    over, under = np.asarray(sums, float), np.asarray(sizes, float)
    return float(over.sum() / under.sum()), *_interval(over, under, seed=0)


def _interval(sums: np.ndarray, sizes: np.ndarray, seed: int) -> tuple[float, float]:
    """Percentile interval of ``sum(sums) / sum(sizes)`` over resampled pairs."""
    from scipy.stats import bootstrap

    if len(sums) < 2:
        return float("nan"), float("nan")
    found = bootstrap(
        (sums, sizes),
        lambda s, n, axis: s.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def mean_of_groups(
    groups: Sequence[np.ndarray], base: Sequence[np.ndarray] | None = None
) -> tuple[float, float, float]:
    """Mean of the groups' means, as ``(value, low, high)``; groups weigh alike.

    Members are resampled within their group. The interval is NaN if no group has two.

    Args:
        groups: a float array a group.
        base: of the same members. The value is then the share of its mean; NaN if that is 0.
    """
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(group), size=(RESAMPLES, len(group))) for group in groups]

    def means(of: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
        resampled = [
            np.asarray(group)[drawn].mean(1) for group, drawn in zip(of, draws, strict=True)
        ]
        return float(np.mean([np.mean(group) for group in of])), np.mean(resampled, axis=0)

    value, drawn = means(groups)
    if base is not None:
        whole, of = means(base)
        with np.errstate(divide="ignore", invalid="ignore"):
            value, drawn = float(np.float64(value) / whole), drawn / of
    if max(map(len, groups)) < 2 or not np.isfinite(drawn).all():
        return value, float("nan"), float("nan")
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [outside, 100 - outside])
    return value, float(low), float(high)


def perplexity(nll: Sequence[np.ndarray]) -> float:
    """Of all tokens together; documents weigh by their tokens."""
    return float(np.exp(np.concatenate(nll).mean()))


def perplexity_per_document(nll: Sequence[np.ndarray]) -> float:
    """Mean of the documents' perplexities."""
    return float(np.mean([np.exp(document.mean()) for document in nll]))


def position_bins(longest: int) -> list[tuple[int, int]]:
    """Positions ``[begin, end)`` that double in width: 0-64, 64-128, 128-256, ..."""
    edges = [0, 64]
    while edges[-1] < longest:
        edges.append(edges[-1] * 2)
    return [
        (begin, min(end, longest)) for begin, end in itertools.pairwise(edges) if begin < longest
    ]
