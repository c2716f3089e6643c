# SPDX-License-Identifier: Apache-2.0
"""The snapshots of what we use of vLLM, against our source and the installed vLLM's.

Nothing here imports the plugin: this file also runs beside a vLLM that the plugin refuses.
"""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.patches import snapshot
from tests.patches.source import Packages

ROOT = snapshot.ROOT


@cache
def derived(section: str) -> snapshot.Section:
    """All syntax trees live to its end, so that the collector finds nothing in them."""
    gc.disable()
    try:
        return snapshot.of_package() if section == "package" else snapshot.derive()[section]
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Later tests of the process need no syntax trees."""
    yield
    derived.cache_clear()


def checked_versions() -> tuple[str, ...]:
    tree = ast.parse((ROOT / "patches/__init__.py").read_text("utf-8"))
    (value,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKED_VERSIONS"
    ]
    return ast.literal_eval(value)


def as_number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def known_version(installed: str) -> str:
    """The snapshot to compare with: the installed version's, or the newest before it."""
    known = [v for v in checked_versions() if as_number(v) <= as_number(installed)]
    return max(known, key=as_number)


@pytest.mark.parametrize(
    "section", ["package", pytest.param("tests and benchmarks", marks=pytest.mark.slow)]
)
def test_the_installed_vllm_is_as_in_the_snapshot(section: str) -> None:
    installed = snapshot.minor(snapshot.installed_version("vllm"))
    version = installed if snapshot.file_of(installed).exists() else known_version(installed)
    before = snapshot.read(snapshot.file_of(version).read_text("utf-8"))[section]
    found = list(derived(section).differences(before))
    assert not found, "\n".join(
        [
            f"vLLM {installed} and our source, against {snapshot.file_of(version).name}:",
            *(f"- {line}" for line in found),
            f"Adapt our code to each of them, then write the snapshot with {snapshot.COMMAND}",
        ]
    )


def test_every_checked_version_has_a_snapshot() -> None:
    files = {file.name for file in snapshot.FOLDER.iterdir()}
    assert files == {snapshot.file_of(version).name for version in checked_versions()}


def test_what_a_version_lacks_another_one_has() -> None:
    """A name that no version has is a mistake in our source or in its reading."""
    sections = [
        snapshot.read(snapshot.file_of(version).read_text("utf-8"))[section]
        for version in checked_versions()
        for section in ("package", "tests and benchmarks")
    ]
    absent = {
        name for rows in sections for name, row in rows.items() if row.says == snapshot.ABSENT
    }
    assert absent, "0.33 moved modules"
    last_names = {
        name.rpartition(".")[2]
        for rows in sections
        for name, row in rows.items()
        if row.says != snapshot.ABSENT
    }
    assert not [name for name in absent if name.rpartition(".")[2] not in last_names]


def test_a_snapshot_is_read_as_it_was_written() -> None:
    rows = {
        "vllm.a.C": snapshot.Row("used", "class"),
        "vllm.a.C.f": snapshot.Row("overridden", "classmethod (cls, x: dict[str, int]=None)"),
        "vllm.a.C.g": snapshot.Row("replaced", ""),
    }
    text = snapshot.text_of("0.32.1", {"package": rows, "tests and benchmarks": {}})
    assert snapshot.read(text) == {"package": rows, "tests and benchmarks": {}}
    assert "used vllm.a.C: class\n" in text


# --- a small vLLM and small packages of ours ------------------------------------------------------

VLLM = """
from dataclasses import dataclass, field
from typing import ClassVar, overload

LIMIT: int = 3
OTHER = 4

class Pool:
    null_block: int
    def take(self, num: int, *, strict: bool = True) -> list[int]: ...

@dataclass
class Config:
    name: str
    pool: Pool = field(default_factory=Pool)
    counted: ClassVar[int] = 0
    @property
    def width(self) -> int: ...

class Scheduler:
    waiting: list
    def __init__(self, config: Config, requests: dict[str, "Config"]) -> None:
        self.config = config
        self.requests = requests
        self.pool = make_pool(config)
        self._hidden, other = 1, 2
    def schedule(self, step: int = 0) -> Config: ...
    async def stop(self) -> None: ...
    @classmethod
    def make(cls) -> "Scheduler": ...

class Apart:
    def rarely(self): ...

def make_pool(config: Config) -> Pool: ...

def helper(a, b=1, *rest, key, **others): ...
"""
OURS = """
import os
from vllm.v1 import core
from vllm.v1.core import Config, Scheduler

SWITCH = os.environ["VLLM_SWITCH"]
WORKER = "vllm.v1.core.Pool"

class Mixin:
    def schedule(self, *args):
        return super().schedule(*args)

class Ours(Mixin, Scheduler):
    waiting: list = []

    def first(self, name):
        for request in self.requests.values():
            print(request.width)
        return self.pool.take(1), self._hidden, self.schedule().name

def build(config: Config | None, ours):
    if isinstance(ours, Ours):
        ours.config.pool.null_block
    core.helper = ours.rarely
    return core.LIMIT, Config("a", pool=None)

def keyed(configs: list[Config]):
    return sorted(configs, key=lambda config: getattr(config, "counted"))
"""
EXPECTED = {
    "vllm.envs.VLLM_SWITCH": ("used", "bool"),
    "vllm.v1.core": ("used", "module"),
    "vllm.v1.core.Apart.rarely": ("used", "(self)"),
    "vllm.v1.core.Config": ("used", "class"),
    "vllm.v1.core.Config.__init__": ("used", "(self, name: str, ...)"),
    "vllm.v1.core.Config.counted": ("used", "ClassVar[int]"),
    "vllm.v1.core.Config.name": ("used", "str"),
    "vllm.v1.core.Config.pool": ("used", "Pool"),
    "vllm.v1.core.Config.width": ("used", "int"),
    "vllm.v1.core.LIMIT": ("used", "int"),
    "vllm.v1.core.Pool": ("used", "class"),
    "vllm.v1.core.Pool.null_block": ("used", "int"),
    "vllm.v1.core.Pool.take": ("used", "(self, num: int, *, strict: bool=True) -> list[int]"),
    "vllm.v1.core.Scheduler": ("used", "class"),
    "vllm.v1.core.Scheduler._hidden": ("used", ""),
    "vllm.v1.core.Scheduler.config": ("used", ""),
    "vllm.v1.core.Scheduler.pool": ("used", ""),
    "vllm.v1.core.Scheduler.requests": ("used", ""),
    "vllm.v1.core.Scheduler.schedule": ("overridden", "(self, step: int=0) -> Config"),
    "vllm.v1.core.Scheduler.waiting": ("overridden", "list"),
    "vllm.v1.core.helper": ("replaced", "(a, b=1, *rest, key, **others)"),
}


def small(tmp_path: Path, vllm: str = VLLM, ours: str = OURS) -> snapshot.Section:
    """What a package of one file uses, beside a vLLM of one file."""
    files = {
        "vllm/__init__.py": "",
        "vllm/envs.py": "VLLM_SWITCH: bool = False\n",
        "vllm/v1/__init__.py": "",
        "vllm/v1/core.py": vllm,
        "torch/__init__.py": "",
        "triton/__init__.py": "",
        "vllm_cascade/ours.py": ours,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    folders = {name: tmp_path / name for name in ("vllm", "torch", "triton")}
    return snapshot.derive(tmp_path, Packages(folders))["package"]


def test_uses_are_found(tmp_path: Path) -> None:
    section = small(tmp_path)
    assert section.rows == EXPECTED
    (line,) = [i for i, text in enumerate(OURS.splitlines(), 1) if "null_block" in text]
    assert section.places["vllm.v1.core.Pool.null_block"] == [f"vllm_cascade.ours:{line}"]


CHANGES = {
    "a default": ("strict: bool = True", "strict: bool = False", "Pool.take"),
    "an argument more": ("(self, num: int,", "(self, num: int, at: int,", "Pool.take"),
    "an annotation": ("LIMIT: int", "LIMIT: float", "LIMIT"),
    "a field's type": ("    name: str", "    name: bytes", "Config.name"),
    "a property's type": ("def width(self) -> int", "def width(self) -> str", "Config.width"),
    "a method that is renamed": ("def take", "def take_some", "Pool.take"),
    "an attribute that is renamed": ("self._hidden,", "self._seen,", "Scheduler._hidden"),
    "a function that is gone": ("def helper", "def helpers", "helper"),
    "a class that is gone": ("class Scheduler", "class Planner", "Scheduler"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_in_vllm_is_named(case: str, tmp_path: Path) -> None:
    old, new, name = CHANGES[case]
    before = small(tmp_path).rows
    assert VLLM.count(old) == 1
    found = list(small(tmp_path, VLLM.replace(old, new)).differences(before))
    (line,) = [line for line in found if line.startswith(f"vllm.v1.core.{name}: ")]
    says = "gone" if "renamed" in case or "gone" in case else "the snapshot has "
    assert line.partition(": ")[2].startswith(says) and "; used in vllm_cascade.ours" in line
    unused = VLLM.replace("OTHER = 4", "OTHER = 5").replace("async def stop", "def stop")
    assert unused != VLLM
    assert not list(small(tmp_path, unused).differences(before))


def test_what_a_difference_says(tmp_path: Path) -> None:
    before = small(tmp_path).rows
    vllm = VLLM.replace("LIMIT: int", "LIMIT: float")
    ours = OURS.replace("self.schedule().name", "self.stop()").replace(
        "print(request.width)", "print()"
    )
    ours = ours.replace("    waiting: list = []", "").replace("ours.rarely", "core.OTHER")
    assert list(small(tmp_path, vllm, ours).differences(before)) == [
        "vllm.v1.core.Apart.rarely: in the snapshot, but nothing uses it any more",
        "vllm.v1.core.Config.name: in the snapshot, but nothing uses it any more",
        "vllm.v1.core.Config.width: in the snapshot, but nothing uses it any more",
        "vllm.v1.core.LIMIT: the snapshot has int, the installed source float; used in "
        "vllm_cascade.ours:25",
        "vllm.v1.core.OTHER: a new use, not in the snapshot (no type); used in "
        "vllm_cascade.ours:24",
        "vllm.v1.core.Scheduler.stop: a new use, not in the snapshot (async (self) -> None); "
        "used in vllm_cascade.ours:19",
        "vllm.v1.core.Scheduler.waiting: in the snapshot, but nothing uses it any more",
    ]
    other = {**before, "vllm.v1.core.LIMIT": snapshot.Row("replaced", "int")}
    other["vllm.v1.core.Config.pool"] = snapshot.Row("used", snapshot.ABSENT)
    assert list(small(tmp_path).differences(other)) == [
        "vllm.v1.core.Config.pool: the snapshot has absent, the installed source Pool; used in "
        "vllm_cascade.ours:23, vllm_cascade.ours:25",
        "vllm.v1.core.LIMIT: replaced in the snapshot, now used; used in vllm_cascade.ours:25",
    ]


# --- the real packages ----------------------------------------------------------------------------

NEW_USE = """
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.kv_cache_utils import _new_helper
from vllm.v1.core import kv_cache_utils
from triton.runtime.cache import get_cache_manager

WORKER = "vllm.v1.worker.xpu_worker.XPUWorker"

class Store:
    pool: BlockPool

    def first(self):
        return self.pool.null_block

class Ours(Scheduler):
    def update_from_output(self, *args):
        return super().update_from_output(*args)

def look(config: VllmConfig | None, runner):
    kv_cache_utils.hash_block_tokens()
    return config.lora_config, runner.input_batch._hidden, runner.num_accepted_tokens
"""
NEW_USE_FOUND = {
    "*._hidden": "",
    "*.num_accepted_tokens": "",
    "triton.runtime.cache.get_cache_manager": "(key) -> CacheManager",
    "vllm.config.vllm.VllmConfig.lora_config": "LoRAConfig | None",
    "vllm.v1.core.block_pool.BlockPool.null_block": "",
    "vllm.v1.core.kv_cache_utils._new_helper": "absent",
    "vllm.v1.worker.xpu_worker.XPUWorker": "class",
}


def test_a_new_use_of_the_installed_vllm_is_found(tmp_path: Path) -> None:
    (tmp_path / "vllm_cascade").mkdir()
    (tmp_path / "vllm_cascade/new.py").write_text(NEW_USE)
    rows = snapshot.derive(tmp_path)["package"].rows
    assert {name: rows[name].says for name in NEW_USE_FOUND} == NEW_USE_FOUND
    scheduler = rows["vllm.v1.core.sched.scheduler.Scheduler.update_from_output"]
    assert scheduler.how == "overridden" and "model_runner_output" in scheduler.says
    assert "vllm.v1.core.kv_cache_utils.hash_block_tokens" in rows


# --- the patches ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", sorted((ROOT / "patches").glob("*.py")), ids=lambda file: file.stem
)
def test_a_patch_says_what_why_and_until_when(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    if file.stem != "__init__":
        assert docstring.startswith("Patch of ``")
        parts = re.split(r"^(What|Why|Removed when): ", docstring, flags=re.MULTILINE)
        assert parts[1::2] == ["What", "Why", "Removed when"], parts[1::2]
        assert all(len(part.split()) > 4 for part in parts[2::2])
