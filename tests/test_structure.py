# SPDX-License-Identifier: Apache-2.0
"""What the package's rooms may use: policies know nothing of vLLM, and no step looks settings up.

A step carries schedules, which were compiled when the engine or a request started. What would
bring settings back into it is looked for in the source: ``compiled``, caches keyed on arguments,
``hash`` and ``id``. That no step of a scheduler hashes settings is also counted, in
``tests/engine/test_scheduler.py``.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "vllm_cascade"
POLICIES = sorted((PACKAGE / "policies").glob("**/*.py"))
SOURCES = sorted(path for room in (PACKAGE, ROOT / "kernels") for path in room.glob("**/*.py"))

COMPILE = {
    "vllm_cascade/attention/cuda/rule_room.py": "a refusal at start",
    "vllm_cascade/cache/spec.py": "a cache group's schedule, once for each spec",
    "vllm_cascade/engine/devices.py": "a warning at start",
    "vllm_cascade/engine/lookup.py": "the front-end's, once for each engine",
    "vllm_cascade/engine/recall_memory.py": "the bound of host memory, at start",
    "vllm_cascade/engine/trace_page.py": "a page's regions, after the engine has run",
    "vllm_cascade/policies/per_request.py": "a request's own, once for its values",
    "vllm_cascade/policies/registry.py": "a check of settings whose table may be too long",
    "vllm_cascade/policies/schedule.py": "one without recall, once for each schedule with it",
    "vllm_cascade/policies/simulate.py": "a trace without an engine",
}
"""Files that call ``compiled``, and when."""
CACHES = {
    "vllm_cascade/attention/cpu/paths.py": {"_library", "_say_once"},  # no settings: nothing, text
    "vllm_cascade/engine/lookup.py": {"_per_request"},  # when a request is admitted
    "vllm_cascade/policies/beehive.py": {"_survivors"},  # in traces
}
"""Functions that remember their results by their arguments."""
HASHES = {
    "vllm_cascade/cache/snapshots.py": "a schedule's history, hashed before, and a block's hash",
    "vllm_cascade/policies/schedule.py": "the settings, once for each schedule",
}
"""Files that call ``hash``, of what."""


def names_of(function: ast.expr) -> str:
    """``a.b.c`` of a function that is called or decorates; empty where it has no such name."""
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""


def calls(path: Path) -> Iterator[str]:
    """The last names of the functions that a file calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield names_of(node.func).rpartition(".")[2]


def caches(path: Path) -> set[str]:
    """The functions of a file that ``functools`` remembers the results of."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                if names_of(function).rpartition(".")[2] in ("cache", "lru_cache"):
                    found.add(node.name)
    return found


def imports(path: Path) -> Iterator[str]:
    """What a file imports, also within functions; ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users(function: str) -> set[str]:
    """The files that call a function of this name."""
    return {str(path.relative_to(ROOT)) for path in SOURCES if function in calls(path)}


def test_the_sources_are_found() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0] for path in SOURCES if PACKAGE in path.parents}
    assert rooms >= {"policies", "cache", "attention", "engine"}
    assert len(POLICIES) > 12 and len(SOURCES) > 60


def test_schedules_are_compiled_at_start_only() -> None:
    assert users("compiled") == set(COMPILE)
    assert users("Schedule") == {"vllm_cascade/policies/schedule.py"}, "made by `compiled` alone"


def test_nothing_is_remembered_by_settings_in_a_step() -> None:
    found = {str(path.relative_to(ROOT)): caches(path) for path in SOURCES if caches(path)}
    assert {path: names for path, names in found.items() if "kernels" not in path} == CACHES
    assert users("hash") == set(HASHES)


def test_nothing_is_grouped_by_address() -> None:
    """``id`` of what was collected is soon another's; schedules have numbers."""
    assert users("id") == set()


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_policies_import_no_other_room(path: Path) -> None:
    for module in imports(path):
        root, _, rest = module.partition(".")
        assert root != "vllm", f"{path.name} imports {module}"
        if root == "vllm_cascade":
            assert rest.split(".")[0] == "policies", f"{path.name} imports {module}"


def test_policies_work_without_vllm() -> None:
    """In a process that has none: every file is imported, a policy streamed, a request's made."""
    code = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
sys.modules["vllm"] = None  # what is looked for before the path is: as if it were not installed

import vllm_cascade.policies as policies
for module in pkgutil.walk_packages(policies.__path__, policies.__name__ + "."):
    importlib.import_module(module.name)
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.simulate import simulate
for name in POLICIES:
    policy = resolve({"name": name, "budget": 32})
    assert len(list(simulate(policy, 50))) == 50
    assert PerRequest(compiled(policy)).schedule({}).policy is policy
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("vllm_cascade.")}
print(*sorted(rooms))
print(*sorted(name for name in sys.modules if name.startswith("vllm.")))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["policies", ""]
