# SPDX-License-Identifier: Apache-2.0
"""Work in threads that no caller waits for: what it raises is logged."""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import ParamSpec

from vllm_cascade.log import logger

Given = ParamSpec("Given")


def started(most: int, name: str, begin: Callable[[], object] | None = None) -> ThreadPoolExecutor:
    """A pool with one thread started at once, so queued work runs even if no further one can start.

    Args:
        begin: called first in each thread.
    """
    pool = ThreadPoolExecutor(most, name, begin)
    pool.submit(int)
    return pool


def submit(
    pool: Executor, work: Callable[Given, object], *args: Given.args, **kwargs: Given.kwargs
) -> None:
    """Let a pool's thread do ``work``. A future would keep its exception to itself."""
    try:
        pool.submit(_logged, work, *args, **kwargs)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        # The work is in the pool's queue, where one of its other threads takes it.


def _logged(work: Callable[Given, object], *args: Given.args, **kwargs: Given.kwargs) -> None:
    try:
        work(*args, **kwargs)
    except Exception:  # of any kind: the thread's next work goes on
        logger.exception("KV sessions: a thread failed")
