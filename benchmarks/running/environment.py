# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was taken: written beside every number that is kept."""

import functools
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[2]


class Start(TypedDict):
    """When a command began, and what was checked out then."""

    time: str
    git_commit: str | None
    git_dirty: bool


@functools.cache
def start() -> Start:
    """Of this process: a command asks first when it reads its options, before it measures."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
    }


def fingerprint() -> dict[str, str | int | bool | None]:
    """Machine, versions and commit, as JSON values; needs no package but PyTorch."""
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "time": start()["time"],
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "gpu": gpu and gpu.name,
        "gpu_memory": gpu and gpu.total_memory,
        "capability": gpu and f"{gpu.major}.{gpu.minor}",
        "driver": driver and driver.split()[0],
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": (_version("vllm") or "not installed").partition("+")[0],
        "triton": _version("triton"),
        "vllm_cascade": _version("vllm-cascade"),
        "git_commit": start()["git_commit"],
        "git_dirty": start()["git_dirty"],
    }


def commit() -> str | None:
    """The commit at the start, with a ``+`` where files differed from it; None without git."""
    found = start()["git_commit"]
    return found and found + ("+" if start()["git_dirty"] else "")


def versions() -> dict[str, str | None]:
    """Of the packages that a result depends on; nothing is imported for it."""
    return {name: _version(name) for name in ("vllm", "torch", "transformers")}


def cache_folder(name: str, variable: str) -> Path:
    """Where something large is kept: what an environment variable names, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm-cascade" / name
    return Path(os.environ.get(variable) or cache).expanduser().absolute()


@functools.cache
def cpu_name() -> str:
    """The processor: products in bfloat16 round otherwise on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*command: str) -> str | None:
    """Output of a git command in the repository; None where there is no git or no commit."""
    return _said("git", "-C", str(ROOT), *command)


def _said(*command: str) -> str | None:
    """Output of a command; None where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
