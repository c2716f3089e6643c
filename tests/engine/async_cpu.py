# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on the CPU, which vLLM leaves to accelerators.

vLLM's CPU platform turns it off, because there is nothing to overlap; the code that prepares step
N + 1 before step N's tokens are known is the same on every device, and bugs of stale counts live
there. So tests turn it on: streams and events, which a CPU has not, do nothing.

Run as a script, this is ``vllm`` with asynchronous scheduling. The engine's processes are spawned
and import it again, hence the call at the module's level.
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        return event or Event()


def check_and_update_config(original: Any) -> classmethod:
    def with_async_scheduling(cls: type, config: Any) -> None:
        """Keep what vLLM has decided for any device."""
        decided = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = decided

    return classmethod(with_async_scheduling)


def turn_on(setattr_: Any = setattr) -> None:
    """Every engine created from here on; ``monkeypatch.setattr`` undoes it after a test."""
    from vllm.platforms.cpu import CpuPlatform

    for name, stub in (
        ("Event", Event),
        ("Stream", Stream),
        ("stream", lambda stream: nullcontext()),
        ("current_stream", lambda device=None: Stream()),
    ):
        setattr_(torch.cuda, name, stub)
    original = CpuPlatform.check_and_update_config.__func__
    setattr_(CpuPlatform, "check_and_update_config", check_and_update_config(original))


if __name__ in ("__main__", "__mp_main__"):
    turn_on()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
