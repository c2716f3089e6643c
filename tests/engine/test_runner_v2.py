# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner, which GPUs use by default, on the CUDA backend's code.

Each policy has a process of its own (``runner_v2.py``): vLLM decides when it is imported whether
there is a Triton.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT


def run(policy: dict[str, Any], *family: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.runner_v2", json.dumps(policy), *family]
    env = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"name": "cascade"}, marks=pytest.mark.slow),
        pytest.param({"name": "dgc"}, marks=pytest.mark.slow),
        pytest.param({"name": "beehive"}, marks=pytest.mark.slow),
        pytest.param({"name": "h2o", "overflow": 8}, marks=pytest.mark.slow),
        pytest.param({"name": "lazy"}, marks=pytest.mark.slow),
        pytest.param({"name": "dgc", "importance": "cluster"}, marks=pytest.mark.slow),
    ],
    ids=lambda policy: "-".join(map(str, policy.values())),
)
def test_second_runner(policy: dict[str, Any]) -> None:
    """Equal to the oracle, beside another policy and from a snapshot; preemption changes nothing.

    Sampling stays as random far beyond the budget as it is at first. Scores of token ids need each
    token before the next step, so scheduling is not asynchronous there.
    """
    found = run(policy)
    assert found["runner"] == "V2" and found["async"] == (policy != {"name": "dgc"}), found
    assert found["equal"] and found["evicted"] > 150 and found["reused"] > 0, found
    assert found["preempted"] < 1e-4 and found["distinct"] > 30, found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "llama4", "gemma3n"])
def test_windows_on_the_second_runner(family: str) -> None:
    """Through the profile of CUDA graphs' memory, which asks the runner for its specs."""
    found = run({"name": "cascade"}, family)
    assert found["runner"] == "V2" and found["builders"] == [["CUDABuilder"]], found
    assert found["max_error"] < 5e-4, found
