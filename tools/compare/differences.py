# SPDX-License-Identifier: Apache-2.0
"""How the results of one arm differ between two checkouts."""

from typing import Any

import numpy as np

Found = dict[str, Any]
"""The results of an arm, as ``child.py`` records them."""


def differences(ours: Found, theirs: Found) -> list[str]:
    """One line for each kind of result that differs; none if all bytes are equal."""
    lines = [
        f"fails in the {which} checkout: {found['error'].strip()}"
        for which, found in (("first", ours), ("second", theirs))
        if "error" in found
    ]
    if lines:
        return lines
    pages = [[page for piece in found["pages"] for page in piece] for found in (ours, theirs)]
    return [
        *_of_logprobs(*(np.asarray(found["logprobs"], np.float64) for found in (ours, theirs))),
        *_of_lists("generated tokens", ours["tokens"], theirs["tokens"]),
        *_of_lists("requests' cached prompt tokens", ours["cached"], theirs["cached"]),
        *_of_kept(ours["kept"], theirs["kept"]),
        *_of_lists("pages", *pages, show=False),
        *_of_counters(ours["counters"], theirs["counters"]),
    ]


def counters_of_one(ours: Found, theirs: Found) -> set[str]:
    """Counters that only one checkout has: a new metric makes no result different."""
    return set(ours.get("counters", {})) ^ set(theirs.get("counters", {}))


def described(found: Found) -> str:
    """The amount of each kind of result."""
    if "error" in found:
        return "an error"
    pages = sum(page != b"" for piece in found["pages"] for page in piece)
    return (
        f"{len(found['logprobs']):,} log-probabilities, {len(found['kept']):,} kept sets, "
        f"{pages} pages, {found['counters']['evicted_tokens']:,} tokens evicted"
    )


def _of_logprobs(ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    if ours.shape != theirs.shape:
        return [f"log-probabilities: {len(ours):,} and {len(theirs):,}"]
    differ = ours.view(np.uint64) != theirs.view(np.uint64)
    if not differ.any():
        return []
    first, most = int(differ.argmax()), abs(ours - theirs).max()
    return [
        f"log-probabilities: {differ.sum():,} of {len(ours):,} differ, by at most {most:.1e}; "
        f"the first is number {first:,}"
    ]


def _of_lists(name: str, ours: list[Any], theirs: list[Any], show: bool = True) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{name}: {len(ours):,} and {len(theirs):,}"]
    differ = [i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    if not differ:
        return []
    first = differ[0]
    values = f": {ours[first]} and {theirs[first]}" if show else ""
    return [
        f"{name}: {len(differ):,} of {len(ours):,} differ; the first is number {first:,}{values}"
    ]


def _of_kept(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"kept sets: {len(ours):,} and {len(theirs):,}"]
    differ = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    if not differ:
        return []
    one, other = differ[0]
    where = f"{one['layer']} after {one['end']:,} tokens"
    heads = zip(one["tokens"], other["tokens"], strict=False)
    tokens = sum(len(set(mine) ^ set(its)) for mine, its in heads)
    return [
        f"kept sets: {len(differ):,} of {len(ours):,} differ; the first is {where}, in {tokens} "
        "tokens"
    ]


def _of_counters(ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    return [
        f"counter {name}: {ours[name]} and {theirs[name]}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
