# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel from a copy of the sources: ``python tools/wheel.py FOLDER``."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vllm_cascade", "kernels", "patches")
FILES = ("setup.py", "pyproject.toml", "LICENSE", "README.md")


def build(folder: Path) -> Path:
    """Write the wheel into ``folder`` and return its path.

    Setuptools would leave ``build/`` in the repository and put what lies there into the next wheel.
    """
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "source", Path(name) / "out"
        for part in FOLDERS:
            shutil.copytree(
                ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        for part in FILES:
            shutil.copy(ROOT / part, source)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--wheel-dir", str(out), str(source)]
        subprocess.run(command, check=True)
        (wheel,) = out.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def check_tag(wheel: Path, tag: str) -> None:
    """Stop if a release's tag is not the wheel's version.

    Args:
        tag: of the commit; empty if it has none.
    """
    (version,) = re.findall(r"^vllm_cascade-([^-]+)-", wheel.name)
    if tag not in ("", f"v{version}"):
        raise SystemExit(
            f"the tag is {tag}, but vllm_cascade/__init__.py says {version}: change one of them"
        )


if __name__ == "__main__":
    made = build(Path(sys.argv[1]))
    describe = ["git", "describe", "--tags", "--exact-match"]
    tag = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    check_tag(made, tag.stdout.strip())
    print(made)
