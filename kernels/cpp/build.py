# SPDX-License-Identifier: Apache-2.0
"""Compiles C++ sources, by default those in this folder, once per machine, into the user's cache.

The library is built for this processor (``-march=native``), so its name depends on the sources, the
compiler, the flags and the processor. Its size and hash are stored in a file next to it, because
loading a partly written library would crash the process.

Only the C++ and OpenMP runtimes are linked. PyTorch and the library must share one OpenMP runtime,
and with it threads and their binding. PyTorch has g++'s ``libgomp``; clang++ links ``libomp``, so
its libraries need that one in ``LD_PRELOAD`` (library.py checks).
"""

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    # Contract into fused multiply-adds; infinities and NaN keep their meaning.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILERS = ("g++", "c++", "clang++")
LINKER_FAILED = ("ld returned", "linker command failed")
CAUSES = (("error",), ("cannot find", "undefined reference", "failed:"), ("/ld:",))
"""Words in lines of a compiler's messages that say what failed; the first ones say it best."""
NO_ROOM = "; set VLLM_CACHE_ROOT and TMPDIR to folders with room"
TIMEOUT = 300.0
"""Seconds; a compile takes about fifteen."""


class BuildError(RuntimeError):
    """The library could not be built. The message gives the reason in one line."""


def cache_folder() -> Path:
    """vLLM's cache folder for compiled code."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    # Without a home directory ~ stays, as in vLLM; the compiler runs in another working directory.
    return Path(os.path.abspath(os.path.expanduser(root))) / "vllm_cascade"


def find_compiler() -> list[str]:
    """The command ``$CXX``, maybe with a launcher or options, or the first compiler on the path.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX", "").strip()
    for name, *options in ([wanted], _words(wanted)) if wanted else ([name] for name in COMPILERS):
        found = shutil.which(name)
        if found:
            return [os.path.abspath(found), *options]
    raise BuildError(f"no C++ compiler ({wanted or ', '.join(COMPILERS)})")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quotation mark without its counterpart
        return [command]


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def build(
    folder: Path | None = None,
    name: str = "attention",
    source: Path | None = None,
    flags: Sequence[str] = FLAGS,
) -> Path:
    """Path of a shared library, compiled unless the cache has a complete copy.

    Several processes may call this: one compiles while the others wait.

    Args:
        folder: cache of libraries; None: ``cache_folder()``. If it is read-only and lacks the
            library, or none may be executed there, a temporary folder of this user is used, the
            same for all processes.
        name: the library's.
        source: its only file, which includes no other of ours; None: all files of this folder.

    Raises:
        BuildError: there is no compiler, it failed, or no folder can be used.
    """
    read = sorted(SOURCES.glob("*.[ch]*")) if source is None else [source]
    compiler = find_compiler()
    folder, name = folder or cache_folder(), f"{name}-{_key(compiler, flags, read)}.so"
    try:
        executes = _can_execute(folder)
        if executes and _is_whole(folder / name):
            return folder / name
        if not executes or not _can_write(folder):
            folder = _temporary_folder()
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(folder / name):
                files = sources() if source is None else read
                _compile([*compiler, *flags], files, folder / name)
    except OSError as error:  # a disk that is full, or without locks, or another user's file
        raise BuildError(f"{folder}: {error}; set VLLM_CACHE_ROOT to another folder") from error
    return folder / name


def _can_execute(folder: Path) -> bool:
    """False on a file system that is mounted with ``noexec``."""
    while not os.path.exists(folder):  # Path.exists raises where this user may not look
        folder = folder.parent
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC


def _can_write(folder: Path) -> bool:
    """Whether files can be made here, and the lock be taken, which may be another user's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder), open(folder / "lock", "a"):
            return True
    except OSError:
        return False


def _temporary_folder() -> Path:
    """A temporary folder that only this user can write, because its libraries are executed.

    Raises:
        BuildError: other users can write it, or its files may not be executed.
    """
    folder = Path(tempfile.gettempdir()) / f"vllm_cascade-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"{folder} is not this user's alone; remove it, or set VLLM_CACHE_ROOT")
    if not _can_execute(folder):
        raise BuildError(
            f"neither vLLM's cache folder nor {folder} can be used (read-only, or mounted with "
            "noexec); set VLLM_CACHE_ROOT to another folder"
        )
    return folder


def _note(library: Path) -> Path:
    return library.with_suffix(".so.sha256")


def _describe(library: Path) -> str:
    content = library.read_bytes()
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n"


def _is_whole(library: Path) -> bool:
    try:
        return _note(library).read_text("ascii") == _describe(library)
    except (OSError, ValueError):
        return False


def _key(compiler: list[str], flags: Sequence[str], files: Sequence[Path]) -> str:
    parts = [*compiler, *flags, _run([*compiler, "--version"]), _processor()]
    parts += [file.read_text("utf-8") for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What ``-march=native`` depends on. Several machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "CPU part", "Features")
    known = [line for line in lines if line.startswith(names)]
    if not known:  # other architectures: all but the clock, which changes
        known = [line for line in lines if not re.search("mhz|bogomips", line, re.IGNORECASE)]
        known.insert(0, platform.machine())
    return "\n".join(dict.fromkeys(known))


def _compile(command: list[str], files: Sequence[Path], target: Path) -> None:
    # Hosts and containers that share the folder may have equal process ids, and locks apart. Not
    # mkstemp, whose files other users may not read.
    partial = target.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        _run([*command, "-o", str(partial), *map(str, files)])
        description = _describe(partial)
        _put(partial, target)
        partial.write_text(description, "ascii")
        _put(partial, _note(target))
    finally:
        partial.unlink(missing_ok=True)


def _put(partial: Path, target: Path) -> None:
    """Flush a file to disk, then rename it, so that the target is never incomplete."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)


def _reason(stderr: str) -> str:
    """The line that says why a compile failed; a linker's, rather than that the linker failed."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    own = [line for line in lines if not any(words in line for words in LINKER_FAILED)]
    for words in CAUSES:
        for line in own:
            if any(word in line for word in words):
                return line + (NO_ROOM if "No space left on device" in line else "")
    return next(reversed(own or lines), "no message")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=TIMEOUT,
            cwd=SOURCES,
            env={**os.environ, "LC_ALL": "C"},  # the words that _reason searches
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {_reason(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.stdout
