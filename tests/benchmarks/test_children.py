# SPDX-License-Identifier: Apache-2.0
"""Processes of their own: one that fails leaves the others alone, and none outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.running import children
from benchmarks.running.environment import ROOT

SOON = 15.0
"""Seconds within which a process must have ended; a busy machine is slow."""


def job(what: str) -> str:
    """Runs in a child."""
    if what == "raise":
        raise ValueError("no such\n  setting")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    if what == "unpicklable":
        return lambda: None  # type: ignore[return-value]
    return what * 2


def forever(folder: str) -> None:
    """A child that is busy, and has started a process that waits."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path = Path(folder) / f"{os.getpid()}"
    path.with_suffix(".tmp").write_text(f"{os.getpid()} {other.pid}")
    path.with_suffix(".tmp").rename(path)
    while True:
        pass


def test_one_that_fails_leaves_the_others_alone() -> None:
    jobs = ["a", "raise", "kill", "exit", "unpicklable", "b"]
    found = dict(children.outcomes(job, jobs, 2))
    assert found[0] == "aa" and found[5] == "bb"
    reasons = {jobs[place]: found[place].reason for place in (1, 2, 3, 4)}
    assert reasons["raise"] == "ValueError: no such setting"
    assert "SIGKILL" in reasons["kill"] and "memory" in reasons["kill"]
    assert "status 3" in reasons["exit"]
    assert "pickle" in reasons["unpicklable"]


def test_results_in_order_or_the_first_error() -> None:
    assert list(children.in_children(job, ["a", "b"], 2)) == ["aa", "bb"]
    with pytest.raises(children.ChildError, match="ValueError: no such setting"):
        list(children.in_children(job, ["a", "raise"]))
    with pytest.raises(ValueError, match="at least 1"):
        list(children.in_children(job, ["a"], 0))


def test_a_long_message_is_cut() -> None:
    reason = children.Failure.of(RuntimeError("word " * 1000)).reason
    assert reason.endswith(" ...") and len(reason) < 400
    assert children.Failure.of(KeyboardInterrupt()).reason == "KeyboardInterrupt"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_parent(end: signal.Signals, tmp_path: Path) -> None:
    """Two busy children and what they have started; the parent ends in three ways."""
    code = (
        "from benchmarks.running.children import in_children\n"
        "from tests.benchmarks.test_children import forever\n"
        f"if __name__ == '__main__': list(in_children(forever, [{str(tmp_path)!r}] * 2, 2))"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], env=environment, cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        pids = started(tmp_path, 2)
        assert len(pids) == 4 and all(map(lives, pids))
        parent.send_signal(end)
        parent.wait(SOON)
        assert gone(pids), f"{[pid for pid in pids if lives(pid)]} live on"
    finally:
        parent.kill()


def started(folder: Path, number: int) -> list[int]:
    """Process numbers that children have written, once so many have."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = [file for file in folder.iterdir() if file.name.isdigit()]
        if len(files) == number:
            return [int(pid) for file in files for pid in file.read_text().split()]
        time.sleep(0.1)
    raise AssertionError("the children have not started")


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to notice does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + SOON
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(lives, pids))
