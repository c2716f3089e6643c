# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of sessions, ``vllm:kv_session*``, beside those of the policy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig

from vllm_cascade.engine.stat_logger import StatLogger

PREFIX = "vllm:kv_session_"
TIERS = ("memory", "disk")
MISSES = {
    "no_session": "its prompt begins with no session",
    "diverged": "its prompt goes on after a session's prompt, but not with its answer",
    "slow": "it waited too long for a file, and read its prompt",
}
"""Why a request started from no session.

A request that starts is a hit or a miss; one that a snapshot of as many tokens serves is neither.
"""
LOST = {
    "not_text": "not kept: a request with images, audio or embeddings",
    "changed": "not kept: weights or adapter changed, or the adapter's files are not known",
    "memory_full": "not kept: others are being written or read, or no host memory",
    "disk_full": "not written: the folder's other sessions are pinned or in use",
    "unwritten": "not written: an error of the disk",
    "name_diverged": "lost its kv_session name to a prompt that did not begin with it",
    "evicted": "left its last tier",
    "expired": "was not used for the time to live",
    "damaged": "its file was cut short or altered",
    "incomplete": "its file was there at start without those of other ranks",
    "missing": "its file was gone",
    "foreign": "its file is of another model, policy, layout, type or version",
    "io": "its file could not be read",
}
"""What became of a state that was not kept, or of a session that cannot be used."""
LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
GAUGE = partial(Gauge, multiprocess_mode="mostrecent")
LOADS = partial(Histogram, buckets=LOAD_SECONDS)
LABELS = ("model_name", "engine")
METRICS: dict[str, tuple[Callable[..., Any], str, tuple[str, ...], Iterable[str]]] = {
    "sessions": (GAUGE, "Sessions held.", (*LABELS, "tier"), TIERS),
    "bytes": (GAUGE, "Bytes of sessions held.", (*LABELS, "tier"), TIERS),
    "hits": (Counter, "Requests that started from a session.", (*LABELS, "tier"), TIERS),
    "misses": (Counter, "Requests that started from no session.", (*LABELS, "reason"), MISSES),
    "lost": (
        Counter,
        "States that were not kept, and sessions that were dropped or cannot be used.",
        (*LABELS, "reason"),
        LOST,
    ),
    "hit_tokens": (Counter, "Tokens that these requests did not read.", LABELS, ()),
    "kept": (Counter, "Sessions kept.", LABELS, ()),
    "load_seconds": (LOADS, "Seconds until a session was read from disk.", LABELS, ()),
}
"""Class, help text, labels, and values of a third label, by field of ``SessionStats``."""


@dataclass
class SessionStats:
    """One scheduler report: levels now, and increments since the last report.

    Attributes:
        sessions, bytes: held now, by tier.
        hits: by the tier that held the session.
        misses: requests that started from none, by reason.
        lost: states that were not kept or are gone, by reason.
        load_seconds: durations of reads from disk.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    hit_tokens: int = 0
    kept: int = 0
    load_seconds: list[float] = field(default_factory=list)


class SessionStatLogger(StatLogger):
    """Exports the metrics; only used by engines that keep sessions."""

    key = "kv_sessions"

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        model = str(vllm_config.model_config.served_model_name)
        self.metrics = {index: {} for index in engine_indexes}
        for key, (make, text, labels, values) in METRICS.items():
            name = "vllm:kv_sessions" if key == "sessions" else PREFIX + key
            metric = make(name, text, labels)
            for index, own in self.metrics.items():
                of = model, str(index)
                by_value = {value: metric.labels(*of, value) for value in values}
                own[key] = by_value or metric.labels(*of)

    def export(self, metrics: dict[str, Any], stats: SessionStats) -> None:
        for name in ("sessions", "bytes"):
            for tier, value in getattr(stats, name).items():
                metrics[name][tier].set(value)
        for name in ("hits", "misses", "lost"):
            for label, value in getattr(stats, name).items():
                metrics[name][label].inc(value)
        metrics["hit_tokens"].inc(stats.hit_tokens)
        metrics["kept"].inc(stats.kept)
        for seconds in stats.load_seconds:
            metrics["load_seconds"].observe(seconds)
