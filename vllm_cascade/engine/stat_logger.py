# SPDX-License-Identifier: Apache-2.0
"""Base class of loggers that export one field of the scheduler's statistics."""

from abc import abstractmethod
from typing import Any, ClassVar

from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class StatLogger(AggregateStatLoggerBase):
    """Exports a field of ``KVPolicySchedulerStats`` on ``/metrics``.

    Attributes:
        key: name of the field.
        metrics: metrics with their labels, by engine index.
    """

    key: ClassVar[str]
    metrics: dict[int, dict[str, Any]]

    @abstractmethod
    def export(self, metrics: dict[str, Any], stats: Any) -> None:
        """Add one report of an engine to its metrics."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        stats = getattr(scheduler_stats, self.key, None)
        if stats is not None:
            self.export(self.metrics[engine_idx], stats)

    def log_engine_initialized(self) -> None:
        pass
