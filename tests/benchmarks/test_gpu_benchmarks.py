# SPDX-License-Identifier: Apache-2.0
"""The GPU scripts on a machine without one: their own code, with tiny sizes, as a user runs it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_gpu_check_interpreted(tmp_path: Path) -> None:
    done = run("benchmarks.gpu_check", "--interpret", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu_check_interpreted.json").read_text())
    assert result["correct"] and len(result["checks"]) > 20
    assert result["interpreted"]
    for kind in ("attend", "prefill"):
        assert all(row["ms"] > 0 for row in result[kind]) and result[kind]
    assert {row["scored"] for row in result["layer"]} == {True, False}
    assert all(row["and_insert_us"] > 0 for row in result["layer"])
    assert "times mean nothing" in done.stdout and "0 failed" in done.stdout


def test_gpu_check_writes_how_long_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks run beside each other, and its timings have no time of their own."""
    from benchmarks import gpu_check

    def found(*_: object) -> dict[str, Any]:
        time.sleep(0.2)
        timings = {kind: [] for kind in gpu_check.KINDS}
        return {"correct": True, "environment": {"gpu": None}, "copy_gbps": 1.0, **timings}

    monkeypatch.setattr(gpu_check, "run", found)
    assert gpu_check.main(["--interpret", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "gpu_check_interpreted.json").read_text())
    assert 0.2 <= written["seconds"] < 30


def test_gpu_check_needs_neither_vllm_nor_the_plugin() -> None:
    code = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from benchmarks.gpu.kernels_alone import ROOT, without_the_plugin
without_the_plugin()
import benchmarks.gpu_check, benchmarks.gpu.timings
from tests.kernels.checks import check_schedule
check_schedule("cpu")
kernels = sys.modules["vllm_cascade.kernels.triton.schedule"]
assert kernels.__file__ == str(ROOT / "kernels" / "triton" / "schedule.py")
ours = {name.split(".")[1] for name in sys.modules if name.startswith("vllm_cascade.")}
print(sorted(ours), "vllm" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "['kernels'] False", done.stdout + done.stderr


def test_a_process_with_the_plugin_keeps_it() -> None:
    import vllm_cascade
    from benchmarks.gpu.kernels_alone import without_the_plugin

    without_the_plugin()
    assert sys.modules["vllm_cascade"] is vllm_cascade and callable(vllm_cascade.register)


def test_gpu_check_reports_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that raises is a failed check, not a crash, and the verdict says so."""
    from tests.kernels import card_checks, checks

    def broken(*_: object) -> None:
        raise AssertionError("output: error 1e+00 > 3e-05")

    wrong = ("decode", "prefill", "insert", "assign", "insert_strides", "chunks", "split")
    for name in (f"check_{kernel}" for kernel in wrong):
        monkeypatch.setattr(checks, name, broken)
    rows = card_checks.correctness("cpu", interpret=True)
    failed = [row for row in rows if row["error"]]
    recall = [row for row in rows if row["check"].split()[0] in ("judge", "recall", "store")]
    assert recall and not any(row["error"] for row in recall)
    others = {"schedule", "schedule, units", "rotation table", "insert units"}
    others |= {"drafts fp32", "drafts bf16", "drafts units"}
    right = {row["check"] for row in rows if not row["error"] and row not in recall}
    assert right == others and len(failed) > 40
    assert failed[0]["error"] == "AssertionError: output: error 1e+00 > 3e-05"


def test_gpu_check_without_a_gpu_says_what_to_do() -> None:
    done = run("benchmarks.gpu_check", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--interpret" in done.stderr


def test_an_engine_that_is_compared_starts_as_by_default() -> None:
    """On a GPU with no bytes of cache and with CUDA graphs, whose memory vLLM then measures."""
    from benchmarks.gpu_engine import COMPARED, POLICIES, jobs
    from tests.engine.on_device import start

    told = start(tiny=False)
    assert "gpu_memory_utilization" in told
    assert not {"kv_cache_memory_bytes", "enforce_eager"} & set(told)
    wanted = jobs(False, list(POLICIES), [one.kind for one in COMPARED], [])
    families = ["gemma3", "gpt-oss", "llama4", "gemma3n"]
    families += ["deepseek-v2", "deepseek-v2", "lfm2", "granite4"]
    assert [job["family"] for job in wanted if "family" in job] == families
    others = {(job["kind"], job["label"]) for job in wanted if "family" not in job}
    assert len(others) == len(wanted) - len(families)
    assert {kind for kind, _ in others} == {"drafts", "8 bits", "sessions"}


def test_every_policy_is_compared() -> None:
    from benchmarks.gpu_engine import POLICIES
    from vllm_cascade.policies.registry import _built_in

    assert {policy["name"] for policy in POLICIES.values()} == {*_built_in()}


def test_engines_on_a_card_do_not_run_kernels_in_the_interpreter() -> None:
    """As all tests do once ``tests/conftest.py`` is imported."""
    names = "os, benchmarks.gpu_engine, tests.oracle.families, tests.oracle.recurrent"
    names += ", tests.oracle.random_models, tests.oracle.full_attention, tests.oracle.model"
    code = f"import {names}; print(os.environ.get('TRITON_INTERPRET'))"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == "None", done.stdout + done.stderr


def test_speeds_are_of_decoding_alone() -> None:
    """A fake engine reads a token in 1 ms and decodes a step in 10 ms."""
    from benchmarks.gpu_engine import measured

    calls: list[tuple[int, int, int]] = []

    def seconds(requests: int, context: int, tokens: int) -> float:
        calls.append((requests, context, tokens))
        return requests * context * 1e-3 + (tokens - 1) * 1e-2

    many, alone = measured(seconds, 8, (100,), (300,), 257)
    assert many["first_token_s"] == pytest.approx(0.1) and many["total_s"] == pytest.approx(3.36)
    assert many["prompt_tokens_per_s"] == pytest.approx(1000)
    assert many["output_tokens_per_s"] == pytest.approx(8 / 1e-2)
    assert alone == {"context": 300, "first_token_s": pytest.approx(0.3)}
    assert calls == [
        (8, 100, 2),
        *[(1, 100, 1)] * 3,
        (8, 100, 1),
        (8, 100, 257),
        *[(1, 300, 1)] * 3,
    ]


def test_the_speed_of_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine waits until this one's process has ended; its time limit waits, too."""
    from benchmarks import gpu_engine

    given: list[dict[str, int]] = []

    def stopwatch(*_: object, **arguments: int) -> object:
        given.append(arguments)
        return lambda *_: 1.0

    def flock(*arguments: int) -> None:
        limits.append(signal.getitimer(signal.ITIMER_REAL)[0])
        lock(*arguments)

    limits, lock = [], fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(gpu_engine, "stopwatch", stopwatch)
    turn = tmp_path / "turn"
    own = {"contexts": (32000,), "alone": (), "turn": str(turn)}
    signal.setitimer(signal.ITIMER_REAL, 90)
    (row,) = gpu_engine.speed(None, "stock", "8B", False, 4, **own)
    assert 80 < signal.setitimer(signal.ITIMER_REAL, 0)[0] < 90 and limits == [0]
    assert row["context"] == 32000 and given[0]["max_model_len"] == 32000 + 257
    with turn.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("model", ["1B", "8B"])
def test_stock_vllm_has_room_for_the_longest_request(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default lengths. vLLM counts the null block too; every arm has as many bytes."""
    from benchmarks import gpu_engine
    from benchmarks.running.engines import EngineSettings
    from benchmarks.running.pools import page_bytes

    given: list[dict[str, int]] = []

    def stopwatch(*_: object, **arguments: int) -> object:
        given.append(arguments)
        return lambda *_: 1.0

    monkeypatch.setattr(gpu_engine, "stopwatch", stopwatch)
    lengths = {"contexts": gpu_engine.CONTEXTS, "alone": gpu_engine.ALONE}
    for policy in (None, {"name": "cascade"}):
        gpu_engine.speed(policy, "", model, False, 64, **lengths)
    stock, ours = (arguments["kv_cache_memory_bytes"] for arguments in given)
    path = str(gpu_engine.CONFIGS / f"llama-{model.lower()}")
    page = page_bytes(EngineSettings(model=path, dtype="bfloat16", block_size=16))
    assert given[0]["max_model_len"] == 130_000 + 257
    assert stock == ours and stock >= 8 << 30
    assert stock // page >= -(-given[0]["max_model_len"] // 16) + 1


def test_an_engine_that_differs_is_reported() -> None:
    """As plain values, which JSON takes."""
    import numpy as np

    from tests.engine.on_device import alike

    def row(*values: float) -> list[Any]:
        return [np.array(values)]

    assert alike(row(1e-5, 4e-4), []) is True and alike(row(1e-5, 6e-4), []) is False
    assert alike(row(0.0, 0.02), row(0.1, 0.02)) is True
    assert alike(row(0.0, 0.02), row(0.05, 0.04)) is False


def test_our_kernels_that_are_compiled_late() -> None:
    """vLLM's monitor says so in its log; its own kernels do not count."""
    from vllm.utils import jit_monitor

    from tests.engine.on_device import LateKernels
    from vllm_cascade.kernels.triton import attend

    late = LateKernels()
    assert late.names() == []
    for name in ("_topk_log_softmax_kernel", attend._attend.__name__):
        jit_monitor._log_triton_jit_compile(name, {})
    assert late.names() == ["_attend"] and len(late.compiled) == 2


def test_processes_that_check_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """References run on the CPU; 14 processes of 16 threads each did not finish on a card."""
    import torch

    from benchmarks import gpu_check
    from tests.kernels import card_checks

    def count(*_: object) -> list[dict[str, int]]:
        return [{"threads": torch.get_num_threads()}]

    monkeypatch.setattr(card_checks, "correctness", count)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert gpu_check.part_of_checks(True, 0, 1) == [{"threads": 1}]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("cores", "free_gib", "workers"), [(192, 139, 16), (16, 139, 14), (16, 7.9, 7), (2, 139, 1)]
)
def test_processes_that_check_fit_on_the_machine(
    cores: int, free_gib: float, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from benchmarks.gpu_check import default_workers

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gib * (1 << 30)), 1 << 40))
    assert default_workers(interpret=False) == workers
    assert default_workers(interpret=True) == max(1, min(cores - 2, 16))


def test_dense_attention_is_timed_on_other_keys_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are; the same keys again would be in the L2 cache, where one request's fit."""
    import torch

    from benchmarks.gpu import timings

    keys: list[int] = []

    def dense(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        keys.append(key.data_ptr())
        return query

    class OnCard(timings.Bench):
        on_gpu = True

        def replayed(self, call: Any) -> float:
            for _ in range(16):
                call()
            return 1.0

    card = SimpleNamespace(L2_cache_size=4096)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(timings, "SDPA", dense)
    monkeypatch.setattr(timings.Layer, "attend", lambda *_: None)
    bench = OnCard(torch.device("cpu"), float("inf"))
    (row,) = timings.attend_rows(bench, timings.TINY, 1.0)
    moved = 2 * 24 * 2 * 16 * 2  # requests, tokens, keys and values, channels, bytes
    assert len(set(keys)) == -(-2 * 4096 // moved) == 3 and row["sdpa_ms"] == 1.0


def test_engines_are_timed_after_all_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own time is written: two engines at once each take as long."""
    from benchmarks import gpu_engine

    groups: list[list[str]] = []

    def outcomes(_: object, jobs: list[dict[str, Any]], at_a_time: int) -> list[Any]:
        groups.append([job["kind"] for job in jobs])
        assert at_a_time == 2
        time.sleep(0.2)
        return [(place, [{"equal": True}]) for place in range(len(jobs))]

    monkeypatch.setattr(gpu_engine, "outcomes", outcomes)
    monkeypatch.setattr(gpu_engine, "start", lambda: None)
    arguments = ["--kinds", "speed", "drafts", "--policies", "cascade", "--at-once", "2"]
    assert gpu_engine.main([*arguments, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "gpu_engine.json").read_text())
    assert 0.4 <= written["seconds"] < 30
    assert groups == [["drafts"] * 4, ["speed"] * 2]


def test_the_check_of_the_first_start_is_timed() -> None:
    """Here it compares C++ with PyTorch, for the small layer."""
    from benchmarks.gpu_engine import POLICIES, check

    (row,) = check(POLICIES["cascade in units"], "cascade in units", tiny=True)
    assert row["comparisons"] > 10 and row["largest_error"] < 2e-4 and row["check_s"] > 0


TINY_KINDS = {
    "policies": ("identity", "check", "speed"),
    "families": ("windows", "latent", "recurrent"),
    "drafts and rows": ("drafts", "8 bits"),
    "sessions": ("sessions",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_KINDS)
def test_gpu_engine_tiny(name: str, tmp_path: Path) -> None:
    """All kinds, with toy sizes. Of each speed engine a row of many requests, then one alone."""
    from benchmarks.gpu_engine import COMPARED, KINDS

    assert {kind for kinds in TINY_KINDS.values() for kind in kinds} == set(KINDS)
    arguments = ("--tiny", "--policies", "stock", "cascade", "--kinds", *TINY_KINDS[name])
    done = run("benchmarks.gpu_engine", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_engine_tiny.json").read_text())["rows"]
    kinds = [one.kind for one in COMPARED if one.kind in TINY_KINDS[name]]
    if name == "policies":
        kinds = ["identity", "check", *["speed"] * 4]
        measured = rows[2:]
        assert all(row["first_token_s"] > 0 for row in measured)
        assert ["output_tokens_per_s" in row for row in measured] == [True, False] * 2
        assert all(row.get("output_tokens_per_s", 1) > 0 for row in measured)
    assert [row["what"] for row in rows] == kinds
    assert all(row["equal"] and row["evicted"] > 0 for row in rows if "equal" in row)
    engines = {(row["what"], row["policy"]) for row in rows}
    assert len(list((tmp_path / "logs").glob("*.log"))) == len(engines)


def machine(folder: Path, python: str) -> tuple[Path, dict[str, str]]:
    """A copy of the script in a repository with three wheels, and variables for its run.

    Args:
        python: lines of a shell script that runs instead of Python.
    """
    for name in ("benchmarks", "tests", "dist", "bin", "tmp"):
        (folder / name).mkdir()
    script = folder / "benchmarks/gpu_machine.sh"
    script.write_text((ROOT / "benchmarks/gpu_machine.sh").read_text())
    for age, version in enumerate(("0.2.0", "0.1.0", "0.3.0")):
        wheel = folder / f"dist/vllm_cascade-{version}-py3-none-any.whl"
        wheel.touch()
        os.utime(wheel, (1e9 - age, 1e9 - age))
    fake = folder / "bin/python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {folder}/ran\n{python}\n')
    fake.chmod(0o755)
    path = f"{folder}/bin:{os.environ['PATH']}"
    return script, {"PATH": path, "TMPDIR": str(folder / "tmp")}


def test_the_machines_script_takes_the_newest_wheel(tmp_path: Path) -> None:
    """``make wheel`` leaves older ones in dist/; the folder that it is unpacked in goes again."""
    script, env = machine(tmp_path, "")
    command = ["bash", str(script), "measure", str(tmp_path / "out"), "--models", "8B"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unpacked, engine = (tmp_path / "ran").read_text().splitlines()
    words = ["-m", "zipfile", "-e", "dist/vllm_cascade-0.2.0-py3-none-any.whl"]
    assert unpacked.split()[:-1] == words
    assert engine.split()[:2] == ["-m", "benchmarks.gpu_engine"] and "8B" in engine
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("kernels", "engines", "writes", "status"),
    [(0, 0, True, 0), (1, 0, True, 1), (0, 1, True, 1), (2, 1, True, 2), (1, 2, False, 2)],
)
def test_the_machines_script_compares_whatever_fails(
    kernels: int, engines: int, writes: bool, status: int, tmp_path: Path
) -> None:
    """Engines after a failed kernel; what was written is kept, the worst status is returned."""
    out = tmp_path / "out"
    write = f"echo found > {out}/gpu_engine.json" if writes else ":"
    python = f"""case $2 in
benchmarks.gpu_check) exit {kernels} ;;
benchmarks.gpu_engine) {write}; exit {engines} ;;
esac"""
    script, env = machine(tmp_path, python)
    out.mkdir()
    command = ["bash", str(script), "correct", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    ran = [line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()]
    assert ran == ["benchmarks.gpu_check", "zipfile", "benchmarks.gpu_engine"], done.stderr
    assert done.returncode == status
    assert [file.name for file in out.iterdir()] == ["gpu_engine_identity.json"] * writes
    assert not list((tmp_path / "tmp").iterdir())


def test_no_engine_runs_without_a_wheel(tmp_path: Path) -> None:
    """A wheel that cannot be unpacked would leave the comparisons without the plugin."""
    script, env = machine(tmp_path, '[ "$2" != zipfile ]')
    command = ["bash", str(script), "correct", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    ran = [line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()]
    assert ran == ["benchmarks.gpu_check", "zipfile"] and done.returncode == 1
    assert not list((tmp_path / "tmp").iterdir())
