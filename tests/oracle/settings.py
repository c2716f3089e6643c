# SPDX-License-Identifier: Apache-2.0
"""A user's policy settings as the oracle's: simulation, score rule, strides.

Defaults are written out here a second time, on purpose: the oracle shares nothing with the plugin.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tests.oracle.dgc import ClusterSim, DGCSim, importance
from tests.oracle.draws import draws
from tests.oracle.model import paper_gamma
from tests.oracle.policies import (
    BeehiveSim,
    CascadeSim,
    DrawnSim,
    H2OSim,
    LazySim,
    OverflowSim,
    Score,
    Sim,
    WindowSim,
)
from tests.oracle.recall import RecallSettings
from tests.oracle.units import UnitSim, in_units, unit_of


class PerToken(Sim):
    """Checks after every token what a simulation checks at a stride's end.

    The plugin counts cached tokens as a function of the tokens seen alone, so that a request's
    pages do not depend on how its prompt is cut.
    """

    def __init__(self, inner: Sim) -> None:
        self.inner = inner
        self.num_sinks, self.sinks = inner.num_sinks, inner.sinks
        self.normalise = inner.normalise

    def insert(self, token: int, score: Score) -> int | None:
        lost = self.inner.insert(token, score)
        self.inner.end_stride(score)
        self.closest_contest = self.inner.closest_contest
        return lost

    def tokens(self) -> list[int]:
        return self.inner.tokens()


def beehive_sizes(settings: dict[str, Any]) -> list[Any]:
    """Window, stride, threshold, and what the threshold counts.

    The theorem fixes the ratio of threshold and window, not how it is rounded: there is a default
    only where it comes out even.
    """
    stride, counts = settings.get("stride", 5), settings.get("threshold_counts", "middle")
    window, threshold = settings.get("window"), settings.get("threshold")
    if window is None and threshold is None and counts == "middle":
        ratio = Fraction(stride**2 + 1, stride + 1) if stride % 2 else Fraction(stride - 1)
        window = settings["budget"] / (1 + ratio)
        threshold = settings["budget"] - window
    if window is None or threshold is None or int(window) != window:
        raise ValueError("write out beehive's window and threshold")
    return [int(window), stride, int(threshold), counts]


def dgc_sizes(settings: dict[str, Any]) -> tuple[int, int]:
    """Global and recent tokens, or units where the settings count these."""
    size = settings.get("global_size") or max(settings["budget"] // 5, 1)
    return size, settings["budget"] - size


def make_dgc(settings: dict[str, Any], sinks: int) -> Sim:
    rule = settings.get("importance", "tfidf")
    if rule == "cluster":
        return ClusterSim(sinks, *dgc_sizes(settings))
    return DGCSim(
        sinks,
        *dgc_sizes(settings),
        normalise=rule == "attention",
        by_importance=settings.get("order") == "importance",
        exact=rule != "attention" and unit_of(settings) == 1,  # a unit's sum is rounded
        exact_zero=rule != "attention",
        tie=settings.get("tie", "incoming"),
    )


def make_sim(settings: dict[str, Any]) -> Sim:
    """A fresh simulation of these settings."""
    if unit_of(settings) == 1:
        return simulation(settings)
    return UnitSim(simulation(in_units(settings)), unit_of(settings))


def with_prompt(settings: dict[str, Any], prompt_len: int) -> dict[str, Any]:
    """The settings of a request: the kept part of its prompt, in whole units, never leaves."""
    unit = unit_of(settings)
    kept = -(-min(prompt_len, settings.get("keep_prompt", 0)) // unit) * unit
    sinks = 0 if settings["name"] == "window" else unit if unit > 1 else 4
    return {**settings, "num_sinks": max(settings.get("num_sinks", sinks), kept)}


def simulation(settings: dict[str, Any]) -> Sim:
    """Of single tokens, or of units where the settings count these."""
    name, budget = settings["name"], settings["budget"]
    sinks = settings.get("num_sinks", 0 if name == "window" else 4)
    overflow = settings.get("overflow", 1)
    if name == "lazy":
        drop = settings.get("slack", 24), settings.get("max_drop", 8)
        return PerToken(LazySim(sinks, budget, settings.get("overflow", 32), *drop))
    if name == "random":
        window = settings.get("window") or max(budget // 2, 1)
        return PerToken(DrawnSim(sinks, budget, window, overflow=overflow))
    if name == "h2o":
        window = settings.get("window", budget // 2)
        normalise = settings.get("normalise", False)
        return PerToken(H2OSim(sinks, budget, window, normalise, overflow))
    if name == "beehive":
        sim: Any = PerToken(BeehiveSim(sinks, *beehive_sizes(settings)))
        sim.budget = budget
    elif name == "dgc":
        sim = make_dgc(settings, sinks)
    elif name in ("sink", "window"):
        sim = WindowSim(sinks, budget)
    if name == "cascade":
        paper = settings.get("preset") == "paper"
        num = settings.get("num_subcaches", 4)
        sim = CascadeSim(
            sinks,
            num,
            budget // num,
            base=settings.get("cascade_base", 2),
            eager_fill=settings.get("eager_fill", not paper),
            tie=settings.get("tie", "resident" if paper else "incoming"),
        )
    return sim if overflow == 1 else OverflowSim(sim, overflow)


def score_rule(settings: dict[str, Any]) -> dict[str, float]:
    """How a probability changes a token's score: ``decay`` and ``weight``, whatever the unit."""
    if settings["name"] in ("h2o", "beehive", "dgc", "random"):
        return {"decay": 1.0, "weight": 1.0}
    window = settings["budget"] // settings.get("num_subcaches", 4)
    gamma = settings.get("ema_gamma") or paper_gamma(max(window, 1))
    return {"decay": gamma, "weight": 1 - gamma}


def logit_scale(settings: dict[str, Any]) -> Callable[[int], float] | None:
    """BUZZ's log n over the tokens seen, base 512."""
    if not settings.get("log_n"):
        return None
    return lambda index: math.log(index + 1) / math.log(512)


def token_scores(
    settings: dict[str, Any],
    tokens: Sequence[int],
    ends: Callable[[int], bool],
    corpus: Sequence[Sequence[int]] | None = None,
    layer_name: str = "model.layers.{}.self_attn.attn",
) -> Callable[[int, int], list[float]] | None:
    """What each token is worth in a layer and head set, where attention does not decide."""
    if settings["name"] == "random":
        seed, unit = settings.get("seed", 0), unit_of(settings)
        return lru_cache(
            lambda layer, of_set: draws(seed, layer_name.format(layer), len(tokens), unit)(of_set)
        )
    rule = settings.get("importance", "tfidf")
    if settings["name"] != "dgc" or not rule.startswith("tfidf"):
        return None
    recent = dgc_sizes(settings)[1]
    if unit_of(settings) > 1:
        recent = unit_of(settings) * dgc_sizes(in_units(settings))[1]
    worth = importance(tokens, rule, recent, ends, corpus)
    return lambda layer, of_set: worth


def oracle_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``stream``."""
    per_head = "per_kv_head" if settings["name"] == "beehive" else "homogeneous"
    return {
        "stride": settings["prefill_stride"],
        "make_sim": lambda: make_sim(settings),
        "head_policy": settings.get("head_policy", per_head),
        "head_reduction": settings.get("head_reduction", "mean"),
        "logit_scale": logit_scale(settings),
        "recall": RecallSettings.of(settings),
        **score_rule(settings),
    }
