# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was taken: written beside every number that is kept."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fingerprint() -> dict[str, str | int | bool | None]:
    """Machine, versions and commit, as JSON values; needs no package but PyTorch."""
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
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
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
    }


def commit() -> str | None:
    """The checkout's commit, with a ``+`` where files differ from it; None without git."""
    found = _git("rev-parse", "HEAD")
    return found and found + ("+" if _git("status", "--porcelain") else "")


def versions() -> dict[str, str | None]:
    """Of the packages that a result depends on; nothing is imported for it."""
    return {name: _version(name) for name in ("vllm", "torch", "transformers")}


def cache_folder(name: str, variable: str) -> Path:
    """Where something large is kept: what an environment variable names, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm-cascade" / name
    return Path(os.environ.get(variable) or cache).expanduser().absolute()


def _cpu_name() -> str:
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
