# SPDX-License-Identifier: Apache-2.0
"""Workflows and CONTRIBUTING call make targets that exist; pre-commit and ``make lint`` agree."""

import re

import yaml

from tests.conftest import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_workflows_call_make() -> None:
    found = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            runs = [step["run"] for step in job["steps"] if "run" in step]
            assert runs and all(run.startswith("make ") for run in runs)
            found |= {run.removeprefix("make ") for run in runs}
            found |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
    found.discard("${{ matrix.target }}")
    assert {"lint", "test", "docs", "wheel"} == found <= TARGETS


def test_contributing_names_targets() -> None:
    named = set(re.findall(r"^make ([a-z-]+) ", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    assert len(named) == 5 and named <= TARGETS


def test_pre_commit_has_the_pinned_ruff() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={repo['rev'].removeprefix('v')}\n" in (ROOT / "requirements/dev.txt").read_text()


def test_the_changelog_begins_with_this_version() -> None:
    from vllm_cascade import __version__

    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == __version__
