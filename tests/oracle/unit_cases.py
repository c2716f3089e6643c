# SPDX-License-Identifier: Apache-2.0
"""Settings with units for whoever compares the plugin with the oracle.

Every policy with units of 1, 8, 16 and 32 tokens, where attention decides with both head policies,
and variants. Budgets are small, so that a stream wraps its cache several times; most prompts end
inside a unit. A unit of 32 is also a page where blocks have 32 tokens: there `unit: "page"` must
do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnitCase:
    """A policy as a user writes it, and a stream: `total` tokens, the first `prompt` a prompt."""

    id: str
    settings: dict[str, Any]
    prompt: int
    total: int


HEADS = {"homogeneous": "all", "per_kv_head": "each"}

# By unit: sizes that it divides. Cascades: N * 2^(N - 1) divides the budget in units.
CASCADE: dict[int, dict[str, Any]] = {
    1: {"budget": 96, "prefill_stride": 64},
    8: {"budget": 96, "num_subcaches": 3, "prefill_stride": 16},
    16: {"budget": 128, "num_subcaches": 2, "prefill_stride": 64},
    32: {"budget": 128, "num_subcaches": 2, "prefill_stride": 96},
}
H2O: dict[int, dict[str, Any]] = {
    1: {"budget": 96, "prefill_stride": 16},
    8: {"budget": 104, "prefill_stride": 64},
    16: {"budget": 128, "window": 32, "prefill_stride": 16},
    32: {"budget": 160, "prefill_stride": 128},
}
BEEHIVE: dict[int, dict[str, Any]] = {
    1: {"budget": 96, "window": 16, "threshold": 80, "prefill_stride": 64},
    8: {"budget": 96, "window": 16, "threshold": 80, "prefill_stride": 64},
    16: {"budget": 128, "window": 32, "threshold": 96, "stride": 3, "prefill_stride": 48},
    32: {"budget": 160, "window": 32, "threshold": 128, "stride": 3, "prefill_stride": 128},
}
DGC: dict[int, dict[str, Any]] = {
    1: {"budget": 96, "prefill_stride": 64},
    8: {"budget": 96, "prefill_stride": 16},
    16: {"budget": 160, "prefill_stride": 64},
    32: {"budget": 160, "global_size": 64, "prefill_stride": 256},
}
SINK: dict[int, dict[str, Any]] = {
    1: {"budget": 96, "prefill_stride": 64},
    8: {"budget": 96, "prefill_stride": 24},
    16: {"budget": 96, "prefill_stride": 16},
    32: {"budget": 96, "prefill_stride": 64},
}
LAZY: dict[int, dict[str, Any]] = {
    1: {"budget": 96, "prefill_stride": 64},
    8: {"budget": 96, "prefill_stride": 32},
    16: {"budget": 96, "overflow": 48, "slack": 32, "max_drop": 16, "prefill_stride": 64},
    32: {"budget": 96, "overflow": 64, "slack": 32, "max_drop": 32, "prefill_stride": 256},
}
BY_ATTENTION = {
    "cascade": CASCADE,
    "h2o": H2O,
    "beehive": BEEHIVE,
    "dgc": {unit: {**sizes, "importance": "attention"} for unit, sizes in DGC.items()},
}
BY_DRAWS = {"random": H2O}
BY_PLACE = {"window": SINK, "sink": SINK, "lazy": LAZY, "dgc": DGC}

# Left over of a prompt, for units of 8, 16 and 32: 5 5 5, 3 11 27, 7 15 31. All tokens: 4 12 28.
PROMPTS = {1: 500, 8: 517, 16: 443, 32: 607}
TOTAL = 700

EVERY_UNIT = [
    UnitCase(
        f"{name}-{unit}-{HEADS[heads]}",
        {"name": name, **sizes, "head_policy": heads, "unit": unit},
        PROMPTS[unit],
        TOTAL,
    )
    for name, table in (BY_ATTENTION | BY_DRAWS).items()
    for unit, sizes in table.items()
    for heads in HEADS
] + [
    UnitCase(
        f"{name}-text-{unit}" if name == "dgc" else f"{name}-{unit}",
        {"name": name, **sizes, "unit": unit},
        PROMPTS[unit],
        TOTAL,
    )
    for name, table in BY_PLACE.items()
    for unit, sizes in table.items()
]

TABLES = {**BY_ATTENTION, **BY_DRAWS, **BY_PLACE}


def variant(name: str, unit: int, what: str, prompt: int, **settings: Any) -> UnitCase:
    """The sizes above, with `settings` on top."""
    settings = {"name": name, **TABLES[name][unit], **settings, "unit": unit}
    return UnitCase(f"{name}-{unit}-{what}", settings, prompt, TOTAL)


GATED = {"eager_fill": False, "tie": "resident"}
EACH = {"head_policy": "per_kv_head"}
VARIANTS = [
    # Sinks: none, two units, one unit by default. Strides: of one unit, and long ones.
    variant("cascade", 8, "no-sinks", 517, num_sinks=0),
    variant("cascade", 16, "two-sinks", 517, num_sinks=32),
    variant("sink", 8, "stride-8", 443, prefill_stride=8),
    variant("sink", 16, "each", 517, **EACH),
    variant("cascade", 32, "stride-32", 517, prefill_stride=32),
    variant("cascade", 16, "stride-256", TOTAL, prefill_stride=256),
    # The prompt ends with a unit, inside the first unit, or is a stride and one token.
    variant("cascade", 8, "whole-prompt", 512),
    variant("cascade", 16, "short-prompt", 7),
    variant("h2o", 32, "stride-and-one", 129),
    # The cascade's own settings.
    variant("cascade", 8, "resident", 517, tie="resident"),
    variant("cascade", 8, "gated", 443, eager_fill=False),
    variant("cascade", 16, "gated-resident-each", 517, **GATED, **EACH),
    variant("cascade", 16, "base-3", 517, budget=96, cascade_base=3),
    variant("cascade", 8, "gamma-max", 517, ema_gamma=0.99, head_reduction="max"),
    variant("cascade", 8, "median", TOTAL, head_reduction="median"),
    # Overflow, in batches of several units, and of exactly one.
    variant("cascade", 8, "overflow", 517, overflow=24),
    variant("cascade", 16, "overflow-one", 517, overflow=16),
    variant("sink", 16, "overflow", 443, overflow=48),
    variant("h2o", 8, "overflow", 517, overflow=16),
    variant("beehive", 8, "overflow", 517, overflow=16),
    variant("dgc", 16, "attention-overflow", 517, importance="attention", overflow=32),
    # Attention per query that saw a unit; texts; combs; pruning to the budget.
    variant("h2o", 8, "normalise", 517, normalise=True),
    variant("h2o", 16, "normalise-overflow-each", 443, normalise=True, overflow=32, **EACH),
    variant("h2o", 32, "normalise", 517, normalise=True),
    variant("dgc", 8, "text-sklearn", 517, importance="tfidf_sklearn"),
    variant("dgc", 16, "text-resident", 517, tie="resident"),
    variant("beehive", 8, "new", 517, window=8, threshold=40, threshold_counts="new"),
    variant("beehive", 16, "log-n", 517, log_n=True),
    variant("lazy", 16, "plain", 443, overflow=32, slack=0, max_drop=0),
    UnitCase(
        "beehive-8-theorem",
        {"name": "beehive", "budget": 128, "prefill_stride": 64, "unit": 8},
        517,
        TOTAL,
    ),
]

CASES = EVERY_UNIT + VARIANTS

# Each policy, unit, head policy and kind of variant at least once: where engines are slow.
FEW = [
    *("window-8", "sink-16", "lazy-32", "cascade-8-all", "cascade-16-each", "cascade-32-all"),
    *("h2o-16-all", "h2o-8-normalise", "beehive-8-each", "dgc-8-all", "dgc-text-16"),
    "random-16-each",
    *("cascade-8-overflow", "cascade-8-gated", "cascade-8-resident", "cascade-1-all"),
]
