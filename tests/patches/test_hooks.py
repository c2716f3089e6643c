# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM's names (``patches/hooks``) against the installed vLLM, and against our code.

The table is loaded as a package of another name, so that the plugin is not: this file runs beside a
vLLM that the plugin refuses, and says what is different there.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.patches.installed import members, problem, resolve
from tests.patches.usage import FOREIGN, Code

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("vllm_cascade", "patches", "kernels")


def load_patches() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "patches_as_data",
        ROOT / "patches" / "__init__.py",
        submodule_search_locations=[str(ROOT / "patches")],
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PATCHES = load_patches()
TABLE = importlib.import_module("patches_as_data.hooks")
ROW = importlib.import_module("patches_as_data.hooks.row")
EVERY = (*TABLE.HOOKS, *TABLE.HOOKS_APART)


@cache
def version(package: str) -> str:
    return importlib.import_module(package).__version__


# --- the table against what is installed ----------------------------------------------------------


@pytest.mark.parametrize("hook", EVERY, ids=lambda hook: hook.target)
def test_the_installed_source_says_what_is_expected(hook: Any) -> None:
    expected = hook.expected_in(version(hook.package))
    if expected is not None:
        difference = problem(hook.target, expected)
        assert difference is None, f"{difference}; used in {', '.join(hook.used)}: {hook.why}"


def test_a_difference_is_found() -> None:
    """Every kind of difference, on names of this file."""
    here = f"{__name__}.Example"
    for expected in ("(self, a, b=, *, c, **d)", "(self, ..., c, **d)", "(..., b=, *, ...)"):
        assert problem(f"{here}.method", expected) is None
    for expected in ("(self, a, b, *, c, **d)", "(self, a, *, b=, c, **d)", "(self, a, b=, ...)x"):
        assert problem(f"{here}.method", expected) is not None
    assert problem(f"{here}.method", "(self, ..., e, ...)") is not None
    for name, says in (("annotated", "int"), ("late", "str | None"), ("size", "int"), ("bare", "")):
        assert problem(f"{here}.{name}", says) is None
        difference = problem(f"{here}.{name}", "bool")
        assert difference is not None and f"{here}.{name}: expected bool" in difference
    assert problem(here, "") is None
    for gone in (f"{here}.gone", f"{here}.gone.too", f"{__name__}.Gone", "nowhere.at.all"):
        assert problem(gone, "") is not None


class Example:
    annotated: int

    def __init__(self) -> None:
        self.late: str | None = None
        self.bare, _ = 1, 2

    def method(self, a: int, b: int = 1, *, c: int, **d: int) -> None: ...

    @property
    def size(self) -> int:
        return 1


def test_what_is_expected_of_versions() -> None:
    def hook(expected: Any) -> Any:
        return ROW.Hook("vllm.x", "called", ("a",), "why", "0.32", expected)

    assert hook("(a)").expected_in("0.40.0") == "(a)"
    assert hook("(a)").expected_in("0.31.9") is None
    differing = hook({"0.32": "(a)", "0.34": "(b)", "0.100": None})
    found = [
        differing.expected_in(v) for v in ("0.31.2", "0.32.0+cpu", "0.33.1", "0.34", "0.101.0")
    ]
    assert found == [None, "(a)", "(a)", "(b)", None]
    assert hook("(a)").versions == "0.32"
    assert differing.versions == "0.32, other in 0.34, gone in 0.100"


def test_rows_are_whole() -> None:
    targets = [hook.target for hook in EVERY]
    twice = {target for target in targets if targets.count(target) > 1}
    assert not twice
    for hook in EVERY:
        assert hook.kind in ROW.KINDS and hook.used and hook.why and hook.package in FOREIGN, hook
        if hook.package == "vllm" and not isinstance(hook.expected, str):
            assert set(hook.expected) <= set(PATCHES.CHECKED_VERSIONS), hook.target


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "patches" / "hooks.md").read_text("utf-8")
    assert text == TABLE.page(), "run python -m vllm_cascade.patches.hooks"


# --- the table against our code -------------------------------------------------------------------


def covered(hooks: Any) -> tuple[set[str], set[str]]:
    """Dotted names that the table has or has names below, and last parts."""
    targets = {hook.target for hook in hooks}
    parts = [target.split(".") for target in targets]
    above = {".".join(part[:length]) for part in parts for length in range(1, len(part))}
    return targets | above, {part[-1] for part in parts}


@cache
def ours() -> Code:
    return Code(ROOT, *PACKAGES)


def mro(dotted: str) -> tuple[type, ...]:
    found, rest = resolve(dotted)
    for name in rest:
        found = getattr(found, name, None)
    return found.__mro__ if inspect.isclass(found) else ()


def missing(code: Code, hooks: Any) -> list[str]:
    """Uses of other packages that have no row."""
    names, lasts = covered(hooks)
    found = set()
    for module in code.modules.values():
        used = module.foreign_imports() | module.foreign_strings()
        found |= {f"{module.file}: {name}" for name in used - names}
        typed = module.attributes_of_typed()
        found |= {f"{module.file}: {name}" for name in typed if name.split(".")[-1] not in lasts}
    others = code.private_attributes() | code.likely_attributes()
    found |= {f"{file}: .{name}" for file, name in others if name not in lasts}
    overridden = {(hook.target.rpartition(".")[0], hook.target.split(".")[-1]) for hook in hooks}
    owners = {(cls, name) for owner, name in overridden for cls in mro(owner)[:1]}
    for where, base, names_in_front in code.subclasses():
        for cls in mro(base):
            if cls.__module__.split(".")[0] in FOREIGN:
                for name in names_in_front & (members(cls).keys() | vars(cls).keys()):
                    if not any((parent, name) in owners for parent in mro(base)):
                        found.add(f"{where} overrides {cls.__module__}.{cls.__qualname__}.{name}")
    return sorted(found)


def test_every_use_has_a_row() -> None:
    rowless = missing(ours(), TABLE.HOOKS)
    assert not rowless, "add rows to patches/hooks, then run python -m vllm_cascade.patches.hooks"


def test_every_private_use_in_tests_and_benchmarks_has_a_row() -> None:
    code = Code(ROOT, "tests", "benchmarks")
    names, lasts = covered(EVERY)
    own = ours().own_members
    rowless = {
        f"{module.file}: {name}"
        for module in code.modules.values()
        for name in module.foreign_imports() - names
        if name.startswith("vllm.v1.") or "._" in name or not name.startswith("vllm.")
    }
    private = code.private_attributes()
    rowless |= {f"{file}: .{name}" for file, name in private if name not in lasts | own}
    assert not rowless, "add rows to patches/hooks/apart.py or interpreter.py"


NEW_USE = """
import os
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.kv_cache_utils import _new_helper
from vllm.v1.core import kv_cache_utils
from triton.runtime.cache import get_cache_manager

WORKER = "vllm.v1.worker.xpu_worker.XPUWorker"
SWITCH = os.environ.get("VLLM_NEW_SWITCH")


class Store:
    pool: BlockPool

    def first(self):
        return self.pool.null_block


class Mixin:
    def update_from_output(self, *args):
        return super().update_from_output(*args)


class Ours(Mixin, Scheduler):
    waiting: list


def look(config: VllmConfig | None, runner):
    kv_cache_utils.hash_block_tokens()
    return config.lora_config, runner.input_batch._hidden, runner.num_accepted_tokens
"""
NEW_USE_FOUND = (
    "vllm.v1.core.kv_cache_utils._new_helper",
    "triton.runtime.cache.get_cache_manager",
    "vllm.v1.worker.xpu_worker.XPUWorker",
    "vllm.envs.VLLM_NEW_SWITCH",
    "vllm.v1.core.block_pool.BlockPool.null_block",
    "Ours overrides vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
    "Ours overrides vllm.v1.core.sched.scheduler.Scheduler.waiting",
    "vllm.v1.core.kv_cache_utils.hash_block_tokens",
    "vllm.config.VllmConfig.lora_config",
    "._hidden",
    ".num_accepted_tokens",
)


def test_a_new_use_without_a_row_is_found(tmp_path: Path) -> None:
    (tmp_path / "vllm_cascade").mkdir()
    (tmp_path / "vllm_cascade" / "new.py").write_text(NEW_USE)
    found = missing(Code(tmp_path, *PACKAGES), TABLE.HOOKS)
    for name in NEW_USE_FOUND:
        assert any(line.endswith(name) for line in found), (name, found)
    known = ("VllmConfig", "BlockPool", "Scheduler", "kv_cache_utils", "input_batch")
    assert not [line for line in found if line.endswith(known)]


def test_the_files_that_a_row_names_use_it() -> None:
    """Where code has moved, this says to where."""
    files = [file for folder in (*PACKAGES, "tests", "benchmarks") for file in source(folder)]
    wrong = []
    for hook in EVERY:
        name = re.compile(rf"\b{re.escape(hook.target.split('.')[-1])}\b")
        for used in hook.used:
            if not (ROOT / used).is_file() or not name.search(text(ROOT / used)):
                now = [str(file.relative_to(ROOT)) for file in files if name.search(text(file))]
                wrong.append(f"{hook.target} in {used}; now mentioned in {', '.join(now)}")
    assert not wrong, "\n".join(wrong)


def test_what_is_said_to_be_overridden_is() -> None:
    classes = [(mro(base), front) for _, base, front in ours().subclasses()]
    for hook in TABLE.HOOKS:
        owner, _, name = hook.target.rpartition(".")
        if hook.kind == "overridden":
            cls = mro(owner)[0]
            assert any(cls in parents and name in front for parents, front in classes), hook.target


def source(folder: str) -> list[Path]:
    table = ROOT / "patches" / "hooks"
    return [file for file in sorted((ROOT / folder).rglob("*.py")) if table not in file.parents]


@cache
def text(file: Path) -> str:
    return file.read_text("utf-8")


# --- the patches ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", sorted((ROOT / "patches").glob("*.py")), ids=lambda file: file.stem
)
def test_a_patch_says_what_why_and_until_when(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(text(file))) or ""
    if file.stem != "__init__":
        assert docstring.startswith("Patch of ``")
        parts = re.split(r"^(What|Why|Removed when): ", docstring, flags=re.MULTILINE)
        assert parts[1::2] == ["What", "Why", "Removed when"], parts[1::2]
        assert all(len(part.split()) > 4 for part in parts[2::2])
