# SPDX-License-Identifier: Apache-2.0
"""TOVA against a literal loop, and as an installed package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.policy_package.tova import Tova
from vllm_cascade.policies.simulate import simulate

HERE = Path(__file__).resolve().parent
TOKENS = 60


def literal(probs: np.ndarray, sinks: int, budget: int) -> list[list[int]]:
    """The kept tokens after every token, by the paper's words."""
    kept: list[int] = []
    steps = []
    for token in range(len(probs)):
        kept.append(token)
        if len(kept) > sinks + budget:
            candidates = kept[sinks:]
            least = min(probs[token, other] for other in candidates)
            kept.remove(next(other for other in candidates if probs[token, other] == least))
        steps.append(list(kept))
    return steps


@pytest.mark.parametrize(("sinks", "budget"), [(0, 1), (0, 8), (4, 8), (1, 20)])
def test_it_keeps_what_the_newest_query_attends_to(sinks: int, budget: int) -> None:
    probs = np.random.default_rng(budget).random((TOKENS, TOKENS)).astype(np.float32)
    policy = Tova(budget=budget, num_sinks=sinks, prefill_stride=1)
    found = [step.kept for step in simulate(policy, TOKENS, probs)]
    assert found == literal(probs, sinks, budget)
    assert found[-1] != list(range(sinks)) + list(range(TOKENS - budget, TOKENS)) or budget == 1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed in it."""
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(HERE, source)
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


def run(site: Path, code: str) -> str:
    """What a process prints that has the package."""
    path = os.pathsep.join([str(site), str(HERE.parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_policy_is_found(site: Path) -> None:
    """By the settings' parser, the flag's choices and the settings of a request."""
    code = """
import json
from vllm_cascade.patches.engine_args import merge_settings
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import CHOICES, resolve
from vllm_cascade.policies.schedule import compiled
merged = merge_settings(None, {"kv_policy": "tova", "kv_budget": 32})
policy = resolve({**merged["kv_policy"], "head_policy": "homogeneous"})
engine = PerRequest(compiled(resolve({"name": "h2o", "budget": 64})))
own = engine.schedule({"kv_policy": "tova", "kv_budget": 16}).policy
print(json.dumps([type(policy).__name__, policy.budget, "tova" in CHOICES, own.name, own.budget]))
"""
    assert json.loads(run(site, code).splitlines()[-1]) == ["Tova", 32, True, "tova", 16]


def test_a_package_that_cannot_be_imported_is_named_when_it_is_chosen(site: Path) -> None:
    """Everything else works."""
    module = site / "tova.py"
    text = module.read_text()
    code = """
from vllm_cascade.policies.registry import POLICIES, KVPolicyError, resolve
assert resolve({"name": "sink"}).name == "sink" and "tova" not in POLICIES
try:
    resolve({"name": "tova"})
except KVPolicyError as error:
    print(error)
"""
    try:
        module.write_text("raise RuntimeError('broken on purpose')\n")
        shown = run(site, code)
    finally:
        module.write_text(text)
    assert "kv_policy.name tova" in shown and "broken on purpose" in shown and "uninstall" in shown
