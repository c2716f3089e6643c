# SPDX-License-Identifier: Apache-2.0
"""Test zero: without a policy, or with ``full``, the plugin changes nothing, to the last bit."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.conftest import MODEL, ROOT


@lru_cache(maxsize=2)
def stock(apart: bool = True) -> str:
    return generate("{}", apart, plugins="")


def generate(arguments: str, apart: bool = True, plugins: str | None = None) -> str:
    """What an engine prints; ``apart``: it has processes of its own, which take long to start."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}
    environment.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    script = Path(__file__).with_name("generate.py")
    run = subprocess.run(
        [sys.executable, str(script), str(MODEL), arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT / "tests",
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return line


@pytest.mark.parametrize(
    ("arguments", "apart"),
    [
        ({}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"kv_policy": "full"}, True, marks=pytest.mark.slow),
        pytest.param({"additional_config": {"kv_policy": "full"}}, True, marks=pytest.mark.slow),
    ],
    ids=["no policy", "no policy, apart", "kv_policy=full", "additional_config"],
)
def test_byte_identical_to_vllm_without_the_plugin(arguments: dict, apart: bool) -> None:
    assert generate(json.dumps(arguments), apart) == stock(apart)


@pytest.mark.slow
def test_a_policy_does_change_the_numbers() -> None:
    """The comparison above can fail."""
    settings = {"kv_policy": "sink", "kv_budget": 64, "kv_policy_config": {"prefill_stride": 32}}
    assert generate(json.dumps(settings)) != stock()
