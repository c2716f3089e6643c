# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a policy, beside those of vLLM.

The scheduler counts. The number of cached tokens is a function of the number of tokens seen, so a
step takes a few table look-ups and no device synchronization. vLLM's statistics of each step carry
the counts to the front-end (``patches/stat_loggers.py``).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_cascade.cache.manager import KVPolicyManager
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.session_metrics import SessionStats
from vllm_cascade.engine.stat_logger import StatLogger
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.strides import count_strides
from vllm_cascade.recall.memory import RecallMemory

Row = TypeVar("Row", bound=tuple[Any, ...])
"""A tuple that begins with a request."""
PREFIX = "vllm:kv_policy_"
GAUGES = {
    "cached_tokens": "Tokens that running requests have cached, per layer and head.",
    "recalled_tokens": "Evicted tokens that running requests have cached again.",
    "stored_tokens": "Evicted tokens that wait in host memory for running requests.",
    "recall_memory_bytes": "Host memory that evicted tokens of running requests and of snapshots "
    "take, over all layers and ranks.",
    "recall_memory_reserved_bytes": "Host memory reserved for running requests.",
    "recall_memory_limit_bytes": "Most host memory that evicted tokens may take.",
    "pages": "KV cache pages that requests hold.",
    "promised_pages": "Free KV cache pages that running requests may still need.",
    "saved_bytes": "Bytes that full attention would hold for the running requests, less the "
    "bytes that they hold; negative while requests are shorter than the budget.",
}
COUNTERS = {
    "evicted_tokens": "Number of tokens evicted from the KV cache, per layer and head.",
    "strides": "Number of strides attended; a decoded token is one.",
    "snapshot_hits": "Number of prompts that started from a snapshot of the cache.",
}


@dataclass
class KVPolicyStats:
    """One scheduler report: levels for ``GAUGES``, increments since the last for ``COUNTERS``.

    ``saved_bytes`` is summed over all layers and ranks. It is negative for short requests, because
    pages hold metadata in addition to keys and values.
    """

    cached_tokens: int = 0
    recalled_tokens: int = 0
    stored_tokens: int = 0
    recall_memory_bytes: int = 0
    recall_memory_reserved_bytes: int = 0
    recall_memory_limit_bytes: int = 0
    pages: int = 0
    promised_pages: int = 0
    saved_bytes: int = 0
    evicted_tokens: int = 0
    strides: int = 0
    snapshot_hits: int = 0


@dataclass
class KVPolicySchedulerStats(SchedulerStats):
    """vLLM's statistics of a step, plus those of the policy and of sessions; None if off."""

    kv_policy: KVPolicyStats | None = None
    kv_sessions: SessionStats | None = None


def saved_bytes(spec: KVPolicySpec, lengths: Sequence[int], pages: int) -> int:
    """Bytes that streams of ``lengths`` tokens hold without a policy, less those of ``pages``.

    Counts one layer. With several kinds of layers, counts all layers of a rank.
    """
    if not spec.kinds:
        full = sum(cdiv(length, spec.block_size) for length in lengths)
        return full * spec.row_bytes - pages * spec.page_size_bytes
    stock = (kind.stock_bytes(n, spec.block_size) for kind in spec.kinds for n in lengths)
    return sum(stock) - pages * sum(kind.page_bytes for kind in spec.kinds)


class Meter:
    """Counts tokens, strides and pages of a scheduler's requests.

    Args:
        manager: the page manager.
        copies: of a page: layers times tensor-parallel ranks, or only ranks if layers are of
            several kinds.
        schedule_of: returns a request's schedule.
        states: page managers of recurrent states. A state has the same size without a policy, so
            it saves nothing.
    """

    def __init__(
        self,
        manager: KVPolicyManager,
        copies: int,
        schedule_of: Callable[[Request], Schedule],
        states: Sequence[SingleTypeKVCacheManager] = (),
    ) -> None:
        self._manager, self._copies, self._states = manager, copies, states
        self._schedule_of = schedule_of
        self._grown, self._snapshot_hits = KVPolicyStats(), 0

    def step(self, scheduled: Iterable[tuple[Request, int, int, int]]) -> None:
        """Count a step's tokens, or its accepted drafts.

        Args:
            scheduled: requests, each with the index of its first token, the number of tokens and
                the length of its prompt; 0 for drafts, since a streaming prompt may have grown.
        """
        for schedule, rows in self._by_schedule(scheduled):
            first, num, prompt = np.asarray([row[1:] for row in rows], dtype=np.int64).T
            end = first + num
            grown = schedule.counts(end) - schedule.counts(first)
            self._grown.evicted_tokens += int((num - grown).sum())
            stride, unit = schedule.policy.prefill_stride, schedule.unit
            strides = count_strides(first, end, prompt, stride, unit)
            self._grown.strides += int(strides.sum())

    def report(
        self,
        requests: dict[str, Request],
        snapshot_hits: int,
        memory: RecallMemory | None = None,
    ) -> KVPolicyStats:
        """The current levels, and the counts since the last report.

        Args:
            requests: all unfinished requests, by id.
            snapshot_hits: total since the engine started.
            memory: host memory of evicted tokens; None: nothing is recalled.
        """
        stats, self._grown = self._grown, KVPolicyStats()
        if memory is not None:
            stats.recall_memory_bytes = memory.used_bytes
            stats.recall_memory_reserved_bytes = memory.reserved_bytes
            stats.recall_memory_limit_bytes = memory.limit_bytes
        stats.snapshot_hits = snapshot_hits - self._snapshot_hits
        self._snapshot_hits = snapshot_hits
        spec, blocks_of = self._manager.kv_cache_spec, self._manager.req_to_blocks.items()
        held = [(requests[name], len(b)) for name, b in blocks_of if b and name in requests]
        pages = sum(num for _, num in held)
        states = sum(len(b) for m in self._states for b in m.req_to_blocks.values())
        stats.pages, stats.promised_pages = pages + states, self._manager.reserved_pages()
        lengths = [request.num_computed_tokens for request, _ in held]
        stats.saved_bytes = saved_bytes(spec, lengths, pages) * self._copies
        for schedule, rows in self._by_schedule(held):
            num = np.asarray([request.num_computed_tokens for request, _ in rows], dtype=np.int64)
            stats.cached_tokens += int(schedule.positions(num).sum())
            recall = schedule.policy.recall
            if recall:
                stored = schedule.evicted(num).clip(
                    max=schedule.policy.recall_store // schedule.unit
                )
                stats.stored_tokens += int(stored.sum()) * schedule.unit
                stats.recalled_tokens += int(schedule.recalled(num).sum()) * schedule.unit
        return stats

    def _by_schedule(self, rows: Iterable[Row]) -> Iterable[tuple[Schedule, list[Row]]]:
        groups: dict[Schedule, list[Row]] = {}
        for row in rows:
            groups.setdefault(self._schedule_of(row[0]), []).append(row)
        return groups.items()


class KVPolicyStatLogger(StatLogger):
    """Exports ``vllm:kv_policy_*`` on ``/metrics``; only used by engines with a policy."""

    key = "kv_policy"

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        policy = policy_of(vllm_config.additional_config)
        assert policy is not None
        labels = ("model_name", "engine", "policy")
        model = vllm_config.model_config.served_model_name
        metrics: dict[str, Gauge | Counter] = {
            name: Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        metrics |= {name: Counter(PREFIX + name, text, labels) for name, text in COUNTERS.items()}
        self.metrics = {
            index: {
                name: metric.labels(model, str(index), policy.name)
                for name, metric in metrics.items()
            }
            for index in engine_indexes
        }

    def export(self, metrics: dict[str, Any], stats: KVPolicyStats) -> None:
        for name in GAUGES:
            metrics[name].set(getattr(stats, name))
        for name in COUNTERS:
            metrics[name].inc(getattr(stats, name))
