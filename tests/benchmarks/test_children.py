# SPDX-License-Identifier: Apache-2.0
"""Processes of their own: one that fails leaves the others alone, and none outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.running import children, leash
from benchmarks.running.environment import ROOT

SOON = 120.0
"""Seconds in which a process must have started, or ended; a busy machine is slow."""


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


PARENTS = {
    "children": "list(in_children(forever, [FOLDER] * 2, 2))",
    "a command": "leash.run(BUSY)",
    "a server": "server().start(); time.sleep(600)",
    "a paused server": "one = server(); one.start(); started(FOLDER, 1); one.pause(); "
    "time.sleep(600)",
}
"""What a parent runs: engines, a benchmark of ``make bench``, ``vllm serve``."""
SETTING_UP = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from benchmarks.running import leash
from benchmarks.running.children import in_children
from benchmarks.running.serving import Server
from tests.benchmarks.test_children import forever, started

FOLDER = Path(sys.argv[1])
CODE = f"from tests.benchmarks.test_children import forever; forever({str(FOLDER)!r})"
BUSY = [sys.executable, "-c", CODE]

def server():
    made = Server("model", [])
    made._command = BUSY
    return made

if __name__ == "__main__":
    """


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("children", signal.SIGKILL),
        ("children", signal.SIGTERM),
        ("children", signal.SIGINT),
        ("a command", signal.SIGKILL),
        ("a command", signal.SIGINT),
        ("a server", signal.SIGKILL),
        ("a paused server", signal.SIGTERM),
    ],
)
def test_nothing_outlives_the_parent(what: str, end: signal.Signals, tmp_path: Path) -> None:
    """Busy processes, and what they have started, however the parent ends."""
    script = tmp_path / "parent.py"
    script.write_text(SETTING_UP + PARENTS[what])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        pids = started(tmp_path, 2 if what == "children" else 1)
        if what == "a paused server":
            wait_until(lambda: state(pids[0]) == "T")
        assert len(pids) in (2, 4) and all(map(lives, pids))
        parent.send_signal(end)
        parent.wait(SOON)
        wait_until(lambda: not any(map(lives, pids)))
    finally:
        parent.kill()


def test_a_command_that_ends_by_itself() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    pipe = subprocess.PIPE
    done = leash.run([sys.executable, "-c", script], stdout=pipe, stderr=pipe)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def started(folder: Path, number: int) -> list[int]:
    """Process numbers that children have written, once so many have."""
    files: list[Path] = []

    def all_there() -> bool:
        files[:] = [file for file in folder.iterdir() if file.name.isdigit()]
        return len(files) == number

    wait_until(all_there)
    return [int(pid) for file in files for pid in file.read_text().split()]


def state(pid: int) -> str:
    """A letter of the kernel's; ``X`` for one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def lives(pid: int) -> bool:
    """One that has ended, and waits for its parent to notice, does not."""
    return state(pid) not in "ZX"


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)
