# SPDX-License-Identifier: Apache-2.0
"""The C++ path: odd shapes against the fp64 cache, which layers get it, how it is built."""

import ctypes
import errno
import gc
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.test_paged import CASCADE, H2O, PagedLayer, Shape, run_mixed_requests
from tests.conftest import ROOT
from tests.cpp_library import CALLS, symbols
from vllm_cascade.attention.cpu import native, paths
from vllm_cascade.kernels.cpp import build, library
from vllm_cascade.kernels.cpp.library import load
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.inputs import Stride

POLICIES = [
    {"name": "sink", "budget": 19},
    {"name": "lazy", "budget": 15, "overflow": 4, "slack": 2, "max_drop": 3},
    {"name": "beehive", "budget": 20, "window": 6, "stride": 3, "threshold": 14},
    {"name": "dgc", "budget": 20},
    {"name": "dgc", "budget": 20, "importance": "attention", "global_size": 9},
    {**H2O, "budget": 18},
    {**H2O, "budget": 18, "normalise": True},
    {**CASCADE, "budget": 24, "num_subcaches": 3},
    {**CASCADE, "budget": 24, "num_subcaches": 3, "eager_fill": False, "overflow": 3},
]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes of real models and a few of none."""
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (4, 1), (1, 4), (2, 8), (4, 3), (3, 5)]))
    head_size = draw(st.sampled_from([64, 80, 96, 128, 20]))
    return Shape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        rotary_dim=draw(st.sampled_from([head_size, head_size // 2 // 2 * 2, 8])),
        is_neox=draw(st.booleans()),
        alibi=draw(st.integers(0, 3)) == 0,
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        sinks=draw(st.integers(0, 3)) == 0,
        block_size=draw(st.sampled_from([16, 32, 128, 7])),
    )


@given(
    shape=shapes(),
    policy=st.sampled_from(POLICIES),
    head_policy=st.sampled_from(["homogeneous", "per_kv_head"]),
    reduction=st.sampled_from(["mean", "max", "median"]),
    tie=st.sampled_from(["incoming", "resident"]),
    stride=st.sampled_from([1, 6, 16, 40]),
    prompts=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    decoded=st.integers(0, 12),
    from_memory=st.booleans(),
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_shape(
    shape: Shape,
    policy: dict[str, Any],
    head_policy: str,
    reduction: str,
    tie: str,
    stride: int,
    prompts: list[int],
    decoded: int,
    from_memory: bool,
) -> None:
    """Outputs and kept tokens of mixed steps, a poisoned pool, an untouched null block."""
    chosen = {**policy, "head_policy": head_policy, "head_reduction": reduction}
    chosen |= {"tie": tie, "prefill_stride": stride}
    totals = [prompt + decoded for prompt in prompts]
    threshold = ctypes.c_int64.in_dll(symbols(), "from_memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(paths.SWITCH, "native")
        patch.setattr(threshold, "value", 0 if from_memory else 1 << 40)
        run_mixed_requests("native", shape, chosen, prompts, totals, stride, tolerance=1e-4)


IN_UNITS = [
    {"name": "sink", "budget": 64, "num_sinks": 32},
    {"name": "cascade", "budget": 128, "num_subcaches": 2, "num_sinks": 0},
    {"name": "h2o", "budget": 96, "num_sinks": 32},
    {"name": "h2o", "budget": 96, "num_sinks": 0, "normalise": True},
]


@given(
    shape=shapes(),
    policy=st.sampled_from(IN_UNITS),
    unit=st.sampled_from([2, 8, 16, 32]),
    head_policy=st.sampled_from(["homogeneous", "per_kv_head"]),
    reduction=st.sampled_from(["mean", "max", "median"]),
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    decoded=st.integers(1, 40),
    spread=st.sampled_from([1.0, 3.0, 8.0]),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_shape_in_units(
    shape: Shape,
    policy: dict[str, Any],
    unit: int,
    head_policy: str,
    reduction: str,
    prompts: list[int],
    decoded: int,
    spread: float,
) -> None:
    """Units that fill registers and others; logits so far apart that references have to follow.

    In fp32 small probabilities of those are 0 and tie, so that only sinks keep what fp64 keeps.
    """
    if policy["name"] != "sink":
        spread = min(spread, 3.0)
    shape = replace(shape, spread=spread, block_size=max(shape.block_size // 32, 1) * 32)
    chosen = {**policy, "head_policy": head_policy, "head_reduction": reduction, "unit": unit}
    totals = [prompt + decoded for prompt in prompts]
    chosen["prefill_stride"] = 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(paths.SWITCH, "native")
        run_mixed_requests("native", shape, chosen, prompts, totals, unit, tolerance=2e-4)


def test_probabilities_are_kept_for_scores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 64 heads over 2**17 slots take 32 MiB, in single slots and in whole units."""
    monkeypatch.setenv(paths.SWITCH, "native")
    shape = Shape(num_kv_heads=1, group=64)
    grown = []
    for name, unit in (("sink", 1), ("sink", 16), ("h2o", 1)):
        settings = {"name": name, "budget": 1 << 17, "num_sinks": 16, "unit": unit}
        layer = PagedLayer(shape, {**settings, "prefill_stride": 16}, (1 << 13) + 3)
        table = torch.arange(1, (1 << 13) + 3, dtype=torch.int32)[None]
        query, key = torch.randn(1, 64, 16), torch.randn(1, 1, 16)
        before = psutil.Process().memory_info().rss
        layer.step([1], [200_003], [False], table, query, key, key, lambda x, _: x)
        grown.append((psutil.Process().memory_info().rss - before) / 2**20)
    assert max(grown[:2]) < 16 and grown[2] > 32, grown


@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_units_of_half_precision(dtype: torch.dtype, head_size: int) -> None:
    """Their channels may be read in an order of its own, which outputs must not have."""
    if dtype not in load().dtypes:
        pytest.skip("this compiler has no fp16")
    shape = Shape(group=3, head_size=head_size, rotary_dim=head_size, dtype=dtype)
    chosen = {"name": "sink", "budget": 64, "unit": 16, "prefill_stride": 16}
    run_mixed_requests("native", shape, chosen, [70, 33], [110, 60], 0, tolerance=4e-2)


STRIDES = {
    "plain": Shape(num_kv_heads=1, group=3, head_size=64, rotary_dim=64),
    "no whole registers": Shape(head_size=21, rotary_dim=12, is_neox=False, block_size=7),
    "soft cap and sinks": Shape(head_size=80, rotary_dim=80, softcap=3.0, sinks=True),
    "alibi": Shape(group=4, head_size=128, alibi=True),
}


@pytest.mark.parametrize("shape", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 6e-3)], ids=str
)
def test_strides_of_half_precision(dtype: torch.dtype, tolerance: float, shape: Shape) -> None:
    """Rows of bf16 may be multiplied as they are: no further off than their own rounding."""
    if dtype not in load().dtypes:
        pytest.skip("this compiler has no fp16")
    chosen = {"name": "sink", "budget": 90, "prefill_stride": 32}
    shape = replace(shape, dtype=dtype)
    run_mixed_requests("native", shape, chosen, [133, 70], [135, 73], 0, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What queries give a prompt, beside the path in PyTorch, which computes in fp32."""
    if dtype not in load().dtypes:
        pytest.skip("this compiler has no fp16")
    found = {}
    for path in ("native", "pytorch"):
        monkeypatch.setenv(paths.SWITCH, path)
        shape = Shape(group=3, head_size=64, rotary_dim=64, dtype=dtype)
        chosen = {**H2O, "budget": 200, "prefill_stride": 32, "head_policy": "per_kv_head"}
        layer = run_mixed_requests(path, shape, chosen, [120, 60], [120, 60], 0, tolerance=4e-2)
        held = layer.pages.rank >= 0
        found[path] = torch.where(held, layer.pages.score, 0)
    assert found["native"].sum() > 30, "a share of every query"
    torch.testing.assert_close(found["native"], found["pytorch"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_do_not_change_anything(num_threads: int) -> None:
    """More requests than threads, and fewer: the work is split in two ways."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for prompts in ([7, 30, 44], [9]):
            totals = [prompt + 6 for prompt in prompts]
            chosen = {**CASCADE, "prefill_stride": 8, "head_policy": "per_kv_head"}
            run_mixed_requests("native", Shape(), chosen, prompts, totals, 3)
            chosen["head_policy"] = "homogeneous"
            run_mixed_requests("native", Shape(), chosen, prompts, totals, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_caches_cross_tiles(dtype: torch.dtype) -> None:
    """Hundreds of cached tokens: several tiles of keys, and of a stride's queries."""
    exact = dtype == torch.float32
    policy = {**CASCADE, "head_reduction": "max"} if exact else {"name": "sink"}
    chosen = {**policy, "budget": 256, "prefill_stride": 256}
    shape = Shape(num_kv_heads=1, group=3, head_size=32, rotary_dim=32, block_size=48, dtype=dtype)
    tolerance = 1e-4 if exact else 4e-2
    run_mixed_requests("native", shape, chosen, [530, 60], [532, 62], 0, tolerance=tolerance)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_scores_of_a_long_stride_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of queries share their sums; which ones does not depend on the number of threads."""
    monkeypatch.setenv(paths.SWITCH, "native")
    num_threads, num_tokens, group = torch.get_num_threads(), 4096, 8
    shape = Shape(num_kv_heads=1, group=group, block_size=128)
    query = torch.randn(num_tokens, group, 16)
    key, value = torch.randn(2, num_tokens, 1, 16)
    table = torch.arange(1, 34).int()[None]
    found = []
    try:
        for threads in (1, 3):
            settings = {**H2O, "budget": num_tokens, "prefill_stride": num_tokens}
            layer = PagedLayer(shape, settings, 34)
            stride = layer.builder.build(0, step_of([0], [num_tokens], [True], table))
            output = torch.zeros_like(query)
            torch.set_num_threads(threads)
            before = resident_bytes()
            name = SimpleNamespace(layer_name="layer")
            layer.impl.forward(name, query, key, value, layer.pool, stride, output)
            assert resident_bytes() - before < 32 << 20, "not a row for every tile"
            found.append((output, layer.pages.score.flatten()[shape.block_size :][:num_tokens]))
    finally:
        torch.set_num_threads(num_threads)
    for mine, same in zip(*found, strict=True):
        assert torch.equal(mine, same)
    scores = torch.zeros(num_tokens)
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    for head in range(group):
        logits = (query[:, head] @ key[:, 0].T / 4).masked_fill_(future, -torch.inf)
        scores += logits.softmax(-1).sum(0) / group
    torch.testing.assert_close(found[0][1], scores, atol=1e-4, rtol=1e-4)


def layer_and_pages(**settings: Any) -> tuple[Any, Any, int, Any]:
    """What ``paths.choose`` is asked about."""
    layer = PagedLayer(Shape(), {"name": "sink", "budget": 12, **settings}, 3)
    return layer.impl._layer, layer.pages, 4, layer.spec.schedule


def test_what_the_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    config, pages, heads, schedule = layer_and_pages()
    assert native.refusal(config, pages, heads, schedule, load()) is None
    together = replace(config, gather_heads=lambda mass: mass)
    assert native.refusal(together, pages, heads, schedule, load()) is None
    gathering = replace(together, uses_attention=True)
    assert "tensor-parallel" in native.refusal(gathering, pages, heads, schedule, load())
    assert "more than 256" in native.refusal(config, pages, 512, schedule, load())
    no_fp32 = SimpleNamespace(dtypes=set(), codes=set())
    assert "torch.float32" in native.refusal(config, pages, heads, schedule, no_fp32)
    moving = compiled(resolve({"name": "dgc", "budget": 9, "importance": "cluster"}))
    assert "dgc" in native.refusal(config, pages, heads, moving, load())
    assert type(paths.choose(gathering, pages, heads, schedule)) is paths.PyTorchPath
    monkeypatch.setenv(paths.SWITCH, "native")
    with pytest.raises(KVPolicyError, match="VLLM_CASCADE_CPU=native cannot be: tensor-parallel"):
        paths.choose(gathering, pages, heads, schedule)


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = layer_and_pages()
    assert type(paths.choose(*asked)) is native.NativePath
    monkeypatch.setenv(paths.SWITCH, "pytorch")
    assert type(paths.choose(*asked)) is paths.PyTorchPath
    monkeypatch.setenv(paths.SWITCH, "numba")
    with pytest.raises(KVPolicyError, match="numba: set it to native or pytorch"):
        paths.choose(*asked)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs, and the log says so once."""
    asked = layer_and_pages()
    warnings: list[str] = []
    monkeypatch.setattr(paths.logger, "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(paths, "load", load.__wrapped__)
    caches = paths._library, paths._say_once
    for cached in caches:
        cached.cache_clear()
    try:
        for _ in range(2):
            assert type(paths.choose(*asked)) is paths.PyTorchPath
        assert len(warnings) == 1 and "no C++ compiler (no-such-compiler)" in warnings[0]
        monkeypatch.setenv(paths.SWITCH, "native")
        with pytest.raises(KVPolicyError, match="no C\\+\\+ compiler"):
            paths.choose(*asked)
    finally:
        for cached in caches:
            cached.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that notes every compile."""
    script = tmp_path / "cxx"
    script.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            case "$*" in *--version) echo 1.0; exit;; esac
            echo compiled >> {tmp_path}/log
            sleep 0
            while [ "$1" != -o ]; do shift; done
            echo library > "$2"
        """)
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_compiled_once(compiler: Path, tmp_path: Path) -> None:
    """By any number of processes at the same time; another compiler makes another library."""
    compiler.write_text(compiler.read_text().replace("sleep 0", "sleep 0.5"))
    folder = tmp_path / "cache"
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "kernels" / "cpp")!r})
from pathlib import Path; import build
print(build.build(Path({str(folder)!r})))
"""
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    built = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(built) == 1 and all(process.returncode == 0 for process in processes)
    assert build.build(folder) == Path(built.pop())
    assert (tmp_path / "log").read_text() == "compiled\n"
    names = sorted(re.sub("-[^.]*", "", file.name) for file in folder.iterdir())
    assert names == ["attention.so", "attention.so.sha256", "lock"]
    compiler.write_text(compiler.read_text().replace("echo 1.0", "echo 2.0"))
    build.build(folder)
    assert (tmp_path / "log").read_text() == "compiled\n" * 2


def test_every_compile_has_a_file_of_its_own(compiler: Path, tmp_path: Path) -> None:
    """Containers and hosts that share the folder may have equal process ids, and locks apart."""
    compiler.write_text(compiler.read_text() + f'echo "$2" >> {tmp_path}/partial\n')
    for _ in range(2):
        build.build(tmp_path / "cache").write_text("damaged")
    first, second = (tmp_path / "partial").read_text().split()
    assert first != second and Path(first).parent == Path(second).parent == tmp_path / "cache"
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_compile_error(compiler: Path, tmp_path: Path) -> None:
    script = compiler.read_text().replace("sleep 0", "echo 'x.cpp:1: error: odd' >&2; exit 1")
    compiler.write_text(script)
    with pytest.raises(build.BuildError, match=r"failed: x\.cpp:1: error: odd"):
        build.build(tmp_path / "cache")
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["lock"]


X86 = """processor\t: 0
model name\t: Some Processor
cpu MHz\t\t: {clock}
flags\t\t: fpu sse2 {extension}
bogomips\t: 5000.00
"""
S390X = """vendor_id       : IBM/S390
# processors    : 2
bogomips per cpu: {clock}
features\t: esan3 zarch {extension}
processor 0: version = 00,  identification = 0133E8,  machine = 8561

cpu number      : 0
cpu MHz dynamic : {clock}
"""


@pytest.mark.parametrize("cpuinfo", [X86, S390X], ids=["x86", "s390x"])
def test_processors_have_libraries_of_their_own(
    cpuinfo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their extensions tell them apart; their clocks change all the time."""

    def processor(extension: str, clock: str) -> str:
        text = cpuinfo.format(extension=extension, clock=clock)
        monkeypatch.setattr(build.Path, "read_text", lambda _: text)
        return build._processor()

    before = processor("one", "2500.113")
    assert before == processor("one", "3100.902")
    assert before != processor("another", "2500.113")
    if cpuinfo == X86:
        assert before == "model name\t: Some Processor\nflags\t\t: fpu sse2 one"


LD = "/usr/bin/ld: cannot find -lomp: No such file or directory"
FULL = "/usr/bin/ld: final link failed: No space left on device"


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (f"/usr/bin/ld: warning: x\n{LD}\ncollect2: error: ld returned 1 exit status", LD),
        (f"{LD}\nclang: error: linker command failed with exit code 1", LD),
        (f"{FULL}\ncollect2: error: ld returned 1 exit status", f"{FULL}; set VLLM_CACHE_ROOT"),
        ("x.cpp:1: note: odd\nx.cpp:2: error: odder\nx.cpp:3: error: oddest", "x.cpp:2: error: o"),
        ("/usr/bin/ld: odd\ncollect2: error: ld returned 1 exit status", "/usr/bin/ld: odd"),
        ("collect2: error: ld returned 1 exit status", "collect2: error"),
        ("Fehler: \udcff", "Fehler: "),
        ("", "no message"),
    ],
)
def test_why_a_compile_failed(stderr: str, message: str, compiler: Path, tmp_path: Path) -> None:
    """A linker's own lines have no word in common, and come before its caller's."""
    (tmp_path / "stderr").write_text(stderr, errors="surrogateescape")
    script = compiler.read_text()
    compiler.write_text(script.replace("sleep 0", f"cat {tmp_path}/stderr >&2; exit 1"))
    with pytest.raises(build.BuildError, match=re.escape(f"failed: {message}")):
        build.build(tmp_path / "cache")


def test_compilers_speak_english(compiler: Path, tmp_path: Path) -> None:
    script = compiler.read_text().replace("sleep 0", 'echo "error: $LC_ALL" >&2; exit 1')
    compiler.write_text(script)
    with pytest.raises(build.BuildError, match=r"failed: error: C$"):
        build.build(tmp_path / "cache")


@pytest.mark.parametrize("form", ["launcher", "options", "relative", "blank in its name"])
def test_compilers_as_build_systems_name_them(
    form: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spaced = compiler.rename(tmp_path / "c xx") if form.startswith("blank") else compiler
    named = {
        "launcher": f"env {compiler}",
        "options": f"{compiler} -m64",
        "relative": "./cxx",
        "blank in its name": str(spaced),
    }
    monkeypatch.setenv("CXX", named[form])
    first = build.build(tmp_path / "cache")
    assert first.read_text() == "library\n"
    monkeypatch.setenv("CXX", f"{named[form]} -O1")
    assert form.startswith("blank") or build.build(tmp_path / "cache") != first


@pytest.mark.parametrize("name", ["", " ", "no-such-compiler c++", "'c++"])
def test_compilers_that_are_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", name)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build()


def test_compiles_for_aarch64() -> None:
    """Its GCC 12 has ``__FLT16_MAX__`` without the type ``_Float16``."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no aarch64-linux-gnu-g++")
    flags = [flag for flag in build.FLAGS if flag not in ("-march=native", "-shared")]
    for source in build.sources():
        command = [compiler, *flags, "-Wall", "-Werror", "-fsyntax-only", str(source)]
        subprocess.run(command, check=True, timeout=120)


def test_two_openmp_runtimes_are_refused() -> None:
    """As clang++ links: another pool of threads, on the same cores."""
    threads = torch.get_num_threads()
    found = []

    def set_threads(number: int) -> None:
        found.append(number)

    assert not library._shares_threads(SimpleNamespace(set_threads=set_threads))
    assert found == [threads + 1, threads]
    assert library._shares_threads(symbols())
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("call", ["flock", "replace", "statvfs"])
def test_a_cache_that_cannot_be_used(
    call: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks that a file system does not have, a disk that is full: the caller runs in PyTorch."""

    def refused(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(build.fcntl if call == "flock" else build.os, call, refused)
    with pytest.raises(build.BuildError, match=r"cache: .*No locks available; set VLLM_CACHE_ROOT"):
        build.build(tmp_path / "cache")


@pytest.mark.parametrize("damage", ["short", "changed", "empty", "without note"])
def test_a_library_that_is_not_whole_is_made_again(
    damage: str, compiler: Path, tmp_path: Path
) -> None:
    """It would end the process that loads it, with a bus error."""
    built = build.build(tmp_path)
    assert build.build(tmp_path) == built and (tmp_path / "log").read_text() == "compiled\n"
    if damage == "without note":
        built.with_suffix(".so.sha256").unlink()
    else:
        built.write_text({"short": "libr", "changed": "Library\n", "empty": ""}[damage])
    assert build.build(tmp_path) == built and built.read_text() == "library\n"
    assert (tmp_path / "log").read_text() == "compiled\n" * 2


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in this test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_folder_that_cannot_be_written(compiler: Path, tmp_path: Path, temporary: Path) -> None:
    """One other folder, and one compile, for all processes of this user."""
    (tmp_path / "file").write_text("")
    built = build.build(tmp_path / "file" / "cache")
    assert built.read_text() == "library\n"
    assert built.parent == temporary / f"vllm_cascade-{os.getuid()}"
    assert built.parent.stat().st_mode & 0o777 == 0o700
    assert build.build(tmp_path / "file" / "cache") == built
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert [file.name for file in temporary.iterdir()] == [built.parent.name]


def test_a_temporary_folder_of_somebody_elses(
    compiler: Path, tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "file").write_text("")
    (temporary / f"vllm_cascade-{os.getuid()}").mkdir()
    (temporary / f"vllm_cascade-{os.getuid()}").chmod(0o777)
    with pytest.raises(build.BuildError, match="not this user's alone; remove it, or set VLLM_CA"):
        build.build(tmp_path / "file" / "cache")


def forbid(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Mount them with ``noexec``, as far as Python is told."""
    ask = os.statvfs

    def statvfs(path: Path) -> Any:
        if not any(Path(path).is_relative_to(folder) for folder in folders):
            return ask(path)
        return SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)

    monkeypatch.setattr(build.os, "statvfs", statvfs)


def test_a_folder_without_execution(
    compiler: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is there already does not load either."""
    cache = tmp_path / "cache"
    before = build.build(cache)
    forbid(monkeypatch, cache)
    built = build.build(cache)
    assert built.name == before.name and built.parent.parent == temporary
    forbid(monkeypatch, cache, temporary)
    with pytest.raises(build.BuildError, match=r"noexec.*; set VLLM_CACHE_ROOT to another folder"):
        build.build(cache)


def test_why_the_library_is_elsewhere_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that can be written may be mounted so that nothing in it is executed."""
    elsewhere = SimpleNamespace(path=tmp_path / "elsewhere" / "attention.so")
    monkeypatch.setattr(paths, "load", lambda: elsewhere)
    monkeypatch.setattr(paths, "cache_folder", lambda: tmp_path / "cache")
    with caplog.at_level("WARNING", logger=paths.logger.name):
        assert paths._library.__wrapped__() == (elsewhere, "")
    assert f"{tmp_path}/cache cannot be used (read-only, or mounted with noexec)" in caplog.text
    assert "can be written and whose files may be executed" in caplog.text


def test_a_folder_below_one_that_may_not_be_searched(
    compiler: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``/root`` for a user of a container."""

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "exists", denied)
    assert build.build(tmp_path / "file" / "cache").parent.parent == temporary


def test_a_folder_with_another_users_lock(
    compiler: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if file == tmp_path / "cache" / "lock" and mode != "r":
            raise PermissionError(13, "Permission denied")
        return open(file, mode, *args, **kwargs)

    monkeypatch.setattr(build, "open", refusing, raising=False)
    assert build.build(tmp_path / "cache").parent.parent == temporary


def test_a_library_on_a_path_that_is_only_read(
    compiler: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build.build(tmp_path / "cache")

    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert build.build(tmp_path / "cache") == built and not list(temporary.iterdir())
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/a")
    assert build.cache_folder() == Path("/a/vllm_cascade")
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert build.cache_folder() == Path("/b/vllm/vllm_cascade")


@pytest.mark.parametrize("root", ["~/.cache", "cache"])
def test_cache_folder_without_a_home(
    root: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own then: in the working directory, also if a user has no home directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", root)

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert build.cache_folder() == tmp_path / root / "vllm/vllm_cascade"
    assert build.build().parent == build.cache_folder()


def test_no_stride_outlives_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With recall a stride refers to its request's store, which would stay in memory."""
    monkeypatch.setenv(paths.SWITCH, "native")
    before = CALLS["strides"]
    run_mixed_requests("native", Shape(), {**CASCADE, "prefill_stride": 16}, [40], [42], 3)
    assert CALLS["strides"] > before
    assert not [found for found in gc.get_objects() if isinstance(found, Stride)]
