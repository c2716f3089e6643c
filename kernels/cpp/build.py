# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ sources beside this file, once a machine, into the user's cache.

Built for the processor at hand (``-march=native``), so the result is keyed by the sources, the
compiler, its flags and the processor. Nothing is linked but the C++ and OpenMP runtimes: the
``libgomp`` that PyTorch has loaded serves both, so its threads and their binding are shared.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    # Contract into fused multiply-adds; infinities and NaN keep their meaning.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 300.0
"""Seconds; a compile takes about fifteen."""


class BuildError(RuntimeError):
    """No library could be built; the message says why, in one line."""


def cache_folder() -> Path:
    """Where vLLM keeps what it compiles."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    return Path(root).expanduser() / "vllm_cascade"


def find_compiler() -> str:
    """``$CXX``, or the first C++ compiler on the path.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({wanted or ', '.join(COMPILERS)})")


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def build(folder: Path | None = None) -> Path:
    """Path of the shared library, compiled unless an equal one is in the cache.

    Safe for any number of processes: one compiles while the others wait.

    Args:
        folder: where libraries are kept; None is ``cache_folder()``.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    folder = _writable(folder or cache_folder())
    target = folder / f"attention-{_key(compiler)}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _writable(folder: Path) -> Path:
    """The folder, or a private temporary one where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="vllm_cascade-"))


def _key(compiler: str) -> str:
    parts = [compiler, *FLAGS, _run([compiler, "--version"]), _processor()]
    parts += [file.read_text("utf-8") for file in sorted(SOURCES.glob("*.[ch]*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What ``-march=native`` depends on; a home directory may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _compile(compiler: str, target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        _run([compiler, *FLAGS, "-o", str(partial), *map(str, sources())])
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT, cwd=SOURCES
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.stdout
