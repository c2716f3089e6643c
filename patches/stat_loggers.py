# SPDX-License-Identifier: Apache-2.0
"""Patch of ``EngineCoreOutputs`` and ``StatLoggerManager``.

What: scheduler statistics may carry those of a policy and of sessions, and every front-end of an
engine with these (``vllm serve``, ``AsyncLLM``, ``LLM``) gets loggers that publish them.
Why: ``SchedulerStats`` has no field for a custom scheduler's statistics. Plugins of the group
``vllm.stat_logger_plugins`` do not fit: ``LLM`` does not load them, stock engines do and would
ignore ``--disable-log-stats``, and they register before vLLM clears all metrics named ``vllm:``.
Removed when: custom schedulers can send statistics and general plugins can add loggers.
"""

import functools
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import StatLoggerManager


def apply() -> None:
    """Patch both classes. ``patches.apply_all`` calls this once, before any engine exists."""
    from vllm_cascade.engine.metrics import KVPolicySchedulerStats

    # msgspec reads the annotation when a front-end creates its decoder. It drops unknown fields.
    EngineCoreOutputs.__annotations__["scheduler_stats"] = KVPolicySchedulerStats | None
    StatLoggerManager.__init__ = _wrap_init(StatLoggerManager.__init__)


def _wrap_init(original):
    @functools.wraps(original)
    def __init__(self, vllm_config, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        from vllm_cascade.engine.metrics import KVPolicyStatLogger
        from vllm_cascade.engine.session_metrics import SessionStatLogger
        from vllm_cascade.policies.registry import policy_of
        from vllm_cascade.sessions.settings import SessionSettings

        if policy_of(vllm_config.additional_config) is not None:
            self.stat_loggers.append(KVPolicyStatLogger(vllm_config, self.engine_indexes))
        if SessionSettings.of(vllm_config.additional_config) is not None:
            self.stat_loggers.append(SessionStatLogger(vllm_config, self.engine_indexes))

    return __init__
