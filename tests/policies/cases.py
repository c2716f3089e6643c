# SPDX-License-Identifier: Apache-2.0
"""Random settings of every policy, small enough for a simulation, and scores with ties."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

TIES = st.sampled_from(["incoming", "resident"])
sizes = st.integers(1, 12)


@st.composite
def raw_settings(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Random settings that are valid for a policy, every size written out."""
    raw: dict[str, Any] = {"name": name, "num_sinks": draw(st.integers(0, 4))}
    raw["overflow"] = draw(st.sampled_from([1, 1, 2, 3, 7, 20]))
    raw["budget"] = draw(st.integers(2, 40))
    if name == "window":
        raw["num_sinks"] = 0
    if name == "cascade":
        num, base = draw(st.integers(1, 3)), draw(st.integers(2, 3))
        raw |= {"num_subcaches": num, "cascade_base": base, "eager_fill": draw(st.booleans())}
        raw["budget"] = num * base ** (num - 1) * draw(st.integers(1, 4))
        raw["tie"] = draw(TIES)
    if name == "lazy":
        raw |= {"slack": draw(st.integers(0, 25)), "max_drop": draw(st.integers(0, 25))}
    if name == "h2o":
        raw |= {"window": draw(st.integers(1, raw["budget"])), "normalise": draw(st.booleans())}
    if name == "random":
        raw |= {"window": draw(st.integers(1, raw["budget"])), "seed": draw(st.integers(0, 9))}
    if name == "dgc":
        raw |= {"importance": draw(st.sampled_from(["tfidf", "attention", "cluster"]))}
        raw |= {"global_size": draw(st.integers(1, raw["budget"] - 1))}
        raw["tie"] = draw(TIES)
    if name == "beehive":
        raw |= {"window": draw(sizes), "stride": draw(st.integers(3, 8)), "threshold": draw(sizes)}
        raw["threshold_counts"] = draw(st.sampled_from(["middle", "new"]))
        raw["budget"] = 60
    return raw


TOKEN_COUNTS = ("budget", "num_sinks", "overflow", "slack", "max_drop", "window")
TOKEN_COUNTS += ("threshold", "global_size")


@st.composite
def raw_unit_settings(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """The same with units of several tokens."""
    raw = draw(raw_settings(name).filter(lambda raw: raw.get("importance") != "cluster"))
    unit = draw(st.sampled_from([2, 3, 4, 8]))
    raw |= {key: raw[key] * unit for key in TOKEN_COUNTS if key in raw}
    if raw["overflow"] == unit:
        raw["overflow"] = draw(st.sampled_from([1, unit]))  # which are the same
    if name == "cascade":  # also fewer units a sub-cache than it skips tokens
        num, base = raw["num_subcaches"], raw["cascade_base"]
        step = math.lcm(num * base ** (num - 1), num * unit)
        raw["budget"] = step * draw(st.integers(1, 3))
    return raw | {"unit": unit, "prefill_stride": unit * draw(st.integers(1, 4))}


def literal_scores(rng: np.random.Generator, num: int, values: int) -> list[float]:
    """Few different values make ties, many make every token a possible loser."""
    return rng.integers(0, values, num).astype(float).tolist()


class LiteralScores:
    """Scores of a literal simulation, added up in fp64, token by token.

    Args:
        sim: the simulation, whose tokens are scored.
        rule: ``decay`` and ``weight`` of the scores.
        probs: ``[t, i]``, attention of query ``t`` to token ``i``; or ``[i]``, a score per token.
    """

    def __init__(self, sim: Any, rule: dict[str, Any], probs: np.ndarray) -> None:
        self._sim, self._rule, self._probs = sim, rule, probs
        self._scores: dict[int, float] = {}
        self._now = -1

    def see(self, t: int) -> None:
        """Score the cached tokens and token ``t`` by the query of token ``t``."""
        self._now, rule = t, self._rule
        if self._probs.ndim == 1:
            self._scores[t] = float(self._probs[t])
            return
        self._scores = {
            i: rule["decay"] * self._scores.get(i, 0.0) + rule["weight"] * float(self._probs[t, i])
            for i in [*self._sim.tokens(), t]
        }

    def __call__(self, i: int) -> float:
        """The compared value of token ``i``."""
        age = self._now + 1 - self._sim.first_of(i) if self._sim.normalise else 1
        return self._scores.get(i, 0.0) / age
