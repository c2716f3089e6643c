# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of sessions, ``vllm:kv_session*``, beside those of the policy."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig

from vllm_cascade.engine.stat_logger import StatLogger

PREFIX = "vllm:kv_session_"
TIERS = ("memory", "disk")
MISSES = {
    "no_session": "a request found no session that its prompt begins with",
    "diverged": "a prompt goes on after a session's prompt, but not with its answer",
    "not_text": "a request with images, sound or embeddings, which is not kept",
    "changed": "not kept: weights or adapter changed, or the adapter's files are not known",
    "memory_full": "a session was not kept: others are being written or read, or no host memory",
    "disk_full": "a session was not written: the folder's other sessions are pinned or in use",
    "evicted": "a session left its last tier",
    "expired": "a session was not used for the time to live",
    "unwritten": "a file could not be written",
    "damaged": "a file was cut short or altered",
    "incomplete": "a file that was there at start without those of other ranks",
    "missing": "a file was gone",
    "foreign": "a file is of another model, policy, layout, type or version",
    "io": "a file could not be read",
    "slow": "a request waited too long for a file, and read its prompt",
    "name_diverged": "a prompt did not begin with the session of its kv_session name",
}
"""Reasons why no session was there, and what each means."""
LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


@dataclass
class SessionStats:
    """One scheduler report: levels now, and increments since the last report.

    Attributes:
        sessions, bytes: held now, by tier.
        hits: by the tier that held the session.
        misses: by reason.
        load_seconds: durations of reads from disk.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    hit_tokens: int = 0
    kept: int = 0
    load_seconds: list[float] = field(default_factory=list)


class SessionStatLogger(StatLogger):
    """Exports the metrics; only used by engines that keep sessions."""

    key = "kv_sessions"

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        labels = ("model_name", "engine")
        sessions = Gauge(
            "vllm:kv_sessions", "Sessions held.", (*labels, "tier"), multiprocess_mode="mostrecent"
        )
        size = Gauge(
            f"{PREFIX}bytes",
            "Bytes of sessions held.",
            (*labels, "tier"),
            multiprocess_mode="mostrecent",
        )
        hits = Counter(f"{PREFIX}hits", "Requests that started from a session.", (*labels, "tier"))
        misses = Counter(
            f"{PREFIX}misses",
            "Requests or sessions without a state.",
            (*labels, "reason"),
        )
        tokens = Counter(f"{PREFIX}hit_tokens", "Tokens that these requests did not read.", labels)
        kept = Counter(f"{PREFIX}kept", "Sessions kept.", labels)
        load = Histogram(
            f"{PREFIX}load_seconds",
            "Seconds until a session was read from disk.",
            labels,
            buckets=LOAD_SECONDS,
        )
        model = str(vllm_config.model_config.served_model_name)
        self.metrics = {
            index: {
                "sessions": {tier: sessions.labels(model, str(index), tier) for tier in TIERS},
                "bytes": {tier: size.labels(model, str(index), tier) for tier in TIERS},
                "hits": {tier: hits.labels(model, str(index), tier) for tier in TIERS},
                "misses": {why: misses.labels(model, str(index), why) for why in MISSES},
                "hit_tokens": tokens.labels(model, str(index)),
                "kept": kept.labels(model, str(index)),
                "load_seconds": load.labels(model, str(index)),
            }
            for index in engine_indexes
        }

    def export(self, metrics: dict[str, Any], stats: SessionStats) -> None:
        for name in ("sessions", "bytes"):
            for tier, value in getattr(stats, name).items():
                metrics[name][tier].set(value)
        for name in ("hits", "misses"):
            for label, value in getattr(stats, name).items():
                metrics[name][label].inc(value)
        metrics["hit_tokens"].inc(stats.hit_tokens)
        metrics["kept"].inc(stats.kept)
        for seconds in stats.load_seconds:
            metrics["load_seconds"].observe(seconds)
