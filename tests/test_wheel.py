# SPDX-License-Identifier: Apache-2.0
"""The wheel in a new environment, without the repository: every policy serves a request there.

The environment borrows vLLM, PyTorch and their like from this one by a ``.pth`` file. Python does
not read the ``.pth`` files of a borrowed folder, so the editable installation stays out of it.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.conftest import MODEL, ROOT
from tests.engine.server import Server
from tools.wheel import build
from vllm_cascade.policies.registry import POLICIES

pytestmark = pytest.mark.slow
FLAGS = ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "4"]
FLAGS += ["--max-model-len", "8192", "--kv-policy-config.prefill_stride", "64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment, a model, and an empty cache of compiled code."""
    place = tmp_path_factory.mktemp("installed")
    shutil.copytree(MODEL, place / "model")
    python = place / "env/bin/python"
    venv.create(place / "env", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(build(place))], check=True)
    (site,) = (place / "env/lib").glob("*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return place


@pytest.fixture
def environment(place: Path) -> dict[str, str]:
    """Variables that keep the repository off ``sys.path``."""
    return {
        "PYTHONPATH": "",
        "PYTHONSAFEPATH": "1",
        "VLLM_CACHE_ROOT": str(place / "cache"),
        "VLLM_CASCADE_CPU": "native",  # compile the wheel's C++, or do not start
    }


def test_the_package_is_the_wheels(place: Path, environment: dict[str, str]) -> None:
    code = (
        "import vllm_cascade.kernels, vllm_cascade.patches as p, sys; print(p.__file__, sys.path)"
    )
    shown = subprocess.run(
        [place / "env/bin/python", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    assert shown.startswith(f"{place}/env/")
    assert f"'{ROOT}'" not in shown


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_serves(
    name: str, place: Path, environment: dict[str, str], book_tokens: list[int]
) -> None:
    """A prompt longer than the model's 1,024 positions."""
    server = Server(
        place / f"{name}.log",
        ["--kv-policy", name, *FLAGS],
        [str(place / "env/bin/python"), "-m", "vllm.entrypoints.cli.main"],
        environment,
        place / "model",
    )
    try:
        assert len(server.wait().complete(book_tokens[:1500], 8)) == 8
        assert server.metric("vllm:kv_policy_evicted_tokens_total") > 0
    finally:
        server.stop()
