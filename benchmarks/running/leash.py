# SPDX-License-Identifier: Apache-2.0
"""Commands that end when whoever started them does, with all that they have started.

A command leads a session of its own. A second, tiny process waits for the end of a pipe whose other
end only the starter holds: when the starter is gone, by whatever signal, the pipe ends, and the
command's whole process group is killed. It is no member of that group, so that a group which is
paused is ended, too.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

WAIT_AND_KILL = """
import os, signal, sys
if not sys.stdin.read():
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""Anything that comes through the pipe before it ends means: leave them alone."""


class Leash:
    """Ends a process group with this process; for a group's leader that has just been started."""

    def __init__(self, group: int) -> None:
        self._watch = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WAIT_AND_KILL, str(group)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the starter
        )

    def release(self) -> None:
        """The group has ended; its number may soon be another's."""
        with contextlib.suppress(BrokenPipeError):
            self._watch.communicate(b"released")


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run``, in text; the command's processes are gone when this returns.

    Args:
        options: of ``subprocess.Popen``.
    """
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        leash = Leash(process.pid)
        try:
            out, err = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            leash.release()
    return subprocess.CompletedProcess(command, process.returncode, out, err)
