# SPDX-License-Identifier: Apache-2.0
"""Work in threads that no caller waits for: what it raises is logged."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec

from vllm_cascade.log import logger

Given = ParamSpec("Given")


def submit(
    pool: Executor, work: Callable[Given, object], *args: Given.args, **kwargs: Given.kwargs
) -> None:
    """Let a pool's thread do ``work``. A future would keep its exception to itself."""
    pool.submit(_logged, work, *args, **kwargs)


def _logged(work: Callable[Given, object], *args: Given.args, **kwargs: Given.kwargs) -> None:
    try:
        work(*args, **kwargs)
    except Exception:  # of any kind: the thread's next work goes on
        logger.exception("KV sessions: a thread failed")
