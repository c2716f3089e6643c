# SPDX-License-Identifier: Apache-2.0
"""Environments for the peers, whose pins clash with vLLM's: a folder of its own for each.

A peer's environment lies over the one that runs this file: it holds what ``requirements/PEER.txt``
pins, and takes torch, numpy and all else from below. It is made once, in
``$XDG_CACHE_HOME/vllm-cascade/peers`` (``~/.cache/...``) or ``$VLLM_CASCADE_PEERS``.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.running.environment import ROOT, cache_folder

FOLDER = "VLLM_CASCADE_PEERS"
"""Environment variable: where the environments are kept instead of the user's cache folder."""
PEERS = {"kvpress": "kvpress", "llama-cpp": "llama_cpp"}
"""Peers by the name of their requirements file, and the module that each installs."""
SHOWN, WORDS = 30, 200
"""Of a step that fails: last lines that are shown, and characters that a table repeats."""


class PeerUnavailable(RuntimeError):
    """A peer is not installed and cannot be; the message says why."""


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which the first call makes.

    Raises:
        PeerUnavailable: no package index, no C++ compiler for llama.cpp, no room, or a package
            that cannot be imported when it is installed.
    """
    from filelock import FileLock

    folder = cache_folder("peers", FOLDER)
    below = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    parts = [requirements(peer).read_text("utf-8"), sys.version, *below]
    place = folder / f"{peer}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(place.with_suffix(".lock")):
            if not (place / "complete").exists():
                _make(peer, place, below)
                (place / "complete").touch()
    except OSError as error:
        raise _unavailable(peer, f"{error}; {FOLDER} names another folder") from error
    return place / "bin/python"


def requirements(peer: str) -> Path:
    """The file that pins a peer and what it needs of its own."""
    return ROOT / f"requirements/{peer}.txt"


def _make(peer: str, place: Path, below: list[str]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    print(f"peers: installing {peer} into {place}: some minutes", file=sys.stderr, flush=True)
    if peer == "llama-cpp":
        if not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))):
            raise _unavailable(peer, "it is compiled, and there is no C++ compiler: install g++")
    _run(peer, [sys.executable, "-m", "venv", "--without-pip", str(place)])
    python = str(place / "bin/python")
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "below.pth").write_text("\n".join(below) + "\n", "utf-8")
    command = ["nice", "-n", "10", python, "-m", "pip", "install", "--no-deps"]
    command += ["--ignore-installed", "--retries=2", "--timeout=60", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--requirement", str(requirements(peer))]
    _run(peer, command)
    _run(peer, [python, "-c", f"import {PEERS[peer]}"])


def _run(peer: str, command: list[str]) -> None:
    """A step of making an environment; llama.cpp is compiled without what reads images."""
    cores = str(len(os.sched_getaffinity(0)))
    flags = {"CMAKE_BUILD_PARALLEL_LEVEL": cores, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
    done = subprocess.run(command, capture_output=True, text=True, env={**flags, **os.environ})
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        print("\n".join(lines[-SHOWN:]), file=sys.stderr, flush=True)
        wrong = [line for line in lines if "error" in line.lower()] or lines
        raise _unavailable(peer, " ".join(wrong[-1].split())[:WORDS])


def _unavailable(peer: str, why: str) -> PeerUnavailable:
    return PeerUnavailable(f"the peer {peer} cannot be installed: {why}")
